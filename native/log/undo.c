#include "log/undo.h"

#include <string.h>

#include "base/pages.h"

#define DIRTY_SPACING PMS_LINE      /* ranges are merged, and blocks are a line at least */
#define DIRTY_ROOM_MAX (1ull << 27) /* ranges; address space only, memory as they come */

static bool marks_open(struct pms_marks *m, uint64_t pages)
{
    m->page = pms_reserve(pages * sizeof *m->page);
    m->whole = pms_reserve(pages * sizeof *m->whole);
    return m->page && m->whole;
}

static void marks_close(struct pms_marks *m, uint64_t pages)
{
    pms_unreserve((void *)m->page, pages * sizeof *m->page);
    pms_unreserve(m->whole, pages * sizeof *m->whole);
}

int pms_undo_open(struct pms_undo *u, struct pms_map *map, bool in_memory, struct pms_error *error)
{
    memset(u, 0, sizeof *u);
    u->map = map;
    u->persist = map->persist;
    u->log.in_memory = in_memory;
    u->log.persist = in_memory ? &u->log.own : map->persist;
    uint64_t pages = map->reserve / PMS_PAGE, room = map->reserve / DIRTY_SPACING;
    u->dirty.room = u->log.taken_room = room < DIRTY_ROOM_MAX ? room : DIRTY_ROOM_MAX;
    u->log.base = in_memory ? pms_reserve(map->reserve) : map->engine;
    u->log.steady = pms_reserve(PMS_CRC_BLOCK);
    u->log.taken = pms_reserve(u->log.taken_room * sizeof *u->log.taken);
    bool marks = marks_open(&u->prepared, pages) && marks_open(&u->changed, pages);
    u->left = pms_reserve(pages * sizeof *u->left);
    u->charge.slot = pms_reserve(pms_charge_marks_bytes(pages));
    u->granules.captured = pms_reserve(pages * sizeof *u->granules.captured);
    u->granules.born = pms_reserve(pages * sizeof *u->granules.born);
    u->dirty.at = pms_reserve(u->dirty.room * sizeof *u->dirty.at);
    if (u->log.base && u->log.steady && u->log.taken && marks && u->left && u->charge.slot &&
        u->granules.captured && u->granules.born && u->dirty.at)
        return PMS_OK;
    int status = pms_fail_errno(error, "reserving memory for the undo log");
    pms_undo_close(u);
    return status;
}

void pms_undo_close(struct pms_undo *u)
{
    if (!u->map)
        return;
    uint64_t pages = u->map->reserve / PMS_PAGE;
    if (u->log.in_memory)
        pms_unreserve(u->log.base, u->map->reserve);
    pms_unreserve(u->log.steady, PMS_CRC_BLOCK);
    pms_unreserve(u->log.taken, u->log.taken_room * sizeof *u->log.taken);
    marks_close(&u->prepared, pages);
    marks_close(&u->changed, pages);
    pms_unreserve(u->left, pages * sizeof *u->left);
    pms_unreserve((void *)u->charge.slot, pms_charge_marks_bytes(pages));
    pms_unreserve(u->granules.captured, pages * sizeof *u->granules.captured);
    pms_unreserve(u->granules.born, pages * sizeof *u->granules.born);
    pms_unreserve(u->dirty.at, u->dirty.room * sizeof *u->dirty.at);
    memset(u, 0, sizeof *u);
}

/* A log in memory: beyond its first part, which is all that small transactions use, it lies on
 * huge pages, cheaper by far to touch first. */
static void prefer_huge(struct pms_undo *u, const struct pms_log_extent *extent)
{
    uint64_t from = (extent->off + 2 * PMS_HUGE - 1) & ~(uint64_t)(PMS_HUGE - 1),
             to = extent->off + extent->bytes;
    if (u->log.in_memory && to >= from + PMS_HUGE)
        (void)madvise(u->log.base + from, (size_t)(to - from), MADV_HUGEPAGE);
}

/* A transaction and the one before it never have the same half. */
static void turn_halves(struct pms_log *l, uint64_t from, uint64_t to)
{
    for (uint32_t i = 1; i < l->extent_count; i++)
        l->extent[i].off = pms_undo_half(&l->extent[i], from, to);
}

