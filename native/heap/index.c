#include "heap/index.h"

#include <stdlib.h>
#include <string.h>

/* ---- memory of extents ---- */

#define CHUNK_EXTENTS 512u
struct pms_extent_chunk {
    struct pms_extent_chunk *next;
    struct pms_extent extent[CHUNK_EXTENTS];
};

#define RESERVE_EXTENTS 3u /* one allocation cuts a free range into at most three */

static int extents_reserve(struct pms_index *ix)
{
    if (ix->spare_count >= RESERVE_EXTENTS)
        return 0;
    if (ix->at_chunk && ix->chunk_used + RESERVE_EXTENTS <= CHUNK_EXTENTS)
        return 0;
    if (ix->at_chunk ? ix->at_chunk->next != NULL : ix->chunks != NULL) { /* kept by a reset */
        ix->at_chunk = ix->at_chunk ? ix->at_chunk->next : ix->chunks;
        ix->chunk_used = 0;
        return 0;
    }
    struct pms_extent_chunk *chunk = malloc(sizeof *chunk);
    if (!chunk)
        return -1;
    chunk->next = NULL;
    if (ix->at_chunk)
        ix->at_chunk->next = chunk;
    else
        ix->chunks = chunk;
    ix->at_chunk = chunk;
    ix->chunk_used = 0;
    return 0;
}

static struct pms_extent *extent_new(struct pms_index *ix, uint64_t page, uint64_t pages)
{
    struct pms_extent *e = ix->spare;
    if (e) {
        ix->spare = e->next;
        ix->spare_count--;
    } else {
        PMS_ASSERT(ix->at_chunk && ix->chunk_used < CHUNK_EXTENTS); /* reserved */
        e = &ix->at_chunk->extent[ix->chunk_used++];
    }
    *e = (struct pms_extent){.page = page, .pages = pages, .state = PMS_EXTENT_DEAD, .bucket = -1};
    return e;
}

static void extent_drop(struct pms_index *ix, struct pms_extent *e)
{
    if (e->prev)
        e->prev->next = e->next;
    else
        ix->first = e->next;
    if (e->next)
        e->next->prev = e->prev;
    else
        ix->last = e->prev;
    e->state = 0;
    e->next = ix->spare;
    ix->spare = e;
    ix->spare_count++;
}

static void extent_link_after(struct pms_index *ix, struct pms_extent *e, struct pms_extent *before)
{
    e->prev = before;
    e->next = before ? before->next : ix->first;
    if (e->next)
        e->next->prev = e;
    else
        ix->last = e;
    if (before)
        before->next = e;
    else
        ix->first = e;
}

void pms_index_reset(struct pms_index *ix)
{
    for (struct pms_extent *e = ix->first; e; e = e->next)
        free(e->bits);
    struct pms_extent_chunk *chunks = ix->chunks;
    struct pms_extent **hash = ix->hash;
    uint64_t room = ix->hash_room;
    struct pms_pin *pin = ix->pin;
    uint64_t pin_room = ix->pin_room, pin_used = ix->pin_used;
    *ix = (struct pms_index){.chunks = chunks,
                             .hash = hash,
                             .hash_room = room,
                             .pin = pin,
                             .pin_room = pin_room,
                             .pin_used = pin_used};
    if (hash)
        memset(hash, 0, room * sizeof(struct pms_extent *));
}

