/* pms_check: walks everything and changes nothing. Every live block has to belong to exactly one
 * owner, and every owner's block has to be live: no leak, no double ownership, no overlap (the
 * page table tiles, so blocks cannot overlap unless it is damaged). */
#include "store/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commit/gate.h"
#include "commit/txblock.h"
#include "names/list.h"

struct owned {
    uint64_t off, seen;
}; /* a live block, and how many owners it has */

struct container { /* a group's directory, or a list */
    uint64_t header;
    uint32_t kind, depth; /* depth: groups that it is in, and itself if it is one */
};

struct checker {
    struct pms_pool *pool;
    struct pms_check_report *report;
    struct owned *block;
    uint64_t count, room, last_extent;
    struct container *container; /* still to look at */
    uint64_t containers, container_room;
    uint32_t depth; /* of the one that is looked at */
    bool out_of_memory;
};

static void __attribute__((format(printf, 2, 3))) problem(struct checker *c, const char *format,
                                                          ...)
{
    struct pms_check_report *r = c->report;
    if (r->problem_count < PMS_CHECK_PROBLEMS) {
        va_list args;
        va_start(args, format);
        vsnprintf(r->problem[r->problem_count], sizeof r->problem[0], format, args);
        va_end(args);
    }
    r->problem_count++;
}

static void *grow(void *array, uint64_t *room, size_t item)
{
    uint64_t more = *room ? *room * 2 : 1024;
    void *p = realloc(array, more * item);
    if (p)
        *room = more;
    return p;
}

static int collect(void *ctx, const struct pms_block *block)
{
    struct checker *c = ctx;
    if (c->count == c->room) {
        struct owned *more = grow(c->block, &c->room, sizeof *more);
        if (!more)
            return PMS_E_OS;
        c->block = more;
    }
    c->report->extents += block->extent_off != c->last_extent;
    c->last_extent = block->extent_off;
    c->block[c->count++] = (struct owned){block->off, 0}; /* ascending: the walk goes by address */
    return 0;
}

static int compare(const void *a, const void *b)
{
    uint64_t x = ((const struct owned *)a)->off, y = ((const struct owned *)b)->off;
    return x < y ? -1 : x > y;
}

static struct owned *find(const struct checker *c, uint64_t off)
{
    struct owned key = {off, 0};
    return c->count ? bsearch(&key, c->block, c->count, sizeof key, compare) : NULL;
}

/* An owner names the block at off. */
static void own(struct checker *c, uint64_t off, const char *who)
{
    struct owned *b = find(c, off);
    __atomic_fetch_add(&c->report->owners, 1, __ATOMIC_RELAXED);
    if (!b)
        problem(c, "%s at offset %llu is not a live block", who, (unsigned long long)off);
    else if (b->seen++)
        problem(c, "the block at offset %llu has more than one owner (%s)", (unsigned long long)off,
                who);
}

/* A group's or a list's data is its header, which the check of that directory or list owns. */
static bool remember_container(struct checker *c, const struct pms_object *object)
{
    if (c->containers == c->container_room) {
        struct container *more = grow(c->container, &c->container_room, sizeof *more);
        c->out_of_memory = !more;
        if (!more)
            return false;
        c->container = more;
    }
    c->container[c->containers++] = (struct container){
        object->data, object->kind, c->depth + (object->kind == PMS_OBJECT_GROUP)};
    return true;
}

static int visit(void *ctx, uint64_t off, const struct pms_object *object)
{
    struct checker *c = ctx;
    bool named = object && off == object->node && object->name_bytes;
    c->report->names += named;
    if (object && off == object->node)
        __atomic_fetch_add(&c->report->objects, 1, __ATOMIC_RELAXED);
    if (object && (object->kind == PMS_OBJECT_GROUP || object->kind == PMS_OBJECT_LIST) &&
        !remember_container(c, object))
        return PMS_E_OS;
    own(c, off,
        !object               ? "a container's block"
        : named               ? "a name"
        : off == object->node ? "a list's item"
                              : "an object's data");
    return 0;
}

/* A second owner of a container is a problem, and looking through all of it again would take as
 * many times as long as it has owners. */
static bool seen_before(struct checker *c, uint64_t header)
{
    const struct owned *b = find(c, header);
    if (!b || b->seen == 0)
        return false;
    own(c, header, "a container's block");
    return true;
}

