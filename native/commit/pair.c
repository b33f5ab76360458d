
#include "commit/pair.h"

#include <string.h>

#include "commit/hold.h"
#include "log/idle.h"

static const char meta_head[PMS_PAIR_META] = "\x81\xa5slots";

bool pms_pair_is_meta(const void *meta, uint32_t meta_bytes, uint32_t current)
{
    return meta_bytes == PMS_PAIR_META && memcmp(meta, meta_head, PMS_PAIR_META - 1) == 0 &&
           ((const unsigned char *)meta)[PMS_PAIR_META - 1] == current;
}

static int damaged(struct pms_error *error, uint64_t node, const char *rule)
{
    int status = pms_fail(error, PMS_E_CORRUPT, "%s", rule);
    if (error)
        error->offset = node;
    return status;
}

int pms_pair_find(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                  struct pms_pair *pair, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object o;
    int status = pms_dir_find(&dirs, dir, name, name_bytes, &o, error);
    if (status != PMS_OK)
        return status;
    if (o.kind != PMS_OBJECT_GROUP || o.meta_bytes == 0)
        return pms_fail(error, PMS_E_NOT_FOUND, "no slots have that name");
    bool second = pms_pair_is_meta(o.meta, o.meta_bytes, 1);
    if (!second && !pms_pair_is_meta(o.meta, o.meta_bytes, 0))
        return damaged(error, o.node, "the description is not one of slots");
    uint64_t node = o.node;
    struct pms_slot_pair *slots = &pair->slots;
    *slots = (struct pms_slot_pair){.group = o.data, .current = second};
    pair->where = (uint64_t)(o.meta - pool->map.engine) + PMS_PAIR_META - 1;
    for (int i = 0; i < 2; i++) {
        status = pms_dir_find(&dirs, slots->group, i ? "1" : "0", 1, &o, NULL);
        if (status != PMS_OK || o.kind != PMS_OBJECT_ARRAY)
            return damaged(error, node, "slots lack an array");
        if ((i && o.data_bytes != slots->bytes) || (o.data == 0) != (o.data_bytes == 0))
            return damaged(error, node, "the two arrays of slots differ in size");
        slots->data[i] = o.data;
        slots->bytes = o.data_bytes;
    }
    return PMS_OK;
}

int pms_pair_block(struct pms_pool *pool, uint64_t data, struct pms_pair_block *block,
                   struct pms_error *error)
{
    struct pms_block *b = &block->at;
    bool found = pms_heap_find(pool->heap, data, b) && b->live && b->off == data;
    if (!found || (b->kind != PMS_KIND_LARGE && b->kind != PMS_KIND_SLAB))
        return pms_fail(error, PMS_E_INVALID, "no block of an array starts there");
    block->alone = b->kind == PMS_KIND_LARGE && !pms_heap_is_fresh(pool->heap, b->off);
    return PMS_OK;
}

int pms_pair_open(struct pms_pool *pool, const struct pms_pair_block *block,
                  struct pms_error *error)
{
    const struct pms_block *b = &block->at;
    if (!block->alone)
        return pms_capture_spans(&pool->capture, &(struct pms_span){b->off, b->bytes}, 1, error);
    if (pms_idle_is_left(&pool->undo, b->extent_off))
        return pms_fail(error, PMS_E_STATE,
                        "flipped in this transaction: the other slot holds the committed version");
    int status = pms_hold_leave_slot(pool, b->extent_off, error);
    if (status == PMS_OK)
        pms_idle_open(&pool->undo, b->extent_off, b->extent_bytes);
    return status;
}

uint64_t pms_pair_used(const struct pms_pair *pair, const struct pms_pair_block *block)
{
    uint64_t used = (pair->slots.bytes + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
    return used < block->at.extent_bytes ? used : block->at.extent_bytes;
}
