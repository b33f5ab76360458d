#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/sort.h"
#include "heap/state.h"
#include "log/charge.h"
#include "log/idle.h"
#include "log/marks.h"

#define HUGE_PAGES (PMS_HUGE / PMS_PAGE)
#define SLAB_PAGES_MAX 64u /* of any class; tests/test_heap.c checks it */
/* descriptors that one allocation stores: before it, its own, after it */
#define EDITS_MAX 3u
#define GIVE_BACK_MAX 4u /* surplus slabs given back in one operation */
/* when space is short a small block may take a slot of at most so many times its class's */
#define BORROW_MAX 4u
/* space is always short where a slab is more than this part of the store */
#define SMALL_STORE 64u

static enum pms_kind slab_kind(enum pms_owner owner)
{
    return owner == PMS_OWNER_USER ? PMS_KIND_SLAB : PMS_KIND_META_SLAB;
}

static enum pms_kind large_kind(enum pms_owner owner)
{
    return owner == PMS_OWNER_USER ? PMS_KIND_LARGE : PMS_KIND_META_LARGE;
}

/* ---- storing descriptors: all of one operation share a fence ---- */

struct edits {
    const struct pms_table *table;
    struct pms_descriptor extent[EDITS_MAX];
    unsigned count;
    const uint64_t *bitmap; /* of the slab among them: follows its descriptor; else NULL */
};

static void edits_store(struct pms_heap *h, const struct edits *ed)
{
    struct pms_pte entries[EDITS_MAX][SLAB_PAGES_MAX];
    struct pms_store store[EDITS_MAX];
    for (unsigned i = 0; i < ed->count; i++) {
        const struct pms_descriptor *x = &ed->extent[i];
        uint64_t bytes = sizeof(struct pms_pte) * (pms_kind_is_slab(x->kind) ? x->pages : 1);
        PMS_ASSERT(bytes <= sizeof entries[i]);
        memset(entries[i], 0, bytes);
        entries[i][0] = pms_table_encode(x);
        if (pms_kind_is_slab(x->kind))
            memcpy(&entries[i][1], ed->bitmap, pms_slab_words(x->cls) * sizeof(uint64_t));
        store[i] = (struct pms_store){pms_table_entry(ed->table, x->page), entries[i], bytes};
    }
    pms_undo_store_all(h->undo, store, ed->count);
}

static struct pms_descriptor free_extent(uint64_t from, uint64_t to)
{
    return (struct pms_descriptor){.page = from, .pages = to - from, .kind = PMS_KIND_FREE};
}

/* Stores the descriptor of x, which lies in the free range, so that all descriptors still tile
 * the segment: pages of a torn FREE extent before and behind it get one of their own, as long as
 * the range allows. */
static void describe(struct pms_heap *h, const struct pms_extent *range,
                     const struct pms_descriptor *x, const uint64_t *bitmap)
{
    struct pms_starts *st = &h->starts;
    struct edits ed = {.table = pms_heap_table_of(h, x->page), .bitmap = bitmap};
    uint64_t segment_end = ed.table->first + ed.table->pages;
    uint64_t page = x->page, end = x->page + x->pages, range_end = range->page + range->pages;
    PMS_ASSERT(page >= range->page && end <= range_end && range_end <= segment_end);
    if (!pms_starts_has(st, page)) {
        uint64_t from = pms_starts_has(st, range->page) ? range->page : pms_starts_before(st, page);
        ed.extent[ed.count++] = free_extent(from, page);
        pms_starts_clear(st, from + 1, page);
    }
    ed.extent[ed.count++] = *x;
    if (end < segment_end && !pms_starts_has(st, end)) {
        uint64_t to = range_end;
        if (to < segment_end && !pms_starts_has(st, to)) {
            to = pms_starts_after(st, end);
            to = to < segment_end ? to : segment_end;
        }
        ed.extent[ed.count++] = free_extent(end, to);
        pms_starts_clear(st, end + 1, to);
        pms_starts_set(st, end);
    }
    pms_starts_clear(st, page + 1, end);
    pms_starts_set(st, page);
    edits_store(h, &ed);
}

/* ---- allocating ---- */

/* to the free ranges; its log is not needed any more */
static void extent_gone(struct pms_heap *h, struct pms_extent *e)
{
    pms_heap_discharge(h, e);
    pms_index_undefer(&h->index, e);
    pms_index_release(&h->index, e);
}

/* An empty slab becomes free pages: at once if it was born in this transaction, else after the
 * commit (I6). */
