/* The heap's volatile index: which page ranges are free, which slabs have free slots, which
 * blocks are pinned. Nothing here stores to the medium; heap.c keeps the two in step.
 *
 * An extent of the index is a range of data pages: FREE ranges are merged and hang in a bin by
 * size; the others are found by their first page. All of them form one list in order of address. */
#ifndef PMS_HEAP_INDEX_H
#define PMS_HEAP_INDEX_H

#include <stdbool.h>

#include "heap/heap.h"

/* ---- extents ---- */
enum pms_extent_state {
    PMS_EXTENT_FREE = 1,  /* in a bin */
    PMS_EXTENT_LARGE = 2, /* one live block */
    PMS_EXTENT_SLAB = 3,
    /* free on the medium, kept out of the bins by a pin or until the commit */
    PMS_EXTENT_DEAD = 4,
};

struct pms_extent {
    uint64_t page, pages;
    struct pms_extent *prev, *next;           /* by address */
    struct pms_extent *list_prev, *list_next; /* bin of FREE, bucket of SLAB */
    struct pms_extent *deferred_prev, *deferred_next;
    uint64_t round; /* in which it was born */
    struct pms_extent *held_next;
    /* SLAB: busy, born, dead, held: slots not to be had, born in bits_round, freed in bits_round,
     * needed by the held version */
    uint64_t *bits;
    uint64_t bits_round;
    uint32_t used; /* SLAB: busy slots */
    uint32_t pins; /* pinned blocks in it */
    uint8_t state; /* enum pms_extent_state */
    uint8_t owner; /* enum pms_owner */
    uint8_t cls;
    uint8_t hint;  /* SLAB: no free slot in the words before it */
    int8_t bucket; /* SLAB: which list it is in, -1 = none */
    bool deferred; /* waits for the commit, with all of itself or with slots */
    bool held;     /* waits for the release of the held version, likewise */
    bool slot;     /* of a pair of slots */
};

#define PMS_BINS (16u + 33u * 16u)
#define PMS_BUCKETS 5u /* of slabs, by how full they are; 0 = empty */
#define PMS_CLASSES 128u

struct pms_slab_lists { /* of one class and owner */
    struct pms_extent *bucket[PMS_BUCKETS];
    uint32_t empty;
};

struct pms_pin {
    uint64_t off, bytes;  /* of the block; off 0 = no pin */
    uint64_t page, pages; /* of its extent when it was pinned */
    uint32_t count;
    bool slot; /* as of the extent */
};

struct pms_index {
    struct pms_extent *first, *last;
    struct pms_extent **hash; /* by first page; all but FREE */
    uint64_t hash_room, hash_used;
    struct pms_extent_chunk *chunks, *at_chunk; /* memory of the extents */
    uint32_t chunk_used;
    struct pms_extent *spare;
    uint64_t spare_count;
    struct pms_extent *bin[PMS_BINS];
    uint64_t bin_map[(PMS_BINS + 63) / 64];
    uint64_t free_pages;
    struct pms_slab_lists slabs[2][PMS_CLASSES];
    uint64_t surplus[2][PMS_CLASSES / 64]; /* classes with more than one empty slab */
    struct pms_extent *deferred;
    struct pms_extent *held;
    struct pms_pin *pin; /* hash by off */
    uint64_t pin_room, pin_used;
};

void pms_index_close(struct pms_index *ix);
void pms_index_reset(struct pms_index *ix); /* forgets all but the pins; keeps its memory */

/* Memory for what one allocation, or one append, may add: afterwards nothing in it fails. 0 or
 * -1. */
int pms_index_reserve(struct pms_index *ix);

/* Adds a range after all others. FREE is merged with what is before it. REQUIRES: reserved. */
struct pms_extent *pms_index_append(struct pms_index *ix, uint64_t page, uint64_t pages,
                                    enum pms_extent_state state);

/* Cuts [page, page+pages) out of a FREE range; state becomes DEAD. REQUIRES: reserved. */
struct pms_extent *pms_index_carve(struct pms_index *ix, struct pms_extent *range, uint64_t page,
                                   uint64_t pages);

/* Back to the free ranges, merged with its neighbours. Takes no memory. */
void pms_index_release(struct pms_index *ix, struct pms_extent *e);

/* The extent that starts at page and is not FREE, or NULL. */
struct pms_extent *pms_index_at(const struct pms_index *ix, uint64_t page);

/* The smallest free range that holds pages at a multiple of align (power of two, pages), and
 * where in it. NULL: none. */
struct pms_extent *pms_index_best(const struct pms_index *ix, uint64_t pages, uint64_t align,
                                  uint64_t *page);
uint64_t pms_index_largest(const struct pms_index *ix); /* pages */

void pms_index_defer(struct pms_index *ix, struct pms_extent *e);
void pms_index_undefer(struct pms_index *ix, struct pms_extent *e);
void pms_index_hold(struct pms_index *ix, struct pms_extent *e);

/* ---- slabs ---- */
static inline uint32_t pms_slab_words(unsigned cls) { return (pms_class_slots(cls) + 63) / 64; }
static inline uint64_t *pms_slab_busy(const struct pms_extent *e) { return e->bits; }
static inline uint64_t *pms_slab_born(const struct pms_extent *e)
{
    return e->bits + pms_slab_words(e->cls);
}
static inline uint64_t *pms_slab_dead(const struct pms_extent *e)
{
    return e->bits + 2 * pms_slab_words(e->cls);
}
static inline uint64_t *pms_slab_held(const struct pms_extent *e)
{
    return e->bits + 3 * pms_slab_words(e->cls);
}
static inline bool pms_bit(const uint64_t *bits, uint32_t i)
{
    return bits[i / 64] >> (i % 64) & 1;
}
static inline void pms_bit_set(uint64_t *bits, uint32_t i) { bits[i / 64] |= 1ull << (i % 64); }
static inline void pms_bit_clear(uint64_t *bits, uint32_t i)
{
    bits[i / 64] &= ~(1ull << (i % 64));
}

/* no slot busy, but those past the end; NULL: no memory */
uint64_t *pms_slab_bits_new(unsigned cls);
/* into the bucket it belongs to now */
void pms_slab_list(struct pms_index *ix, struct pms_extent *e);
void pms_slab_unlist(struct pms_index *ix, struct pms_extent *e);
/* with a free slot, or NULL */
struct pms_extent *pms_slab_fullest(const struct pms_index *ix, unsigned owner, unsigned cls);
/* its first free slot becomes busy */
uint32_t pms_slab_take(struct pms_index *ix, struct pms_extent *e);
void pms_slab_give(struct pms_index *ix, struct pms_extent *e, uint32_t slot);

/* ---- pins ---- */
struct pms_pin *pms_pin_find(const struct pms_index *ix, uint64_t off); /* or NULL */
int pms_pin_add(struct pms_index *ix, const struct pms_pin *pin);       /* 0 or -1: no memory */
void pms_pin_drop(struct pms_index *ix, struct pms_pin *pin);

#endif
