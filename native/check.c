/* pms_check: walks everything and changes nothing. Every live block has to belong to exactly one owner, and every owner's block has
 * to be live: no leak, no double ownership, no overlap (the page table tiles, so blocks cannot overlap unless it is damaged). */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "pool_state.h"

struct owned { uint64_t off, seen; }; /* a live block, and how many owners it has */

struct checker {
    struct pms_pool *pool;
    struct pms_check_report *report;
    struct owned *block;
    uint64_t count, room, last_extent;
    uint64_t *group;             /* directories still to look at */
    uint64_t groups, group_room;
    bool out_of_memory;
};

static void __attribute__((format(printf, 2, 3))) problem(struct checker *c, const char *format, ...)
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

/* An owner names the block at off. */
static void own(struct checker *c, uint64_t off, const char *who)
{
    struct owned key = {off, 0};
    struct owned *b = c->count ? bsearch(&key, c->block, c->count, sizeof key, compare) : NULL;
    if (!b)
        problem(c, "%s at offset %llu is not a live block", who, (unsigned long long)off);
    else if (b->seen++)
        problem(c, "the block at offset %llu has more than one owner (%s)", (unsigned long long)off, who);
}

/* A group's data is its directory's header, which the check of that directory owns. */
static bool remember_group(struct checker *c, uint64_t dir)
{
    if (c->groups == c->group_room) {
        uint64_t *more = grow(c->group, &c->group_room, sizeof *more);
        c->out_of_memory = !more;
        if (!more)
            return false;
        c->group = more;
    }
    c->group[c->groups++] = dir;
    return true;
}

static int visit(void *ctx, uint64_t off, const struct pms_object *object)
{
    struct checker *c = ctx;
    if (object && off == object->node)
        c->report->names++;
    if (object && object->kind == PMS_OBJECT_GROUP && !remember_group(c, object->data))
        return PMS_E_OS;
    own(c, off, object ? (off == object->node ? "a name" : "an object's data") : "a directory's block");
    return 0;
}

static void check_directories(struct checker *c)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(c->pool);
    struct pms_error e;
    uint64_t next = pms_pool_root(c->pool)->directory;
    for (;;) {
        int status = pms_dir_check(&dirs, next, visit, c, &e);
        c->report->groups++;
        if (status != PMS_OK && !c->out_of_memory)
            problem(c, "directory at offset %llu: %s", (unsigned long long)next, e.what);
        if (c->groups == 0 || c->report->groups > c->count + 1) /* more directories than blocks: they contain each other */
            return;
        next = c->group[--c->groups];
    }
}

static void check_leaks(struct checker *c)
{
    for (uint64_t i = 0; i < c->count; i++)
        if (c->block[i].seen == 0)
            problem(c, "the block at offset %llu is allocated and belongs to nobody", (unsigned long long)c->block[i].off);
}

static void check_log(struct checker *c)
{
    struct pms_pool *pool = c->pool;
    uint64_t word, tx;
    if (!pool->map.shared || pool->read_only)
        return;
    memcpy(&word, pms_map_at(&pool->map, PMS_OFF_ANCHOR), sizeof word);
    if (!pms_anchor_unpack(word, &tx))
        problem(c, "the anchor's check bits are wrong");
    else if (tx != pool->tx || pool->undo.tag != tx + 1)
        problem(c, "the anchor is at transaction %llu, the store at %llu (I1)", (unsigned long long)tx,
                (unsigned long long)pool->tx);
}

static void check_copies(struct checker *c)
{
    struct pms_superblock super;
    struct pms_error e = {0};
    if (pms_super_read(c->pool->fd, &super, &e) != PMS_OK)
        problem(c, "superblock: %s", e.what);
    else if (super.generation != c->pool->super.generation)
        problem(c, "the superblock in the file is not the one in use");
    if (c->pool->undo.extent_count != c->pool->super.segment_count + 1)
        problem(c, "the undo log does not know all segments");
}

int pms_check(struct pms_pool *pool, struct pms_check_report *report, struct pms_error *error)
{
    memset(report, 0, sizeof *report);
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct checker c = {.pool = pool, .report = report};
    struct pms_error e = {0};
    int walked = pms_heap_walk(pool->heap, collect, &c, &e);
    if (walked == PMS_E_CORRUPT)
        problem(&c, "page table: %s (offset %llu)", e.what, (unsigned long long)e.offset);
    report->blocks = c.count;
    if (walked == PMS_OK) {
        check_directories(&c);
        if (report->problem_count == 0)
            check_leaks(&c);
    }
    check_log(&c);
    check_copies(&c);
    if (walked == PMS_E_OS || c.out_of_memory)
        status = pms_fail(error, PMS_E_OS, "no memory for the check");
    free(c.block);
    free(c.group);
    pms_pool_leave(pool);
    return status;
}
