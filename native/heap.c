#include "heap.h"

#include <stdlib.h>
#include <string.h>

#include "checksum.h"
#include "heap_index.h"

#define PAGES_BITS 36u
#define PAGES_MAX ((1ull << PAGES_BITS) - 1)
#define HUGE_PAGES (PMS_HUGE / PMS_PAGE)
#define CLASS_SHIFT 36u
#define KIND_SHIFT 44u
#define CHECK_SHIFT 48u
#define SLAB_PAGES_MAX 64u   /* of any class; tests/test_heap.c checks it */
#define EDITS_MAX 3u         /* descriptors that one allocation stores: before it, its own, after it */
#define GIVE_BACK_MAX 4u     /* surplus slabs given back in one operation */
#define BORROW_MAX 4u        /* when space is short a small block may take a slot of at most so many times its class's */
#define SMALL_STORE 64u      /* space is always short where a slab is more than this part of the store */
#define LOG_SLACK (2u * PMS_PAGE) /* root record, and the descriptors' rounding to granules */

struct segment { uint64_t first, pages, table_off; };

struct pms_heap {
    struct pms_undo *undo;
    struct pms_map *map;
    const struct pms_superblock *super;
    struct segment segment[PMS_MAX_SEGMENTS]; /* only ever added to: the fault handler reads them */
    _Atomic uint32_t segment_count;
    struct pms_starts starts; /* of descriptors, as the medium has them now */
    struct pms_index index;
    uint64_t round; /* +1 whenever a transaction ends: what was born before is not new any more */
    uint64_t data_pages, live_bytes, live_blocks, slot_room, log_need;
};

/* ---- the page table ---- */

struct extent { /* a descriptor, decoded */
    uint64_t page, pages, aux;
    enum pms_kind kind;
    unsigned cls;
};

static bool is_slab(enum pms_kind kind) { return kind == PMS_KIND_SLAB || kind == PMS_KIND_META_SLAB; }
static bool is_large(enum pms_kind kind) { return kind == PMS_KIND_LARGE || kind == PMS_KIND_META_LARGE; }

static enum pms_owner owner_of(enum pms_kind kind)
{
    return kind == PMS_KIND_META_SLAB || kind == PMS_KIND_META_LARGE ? PMS_OWNER_ENGINE : PMS_OWNER_USER;
}

static enum pms_kind slab_kind(enum pms_owner owner)
{
    return owner == PMS_OWNER_USER ? PMS_KIND_SLAB : PMS_KIND_META_SLAB;
}

static enum pms_kind large_kind(enum pms_owner owner)
{
    return owner == PMS_OWNER_USER ? PMS_KIND_LARGE : PMS_KIND_META_LARGE;
}

static struct pms_pte encode(const struct extent *x)
{
    PMS_ASSERT(x->pages >= 1 && x->pages <= PAGES_MAX && x->cls < 256);
    uint64_t word = x->pages | (uint64_t)x->cls << CLASS_SHIFT | (uint64_t)x->kind << KIND_SHIFT;
    return (struct pms_pte){word | (uint64_t)pms_check16(x->page, word) << CHECK_SHIFT, x->aux};
}

static uint64_t load_word(const struct pms_map *map, uint64_t off)
{
    return __atomic_load_n((const uint64_t *)pms_map_at(map, off), __ATOMIC_RELAXED);
}

static uint64_t entry_off(const struct segment *s, uint64_t page)
{
    return s->table_off + (page - s->first) * sizeof(struct pms_pte);
}

/* Reads the descriptor of an extent that starts at page. Returns the rule it breaks, or NULL. Async-signal-safe. */
static const char *decode(const struct pms_map *map, const struct segment *s, uint64_t page, struct extent *x)
{
    uint64_t off = entry_off(s, page), word = load_word(map, off), bare = word & ((1ull << CHECK_SHIFT) - 1);
    *x = (struct extent){.page = page, .pages = bare & PAGES_MAX, .aux = load_word(map, off + 8),
                         .kind = (enum pms_kind)(bare >> KIND_SHIFT), .cls = (unsigned)(bare >> CLASS_SHIFT & 0xff)};
    if (pms_check16(page, bare) != word >> CHECK_SHIFT)
        return "check bits of an extent's descriptor";
    if (x->kind < PMS_KIND_FREE || x->kind > PMS_KIND_META_SLAB)
        return "kind of an extent";
    if (x->pages < 1 || x->pages > s->first + s->pages - page)
        return "extents tile their segment";
    if (is_slab(x->kind) ? x->cls >= pms_class_count() || x->pages != pms_class_pages(x->cls) : x->cls != 0)
        return "size class of an extent";
    if (is_large(x->kind) ? x->aux < 1 || x->aux > x->pages * PMS_PAGE : x->aux != 0)
        return "bytes of an extent";
    return NULL;
}

