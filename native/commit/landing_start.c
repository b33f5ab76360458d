/* Who has a landing carried out: the next commit, or a thread that commits with it. */
#include <errno.h>

#include "base/thread.h"
#include "commit/gate.h"
#include "commit/hold.h"
#include "commit/refs.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "commit/landing.h"

int pms_landing_arm(struct pms_pool *pool, struct pms_landing *l, struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = pms_hold_check_doubt(pool, error);
    if (status == PMS_OK) {
        pms_landing_disarm(pool);
        pms_landing_hold(l, pool);
        pool->tx.landing = l;
    }
    pms_pool_leave(pool);
    return status;
}

/* ---- a thread that commits ---- */

static void *commit(void *arg)
{
    struct pms_landing *l = arg;
    struct pms_pool *pool = pms_landing_holder(l);
    struct pms_error error = {0};
    int status = pms_pool_enter_alone(pool, "commit()", &error);
    if (status == PMS_OK) {
        pms_landing_disarm(pool);
        pool->tx.landing = l; /* pms_tx_commit finishes it */
        pms_tx_commit(pool, &error);
        pms_pool_leave(pool);
    } else {
        pms_landing_finish(l, status, &error);
    }
    pms_pool_unref(pool);
    return NULL;
}

int pms_landing_start(struct pms_pool *pool, struct pms_landing *l, int phase,
                      struct pms_error *error)
{
    /* in the caller's thread: his own block is to be told from another's */
    int status = pms_pool_enter_alone(pool, "commit()", error);
    if (status != PMS_OK)
        return status;
    status = pms_hold_check_doubt(pool, error);
    if (status == PMS_OK)
        pool->refs++;
    pms_pool_leave(pool);
    if (status != PMS_OK)
        return status;
    pms_landing_hold(l, pool);
    errno = pms_thread_start(NULL, (struct pms_thread_kind){0}, commit, l);
    if (errno) {
        status = pms_fail_errno(error, "starting a thread");
        pms_landing_drop(l);
        pms_pool_unref(pool);
        return status;
    }
    pms_landing_wait(l, phase, -1);
    return PMS_OK;
}
