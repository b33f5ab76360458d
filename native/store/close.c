/* Closing a store:
 *
 *   1  end      the running transaction is committed or rolled back; what waits for the next commit
 *               has failed; a store that holds lets go after a commit: it was the last
 *   2  part     live views get pages of their own: from here on no thread stores into the file
 *   3  home     domain file: what the journal holds is written home
 *   4  sync     all data
 *   5  mark     the session record says that the store was closed; logs are whole again, where
 *               nothing is held
 *   6  free     memory, files, and the lock last: whoever gets it finds a closed store
 *
 * Crash in 1 to 4 => the next open recovers the last commit. In 5 => the same, or a closed store:
 * the file is whole either way. In 6 => a closed store. */
#include "store/close.h"

#include <errno.h>
#include <string.h>

#include "base/pages.h"
#include "commit/hold.h"
#include "commit/landing.h"
#include "commit/pool_state.h"
#include "commit/refs.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "log/snapshot.h"
#include "seam/footer.h"
#include "seam/holder.h"
#include "store/populate.h"

/* of views made private at once: bounds the memory that close needs beside them */
#define WINDOW_BYTES (1ull << 30)

struct window { /* of the user's view, and what takes its place */
    const struct pms_map *map;
    unsigned char *copy;
    uint64_t from, to;
    bool any;
};

static void copy_into_window(void *ctx, uint64_t off, uint64_t bytes)
{
    struct window *w = ctx;
    uint64_t from = pms_page_down(off), to = pms_page_up(off + bytes);
    from = from > w->from ? from : w->from;
    to = to < w->to ? to : w->to;
    if (from >= to)
        return;
    memcpy(w->copy + (from - w->from), w->map->user + from, to - from);
    w->any = true;
}

/* Live views keep their address and get private pages: what they show is nobody else's any more.
 * One mapping takes the place of all pages of the window, so that a process with any number of
 * views has mappings enough. REQUIRES: all pages protected, the log lock. */
static void make_private(struct pms_pool *pool, uint64_t from, uint64_t to)
{
    struct pms_map *map = &pool->map;
    size_t bytes = (size_t)(to - from);
    struct window w = {.map = map, .copy = pms_reserve(bytes), .from = from, .to = to};
    if (!w.copy)
        return; /* views of this part stay read-only ones of the file */
    pms_heap_each_pin(pool->heap, copy_into_window, &w);
    if (!w.any) {
        pms_unreserve(w.copy, bytes);
        /* a wild pointer finds nothing here */
        (void)mmap(map->user + from, bytes, PROT_NONE, PMS_RESERVED | MAP_FIXED, -1, 0);
    } else if (mremap(w.copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, map->user + from) ==
               MAP_FAILED) {
        pms_unreserve(w.copy, bytes);
    } else {
        /* it is writable: so that a thread that waits in its fault goes on */
        int err = pms_map_unprotect(map, from, bytes);
        PMS_ASSERT(err == 0);
    }
}

static void release_views(struct pms_pool *pool)
{
    struct pms_map *map = &pool->map;
    /* a thread that stores meanwhile waits here, and then finds its page writable */
    pms_undo_lock(&pool->undo);
    pms_map_protect(map, 0, map->bytes);
    for (uint64_t from = 0; from < map->bytes; from += WINDOW_BYTES)
        make_private(pool, from,
                     map->bytes - from < WINDOW_BYTES ? map->bytes : from + WINDOW_BYTES);
    pms_undo_unlock(&pool->undo);
    pms_capture_close(&pool->capture);
    if (map->shared)
        munmap(map->engine, map->reserve);
    map->engine = map->user; /* pms_map_close, at the last unpin, frees the rest */
}

static int finish_writing(struct pms_pool *pool, int commit, struct pms_error *error)
{
    int status = PMS_OK;
    if (pool->failed)
        return pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable");
    if (commit)
        status = pms_tx_commit(pool, error);
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
    if (status != PMS_OK || pool->failed)
        return status;
    /* all data, before the mark that says it is all there */
    errno = pms_persist_sync(&pool->persist, pool->opened.fd);
    if (errno)
        return pms_fail_errno(error, "syncing the store at close");
    /* it is over: a copy that began in it does not have all of its entries */
    pms_footer_note(&pool->map, pool->tx.last, PMS_FOOTER_ALL);
    pool->session.state = PMS_SESSION_CLEAN;
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
    pms_unreserve(pool->tx.runs, pool->tx.runs_room * sizeof *pool->tx.runs);
    pool->tx.runs = NULL;
    pms_undo_close(&pool->undo);
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
    if (commit && status == PMS_OK && pool->hold.on)
        pms_hold_release(pool);
    return status;
}

static void close_files(struct pms_pool *pool)
{
    pms_footer_close(&pool->map); /* views may live on, but nothing of the file stays mapped */
    pms_close_engine(pool);
    pms_process_close(pool->opened.fd);
    pms_holder_close(pool->opened.lock_fd);
    pool->opened.fd = pool->opened.lock_fd = -1;
}

/* REQUIRES: the operation lock. */
static int close_now(struct pms_pool *pool, int commit, struct pms_error *error)
{
    pms_populate_stop(pool);
    int status = end_transaction(pool, commit, error);
    pool->gate.closed = true;
    pms_snapshot_detach_all(&pool->undo);
    release_views(pool);
    if (!pool->opened.read_only) {
        int marked = mark_clean(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? marked : status;
    }
    close_files(pool);
    pms_txblock_forget(pool);
    pthread_cond_broadcast(&pool->gate.left);
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
