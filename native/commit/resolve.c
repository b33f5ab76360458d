#include "commit/resolve.h"

#include "commit/gate.h"
#include "commit/hold.h"
#include "commit/tx.h"
#include "commit/txblock.h"

int pms_release(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_alone(pool, "release()", error);
    if (status != PMS_OK)
        return status;
    pms_hold_release(pool);
    pms_pool_leave(pool);
    return PMS_OK;
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

int pms_holds(struct pms_pool *pool)
{
    if (pms_pool_enter(pool, NULL) != PMS_OK)
        return PMS_HELD_NOT;
    int held = pool->hold.tag ? PMS_HELD_FOR_STORE : PMS_HELD_NOT;
    pms_pool_leave(pool);
    return held;
}
