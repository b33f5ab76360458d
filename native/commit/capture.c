
#include "commit/capture.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "log/bare.h"
#include "log/charge.h"
#include "seam/mappings.h"
#include "seam/spill.h"
#include "base/pages.h"
#include "base/region.h"
#include "base/sort.h"

/* of a large extent's first capture; x4 while faults stay sequential, up to: */
#define FIRST_BYTES (32u << 10)
#define STREAM_BYTES (2u << 20)
/* an extent that was written whole last time: enough for all cores to copy */
#define DENSE_BYTES (8u << 20)
/* where memory is short: on either side; and of one decision */
#define SPILL_REACH (512ull << 10)
#define SPILL_PIECE (2ull << 20)
#define WHOLE_BYTES (64u << 10) /* extents up to this size are captured whole */
#define HOT_HEAT 2u             /* captured in this many transactions in a row after the first */
/* likewise, of what is declared: it will be declared in the next one too */
#define SETTLED_HEAT 3u
#define HOT_LOOK 16u /* a hot range is looked at in one of this many commits, */
#define HOT_IDLE 2u  /* and cools when it was unchanged at this many looks in a row */

static_assert(offsetof(struct pms_span, off) == 0, "sorted by it");

static uint64_t page_down(uint64_t n) { return n & ~(uint64_t)(PMS_PAGE - 1); }
static uint64_t page_up(uint64_t n) { return page_down(n + PMS_PAGE - 1); }

static bool in_data(const struct pms_superblock *super, uint64_t off, uint64_t bytes)
{
    struct pms_region region = pms_region_of(super, off);
    return region.kind == PMS_REGION_DATA && bytes <= region.end - off;
}

/* ---- how much to capture around a fault ---- */

static struct pms_density *density_of(struct pms_capture *c, uint64_t extent)
{
    struct pms_density *d = &c->density[(extent / PMS_PAGE * 0x9e3779b97f4a7c15ull) >> 58];
    if (d->extent != extent)
        *d = (struct pms_density){.extent = extent};
    return d;
}

/* An extent written whole last time is likely to be written whole again. */
static void density_add(struct pms_capture *c, const struct pms_block *b, uint64_t bytes)
{
    struct pms_density *d = density_of(c, b->extent_off);
    if (d->tag != c->undo->tag) {
        d->dense = d->tag == c->undo->tag - 1 && d->bytes * 10 >= b->extent_bytes * 9;
        d->tag = c->undo->tag;
        d->bytes = 0;
    }
    d->bytes += bytes;
}

static struct pms_span large_span(struct pms_capture *c, const struct pms_block *b, uint64_t page)
{
    uint64_t end = b->extent_off + b->extent_bytes;
    if (b->extent_bytes <= WHOLE_BYTES)
        return (struct pms_span){b->extent_off, b->extent_bytes};
    density_add(c, b, 0);
    uint64_t bytes = FIRST_BYTES, from = page;
    struct pms_stream *s = &c->stream[(page / PMS_PAGE) & 63];
    if (density_of(c, b->extent_off)->dense) {
        bytes = DENSE_BYTES;
    } else if (s->next == page && s->bytes) {
        bytes = s->bytes * 4 < STREAM_BYTES ? s->bytes * 4 : STREAM_BYTES;
    } else {
        from = page & ~(uint64_t)(FIRST_BYTES - 1);
        if (from < b->extent_off)
            from = b->extent_off;
    }
    uint64_t to = from + bytes < end ? from + bytes : end;
    if (to < end && to - from >= PMS_HUGE / 2)
        /* at a huge page's edge: a change of protection does not break it up */
        to &= ~(uint64_t)(PMS_HUGE - 1);
    c->stream[(to / PMS_PAGE) & 63] = (struct pms_stream){to, bytes};
    density_add(c, b, to - from);
    return (struct pms_span){from, to - from};
}