void pms_index_close(struct pms_index *ix)
{
    pms_index_reset(ix);
    for (struct pms_extent_chunk *c = ix->chunks, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    free(ix->hash);
    free(ix->pin);
    *ix = (struct pms_index){0};
}

/* ---- extents by first page: open addressing, at most half full, no tombstones ---- */

static uint64_t slot_of(uint64_t key, uint64_t room)
{
    return key * 0x9e3779b97f4a7c15ull >> 20 & (room - 1);
}

static void hash_put(struct pms_extent **hash, uint64_t room, struct pms_extent *e)
{
    uint64_t i = slot_of(e->page, room);
    while (hash[i]) {
        PMS_ASSERT(hash[i]->page != e->page);
        i = (i + 1) & (room - 1);
    }
    hash[i] = e;
}

static void hash_remove(struct pms_index *ix, const struct pms_extent *e)
{
    uint64_t mask = ix->hash_room - 1, i = slot_of(e->page, ix->hash_room);
    while (ix->hash[i] != e) {
        PMS_ASSERT(ix->hash[i]);
        i = (i + 1) & mask;
    }
    for (uint64_t j = (i + 1) & mask; ix->hash[j]; j = (j + 1) & mask) { /* close the gap */
        uint64_t home = slot_of(ix->hash[j]->page, ix->hash_room);
        if (((j - home) & mask) >= ((j - i) & mask)) {
            ix->hash[i] = ix->hash[j];
            i = j;
        }
    }
    ix->hash[i] = NULL;
    ix->hash_used--;
}

static int hash_reserve(struct pms_index *ix)
{
    if (ix->hash_used + 1 <= ix->hash_room / 2)
        return 0;
    uint64_t room = ix->hash_room ? ix->hash_room * 2 : 1024;
    struct pms_extent **hash = calloc(room, sizeof(struct pms_extent *));
    if (!hash)
        return -1;
    for (uint64_t i = 0; i < ix->hash_room; i++)
        if (ix->hash[i])
            hash_put(hash, room, ix->hash[i]);
    free(ix->hash);
    ix->hash = hash;
    ix->hash_room = room;
    return 0;
}

static void hash_add(struct pms_index *ix, struct pms_extent *e)
{
    PMS_ASSERT(ix->hash_used < ix->hash_room / 2); /* reserved */
    hash_put(ix->hash, ix->hash_room, e);
    ix->hash_used++;
}

struct pms_extent *pms_index_at(const struct pms_index *ix, uint64_t page)
{
    if (!ix->hash_room)
        return NULL;
    for (uint64_t i = slot_of(page, ix->hash_room); ix->hash[i]; i = (i + 1) & (ix->hash_room - 1))
        if (ix->hash[i]->page == page)
            return ix->hash[i];
    return NULL;
}

int pms_index_reserve(struct pms_index *ix)
{
    return extents_reserve(ix) || hash_reserve(ix) ? -1 : 0;
}

/* ---- bins: sizes below 16 pages have one each, each power of two above has 16 ---- */

static unsigned bin_of(uint64_t pages)
{
    if (pages < 16)
        return (unsigned)pages;
    unsigned log = 63u - (unsigned)__builtin_clzll(pages);
    unsigned bin = 16 + (log - 4) * 16 + (unsigned)(pages >> (log - 4) & 15);
    return bin < PMS_BINS ? bin : PMS_BINS - 1;
}

static void bin_add(struct pms_index *ix, struct pms_extent *e)
{
    unsigned b = bin_of(e->pages);
    e->state = PMS_EXTENT_FREE;
    e->list_prev = NULL;
    e->list_next = ix->bin[b];
    if (e->list_next)
        e->list_next->list_prev = e;
    ix->bin[b] = e;
    ix->bin_map[b / 64] |= 1ull << (b % 64);
    ix->free_pages += e->pages;
}

static void bin_remove(struct pms_index *ix, struct pms_extent *e)
{
    PMS_ASSERT(e->state == PMS_EXTENT_FREE && ix->free_pages >= e->pages);
    unsigned b = bin_of(e->pages);
    if (e->list_next)
        e->list_next->list_prev = e->list_prev;
    if (e->list_prev)
        e->list_prev->list_next = e->list_next;
    else
        ix->bin[b] = e->list_next;
    if (!ix->bin[b])
        ix->bin_map[b / 64] &= ~(1ull << (b % 64));
    e->list_prev = e->list_next = NULL;
    ix->free_pages -= e->pages;
}

/* first bin >= from that is not empty, or PMS_BINS */
static unsigned bin_next(const struct pms_index *ix, unsigned from)
{
    for (unsigned w = from / 64; w < sizeof ix->bin_map / sizeof *ix->bin_map; w++) {
        uint64_t map = ix->bin_map[w] & (w == from / 64 ? ~0ull << (from % 64) : ~0ull);
        if (map)
            return w * 64 + (unsigned)__builtin_ctzll(map);
    }
    return PMS_BINS;
}

/* Where in the range: small extents eat the end that is of no use for aligned ones. */
static bool fit(const struct pms_extent *e, uint64_t pages, uint64_t align, uint64_t *page)
{
    const uint64_t huge = PMS_HUGE / PMS_PAGE;
    uint64_t start = (e->page + align - 1) & ~(align - 1), end = e->page + e->pages;
    if (start > end || end - start < pages)
        return false;
    if (align == 1 && start % huge == 0 && end % huge != 0)
        start = end - pages;
    *page = start;
    return true;
}

#define SCAN_LIMIT 64u /* ranges looked at in one bin */

static struct pms_extent *best_within(const struct pms_index *ix, uint64_t pages, uint64_t align,
                                      uint64_t *page, unsigned limit)
{
    for (unsigned b = bin_next(ix, bin_of(pages)); b < PMS_BINS;
         b = b + 1 < PMS_BINS ? bin_next(ix, b + 1) : PMS_BINS) {
        struct pms_extent *best = NULL;
        unsigned seen = 0;
        for (struct pms_extent *e = ix->bin[b]; e && seen < limit; e = e->list_next, seen++) {
            uint64_t at;
            if ((best && e->pages >= best->pages) || !fit(e, pages, align, &at))
                continue;
            best = e;
            *page = at;
            if (e->pages == pages)
                break;
        }
        if (best)
            return best;
    }
    return NULL;
}

struct pms_extent *pms_index_best(const struct pms_index *ix, uint64_t pages, uint64_t align,
                                  uint64_t *page)
{
    if (pages > ix->free_pages)
        return NULL;
    struct pms_extent *e = best_within(ix, pages, align, page, SCAN_LIMIT);
    return e ? e : best_within(ix, pages, align, page, UINT32_MAX);
}

uint64_t pms_index_largest(const struct pms_index *ix)
{
    uint64_t most = 0;
    for (unsigned w = sizeof ix->bin_map / sizeof *ix->bin_map; w-- > 0;) {
        if (!ix->bin_map[w])
            continue;
        unsigned b = w * 64 + 63u - (unsigned)__builtin_clzll(ix->bin_map[w]);
        for (const struct pms_extent *e = ix->bin[b]; e; e = e->list_next)
            most = e->pages > most ? e->pages : most;
        break;
    }
    return most;
}

/* ---- extents come and go ---- */

struct pms_extent *pms_index_append(struct pms_index *ix, uint64_t page, uint64_t pages,
                                    enum pms_extent_state state)
{
    struct pms_extent *last = ix->last;
    PMS_ASSERT(!last || last->page + last->pages <= page);
    if (state == PMS_EXTENT_FREE && last && last->state == PMS_EXTENT_FREE &&
        last->page + last->pages == page) {
        bin_remove(ix, last);
        last->pages += pages;
        bin_add(ix, last);
        return last;
    }
    struct pms_extent *e = extent_new(ix, page, pages);
    extent_link_after(ix, e, last);
    e->state = (uint8_t)state;
    if (state == PMS_EXTENT_FREE)
        bin_add(ix, e);
    else
        hash_add(ix, e);
    return e;
}

struct pms_extent *pms_index_carve(struct pms_index *ix, struct pms_extent *range, uint64_t page,
                                   uint64_t pages)
{
    uint64_t end = range->page + range->pages;
    PMS_ASSERT(pages && page >= range->page && page + pages <= end);
    bin_remove(ix, range);
    struct pms_extent *e = range;
    if (page > range->page) {
        range->pages = page - range->page;
        bin_add(ix, range);
        e = extent_new(ix, page, pages);
        extent_link_after(ix, e, range);
    }
    *e = (struct pms_extent){.page = page,
                             .pages = pages,
                             .prev = e->prev,
                             .next = e->next,
                             .state = PMS_EXTENT_DEAD,
                             .bucket = -1};
    if (page + pages < end) {
        struct pms_extent *rest = extent_new(ix, page + pages, end - page - pages);
        extent_link_after(ix, rest, e);
        bin_add(ix, rest);
    }
    hash_add(ix, e);
    return e;
}

void pms_index_release(struct pms_index *ix, struct pms_extent *e)
{
    PMS_ASSERT(e->state != PMS_EXTENT_FREE && !e->deferred && !e->held && e->pins == 0 &&
               e->bucket < 0);
    hash_remove(ix, e);
    free(e->bits);
    e->bits = NULL;
    struct pms_extent *prev = e->prev, *next = e->next;
    if (next && next->state == PMS_EXTENT_FREE && e->page + e->pages == next->page) {
        bin_remove(ix, next);
        e->pages += next->pages;
        extent_drop(ix, next);
    }
    if (prev && prev->state == PMS_EXTENT_FREE && prev->page + prev->pages == e->page) {
        bin_remove(ix, prev);
        prev->pages += e->pages;
        extent_drop(ix, e);
        e = prev;
    }
    bin_add(ix, e);
}

void pms_index_defer(struct pms_index *ix, struct pms_extent *e)
{
    if (e->deferred)
        return;
    e->deferred = true;
    e->deferred_prev = NULL;
    e->deferred_next = ix->deferred;
    if (e->deferred_next)
        e->deferred_next->deferred_prev = e;
    ix->deferred = e;
}

void pms_index_undefer(struct pms_index *ix, struct pms_extent *e)
{
    if (!e->deferred)
        return;
    e->deferred = false;
    if (e->deferred_next)
        e->deferred_next->deferred_prev = e->deferred_prev;
    if (e->deferred_prev)
        e->deferred_prev->deferred_next = e->deferred_next;
    else
        ix->deferred = e->deferred_next;
    e->deferred_prev = e->deferred_next = NULL;
}

void pms_index_hold(struct pms_index *ix, struct pms_extent *e)
{
    if (e->held)
        return;
    e->held = true;
    e->held_next = ix->held;
    ix->held = e;
}

/* ---- slabs ---- */

uint64_t *pms_slab_bits_new(unsigned cls)
{
    uint32_t words = pms_slab_words(cls), slots = pms_class_slots(cls);
    uint64_t *bits = calloc((size_t)4 * words, sizeof(uint64_t));
    if (bits && slots % 64)
        bits[words - 1] = ~0ull << (slots % 64);
    return bits;
}

static int bucket_of(const struct pms_extent *e)
{
    uint32_t slots = pms_class_slots(e->cls);
    if (e->used == slots)
        return -1;
    return e->used == 0 ? 0 : 1 + (int)(e->used * (PMS_BUCKETS - 1) / slots);
}

static void count_empty(struct pms_index *ix, const struct pms_extent *e, int change)
{
    struct pms_slab_lists *lists = &ix->slabs[e->owner][e->cls];
    lists->empty += (uint32_t)change;
    uint64_t *word = &ix->surplus[e->owner][e->cls / 64], bit = 1ull << (e->cls % 64);
    *word = lists->empty > 1 ? *word | bit : *word & ~bit;
}

void pms_slab_unlist(struct pms_index *ix, struct pms_extent *e)
{
    if (e->bucket < 0)
        return;
    if (e->bucket == 0)
        count_empty(ix, e, -1);
    if (e->list_next)
        e->list_next->list_prev = e->list_prev;
    if (e->list_prev)
        e->list_prev->list_next = e->list_next;
    else
        ix->slabs[e->owner][e->cls].bucket[e->bucket] = e->list_next;
    e->list_prev = e->list_next = NULL;
    e->bucket = -1;
}

void pms_slab_list(struct pms_index *ix, struct pms_extent *e)
{
    int bucket = bucket_of(e);
    if (bucket == e->bucket)
        return;
    pms_slab_unlist(ix, e);
    e->bucket = (int8_t)bucket;
    if (bucket < 0)
        return;
    struct pms_extent **head = &ix->slabs[e->owner][e->cls].bucket[bucket];
    e->list_next = *head;
    if (e->list_next)
        e->list_next->list_prev = e;
    *head = e;
    if (bucket == 0)
        count_empty(ix, e, 1);
}

struct pms_extent *pms_slab_fullest(const struct pms_index *ix, unsigned owner, unsigned cls)
{
    const struct pms_slab_lists *lists = &ix->slabs[owner][cls];
    for (unsigned b = PMS_BUCKETS; b-- > 0;)
        if (lists->bucket[b])
            return lists->bucket[b];
    return NULL;
}

uint32_t pms_slab_take(struct pms_index *ix, struct pms_extent *e)
{
    uint64_t *busy = pms_slab_busy(e);
    uint32_t words = pms_slab_words(e->cls), w = e->hint;
    while (w < words && busy[w] == ~0ull)
        w++;
    PMS_ASSERT(w < words && e->used < pms_class_slots(e->cls));
    uint32_t slot = w * 64 + (uint32_t)__builtin_ctzll(~busy[w]);
    pms_bit_set(busy, slot);
    e->hint = (uint8_t)w;
    e->used++;
    pms_slab_list(ix, e);
    return slot;
}

void pms_slab_give(struct pms_index *ix, struct pms_extent *e, uint32_t slot)
{
    PMS_ASSERT(e->used > 0 && pms_bit(pms_slab_busy(e), slot));
    pms_bit_clear(pms_slab_busy(e), slot);
    if (slot / 64 < e->hint)
        e->hint = (uint8_t)(slot / 64);
    e->used--;
    pms_slab_list(ix, e);
}

/* ---- pins: open addressing by offset, as above ---- */

struct pms_pin *pms_pin_find(const struct pms_index *ix, uint64_t off)
{
    if (!ix->pin_used)
        return NULL;
    for (uint64_t i = slot_of(off / PMS_LINE, ix->pin_room); ix->pin[i].off;
         i = (i + 1) & (ix->pin_room - 1))
        if (ix->pin[i].off == off)
            return &ix->pin[i];
    return NULL;
}

static void pin_put(struct pms_pin *pins, uint64_t room, const struct pms_pin *pin)
{
    uint64_t i = slot_of(pin->off / PMS_LINE, room);
    while (pins[i].off)
        i = (i + 1) & (room - 1);
    pins[i] = *pin;
}

int pms_pin_add(struct pms_index *ix, const struct pms_pin *pin)
{
    if (ix->pin_used + 1 > ix->pin_room / 2) {
        uint64_t room = ix->pin_room ? ix->pin_room * 2 : 64;
        struct pms_pin *pins = calloc(room, sizeof *pins);
        if (!pins)
            return -1;
        for (uint64_t i = 0; i < ix->pin_room; i++)
            if (ix->pin[i].off)
                pin_put(pins, room, &ix->pin[i]);
        free(ix->pin);
        ix->pin = pins;
        ix->pin_room = room;
    }
    pin_put(ix->pin, ix->pin_room, pin);
    ix->pin_used++;
    return 0;
}

void pms_pin_drop(struct pms_index *ix, struct pms_pin *pin)
{
    uint64_t mask = ix->pin_room - 1, i = (uint64_t)(pin - ix->pin);
    for (uint64_t j = (i + 1) & mask; ix->pin[j].off; j = (j + 1) & mask) {
        uint64_t home = slot_of(ix->pin[j].off / PMS_LINE, ix->pin_room);
        if (((j - home) & mask) >= ((j - i) & mask)) {
            ix->pin[i] = ix->pin[j];
            i = j;
        }
    }
    ix->pin[i] = (struct pms_pin){0};
    ix->pin_used--;
}
