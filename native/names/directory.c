/* Every operation first reads and checks all it is going to touch, then takes the new blocks it
 * needs, and only then changes what is live, with one fence. So PMS_E_FULL leaves everything as
 * it was. */
#include "names/directory.h"

#include <stddef.h>
#include <string.h>

#include "base/checksum.h"
#include "names/directory_table.h"

#define CLEAN_MAX 32u /* deleted slots emptied by one removal: bounds what it logs */

/* ---- one change of live metadata ---- */

struct edit {
    struct pms_store store[6];
    uint32_t stores;
    uint64_t dead[5]; /* blocks to free */
    uint32_t deaths;
};

static void edit_store(struct edit *e, uint64_t off, const void *src, uint64_t len)
{
    if (!len)
        return;
    PMS_ASSERT(e->stores < sizeof e->store / sizeof *e->store);
    e->store[e->stores++] = (struct pms_store){off, src, len};
}

static void edit_free(struct edit *e, uint64_t off)
{
    PMS_ASSERT(e->deaths < sizeof e->dead / sizeof *e->dead);
    e->dead[e->deaths++] = off;
}

static int edit_run(const struct pms_dir_ctx *ctx, const struct edit *e, struct pms_error *error)
{
    pms_undo_store_all(ctx->undo, e->store, e->stores);
    for (uint32_t i = 0; i < e->deaths; i++)
        /* live a moment ago: freed twice in this loop */
        if (pms_heap_free(ctx->heap, e->dead[i], error) != PMS_OK)
            return pms_dir_corrupt(error, e->dead[i], "a block belongs to two owners");
    return PMS_OK;
}

static void edit_header(struct edit *e, const struct pms_dir_view *v)
{
    edit_store(e, v->dir, &v->h, offsetof(struct pms_dir_header, reserved));
}

static void edit_slot(struct edit *e, const struct pms_dir_view *v, uint64_t index,
                      const struct pms_dir_slot *slot)
{
    edit_store(e, v->h.table + index * sizeof *slot, slot, sizeof *slot);
}

/* What a removed or replaced object owned. A group's directory has to be empty: its table goes
 * with its header. A list too. */
static int edit_free_data(const struct pms_dir_ctx *ctx, struct edit *e, const struct pms_object *o,
                          struct pms_error *error)
{
    if (o->data == 0)
        return PMS_OK;
    if (o->kind == PMS_OBJECT_GROUP) {
        struct pms_dir_view group;
        int status = pms_dir_load(ctx, o->data, &group, error);
        if (status != PMS_OK)
            return status;
        if (group.h.count != 0)
            return pms_fail(error, PMS_E_INVALID, "the group is not empty");
        edit_free(e, group.h.table);
    }
    if (o->kind == PMS_OBJECT_LIST) {
        struct pms_list_header list;
        memcpy(&list, pms_map_at(ctx->undo->map, o->data), sizeof list);
        if (list.count != 0)
            return pms_fail(error, PMS_E_INVALID, "the list is not empty");
    }
    edit_free(e, o->data);
    return PMS_OK;
}

/* ---- the list in order of insertion ---- */

/* The node and both neighbours agree on who follows whom. */
static int check_links(const struct pms_dir_ctx *ctx, const struct pms_dir_view *v, uint64_t off,
                       struct pms_error *error)
{
    const struct pms_node *n, *prev = NULL, *next = NULL;
    int status = pms_dir_node(ctx, off, &n, error);
    if (status == PMS_OK && n->prev)
        status = pms_dir_node(ctx, n->prev, &prev, error);
    if (status == PMS_OK && n->next)
        status = pms_dir_node(ctx, n->next, &next, error);
    if (status != PMS_OK)
        return status;
    if ((prev ? prev->next : v->h.first) != off || (next ? next->prev : v->h.last) != off)
        return pms_dir_corrupt(error, off, "a node's neighbours do not name it");
    return PMS_OK;
}

/* Points both sides at the given nodes. The sources live in *before and *after until the edit
 * has run. */