static uint64_t half(uint64_t bytes) { return bytes / 2 & ~(uint64_t)(PMS_PAGE - 1); }

void pms_undo_set_extents(struct pms_undo *u, const struct pms_superblock *super)
{
    struct pms_log *l = &u->log;
    l->extent[0] = (struct pms_log_extent){PMS_OFF_FASTLOG(u->tag & 1), PMS_FASTLOG_BYTES};
    l->halves = super->features_incompat & PMS_FEATURE_HOLD;
    u->charge.slots = super->features_incompat & PMS_FEATURE_THIN;
    pms_backing_learn(&u->charge.backing, super, false);
    for (uint32_t i = 0; i < super->segment_count; i++) {
        l->extent[i + 1] = (struct pms_log_extent){super->segment[i].log_off,
                                                   super->segment[i].log_bytes};
        prefer_huge(u, &l->extent[i + 1]);
        if (l->halves)
            l->extent[i + 1].bytes = half(l->extent[i + 1].bytes);
    }
    l->extent_count = super->segment_count + 1;
    if (l->halves)
        turn_halves(l, 0, u->tag);
}

bool pms_undo_give_back(struct pms_undo *u)
{
    struct pms_log *l = &u->log;
    bool all = l->in_memory && !l->halves && l->at_extent == 0;
    for (uint32_t i = 1; all && i < l->extent_count; i++) {
        const struct pms_log_extent *x = &l->extent[i];
        (void)madvise(l->base + x->off, (size_t)x->bytes, MADV_DONTNEED);
        bool lies = l->spilled[i][0].bytes || l->spilled[i][1].bytes;
        if (lies && mmap(l->base + x->off, (size_t)x->bytes, PROT_READ | PROT_WRITE,
                         PMS_RESERVED | MAP_FIXED, -1, 0) == MAP_FAILED)
            return false;
        if (lies)
            prefer_huge(u, x);
        l->spilled[i][0].bytes = l->spilled[i][1].bytes = l->used[i] = 0;
    }
    if (all)
        l->memory_bytes = 0;
    return all;
}

uint64_t pms_undo_capacity(const struct pms_undo *u)
{
    uint64_t sum = 0; /* the fast log is a bonus */
    for (uint32_t i = 1; i < u->log.extent_count; i++)
        sum += pms_log_room_of(u->log.extent[i].bytes);
    return sum;
}

uint64_t pms_undo_capacity_of_half(const struct pms_undo *u)
{
    uint64_t sum = 0;
    for (uint32_t i = 1; i < u->log.extent_count; i++) {
        uint64_t bytes = u->log.extent[i].bytes;
        sum += pms_log_room_of(u->log.halves ? bytes : half(bytes));
    }
    return sum;
}

static void clear_granules(struct pms_undo *u)
{
    for (const struct pms_dirty *d = pms_dirty_first(&u->dirty); d < pms_dirty_end(&u->dirty);
         d++) {
        if (d->kind != PMS_DIRTY_ENGINE && d->kind != PMS_DIRTY_BORN)
            continue;
        uint64_t first = d->off / PMS_PAGE, last = (d->off + d->len - 1) / PMS_PAGE;
        memset(u->granules.captured[first], 0, (last - first + 1) * 2 * sizeof(uint64_t));
        if (d->kind == PMS_DIRTY_BORN)
            memset(u->granules.born[first], 0, (last - first + 1) * 2 * sizeof(uint64_t));
    }
}

void pms_undo_begin(struct pms_undo *u, uint64_t tag)
{
    PMS_ASSERT(tag > u->tag && tag <= PMS_TX_MASK);
    clear_granules(u);
    u->dirty.count = 0;
    if (u->log.halves)
        turn_halves(&u->log, u->tag, tag);
    u->tag = tag;
    u->log.seq = 0;
    u->stored = false;
    u->charge.of_slots = 0;
    u->log.extent[0] = (struct pms_log_extent){PMS_OFF_FASTLOG(tag & 1), PMS_FASTLOG_BYTES};
    u->log.at_extent = 0;
    u->log.at = 0;
    u->log.unfenced = false;
}
