/* Idle blocks: live, but what they hold is of no account to the last commit (the other slot of a
 * pair, where the next version is made). They are written without capture, and nothing of them
 * is written back until they are published.
 *
 * I3 for slots: the slot that the last commit names is captured like anything else; the idle one
 * holds no byte that was live. Publishing does not change which one is named: that is ordinary
 * logged data, stored in the same transaction. */
#ifndef PMS_LOG_IDLE_H
#define PMS_LOG_IDLE_H

#include "log/undo.h"

/* Whole pages of one extent may be stored to without capture, from now on, over commits and roll
 * backs, until they are published or closed. What open snapshots need of them is kept first
 * (I6); that may wait.
 * REQUIRES: the operation lock; the last commit does not need what is there (not
 * pms_idle_is_left); the block was not born in this transaction. */
void pms_idle_open(struct pms_undo *u, uint64_t off, uint64_t len);

/* Its first `used` bytes (whole pages) are part of this transaction: written back at its commit;
 * all of it is read-only after it. A roll back leaves undefined content. What open snapshots
 * need of a block that was not idle is kept first (I6); that may wait. */
void pms_idle_publish(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t used);
/* REQUIRES: the log lock; it is idle */
void pms_idle_publish_locked(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t used);

/* A pair of slots turns away from this block: until the transaction is over, the last commit
 * names it, and it must not be opened. */
void pms_idle_leave(struct pms_undo *u, uint64_t off);
bool pms_idle_is_left(const struct pms_undo *u, uint64_t off);
/* the last transaction that turned away from it, since open */
uint64_t pms_idle_left_by(const struct pms_undo *u, uint64_t off);

/* An idle block is about to be freed: its pages are captured again like all others. Nothing
 * happens if it is not idle. */
void pms_idle_close(struct pms_undo *u, uint64_t off, uint64_t len);

bool pms_idle_is(const struct pms_undo *u, uint64_t off);

#endif