/* The words of a slab's bitmap start in its second page's entry. */
static uint64_t bitmap_off(const struct segment *s, uint64_t page, uint32_t word)
{
    return entry_off(s, page + 1) + word * sizeof(uint64_t);
}

static const char *check_bitmap(const struct pms_map *map, const struct segment *s, const struct extent *x)
{
    uint32_t slots = pms_class_slots(x->cls), words = 2 * (uint32_t)(x->pages - 1);
    for (uint32_t w = slots / 64; w < words; w++) {
        uint64_t beyond = w == slots / 64 ? ~0ull << (slots % 64) : ~0ull;
        if (load_word(map, bitmap_off(s, x->page, w)) & beyond)
            return "bits past a slab's slots are zero";
    }
    return NULL;
}

typedef int (*extent_fn)(void *ctx, const struct segment *s, const struct extent *x, struct pms_error *error);

/* Calls fn for each extent of the segment, checked. At most one step for each page, whatever the table says. */
static int each_extent(const struct pms_map *map, const struct segment *s, extent_fn fn, void *ctx, struct pms_error *error)
{
    struct extent x;
    for (uint64_t page = s->first, end = s->first + s->pages; page < end; page += x.pages) {
        const char *rule = decode(map, s, page, &x);
        if (!rule && is_slab(x.kind))
            rule = check_bitmap(map, s, &x);
        if (rule) {
            int status = pms_fail(error, PMS_E_CORRUPT, "page table: %s", rule);
            if (error)
                error->offset = entry_off(s, page);
            return status;
        }
        int stop = fn(ctx, s, &x, error);
        if (stop)
            return stop;
    }
    return PMS_OK;
}

/* ---- segments ---- */

static uint32_t segment_count(const struct pms_heap *h)
{
    return atomic_load_explicit(&h->segment_count, memory_order_acquire);
}

static const struct segment *segment_of(const struct pms_heap *h, uint64_t page) /* or NULL */
{
    for (uint32_t i = segment_count(h); i-- > 0;)
        if (page >= h->segment[i].first)
            return page - h->segment[i].first < h->segment[i].pages ? &h->segment[i] : NULL;
    return NULL;
}

static bool segment_sound(const struct pms_heap *h, const struct pms_segment *s, uint64_t after)
{
    uint64_t bytes = h->map->bytes;
    if (s->table_off % PMS_PAGE || s->data_off % PMS_PAGE || s->data_off > bytes || s->table_off > bytes)
        return false;
    if (s->data_pages < 1 || s->data_pages > PAGES_MAX || s->data_pages > (bytes - s->data_off) / PMS_PAGE)
        return false;
    if (s->table_off < PMS_OFF_SEGMENTS || s->table_off < after || s->data_off < s->table_off)
        return false;
    return s->data_pages <= (s->data_off - s->table_off) / sizeof(struct pms_pte);
}

/* I5: what capture of every byte of an extent puts into the log: whole pages, or 32-byte granules of one line each. */
static uint64_t log_cost(enum pms_owner owner, uint64_t pages)
{
    return owner == PMS_OWNER_ENGINE ? pages * 2 * PMS_PAGE : pages * (PMS_PAGE + PMS_LINE);
}

/* Takes over the segments that the superblock has and the index has not. */
static int add_segments(struct pms_heap *h, struct pms_error *error)
{
    uint32_t known = segment_count(h), count = h->super->segment_count;
    uint64_t after = known ? (h->segment[known - 1].first + h->segment[known - 1].pages) * PMS_PAGE : 0;
    if (count < known || count > PMS_MAX_SEGMENTS)
        return pms_fail(error, PMS_E_CORRUPT, "superblock: number of segments");
    for (uint32_t i = known; i < count; i++) {
        const struct pms_segment *s = &h->super->segment[i];
        if (!segment_sound(h, s, after))
            return pms_fail(error, PMS_E_CORRUPT, "superblock: place of segment %u", i);
        h->segment[i] = (struct segment){s->data_off / PMS_PAGE, s->data_pages, s->table_off};
        after = s->data_off + s->data_pages * PMS_PAGE;
    }
    atomic_store_explicit(&h->segment_count, count, memory_order_release);
    return PMS_OK;
}

