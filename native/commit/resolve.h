/* What becomes of a held version (hold.h), for all who ask. */
#ifndef PMS_COMMIT_RESOLVE_H
#define PMS_COMMIT_RESOLVE_H

#include "commit/pool.h"

/* The version before the last commit is not needed any more. Durable on return. ERRORS:
 * PMS_E_STATE: in a transaction block; PMS_E_BUSY, PMS_E_READONLY, PMS_E_CLOSED. */
int pms_release(struct pms_pool *pool, struct pms_error *error);

/* Back to it: pms_tx_back. ERRORS: as above, and those of pms_tx_back. */
int pms_back(struct pms_pool *pool, struct pms_error *error);

/* A version that is held for a job may go: all ranks have the last commit. The next commit lets go
 * of it, and is in doubt in its turn. Nothing is stored. Idempotent. ERRORS: PMS_E_READONLY,
 * PMS_E_CLOSED. */
int pms_allow(struct pms_pool *pool, struct pms_error *error);

/* Whether one is held, and for whom: enum pms_held_for. */
int pms_holds(struct pms_pool *pool);

/* Whether one is held for a job that has not allowed that it goes: commits are refused. */
int pms_in_doubt(struct pms_pool *pool);

#endif