static void slab_give_back(struct pms_heap *h, struct pms_extent *e)
{
    PMS_ASSERT(e->state == PMS_EXTENT_SLAB && e->used == 0 && e->pins == 0);
    struct edits ed = {.table = pms_heap_table_of(h, e->page), .count = 1};
    ed.extent[0] = free_extent(e->page, e->page + e->pages);
    edits_store(h, &ed);
    pms_slab_unlist(&h->index, e);
    h->slot_room -= (uint64_t)pms_class_slots(e->cls) * pms_class_bytes(e->cls);
    e->state = PMS_EXTENT_DEAD;
    if (pms_heap_born_now(h, e))
        extent_gone(h, e);
    else
        pms_index_defer(&h->index, e);
}

/* Of each class one empty slab is kept against going back and forth. */
static void give_back_surplus(struct pms_heap *h)
{
    struct pms_index *ix = &h->index;
    unsigned budget = GIVE_BACK_MAX;
    for (unsigned i = 0; i < 2 * PMS_CLASSES / 64 && budget; i++) {
        unsigned owner = i / (PMS_CLASSES / 64), w = i % (PMS_CLASSES / 64);
        for (; ix->surplus[owner][w] && budget; budget--)
            slab_give_back(
                h, ix->slabs[owner][w * 64 + (unsigned)__builtin_ctzll(ix->surplus[owner][w])]
                       .bucket[0]);
    }
}

/* space is short: the empty ones that are kept, too */
static void give_back_all(struct pms_heap *h)
{
    for (unsigned owner = 0; owner < 2; owner++)
        for (unsigned cls = 0; cls < pms_class_count(); cls++)
            while (h->index.slabs[owner][cls].bucket[0])
                slab_give_back(h, h->index.slabs[owner][cls].bucket[0]);
}

static int no_room(struct pms_error *error, const char *what, uint64_t needed, uint64_t available)
{
    int status = pms_fail(error, PMS_E_FULL, "%s", what);
    if (error) {
        error->needed = needed;
        error->available = available;
    }
    return status;
}

static int back_log(struct pms_heap *h, uint64_t cost, struct pms_error *error)
{
    uint64_t need = h->log_need - h->slot_need + cost;
    errno = pms_charge_ordinary(h->undo, need);
    if (!errno)
        return PMS_OK;
    int status = pms_fail_errno(error, "allocating log space for the new block on the disk");
    if (error)
        error->needed = cost;
    return status;
}

/* Finds room for an extent: space, log (I5) and memory for the index. Changes nothing. */
static int find_room(struct pms_heap *h, const struct pms_descriptor *x, struct pms_extent **range,
                     uint64_t *page, struct pms_error *error)
{
    uint64_t cost = pms_heap_log_cost(pms_kind_owner(x->kind), x->pages);
    uint64_t need = h->log_need + cost, capacity = pms_undo_capacity(h->undo);
    if (need > capacity)
        return no_room(error, "the log has no room for the new block", need, capacity);
    *range = pms_index_best(&h->index, x->pages, x->pages >= HUGE_PAGES ? HUGE_PAGES : 1, page);
    if (!*range)
        return no_room(error, "no free range is large enough", x->pages * PMS_PAGE,
                       pms_index_largest(&h->index) * PMS_PAGE);
    if (pms_index_reserve(&h->index))
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    return x->slot ? PMS_OK : back_log(h, cost, error);
}

/* Makes the extent x (whose page is still open). bitmap: of a slab. */
static int extent_new(struct pms_heap *h, struct pms_descriptor *x, const uint64_t *bitmap,
                      struct pms_extent **out, struct pms_error *error)
{
    struct pms_extent *range = NULL;
    enum pms_owner owner = pms_kind_owner(x->kind);
    int status = find_room(h, x, &range, &x->page, error);
    if (status)
        return status;
    PMS_ASSERT(range && (x->pages < HUGE_PAGES || x->page % HUGE_PAGES == 0));
    describe(h, range, x, bitmap);
    struct pms_extent *e = pms_index_carve(&h->index, range, x->page, x->pages);
    e->owner = (uint8_t)owner;
    e->round = h->round;
    e->slot = x->slot;
    pms_heap_charge(h, e);
    if (owner == PMS_OWNER_USER) /* dead at the last commit, all of it: no pre-images */
        pms_undo_mark_fresh(h->undo, x->page * PMS_PAGE, x->pages * PMS_PAGE);
    *out = e;
    return PMS_OK;
}

