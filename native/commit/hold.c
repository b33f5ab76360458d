#include "commit/hold.h"

#include <stddef.h>

#include "log/held.h"
#include "log/idle.h"
#include "log/marks.h"

/* What this session's commits hold. */
static void set(struct pms_pool *pool, uint64_t tag, enum pms_held_for held)
{
    pool->hold.tag = tag;
    pool->hold.held = held;
    pool->hold.before = false;
    pool->hold.in_doubt = held == PMS_HELD_FOR_JOB;
}

void pms_hold_begin(struct pms_pool *pool)
{
    struct pms_undo *u = &pool->undo;
    enum pms_held_for on = pool->hold.on;
    if (!pool->journal) /* else the journal's record says it */
        pms_held_write(u, u->tag, pms_undo_entries(u), on);
    set(pool, on ? u->tag : 0, on);
}

static void release_in_place(struct pms_pool *pool)
{
    struct pms_undo *u = &pool->undo;
    pms_undo_lock(u);
    pms_held_write(u, pool->hold.tag, 0, PMS_HELD_NOT);
    /* the record, before anything that the version needs is stored to */
    pms_persist_fence(&pool->persist);
    pms_undo_unlock(u);
}

/* Not durable in domain file: nothing that the version needs changes before the journal has seen
 * to that. */
static void let_go(struct pms_pool *pool)
{
    if (!pool->hold.tag)
        return;
    if (pool->journal)
        pms_journal_let_go(pool->journal);
    else
        release_in_place(pool);
    set(pool, 0, PMS_HELD_NOT);
    pms_heap_release(pool->heap);
}

int pms_hold_release(struct pms_pool *pool, struct pms_error *error)
{
    let_go(pool);
    return pool->journal ? pms_journal_let_go_surely(pool->journal, error) : PMS_OK;
}

void pms_hold_lost(struct pms_pool *pool) { let_go(pool); }

int pms_hold_leave_slot(struct pms_pool *pool, uint64_t off, struct pms_error *error)
{
    if (!pool->hold.tag ||
        (!pool->hold.before && pms_idle_left_by(&pool->undo, off) != pool->hold.tag))
        return PMS_OK;
    int status = pms_hold_check_doubt(pool, error);
    if (status == PMS_OK)
        let_go(pool);
    return status;
}

int pms_hold_check_doubt(const struct pms_pool *pool, struct pms_error *error)
{
    return pool->hold.in_doubt
               ? pms_fail(error, PMS_E_INDOUBT, "nothing more is committed meanwhile")
               : PMS_OK;
}

int pms_hold_check(const struct pms_pool *pool, struct pms_error *error)
{
    if (pms_pool_failed(pool))
        return pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable");
    return pool->hold.tag ? PMS_OK
                          : pms_fail(error, PMS_E_STATE,
                                     "no version before the last commit is held: nothing was "
                                     "committed yet, or it was released, or gone back to");
}

/* ---- going back ---- */

/* In a private view pages that the engine stores to stay writable: they are captured as its own.
 * REQUIRES: the user's are protected. */
static bool is_engines(const struct pms_pool *pool, uint64_t off)
{
    return !pool->map.shared && pms_map_all_writable(&pool->map, off, PMS_PAGE);
}

/* An entry's target, captured for the running transaction. Whole pages as a user's: they may be. */
static int capture_again(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct pms_pool *pool = ctx;
    uint64_t end = entry->target + entry->len;
    (void)image;
    if ((entry->target | entry->len) % PMS_PAGE != 0) {
        pms_undo_prepare_locked(&pool->undo, entry->target, entry->len);
        return 0;
    }
    for (uint64_t from = entry->target, to; from < end; from = to) {
        bool engines = is_engines(pool, from);
        for (to = from + PMS_PAGE; to < end && is_engines(pool, to) == engines;)
            to += PMS_PAGE;
        if (engines)
            pms_undo_prepare_locked(&pool->undo, from, to - from);
        else
            pms_capture_append(&pool->capture, (struct pms_span){from, to - from}, PMS_DIRTY_USER);
    }
    return 0;
}

void pms_hold_put_back(struct pms_pool *pool)
{
    struct pms_undo *u = &pool->undo;
    uint64_t epoch = pms_pool_root(pool)->epoch;
    pms_capture_protect_all(&pool->capture); /* racing writers fault, and wait for the lock */
    pms_undo_scan(u, pool->hold.tag, capture_again, pool);
    /* F1: all entries, before the first store to one of their targets (I2) */
    pms_undo_fence_locked(u);
    u->stored = true;
    int64_t n = pms_undo_apply(u, pool->hold.tag, pool->map.engine, &pool->super, NULL);
    PMS_ASSERT(n > 0);
    /* going back is a commit too: no number of one is given twice */
    pms_undo_write_locked(u, PMS_OFF_ROOT + offsetof(struct pms_root, epoch), &epoch, sizeof epoch);
}
