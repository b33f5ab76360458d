#include "commit/runs.h"

#include <stddef.h>
#include <string.h>

#include "base/pages.h"
#include "base/quiet.h"
#include "base/sort.h"
#include "log/entries.h"
#include "seam/bits.h"
#include "seam/spill.h"

int pms_runs_open(struct pms_pool *pool, struct pms_error *error)
{
    uint64_t pages = pool->map.reserve / PMS_PAGE;
    pool->tx.runs_room = pages;
    pool->tx.runs = pms_reserve(pages * sizeof *pool->tx.runs);
    pool->tx.faulted = pms_reserve(pms_bits_room(pool->map.reserve));
    pool->tx.unchanged = pms_reserve(pms_bits_room(pool->map.reserve));
    return pool->tx.runs && pool->tx.faulted && pool->tx.unchanged
               ? PMS_OK
               : pms_fail_errno(error, "reserving memory for commits");
}

void pms_runs_close(struct pms_pool *pool)
{
    uint64_t pages = pool->map.reserve / PMS_PAGE;
    pms_unreserve(pool->tx.runs, pages * sizeof *pool->tx.runs);
    pms_unreserve(pool->tx.faulted, pms_bits_room(pool->map.reserve));
    pms_unreserve(pool->tx.unchanged, pms_bits_room(pool->map.reserve));
    pool->tx.runs = NULL;
    pool->tx.faulted = pool->tx.unchanged = NULL;
}

/* ---- what is unchanged ---- */

/* false: no fault captured anything. */
static bool mark_faulted(struct pms_pool *pool)
{
    const struct pms_dirty_list *l = &pool->undo.dirty;
    bool any = false;
    for (const struct pms_dirty *d = pms_dirty_first(l); d < pms_dirty_end(l); d++) {
        if (d->kind != PMS_DIRTY_FAULTED)
            continue;
        pms_bits_set(pool->tx.faulted, d->off, d->len, true);
        any = true;
    }
    return any;
}

/* An entry's pages, side by side with their pre-image. */
static void compare(struct pms_pool *pool, uint64_t target, uint64_t len,
                    const unsigned char *image)
{
    if ((target | len) % PMS_PAGE != 0)
        return;
    for (uint64_t done = 0; done < len; done += PMS_PAGE) {
        uint64_t off = target + done;
        if (pms_bits_has(pool->tx.faulted, off / PMS_PAGE) &&
            !pms_map_is_astray(&pool->map, off / PMS_PAGE) &&
            memcmp(pool->map.user + off, image + done, PMS_PAGE) == 0)
            pms_bits_set(pool->tx.unchanged, off, PMS_PAGE, true);
    }
}

static void mark_unchanged(struct pms_pool *pool)
{
    const struct pms_undo *u = &pool->undo;
    uint32_t entries = pms_undo_entries(u);
    if (entries > u->log.taken_room || pms_spill_bytes(&pool->map))
        return;
    pms_quiet_begin(); /* the pages are protected: a racing writer waits for the log lock */
    for (uint32_t e = 0; e < entries; e++) {
        const struct pms_taken *t = &u->log.taken[e];
        compare(pool, atomic_load(&t->target), atomic_load(&t->len),
                pms_undo_image(u, atomic_load(&t->image)));
    }
    pms_quiet_end();
}

static void forget(struct pms_pool *pool)
{
    const struct pms_dirty_list *l = &pool->undo.dirty;
    for (const struct pms_dirty *d = pms_dirty_first(l); d < pms_dirty_end(l); d++) {
        if (d->kind != PMS_DIRTY_FAULTED)
            continue;
        pms_bits_set(pool->tx.faulted, d->off, d->len, false);
        pms_bits_set(pool->tx.unchanged, d->off, d->len, false);
    }
}

/* ---- runs ---- */

static_assert(offsetof(struct pms_run, page) == 0, "sorted by it");

/* Makes n runs ascending and disjoint, and joins neighbours. Returns how many are left. */
static uint64_t merge(struct pms_run *runs, uint64_t n)
{
    uint64_t out = 0;
    pms_sort(runs, n, sizeof *runs);
    for (uint64_t i = 0; i < n; i++) {
        struct pms_run *last = out ? &runs[out - 1] : NULL;
        struct pms_run r = runs[i];
        /* overlap: the earlier run keeps its way home */
        if (last && r.page < last->page + last->pages) {
            uint64_t end = r.page + r.pages;
            if (end <= last->page + last->pages)
                continue;
            r.page = last->page + last->pages;
            r.pages = (uint32_t)(end - r.page); /* still home: dead at the last commit */
        }
        if (last && r.page == last->page + last->pages && r.home == last->home &&
            (uint64_t)last->pages + r.pages <= UINT32_MAX)
            last->pages += r.pages;
        else
            runs[out++] = r;
    }
    return out;
}

struct gathering {
    struct pms_pool *pool;
    uint64_t count;
};

static void add(struct gathering *g, uint64_t page, uint64_t end, bool home)
{
    struct pms_tx *tx = &g->pool->tx;
    if (g->count == tx->runs_room) /* more ranges than pages: many lie on one page */
        g->count = merge(tx->runs, g->count);
    PMS_ASSERT(g->count < tx->runs_room);
    tx->runs[g->count++] = (struct pms_run){
        .page = page, .pages = (uint32_t)(end - page), .home = home};
}

static void add_changed(struct gathering *g, uint64_t page, uint64_t end)
{
    const _Atomic uint64_t *unchanged = g->pool->tx.unchanged;
    while ((page = pms_bits_next(unchanged, page, end, false)) < end) {
        uint64_t to = pms_bits_next(unchanged, page, end, true);
        add(g, page, to, false);
        page = to;
    }
}

uint32_t pms_runs_gather(struct pms_pool *pool)
{
    const struct pms_dirty_list *l = &pool->undo.dirty;
    struct gathering g = {.pool = pool};
    bool faulted = mark_faulted(pool);
    if (faulted)
        mark_unchanged(pool);
    for (const struct pms_dirty *d = pms_dirty_first(l); d < pms_dirty_end(l); d++) {
        uint64_t first = d->off / PMS_PAGE, end = (d->off + d->len + PMS_PAGE - 1) / PMS_PAGE;
        bool whole = d->off % PMS_PAGE == 0 && d->len % PMS_PAGE == 0;
        if (d->kind == PMS_DIRTY_FAULTED)
            add_changed(&g, first, end);
        else
            add(&g, first, end,
                d->kind == PMS_DIRTY_FRESH && whole && end - first >= PMS_STRAIGHT_HOME_PAGES);
    }
    if (faulted)
        forget(pool);
    return (uint32_t)merge(pool->tx.runs, g.count);
}
