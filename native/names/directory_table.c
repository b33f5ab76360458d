#include "names/directory_table.h"

#include <string.h>

#include "base/checksum.h"

/* names of one run of slots sorted at once; chance does not make runs as long (load <= 3/4) */
#define RUN_MAX 512u
#define BUFFER_SLOTS 256u

int pms_dir_corrupt(struct pms_error *error, uint64_t off, const char *rule)
{
    int status = pms_fail(error, PMS_E_CORRUPT, "directory: %s", rule);
    if (error)
        error->offset = off;
    return status;
}

/* ---- checks of what the medium says ---- */

static unsigned utf8_tail(unsigned char lead) /* bytes that follow it; 4 = no lead byte */
{
    if (lead < 0x80)
        return 0;
    if (lead < 0xc2 || lead > 0xf4)
        return 4;
    return lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
}

bool pms_dir_name_valid(const unsigned char *name, uint64_t bytes)
{
    if (bytes == 0 || bytes > PMS_NAME_MAX)
        return false;
    for (uint64_t i = 0; i < bytes;) {
        unsigned char lead = name[i++];
        unsigned tail = utf8_tail(lead);
        if (lead == 0 || lead == '/' || tail > bytes - i)
            return false;
        /* a tail of 4 ends here at the latest: the lead itself was no lead */
        for (unsigned t = 0; t < tail; t++)
            if (tail == 4 || (name[i + t] & 0xc0) != 0x80)
                return false;
        /* overlong; surrogate */
        if ((lead == 0xe0 && name[i] < 0xa0) || (lead == 0xed && name[i] > 0x9f) ||
            (lead == 0xf0 && name[i] < 0x90) ||
            (lead == 0xf4 && name[i] > 0x8f)) /* overlong; past U+10FFFF */
            return false;
        i += tail;
    }
    return true;
}

bool pms_dir_block(const struct pms_dir_ctx *ctx, uint64_t off, uint64_t bytes,
                   enum pms_owner owner, struct pms_block *block)
{
    if (off % PMS_LINE != 0 || !pms_heap_find(ctx->heap, off, block))
        return false;
    bool engine = block->kind == PMS_KIND_META_LARGE || block->kind == PMS_KIND_META_SLAB;
    return block->live && block->off == off && block->bytes >= bytes &&
           engine == (owner == PMS_OWNER_ENGINE);
}

static bool header_sane(const struct pms_dir_header *h)
{
    bool empty = h->count == 0;
    return h->slots >= PMS_DIR_SLOTS_MIN && (h->slots & (h->slots - 1)) == 0 &&
           h->used <= pms_dir_used_max(h->slots) && h->count <= h->used &&
           (h->first == 0) == empty && (h->last == 0) == empty;
}

int pms_dir_load(const struct pms_dir_ctx *ctx, uint64_t dir, struct pms_dir_view *view,
                 struct pms_error *error)
{
    struct pms_block block;
    if (!pms_dir_block(ctx, dir, sizeof view->h, PMS_OWNER_ENGINE, &block))
        return pms_dir_corrupt(error, dir, "its header is no live block");
    view->dir = dir;
    memcpy(&view->h, pms_map_at(ctx->undo->map, dir), sizeof view->h);
    if (!header_sane(&view->h))
        return pms_dir_corrupt(error, dir, "the header's numbers contradict each other");
    if (!pms_dir_block(ctx, view->h.table, 0, PMS_OWNER_ENGINE, &block) ||
        view->h.slots > block.bytes / sizeof *view->slot)
        return pms_dir_corrupt(error, dir, "its table is no live block of that size");
    view->slot = pms_map_at(ctx->undo->map, view->h.table);
    return PMS_OK;
}

static bool node_sane(const struct pms_node *n, uint64_t room)
{
    return n->name_bytes > 0 && n->name_bytes <= PMS_NAME_MAX && n->meta_bytes <= n->meta_room &&
           sizeof *n + n->name_bytes + (uint64_t)n->meta_room <= room &&
           n->kind >= PMS_OBJECT_VALUE && n->kind <= PMS_OBJECT_LIST;
}

int pms_dir_node(const struct pms_dir_ctx *ctx, uint64_t off, const struct pms_node **node,
                 struct pms_error *error)
{
    struct pms_block block;
    if (!pms_dir_block(ctx, off, sizeof **node, PMS_OWNER_ENGINE, &block))
        return pms_dir_corrupt(error, off, "a node is no live block");
    *node = pms_map_at(ctx->undo->map, off);
    if (!node_sane(*node, block.bytes))
        return pms_dir_corrupt(error, off, "a node's numbers contradict each other");
    return PMS_OK;
}

