#include "names/directory_table.h"

/* Every probe for the name in slot i passes slots in use alone: `run` of them lie just before
 * it. */
static int check_slot(const struct pms_dir_ctx *ctx, const struct pms_dir_view *v, uint64_t i,
                      uint64_t run, struct pms_error *error)
{
    const struct pms_dir_slot *s = &v->slot[i];
    uint64_t at = v->h.table + i * sizeof *s;
    if (s->node <= PMS_DIR_DELETED)
        return s->hash == 0 ? PMS_OK
                            : pms_dir_corrupt(error, at, "a slot without a name has a hash");
    const struct pms_node *n;
    int status = pms_dir_node(ctx, s->node, &n, error);
    if (status != PMS_OK)
        return status;
    if (n->hash != s->hash)
        return pms_dir_corrupt(error, at, "a slot and its node differ in their hashes");
    if (((i - pms_dir_home(s->hash, v->h.slots)) & (v->h.slots - 1)) > run)
        return pms_dir_corrupt(error, at, "an empty slot hides a name");
    return PMS_OK;
}

static int check_table(const struct pms_dir_ctx *ctx, const struct pms_dir_view *v,
                       struct pms_error *error)
{
    uint64_t live = 0, used = 0, run = 0;
    while (run < v->h.slots && v->slot[v->h.slots - 1 - run].node != 0) /* the run that wraps */
        run++;
    for (uint64_t i = 0; i < v->h.slots; i++) {
        int status = check_slot(ctx, v, i, run, error);
        if (status != PMS_OK)
            return status;
        run = v->slot[i].node ? run + 1 : 0;
        used += v->slot[i].node != 0;
        live += v->slot[i].node > PMS_DIR_DELETED;
    }
    if (live != v->h.count || used != v->h.used)
        return pms_dir_corrupt(error, v->dir,
                               "the table's names do not number what the header says");
    return PMS_OK;
}

/* What pms_dir_next, which has shown that the name leads to the node, need not know. So no node
 * is in two slots. */
static int check_node(const struct pms_dir_ctx *ctx, uint64_t off, struct pms_error *error)
{
    const struct pms_node *n = pms_map_at(ctx->undo->map, off);
    return n->reserved == 0 ? PMS_OK
                            : pms_dir_corrupt(error, off, "reserved bytes of a node are not zero");
}

typedef int report_fn(void *arg, uint64_t off, const struct pms_object *object);

static int check_list(const struct pms_dir_ctx *ctx, const struct pms_dir_view *v, report_fn *fn,
                      void *arg, struct pms_error *error)
{
    uint64_t listed = 0, node = 0;
    for (;; listed++) {
        struct pms_object o;
        int status = pms_dir_next(ctx, v->dir, &node, &o, error);
        if (status == PMS_OK && node == 0)
            break;
        if (status == PMS_OK)
            status = check_node(ctx, node, error);
        if (status == PMS_OK)
            status = fn(arg, node, &o);
        if (status == PMS_OK && o.data != 0 && o.kind != PMS_OBJECT_GROUP &&
            o.kind != PMS_OBJECT_LIST)
            status = fn(arg, o.data, &o);
        if (status != PMS_OK)
            return status;
    }
    if (listed != v->h.count)
        return pms_dir_corrupt(error, v->dir,
                               "the list's nodes do not number what the header says");
    return PMS_OK;
}

int pms_dir_check(const struct pms_dir_ctx *ctx, uint64_t dir,
                  int (*fn)(void *arg, uint64_t off, const struct pms_object *object), void *arg,
                  struct pms_error *error)
{
    struct pms_dir_view v;
    int status = pms_dir_load(ctx, dir, &v, error);
    if (status == PMS_OK && (v.h.reserved[0] | v.h.reserved[1]) != 0)
        status = pms_dir_corrupt(error, dir, "reserved bytes of the header are not zero");
    if (status == PMS_OK)
        status = check_table(ctx, &v, error);
    if (status == PMS_OK)
        status = fn(arg, dir, NULL);
    if (status == PMS_OK)
        status = fn(arg, v.h.table, NULL);
    return status == PMS_OK ? check_list(ctx, &v, fn, arg, error) : status;
}