/* false: not a place where users write. */
static bool choose_span(struct pms_capture *c, uint64_t off, struct pms_span *span)
{
    uint64_t page = page_down(off);
    struct pms_block b;
    if (!in_data(c->super, off, 1))
        return false;
    *span = (struct pms_span){page, PMS_PAGE};
    if (!pms_heap_find(c->heap, off, &b))
        return true; /* a dead block that a view still holds, or an index that is being rebuilt */
    if (b.kind == PMS_KIND_LARGE) {
        *span = large_span(c, &b, page);
    } else if (b.kind == PMS_KIND_SLAB) {
        uint64_t from = page_down(b.off), to = page_up(b.off + b.bytes);
        *span = (struct pms_span){from, to - from};
    }
    return b.kind == PMS_KIND_LARGE || b.kind == PMS_KIND_SLAB || b.kind == PMS_KIND_FREE;
}

static bool is_users_page(const struct pms_capture *c, uint64_t off)
{
    struct pms_block b;
    return pms_heap_find(c->heap, off, &b) && (b.kind == PMS_KIND_LARGE || b.kind == PMS_KIND_SLAB);
}

/* Whether so much more does not go into memory, but into the spill. */
static bool is_short(const struct pms_capture *c, uint64_t bytes)
{
    return pms_map_is_short(c->map, c->undo->log.memory_bytes, bytes);
}

/* Where mappings are scarce (mappings.h) a span grows on both sides up to what is writable
 * already, with which it is one mapping then: over blocks alone, for which the log has room
 * (I5). prepared: over pages that need no pre-image. Where memory is short, what goes to the spill
 * is a mapping, too. */
static struct pms_span widened(const struct pms_capture *c, struct pms_span span, bool prepared)
{
    uint64_t reach = pms_mappings_reach(), from = span.off, to = from + span.bytes;
    if (!prepared && is_short(c, span.bytes))
        reach = SPILL_REACH;
    uint64_t least = from > reach ? from - reach : 0,
             most = to + reach < c->map->bytes ? to + reach : c->map->bytes;
    for (int up = 0; up < 2; up++) {
        while (up ? to < most : from > least) {
            uint64_t next = up ? to : from - PMS_PAGE;
            bool may = !prepared || pms_undo_page_prepared(c->undo, next / PMS_PAGE);
            if (!may || pms_map_all_writable(c->map, next, PMS_PAGE) || !is_users_page(c, next))
                break;
            from -= up ? 0 : PMS_PAGE;
            to += up ? PMS_PAGE : 0;
        }
    }
    return (struct pms_span){from, to - from};
}

/* ---- capturing ---- */

static void warm(struct pms_capture *c, uint64_t off, uint64_t bytes)
{
    for (uint64_t p = off / PMS_PAGE, end = (off + bytes) / PMS_PAGE; p < end; p++) {
        bool again = pms_undo_page_tag(c->undo, p) == c->undo->tag - 1;
        c->heat[p] = !again ? 0 : c->heat[p] < 255 ? (uint8_t)(c->heat[p] + 1) : 255;
    }
}

/* A part's pre-image goes into the log, or is at home and stays there. */
static void append_part(struct pms_capture *c, uint64_t off, uint64_t bytes,
                        enum pms_dirty_kind kind)
{
    struct pms_undo *u = c->undo;
    if (kind == PMS_DIRTY_BARE) {
        pms_bare_capture(u, off, bytes);
    } else {
        pms_undo_append(u, off, bytes);
        pms_dirty_note(&u->dirty, kind, off, bytes);
    }
    warm(c, off, bytes);
    c->captures++;
}

void pms_capture_append(struct pms_capture *c, struct pms_span span, enum pms_dirty_kind kind)
{
    struct pms_undo *u = c->undo;
    uint64_t p = span.off / PMS_PAGE, end = (span.off + span.bytes) / PMS_PAGE;
    while (p < end) {
        if (pms_undo_page_prepared(u, p)) {
            p++;
            continue;
        }
        uint64_t first = p;
        while (p < end && !pms_undo_page_prepared(u, p))
            p++;
        uint64_t off = first * PMS_PAGE, bytes = (p - first) * PMS_PAGE;
        /* protect, then copy: else it is a mixture */
        PMS_ASSERT(!pms_map_all_writable(c->map, off, PMS_PAGE));
        for (uint64_t done = 0, n; done < bytes; done += n) {
            bool bare;
            n = pms_bare_part(u, off + done, bytes - done, &bare);
            append_part(c, off + done, n, bare ? PMS_DIRTY_BARE : kind);
        }
        pms_undo_set_prepared(u, off, bytes);
    }
}

