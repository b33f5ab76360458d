/* The last step of a close: the file is unlocked when no view shows pages of it any more.
 *
 * The file is whole and marked clean before. A thread copies what live views show of it, by all
 * cores, and the close has returned; others who open the file meanwhile wait (store/filelock.c).
 * A process that ends copies nothing: its death unlocks. */
#ifndef PMS_COMMIT_UNLOCK_H
#define PMS_COMMIT_UNLOCK_H

struct pms_pool;

/* Its views are about to show pages of the file that nobody else keeps from others. REQUIRES: the
 * operation lock. */
void pms_unlock_begin(struct pms_pool *pool);

/* Copies and unlocks: at once where there is little to do, else a thread does it. REQUIRES: the
 * operation lock; the store is closed, but for views and lock. */
void pms_unlock(struct pms_pool *pool);

/* The program ends: nothing is copied for ten seconds, for mostly it is never needed. */
void pms_unlock_exiting(void);

/* Somebody waits: no grace. */
void pms_unlock_hurry(void);

/* Once. A fork waits until all is copied: a child has no lock that keeps others from the file. What
 * cannot be copied for want of memory is no view of the child's. */
void pms_unlock_prepare_once(void);

#endif
