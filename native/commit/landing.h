/* Landings: what a commit waits for. State that lives on an accelerator is copied into idle
 * slots while the store is held, and takes its place in the commit: copies, flips, and
 * everything else that is pending are one transaction.
 *
 * A landing is armed, and the next commit of the store, whichever it is, carries it out:
 *
 *   open     idle blocks are opened, others captured
 *   seal     all pages are protected; from here on whoever stores into the heap, and every call,
 *            waits until the commit is over
 *   copy     copies that somebody else makes are waited for, the others made
 *   flip     the slots' descriptions are stored, logged
 *   commit   as always (tx.c)
 *
 * If a copy fails or is late nothing of it has happened but writes into idle blocks, whose
 * content is of no account; what was pending before is pending still. With pms_landing_start all
 * this is done by a thread that takes no lock of the program's, so that whoever waits for the
 * store may hold any lock he likes (the interpreter's, say). */
#ifndef PMS_COMMIT_LANDING_H
#define PMS_COMMIT_LANDING_H

#include "commit/pool.h"

struct pms_land_copy {        /* of a mirror's bytes into a block */
    uint64_t data, at, bytes; /* the block, and where in it */
    const void *src;          /* copied from here; NULL: somebody else writes the block itself */
    /* waited for until it is not 0: src, or the block, is complete then; NULL: it is already */
    const uint64_t *landed;
};

struct pms_land_flip { /* of the slots that the block is one of */
    uint64_t dir, data;
    const char *name, *meta; /* meta: its new description */
    uint32_t name_bytes, meta_bytes;
};

enum pms_landing_phase {
    PMS_LANDING_NEW = 0,
    PMS_LANDING_SEALED = 1, /* nothing that is stored from now on is part of the commit */
    PMS_LANDING_COPIED = 2, /* the sources may be written again */
    PMS_LANDING_DONE = 3,   /* committed, or failed */
};

struct pms_landing;

/* copies and flips are copied; what they point to outlives the landing. timeout_ns: for all
 * words that are waited for; < 0: for ever.
 * ERRORS: PMS_E_OS (no memory): NULL. */
struct pms_landing *pms_landing_new(const struct pms_land_copy *copies, uint64_t copy_count,
                                    const struct pms_land_flip *flips, uint64_t flip_count,
                                    int64_t timeout_ns, struct pms_error *error);

/* Has the next commit carry it out, in place of one that was armed before (which has failed
 * then). A roll back disarms it.
 * ERRORS: PMS_E_CLOSED, PMS_E_FORKED, PMS_E_READONLY. */
int pms_landing_arm(struct pms_pool *pool, struct pms_landing *landing, struct pms_error *error);

/* Commits with it, in a thread of its own, and returns when it has reached the phase. NEW: at
 * once; wait until it is sealed. COPIED: the sources may be written again, and no signal handler
 * of the program's has run meanwhile.
 * ERRORS: PMS_E_OS: no thread; PMS_E_STATE, PMS_E_BUSY: in a block; PMS_E_CLOSED, PMS_E_FORKED,
 * PMS_E_READONLY. */
int pms_landing_start(struct pms_pool *pool, struct pms_landing *landing, int phase,
                      struct pms_error *error);

/* whether a pool has it, or had it */
bool pms_landing_is_started(const struct pms_landing *landing);

/* Waits for a phase. true: it is reached. timeout_ns: 0: only looks; < 0: for ever. */
bool pms_landing_wait(struct pms_landing *landing, int phase, int64_t timeout_ns);

/* What came of it. REQUIRES: phase DONE. */
int pms_landing_result(const struct pms_landing *landing, struct pms_error *error);

/* The words that it waits for will not come: it fails at once. */
void pms_landing_fail(struct pms_landing *landing);

/* by whom it was made; it goes on if it is under way */
void pms_landing_free(struct pms_landing *landing);

/* ---- for landing_start.c ---- */

/* The pool holds it too, from arming or starting it until it is over: then pms_landing_finish
 * gives that up, or pms_landing_drop. */
void pms_landing_hold(struct pms_landing *landing, struct pms_pool *pool);
void pms_landing_drop(struct pms_landing *landing); /* it could not be started after all */
struct pms_pool *pms_landing_holder(const struct pms_landing *landing);

/* ---- for tx.c. REQUIRES: the operation lock. ---- */

/* Opens the blocks and finds the descriptions. Small blocks of a private view are copied
 * already.
 * ERRORS: PMS_E_INVALID, PMS_E_NOT_FOUND, PMS_E_CORRUPT; PMS_E_STATE: the slots were flipped since
 * the landing was prepared. */
int pms_landing_open(struct pms_pool *pool, struct pms_landing *landing, struct pms_error *error);

/* Captures what the flips will store to, so that nothing is captured after the seal.  REQUIRES:
 * the log lock. */
void pms_landing_capture(struct pms_pool *pool, struct pms_landing *landing);

/* Seals, waits, copies, publishes and flips.  REQUIRES: the log lock, held since
 * pms_landing_capture and pms_snapshot_keep_transaction.  ERRORS: PMS_E_STATE: a copy failed or
 * was late; nothing of it is published.  CRASH: idle blocks may hold anything; flips are undone
 * with the transaction (I3). */
int pms_landing_land(struct pms_pool *pool, struct pms_landing *landing, struct pms_error *error);

/* The commit failed after all: the old descriptions.  REQUIRES: the log lock, pms_landing_land
 * succeeded. */
void pms_landing_unflip(struct pms_pool *pool, struct pms_landing *landing);

/* whether it changes anything; NULL: no */
bool pms_landing_flips(const struct pms_landing *landing);
void pms_landing_finish(struct pms_landing *landing, int status, const struct pms_error *error);
void pms_landing_disarm(struct pms_pool *pool);

#endif
