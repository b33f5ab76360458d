#include "commit/outlive.h"

#include <errno.h>

#include "base/pages.h"
#include "commit/pool_state.h"
#include "heap/index.h"
#include "seam/spill.h"

#define SPANS_MAX 256u /* mappings that one closed store may have */
#define NEAR_LEAST (64ull << 10)
/* copied at a time: who lets go of a view waits for the operation lock */
#define PIECE (16ull << 20)

static uint64_t begin_of(const struct pms_pin *b) { return pms_page_down(b->off); }
static uint64_t end_of(const struct pms_pin *b) { return pms_page_up(b->off + b->bytes); }

/* ---- the views ---- */

/* The stretch of blocks from the i-th on with less than `near` between them; the first one behind
 * it is returned. */
static uint64_t stretch(const struct pms_outliving *l, uint64_t i, uint64_t near, uint64_t *to)
{
    *to = end_of(&l->block[i]);
    for (i++; i < l->count && begin_of(&l->block[i]) < *to + near; i++)
        if (end_of(&l->block[i]) > *to)
            *to = end_of(&l->block[i]);
    return i;
}

/* How near blocks have to be to share a mapping. */
static uint64_t nearness(const struct pms_outliving *l)
{
    for (uint64_t near = NEAR_LEAST;; near *= 4) {
        uint64_t spans = 0, to;
        for (uint64_t i = 0; i < l->count; spans++)
            i = stretch(l, i, near, &to);
        if (spans <= SPANS_MAX)
            return near;
    }
}

/* What lies between views shows nothing to anybody. */
static void forgo_others(struct pms_pool *pool)
{
    struct pms_outliving *l = &pool->left;
    uint64_t near = nearness(l), from = 0, to = 0;
    for (uint64_t i = 0; i < l->count; from = to) {
        uint64_t begin = begin_of(&l->block[i]);
        i = stretch(l, i, near, &to);
        if (begin > from)
            pms_map_forgo(&pool->map, from, begin - from);
    }
    if (pool->map.bytes > to)
        pms_map_forgo(&pool->map, to, pool->map.bytes - to);
}

void pms_outlive_part(struct pms_pool *pool)
{
    struct pms_outliving *l = &pool->left;
    struct pms_map *map = &pool->map;
    /* a thread that stores meanwhile waits here, and then finds its page writable */
    pms_undo_lock(&pool->undo);
    pms_map_protect(map, 0, map->bytes);
    l->block = pms_heap_take_pins(pool->heap, &l->count);
    l->alive = l->count;
    l->parted = pms_spill_freeze(map) == 0; /* nor do stores reach a later fork's child */
    l->working = true;
    pms_spill_end(map);
    uint64_t near = nearness(l), to;
    for (uint64_t i = 0; i < l->count;) {
        uint64_t from = begin_of(&l->block[i]);
        i = stretch(l, i, near, &to);
        l->parted = pms_map_part(map, from, to - from) == 0 && l->parted;
    }
    if (map->shared)
        forgo_others(pool);
    pms_undo_unlock(&pool->undo);
}

static struct pms_pin *find(const struct pms_outliving *l, uint64_t data)
{
    uint64_t low = 0, high = l->count;
    while (low < high) {
        uint64_t mid = low + (high - low) / 2;
        if (l->block[mid].off < data)
            low = mid + 1;
        else
            high = mid;
    }
    return low < l->count && l->block[low].off == data ? &l->block[low] : NULL;
}

/* The pages of a block that no other one that lives has a part of. */
static void give_back(struct pms_pool *pool, const struct pms_pin *b)
{
    const struct pms_outliving *l = &pool->left;
    const struct pms_pin *first = l->block, *end = l->block + l->count;
    uint64_t from = begin_of(b), to = end_of(b);
    for (const struct pms_pin *p = b; p-- > first && end_of(p) > from;)
        if (p->count)
            from = end_of(p);
    for (const struct pms_pin *p = b + 1; p < end && begin_of(p) < to; p++)
        if (p->count)
            to = begin_of(p);
    if (from < to)
        pms_map_release(&pool->map, from, to - from);
}

void pms_outlive_unpin(struct pms_pool *pool, uint64_t data)
{
    struct pms_outliving *l = &pool->left;
    struct pms_pin *b = find(l, data);
    if (!b || --b->count)
        return;
    if (--l->alive)
        give_back(pool, b);
    else if (!l->working)
        pms_map_close(&pool->map);
}

/* ---- copying ---- */

bool pms_outlive_copy(struct pms_pool *pool, int *err)
{
    struct pms_outliving *l = &pool->left;
    if (!l->parted && l->alive) {
        *err = ENOMEM;
        return true;
    }
    for (uint64_t room = PIECE; room && l->next < l->count;) {
        const struct pms_pin *b = &l->block[l->next];
        uint64_t from = begin_of(b) > l->done ? begin_of(b) : l->done, to = end_of(b);
        if (b->count && from < to) {
            to = to - from < room ? to : from + room;
            *err = pms_map_own(&pool->map, from, to - from);
            if (*err)
                return true;
            room -= to - from;
            l->done = to;
        }
        if (!b->count || to == end_of(b))
            l->next++;
    }
    return l->next < l->count;
}

void pms_outlive_forgo(struct pms_pool *pool)
{
    pms_map_forgo_engine(&pool->map);
    if (!pool->map.shared)
        forgo_others(pool);
}

void pms_outlive_end(struct pms_pool *pool)
{
    pool->left.working = false;
    if (!pool->left.alive)
        pms_map_close(&pool->map);
}