/* ---- building the index ---- */

static struct pms_extent *index_slab(struct pms_heap *h, const struct segment *s, const struct extent *x)
{
    uint64_t *bits = pms_slab_bits_new(x->cls);
    if (!bits)
        return NULL;
    struct pms_extent *e = pms_index_append(&h->index, x->page, x->pages, PMS_EXTENT_SLAB);
    e->bits = bits;
    e->cls = (uint8_t)x->cls;
    e->owner = (uint8_t)owner_of(x->kind);
    for (uint32_t w = 0; w < pms_slab_words(x->cls); w++) {
        uint64_t live = load_word(h->map, bitmap_off(s, x->page, w));
        bits[w] |= live;
        e->used += (uint32_t)__builtin_popcountll(live);
    }
    h->live_blocks += e->used;
    h->live_bytes += (uint64_t)e->used * pms_class_bytes(x->cls);
    h->slot_room += (uint64_t)(pms_class_slots(x->cls) - e->used) * pms_class_bytes(x->cls);
    return e;
}

static int index_extent(void *ctx, const struct segment *s, const struct extent *x, struct pms_error *error)
{
    struct pms_heap *h = ctx;
    if (pms_index_reserve(&h->index))
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    pms_starts_set(&h->starts, x->page);
    pms_starts_clear(&h->starts, x->page + 1, x->page + x->pages);
    if (x->kind == PMS_KIND_FREE) {
        pms_index_append(&h->index, x->page, x->pages, PMS_EXTENT_FREE);
        return PMS_OK;
    }
    h->log_need += log_cost(owner_of(x->kind), x->pages);
    if (is_slab(x->kind)) {
        struct pms_extent *e = index_slab(h, s, x);
        if (!e)
            return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
        pms_slab_list(&h->index, e);
        return PMS_OK;
    }
    struct pms_extent *e = pms_index_append(&h->index, x->page, x->pages, PMS_EXTENT_LARGE);
    e->owner = (uint8_t)owner_of(x->kind);
    h->live_blocks++;
    h->live_bytes += x->pages * PMS_PAGE;
    return PMS_OK;
}

static int index_segments(struct pms_heap *h, uint32_t from, struct pms_error *error)
{
    for (uint32_t i = from; i < segment_count(h); i++) {
        const struct segment *s = &h->segment[i];
        h->data_pages += s->pages;
        h->log_need += s->pages * 2 * sizeof(struct pms_pte); /* the table itself, granule by granule */
        int status = each_extent(h->map, s, index_extent, h, error);
        if (status)
            return status;
    }
    return PMS_OK;
}

static struct pms_extent *extent_at(const struct pms_heap *h, uint64_t page) /* of the index, not free; or NULL */
{
    uint64_t start = pms_starts_before(&h->starts, page);
    struct pms_extent *e = start == PMS_NO_PAGE ? NULL : pms_index_at(&h->index, start);
    return e && page - e->page < e->pages ? e : NULL;
}

static uint32_t slot_at(const struct pms_extent *e, uint64_t off)
{
    return (uint32_t)(off - e->page * PMS_PAGE) / pms_class_bytes(e->cls);
}

static bool slot_live(const struct pms_heap *h, const struct pms_extent *e, uint32_t slot)
{
    return load_word(h->map, bitmap_off(segment_of(h, e->page), e->page, slot / 64)) >> (slot % 64) & 1;
}

static int pin_order(const void *a, const void *b)
{
    const struct pms_pin *p = *(const struct pms_pin *const *)a, *q = *(const struct pms_pin *const *)b;
    return p->page < q->page ? -1 : p->page > q->page;
}

/* A pin found again: in a live extent, or in pages that the roll back made free, which stay out of the bins (I6).
 * range: the first extent that ends behind the pin's first page. */
