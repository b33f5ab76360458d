/* As in directory.c: every operation first reads and checks all it is going to touch, then takes
 * the blocks it needs, and only then changes what is live, with one fence. At each level at most
 * one node that was live stays and changes. */
#include <stddef.h>
#include <string.h>

#include "names/directory_table.h"
#include "names/list_tree.h"

struct edit {
    const struct pms_dir_ctx *ctx;
    uint64_t list;
    struct pms_list_header was, now;
    uint32_t dirty; /* bit by level: node[level] is to be written */
    uint64_t off[PMS_LIST_LEVELS];
    struct pms_list_node node[PMS_LIST_LEVELS]; /* by level, as they will be */
    uint64_t dead[2 * PMS_LIST_LEVELS];
    uint32_t deaths;
};

static void edit_begin(struct edit *e, const struct pms_dir_ctx *ctx, uint64_t list,
                       const struct pms_list_header *header)
{
    e->ctx = ctx;
    e->list = list;
    e->was = e->now = *header;
    e->dirty = 0;
    e->deaths = 0;
}

static uint64_t bytes_used(const struct pms_list_node *n)
{
    return offsetof(struct pms_list_node, item) +
           n->used * (n->level ? sizeof n->child[0] : sizeof n->item[0]);
}

static struct pms_list_node *edit_node(struct edit *e, unsigned level, uint64_t off,
                                       const struct pms_list_node *node)
{
    memcpy(&e->node[level], node, bytes_used(node));
    e->off[level] = off;
    e->dirty |= 1u << level;
    return &e->node[level];
}

static void edit_kill(struct edit *e, uint64_t off)
{
    PMS_ASSERT(e->deaths < sizeof e->dead / sizeof *e->dead);
    e->dead[e->deaths++] = off;
}

/* ---- only what differs is logged and written ---- */

struct changes {
    struct pms_store store[2 * PMS_LIST_LEVELS + 1];
    uint32_t count;
};

/* The words in [from, end) of the image that the medium does not have. */
static void difference(struct changes *c, uint64_t off, const void *image, const void *medium,
                       uint64_t from, uint64_t end)
{
    const unsigned char *now = image, *was = medium;
    while (from < end && memcmp(now + from, was + from, 8) == 0)
        from += 8;
    while (end > from && memcmp(now + end - 8, was + end - 8, 8) == 0)
        end -= 8;
    if (from < end)
        c->store[c->count++] = (struct pms_store){off + from, now + from, end - from};
}

static int edit_run(struct edit *e, struct pms_error *error)
{
    const uint64_t entries = offsetof(struct pms_list_node, item);
    struct pms_undo *undo = e->ctx->undo;
    struct changes c = {.count = 0};
    for (unsigned level = 0; level < PMS_LIST_LEVELS; level++) {
        if (!(e->dirty & 1u << level))
            continue;
        const void *medium = pms_map_at(undo->map, e->off[level]);
        difference(&c, e->off[level], &e->node[level], medium, 0, entries);
        difference(&c, e->off[level], &e->node[level], medium, entries,
                   bytes_used(&e->node[level]));
    }
    difference(&c, e->list, &e->now, &e->was, 0, sizeof e->now);
    pms_undo_store_all(undo, c.store, c.count);
    for (uint32_t i = 0; i < e->deaths; i++)
        if (pms_heap_free(e->ctx->heap, e->dead[i], error) != PMS_OK)
            return pms_list_corrupt(error, e->dead[i], "a block belongs to two owners");
    return PMS_OK;
}

/* ---- entries of a node ---- */

static uint64_t items_below(const struct pms_list_node *n)
{
    uint64_t total = 0;
    if (n->level == 0)
        return n->used;
    for (uint32_t i = 0; i < n->used; i++)
        total += n->child[i].count;
    return total;
}

static size_t entry_bytes(const struct pms_list_node *n)
{
    return n->level ? sizeof n->child[0] : sizeof n->item[0];
}

static unsigned char *entry(struct pms_list_node *n, uint32_t i)
{
    return (unsigned char *)n->item + i * entry_bytes(n);
}

