/* The page table's bytes: descriptors of extents and bitmaps of slabs, read and checked. heap.c
 * alone stores them. */
#ifndef PMS_HEAP_TABLE_H
#define PMS_HEAP_TABLE_H

#include "heap/heap.h"

#define PMS_EXTENT_PAGES_MAX ((1ull << 36) - 1)

/* of one segment: its data pages, and where their entries are */
struct pms_table {
    uint64_t first, pages, off;
};

struct pms_descriptor { /* decoded */
    uint64_t page, pages, aux;
    enum pms_kind kind; /* never SLOT: that is a LARGE one with */
    bool slot;
    unsigned cls;
};

static inline bool pms_kind_is_slab(enum pms_kind kind)
{
    return kind == PMS_KIND_SLAB || kind == PMS_KIND_META_SLAB;
}
static inline bool pms_kind_is_large(enum pms_kind kind)
{
    return kind == PMS_KIND_LARGE || kind == PMS_KIND_META_LARGE;
}
static inline enum pms_owner pms_kind_owner(enum pms_kind kind)
{
    return kind == PMS_KIND_META_SLAB || kind == PMS_KIND_META_LARGE ? PMS_OWNER_ENGINE
                                                                     : PMS_OWNER_USER;
}

static inline uint64_t pms_table_entry(const struct pms_table *t, uint64_t page) /* offset */
{
    return t->off + (page - t->first) * sizeof(struct pms_pte);
}

/* Offset of a word of the bitmap of the slab at page: it starts in its second page's entry. */
static inline uint64_t pms_table_bitmap(const struct pms_table *t, uint64_t page, uint32_t word)
{
    return pms_table_entry(t, page + 1) + word * sizeof(uint64_t);
}

/* A word that another thread may be storing to, by copying it in one aligned piece. Then it is a
 * word of free space, or the bitmap word of a live block, whose own bit stays. Not for TSan's
 * eyes: the copy itself is no atomic store. */
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize_thread))
#endif
static inline uint64_t pms_table_load(const struct pms_map *map, uint64_t off)
{
    return __atomic_load_n((const uint64_t *)pms_map_at(map, off), __ATOMIC_RELAXED);
}

static inline bool pms_table_slot(const struct pms_map *map, const struct pms_table *t,
                                  uint64_t page, uint32_t slot)
{
    return pms_table_load(map, pms_table_bitmap(t, page, slot / 64)) >> (slot % 64) & 1;
}

struct pms_pte pms_table_encode(const struct pms_descriptor *x);

/* Reads the descriptor of the extent that starts at page. Returns the rule it breaks, or NULL.
 * Async-signal-safe. */
const char *pms_table_decode(const struct pms_map *map, const struct pms_table *t, uint64_t page,
                             struct pms_descriptor *x);

/* The same of an entry that is somewhere else. */
const char *pms_table_decode_pte(const struct pms_table *t, uint64_t page,
                                 const struct pms_pte *pte, struct pms_descriptor *x);

/* Calls fn for each extent of the table, checked with its bitmap. At most one step for each
 * page, whatever the table says. Returns fn's first non-zero result. ERRORS: PMS_E_CORRUPT. */
typedef int (*pms_table_fn)(void *ctx, const struct pms_table *t, const struct pms_descriptor *x,
                            struct pms_error *error);
int pms_table_each(const struct pms_map *map, const struct pms_table *t, pms_table_fn fn, void *ctx,
                   struct pms_error *error);

#endif