static bool restore_pin(struct pms_heap *h, const struct pms_pin *pin, struct pms_extent *range)
{
    struct pms_extent *e = range;
    if (e->state == PMS_EXTENT_FREE) {
        if (pin->page < e->page || pin->pages > e->page + e->pages - pin->page)
            return false;
        e = pms_index_carve(&h->index, range, pin->page, pin->pages);
        h->log_need += log_cost(PMS_OWNER_USER, e->pages);
    }
    if (e->page != pin->page || e->pages != pin->pages)
        return false;
    e->pins++;
    if (e->state == PMS_EXTENT_SLAB && !pms_bit(pms_slab_busy(e), slot_at(e, pin->off))) {
        pms_bit_set(pms_slab_busy(e), slot_at(e, pin->off));
        e->used++;
        h->slot_room -= pms_class_bytes(e->cls);
        pms_slab_list(&h->index, e);
    }
    return true;
}

static int restore_pins(struct pms_heap *h, struct pms_error *error)
{
    struct pms_index *ix = &h->index;
    if (!ix->pin_used)
        return PMS_OK;
    const struct pms_pin **pins = malloc(ix->pin_used * sizeof *pins);
    if (!pins)
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    uint64_t n = 0;
    for (uint64_t i = 0; i < ix->pin_room; i++)
        if (ix->pin[i].off)
            pins[n++] = &ix->pin[i];
    qsort(pins, n, sizeof *pins, pin_order);
    int status = PMS_OK;
    struct pms_extent *e = ix->first;
    for (uint64_t i = 0; i < n && !status; i++) {
        while (e && e->page + e->pages <= pins[i]->page)
            e = e->next;
        if (pms_index_reserve(ix))
            status = pms_fail(error, PMS_E_OS, "no memory for the heap's index");
        else if (!e || !restore_pin(h, pins[i], e))
            status = pms_fail(error, PMS_E_CORRUPT, "page table: the extent of a block in use has changed");
        else
            e = pms_index_at(ix, pins[i]->page);
    }
    free(pins);
    return status;
}

int pms_heap_rebuild(struct pms_heap *h, struct pms_error *error)
{
    int status = add_segments(h, error);
    if (status)
        return status;
    pms_index_reset(&h->index);
    h->round++;
    h->data_pages = h->live_bytes = h->live_blocks = h->slot_room = 0;
    h->log_need = LOG_SLACK;
    status = index_segments(h, 0, error);
    return status ? status : restore_pins(h, error);
}

int pms_heap_grown(struct pms_heap *h, struct pms_error *error)
{
    uint32_t known = segment_count(h);
    int status = add_segments(h, error);
    return status ? status : index_segments(h, known, error);
}

int pms_heap_open(struct pms_heap **heap, struct pms_undo *undo, const struct pms_superblock *super, struct pms_error *error)
{
    PMS_ASSERT(pms_class_count() <= PMS_CLASSES);
    struct pms_heap *h = calloc(1, sizeof *h);
    *heap = NULL;
    if (!h)
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    h->undo = undo;
    h->map = undo->map;
    h->super = super;
    uint64_t room = h->map->reserve > h->map->bytes ? h->map->reserve : h->map->bytes;
    int status = pms_starts_open(&h->starts, room / PMS_PAGE) ? pms_fail_errno(error, "reserving memory for the heap's index")
                                                              : pms_heap_rebuild(h, error);
    if (status) {
        pms_heap_close(h);
        return status;
    }
    *heap = h;
    return PMS_OK;
}

void pms_heap_close(struct pms_heap *h)
{
    if (!h)
        return;
    pms_starts_close(&h->starts);
    pms_index_close(&h->index);
    free(h);
}

void pms_heap_format_segment(struct pms_map *map, const struct pms_segment *segment)
{
    struct pms_pte pte = encode(&(struct extent){.page = segment->data_off / PMS_PAGE, .pages = segment->data_pages,
                                                 .kind = PMS_KIND_FREE});
    void *at = pms_map_at(map, segment->table_off);
    pms_persist_store(map->persist, at, &pte, sizeof pte);
    pms_persist_flush(map->persist, at, sizeof pte);
}

/* ---- storing descriptors: all of one operation share a fence ---- */

struct edits {
    const struct segment *segment;
    struct extent extent[EDITS_MAX];
    unsigned count;
    const uint64_t *bitmap; /* of the slab among them: follows its descriptor; else NULL */
};

