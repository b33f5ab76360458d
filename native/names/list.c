#include "names/list.h"

#include <string.h>

#include "names/directory_table.h"
#include "names/list_tree.h"

int pms_list_corrupt(struct pms_error *error, uint64_t off, const char *rule)
{
    int status = pms_fail(error, PMS_E_CORRUPT, "list: %s", rule);
    if (error)
        error->offset = off;
    return status;
}

/* ---- checks of what the medium says ---- */

int pms_list_load(const struct pms_dir_ctx *ctx, uint64_t list, struct pms_list_header *header,
                  struct pms_error *error)
{
    struct pms_block block;
    if (!pms_dir_block(ctx, list, sizeof *header, PMS_OWNER_ENGINE, &block))
        return pms_list_corrupt(error, list, "its header is no live block");
    memcpy(header, pms_map_at(ctx->undo->map, list), sizeof *header);
    bool empty = header->count == 0;
    if (header->magic != PMS_LIST_MAGIC || (header->root == 0) != empty ||
        header->level >= PMS_LIST_LEVELS || (empty && header->level != 0))
        return pms_list_corrupt(error, list, "the header's numbers contradict each other");
    return PMS_OK;
}

int pms_list_node(const struct pms_dir_ctx *ctx, uint64_t off, unsigned level,
                  const struct pms_list_node **node, struct pms_error *error)
{
    struct pms_block block;
    if (!pms_dir_block(ctx, off, sizeof **node, PMS_OWNER_ENGINE, &block))
        return pms_list_corrupt(error, off, "a node is no live block");
    *node = pms_map_at(ctx->undo->map, off);
    if ((*node)->magic != PMS_LIST_NODE_MAGIC || (*node)->level != level || (*node)->used == 0 ||
        (*node)->used > pms_list_room(level))
        return pms_list_corrupt(error, off, "a node's numbers contradict each other");
    return PMS_OK;
}

int pms_list_item(const struct pms_dir_ctx *ctx, uint64_t off, struct pms_object *object,
                  struct pms_error *error)
{
    struct pms_block block;
    struct pms_item item;
    if (!pms_dir_block(ctx, off, sizeof item, PMS_OWNER_ENGINE, &block))
        return pms_list_corrupt(error, off, "an item is no live block");
    const unsigned char *at = pms_map_at(ctx->undo->map, off);
    memcpy(&item, at, sizeof item);
    if (item.meta_bytes > block.bytes - sizeof item ||
        (item.kind != PMS_OBJECT_VALUE && item.kind != PMS_OBJECT_ARRAY))
        return pms_list_corrupt(error, off, "an item's numbers contradict each other");
    bool data = item.data == 0
                    ? item.data_bytes == 0
                    : item.kind == PMS_OBJECT_ARRAY &&
                          pms_dir_block(ctx, item.data, item.data_bytes, PMS_OWNER_USER, &block);
    if (!data)
        return pms_list_corrupt(error, off, "an item's data is no live block of its size");
    *object = (struct pms_object){
        .node = off,
        .data = item.data,
        .data_bytes = item.data_bytes,
        .kind = item.kind,
        .meta_bytes = item.meta_bytes,
        .meta = at + sizeof item,
    };
    return PMS_OK;
}

/* ---- the way down ---- */

int pms_list_locate(const struct pms_dir_ctx *ctx, const struct pms_list_header *header,
                    uint64_t index, struct pms_list_place *place, struct pms_error *error)
{
    uint64_t off = header->root;
    for (unsigned level = header->level;; level--) {
        const struct pms_list_node *node;
        int status = pms_list_node(ctx, off, level, &node, error);
        if (status != PMS_OK)
            return status;
        place->step[level].off = off;
        place->step[level].node = node;
        if (level == 0) {
            if (index > node->used)
                return pms_list_corrupt(error, off, "a leaf has fewer items than its parent says");
            place->step[0].at = (uint32_t)index;
            return PMS_OK;
        }
        uint32_t at = 0;
        for (; at + 1u < node->used && index >= node->child[at].count; at++)
            index -= node->child[at].count;
        place->step[level].at = at;
        off = node->child[at].node;
    }
}

/* ---- the interface: reading ---- */

int pms_list_count(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t *count,
                   struct pms_error *error)
{
    struct pms_list_header header;
    int status = pms_list_load(ctx, list, &header, error);
    if (status == PMS_OK)
        *count = header.count;
    return status;
}

int pms_list_get(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index,
                 struct pms_object *object, struct pms_error *error)
{
    struct pms_list_header header;
    struct pms_list_place place;
    int status = pms_list_load(ctx, list, &header, error);
    if (status == PMS_OK && index >= header.count)
        status = pms_fail(error, PMS_E_NOT_FOUND, "the index is past the end of the list");
    if (status == PMS_OK)
        status = pms_list_locate(ctx, &header, index, &place, error);
    if (status != PMS_OK)
        return status;
    const struct pms_list_node *leaf = place.step[0].node;
    if (place.step[0].at == leaf->used)
        return pms_list_corrupt(error, place.step[0].off,
                                "a leaf has fewer items than its parent says");
    return pms_list_item(ctx, leaf->item[place.step[0].at], object, error);
}

/* ---- blocks nothing refers to yet ---- */

int pms_list_create(const struct pms_dir_ctx *ctx, uint64_t *list, struct pms_error *error)
{
    const struct pms_list_header header = {.magic = PMS_LIST_MAGIC};
    int status = pms_heap_alloc(ctx->heap, sizeof header, PMS_OWNER_ENGINE, list, error);
    if (status == PMS_OK)
        pms_undo_store_fresh(ctx->undo, *list, &header, sizeof header);
    return status;
}

int pms_list_new_item(const struct pms_dir_ctx *ctx, uint32_t kind, const void *meta,
                      uint32_t meta_bytes, uint64_t data, uint64_t data_bytes, uint64_t *item,
                      struct pms_error *error)
{
    const struct pms_item it = {
        .data = data, .data_bytes = data_bytes, .kind = kind, .meta_bytes = meta_bytes};
    int status = pms_heap_alloc(ctx->heap, sizeof it + meta_bytes, PMS_OWNER_ENGINE, item, error);
    if (status != PMS_OK)
        return status;
    pms_undo_store_fresh(ctx->undo, *item, &it, sizeof it);
    if (meta_bytes)
        pms_undo_store_fresh(ctx->undo, *item + sizeof it, meta, meta_bytes);
    return PMS_OK;
}

int pms_list_free_item(const struct pms_dir_ctx *ctx, uint64_t item, struct pms_error *error)
{
    struct pms_object o;
    int status = pms_list_item(ctx, item, &o, error);
    if (status != PMS_OK)
        return status;
    if ((o.data && pms_heap_free(ctx->heap, o.data, error) != PMS_OK) ||
        pms_heap_free(ctx->heap, item, error) != PMS_OK)
        return pms_list_corrupt(error, item, "a block belongs to two owners");
    return PMS_OK;
}
