/* New blocks of the user's: room for them, and what is in them at first. */
#include "objects/data.h"

#include <string.h>

#include "base/pages.h"
#include "commit/pool_state.h"
#include "commit/relief.h"
#include "store/grow.h"

#define AHEAD_LEAST (256u << 10) /* of a private view: less is copied by its first stores */

struct filler {
    unsigned char *dst;
    const unsigned char *src;
    uint64_t bytes, src_bytes;
    int fill;
    struct pms_persist *persist;
};

static void fill_pattern(const struct filler *f)
{
    unsigned char block[PMS_PAGE];
    uint64_t unit = f->src_bytes <= sizeof block ? sizeof block / f->src_bytes * f->src_bytes
                                                 : f->src_bytes;
    const unsigned char *from = f->src;
    if (f->src_bytes <= sizeof block) {
        for (uint64_t i = 0; i < unit; i += f->src_bytes)
            memcpy(block + i, f->src, f->src_bytes);
        from = block;
    }
    for (uint64_t at = 0; at < f->bytes; at += unit)
        pms_persist_copy(f->persist, f->dst + at, from,
                         f->bytes - at < unit ? f->bytes - at : unit);
}

static void fill(const struct filler *f)
{
    if (f->fill == PMS_FILL_ZERO)
        pms_persist_zero(f->persist, f->dst, f->bytes);
    else if (f->fill == PMS_FILL_COPY)
        pms_persist_copy(f->persist, f->dst, f->src, f->bytes);
    else if (f->fill == PMS_FILL_PATTERN)
        fill_pattern(f);
}

/* The block is fresh. In a shared view the engine stores through its own mapping, and the user's
 * pages stay as they are. In a private one it stores where the user would, so it captures as the
 * user would (a slab's page holds other blocks too). */
static int fill_block(struct pms_pool *pool, uint64_t data, uint64_t bytes, int how,
                      const void *src, uint64_t src_bytes, struct pms_error *error)
{
    struct pms_persist own = {.flush = pool->persist.flush};
    struct filler f = {NULL, src, bytes, src_bytes, how, &own};
    int status = PMS_OK;
    if (pool->map.shared) {
        pms_undo_note_born(&pool->undo, data, bytes);
    } else {
        status = pms_capture_spans(&pool->capture, &(struct pms_span){data, bytes}, 1, error);
    }
    f.dst = pms_map_at(&pool->map, data);
    if (status != PMS_OK)
        return status;
    if (!pool->map.shared && how != PMS_FILL_NONE && bytes >= AHEAD_LEAST)
        /* by all cores, not by a fault for each page */
        pms_map_copy_ahead(&pool->map, pms_page_up(data),
                           pms_page_down(data + bytes) - pms_page_up(data));
    bool shares = pool->map.shared && bytes <= PMS_SMALL_MAX;
    /* its pages hold other blocks too: a capture of those reads each page twice, and must find
     * the same (I1) */
    if (shares)
        pms_undo_lock(&pool->undo);
    fill(&f);
    if (shares)
        pms_undo_unlock(&pool->undo);
    pms_undo_count(&pool->undo, &own);
    return PMS_OK;
}

/* A tail of small pages costs more than all huge ones before it whenever the block's protection
 * changes: it is filled up where that takes no more than a 20th; of a slot, whose protection
 * changes twice in every transaction, no more than half as much again. */
static uint64_t whole_huge_pages(uint64_t bytes, bool slot)
{
    uint64_t whole = pms_huge_up(bytes);
    return bytes < 1ull << 60 && whole - bytes <= bytes / (slot ? 2 : 20) ? whole : bytes;
}

/* A slot that is written as a whole never has its pages in the log (domain file: in the journal);
 * smaller ones do. */
#define UNLOGGED_LEAST (PMS_STRAIGHT_HOME_PAGES * PMS_PAGE)

static int allocate(struct pms_pool *pool, uint64_t room, bool slot, uint64_t bytes, uint64_t *data,
                    struct pms_error *error)
{
    return slot && bytes >= UNLOGGED_LEAST
               ? pms_pool_allocate_slot(pool, room, data, error)
               : pms_pool_allocate(pool, room, PMS_OWNER_USER, data, error);
}

int pms_pool_new_data(struct pms_pool *pool, uint64_t bytes, int how, const void *src,
                      uint64_t src_bytes, uint64_t *data, struct pms_error *error)
{
    bool slot = how & PMS_FILL_OF_SLOT;
    *data = 0;
    if (!bytes)
        return PMS_OK;
    /* no huge pages in a private view */
    uint64_t room = pool->map.shared ? whole_huge_pages(bytes, slot) : bytes;
    int status = allocate(pool, room, slot, bytes, data, error);
    if (status == PMS_E_FULL && room != bytes)
        status = allocate(pool, room = bytes, slot, bytes, data, error);
    if (status != PMS_OK)
        return status;
    if (pool->map.shared)
        pms_map_prefer_huge(&pool->map, *data, room);
    status = fill_block(pool, *data, bytes, how & ~PMS_FILL_OF_SLOT, src, src_bytes, error);
    if (status != PMS_OK)
        /* born in this transaction: as if it had not been */
        pms_heap_free(pool->heap, *data, NULL);
    else
        pms_relief_born(pool, bytes);
    return status;
}
