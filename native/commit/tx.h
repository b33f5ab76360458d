/* The life of a transaction: tx.c. */
#ifndef PMS_COMMIT_TX_H
#define PMS_COMMIT_TX_H

#include "commit/pool.h"

uint64_t pms_epoch(struct pms_pool *pool); /* of the last commit; 0 when closed */
/* changes when cached knowledge of the directory must be dropped */
uint64_t pms_rollbacks(const struct pms_pool *pool);
/* changes before a roll back's first store and after its last: what was read meanwhile is
 * nobody's */
uint64_t pms_put_backs(const struct pms_pool *pool);

/* REQUIRES in all of these: the operation lock. */

/* The first transaction after open: captures what every commit changes. */
void pms_tx_start(struct pms_pool *pool);

/* True if anything was written since the last commit. */
bool pms_tx_pending(struct pms_pool *pool);

/* Everything written so far becomes the state that survives. Nothing pending: nothing happens.
 * ERRORS (domain file): PMS_E_FULL, PMS_E_OS: not committed, the transaction goes on; if the
 * sync itself failed the pool is `failed`. */
int pms_tx_commit(struct pms_pool *pool, struct pms_error *error);

/* Back to the last commit, in memory too. ERRORS: PMS_E_CORRUPT, PMS_E_OS from rebuilding the
 * index. */
int pms_tx_rollback(struct pms_pool *pool, struct pms_error *error);

/* Back to the held version, the commit before the last, in memory too: what is pending is rolled
 * back, then a commit follows whose state is that version's. Nothing is held after it.
 * ERRORS: PMS_E_STATE: nothing is held; as those of a roll back.  CRASH: the last commit, with the
 * version before it still held; or the end. */
int pms_tx_back(struct pms_pool *pool, struct pms_error *error);

/* A store's logs are cut in halves from the next transaction on, which begins here: of an even
 * number, so that its half is where a whole log begins, and its entries are found whatever the
 * superblock says while it runs. Which the caller makes say so before another one begins.
 * ERRORS: PMS_E_STATE: something is pending.  REQUIRES: room (I5); a byte-addressable domain.
 * CRASH: the last commit; under a superblock that says either. */
int pms_tx_halve(struct pms_pool *pool, struct pms_error *error);

#endif