static void edit_links(struct edit *e, struct pms_dir_view *v, const struct pms_node *n,
                       const uint64_t *before, const uint64_t *after)
{
    if (n->prev)
        edit_store(e, n->prev + offsetof(struct pms_node, next), after, sizeof *after);
    else
        v->h.first = *after;
    if (n->next)
        edit_store(e, n->next + offsetof(struct pms_node, prev), before, sizeof *before);
    else
        v->h.last = *before;
}

/* ---- nodes ---- */

struct binding { /* arguments of a put */
    const void *name;
    const void *meta;
    uint64_t data, data_bytes;
    uint32_t name_bytes, meta_bytes;
    uint32_t kind;
};

static int check_binding(const struct pms_dir_ctx *ctx, const struct binding *b,
                         struct pms_error *error)
{
    struct pms_block block;
    if (!pms_dir_name_valid(b->name, b->name_bytes))
        return pms_fail(error, PMS_E_INVALID,
                        "a name is 1 to %u bytes of UTF-8 without NUL and '/'", PMS_NAME_MAX);
    if (b->kind < PMS_OBJECT_VALUE || b->kind > PMS_OBJECT_LIST)
        return pms_fail(error, PMS_E_INVALID, "unknown kind of object");
    /* either has a header of a line */
    bool container = b->kind == PMS_OBJECT_GROUP || b->kind == PMS_OBJECT_LIST;
    bool fits = b->data == 0 ? b->data_bytes == 0 && !container
                : container
                    ? pms_dir_block(ctx, b->data, PMS_LINE, PMS_OWNER_ENGINE, &block)
                    : b->kind == PMS_OBJECT_ARRAY &&
                          pms_dir_block(ctx, b->data, b->data_bytes, PMS_OWNER_USER, &block);
    return fits ? PMS_OK
                : pms_fail(error, PMS_E_INVALID, "the data is no live block of this kind and size");
}

/* A node nothing refers to yet; prev and next are set, the neighbours are not. */
static int new_node(const struct pms_dir_ctx *ctx, const struct binding *b, uint64_t hash,
                    uint64_t prev, uint64_t next, uint64_t *off, struct pms_error *error)
{
    uint64_t fixed = sizeof(struct pms_node) + b->name_bytes;
    int status = pms_heap_alloc(ctx->heap, fixed + b->meta_bytes, PMS_OWNER_ENGINE, off, error);
    if (status != PMS_OK)
        return status;
    struct pms_block block;
    PMS_ASSERT(pms_heap_find(ctx->heap, *off, &block) && block.off == *off &&
               block.bytes >= fixed + b->meta_bytes);
    uint64_t room = block.bytes - fixed;
    struct pms_node n = {
        .hash = hash,
        .prev = prev,
        .next = next,
        .data = b->data,
        .data_bytes = b->data_bytes,
        .kind = b->kind,
        .meta_bytes = b->meta_bytes,
        .name_bytes = b->name_bytes,
        .meta_room = room < UINT32_MAX ? (uint32_t)room : UINT32_MAX,
    };
    pms_undo_store_fresh(ctx->undo, *off, &n, sizeof n);
    pms_undo_store_fresh(ctx->undo, *off + sizeof n, b->name, b->name_bytes);
    pms_undo_store_fresh(ctx->undo, *off + fixed, b->meta, b->meta_bytes);
    return PMS_OK;
}

/* Only what differs is logged and written: a counter that changes costs one granule. */
static void edit_meta(struct edit *e, const struct pms_object *old, const struct binding *b)
{
    const unsigned char *meta = b->meta;
    uint64_t from = 0, end = b->meta_bytes;
    uint64_t common = end < old->meta_bytes ? end : old->meta_bytes;
    while (from < common && meta[from] == old->meta[from])
        from++;
    while (end == old->meta_bytes && common > from && meta[common - 1] == old->meta[common - 1])
        common--;
    if (end == old->meta_bytes)
        end = common;
    if (end > from) /* meta may be NULL */
        edit_store(e, old->node + sizeof(struct pms_node) + old->name_bytes + from, meta + from,
                   end - from);
}

