/* References to a pool: the handle, and views of its arrays. */
#ifndef PMS_COMMIT_REFS_H
#define PMS_COMMIT_REFS_H

#include "commit/pool.h"

void pms_unpin(struct pms_pool *pool, uint64_t data);
/* 1: a name or a list has the block; 0 */
int pms_is_live(struct pms_pool *pool, uint64_t data, struct pms_error *error);

/* gives up one of pool->refs, the last one frees it; not under the operation lock */
void pms_pool_unref(struct pms_pool *pool);

#endif
