/* Closing a store:
 *
 *   1  end      the running transaction is committed or rolled back; what waits for the next commit
 *               has failed; a store that holds lets go after a commit: it was the last
 *   2  part     live views become private: from here on no thread stores into the file
 *   3  home     domain file: what the journal has is written home, but for what is held
 *   4  sync     all data
 *   5  mark     the session record says that the store was closed; logs are whole again, where
 *               nothing is held
 *   6  free     memory and files
 *   7  unlock   what views show of the file is copied first; a thread does it, and close has
 *               returned (commit/unlock.h)
 *
 * Crash in 1 to 4 => the next open recovers the last commit. In 5 => the same, or a closed store:
 * the file is whole either way. In 6 and 7 => a closed store. */
#include "store/close.h"

#include <errno.h>
#include <string.h>

#include "base/pages.h"
#include "commit/hold.h"
#include "commit/landing.h"
#include "commit/outlive.h"
#include "commit/pool_state.h"
#include "commit/refs.h"
#include "commit/relief.h"
#include "commit/runs.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "commit/unlock.h"
#include "log/snapshot.h"
#include "seam/footer.h"
#include "store/populate.h"

static int finish_writing(struct pms_pool *pool, int commit, struct pms_error *error)
{
    int status = PMS_OK;
    if (pms_pool_failed(pool))
        return pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable");
    if (commit)
        status = pms_tx_commit(pool, error);
    if (status == PMS_E_INDOUBT)
        pms_fail(error, PMS_E_INDOUBT, "what was written since is rolled back");
    if (!commit || status != PMS_OK) {
        int undone = pms_tx_rollback(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? undone : status;
    }
    return status;
}

static int mark_clean(struct pms_pool *pool, struct pms_error *error)
{
    int status = PMS_OK;
    if (pool->journal) {
        status = pms_journal_close(pool->journal, false, error);
        pool->journal = NULL;
    }
    if (status != PMS_OK || pms_pool_failed(pool))
        return status;
    /* all data, before the mark that says it is all there */
    status = pms_persist_sync(&pool->persist, pool->opened.fd, "syncing the store at close", error);
    if (status != PMS_OK)
        return status;
    /* it is over: a copy that began in it does not have all of its entries */
    pms_footer_note(&pool->map, pms_pool_home(pool), PMS_FOOTER_ALL);
    pool->session.state = PMS_SESSION_CLEAN;
    pool->session.backed = pms_backing_known(&pool->undo.charge.backing);
    status = pms_session_write(pool->opened.fd, &pool->persist, &pool->session, error);
    if (status != PMS_OK || pool->hold.tag || !(pool->super.features_incompat & PMS_FEATURE_HOLD))
        return status;
    /* others may open it again; should it not be written, the next open does it */
    pool->super.features_incompat &= ~PMS_FEATURE_HOLD;
    return pms_super_write_both(pool->opened.fd, &pool->persist, &pool->super, error);
}

void pms_close_engine(struct pms_pool *pool)
{
    pms_heap_close(pool->heap);
    pool->heap = NULL;
    pms_runs_close(pool);
    pms_undo_close(&pool->undo);
    pms_relief_end(pool);
}

/* REQUIRES: the operation lock. A transaction block that is open is no state: it is rolled back. */
static int end_transaction(struct pms_pool *pool, int commit, struct pms_error *error)
{
    bool half = pool->gate.owner.number != 0;
    int status = PMS_OK;
    if (!pool->opened.read_only)
        status = finish_writing(pool, commit && !half, error);
    if (half && commit && status == PMS_OK)
        status = pms_fail(error, PMS_E_STATE,
                          "a transaction block was open when the store was closed: all that was "
                          "written since it was entered is rolled back");
    pms_landing_disarm(pool);
    if (!commit || status != PMS_OK)
        return status;
    if (pool->hold.in_doubt) /* since before this open: nothing was done here */
        return pool->hold.before ? PMS_OK
                                 : pms_fail(error, PMS_E_INDOUBT, "it is closed, and left so");
    return pool->hold.on ? pms_hold_release(pool, error) : PMS_OK;
}

static void close_files(struct pms_pool *pool)
{
    pms_sight_close(&pool->sight);
    pms_footer_close(&pool->map); /* views may live on, but nothing of the file stays mapped */
    pms_close_engine(pool);
    pms_process_close(pool->opened.fd);
    pool->opened.fd = -1;
}

/* REQUIRES: the operation lock. */
static int close_now(struct pms_pool *pool, int commit, struct pms_error *error)
{
    pms_populate_stop(pool);
    int status = end_transaction(pool, commit, error);
    pool->gate.closed = true;
    pms_serve_no_more(&pool->served);
    pms_snapshot_detach_all(&pool->undo);
    pms_unlock_begin(pool);
    pms_outlive_part(pool);
    pms_capture_close(&pool->capture);
    if (!pool->opened.read_only) {
        int marked = mark_clean(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? marked : status;
    }
    close_files(pool);
    pms_txblock_forget(pool);
    pthread_cond_broadcast(&pool->gate.left);
    pms_unlock(pool);
    return status;
}

int pms_pool_close(struct pms_pool *pool, int commit, struct pms_error *error)
{
    if (pms_pool_forked(pool)) {
        pool->gate.closed = true; /* the parent's: nothing of it is touched */
        return PMS_OK;
    }
    int status = PMS_OK;
    pthread_mutex_lock(&pool->gate.lock);
    if (pool->gate.closed)
        status = commit ? pms_fail(error, PMS_E_CLOSED, "the store is closed") : PMS_OK;
    else if (commit && pms_txblock_of_another_thread(pool))
        status = pms_fail(error, PMS_E_BUSY, "another thread is inside a transaction block");
    else
        status = close_now(pool, commit, error);
    pthread_mutex_unlock(&pool->gate.lock);
    return status;
}

void pms_pool_release(struct pms_pool *pool)
{
    if (pms_pool_forked(pool))
        return;
    pms_pool_close(pool, 0, NULL);
    pms_pool_unref(pool);
}