static void entry_insert(struct pms_list_node *n, uint32_t at, const void *value)
{
    memmove(entry(n, at + 1), entry(n, at), (n->used - at) * entry_bytes(n));
    memcpy(entry(n, at), value, entry_bytes(n));
    n->used++;
}

static void entry_remove(struct pms_list_node *n, uint32_t at)
{
    memmove(entry(n, at), entry(n, at + 1), (n->used - at - 1u) * entry_bytes(n));
    n->used--;
}

/* Appends n's entries from `from` on. */
static void entries_append(struct pms_list_node *to, const struct pms_list_node *n, uint32_t from)
{
    memcpy(entry(to, to->used), (const unsigned char *)n->item + from * entry_bytes(n),
           (n->used - from) * entry_bytes(n));
    to->used = (uint16_t)(to->used + n->used - from);
}

static void new_node(struct pms_list_node *n, unsigned level)
{
    memset(n, 0, sizeof *n);
    n->magic = PMS_LIST_NODE_MAGIC;
    n->level = (uint16_t)level;
}

static void store_new_node(const struct pms_dir_ctx *ctx, uint64_t off,
                           const struct pms_list_node *n)
{
    /* all of it is born: what comes later in this transaction is not logged */
    pms_undo_store_fresh(ctx->undo, off, n, sizeof *n);
}

/* ---- insert ---- */

struct fresh { /* blocks for nodes to come */
    uint64_t off[PMS_LIST_LEVELS + 1];
    uint32_t count, used;
};

static void fresh_free(const struct pms_dir_ctx *ctx, struct fresh *f)
{
    while (f->count > f->used) {
        int freed = pms_heap_free(ctx->heap, f->off[--f->count], NULL);
        PMS_ASSERT(freed == PMS_OK);
    }
}

/* A block for each node that splits, and for a new root. */
static int fresh_take(const struct pms_dir_ctx *ctx, const struct pms_list_header *h,
                      const struct pms_list_place *place, struct fresh *f, struct pms_error *error)
{
    uint32_t need = 0, level = 0;
    f->count = f->used = 0;
    if (h->root == 0) {
        need = 1;
    } else {
        while (level <= h->level && place->step[level].node->used == pms_list_room(level))
            level++;
        need = level > h->level ? level + 1 : level;
        if (level > h->level && h->level + 1 == PMS_LIST_LEVELS)
            return pms_list_corrupt(error, h->root, "the tree is higher than it can be");
    }
    while (f->count < need) {
        int status = pms_heap_alloc(ctx->heap, sizeof(struct pms_list_node), PMS_OWNER_ENGINE,
                                    &f->off[f->count], error);
        if (status != PMS_OK) {
            fresh_free(ctx, f);
            return status;
        }
        f->count++;
    }
    return PMS_OK;
}

/* Puts the entry into the full node, which splits: `left` keeps the lower part, and the upper
 * one goes to a new node. At the list's end all stays on the left, so that appending fills
 * nodes. */
static struct pms_list_child split(struct edit *e, struct fresh *f, struct pms_list_node *left,
                                   uint32_t at, const void *value, bool end)
{
    struct pms_list_node right;
    uint32_t keep = end ? left->used : left->used / 2u;
    new_node(&right, left->level);
    entries_append(&right, left, keep);
    left->used = (uint16_t)keep;
    if (at > keep || (at == keep && end))
        entry_insert(&right, at - keep, value);
    else
        entry_insert(left, at, value);
    uint64_t off = f->off[f->used++];
    store_new_node(e->ctx, off, &right);
    return (struct pms_list_child){off, items_below(&right)};
}

static void new_root(struct edit *e, struct fresh *f, struct pms_list_child left,
                     struct pms_list_child right)
{
    struct pms_list_node root;
    new_node(&root, e->now.level + 1);
    root.used = 2;
    root.child[0] = left;
    root.child[1] = right;
    e->now.root = f->off[f->used++];
    e->now.level++;
    store_new_node(e->ctx, e->now.root, &root);
}

static void first_item(struct edit *e, struct fresh *f, uint64_t item)
{
    struct pms_list_node leaf;
    new_node(&leaf, 0);
    leaf.used = 1;
    leaf.item[0] = item;
    e->now.root = f->off[f->used++];
    e->now.level = 0;
    store_new_node(e->ctx, e->now.root, &leaf);
}