/* The data block is about to be mapped, written to or freed: it must be what the kind says. */
static bool data_sane(const struct pms_dir_ctx *ctx, const struct pms_node *n)
{
    struct pms_block block;
    if (n->kind == PMS_OBJECT_GROUP)
        return pms_dir_block(ctx, n->data, sizeof(struct pms_dir_header), PMS_OWNER_ENGINE, &block);
    if (n->kind == PMS_OBJECT_LIST)
        return pms_dir_block(ctx, n->data, sizeof(struct pms_list_header), PMS_OWNER_ENGINE,
                             &block);
    if (n->data == 0)
        return n->data_bytes == 0;
    return n->kind == PMS_OBJECT_ARRAY &&
           pms_dir_block(ctx, n->data, n->data_bytes, PMS_OWNER_USER, &block);
}

int pms_dir_object(const struct pms_dir_ctx *ctx, uint64_t off, struct pms_object *object,
                   struct pms_error *error)
{
    const struct pms_node *n;
    int status = pms_dir_node(ctx, off, &n, error);
    if (status != PMS_OK)
        return status;
    if (!data_sane(ctx, n))
        return pms_dir_corrupt(error, off,
                               "an object's data is no live block of its kind and size");
    *object = (struct pms_object){
        .node = off,
        .data = n->data,
        .data_bytes = n->data_bytes,
        .kind = n->kind,
        .name_bytes = n->name_bytes,
        .meta_bytes = n->meta_bytes,
        .name = pms_dir_name(n),
        .meta = pms_dir_name(n) + n->name_bytes,
    };
    return PMS_OK;
}

/* ---- probing ---- */

int pms_dir_probe(const struct pms_dir_ctx *ctx, const struct pms_dir_view *view, uint64_t hash,
                  const void *name, uint32_t name_bytes, struct pms_dir_place *place,
                  struct pms_error *error)
{
    uint64_t mask = view->h.slots - 1, i = pms_dir_home(hash, view->h.slots);
    *place = (struct pms_dir_place){0};
    for (uint64_t seen = 0; seen <= mask; seen++, i = (i + 1) & mask) {
        const struct pms_dir_slot *s = &view->slot[i];
        if (s->node == 0) {
            if (!place->deleted)
                place->index = i;
            return PMS_OK;
        }
        if (s->node == PMS_DIR_DELETED) {
            if (!place->deleted) /* the first of them takes a new name */
                *place = (struct pms_dir_place){.index = i, .deleted = true};
            continue;
        }
        if (s->hash != hash)
            continue;
        const struct pms_node *n;
        int status = pms_dir_node(ctx, s->node, &n, error);
        if (status != PMS_OK)
            return status;
        if (n->name_bytes == name_bytes && memcmp(pms_dir_name(n), name, name_bytes) == 0) {
            *place = (struct pms_dir_place){.index = i, .node = s->node};
            return PMS_OK;
        }
    }
    return pms_dir_corrupt(error, view->dir, "the table has no empty slot");
}

/* ---- names as a walk finds them ---- */

#define SHOWN 24u /* bytes of a name in a message */

static int wrong_name(struct pms_error *error, const struct pms_object *o, const char *rule)
{
    static const char digit[] = "0123456789abcdef";
    char shown[4 * SHOWN + 1], *to = shown;
    for (uint32_t i = 0; i < o->name_bytes && i < SHOWN; i++) {
        unsigned char c = o->name[i];
        if (c >= ' ' && c < 0x7f && c != '\\') {
            *to++ = (char)c;
            continue;
        }
        *to++ = '\\';
        *to++ = 'x';
        *to++ = digit[c >> 4];
        *to++ = digit[c & 15];
    }
    *to = '\0';
    int status = pms_fail(error, PMS_E_CORRUPT, "directory: the name '%s'%s %s", shown,
                          o->name_bytes > SHOWN ? "..." : "", rule);
    if (error)
        error->offset = o->node;
    return status;
}

int pms_dir_named(const struct pms_dir_ctx *ctx, const struct pms_dir_view *view,
                  const struct pms_object *object, struct pms_error *error)
{
    const struct pms_node *n = pms_map_at(ctx->undo->map, object->node);
    struct pms_dir_place place;
    if (!pms_dir_name_valid(object->name, object->name_bytes))
        return wrong_name(error, object, "is none");
    if (n->hash != pms_hash(ctx->hash_seed, object->name, object->name_bytes))
        return wrong_name(error, object, "has another hash");
    int status = pms_dir_probe(ctx, view, n->hash, object->name, object->name_bytes, &place, error);
    if (status == PMS_OK && place.node != object->node)
        return wrong_name(error, object, "leads elsewhere");
    return status;
}

/* ---- a new table ---- */

struct builder {
    const struct pms_dir_ctx *ctx;
    uint64_t table, slots;
    uint64_t written; /* slots stored; the buffer's come next */
    uint32_t buffered;
    struct pms_dir_slot buffer[BUFFER_SLOTS];
};

static void push(struct builder *b, struct pms_dir_slot slot)
{
    b->buffer[b->buffered++] = slot;
    if (b->buffered < BUFFER_SLOTS && b->written + b->buffered < b->slots)
        return;
    pms_undo_store_fresh(b->ctx->undo, b->table + b->written * sizeof slot, b->buffer,
                         b->buffered * sizeof slot);
    b->written += b->buffered;
    b->buffered = 0;
}

