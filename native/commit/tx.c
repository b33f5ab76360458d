/* The life of a transaction. docs/ARCHITECTURE.md tells it with every fence; here is the order
 * in short.
 *
 * Byte-addressable domains: write in place (captured), protect, write back, F2, anchor, F3.
 * Domain file: write in private pages, protect, journal record and one fdatasync.
 *
 * I4 one store (the anchor), or one record, is the commit point of data, allocations, frees and
 * names together. */
#include "commit/tx.h"

#include <stddef.h>

#include "crash/debug.h"
#include "commit/hold.h"
#include "commit/landing.h"
#include "commit/pool_state.h"
#include "commit/relief.h"
#include "commit/runs.h"
#include "base/quiet.h"
#include "log/bare.h"
#include "log/snapshot.h"

/* ---- beginning ---- */

/* A transaction that changed so few small places of the engine's (a value replaced in place) is
 * likely to be followed by one like it. */
#define AGAIN_MAX 4u
#define AGAIN_BYTES PMS_LINE

struct ahead { /* what the next transaction will store to, by what the last ones did */
    struct pms_dirty hot[PMS_HOT_RANGES], again[AGAIN_MAX];
    uint32_t hot_count, again_count;
};

static void choose_ahead(struct pms_pool *pool, struct ahead *a)
{
    const struct pms_undo *u = &pool->undo;
    a->hot_count = pms_capture_choose_hot(&pool->capture, a->hot);
    a->again_count = 0;
    for (const struct pms_dirty *d = pms_dirty_first(&u->dirty); d < pms_dirty_end(&u->dirty);
         d++) {
        bool root = d->off == PMS_OFF_ROOT; /* always captured ahead */
        if (d->kind != PMS_DIRTY_ENGINE || root)
            continue;
        if (a->again_count == AGAIN_MAX || d->len > AGAIN_BYTES) {
            a->again_count = 0; /* a larger change: nothing says that it will come again */
            return;
        }
        a->again[a->again_count++] = *d;
    }
}

/* Captures under the new tag, not fenced yet: F3 of the last transaction is F1 of these entries
 * too. Hot ranges were copied by settle; who stores to them now belongs to the new transaction. */
static void capture_ahead(struct pms_pool *pool, uint64_t tag, const struct ahead *a)
{
    struct pms_undo *u = &pool->undo;
    PMS_ASSERT(pool->journal || tag == pool->tx.last + 1); /* I1 */
    pms_undo_begin(u, tag);
    pms_capture_take_hot(&pool->capture, a->hot, a->hot_count);
    pms_undo_prepare_locked(u, PMS_OFF_ROOT, PMS_GRANULE);
    for (uint32_t i = 0; i < a->again_count; i++)
        pms_undo_prepare_locked(u, a->again[i].off, a->again[i].len);
    pool->tx.begun = pms_dirty_count(&u->dirty);
}

void pms_tx_start(struct pms_pool *pool)
{
    pms_undo_lock(&pool->undo);
    capture_ahead(pool, pool->tx.last + 1, &(struct ahead){0});
    pms_undo_fence_locked(&pool->undo); /* F1: the root's pre-image, before the epoch is stored */
    pms_undo_unlock(&pool->undo);
}

static bool pending_locked(const struct pms_pool *pool)
{
    return pms_dirty_count(&pool->undo.dirty) > pool->tx.begun ||
           pms_capture_hot_changed(&pool->capture);
}

bool pms_tx_pending(struct pms_pool *pool)
{
    if (pool->undo.stored) /* changes under the operation lock only */
        return true;
    pms_undo_lock(&pool->undo);
    bool pending = pending_locked(pool);
    pms_undo_unlock(&pool->undo);
    return pending;
}

/* ---- commit ---- */

/* The number of commits is data like any other; its pre-image was captured ahead. REQUIRES: the
 * log lock. */
static void count_commit(struct pms_pool *pool, uint64_t by)
{
    uint64_t epoch = pms_pool_root(pool)->epoch + by;
    pms_undo_write_locked(&pool->undo, PMS_OFF_ROOT + offsetof(struct pms_root, epoch), &epoch,
                          sizeof epoch);
}

