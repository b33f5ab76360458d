/* References to a pool: the handle and the views. The last one frees it. */
#include "commit/refs.h"

#include <stdlib.h>

#include "commit/gate.h"
#include "commit/outlive.h"
#include "heap/state.h"

void pms_pool_unref(struct pms_pool *pool)
{
    pthread_mutex_lock(&pool->gate.lock);
    PMS_ASSERT(pool->refs > 0);
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->gate.lock);
    if (!last)
        return;
    PMS_ASSERT(pool->gate.closed);
    if (pool->left.at_last)
        pool->left.at_last(pool);
    pms_map_close(&pool->map);
    pthread_cond_destroy(&pool->gate.left);
    pthread_mutex_destroy(&pool->gate.lock);
    free(pool->left.block);
    free(pool->opened.path);
    free(pool);
}

int pms_is_live(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    if (pms_pool_enter(pool, error) != PMS_OK)
        return 0;
    bool live = pms_heap_live_block(pool->heap, data) != NULL;
    pms_pool_leave(pool);
    return live;
}

void pms_unpin(struct pms_pool *pool, uint64_t data)
{
    if (pms_pool_forked(pool))
        return;
    pthread_mutex_lock(&pool->gate.lock);
    /* after a failure the index may be incomplete, and nothing is allocated any more */
    if (pool->gate.closed)
        pms_outlive_unpin(pool, data);
    else if (!pms_pool_failed(pool))
        pms_heap_unpin(pool->heap, data);
    pthread_mutex_unlock(&pool->gate.lock);
    pms_pool_unref(pool);
}
