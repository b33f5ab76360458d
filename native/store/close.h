/* Closing a store. */
#ifndef PMS_STORE_CLOSE_H
#define PMS_STORE_CLOSE_H

#include "commit/pool.h"

/* Commits or rolls back what is pending, gives live views private copies of their blocks at the
 * same address, marks the store clean, unlocks. The handle stays valid (every call answers
 * PMS_E_CLOSED) until pms_pool_release and the last unpin. Idempotent. A transaction block that is
 * open is rolled back whole, never committed.
 * ERRORS with commit: PMS_E_BUSY: another thread is in one: not closed; pms_txblock_wait, or
 * close without. PMS_E_STATE: closed, and one that was open was rolled back. PMS_E_CLOSED:
 * it was closed before. */
int pms_pool_close(struct pms_pool *pool, int commit, struct pms_error *error);
void pms_pool_release(struct pms_pool *pool);

/* Inside the engine: frees heap, log, and memory of commits; what was not opened is passed over. */
void pms_close_engine(struct pms_pool *pool);

#endif