static void push_empty_until(struct builder *b, uint64_t end)
{
    while (b->written + b->buffered < end)
        push(b, (struct pms_dir_slot){0, 0});
}

/* The run of slots in use that starts at from; its end. It stops at the table's end: wrapping is
 * the caller's affair. */
static uint64_t run_end(const struct pms_dir_view *v, uint64_t from)
{
    while (from < v->h.slots && v->slot[from].node != 0)
        from++;
    return from;
}

/* Copies the live slots of a run, in order of hash. Returns their number, or RUN_MAX + 1: too
 * many. */
static uint32_t sorted_run(const struct pms_dir_view *v, uint64_t from, uint64_t end,
                           struct pms_dir_slot *out)
{
    uint32_t n = 0;
    for (uint64_t i = from; i < end; i++) {
        struct pms_dir_slot s = v->slot[i];
        if (s.node == PMS_DIR_DELETED)
            continue;
        if (n == RUN_MAX)
            return RUN_MAX + 1;
        uint32_t at = n++;
        for (; at > 0 && out[at - 1].hash > s.hash; at--) /* nearly sorted already */
            out[at] = out[at - 1];
        out[at] = s;
    }
    return n;
}

/* Front to back: homes of later runs lie behind those of earlier ones. Returns the first slot of
 * the old table whose run was not written whole; also not written are the run at the table's
 * start (it may belong to the one at its end) and long ones. */
static uint64_t write_runs(struct builder *b, const struct pms_dir_view *old)
{
    struct pms_dir_slot run[RUN_MAX];
    uint64_t whole = old->h.slots;
    for (uint64_t i = run_end(old, 0); i < old->h.slots; i++) {
        uint64_t end = run_end(old, i);
        uint32_t n = end > i ? sorted_run(old, i, end, run) : 0;
        for (uint32_t k = 0; n <= RUN_MAX && k < n && whole == old->h.slots; k++) {
            push_empty_until(b, pms_dir_home(run[k].hash, b->slots));
            if (b->written + b->buffered < b->slots)
                push(b, run[k]);
            else
                whole = i; /* the new table's end; what comes now wraps */
        }
        i = end;
    }
    push_empty_until(b, b->slots);
    return whole;
}

static void insert_if_absent(const struct builder *b, const struct pms_dir_slot *s)
{
    const struct pms_dir_slot *table = pms_map_at(b->ctx->undo->map, b->table);
    uint64_t mask = b->slots - 1, i = pms_dir_home(s->hash, b->slots);
    for (; table[i].node != 0; i = (i + 1) & mask) /* ends: the names were counted */
        if (table[i].node == s->node)
            return;
    pms_undo_store_fresh(b->ctx->undo, b->table + i * sizeof *s, s, sizeof *s);
}

static void insert_rest(const struct builder *b, const struct pms_dir_view *old, uint64_t whole)
{
    uint64_t end;
    for (uint64_t i = 0; i < old->h.slots; i = end + 1) {
        end = run_end(old, i);
        if (i != 0 && i < whole && end - i <= RUN_MAX)
            continue;
        for (uint64_t k = i; k < end; k++)
            if (old->slot[k].node != PMS_DIR_DELETED)
                insert_if_absent(b, &old->slot[k]);
    }
}

/* More names than the header says would not fit the new table. */
static bool counts_hold(const struct pms_dir_view *v)
{
    uint64_t live = 0, deleted = 0;
    for (uint64_t i = 0; i < v->h.slots; i++) {
        deleted += v->slot[i].node == PMS_DIR_DELETED;
        live += v->slot[i].node > PMS_DIR_DELETED;
    }
    return live == v->h.count && live + deleted == v->h.used;
}

int pms_dir_rebuild(const struct pms_dir_ctx *ctx, struct pms_dir_view *view,
                    struct pms_error *error)
{
    if (!counts_hold(view))
        return pms_dir_corrupt(error, view->dir,
                               "the table has more or fewer names than the header says");
    /* Half full at most, so that at least a quarter of the slots is taken before the next time.
     * Many deleted slots and few names: the same size, or less. */
    uint64_t slots = PMS_DIR_SLOTS_MIN;
    while (slots < 2 * (view->h.count + 1))
        slots *= 2;
    struct builder b = {.ctx = ctx, .slots = slots};
    int status = pms_heap_alloc(ctx->heap, slots * sizeof *view->slot, PMS_OWNER_ENGINE, &b.table,
                                error);
    if (status != PMS_OK)
        return status;
    insert_rest(&b, view, write_runs(&b, view));
    PMS_ASSERT(b.written == slots && b.buffered == 0);
    view->h.table = b.table;
    view->h.slots = slots;
    view->h.used = view->h.count;
    view->slot = pms_map_at(ctx->undo->map, b.table);
    return PMS_OK;
}