/* From here on what belongs to the transaction does not change. On success the log lock is held. */
static int settle(struct pms_pool *pool, struct pms_landing *landing, struct ahead *ahead,
                  struct pms_error *error)
{
    int status = PMS_OK;
    pms_undo_lock(&pool->undo);
    bool pending = pool->undo.stored || pms_dirty_count(&pool->undo.dirty) > pool->tx.begun;
    if (landing)
        pms_landing_capture(pool, landing);
    uint64_t captured = pms_dirty_count(&pool->undo.dirty);
    /* gives up the lock while it waits: so before the landing's seal */
    pms_snapshot_keep_transaction(&pool->undo);
    if (landing)
        status = pms_landing_land(pool, landing, error);
    if (status != PMS_OK) {
        /* what the landing captured is as it was: nothing to commit. But others may have stored
         * while the lock was given up */
        if (!pending)
            pool->tx.begun = captured;
        pms_undo_unlock(&pool->undo);
        return status;
    }
    count_commit(pool, 1);
    choose_ahead(pool, ahead);
    /* racing writers fault, wait for the lock, and belong to the next transaction */
    pms_capture_protect(&pool->capture);
    /* into hot ranges they do not: what comes after this copy does */
    pms_capture_copy_hot(&pool->capture, ahead->hot, ahead->hot_count);
    return PMS_OK;
}

/* ---- byte-addressable domains ---- */

#define PIECE_BYTES (2u << 20)

struct large { /* a range that is written back by all cores */
    const unsigned char *at;
    uint64_t bytes;
    struct pms_persist *persist;
    _Atomic uint64_t lines, fences;
};

static void write_back_piece(void *ctx, size_t i)
{
    struct large *l = ctx;
    struct pms_persist own = {.flush = l->persist->flush};
    uint64_t from = i * (uint64_t)PIECE_BYTES, left = l->bytes - from;
    pms_persist_flush(&own, l->at + from, left < PIECE_BYTES ? left : PIECE_BYTES);
    /* F2 of this core's write-backs: the caller's fence waits for its own core's alone */
    pms_persist_fence(&own);
    atomic_fetch_add_explicit(&l->lines, own.lines, memory_order_relaxed);
    atomic_fetch_add_explicit(&l->fences, own.fences, memory_order_relaxed);
}