static int update_node(const struct pms_dir_ctx *ctx, const struct pms_object *old,
                       const struct binding *b, struct edit *e, struct pms_error *error)
{
    struct pms_node n;
    memcpy(&n, pms_map_at(ctx->undo->map, old->node), sizeof n);
    n.data = b->data;
    n.data_bytes = b->data_bytes;
    n.kind = b->kind;
    n.meta_bytes = b->meta_bytes;
    const uint64_t from = offsetof(struct pms_node, data),
                   end = offsetof(struct pms_node, name_bytes);
    if (memcmp((const char *)&n + from, (const char *)pms_map_at(ctx->undo->map, old->node) + from,
               end - from) != 0)
        edit_store(e, old->node + from, (const char *)&n + from, end - from);
    edit_meta(e, old, b);
    return edit_run(ctx, e, error);
}

static int replace_node(const struct pms_dir_ctx *ctx, struct pms_dir_view *v, uint64_t index,
                        const struct pms_object *old, const struct binding *b, struct edit *e,
                        struct pms_error *error)
{
    int status = check_links(ctx, v, old->node, error);
    if (status != PMS_OK)
        return status;
    const struct pms_node *n = pms_map_at(ctx->undo->map, old->node);
    struct pms_dir_slot slot = {.hash = v->slot[index].hash}; /* by which the name was found */
    status = new_node(ctx, b, slot.hash, n->prev, n->next, &slot.node, error);
    if (status != PMS_OK)
        return status;
    edit_links(e, v, n, &slot.node, &slot.node);
    edit_slot(e, v, index, &slot);
    if (!n->prev || !n->next)
        edit_header(e, v);
    edit_free(e, old->node);
    return edit_run(ctx, e, error);
}

static int put_old(const struct pms_dir_ctx *ctx, struct pms_dir_view *v,
                   const struct pms_dir_place *place, const struct binding *b,
                   struct pms_error *error)
{
    struct pms_object old;
    struct edit e = {0};
    int status = pms_dir_object(ctx, place->node, &old, error);
    if (status == PMS_OK && old.data != b->data &&
        (old.kind == PMS_OBJECT_GROUP || old.kind == PMS_OBJECT_LIST))
        /* what it holds would be nobody's */
        return pms_fail(error, PMS_E_EXISTS, "the name is in use, for a group or a list");
    if (status == PMS_OK && old.data != b->data)
        status = edit_free_data(ctx, &e, &old, error);
    if (status != PMS_OK)
        return status;
    const struct pms_node *n = pms_map_at(ctx->undo->map, old.node);
    if (b->meta_bytes <= n->meta_room)
        return update_node(ctx, &old, b, &e, error);
    return replace_node(ctx, v, place->index, &old, b, &e, error);
}

/* ---- new names ---- */

/* A slot for a name that is not there: in *v, whose table may be a new one afterwards. */
static int make_room(const struct pms_dir_ctx *ctx, struct pms_dir_view *v, uint64_t hash,
                     const struct binding *b, struct pms_dir_place *place, struct pms_error *error)
{
    if (place->deleted) {
        if (v->h.used == v->h.count)
            return pms_dir_corrupt(error, v->dir,
                                   "the table has more deleted slots than the header says");
        return PMS_OK;
    }
    if (v->h.used + 1 > pms_dir_used_max(v->h.slots)) {
        int status = pms_dir_rebuild(ctx, v, error);
        if (status == PMS_OK)
            status = pms_dir_probe(ctx, v, hash, b->name, b->name_bytes, place, error);
        if (status != PMS_OK)
            return status;
        PMS_ASSERT(place->node == 0 && !place->deleted);
    }
    v->h.used++;
    return PMS_OK;
}

