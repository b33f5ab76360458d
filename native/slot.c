/* Slots: an object with two blocks, of which logged data names the current one. What the engine adds is that the other one can be
 * written without capture. */
#include "idle.h"
#include "pool_state.h"

/* Blocks that share their pages with others cannot be told apart by protection: they are captured like all. So are those born in this
 * transaction, which needs no pre-images. */
static bool stands_alone(const struct pms_pool *pool, const struct pms_block *b)
{
    return b->kind == PMS_KIND_LARGE && !pms_heap_is_fresh(pool->heap, b->off);
}

static int find(struct pms_pool *pool, uint64_t data, struct pms_block *b, struct pms_error *error)
{
    bool found = pms_heap_find(pool->heap, data, b) && b->live && b->off == data;
    if (found && (b->kind == PMS_KIND_LARGE || b->kind == PMS_KIND_SLAB))
        return PMS_OK;
    return pms_fail(error, PMS_E_INVALID, "no block of an array starts there");
}

int pms_slot_open(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    struct pms_block b;
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = find(pool, data, &b, error);
    if (status == PMS_OK && stands_alone(pool, &b))
        pms_idle_open(&pool->undo, b.extent_off, b.extent_bytes);
    else if (status == PMS_OK)
        status = pms_capture_spans(&pool->capture, &(struct pms_span){b.off, b.bytes}, 1, error);
    pms_pool_leave(pool);
    return status;
}

int pms_slot_publish(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    struct pms_block b;
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = find(pool, data, &b, error);
    if (status == PMS_OK && stands_alone(pool, &b))
        pms_idle_publish(&pool->undo, b.extent_off, b.extent_bytes);
    pms_pool_leave(pool);
    return status;
}