static void edits_store(struct pms_heap *h, const struct edits *ed)
{
    struct pms_pte entries[EDITS_MAX][SLAB_PAGES_MAX];
    uint64_t bytes[EDITS_MAX];
    for (unsigned i = 0; i < ed->count; i++) {
        const struct extent *x = &ed->extent[i];
        bytes[i] = sizeof(struct pms_pte) * (is_slab(x->kind) ? x->pages : 1);
        PMS_ASSERT(bytes[i] <= sizeof entries[i]);
        memset(entries[i], 0, bytes[i]);
        entries[i][0] = encode(x);
        if (is_slab(x->kind))
            memcpy(&entries[i][1], ed->bitmap, pms_slab_words(x->cls) * sizeof(uint64_t));
        pms_undo_prepare(h->undo, entry_off(ed->segment, x->page), bytes[i]);
    }
    pms_undo_fence(h->undo); /* the old descriptors' log entries, before the new descriptors (I2) */
    for (unsigned i = 0; i < ed->count; i++)
        pms_undo_write(h->undo, entry_off(ed->segment, ed->extent[i].page), entries[i], bytes[i]);
}

static struct extent free_extent(uint64_t from, uint64_t to)
{
    return (struct extent){.page = from, .pages = to - from, .kind = PMS_KIND_FREE};
}

/* Stores the descriptor of x, which lies in the free range, so that all descriptors still tile the segment: pages of a torn
 * FREE extent before and behind it get one of their own, as long as the range allows. */
static void describe(struct pms_heap *h, const struct pms_extent *range, const struct extent *x, const uint64_t *bitmap)
{
    struct pms_starts *st = &h->starts;
    struct edits ed = {.segment = segment_of(h, x->page), .bitmap = bitmap};
    uint64_t segment_end = ed.segment->first + ed.segment->pages;
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

static void extent_gone(struct pms_heap *h, struct pms_extent *e) /* to the free ranges; its log is not needed any more */
{
    uint64_t cost = log_cost(e->owner, e->pages);
    PMS_ASSERT(h->log_need >= cost);
    h->log_need -= cost;
    pms_index_undefer(&h->index, e);
    pms_index_release(&h->index, e);
}

static bool born_now(const struct pms_heap *h, const struct pms_extent *e) { return e->round == h->round; }

/* An empty slab becomes free pages: at once if it was born in this transaction, else after the commit (I6). */
static void slab_give_back(struct pms_heap *h, struct pms_extent *e)
{
    PMS_ASSERT(e->state == PMS_EXTENT_SLAB && e->used == 0 && e->pins == 0);
    struct edits ed = {.segment = segment_of(h, e->page), .count = 1};
    ed.extent[0] = free_extent(e->page, e->page + e->pages);
    edits_store(h, &ed);
    pms_slab_unlist(&h->index, e);
    h->slot_room -= (uint64_t)pms_class_slots(e->cls) * pms_class_bytes(e->cls);
    e->state = PMS_EXTENT_DEAD;
    if (born_now(h, e))
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
            slab_give_back(h, ix->slabs[owner][w * 64 + (unsigned)__builtin_ctzll(ix->surplus[owner][w])].bucket[0]);
    }
}

static void give_back_all(struct pms_heap *h) /* space is short: the empty ones that are kept, too */
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

/* Finds room for an extent: space, log (I5) and memory for the index. Changes nothing. */
static int find_room(struct pms_heap *h, uint64_t pages, enum pms_owner owner, struct pms_extent **range, uint64_t *page,
                     struct pms_error *error)
{
    uint64_t need = h->log_need + log_cost(owner, pages), capacity = pms_undo_capacity(h->undo);
    if (need > capacity)
        return no_room(error, "the log has no room for the new block", need, capacity);
    *range = pms_index_best(&h->index, pages, pages >= HUGE_PAGES ? HUGE_PAGES : 1, page);
    if (!*range)
        return no_room(error, "no free range is large enough", pages * PMS_PAGE, pms_index_largest(&h->index) * PMS_PAGE);
    return pms_index_reserve(&h->index) ? pms_fail(error, PMS_E_OS, "no memory for the heap's index") : PMS_OK;
}