static void insert(struct edit *e, struct fresh *f, const struct pms_list_place *place,
                   uint64_t item, bool end)
{
    struct pms_list_child up = {0}; /* a new node, to be told to the parent */
    struct pms_list_child told;
    const void *value = &item;
    for (unsigned level = 0; level <= e->was.level; level++) {
        struct pms_list_node *n = edit_node(e, level, place->step[level].off,
                                            place->step[level].node);
        uint32_t at = place->step[level].at;
        if (level > 0) {
            n->child[at].count += 1 - up.count;
            at++;
        }
        if (value && n->used < pms_list_room(level)) {
            entry_insert(n, at, value);
            value = NULL;
            up.count = 0;
        } else if (value) {
            up = split(e, f, n, at, value, end);
            told = up;
            value = &told;
        }
    }
    if (value)
        new_root(e, f, (struct pms_list_child){e->was.root, e->was.count + 1 - up.count}, up);
}

int pms_list_insert(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index, uint64_t item,
                    struct pms_error *error)
{
    struct pms_list_header header;
    struct pms_list_place place;
    struct fresh f;
    struct edit e;
    int status = pms_list_load(ctx, list, &header, error);
    if (status == PMS_OK && index > header.count)
        status = pms_fail(error, PMS_E_INVALID, "the index is past the end of the list");
    if (status == PMS_OK && header.root)
        status = pms_list_locate(ctx, &header, index, &place, error);
    if (status == PMS_OK)
        status = fresh_take(ctx, &header, &place, &f, error);
    if (status != PMS_OK)
        return status;
    edit_begin(&e, ctx, list, &header);
    e.now.count++;
    if (header.root)
        insert(&e, &f, &place, item, index == header.count);
    else
        first_item(&e, &f, item);
    PMS_ASSERT(f.used == f.count);
    return edit_run(&e, error);
}

/* ---- replace ---- */

static int locate_item(const struct pms_dir_ctx *ctx, const struct pms_list_header *header,
                       uint64_t index, struct pms_list_place *place, struct pms_error *error)
{
    if (index >= header->count)
        return pms_fail(error, PMS_E_NOT_FOUND, "the index is past the end of the list");
    int status = pms_list_locate(ctx, header, index, place, error);
    if (status == PMS_OK && place->step[0].at == place->step[0].node->used)
        status = pms_list_corrupt(error, place->step[0].off,
                                  "a leaf has fewer items than its parent says");
    return status;
}

int pms_list_replace(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index, uint64_t item,
                     uint64_t *old, struct pms_error *error)
{
    struct pms_list_header header;
    struct pms_list_place place;
    int status = pms_list_load(ctx, list, &header, error);
    if (status == PMS_OK)
        status = locate_item(ctx, &header, index, &place, error);
    if (status != PMS_OK)
        return status;
    uint32_t at = place.step[0].at;
    *old = place.step[0].node->item[at];
    pms_undo_store(ctx->undo,
                   place.step[0].off + offsetof(struct pms_list_node, item) + at * sizeof item,
                   &item, sizeof item);
    return PMS_OK;
}

/* ---- remove ---- */

/* Whether the two nodes become one: then neighbours keep holding more than half a node between
 * them. */
static bool joins(const struct pms_list_node *a, const struct pms_list_node *b)
{
    return a->used + b->used <= pms_list_room(a->level) / 2;
}

/* node[level] has lost an entry. Joins it with a neighbour, or drops it if it is empty, and
 * tells its parent's image. */