static int large_alloc(struct pms_heap *h, uint64_t bytes, enum pms_owner owner, bool slot,
                       uint64_t *off, struct pms_error *error)
{
    uint64_t pages = (bytes - 1) / PMS_PAGE + 1;
    struct pms_extent *e;
    if (pages > PMS_EXTENT_PAGES_MAX)
        return no_room(error, "no free range is large enough", bytes,
                       pms_index_largest(&h->index) * PMS_PAGE);
    struct pms_descriptor x = {
        .pages = pages, .aux = bytes, .kind = large_kind(owner), .slot = slot};
    int status = extent_new(h, &x, NULL, &e, error);
    if (status)
        return status;
    e->state = PMS_EXTENT_LARGE;
    h->live_blocks++;
    h->live_bytes += pages * PMS_PAGE;
    *off = e->page * PMS_PAGE;
    return PMS_OK;
}

/* born and dead bits of this transaction */
static void born_round(const struct pms_heap *h, struct pms_extent *e)
{
    if (e->bits_round == h->round)
        return;
    memset(pms_slab_born(e), 0, 2 * pms_slab_words(e->cls) * sizeof(uint64_t));
    e->bits_round = h->round;
}

/* its block's offset */
static uint64_t slot_taken(struct pms_heap *h, struct pms_extent *e, uint32_t slot)
{
    uint64_t bytes = pms_class_bytes(e->cls);
    born_round(h, e);
    pms_bit_set(pms_slab_born(e), slot);
    h->live_blocks++;
    h->live_bytes += bytes;
    h->slot_room -= bytes;
    return e->page * PMS_PAGE + slot * bytes;
}

/* A new slab with its first slot taken: descriptor and whole bitmap in one store. */
static int slab_new(struct pms_heap *h, unsigned cls, enum pms_owner owner, uint64_t *off,
                    struct pms_error *error)
{
    uint64_t *bits = pms_slab_bits_new(cls), bitmap[SLAB_PAGES_MAX * 2] = {1};
    struct pms_extent *e;
    if (!bits)
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    struct pms_descriptor x = {.pages = pms_class_pages(cls), .cls = cls, .kind = slab_kind(owner)};
    int status = extent_new(h, &x, bitmap, &e, error);
    if (status) {
        free(bits);
        return status;
    }
    e->state = PMS_EXTENT_SLAB;
    e->bits = bits;
    e->cls = (uint8_t)cls;
    h->slot_room += (uint64_t)pms_class_slots(cls) * pms_class_bytes(cls);
    uint32_t slot = pms_slab_take(&h->index, e);
    PMS_ASSERT(slot == 0 && pms_heap_slot_live(h, e, slot));
    *off = slot_taken(h, e, slot);
    return PMS_OK;
}

static uint64_t slot_alloc(struct pms_heap *h, struct pms_extent *e)
{
    const struct pms_table *t = pms_heap_table_of(h, e->page);
    uint32_t slot = pms_slab_take(&h->index, e);
    uint64_t at = pms_table_bitmap(t, e->page, slot / 64), word = pms_table_load(h->map, at),
             bit = 1ull << (slot % 64);
    PMS_ASSERT(!(word & bit)); /* not busy in the index, so free on the medium */
    word |= bit;
    pms_undo_store(h->undo, at, &word, sizeof word);
    return slot_taken(h, e, slot);
}

/* The first slab with a free slot among the class of bytes and those whose slots are at most
 * BORROW_MAX times as large. */
static struct pms_extent *borrowed_slab(const struct pms_heap *h, uint64_t bytes,
                                        enum pms_owner owner)
{
    unsigned cls = pms_class_of(bytes);
    uint32_t most = pms_class_bytes(cls) * BORROW_MAX;
    for (; cls < pms_class_count() && pms_class_bytes(cls) <= most; cls++) {
        struct pms_extent *e = pms_slab_fullest(&h->index, owner, cls);
        if (e)
            return e;
    }
    return NULL;
}

static int small_alloc(struct pms_heap *h, uint64_t bytes, enum pms_owner owner, uint64_t *off,
                       struct pms_error *error)
{
    unsigned cls = pms_class_of(bytes);
    struct pms_extent *e = pms_slab_fullest(&h->index, owner, cls);
    if (!e && (uint64_t)pms_class_pages(cls) * SMALL_STORE > h->data_pages)
        e = borrowed_slab(h, bytes, owner);
    if (!e)
        return slab_new(h, cls, owner, off, error);
    *off = slot_alloc(h, e);
    return PMS_OK;
}

/* Space is short: a slab after all, or a free slot of a larger class, or else pages of its own. */
static int small_alloc_short(struct pms_heap *h, uint64_t bytes, enum pms_owner owner,
                             uint64_t *off, struct pms_error *error)
{
    int status = small_alloc(h, bytes, owner, off, error);
    if (status != PMS_E_FULL)
        return status;
    struct pms_extent *e = borrowed_slab(h, bytes, owner);
    if (!e)
        return large_alloc(h, bytes, owner, false, off, error);
    *off = slot_alloc(h, e);
    return PMS_OK;
}