/* Makes the extent x (whose page is still open). bitmap: of a slab. */
static int extent_new(struct pms_heap *h, struct extent *x, const uint64_t *bitmap, struct pms_extent **out,
                      struct pms_error *error)
{
    struct pms_extent *range = NULL;
    enum pms_owner owner = owner_of(x->kind);
    int status = find_room(h, x->pages, owner, &range, &x->page, error);
    if (status)
        return status;
    PMS_ASSERT(x->pages < HUGE_PAGES || x->page % HUGE_PAGES == 0);
    describe(h, range, x, bitmap);
    struct pms_extent *e = pms_index_carve(&h->index, range, x->page, x->pages);
    e->owner = (uint8_t)owner;
    e->round = h->round;
    h->log_need += log_cost(owner, x->pages);
    if (owner == PMS_OWNER_USER) /* dead at the last commit, all of it: no pre-images */
        pms_undo_mark_fresh(h->undo, x->page * PMS_PAGE, x->pages * PMS_PAGE);
    *out = e;
    return PMS_OK;
}

static int large_alloc(struct pms_heap *h, uint64_t bytes, enum pms_owner owner, uint64_t *off, struct pms_error *error)
{
    uint64_t pages = (bytes - 1) / PMS_PAGE + 1;
    struct pms_extent *e;
    if (pages > PAGES_MAX)
        return no_room(error, "no free range is large enough", bytes, pms_index_largest(&h->index) * PMS_PAGE);
    struct extent x = {.pages = pages, .aux = bytes, .kind = large_kind(owner)};
    int status = extent_new(h, &x, NULL, &e, error);
    if (status)
        return status;
    e->state = PMS_EXTENT_LARGE;
    h->live_blocks++;
    h->live_bytes += pages * PMS_PAGE;
    *off = e->page * PMS_PAGE;
    return PMS_OK;
}

static void born_round(const struct pms_heap *h, struct pms_extent *e) /* born and dead bits of this transaction */
{
    if (e->bits_round == h->round)
        return;
    memset(pms_slab_born(e), 0, 2 * pms_slab_words(e->cls) * sizeof(uint64_t));
    e->bits_round = h->round;
}

static uint64_t slot_taken(struct pms_heap *h, struct pms_extent *e, uint32_t slot) /* its block's offset */
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
static int slab_new(struct pms_heap *h, unsigned cls, enum pms_owner owner, uint64_t *off, struct pms_error *error)
{
    uint64_t *bits = pms_slab_bits_new(cls), bitmap[SLAB_PAGES_MAX * 2] = {1};
    struct pms_extent *e;
    if (!bits)
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    struct extent x = {.pages = pms_class_pages(cls), .cls = cls, .kind = slab_kind(owner)};
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
    PMS_ASSERT(slot == 0 && slot_live(h, e, slot));
    *off = slot_taken(h, e, slot);
    return PMS_OK;
}

static uint64_t slot_alloc(struct pms_heap *h, struct pms_extent *e)
{
    const struct segment *s = segment_of(h, e->page);
    uint32_t slot = pms_slab_take(&h->index, e);
    uint64_t at = bitmap_off(s, e->page, slot / 64), word = load_word(h->map, at), bit = 1ull << (slot % 64);
    PMS_ASSERT(!(word & bit)); /* not busy in the index, so free on the medium */
    word |= bit;
    pms_undo_store(h->undo, at, &word, sizeof word);
    return slot_taken(h, e, slot);
}

/* The first slab with a free slot among the class of bytes and those whose slots are at most BORROW_MAX times as large. */
static struct pms_extent *borrowed_slab(const struct pms_heap *h, uint64_t bytes, enum pms_owner owner)
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

static int small_alloc(struct pms_heap *h, uint64_t bytes, enum pms_owner owner, uint64_t *off, struct pms_error *error)
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
static int small_alloc_short(struct pms_heap *h, uint64_t bytes, enum pms_owner owner, uint64_t *off, struct pms_error *error)
{
    int status = small_alloc(h, bytes, owner, off, error);
    if (status != PMS_E_FULL)
        return status;
    struct pms_extent *e = borrowed_slab(h, bytes, owner);
    if (!e)
        return large_alloc(h, bytes, owner, off, error);
    *off = slot_alloc(h, e);
    return PMS_OK;
}

int pms_heap_alloc(struct pms_heap *h, uint64_t bytes, enum pms_owner owner, uint64_t *off, struct pms_error *error)
{
    if (bytes == 0)
        return pms_fail(error, PMS_E_INVALID, "a block of no bytes");
    give_back_surplus(h);
    bool small = bytes <= PMS_SMALL_MAX;
    int status = small ? small_alloc(h, bytes, owner, off, error) : large_alloc(h, bytes, owner, off, error);
    if (status != PMS_E_FULL)
        return status;
    give_back_all(h);
    return small ? small_alloc_short(h, bytes, owner, off, error) : large_alloc(h, bytes, owner, off, error);
}