/* What captures of a span take of the log that is not there yet: of slots. */
static uint64_t uncharged(const struct pms_capture *c, struct pms_span span)
{
    uint64_t pages = 0, end = (span.off + span.bytes) / PMS_PAGE;
    for (uint64_t p = span.off / PMS_PAGE; c->undo->charge.slots && p < end; p++)
        pages += pms_charge_is_slot(c->undo, p) && !pms_undo_page_prepared(c->undo, p);
    return pages * (PMS_PAGE + PMS_LINE);
}

static void unprotect(struct pms_capture *c, struct pms_span span)
{
    pms_map_unprotect_surely(c->map, span.off, span.bytes);
}

static void spill(struct pms_capture *c, struct pms_span span)
{
    uint64_t end = span.off + span.bytes, run;
    for (uint64_t at = span.off; at < end; at += run)
        if (pms_map_foreign(c->map, at, end - at, &run) && run >= PMS_SPILL_LEAST)
            (void)pms_spill_pages(c->map, at, run); /* else they take memory */
}

/* A span that was captured becomes writable. true: it is to be copied ahead. */
static bool take(struct pms_capture *c, struct pms_span span)
{
    if (!is_short(c, span.bytes))
        return pms_map_take(c->map, span.off, span.bytes);
    for (uint64_t done = 0, n; done < span.bytes; done += n) {
        n = span.bytes - done < SPILL_PIECE ? span.bytes - done : SPILL_PIECE;
        struct pms_span piece = {span.off + done, n};
        if (is_short(c, n))
            spill(c, piece);
        unprotect(c, piece);
    }
    return false;
}

/* The pages around `page` that are prepared already: a fresh block becomes writable at once, not
 * page by page. */
static struct pms_span prepared_run(struct pms_capture *c, struct pms_span span, uint64_t off)
{
    uint64_t first = off / PMS_PAGE, last = first;
    while (first * PMS_PAGE > span.off && pms_undo_page_prepared(c->undo, first - 1))
        first--;
    while ((last + 1) * PMS_PAGE < span.off + span.bytes &&
           pms_undo_page_prepared(c->undo, last + 1))
        last++;
    return (struct pms_span){first * PMS_PAGE, (last - first + 1) * PMS_PAGE};
}

/* Private views: a page of the engine's that it made writable, and that was protected with all
 * others when mappings ran out. */
static bool engine_page(const struct pms_capture *c, uint64_t off)
{
    return !c->map->shared && pms_undo_is_engines(c->undo, off / PMS_PAGE);
}

/* A fault cannot be refused: where the disk is full the process ends, and the last commit is the
 * state. */
static bool charge_fault(struct pms_capture *c, uint64_t off, struct pms_span *span)
{
    *span = widened(c, *span, false);
    if (pms_charge_slots(c->undo, uncharged(c, *span)) == 0)
        return true;
    *span = (struct pms_span){page_down(off), PMS_PAGE}; /* what has to be */
    c->watched.full = pms_charge_slots(c->undo, uncharged(c, *span)) != 0;
    return !c->watched.full;
}

static bool on_fault(struct pms_watched *w, uint64_t off)
{
    struct pms_capture *c = (struct pms_capture *)((char *)w -
                                                   offsetof(struct pms_capture, watched));
    struct pms_span span;
    pms_undo_lock(c->undo);
    c->faults++;
    bool ours = off < c->map->bytes;
    /* another thread was faster, or the store closed */
    if (ours && pms_map_all_writable(c->map, page_down(off), PMS_PAGE)) {
        pms_undo_unlock(c->undo);
        return true;
    }
    if (ours && engine_page(c, off)) {
        unprotect(c, (struct pms_span){page_down(off), PMS_PAGE});
        pms_undo_unlock(c->undo);
        return true;
    }
    ours = ours && choose_span(c, off, &span);
    if (ours && pms_undo_page_prepared(c->undo, off / PMS_PAGE)) {
        struct pms_block b;
        if (pms_heap_find(c->heap, off, &b))
            span = (struct pms_span){b.extent_off, b.extent_bytes};
        unprotect(c, widened(c, prepared_run(c, span, off), true));
    } else if (ours && charge_fault(c, off, &span)) {
        pms_capture_append(c, span, PMS_DIRTY_FAULTED);
        pms_undo_fence_locked(c->undo); /* F1: the entry, before its target becomes writable (I2) */
        if (take(c, span))
            pms_map_copy_ahead(c->map, span.off, span.bytes);
    } else {
        ours = false;
    }
    pms_undo_unlock(c->undo);
    return ours;
}

