/* The heap itself, for heap.c (allocating and freeing), heap/open.c (building the index) and
 * heap/query.c (asking). */
#ifndef PMS_HEAP_STATE_H
#define PMS_HEAP_STATE_H

#include "heap/index.h"
#include "heap/starts.h"
#include "heap/table.h"
#include "log/charge.h"

struct pms_heap {
    struct pms_undo *undo;
    struct pms_map *map;
    const struct pms_superblock *super;
    struct pms_table table[PMS_MAX_SEGMENTS]; /* only ever added to: the fault handler reads them */
    _Atomic uint32_t table_count;
    struct pms_starts starts; /* of descriptors, as the medium has them now */
    struct pms_index index;
    /* +1 whenever a transaction ends: what was born before is not new any more */
    uint64_t round;
    uint64_t data_pages;
    uint64_t live_bytes, live_blocks;
    uint64_t slot_room; /* bytes of free slots */
    uint64_t log_need;  /* I5: of everything live */
    uint64_t slot_need; /* of these, of slots: charged when they are captured */
};

static inline uint32_t pms_heap_table_count(const struct pms_heap *h)
{
    return atomic_load_explicit(&h->table_count, memory_order_acquire);
}

/* or NULL */
static inline const struct pms_table *pms_heap_table_of(const struct pms_heap *h, uint64_t page)
{
    for (uint32_t i = pms_heap_table_count(h); i-- > 0;)
        if (page >= h->table[i].first)
            return page - h->table[i].first < h->table[i].pages ? &h->table[i] : NULL;
    return NULL;
}

/* A live extent's room in the log. */
static inline void pms_heap_charge(struct pms_heap *h, const struct pms_extent *e)
{
    uint64_t cost = pms_heap_log_cost((enum pms_owner)e->owner, e->pages);
    h->log_need += cost;
    h->slot_need += e->slot ? cost : 0;
    pms_charge_mark(h->undo, e->page, e->pages, e->slot);
}

static inline void pms_heap_discharge(struct pms_heap *h, const struct pms_extent *e)
{
    uint64_t cost = pms_heap_log_cost((enum pms_owner)e->owner, e->pages);
    PMS_ASSERT(h->log_need >= cost && (!e->slot || h->slot_need >= cost));
    h->log_need -= cost;
    h->slot_need -= e->slot ? cost : 0;
}

static inline bool pms_heap_born_now(const struct pms_heap *h, const struct pms_extent *e)
{
    return e->round == h->round;
}

static inline uint32_t pms_heap_slot_at(const struct pms_extent *e, uint64_t off)
{
    return (uint32_t)(off - e->page * PMS_PAGE) / pms_class_bytes(e->cls);
}

static inline bool pms_heap_slot_live(const struct pms_heap *h, const struct pms_extent *e,
                                      uint32_t slot)
{
    return pms_table_slot(h->map, pms_heap_table_of(h, e->page), e->page, slot);
}

/* The extent of the index, not FREE, that holds the page; or NULL. */

/* The extent whose live block starts at off, or NULL. */
struct pms_extent *pms_heap_live_block(const struct pms_heap *h, uint64_t off);

#endif