/* ---- freeing ---- */

static void slot_gone(struct pms_heap *h, struct pms_extent *e, uint32_t slot) /* may be taken again */
{
    pms_slab_give(&h->index, e, slot);
    h->slot_room += pms_class_bytes(e->cls);
}

static void slot_free(struct pms_heap *h, struct pms_extent *e, uint32_t slot, bool pinned)
{
    uint64_t at = bitmap_off(segment_of(h, e->page), e->page, slot / 64), bit = 1ull << (slot % 64);
    uint64_t word = load_word(h->map, at) & ~bit;
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
    struct edits ed = {.segment = segment_of(h, e->page), .count = 1};
    ed.extent[0] = free_extent(e->page, e->page + e->pages);
    edits_store(h, &ed);
    h->live_blocks--;
    h->live_bytes -= e->pages * PMS_PAGE;
    e->state = PMS_EXTENT_DEAD;
    if (born_now(h, e) && !pinned)
        extent_gone(h, e);
    else
        pms_index_defer(&h->index, e);
}

/* The extent whose live block starts at off, or NULL. */
static struct pms_extent *live_block(const struct pms_heap *h, uint64_t off)
{
    struct pms_extent *e = extent_at(h, off / PMS_PAGE);
    if (!e)
        return NULL;
    if (e->state == PMS_EXTENT_LARGE)
        return off == e->page * PMS_PAGE ? e : NULL;
    if (e->state != PMS_EXTENT_SLAB || (off - e->page * PMS_PAGE) % pms_class_bytes(e->cls))
        return NULL;
    uint32_t slot = slot_at(e, off);
    return slot < pms_class_slots(e->cls) && slot_live(h, e, slot) ? e : NULL;
}