static int put_new(const struct pms_dir_ctx *ctx, struct pms_dir_view *v, uint64_t hash,
                   struct pms_dir_place *place, const struct binding *b, struct pms_error *error)
{
    uint64_t last = v->h.last, table = v->h.table;
    const struct pms_node *tail = NULL;
    struct pms_dir_slot slot = {.hash = hash};
    int status = last ? pms_dir_node(ctx, last, &tail, error) : PMS_OK;
    if (status == PMS_OK && tail && tail->next)
        status = pms_dir_corrupt(error, last, "the last node has a successor");
    if (status == PMS_OK)
        status = new_node(ctx, b, hash, last, 0, &slot.node, error);
    if (status != PMS_OK)
        return status;
    status = make_room(ctx, v, hash, b, place, error);
    if (status != PMS_OK) {
        /* error says what went wrong before */
        int freed = pms_heap_free(ctx->heap, slot.node, NULL);
        PMS_ASSERT(freed == PMS_OK);
        return status;
    }
    struct edit e = {0};
    if (last)
        edit_store(&e, last + offsetof(struct pms_node, next), &slot.node, sizeof slot.node);
    else
        v->h.first = slot.node;
    v->h.last = slot.node;
    v->h.count++;
    edit_slot(&e, v, place->index, &slot);
    edit_header(&e, v);
    if (v->h.table != table)
        edit_free(&e, table);
    return edit_run(ctx, &e, error);
}

/* ---- the interface ---- */

int pms_dir_create(const struct pms_dir_ctx *ctx, uint64_t *dir, struct pms_error *error)
{
    const uint64_t table_bytes = PMS_DIR_SLOTS_MIN * sizeof(struct pms_dir_slot);
    struct pms_dir_header h = {.slots = PMS_DIR_SLOTS_MIN};
    int status = pms_heap_alloc(ctx->heap, table_bytes, PMS_OWNER_ENGINE, &h.table, error);
    if (status != PMS_OK)
        return status;
    status = pms_heap_alloc(ctx->heap, sizeof h, PMS_OWNER_ENGINE, dir, error);
    if (status != PMS_OK) {
        int freed = pms_heap_free(ctx->heap, h.table, NULL);
        PMS_ASSERT(freed == PMS_OK);
        return status;
    }
    pms_undo_store_fresh(ctx->undo, h.table, NULL, table_bytes);
    pms_undo_store_fresh(ctx->undo, *dir, &h, sizeof h);
    return PMS_OK;
}

static int locate(const struct pms_dir_ctx *ctx, uint64_t dir, const void *name,
                  uint32_t name_bytes, struct pms_dir_view *v, struct pms_dir_place *place,
                  struct pms_error *error)
{
    int status = pms_dir_load(ctx, dir, v, error);
    if (status == PMS_OK)
        status = pms_dir_probe(ctx, v, pms_hash(ctx->hash_seed, name, name_bytes), name, name_bytes,
                               place, error);
    if (status == PMS_OK && place->node == 0)
        status = pms_fail(error, PMS_E_NOT_FOUND, "looking up a name");
    return status;
}

int pms_dir_find(const struct pms_dir_ctx *ctx, uint64_t dir, const void *name, uint32_t name_bytes,
                 struct pms_object *object, struct pms_error *error)
{
    struct pms_dir_view v;
    struct pms_dir_place place;
    int status = locate(ctx, dir, name, name_bytes, &v, &place, error);
    return status == PMS_OK ? pms_dir_object(ctx, place.node, object, error) : status;
}

int pms_dir_put(const struct pms_dir_ctx *ctx, uint64_t dir, const void *name, uint32_t name_bytes,
                uint32_t kind, const void *meta, uint32_t meta_bytes, uint64_t data,
                uint64_t data_bytes, struct pms_error *error)
{
    const struct binding b = {name, meta, data, data_bytes, name_bytes, meta_bytes, kind};
    struct pms_dir_view v;
    struct pms_dir_place place;
    int status = check_binding(ctx, &b, error);
    if (status == PMS_OK)
        status = pms_dir_load(ctx, dir, &v, error);
    if (status != PMS_OK)
        return status;
    uint64_t hash = pms_hash(ctx->hash_seed, name, name_bytes);
    status = pms_dir_probe(ctx, &v, hash, name, name_bytes, &place, error);
    if (status != PMS_OK)
        return status;
    return place.node ? put_old(ctx, &v, &place, &b, error)
                      : put_new(ctx, &v, hash, &place, &b, error);
}

