/* What of the data is in use, and where; and the superblock's twin. */
#include <string.h>

#include "objects/usage.h"
#include "commit/gate.h"

static_assert(PMS_USAGE_SEGMENTS == PMS_MAX_SEGMENTS, "one for each segment");

struct count {
    struct pms_segment_usage *usage;
    uint32_t segments, at; /* blocks come by ascending segments */
};

static int add(void *ctx, const struct pms_block *block)
{
    struct count *c = ctx;
    struct pms_segment_usage *u = &c->usage[c->at];
    while (block->off - u->data_off >= u->data_bytes && c->at + 1 < c->segments)
        u = &c->usage[++c->at];
    u->used_bytes += block->bytes;
    u->blocks++;
    uint64_t from = block->off - u->data_off, end = from + block->bytes;
    while (from < end) { /* cell i begins at data_bytes * i / CELLS, rounded up */
        uint64_t i = from * PMS_USAGE_CELLS / u->data_bytes;
        uint64_t next = (u->data_bytes * (i + 1) + PMS_USAGE_CELLS - 1) / PMS_USAGE_CELLS;
        uint64_t bytes = (end < next ? end : next) - from;
        u->cell[i < PMS_USAGE_CELLS ? i : PMS_USAGE_CELLS - 1] += bytes;
        from += bytes;
    }
    return 0;
}

int pms_usage(struct pms_pool *pool, struct pms_segment_usage usage[PMS_USAGE_SEGMENTS],
              uint32_t *segments, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    *segments = pool->super.segment_count;
    for (uint32_t i = 0; i < *segments; i++) {
        const struct pms_segment *s = &pool->super.segment[i];
        usage[i] = (struct pms_segment_usage){.table_off = s->table_off,
                                              .log_bytes = s->log_bytes,
                                              .data_off = s->data_off,
                                              .data_bytes = s->data_pages * PMS_PAGE};
    }
    struct count c = {.usage = usage, .segments = *segments};
    status = pms_heap_walk(pool->heap, add, &c, error);
    pms_pool_leave(pool);
    return status;
}

int pms_mend_superblock(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_beside(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_superblock super = pool->super;
    status = pms_super_write(pool->opened.fd, &pool->persist, &super, error);
    pms_undo_lock(&pool->undo); /* readers are told of it */
    if (status == PMS_OK)
        pool->super = super;
    pms_undo_unlock(&pool->undo);
    pms_pool_leave(pool);
    return status;
}
