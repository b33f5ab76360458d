#include "commit/resolve.h"

#include "commit/gate.h"
#include "commit/hold.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "crash/debug.h"

int pms_release(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_alone(pool, "release()", error);
    if (status != PMS_OK)
        return status;
    status = pms_hold_release(pool, error);
    pms_pool_leave(pool);
    return status;
}

int pms_back(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_alone(pool, "rewind()", error);
    if (status != PMS_OK)
        return status;
    status = pms_tx_back(pool, error);
    pms_pool_leave(pool);
    return status;
}

int pms_allow(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_beside(pool, error);
    if (status != PMS_OK)
        return status;
    pool->hold.in_doubt = false;
    if (pms_debug_board)
        pms_debug_agreed(pool, pms_pool_root(pool)->epoch);
    pms_pool_leave(pool);
    return PMS_OK;
}

int pms_holds(struct pms_pool *pool)
{
    if (pms_pool_enter(pool, NULL) != PMS_OK)
        return PMS_HELD_NOT;
    int held = (int)(pool->hold.tag ? pool->hold.held : PMS_HELD_NOT);
    pms_pool_leave(pool);
    return held;
}

int pms_in_doubt(struct pms_pool *pool)
{
    if (pms_pool_enter(pool, NULL) != PMS_OK)
        return 0;
    int in_doubt = pool->hold.in_doubt;
    pms_pool_leave(pool);
    return in_doubt;
}
