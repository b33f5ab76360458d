#include "names/list_tree.h"

typedef int report_fn(void *arg, uint64_t off, const struct pms_object *object);

struct walk {
    const struct pms_dir_ctx *ctx;
    report_fn *fn;
    void *arg;
    struct pms_error *error;
};

static int check_item(const struct walk *w, uint64_t off)
{
    struct pms_object o;
    int status = pms_list_item(w->ctx, off, &o, w->error);
    if (status != PMS_OK) /* before the item's address is made of an offset that may be anything */
        return status;
    const struct pms_item *item = pms_map_at(w->ctx->undo->map, off);
    if (item->reserved != 0)
        return pms_list_corrupt(w->error, off, "reserved bytes of an item are not zero");
    status = w->fn(w->arg, off, &o);
    if (status == PMS_OK && o.data)
        status = w->fn(w->arg, o.data, &o);
    return status;
}

/* *count = items found below. Depth is bounded by the level. The block's owner is told of every
 * node and item, so what is there twice is found out; a tree cannot make the walk endless, since
 * each node on the way down is of a lower level, and `left` bounds the nodes. */
static int check_node(const struct walk *w, uint64_t off, unsigned level, uint64_t *count,
                      uint64_t *left)
{
    const struct pms_list_node *node;
    int status = pms_list_node(w->ctx, off, level, &node, w->error);
    if (status == PMS_OK && (node->zero != 0 || *left == 0))
        status = pms_list_corrupt(w->error, off,
                                  node->zero ? "reserved bytes of a node are not zero"
                                             : "the tree has too many nodes");
    if (status != PMS_OK)
        return status;
    --*left;
    status = w->fn(w->arg, off, NULL);
    for (uint32_t i = 0; status == PMS_OK && i < node->used; i++) {
        uint64_t below = 0;
        if (level == 0) {
            status = check_item(w, node->item[i]);
            ++*count;
            continue;
        }
        status = check_node(w, node->child[i].node, level - 1, &below, left);
        if (status == PMS_OK && below != node->child[i].count)
            status = pms_list_corrupt(w->error, off,
                                      "a node counts other items than there are below it");
        *count += below;
    }
    return status;
}

int pms_list_check(const struct pms_dir_ctx *ctx, uint64_t list,
                   int (*fn)(void *arg, uint64_t off, const struct pms_object *object), void *arg,
                   struct pms_error *error)
{
    const struct walk w = {ctx, fn, arg, error};
    struct pms_list_header h;
    int status = pms_list_load(ctx, list, &h, error);
    if (status == PMS_OK &&
        (h.zero | h.reserved[0] | h.reserved[1] | h.reserved[2] | h.reserved[3]) != 0)
        status = pms_list_corrupt(error, list, "reserved bytes of the header are not zero");
    if (status == PMS_OK)
        status = fn(arg, list, NULL);
    if (status != PMS_OK || h.root == 0)
        return status;
    struct pms_heap_stats stats;
    pms_heap_stats(ctx->heap, &stats);
    uint64_t count = 0, nodes = stats.blocks; /* no tree has more */
    status = check_node(&w, h.root, h.level, &count, &nodes);
    if (status == PMS_OK && count != h.count)
        status = pms_list_corrupt(error, list,
                                  "the tree's items do not number what the header says");
    return status;
}