static void check_containers(struct checker *c)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(c->pool);
    struct pms_error e;
    struct container next = {pms_pool_root(c->pool)->directory, PMS_OBJECT_GROUP, 0};
    for (uint64_t seen = 1;; seen++) {
        bool is_list = next.kind == PMS_OBJECT_LIST;
        int status = PMS_OK;
        c->depth = next.depth;
        if (next.depth > PMS_GROUPS_MAX)
            problem(c, "the group at offset %llu is in more than %u others",
                    (unsigned long long)next.header, PMS_GROUPS_MAX - 1);
        else if (!seen_before(c, next.header))
            status = is_list ? pms_list_check(&dirs, next.header, visit, c, &e)
                             : pms_dir_check(&dirs, next.header, visit, c, &e);
        c->report->groups += !is_list;
        c->report->lists += is_list;
        if (status != PMS_OK && !c->out_of_memory)
            problem(c, "%s at offset %llu: %s", is_list ? "list" : "directory",
                    (unsigned long long)next.header, e.what);
        /* more containers than blocks: they contain each other */
        if (c->containers == 0 || seen > c->count)
            return;
        next = c->container[--c->containers];
    }
}

static void check_leaks(struct checker *c)
{
    for (uint64_t i = 0; i < c->count; i++)
        if (c->block[i].seen == 0) {
            struct pms_block b;
            problem(c, "the block at offset %llu is allocated and belongs to nobody",
                    (unsigned long long)c->block[i].off);
            c->report->leaks++;
            c->report->leaked_bytes += pms_heap_find(c->pool->heap, c->block[i].off, &b) ? b.bytes
                                                                                         : 0;
        }
}

static void check_log(struct checker *c)
{
    struct pms_pool *pool = c->pool;
    uint64_t word, tx;
    if (!pool->map.shared || pool->opened.read_only)
        return;
    memcpy(&word, pms_map_at(&pool->map, PMS_OFF_ANCHOR), sizeof word);
    if (!pms_anchor_unpack(word, &tx))
        problem(c, "the anchor's check bits are wrong");
    else if (tx != pool->tx.last || pool->undo.tag != tx + 1)
        problem(c, "the anchor is at transaction %llu, the store at %llu (I1)",
                (unsigned long long)tx, (unsigned long long)pool->tx.last);
}

static void check_copies(struct checker *c)
{
    struct pms_superblock super;
    struct pms_error e = {0};
    if (pms_super_read(c->pool->opened.fd, &super, &e) != PMS_OK)
        problem(c, "superblock: %s", e.what);
    else if (super.generation != c->pool->super.generation && c->pool->sight.of == PMS_SIGHT_NONE &&
             !pms_pool_failed(c->pool))
        problem(c, "the superblock in the file is not the one in use");
    c->report->sound_copies = pms_super_sound_copies(c->pool->opened.fd);
    if (c->pool->undo.log.extent_count != c->pool->super.segment_count + 1)
        problem(c, "the undo log does not know all segments");
}

/* REQUIRES: the operation lock. The caller frees c->block. ERRORS: PMS_E_OS: no memory. */
static int examine(struct checker *c, struct pms_error *error)
{
    struct pms_error e = {0};
    memset(c->report, 0, sizeof *c->report);
    int walked = pms_heap_walk(c->pool->heap, collect, c, &e);
    if (walked == PMS_E_CORRUPT)
        problem(c, "page table: %s (offset %llu)", e.what, (unsigned long long)e.offset);
    __atomic_store_n(&c->report->blocks, c->count, __ATOMIC_RELAXED);
    if (walked == PMS_OK) {
        check_containers(c);
        if (c->report->problem_count == 0)
            check_leaks(c);
    }
    check_log(c);
    check_copies(c);
    free(c->container);
    return walked == PMS_E_OS || c->out_of_memory
               ? pms_fail(error, PMS_E_OS, "no memory for the check")
               : PMS_OK;
}

int pms_check(struct pms_pool *pool, struct pms_check_report *report, struct pms_error *error)
{
    struct checker c = {.pool = pool, .report = report};
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = examine(&c, error);
    free(c.block);
    pms_pool_leave(pool);
    return status;
}

int pms_free_leaks(struct pms_pool *pool, struct pms_check_report *report, struct pms_error *error)
{
    struct checker c = {.pool = pool, .report = report};
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = examine(&c, error);
    if (status == PMS_OK && report->problem_count > report->leaks)
        status = pms_fail(error, PMS_E_CORRUPT,
                          "the store has other problems than blocks that belong to nobody");
    for (uint64_t i = 0; i < c.count && status == PMS_OK; i++)
        if (c.block[i].seen == 0)
            status = pms_heap_free(pool->heap, c.block[i].off, error);
    free(c.block);
    pms_pool_leave(pool);
    return status;
}
