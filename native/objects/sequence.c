/* Lists of a store. Each function is one step that commits, rolls back and recovers whole. */
#include <stdlib.h>

#include "objects/sequence.h"
#include "commit/gate.h"
#include "commit/txblock.h"
#include "objects/object.h"
#include "store/grow.h"
#include "names/list.h"

#define MORE_FOR_LISTS (1u << 20) /* growth step when a list finds no room */
#define FEW 16u                   /* new items for whose offsets no memory is asked */

/* The list of that path: dir itself, if it is empty. REQUIRES: the operation lock. */
static int find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                uint64_t *list, struct pms_error *error)
{
    struct pms_dir_ctx ctx = pms_pool_dirs(pool);
    struct pms_object o;
    if (!path_bytes) {
        *list = dir;
        return PMS_OK;
    }
    int status = pms_object_step_down(pool, &dir, &path, &path_bytes, error);
    if (status == PMS_OK)
        status = pms_dir_find(&ctx, dir, path, path_bytes, &o, error);
    if (status == PMS_OK && o.kind != PMS_OBJECT_LIST)
        status = pms_fail(error, PMS_E_NOT_FOUND, "no list has that name");
    if (status == PMS_OK)
        *list = o.data;
    return status;
}

int pms_sequence_count(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                       uint64_t *count, struct pms_error *error)
{
    uint64_t list;
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_dir_ctx ctx = pms_pool_dirs(pool);
    status = find(pool, dir, path, path_bytes, &list, error);
    if (status == PMS_OK)
        status = pms_list_count(&ctx, list, count, error);
    pms_pool_leave(pool);
    return status;
}

int pms_sequence_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                     uint64_t index, int pin, struct pms_object *object, struct pms_error *error)
{
    uint64_t list;
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_dir_ctx ctx = pms_pool_dirs(pool);
    status = find(pool, dir, path, path_bytes, &list, error);
    if (status == PMS_OK)
        status = pms_list_get(&ctx, list, index, object, error);
    if (status == PMS_OK && pin)
        status = pms_object_pin(pool, object, error);
    pms_pool_leave(pool);
    return status;
}

/* ---- splice ---- */

static int new_item(struct pms_pool *pool, const struct pms_new_item *n, uint64_t *item,
                    struct pms_error *error)
{
    struct pms_dir_ctx ctx = pms_pool_dirs(pool);
    uint64_t data;
    if (n->meta_bytes > UINT32_MAX - sizeof(struct pms_item))
        return pms_fail(error, PMS_E_INVALID, "a value of more than 4 GiB");
    int status = pms_pool_new_data(pool, n->data_bytes, (int)n->fill, n->src, n->data_bytes, &data,
                                   error);
    if (status != PMS_OK)
        return status;
    uint32_t meta_bytes = (uint32_t)n->meta_bytes;
    status = pms_list_new_item(&ctx, n->kind, n->meta, meta_bytes, data, n->data_bytes, item,
                               error);
    if (status == PMS_E_FULL) {
        status = pms_pool_grow(pool, MORE_FOR_LISTS + 2 * n->meta_bytes, error);
        if (status == PMS_OK)
            status = pms_list_new_item(&ctx, n->kind, n->meta, meta_bytes, data, n->data_bytes,
                                       item, error);
    }
    if (status != PMS_OK && data)
        pms_heap_free(pool->heap, data, NULL); /* born in this transaction: as if it had not been */
    return status;
}

static int insert(struct pms_pool *pool, uint64_t list, uint64_t index, uint64_t item,
                  struct pms_error *error)
{
    struct pms_dir_ctx ctx = pms_pool_dirs(pool);
    int status = pms_list_insert(&ctx, list, index, item, error);
    if (status == PMS_E_FULL && (status = pms_pool_grow(pool, MORE_FOR_LISTS, error)) == PMS_OK)
        status = pms_list_insert(&ctx, list, index, item, error);
    return status;
}

/* First all new blocks, then the insertions; what fails in these is undone, which needs no room.
 * Last what cannot fail. */
static int splice(struct pms_pool *pool, uint64_t list, uint64_t index, uint64_t remove,
                  uint64_t step, const struct pms_new_item *items, uint64_t count, uint64_t *item,
                  struct pms_error *error)
{
    struct pms_dir_ctx ctx = pms_pool_dirs(pool);
    uint64_t made = 0, inserted = 0, same = count < remove ? count : remove, old;
    int status = PMS_OK;
    while (status == PMS_OK && made < count)
        if ((status = new_item(pool, &items[made], &item[made], error)) == PMS_OK)
            made++;
    while (status == PMS_OK && inserted < count - same)
        if ((status = insert(pool, list, index + same + inserted, item[same + inserted], error)) ==
            PMS_OK)
            inserted++;
    if (status != PMS_OK) {
        while (inserted > 0 &&
               pms_list_remove(&ctx, list, index + same + --inserted, &old, NULL) == PMS_OK)
            ;
        while (made > 0)
            pms_list_free_item(&ctx, item[--made], NULL);
        return status;
    }
    for (uint64_t i = 0; status == PMS_OK && i < same; i++)
        if ((status = pms_list_replace(&ctx, list, index + i * step, item[i], &old, error)) ==
            PMS_OK)
            status = pms_list_free_item(&ctx, old, error);
    for (uint64_t i = remove; status == PMS_OK && i > same; i--)
        if ((status = pms_list_remove(&ctx, list, index + (i - 1) * step, &old, error)) == PMS_OK)
            status = pms_list_free_item(&ctx, old, error);
    return status;
}

static int checked_splice(struct pms_pool *pool, uint64_t list, uint64_t index, uint64_t remove,
                          uint64_t step, const struct pms_new_item *items, uint64_t count,
                          uint64_t *item, struct pms_error *error)
{
    struct pms_dir_ctx ctx = pms_pool_dirs(pool);
    uint64_t length;
    int status = pms_list_count(&ctx, list, &length, error);
    if (status != PMS_OK)
        return status;
    if (index == PMS_LIST_END)
        index = length;
    if (index > length || (remove && (index == length || remove - 1 > (length - 1 - index) / step)))
        return pms_fail(error, PMS_E_INVALID, "the index is past the end of the list");
    if (step != 1 && count > remove)
        return pms_fail(error, PMS_E_INVALID, "more items than places");
    if (remove == length && remove && !count)
        return pms_list_clear(&ctx, list, error);
    return splice(pool, list, index, remove, step, items, count, item, error);
}

int pms_sequence_splice(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                        uint64_t index, uint64_t remove, uint64_t step,
                        const struct pms_new_item *items, uint64_t count, struct pms_error *error)
{
    uint64_t few[FEW], *item = few, list;
    if (step == 0)
        return pms_fail(error, PMS_E_INVALID, "a step of 0");
    if (count > FEW && !(item = calloc(count, sizeof *item)))
        return pms_fail_errno(error, "allocating memory");
    int status = pms_pool_enter_write(pool, error);
    if (status == PMS_OK) {
        status = find(pool, dir, path, path_bytes, &list, error);
        if (status == PMS_OK)
            status = checked_splice(pool, list, index, remove, step, items, count, item, error);
        pms_pool_leave(pool);
    }
    if (item != few)
        free(item);
    return status;
}
