#include "commit/hold.h"

#include <stddef.h>

#include "log/held.h"
#include "log/idle.h"
#include "log/marks.h"

void pms_hold_begin(struct pms_pool *pool)
{
    struct pms_undo *u = &pool->undo;
    bool on = pool->hold.on;
    pms_held_write(u, u->tag, pms_undo_entries(u), on ? PMS_HELD_FOR_STORE : PMS_HELD_NOT);
    pool->hold.tag = on ? u->tag : 0;
    pool->hold.before = false;
}

void pms_hold_release(struct pms_pool *pool)
{
    struct pms_undo *u = &pool->undo;
    if (!pool->hold.tag)
        return;
    pms_undo_lock(u);
    pms_held_write(u, pool->hold.tag, 0, PMS_HELD_NOT);
    /* the record, before anything that the version needs is stored to */
    pms_persist_fence(&pool->persist);
    pool->hold.tag = 0;
    pool->hold.before = false;
    pms_undo_unlock(u);
    pms_heap_release(pool->heap);
}

void pms_hold_leave_slot(struct pms_pool *pool, uint64_t off)
{
    if (pool->hold.tag &&
        (pool->hold.before || pms_idle_left_by(&pool->undo, off) == pool->hold.tag))
        pms_hold_release(pool);
}

int pms_hold_check(const struct pms_pool *pool, struct pms_error *error)
{
    if (pool->failed)
        return pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable");
    return pool->hold.tag ? PMS_OK
                          : pms_fail(error, PMS_E_STATE,
                                     "no version before the last commit is held: nothing was "
                                     "committed yet, or it was released, or gone back to");
}

/* ---- going back ---- */

/* An entry's target, captured for the running transaction. Whole pages as a user's: they may be. */
static int capture_again(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct pms_pool *pool = ctx;
    (void)image;
    if ((entry->target | entry->len) % PMS_PAGE == 0)
        pms_capture_append(&pool->capture, (struct pms_span){entry->target, entry->len});
    else
        pms_undo_prepare_locked(&pool->undo, entry->target, entry->len);
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