/* inside one block where users write */
static bool is_users(const struct pms_capture *c, struct pms_span span)
{
    struct pms_block b;
    if (!span.bytes || span.off >= c->map->bytes || span.bytes > c->map->bytes - span.off)
        return false;
    if (!pms_heap_find(c->heap, span.off, &b)) /* a dead block that a view still holds */
        return in_data(c->super, span.off, span.bytes);
    bool users = b.kind == PMS_KIND_LARGE || b.kind == PMS_KIND_SLAB;
    return users && span.off + span.bytes <= b.extent_off + b.extent_bytes;
}

static bool span_of_pages(const struct pms_capture *c, struct pms_span *span,
                          struct pms_error *error)
{
    if (is_users(c, *span)) {
        uint64_t from = page_down(span->off), to = page_up(span->off + span->bytes);
        *span = (struct pms_span){from, to - from};
        return true;
    }
    pms_fail(error, PMS_E_INVALID, "the range to write is not inside an array of this store");
    return false;
}

/* Of sorted spans: the one at *next and its neighbours, as one. The first and the last page of
 * two blocks are often one, or side by side. */
static struct pms_span take_run(const struct pms_span *span, uint64_t count, uint64_t *next)
{
    uint64_t i = *next, from = span[i].off, to = from + span[i].bytes;
    for (i++; i < count && span[i].off >= from && span[i].off <= to; i++)
        if (span[i].off + span[i].bytes > to)
            to = span[i].off + span[i].bytes;
    *next = i;
    return (struct pms_span){from, to - from};
}

/* Sorted neighbours become writable by one system call. captured: not fresh blocks, which may
 * never be stored to. Moves what is to be copied ahead to the front of the spans and returns its
 * number. */
static uint64_t unprotect_spans(struct pms_capture *c, struct pms_span *span, uint64_t count,
                                bool captured)
{
    uint64_t taken = 0;
    for (uint64_t i = 0; i < count;) {
        struct pms_span run = take_run(span, count, &i);
        if (!captured)
            unprotect(c, run);
        else if (take(c, run))
            span[taken++] = run;
    }
    return taken;
}

/* A run of small blocks that is declared again and again: its protection changes twice in every
 * transaction, on huge pages at a fraction of the cost. They are asked for once, as for a block
 * that is large by itself when it is made. Moves such runs to the front of the spans, which have
 * been used, and returns their number. */
static uint64_t choose_settled(const struct pms_capture *c, struct pms_span *span, uint64_t count)
{
    uint64_t chosen = 0;
    for (uint64_t i = 0; i < count;) {
        struct pms_span run = take_run(span, count, &i);
        uint64_t huge = (run.off + PMS_HUGE - 1) & ~(uint64_t)(PMS_HUGE - 1);
        if (huge + PMS_HUGE <= run.off + run.bytes && c->heat[huge / PMS_PAGE] == SETTLED_HEAT)
            span[chosen++] = run;
    }
    return chosen;
}

/* All of them, or nothing is captured. */
static int charge_spans(struct pms_capture *c, const struct pms_span *span, uint64_t count,
                        struct pms_error *error)
{
    uint64_t need = 0;
    for (uint64_t i = 0; c->undo->charge.slots && i < count;)
        need += uncharged(c, take_run(span, count, &i));
    errno = pms_charge_slots(c->undo, need);
    if (!errno)
        return PMS_OK;
    int status = pms_fail_errno(error, "allocating log space for slots that are written in place");
    if (error)
        error->needed = need;
    return status;
}

