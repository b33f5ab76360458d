/* Who has a landing carried out: the next commit, or a thread that commits with it. */
#include <errno.h>
#include <signal.h>

#include "commit/gate.h"
#include "commit/refs.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "commit/landing.h"

int pms_landing_arm(struct pms_pool *pool, struct pms_landing *l, struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    pms_landing_disarm(pool);
    pms_landing_hold(l, pool);
    pool->tx.landing = l;
    pms_pool_leave(pool);
    return PMS_OK;
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

int pms_landing_start(struct pms_pool *pool, struct pms_landing *l, struct pms_error *error)
{
    pthread_t thread;
    sigset_t all, before;
    /* in the caller's thread: his own block is to be told from another's */
    int status = pms_pool_enter_alone(pool, "commit()", error);
    if (status != PMS_OK)
        return status;
    pool->refs++;
    pms_pool_leave(pool);
    pms_landing_hold(l, pool);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited: Python's handlers never run on it */
    errno = pthread_create(&thread, NULL, commit, l);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (errno) {
        status = pms_fail_errno(error, "starting a thread");
        pms_landing_free(l);
        pms_pool_unref(pool);
        return status;
    }
    pthread_detach(thread);
    return PMS_OK;
}
