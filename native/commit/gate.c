#include "commit/gate.h"
/* The operation lock: who comes in. */

int pms_pool_enter(struct pms_pool *pool, struct pms_error *error)
{
    if (pms_pool_forked(pool)) /* before the lock: another thread may have held it at the fork */
        return pms_fail(error, PMS_E_FORKED, "the store was opened by the parent process");
    pthread_mutex_lock(&pool->gate.lock);
    if (!pool->gate.closed)
        return PMS_OK;
    pthread_mutex_unlock(&pool->gate.lock);
    return pms_fail(error, PMS_E_CLOSED, "the store is closed");
}

int pms_pool_enter_beside(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (!pool->opened.read_only && !pms_pool_failed(pool))
        return PMS_OK;
    status = pms_fail(error, PMS_E_READONLY,
                      pms_pool_failed(pool) ? "an earlier failure left unknown what is durable"
                                            : "the store is open for reading");
    pms_pool_leave(pool);
    return status;
}