static void write_back_large(struct pms_persist *p, const unsigned char *at, uint64_t bytes)
{
    struct large l = {.at = at, .bytes = bytes, .persist = p};
    pms_parallel_for(write_back_piece, &l, (bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    pms_persist_add(
        p, &(struct pms_persist){.lines = atomic_load(&l.lines), .fences = atomic_load(&l.fences)});
}

static void write_back(struct pms_pool *pool)
{
    const struct pms_dirty_list *l = &pool->undo.dirty;
    if (pool->persist.flush == PMS_FLUSH_NONE)
        return;
    for (const struct pms_dirty *d = pms_dirty_first(l); d < pms_dirty_end(l); d++) {
        const unsigned char *view = d->kind == PMS_DIRTY_ENGINE ? pool->map.engine : pool->map.user;
        /* copied with write-back, which was handed over at the end of each call (pms_pool_leave) */
        if (d->kind == PMS_DIRTY_BORN)
            continue;
        if (d->len >= PMS_UNDO_PARALLEL)
            write_back_large(&pool->persist, view + d->off, d->len);
        else
            pms_persist_flush(&pool->persist, view + d->off, d->len);
    }
}

static void finish(struct pms_pool *pool, uint64_t tx)
{
    pool->tx.last = tx;
    pms_persist_store8(&pool->persist, pms_map_at(&pool->map, PMS_OFF_ANCHOR),
                       pms_anchor_pack(pool->tx.last));
    pms_persist_flush(&pool->persist, pms_map_at(&pool->map, PMS_OFF_ANCHOR), sizeof(uint64_t));
}

static int commit_in_place(struct pms_pool *pool, struct pms_landing *landing,
                           struct pms_error *error)
{
    struct ahead ahead;
    int status = settle(pool, landing, &ahead, error);
    if (status != PMS_OK)
        return status;
    write_back(pool);
    if (pool->undo.log.halves)
        pms_hold_begin(pool);
    /* It is F1 of the copies of hot ranges, too: they undo later stores to these ranges, which may
     * reach memory from now on. */
    /* F2: all data of the transaction, before the anchor that makes it the state */
    pms_persist_fence(&pool->persist);
    finish(pool, pool->undo.tag);
    /* The next transaction's first entries go to the other fast log: this transaction's log
     * stays whole until F3. */
    capture_ahead(pool, pool->tx.last + 1, &ahead);
    /* F3: the anchor, before commit returns; F1 of what was captured ahead */
    pms_persist_fence(&pool->persist);
    pms_undo_fenced(&pool->undo);
    pms_undo_unlock(&pool->undo);
    return PMS_OK;
}

/* ---- domain file ---- */

/* What the transaction commits of hot ranges. */
static uint32_t gather_images(const struct pms_pool *pool, const struct ahead *a,
                              struct pms_image *image)
{
    for (uint32_t i = 0; i < a->hot_count; i++)
        image[i] = (struct pms_image){a->hot[i].off / PMS_PAGE, a->hot[i].len / PMS_PAGE,
                                      pms_undo_image(&pool->undo, a->hot[i].log_pos)};
    return a->hot_count;
}

/* It is what home will have. */
static void note_committed(struct pms_map *map, const struct pms_change *change)
{
    for (uint32_t i = 0; map->any_astray && i < change->run_count; i++)
        pms_map_set_astray(map, change->runs[i].page * PMS_PAGE,
                           (uint64_t)change->runs[i].pages * PMS_PAGE, false);
}

static int commit_journal(struct pms_pool *pool, struct pms_landing *landing,
                          struct pms_error *error)
{
    struct ahead ahead;
    struct pms_image image[PMS_HOT_RANGES];
    int status = settle(pool, landing, &ahead, error);
    if (status != PMS_OK)
        return status;
    struct pms_change change = {.tx = pool->tx.last + 1,
                                .held = pool->hold.on,
                                .runs = pool->tx.runs,
                                .run_count = pms_runs_gather(pool),
                                .images = image,
                                .image_count = gather_images(pool, &ahead, image),
                                .backing = &pool->undo.charge.backing,
                                .thin = pool->undo.charge.slots};
    status = pms_journal_commit(pool->journal, &change, error);
    if (status == PMS_OK) {
        pool->tx.last++;
        note_committed(&pool->map, &change);
        pms_hold_begin(pool);
        capture_ahead(pool, pool->undo.tag + 1, &ahead);
        pms_undo_fence_locked(&pool->undo);
    } else {
        pms_capture_drop_hot(&pool->capture, ahead.hot, ahead.hot_count);
        /* the transaction goes on, or is rolled back by the caller */
        count_commit(pool, (uint64_t)-1);
        if (landing)
            pms_landing_unflip(pool, landing);
    }
    pms_undo_unlock(&pool->undo);
    if (status != PMS_OK && !pms_pool_failed(pool) && !pool->hold.going_back)
        pms_hold_lost(pool); /* the copies of hot ranges lie over its log */
    return status;
}

static int commit(struct pms_pool *pool, struct pms_landing *landing, struct pms_error *error)
{
    int status = PMS_OK;
    if (pms_pool_failed(pool))
        return pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable");
    if (landing)
        status = pms_landing_open(pool, landing, error);
    if (status == PMS_OK && !pms_tx_pending(pool) && !(landing && pms_landing_flips(landing)))
        return PMS_OK;
    if (status == PMS_OK)
        status = pool->journal ? commit_journal(pool, landing, error)
                               : commit_in_place(pool, landing, error);
    if (status != PMS_OK)
        return status;
    pool->tx.commits++;
    atomic_store(&pool->tx.epoch, pms_pool_root(pool)->epoch);
    if (pms_debug_board)
        pms_debug_acknowledge(pool, pms_pool_root(pool)->epoch, (int)pool->opened.domain);
    pms_heap_committed(pool->heap, pool->hold.tag != 0);
    pms_relief_after_commit(pool);
    return PMS_OK;
}

/* As above, unless it would end what other ranks may need. */
static int commit_no_doubt(struct pms_pool *pool, struct pms_landing *landing,
                           struct pms_error *error)
{
    if (pool->hold.in_doubt && (landing || pms_tx_pending(pool)))
        return pms_hold_check_doubt(pool, error);
    return commit(pool, landing, error);
}

static int commit_landing(struct pms_pool *pool, struct pms_landing *landing,
                          struct pms_error *error)
{
    struct pms_error own = {0};
    pool->tx.landing = NULL;
    int status = commit_no_doubt(pool, landing, &own);
    if (status != PMS_OK && error)
        *error = own;
    pms_landing_finish(landing, status, &own);
    return status;
}

int pms_tx_commit(struct pms_pool *pool, struct pms_error *error)
{
    return pool->tx.landing ? commit_landing(pool, pool->tx.landing, error)
                            : commit_no_doubt(pool, NULL, error);
}

/* ---- roll back ---- */

/* The log of the running transaction is given up, with all transactions up to `last`; the next one
 * runs. */
static void begin_anew(struct pms_pool *pool, uint64_t last)
{
    bool same = ((last + 1) & 1) == (pool->undo.tag & 1);
    if (pool->journal) { /* which counts committed transactions alone */
        capture_ahead(pool, last + 1, &(struct ahead){0});
        pms_undo_fence_locked(&pool->undo);
        return;
    }
    finish(pool, last);
    if (same) /* the same log is used again at once: so the anchor, before it is overwritten */
        pms_persist_fence(&pool->persist);
    capture_ahead(pool, last + 1, &(struct ahead){0});
    /* F3: the anchor, before the log of the last transaction is overwritten */
    pms_persist_fence(&pool->persist);
    pms_undo_fenced(&pool->undo);
}

static void roll_back_in_place(struct pms_pool *pool)
{
    struct pms_undo *u = &pool->undo;
    pms_capture_protect_all(&pool->capture); /* racing writers fault, and wait for the lock */
    int64_t n = pms_undo_apply(u, u->tag, pool->map.engine, &pool->super, NULL);
    PMS_ASSERT(n >= (int64_t)pms_undo_entries(u)); /* every entry appended is found again (I1) */
    /* all pre-images back home, before the anchor gives their log up */
    pms_persist_fence(&pool->persist);
    /* By two: the other half of the log may be that of the held version. */
    begin_anew(pool, u->log.halves ? u->tag + 1 : u->tag);
}

#define PUT_BACK_MOST 64

/* What the transaction bore has no pre-image. */
static void note_astray(struct pms_undo *u)
{
    for (const struct pms_dirty *d = pms_dirty_first(&u->dirty); d < pms_dirty_end(&u->dirty); d++)
        if (d->kind == PMS_DIRTY_FRESH || d->kind == PMS_DIRTY_BORN)
            pms_map_set_astray(u->map, d->off, d->len, true);
}

/* Private pages have no second view: each is writable while it is put back, and a writer may
 * slip in. Once all are protected that shows, for the page is not what its entry says; then they
 * are put back again. Who stored meanwhile waits in its next store for the log lock, so each
 * thread can slip in once. (A device that goes on storing, which no protection stops, is given
 * up after some rounds: what it stores without being declared is not seen, here as elsewhere.)
 * The journal counts committed transactions only; tags of the log, which is in memory, go on. */
static void roll_back_private(struct pms_pool *pool)
{
    struct pms_undo *u = &pool->undo;
    int rounds = PUT_BACK_MOST;
    pms_capture_protect_all(&pool->capture); /* racing writers fault, and wait for the lock */
    do {
        int64_t n = pms_undo_apply(u, u->tag, pool->map.user, &pool->super, NULL);
        PMS_ASSERT(n >=
                   (int64_t)pms_undo_entries(u)); /* every entry appended is found again (I1) */
        pms_capture_protect_all(&pool->capture);
    } while (!pms_undo_is_applied(u) && --rounds);
    note_astray(u);
    pms_bare_give_back(u); /* nobody slips in here: these stay protected */
    begin_anew(pool, u->log.halves ? u->tag + 1 : u->tag);
}

/* Readers that asked before the first store, or after the last, know that memory changed. */
static void announce(struct pms_pool *pool)
{
    atomic_fetch_add(&pool->tx.put_backs, 1);
    pms_full_fence(); /* the count, before the stores that it announces */
}

/* The heap is another one. */
static int look_anew(struct pms_pool *pool, struct pms_error *error)
{
    pool->tx.rollbacks++;
    int status = pms_heap_rebuild(pool->heap, error);
    if (status == PMS_OK && pool->hold.tag)
        status = pms_heap_hold(pool->heap, pool->hold.tag, error);
    /* without an index nothing can be allocated or freed safely */
    pool->failed = pool->failed || status != PMS_OK;
    return status;
}

int pms_tx_rollback(struct pms_pool *pool, struct pms_error *error)
{
    pms_landing_disarm(pool);
    if (!pms_tx_pending(pool))
        return PMS_OK;
    pms_undo_lock(&pool->undo);
    announce(pool);
    if (pool->map.shared)
        roll_back_in_place(pool);
    else
        roll_back_private(pool);
    atomic_fetch_add(&pool->tx.put_backs, 1);
    pms_undo_unlock(&pool->undo);
    return look_anew(pool, error);
}

/* Going back is a transaction like any other: it stores what the held one overwrote. Crash anywhere
 * in it => it is undone, and the version is held as before. */
int pms_tx_back(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_hold_check(pool, error);
    if (status == PMS_OK)
        status = pms_tx_rollback(pool, error);
    if (status != PMS_OK)
        return status;
    pms_undo_lock(&pool->undo);
    announce(pool);
    pms_hold_put_back(pool);
    atomic_fetch_add(&pool->tx.put_backs, 1);
    pms_undo_unlock(&pool->undo);
    enum pms_held_for on = pool->hold.on;
    pool->hold.on = PMS_HELD_NOT; /* once */
    pool->hold.going_back = true;
    status = commit(pool, NULL, error);
    pool->hold.on = on;
    pool->hold.going_back = false;
    if (status != PMS_OK) { /* domain file: it is held in the file, and can be gone back to there */
        pms_tx_rollback(pool, NULL);
        pool->failed = true;
        return status;
    }
    return look_anew(pool, error);
}

/* ---- halves ---- */

int pms_tx_halve(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_undo *u = &pool->undo;
    int status = PMS_OK;
    pms_undo_lock(u);
    pms_capture_protect_all(&pool->capture); /* who stores from here on waits for the lock */
    if (u->stored || pending_locked(pool)) {
        status = pms_fail(error, PMS_E_STATE, "something is pending: commit it, or roll it back");
    } else {
        pool->super.features_incompat |= PMS_FEATURE_HOLD;
        pms_undo_set_extents(u, &pool->super);
        begin_anew(pool, u->tag | 1);
    }
    pms_undo_unlock(u);
    return status;
}

/* ---- counts ---- */

uint64_t pms_epoch(struct pms_pool *pool)
{
    /* the lock may be held for ever; the views are there if the parent was neither opening nor
     * closing */
    if (pms_pool_forked(pool))
        return atomic_load(&pool->capture.watched.forked) &&
                       !atomic_load(&pool->capture.watched.unreadable) && !pool->gate.closed
                   ? pms_pool_root(pool)->epoch
                   : 0;
    pthread_mutex_lock(&pool->gate.lock);
    uint64_t epoch = pool->gate.closed ? 0 : atomic_load(&pool->tx.epoch);
    pthread_mutex_unlock(&pool->gate.lock);
    return epoch;
}

uint64_t pms_rollbacks(const struct pms_pool *pool) { return pool->tx.rollbacks; }

uint64_t pms_put_backs(const struct pms_pool *pool)
{
    /* what the caller has read, before the count that tells whether it may have changed */
    pms_full_fence();
    return atomic_load(&pool->tx.put_backs);
}
