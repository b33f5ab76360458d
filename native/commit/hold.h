/* The held version: what the last commit overwrote, until it is released.
 *
 * In the byte-addressable domains a transaction's log is kept after its commit (log/held.h), and
 * the next one has the other half of it. What the version needs beside the log stays as it is:
 *
 *   blocks that were freed   are not used again (heap/hold.c)
 *   slots that were flipped  the idle one is that version: to open it is to release it
 *
 * Released it is by the next commit, by pms_release (resolve.h), by opening such a slot, by going
 * back. */
#ifndef PMS_COMMIT_HOLD_H
#define PMS_COMMIT_HOLD_H

#include "commit/pool_state.h"

/* REQUIRES in all of these: the operation lock. */

/* The transaction that commits holds the one before from now on, if the store holds; the one that
 * was held is over. Not fenced: F2 of the commit. REQUIRES: the log lock, held until the anchor. */
void pms_hold_begin(struct pms_pool *pool);

/* ERRORS: PMS_E_STATE: nothing is held. */
int pms_hold_check(const struct pms_pool *pool, struct pms_error *error);

/* Captures what the held transaction captured, then stores its pre-images. REQUIRES: the log lock;
 * one is held, nothing is pending. */
void pms_hold_put_back(struct pms_pool *pool);

/* Before an idle slot is opened: if it is part of the held version, that is released. */
void pms_hold_leave_slot(struct pms_pool *pool, uint64_t off);

/* Nothing happens if none is held. CRASH: held or not. */
void pms_hold_release(struct pms_pool *pool);

#endif