static int settle(struct edit *e, unsigned level, struct pms_list_node *parent, uint32_t at,
                  struct pms_error *error)
{
    const struct pms_list_node *left = NULL, *right = NULL;
    struct pms_list_node *n = &e->node[level];
    int status = at > 0 ? pms_list_node(e->ctx, parent->child[at - 1].node, level, &left, error)
                        : PMS_OK;
    if (status == PMS_OK && at + 1u < parent->used)
        status = pms_list_node(e->ctx, parent->child[at + 1].node, level, &right, error);
    if (status != PMS_OK)
        return status;
    if (left && joins(left, n)) {
        struct pms_list_node joined;
        memcpy(&joined, left, bytes_used(left));
        entries_append(&joined, n, 0);
        edit_kill(e, e->off[level]);
        edit_node(e, level, parent->child[at - 1].node, &joined);
        parent->child[at - 1].count += parent->child[at].count;
        entry_remove(parent, at);
    } else if (right && joins(n, right)) {
        entries_append(n, right, 0);
        edit_kill(e, parent->child[at + 1].node);
        parent->child[at].count += parent->child[at + 1].count;
        entry_remove(parent, at + 1);
    } else if (n->used == 0) {
        edit_kill(e, e->off[level]);
        e->dirty &= ~(1u << level);
        entry_remove(parent, at);
    }
    return PMS_OK;
}

/* The root may be empty, or have one child, and that again one. */
static int lower_root(struct edit *e, struct pms_error *error)
{
    while (e->now.root) {
        unsigned level = e->now.level;
        const struct pms_list_node *root = &e->node[level];
        if (!(e->dirty & 1u << level) || e->off[level] != e->now.root) {
            int status = pms_list_node(e->ctx, e->now.root, level, &root, error);
            if (status != PMS_OK)
                return status;
        }
        if (root->used > 1 || (root->used == 1 && level == 0))
            return PMS_OK;
        uint64_t child = root->used ? root->child[0].node : 0;
        edit_kill(e, e->now.root);
        e->dirty &= ~(1u << level);
        e->now.root = child;
        e->now.level = child ? level - 1 : 0;
    }
    return PMS_OK;
}

int pms_list_remove(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index, uint64_t *old,
                    struct pms_error *error)
{
    struct pms_list_header header;
    struct pms_list_place place;
    struct edit e;
    int status = pms_list_load(ctx, list, &header, error);
    if (status == PMS_OK)
        status = locate_item(ctx, &header, index, &place, error);
    if (status != PMS_OK)
        return status;
    edit_begin(&e, ctx, list, &header);
    e.now.count--;
    struct pms_list_node *n = edit_node(&e, 0, place.step[0].off, place.step[0].node);
    *old = n->item[place.step[0].at];
    entry_remove(n, place.step[0].at);
    for (unsigned level = 1; status == PMS_OK && level <= header.level; level++) {
        struct pms_list_node *parent = edit_node(&e, level, place.step[level].off,
                                                 place.step[level].node);
        parent->child[place.step[level].at].count--;
        status = settle(&e, level - 1, parent, place.step[level].at, error);
    }
    if (status == PMS_OK)
        status = lower_root(&e, error);
    if (status == PMS_OK && (e.now.root == 0) != (e.now.count == 0))
        status = pms_list_corrupt(error, list, "the header counts other items than the tree has");
    return status == PMS_OK ? edit_run(&e, error) : status;
}

/* ---- clear ---- */

/* Depth is bounded by the level, which goes down by one at each step. */
static int free_below(const struct pms_dir_ctx *ctx, uint64_t off, unsigned level,
                      struct pms_error *error)
{
    const struct pms_list_node *node;
    int status = pms_list_node(ctx, off, level, &node, error);
    for (uint32_t i = 0; status == PMS_OK && i < node->used; i++)
        status = level ? free_below(ctx, node->child[i].node, level - 1, error)
                       : pms_list_free_item(ctx, node->item[i], error);
    if (status == PMS_OK && pms_heap_free(ctx->heap, off, error) != PMS_OK)
        status = pms_list_corrupt(error, off, "a block belongs to two owners");
    return status;
}

int pms_list_clear(const struct pms_dir_ctx *ctx, uint64_t list, struct pms_error *error)
{
    struct pms_list_header header;
    struct edit e;
    int status = pms_list_load(ctx, list, &header, error);
    if (status != PMS_OK || header.root == 0)
        return status;
    status = free_below(ctx, header.root, header.level, error);
    if (status != PMS_OK)
        return status;
    edit_begin(&e, ctx, list, &header);
    e.now.count = e.now.root = 0;
    e.now.level = 0;
    return edit_run(&e, error);
}
