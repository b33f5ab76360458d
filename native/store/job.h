/* Holding for a job of several ranks, from some moment of an open store on. */
#ifndef PMS_STORE_JOB_H
#define PMS_STORE_JOB_H

#include "commit/pool.h"

/* Each commit holds the version before it for a job, until close: see commit/hold.h. What is held
 * already stays as it is. A store that was opened without hold gets room for two transactions, and
 * its logs are cut in halves. Idempotent.
 * ERRORS: PMS_E_STATE: something is pending, or in a transaction block; PMS_E_FULL: no room, and
 * nothing has changed; PMS_E_OS; PMS_E_READONLY.
 * CRASH: the last commit, and what was held before. */
int pms_hold_for_job(struct pms_pool *pool, struct pms_error *error);

/* Says in the superblock that logs are cut in halves. REQUIRES: the log reads the same either way.
 * ERRORS: PMS_E_OS: it says so, or not. */
int pms_halves_publish(struct pms_pool *pool, struct pms_error *error);

#endif