/* Empties the slot, and the deleted ones just before it, if no probe has to go on behind it;
 * else marks it as deleted. Either value is static: it outlives the edit. */
static int edit_slot_away(struct edit *e, struct pms_dir_view *v, uint64_t index,
                          struct pms_error *error)
{
    static const struct pms_dir_slot empty[CLEAN_MAX],
        deleted = {.hash = 0, .node = PMS_DIR_DELETED};
    if (v->slot[(index + 1) & (v->h.slots - 1)].node != 0) {
        edit_slot(e, v, index, &deleted);
        return PMS_OK;
    }
    uint64_t first = index;
    while (first > 0 && index - first + 1 < CLEAN_MAX && v->slot[first - 1].node == PMS_DIR_DELETED)
        first--;
    if (index - first > v->h.used - v->h.count)
        return pms_dir_corrupt(error, v->dir,
                               "the table has more deleted slots than the header says");
    v->h.used -= index - first + 1;
    edit_store(e, v->h.table + first * sizeof *empty, empty, (index - first + 1) * sizeof *empty);
    return PMS_OK;
}

int pms_dir_remove(const struct pms_dir_ctx *ctx, uint64_t dir, const void *name,
                   uint32_t name_bytes, struct pms_error *error)
{
    struct pms_dir_view v;
    struct pms_dir_place place;
    struct pms_object old;
    struct edit e = {0};
    int status = locate(ctx, dir, name, name_bytes, &v, &place, error);
    if (status == PMS_OK)
        status = pms_dir_object(ctx, place.node, &old, error);
    if (status == PMS_OK)
        status = check_links(ctx, &v, place.node, error);
    if (status == PMS_OK && v.h.count == 0)
        status = pms_dir_corrupt(error, dir, "the table has more names than the header says");
    if (status == PMS_OK)
        status = edit_free_data(ctx, &e, &old, error);
    if (status == PMS_OK)
        status = edit_slot_away(&e, &v, place.index, error);
    if (status != PMS_OK)
        return status;
    const struct pms_node *n = pms_map_at(ctx->undo->map, place.node);
    uint64_t before = n->prev, after = n->next;
    edit_links(&e, &v, n, &before, &after);
    v.h.count--;
    edit_header(&e, &v);
    edit_free(&e, place.node);
    return edit_run(ctx, &e, error);
}

/* Ends on any file: a node comes next only if it names the one before, so no node comes twice.
 * And what it hands out is found by its name: a program that walks, and then reads by names,
 * meets a damaged name here and nowhere else. */
int pms_dir_next(const struct pms_dir_ctx *ctx, uint64_t dir, uint64_t *node,
                 struct pms_object *object, struct pms_error *error)
{
    struct pms_dir_view v;
    const struct pms_node *n = NULL;
    uint64_t before = *node;
    int status = pms_dir_load(ctx, dir, &v, error);
    if (status == PMS_OK && before)
        status = pms_dir_node(ctx, before, &n, error);
    if (status != PMS_OK)
        return status;
    uint64_t next = n ? n->next : v.h.first;
    if (!next) {
        if (v.h.last != before)
            return pms_dir_corrupt(error, before, "the list ends before its last node");
        *node = 0;
        return PMS_OK;
    }
    status = pms_dir_node(ctx, next, &n, error);
    if (status == PMS_OK && n->prev != before)
        status = pms_dir_corrupt(error, next, "a node does not name the one before it");
    if (status == PMS_OK)
        status = pms_dir_object(ctx, next, object, error);
    if (status == PMS_OK)
        status = pms_dir_named(ctx, &v, object, error);
    if (status == PMS_OK)
        *node = next;
    return status;
}

int pms_dir_count(const struct pms_dir_ctx *ctx, uint64_t dir, uint64_t *count,
                  struct pms_error *error)
{
    struct pms_dir_view v;
    int status = pms_dir_load(ctx, dir, &v, error);
    if (status == PMS_OK)
        *count = v.h.count;
    return status;
}
