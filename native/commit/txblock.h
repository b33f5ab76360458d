/* Transaction blocks: `with store.transaction()`.
 *
 * One belongs to the thread that enters it and, if task is not 0, to that task of an event loop
 * of the thread. While it is open, calls by others that change the store answer PMS_E_BUSY; they
 * may read. What others store into arrays belongs to it. One whose thread or task has ended is
 * rolled back by the first call that it is in the way of. */
#ifndef PMS_COMMIT_TXBLOCK_H
#define PMS_COMMIT_TXBLOCK_H

#include "commit/pool.h"

/* one time that one was entered; depth 1: the outermost */
struct pms_entered {
    uint64_t number;
    int32_t depth;
};

enum pms_whose { PMS_ANOTHERS, PMS_MINE, PMS_OVER }; /* OVER: of a task that has ended */

/* For a program that has tasks: whose *task is, asked with no lock held. Once in a process,
 * before there are any. */
void pms_txblock_set_tasks(enum pms_whose (*whose)(const _Atomic uint64_t *task));

/* Enters one. Outermost: waits for another thread's, and commits what is pending if commit is
 * set; else pms_txblock_commit_pending does. Nested: only counts.
 * ERRORS: PMS_E_BUSY after timeout_ns (< 0: for ever; holder 0: of another task of this thread,
 * at once). */
int pms_txblock_enter(struct pms_pool *pool, uint64_t task, int commit, int64_t timeout_ns,
                      struct pms_entered *entry, struct pms_error *error);

/* REQUIRES: the outermost entry, nothing has been written in it. ERRORS: those of a commit;
 * PMS_E_STATE: it was rolled back. */
int pms_txblock_commit_pending(struct pms_pool *pool, const struct pms_entered *entry,
                               struct pms_error *error);

/* Leaves one. Outermost: ends it, however often it was entered. PMS_AS_IT_IS: what is
 * pending stays so.
 * ERRORS: PMS_E_STATE: it is over; or, with a holder, it is to be committed by somebody
 * else than its owner: nothing is changed. */
enum pms_how { PMS_UNDO, PMS_COMMIT, PMS_AS_IT_IS };
int pms_txblock_leave(struct pms_pool *pool, const struct pms_entered *entry, enum pms_how how,
                      struct pms_error *error);

/* Waits until no other thread is in one. ERRORS: PMS_E_BUSY; PMS_E_STATE: one whose owner
 * had ended was rolled back. */
int pms_txblock_wait(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error);

/* The same without tasks, left in the order in which they were entered. */
int pms_begin(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error);
int pms_end(struct pms_pool *pool, int commit, struct pms_error *error);

/* Outside of them (in one: PMS_E_STATE; in another thread's: PMS_E_BUSY). */
int pms_commit(struct pms_pool *pool, struct pms_error *error);
int pms_rollback(struct pms_pool *pool, struct pms_error *error);
int pms_txblock_depth(struct pms_pool *pool); /* of the caller's; 0: none */

/* ---- inside the engine ---- */

/* As pms_pool_enter_beside, for changes. ERRORS also: PMS_E_BUSY: one is open that is not the
 * caller's. */
int pms_pool_enter_write(struct pms_pool *pool, struct pms_error *error);
/* As pms_pool_enter_write, while none is open. ERRORS also: PMS_E_STATE, PMS_E_BUSY. what:
 * for the message. */
int pms_pool_enter_alone(struct pms_pool *pool, const char *what, struct pms_error *error);

/* REQUIRES in these two: the operation lock. */
/* Whether one is open that can be waited for. */
bool pms_txblock_of_another_thread(const struct pms_pool *pool);
/* None is open any more. */
void pms_txblock_forget(struct pms_pool *pool);

#endif