int pms_capture_spans(struct pms_capture *c, struct pms_span *span, uint64_t count,
                      struct pms_error *error)
{
    uint64_t bytes = 0, kept = 0;
    for (uint64_t i = 0; i < count; i++) { /* all valid, or nothing done */
        if (!span[i].bytes)
            continue;
        span[kept] = span[i];
        if (!span_of_pages(c, &span[kept], error))
            return PMS_E_INVALID;
        bytes += span[kept++].bytes;
    }
    pms_sort(span, kept, sizeof *span);
    pms_undo_lock(c->undo);
    int status = charge_spans(c, span, kept, error);
    if (status != PMS_OK) {
        pms_undo_unlock(c->undo);
        return status;
    }
    bool by_all_cores = bytes >= PMS_UNDO_PARALLEL;
    if (by_all_cores)
        pms_undo_gather(c->undo);
    uint64_t before = c->captures;
    for (uint64_t i = 0; i < kept; i++)
        pms_capture_append(c, span[i], PMS_DIRTY_USER);
    if (by_all_cores)
        pms_undo_gathered(c->undo);
    /* F1: all entries, before any of their targets becomes writable (I2) */
    pms_undo_fence_locked(c->undo);
    bool captured = c->captures > before; /* once in a transaction */
    uint64_t taken = unprotect_spans(c, span, kept, captured);
    uint64_t settled = captured && c->map->shared ? choose_settled(c, span, kept) : 0;
    pms_undo_unlock(c->undo);
    /* not under the lock, as what follows: it takes milliseconds */
    for (uint64_t i = 0; i < settled; i++)
        pms_map_prefer_huge(c->map, span[i].off, span[i].bytes);
    for (uint64_t i = 0; i < taken; i++)
        pms_map_copy_ahead(c->map, span[i].off, span[i].bytes);
    return PMS_OK;
}

/* ---- at the end of a transaction ---- */

static bool is_hot(const struct pms_capture *c, const struct pms_dirty *d)
{
    return (d->kind == PMS_DIRTY_USER || d->kind == PMS_DIRTY_FAULTED) &&
           d->len <= PMS_HOT_RANGE_MAX && c->heat[d->off / PMS_PAGE] >= HOT_HEAT;
}

static bool unchanged(const struct pms_capture *c, const struct pms_dirty *d)
{
    return memcmp(c->map->user + d->off, pms_undo_image(c->undo, d->log_pos), d->len) == 0;
}

/* A hot range that nobody writes any more costs a capture at every commit: now and then one is
 * compared. */
static bool still_hot(struct pms_capture *c, struct pms_dirty *d)
{
    if ((c->undo->tag + d->off / PMS_PAGE) % HOT_LOOK == 0)
        d->idle = unchanged(c, d) ? (uint16_t)(d->idle + 1) : 0;
    return d->idle < HOT_IDLE;
}

static void none_kept(struct pms_dirty_list *l)
{
    for (struct pms_dirty *d = pms_dirty_first(l); d < pms_dirty_end(l); d++)
        d->kept = false;
}

uint32_t pms_capture_choose_hot(struct pms_capture *c, struct pms_dirty *hot)
{
    uint32_t n = 0;
    uint64_t total = 0;
    struct pms_dirty_list *l = &c->undo->dirty;
    none_kept(l); /* of a commit that failed */
    for (struct pms_dirty *d = pms_dirty_first(l);
         c->hot && d < pms_dirty_end(l) && n < PMS_HOT_RANGES; d++) {
        bool keep = d->kind == PMS_DIRTY_HOT ? still_hot(c, d) : is_hot(c, d);
        if (!keep || total + d->len + PMS_LINE > PMS_HOT_TOTAL_MAX)
            continue;
        /* written without capture from now on */
        if (pms_undo_page_tag(c->undo, d->off / PMS_PAGE) == PMS_TAG_IDLE)
            continue;
        /* Once the mappings ran out pages may be read-only though captured; those are not worth
         * keeping. */
        if (!pms_map_all_writable(c->map, d->off, d->len))
            continue;
        total += d->len + PMS_LINE;
        hot[n++] = *d;
        hot[n - 1].kind = PMS_DIRTY_HOT;
        d->kind = PMS_DIRTY_HOT; /* written back like the others, but not protected */
        d->kept = true;
    }
    return n;
}