int pms_heap_free(struct pms_heap *h, uint64_t off, struct pms_error *error)
{
    struct pms_extent *e = live_block(h, off);
    if (!e) {
        int status = pms_fail(error, PMS_E_INVALID, "no block starts there");
        if (error)
            error->offset = off;
        return status;
    }
    bool pinned = e->pins && pms_pin_find(&h->index, off);
    if (e->state == PMS_EXTENT_LARGE) {
        large_free(h, e, pinned);
    } else {
        PMS_ASSERT(pms_bit(pms_slab_busy(e), slot_at(e, off))); /* live on the medium, so busy in the index */
        slot_free(h, e, slot_at(e, off), pinned);
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

void pms_heap_committed(struct pms_heap *h)
{
    while (h->index.deferred) {
        struct pms_extent *e = h->index.deferred;
        pms_index_undefer(&h->index, e);
        if (e->state == PMS_EXTENT_SLAB)
            commit_slab(h, e);
        else if (!e->pins)
            extent_gone(h, e);
    }
    h->round++;
}

/* ---- pins ---- */

void pms_heap_pin(struct pms_heap *h, uint64_t off)
{
    struct pms_pin *pin = pms_pin_find(&h->index, off);
    if (pin) {
        pin->count++;
        return;
    }
    struct pms_extent *e = live_block(h, off);
    PMS_ASSERT(e && "a pinned block is live");
    uint64_t bytes = e->state == PMS_EXTENT_SLAB ? pms_class_bytes(e->cls) : e->pages * PMS_PAGE;
    int failed = pms_pin_add(&h->index, &(struct pms_pin){off, bytes, e->page, e->pages, 1});
    PMS_ASSERT(!failed && "no memory for a pin");
    e->pins++;
}

static void slot_unpinned(struct pms_heap *h, struct pms_extent *e, uint32_t slot)
{
    if (slot_live(h, e, slot))
        return;
    if (e->bits_round == h->round && pms_bit(pms_slab_dead(e), slot)) {
        if (!pms_bit(pms_slab_born(e), slot))
            return; /* freed in this transaction: the commit lets it go */
        pms_bit_clear(pms_slab_dead(e), slot);
    }
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
        slot_unpinned(h, e, slot_at(e, off));
    else if (e->state == PMS_EXTENT_DEAD && !e->pins && (!e->deferred || born_now(h, e)))
        extent_gone(h, e);
}

void pms_heap_each_pin(struct pms_heap *h, void (*fn)(void *ctx, uint64_t off, uint64_t bytes), void *ctx)
{
    for (uint64_t i = 0; i < h->index.pin_room; i++)
        if (h->index.pin[i].off)
            fn(ctx, h->index.pin[i].off, h->index.pin[i].bytes);
}

/* ---- asking ---- */

bool pms_heap_find(const struct pms_heap *h, uint64_t off, struct pms_block *block)
{
    struct extent x;
    uint64_t page = off / PMS_PAGE;
    const struct segment *s = segment_of(h, page);
    uint64_t start = s ? pms_starts_before(&h->starts, page) : PMS_NO_PAGE;
    if (start == PMS_NO_PAGE || start < s->first || decode(h->map, s, start, &x) || page - start >= x.pages)
        return false;
    *block = (struct pms_block){.off = start * PMS_PAGE, .bytes = x.pages * PMS_PAGE, .extent_off = start * PMS_PAGE,
                                .extent_bytes = x.pages * PMS_PAGE, .kind = x.kind, .live = is_large(x.kind)};
    if (!is_slab(x.kind))
        return block->live;
    uint32_t slot = (uint32_t)(off - block->off) / pms_class_bytes(x.cls);
    if (slot >= pms_class_slots(x.cls))
        return false;
    block->bytes = pms_class_bytes(x.cls);
    block->off += slot * block->bytes;
    block->live = load_word(h->map, bitmap_off(s, start, slot / 64)) >> (slot % 64) & 1;
    return true;
}

bool pms_heap_is_fresh(const struct pms_heap *h, uint64_t off)
{
    const struct pms_extent *e = extent_at(h, off / PMS_PAGE);
    if (!e || e->state != PMS_EXTENT_SLAB)
        return e && born_now(h, e);
    uint32_t slot = slot_at(e, off);
    return e->bits_round == h->round && slot < pms_class_slots(e->cls) && pms_bit(pms_slab_born(e), slot);
}

void pms_heap_stats(const struct pms_heap *h, struct pms_heap_stats *st)
{
    *st = (struct pms_heap_stats){.data_bytes = h->data_pages * PMS_PAGE, .used_bytes = h->live_bytes,
                                  .free_bytes = h->index.free_pages * PMS_PAGE + h->slot_room,
                                  .largest_free = pms_index_largest(&h->index) * PMS_PAGE,
                                  .blocks = h->live_blocks, .log_need = h->log_need};
    for (uint64_t i = 0; i < h->index.pin_room; i++) {
        const struct pms_pin *pin = &h->index.pin[i];
        if (pin->off && !live_block(h, pin->off))
            st->pinned_bytes += pin->bytes;
    }
}

struct walk {
    const struct pms_heap *heap;
    int (*fn)(void *ctx, const struct pms_block *block);
    void *ctx;
};

static int walk_extent(void *ctx, const struct segment *s, const struct extent *x, struct pms_error *error)
{
    (void)error;
    const struct walk *w = ctx;
    struct pms_block b = {.off = x->page * PMS_PAGE, .bytes = x->pages * PMS_PAGE, .extent_off = x->page * PMS_PAGE,
                          .extent_bytes = x->pages * PMS_PAGE, .kind = x->kind, .live = true};
    if (!is_slab(x->kind))
        return is_large(x->kind) ? w->fn(w->ctx, &b) : 0;
    b.bytes = pms_class_bytes(x->cls);
    for (uint32_t i = 0; i < pms_slab_words(x->cls); i++)
        for (uint64_t live = load_word(w->heap->map, bitmap_off(s, x->page, i)); live; live &= live - 1) {
            b.off = b.extent_off + (i * 64 + (uint64_t)__builtin_ctzll(live)) * b.bytes;
            int stop = w->fn(w->ctx, &b);
            if (stop)
                return stop;
        }
    return 0;
}

int pms_heap_walk(const struct pms_heap *h, int (*fn)(void *ctx, const struct pms_block *block), void *ctx,
                  struct pms_error *error)
{
    struct walk w = {h, fn, ctx};
    for (uint32_t i = 0; i < segment_count(h); i++) {
        int stop = each_extent(h->map, &h->segment[i], walk_extent, &w, error);
        if (stop)
            return stop;
    }
    return PMS_OK;
}
