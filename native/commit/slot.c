/* Slots: an object with two blocks, of which logged data names the current one. What the engine
 * adds is that the other one can be written without capture. */
#include <string.h>

#include "log/idle.h"
#include "commit/pool_state.h"

/* What stands beside the group's name, in msgpack: {"slots": c}. Its last byte is all that a
 * flip changes. */
#define META_BYTES 8u
static const char meta_head[META_BYTES] = "\x81\xa5slots";

/* Blocks that share their pages with others cannot be told apart by protection: they are
 * captured like all. So are those born in this transaction, which needs no pre-images. */
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

static int open_block(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    struct pms_block b;
    int status = find(pool, data, &b, error);
    if (status != PMS_OK)
        return status;
    if (!stands_alone(pool, &b))
        return pms_capture_spans(&pool->capture, &(struct pms_span){b.off, b.bytes}, 1, error);
    if (pms_idle_is_left(&pool->undo, b.extent_off))
        return pms_fail(error, PMS_E_STATE,
                        "flipped in this transaction: the other slot holds the committed version");
    pms_idle_open(&pool->undo, b.extent_off, b.extent_bytes);
    return PMS_OK;
}

int pms_slot_open(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = open_block(pool, data, error);
    pms_pool_leave(pool);
    return status;
}

static int damaged(struct pms_error *error, uint64_t node, const char *rule)
{
    int status = pms_fail(error, PMS_E_CORRUPT, "%s", rule);
    if (error)
        error->offset = node;
    return status;
}

static int find_pair(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                     struct pms_slot_pair *pair, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object o;
    int status = pms_dir_find(&dirs, dir, name, name_bytes, &o, error);
    if (status != PMS_OK)
        return status;
    if (o.kind != PMS_OBJECT_GROUP || o.meta_bytes == 0)
        return pms_fail(error, PMS_E_NOT_FOUND, "no slots have that name");
    if (o.meta_bytes != META_BYTES || memcmp(o.meta, meta_head, META_BYTES - 1) != 0 ||
        (unsigned char)o.meta[META_BYTES - 1] > 1)
        return damaged(error, o.node, "the description is not one of slots");
    uint64_t node = o.node;
    *pair = (struct pms_slot_pair){.group = o.data, .current = (uint32_t)o.meta[META_BYTES - 1]};
    for (int i = 0; i < 2; i++) {
        status = pms_dir_find(&dirs, pair->group, i ? "1" : "0", 1, &o, NULL);
        if (status != PMS_OK || o.kind != PMS_OBJECT_ARRAY)
            return damaged(error, node, "slots lack an array");
        if ((i && o.data_bytes != pair->bytes) || (o.data == 0) != (o.data_bytes == 0))
            return damaged(error, node, "the two arrays of slots differ in size");
        pair->data[i] = o.data;
        pair->bytes = o.data_bytes;
    }
    return PMS_OK;
}

int pms_slot_find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                  struct pms_slot_pair *pair, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = pms_object_step_down(pool, &dir, &path, &path_bytes, error);
    if (status == PMS_OK)
        status = find_pair(pool, dir, path, path_bytes, pair, error);
    pms_pool_leave(pool);
    return status;
}

/* Of the pair, the array with that number, pinned. */
static int get_array(struct pms_pool *pool, const struct pms_slot_pair *pair, uint32_t number,
                     struct pms_object *object, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    int status = pms_dir_find(&dirs, pair->group, number ? "1" : "0", 1, object, error);
    return status == PMS_OK ? pms_object_pin(pool, object, error) : status;
}

int pms_slot_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                 enum pms_slot_which which, struct pms_object *object, struct pms_error *error)
{
    struct pms_slot_pair pair;
    int status = which == PMS_SLOT_NEXT ? pms_pool_enter_write(pool, error)
                                        : pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = pms_object_step_down(pool, &dir, &path, &path_bytes, error);
    if (status == PMS_OK)
        status = find_pair(pool, dir, path, path_bytes, &pair, error);
    uint32_t number = status != PMS_OK            ? 0
                      : which == PMS_SLOT_CURRENT ? pair.current
                                                  : !pair.current;
    if (status == PMS_OK && which == PMS_SLOT_NEXT && pair.data[number])
        status = open_block(pool, pair.data[number], error);
    if (status == PMS_OK)
        status = get_array(pool, &pair, number, object, error);
    pms_pool_leave(pool);
    return status;
}

/* what is behind them fills a huge page up */
static uint64_t used_pages(const struct pms_slot_pair *pair, const struct pms_block *b)
{
    uint64_t used = (pair->bytes + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
    return used < b->extent_bytes ? used : b->extent_bytes;
}

static int flipped_already(const char *name, uint32_t name_bytes, struct pms_error *error)
{
    return pms_fail(error, PMS_E_STATE,
                    "slots '%.*s' were flipped in this transaction already: commit first",
                    (int)name_bytes, name);
}

int pms_slot_flip(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                  struct pms_slot_turn *turn, struct pms_error *error)
{
    struct pms_slot_pair pair;
    struct pms_block b, before;
    char meta[META_BYTES];
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = pms_object_step_down(pool, &dir, &name, &name_bytes, error);
    if (status == PMS_OK)
        status = find_pair(pool, dir, name, name_bytes, &pair, error);
    if (status == PMS_OK && turn && turn->epoch == pms_pool_root(pool)->epoch &&
        turn->rollbacks == pool->tx.rollbacks)
        status = flipped_already(name, name_bytes, error);
    uint64_t data = status == PMS_OK ? pair.data[!pair.current] : 0;
    if (data)
        status = find(pool, data, &b, error);
    if (data && status == PMS_OK)
        status = find(pool, pair.data[pair.current], &before, error);
    if (data && status == PMS_OK && stands_alone(pool, &b) &&
        pms_idle_is_left(&pool->undo, b.extent_off))
        status = flipped_already(name, name_bytes, error);
    if (status == PMS_OK) {
        struct pms_dir_ctx dirs = pms_pool_dirs(pool);
        memcpy(meta, meta_head, META_BYTES);
        meta[META_BYTES - 1] = !pair.current;
        /* In place, as it is as long as before: needs no room. */
        status = pms_dir_put(&dirs, dir, name, name_bytes, PMS_OBJECT_GROUP, meta, META_BYTES,
                             pair.group, PMS_LINE, error);
    }
    if (status == PMS_OK && data && stands_alone(pool, &b))
        pms_idle_publish(&pool->undo, b.extent_off, b.extent_bytes, used_pages(&pair, &b));
    if (status == PMS_OK && data && stands_alone(pool, &before))
        pms_idle_leave(&pool->undo, before.extent_off);
    if (turn && status == PMS_OK)
        *turn = (struct pms_slot_turn){pms_pool_root(pool)->epoch, pool->tx.rollbacks};
    pms_pool_leave(pool);
    return status;
}
