/* What becomes of a held version (hold.h), for all who ask. */
#ifndef PMS_COMMIT_RESOLVE_H
#define PMS_COMMIT_RESOLVE_H

#include "commit/pool.h"

/* The version before the last commit is not needed any more. Durable on return. ERRORS:
 * PMS_E_STATE: in a transaction block; PMS_E_BUSY, PMS_E_READONLY, PMS_E_CLOSED. */
int pms_release(struct pms_pool *pool, struct pms_error *error);

/* Back to it: pms_tx_back. ERRORS: as above, and those of pms_tx_back. */
int pms_back(struct pms_pool *pool, struct pms_error *error);

/* Whether one is held: enum pms_held_for. */
int pms_holds(struct pms_pool *pool);

#endif