int pms_heap_alloc(struct pms_heap *h, uint64_t bytes, enum pms_owner owner, uint64_t *off,
                   struct pms_error *error)
{
    if (bytes == 0)
        return pms_fail(error, PMS_E_INVALID, "a block of no bytes");
    give_back_surplus(h);
    bool small = bytes <= PMS_SMALL_MAX;
    int status = small ? small_alloc(h, bytes, owner, off, error)
                       : large_alloc(h, bytes, owner, false, off, error);
    if (status != PMS_E_FULL)
        return status;
    give_back_all(h);
    return small ? small_alloc_short(h, bytes, owner, off, error)
                 : large_alloc(h, bytes, owner, false, off, error);
}

int pms_heap_alloc_slot(struct pms_heap *h, uint64_t bytes, uint64_t *off, struct pms_error *error)
{
    PMS_ASSERT(h->undo->charge.slots && bytes > PMS_SMALL_MAX);
    give_back_surplus(h);
    int status = large_alloc(h, bytes, PMS_OWNER_USER, true, off, error);
    if (status != PMS_E_FULL)
        return status;
    give_back_all(h);
    return large_alloc(h, bytes, PMS_OWNER_USER, true, off, error);
}

/* ---- freeing ---- */

/* may be taken again */
static void slot_gone(struct pms_heap *h, struct pms_extent *e, uint32_t slot)
{
    pms_slab_give(&h->index, e, slot);
    h->slot_room += pms_class_bytes(e->cls);
}

static void slot_free(struct pms_heap *h, struct pms_extent *e, uint32_t slot, bool pinned)
{
    uint64_t at = pms_table_bitmap(pms_heap_table_of(h, e->page), e->page, slot / 64),
             bit = 1ull << (slot % 64);
    uint64_t word = pms_table_load(h->map, at) & ~bit;
    pms_undo_store(h->undo, at, &word, sizeof word);
    h->live_blocks--;
    h->live_bytes -= pms_class_bytes(e->cls);
    born_round(h, e);
    if (pms_bit(pms_slab_born(e), slot) && !pinned) {
        slot_gone(h, e, slot);
        return;
    }
    pms_bit_set(pms_slab_dead(e), slot);
    pms_index_defer(&h->index, e);
}

static void large_free(struct pms_heap *h, struct pms_extent *e, bool pinned)
{
    struct edits ed = {.table = pms_heap_table_of(h, e->page), .count = 1};
    ed.extent[0] = free_extent(e->page, e->page + e->pages);
    edits_store(h, &ed);
    h->live_blocks--;
    h->live_bytes -= e->pages * PMS_PAGE;
    e->state = PMS_EXTENT_DEAD;
    if (pms_heap_born_now(h, e) && !pinned)
        extent_gone(h, e);
    else
        pms_index_defer(&h->index, e);
}

static int no_block(uint64_t off, struct pms_error *error)
{
    int status = pms_fail(error, PMS_E_INVALID, "no block starts at this offset");
    if (error)
        error->offset = off;
    return status;
}

int pms_heap_free(struct pms_heap *h, uint64_t off, struct pms_error *error)
{
    struct pms_extent *e = pms_heap_live_block(h, off);
    if (!e)
        return no_block(off, error);
    bool pinned = e->pins && pms_pin_find(&h->index, off);
    if (e->state == PMS_EXTENT_LARGE) {
        pms_idle_close(h->undo, off, e->pages * PMS_PAGE);
        pms_undo_part_block(h->undo, off);
        large_free(h, e, pinned);
    } else {
        /* live on the medium, so busy in the index */
        PMS_ASSERT(pms_bit(pms_slab_busy(e), pms_heap_slot_at(e, off)));
        slot_free(h, e, pms_heap_slot_at(e, off), pinned);
    }
    give_back_surplus(h);
    return PMS_OK;
}

static void commit_slab(struct pms_heap *h, struct pms_extent *e)
{
    if (e->bits_round != h->round)
        return;
    for (uint32_t w = 0; w < pms_slab_words(e->cls); w++)
        for (uint64_t dead = pms_slab_dead(e)[w]; dead; dead &= dead - 1) {
            uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(dead);
            uint64_t off = e->page * PMS_PAGE + (uint64_t)slot * pms_class_bytes(e->cls);
            if (!e->pins || !pms_pin_find(&h->index, off))
                slot_gone(h, e, slot);
        }
}

