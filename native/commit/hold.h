/* The held version: what the last commit overwrote, until it is released.
 *
 * A transaction's log is kept after its commit, and the next one has the other half of it. In the
 * byte-addressable domains a record says so (log/held.h). In domain file the log is memory; what
 * lasts is the transaction's record in the journal, which is not written home (journal/held.c).
 * What the version needs beside these stays as it is:
 *
 *   blocks that were freed   are not used again (heap/hold.c)
 *   slots that were flipped  the idle one is that version: to open it is to release it
 *
 * Released it is by the next commit, by pms_release (resolve.h), by opening such a slot, by going
 * back.
 *
 * Held for a job of several ranks it is until the job allows that it goes (pms_allow), for other
 * ranks may not have the commit after it. Until then the store is *in doubt*: of these doors
 * pms_release and going back are open. An open finds it in doubt again: what a job allowed is known
 * to its process alone. */
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

/* Before an idle slot is opened: if it is part of the held version, that is released.
 * ERRORS: PMS_E_INDOUBT: it may not be. */
int pms_hold_leave_slot(struct pms_pool *pool, uint64_t off, struct pms_error *error);

/* Before anything that would end what is held. ERRORS: PMS_E_INDOUBT. */
int pms_hold_check_doubt(const struct pms_pool *pool, struct pms_error *error);

/* Nothing happens if none is held. Durable on return. ERRORS: domain file: PMS_E_OS,
 * PMS_E_READONLY; it is held no more for this process, and may be after a crash. CRASH: held or
 * not. */
int pms_hold_release(struct pms_pool *pool, struct pms_error *error);

/* Domain file: a commit failed, on its way over what is held. */
void pms_hold_lost(struct pms_pool *pool);

#endif
