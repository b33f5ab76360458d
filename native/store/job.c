/* Holding for a job, switched on while a store is open:
 *
 *   1  room     the file grows, if its logs lack what two transactions need
 *   2  halve    the running transaction, which wrote nothing, is over; the next one has the first
 *               half of the log, where a whole log begins
 *   3  publish  the superblock says that logs are cut in halves
 *
 * Crash in 1 => the store has grown by a segment, or not. In 2 => it is opened with whole logs. In
 * 3 => with either: what is in the log is found. A superblock that cannot be written leaves a store
 * that commits nothing any more, as the next transaction's log would not be found. */
#include "store/job.h"

#include "commit/gate.h"
#include "commit/pool_state.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "store/grow.h"

int pms_halves_publish(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_superblock super = pool->super;
    super.features_incompat |= PMS_FEATURE_HOLD;
    int status = pms_super_write_both(pool->opened.fd, &pool->persist, &super, error);
    pms_undo_lock(&pool->undo); /* readers are told of it */
    if (status == PMS_OK)
        pool->super = super;
    pms_undo_unlock(&pool->undo);
    return status;
}

static int cut(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_tx_halve(pool, error);
    if (status != PMS_OK)
        return status;
    status = pms_halves_publish(pool, error);
    pool->failed = pool->failed || status != PMS_OK;
    return status;
}

static int hold_for_job(struct pms_pool *pool, struct pms_error *error)
{
    if (pool->tx.landing || pms_tx_pending(pool))
        return pms_fail(error, PMS_E_STATE,
                        "something is pending: commit it, or roll it back, before the store "
                        "holds for a job");
    int status = pms_pool_grow_for_halves(pool, error);
    if (status == PMS_OK && !pool->undo.log.halves)
        status = cut(pool, error);
    if (status == PMS_OK)
        pool->hold.on = PMS_HELD_FOR_JOB;
    return status;
}

int pms_hold_for_job(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_alone(pool, "hold_for_job()", error);
    if (status != PMS_OK)
        return status;
    status = hold_for_job(pool, error);
    pms_pool_leave(pool);
    return status;
}