/* Slots that were freed in the transaction, pinned ones too. */
static void hold_slab(struct pms_heap *h, struct pms_extent *e)
{
    if (e->bits_round == h->round)
        memcpy(pms_slab_held(e), pms_slab_dead(e), pms_slab_words(e->cls) * sizeof(uint64_t));
}

static void release_slab(struct pms_heap *h, struct pms_extent *e)
{
    for (uint32_t w = 0; w < pms_slab_words(e->cls); w++) {
        uint64_t held = pms_slab_held(e)[w];
        pms_slab_held(e)[w] = 0;
        for (; held; held &= held - 1) {
            uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(held);
            uint64_t off = e->page * PMS_PAGE + (uint64_t)slot * pms_class_bytes(e->cls);
            if (!e->pins || !pms_pin_find(&h->index, off))
                slot_gone(h, e, slot);
        }
    }
}

void pms_heap_release(struct pms_heap *h)
{
    while (h->index.held) {
        struct pms_extent *e = h->index.held;
        h->index.held = e->held_next;
        e->held = false;
        if (e->state == PMS_EXTENT_SLAB)
            release_slab(h, e);
        else if (!e->pins && !e->deferred) /* those: when what freed them commits */
            extent_gone(h, e);
    }
}

void pms_heap_committed(struct pms_heap *h, bool hold)
{
    if (h->index.held)
        pms_heap_release(h);
    while (h->index.deferred) {
        struct pms_extent *e = h->index.deferred;
        pms_index_undefer(&h->index, e);
        if (hold)
            pms_index_hold(&h->index, e);
        if (e->state == PMS_EXTENT_SLAB) {
            if (hold)
                hold_slab(h, e);
            else
                commit_slab(h, e);
        } else if (!hold && !e->pins) {
            extent_gone(h, e);
        }
    }
    h->round++;
    pms_charge_less(h->undo, h->log_need - h->slot_need);
}

/* ---- pins ---- */

int pms_heap_pin(struct pms_heap *h, uint64_t off, struct pms_error *error)
{
    struct pms_pin *pin = pms_pin_find(&h->index, off);
    if (pin) {
        pin->count++;
        return PMS_OK;
    }
    struct pms_extent *e = pms_heap_live_block(h, off);
    if (!e)
        return no_block(off, error);
    uint64_t bytes = e->state == PMS_EXTENT_SLAB ? pms_class_bytes(e->cls) : e->pages * PMS_PAGE;
    if (pms_pin_add(&h->index, &(struct pms_pin){off, bytes, e->page, e->pages, 1, e->slot}))
        return pms_fail(error, PMS_E_OS, "no memory for a pin");
    e->pins++;
    return PMS_OK;
}

static void slot_unpinned(struct pms_heap *h, struct pms_extent *e, uint32_t slot)
{
    if (pms_heap_slot_live(h, e, slot))
        return;
    if (e->bits_round == h->round && pms_bit(pms_slab_dead(e), slot)) {
        if (!pms_bit(pms_slab_born(e), slot))
            return; /* freed in this transaction: the commit lets it go */
        pms_bit_clear(pms_slab_dead(e), slot);
    }
    if (pms_bit(pms_slab_held(e), slot))
        return; /* the release lets it go */
    slot_gone(h, e, slot);
    if (e->used == 0)
        pms_index_undefer(&h->index, e);
}

void pms_heap_unpin(struct pms_heap *h, uint64_t off)
{
    struct pms_pin *pin = pms_pin_find(&h->index, off);
    PMS_ASSERT(pin && pin->count > 0);
    if (--pin->count)
        return;
    struct pms_extent *e = pms_index_at(&h->index, pin->page);
    PMS_ASSERT(e && e->pages == pin->pages && e->pins > 0);
    pms_pin_drop(&h->index, pin);
    e->pins--;
    if (e->state == PMS_EXTENT_SLAB)
        slot_unpinned(h, e, pms_heap_slot_at(e, off));
    else if (e->state == PMS_EXTENT_DEAD && !e->pins && !e->held &&
             (!e->deferred || pms_heap_born_now(h, e)))
        extent_gone(h, e);
}

struct pms_pin *pms_heap_take_pins(struct pms_heap *h, uint64_t *count)
{
    struct pms_pin *pin = h->index.pin;
    *count = 0;
    for (uint64_t i = 0; i < h->index.pin_room; i++)
        if (pin[i].off)
            pin[(*count)++] = pin[i];
    h->index.pin = NULL;
    h->index.pin_room = h->index.pin_used = 0;
    pms_sort(pin, *count, sizeof *pin);
    return pin;
}