static bool leaves_writable(const struct pms_dirty *d)
{
    if (d->kind == PMS_DIRTY_HOT)
        return !d->kept; /* else it cooled */
    return d->kind == PMS_DIRTY_USER || d->kind == PMS_DIRTY_FAULTED ||
           d->kind == PMS_DIRTY_FRESH || d->kind == PMS_DIRTY_BARE;
}

void pms_capture_protect(struct pms_capture *c)
{
    const struct pms_dirty *d = pms_dirty_first(&c->undo->dirty);
    const struct pms_dirty *end = d + pms_dirty_pick(&c->undo->dirty, leaves_writable);
    while (d < end) {
        uint64_t from = page_down(d->off), to = page_up(d->off + d->len);
        for (d++; d < end && page_down(d->off) <= to; d++)
            if (page_up(d->off + d->len) > to)
                to = page_up(d->off + d->len);
        /* what was written as a whole is protected as a whole: its block may have room behind */
        to = pms_undo_block_end(c->undo, to);
        if (pms_map_protect(c->map, from, to - from) != 0) {
            /* one mapping of all: can not run out */
            int err = pms_map_protect(c->map, 0, c->map->bytes);
            PMS_ASSERT(err == 0);
            return;
        }
    }
}

void pms_capture_protect_all(struct pms_capture *c)
{
    none_kept(&c->undo->dirty);
    pms_capture_protect(c);
}

void pms_capture_copy_hot(struct pms_capture *c, struct pms_dirty *hot, uint32_t count)
{
    struct pms_ahead next = {0};
    for (uint32_t i = 0; i < count; i++)
        hot[i].log_pos = pms_undo_copy_ahead(c->undo, &next, hot[i].off, hot[i].len);
}

void pms_capture_drop_hot(struct pms_capture *c, const struct pms_dirty *hot, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        pms_undo_drop_ahead(c->undo, hot[i].log_pos, hot[i].len);
}

void pms_capture_take_hot(struct pms_capture *c, const struct pms_dirty *hot, uint32_t count)
{
    struct pms_undo *u = c->undo;
    for (uint32_t i = 0; i < count; i++) {
        const struct pms_dirty *d = &hot[i];
        pms_undo_take_ahead(u, d->off, d->len);
        pms_dirty_add(&u->dirty, d);
        warm(c, d->off, d->len);
        pms_undo_set_prepared(u, d->off, d->len);
    }
}

bool pms_capture_hot_changed(const struct pms_capture *c)
{
    const struct pms_dirty_list *l = &c->undo->dirty;
    for (const struct pms_dirty *d = pms_dirty_first(l); d < pms_dirty_end(l); d++)
        if (d->kind == PMS_DIRTY_HOT && !unchanged(c, d))
            return true;
    return false;
}

/* ---- life ---- */

int pms_capture_open(struct pms_capture *c, struct pms_undo *undo, struct pms_heap *heap,
                     const struct pms_superblock *super, bool read_only, bool hot,
                     struct pms_error *error)
{
    memset(c, 0, sizeof *c);
    c->undo = undo;
    c->map = undo->map;
    c->heap = heap;
    c->super = super;
    c->watched = (struct pms_watched){.map = c->map, .fault = on_fault, .read_only = read_only};
    c->hot = hot;
    c->heat = pms_reserve(undo->map->reserve / PMS_PAGE);
    if (!c->heat)
        return pms_fail_errno(error, "reserving memory for capture");
    if (!pms_handler_register(&c->watched)) {
        pms_unreserve(c->heat, undo->map->reserve / PMS_PAGE);
        c->heat = NULL;
        return pms_fail(error, PMS_E_STATE,
                        "too many stores are open in this process (at most 64)");
    }
    return PMS_OK;
}

void pms_capture_close(struct pms_capture *c)
{
    if (!c->heat)
        return;
    pms_handler_unregister(&c->watched);
    pms_unreserve(c->heat, c->map->reserve / PMS_PAGE);
    c->heat = NULL;
}
