#include "commit/relief.h"

#include "base/region.h"
#include "log/entries.h"
#include "log/marks.h"
#include "seam/memory.h"
#include "seam/spill.h"

#define LOOKS 16u         /* while as much is written as the share is */
#define SPILLED 4u        /* one part in so many of the share may stay in the spill for a while */
#define ROOM 8u           /* one part in so many of the share is made free at once */
#define PIECE_PAGES 2048u /* given back while others wait for the log lock */
#define BORN_PAGES 256u   /* likewise, written home before */
#define OLDEST 64u        /* kinds of ages: by powers of two; */
#define STAYS 65u         /* of a page that is not given back */

struct relief {
    struct pms_pool *pool;
    uint64_t homed;    /* the journal's */
    uint64_t need;     /* bytes */
    uint64_t given;    /* bytes that took memory, */
    uint64_t back;     /* and that lay in the spill */
    unsigned youngest; /* kind of age: all that are older go; of these, as many as are needed */
};

static unsigned kind_of(uint64_t age) { return age ? 64 - (unsigned)__builtin_clzll(age) : 0; }

/* The kind of a page's age. Exact under the log lock. */
static unsigned look_at_page(const struct relief *r, uint64_t page)
{
    const struct pms_pool *pool = r->pool;
    const struct pms_undo *u = &pool->undo;
    if (pms_undo_page_prepared(u, page) || pms_map_is_astray(&pool->map, page))
        return STAYS;
    uint64_t age = pms_journal_age(pool->journal, page, r->homed);
    return age == UINT64_MAX ? STAYS : kind_of(age);
}

/* The end of the data that the page lies in; 0: it lies in none. */
static uint64_t data_end(const struct pms_pool *pool, uint64_t page)
{
    struct pms_region region = pms_region_of(&pool->super, page * PMS_PAGE);
    return region.kind == PMS_REGION_DATA ? region.end / PMS_PAGE : 0;
}

/* The next page of data from *page on, below `end`, that is the process's. */
static bool next_candidate(const struct pms_pool *pool, uint64_t *page, uint64_t end)
{
    for (uint64_t p = *page; (p = pms_map_next_own(&pool->map, p, end)) < end; p++) {
        *page = p;
        if (data_end(pool, p))
            return true;
    }
    *page = end;
    return false;
}

/* ---- which of them ---- */

/* Chooses the ages. Others may capture meanwhile: that is seen when it comes to it. */
static void choose(struct relief *r)
{
    uint64_t pages[STAYS + 1] = {0}, sum = 0, end = r->pool->map.bytes / PMS_PAGE;
    for (uint64_t page = 0; next_candidate(r->pool, &page, end); page++)
        pages[look_at_page(r, page)] += !pms_map_is_spilled(&r->pool->map, page);
    for (r->youngest = OLDEST;; r->youngest--) {
        sum += pages[r->youngest] * PMS_PAGE;
        if (sum >= r->need || r->youngest == 0)
            break;
    }
}

/* Whether a page goes: of the youngest kind that is needed, only while there is need. What lies in
 * the spill always does: it takes no memory, but the next capture would copy it. */
static bool goes(const struct relief *r, uint64_t page)
{
    unsigned kind = look_at_page(r, page);
    if (kind != STAYS && pms_map_is_spilled(&r->pool->map, page))
        return true;
    return kind != STAYS && (kind > r->youngest || (kind == r->youngest && r->given < r->need));
}

/* ---- giving back ---- REQUIRES: the log lock ---- */

/* Pages that the engine stored to stay writable. Its next store makes them so again. false: of
 * others that are, and those that the running transaction stored to. */
static bool protect_engines(struct pms_pool *pool, uint64_t page)
{
    struct pms_block b;
    if (!pms_map_all_writable(&pool->map, page * PMS_PAGE, PMS_PAGE))
        return true;
    return !pms_undo_is_engines(&pool->undo, page) &&
           pms_heap_find(pool->heap, page * PMS_PAGE, &b) &&
           (b.kind == PMS_KIND_META_LARGE || b.kind == PMS_KIND_META_SLAB) &&
           pms_map_protect(&pool->map, page * PMS_PAGE, PMS_PAGE) == 0;
}

static void give_back_piece(struct relief *r, uint64_t page, uint64_t end)
{
    struct pms_pool *pool = r->pool;
    while (next_candidate(pool, &page, end)) {
        uint64_t first = page, limit = data_end(pool, page);
        bool spilled = pms_map_is_spilled(&pool->map, page);
        limit = limit < end ? limit : end;
        while (page < limit && pms_map_next_own(&pool->map, page, page + 1) == page &&
               pms_map_is_spilled(&pool->map, page) == spilled && goes(r, page) &&
               protect_engines(pool, page)) {
            *(spilled ? &r->back : &r->given) += PMS_PAGE;
            page++;
        }
        if (page == first)
            page++;
        else if (!pms_map_give_back(&pool->map, first * PMS_PAGE, (page - first) * PMS_PAGE))
            *(spilled ? &r->back : &r->given) -= (page - first) * PMS_PAGE;
    }
}

static void give_back(struct relief *r)
{
    uint64_t end = r->pool->map.bytes / PMS_PAGE;
    for (uint64_t page = 0; next_candidate(r->pool, &page, end);) {
        uint64_t to = page + PIECE_PAGES < end ? page + PIECE_PAGES : end;
        pms_undo_lock(&r->pool->undo);
        give_back_piece(r, page, to);
        pms_undo_unlock(&r->pool->undo);
        page = to;
    }
}

/* ---- what was born ---- REQUIRES: the log lock ---- */

static uint64_t own_of(const struct pms_pool *pool, uint64_t page, uint64_t end)
{
    uint64_t pages = 0;
    while ((page = pms_map_next_own(&pool->map, page, end)) < end) {
        pages++;
        page++;
    }
    return pages * PMS_PAGE;
}

/* Who stores there meanwhile faults, and waits for the log lock; then it is as any page of a block
 * that was just born. Returns the bytes that are the file's now. */
static uint64_t send_home(struct pms_pool *pool, uint64_t page, uint64_t pages)
{
    uint64_t own = own_of(pool, page, page + pages), off = page * PMS_PAGE,
             bytes = pages * PMS_PAGE;
    bool sent = own && pms_map_protect(&pool->map, off, bytes) == 0 &&
                pms_journal_write_early(pool->journal, page, pages) &&
                pms_map_give_back(&pool->map, off, bytes);
    return sent ? own : 0;
}

/* The oldest first, as they come in the list, which grows at its end alone. */
static void send_born_home(struct pms_pool *pool, uint64_t need)
{
    uint64_t given = 0;
    struct pms_undo *u = &pool->undo;
    pms_undo_lock(u);
    for (uint64_t i = 0; i < pms_dirty_count(&u->dirty) && given < need; i++) {
        const struct pms_dirty *d = pms_dirty_first(&u->dirty) + i;
        bool whole = d->off % PMS_PAGE == 0 && d->len % PMS_PAGE == 0;
        uint64_t page = d->off / PMS_PAGE, end = page + d->len / PMS_PAGE;
        for (uint64_t n; d->kind == PMS_DIRTY_FRESH && whole && page < end && given < need;
             page += n) {
            n = end - page < BORN_PAGES ? end - page : BORN_PAGES;
            given += send_home(pool, page, n);
            pms_undo_unlock(u); /* others wait */
            pms_undo_lock(u);
        }
    }
    pms_undo_unlock(u);
    pool->relief.given += given;
    pms_map_tell(&pool->map);
}

/* ---- when ---- */

static void give(struct pms_pool *pool, enum pms_journal_ask ask, uint64_t need)
{
    struct relief r = {.pool = pool, .homed = pms_journal_homed(pool->journal, ask), .need = need};
    choose(&r);
    give_back(&r);
    pool->relief.given += r.given + r.back;
    pms_map_tell(&pool->map);
}

static uint64_t too_much(uint64_t share) /* with some room */
{
    uint64_t own = pms_memory_own(), most = share - share / ROOM;
    return own > most ? own - most : 0;
}

/* Much more lies in the spill than the last look left there. */
static bool has_spilled(const struct pms_pool *pool, uint64_t share)
{
    return pms_spill_bytes(&pool->map) > pool->relief.spilled + share / SPILLED;
}

static void relieve(struct pms_pool *pool, uint64_t share)
{
    give(pool, PMS_JOURNAL_HURRY, too_much(share));
    if (pms_memory_own() > share || has_spilled(pool, share))
        give(pool, PMS_JOURNAL_WAIT, too_much(share));
    pms_undo_lock(&pool->undo);
    pms_spill_forget(&pool->map, pms_undo_give_back(&pool->undo));
    pms_undo_unlock(&pool->undo);
}

/* Returns the share, until the next look. */
static uint64_t look(struct pms_pool *pool)
{
    pms_memory_read_limit();
    pms_map_tell(&pool->map);
    pool->relief.born = 0;
    pool->relief.most = pms_memory_share() / LOOKS;
    return pms_pool_failed(pool) ? UINT64_MAX : pms_memory_share();
}

void pms_relief_look(struct pms_pool *pool)
{
    uint64_t share = look(pool);
    if (pms_memory_own() > share || (share != UINT64_MAX && pms_spill_bytes(&pool->map)))
        relieve(pool, share);
    pool->relief.spilled = pms_spill_bytes(&pool->map);
    pool->relief.look_at = pms_journal_written(pool->journal) + pool->relief.most;
}

void pms_relief_look_at_born(struct pms_pool *pool)
{
    uint64_t share = look(pool);
    if (pms_memory_own() > share)
        give(pool, PMS_JOURNAL_HURRY, too_much(share));
    if (pms_memory_own() > share)
        send_born_home(pool, too_much(share));
}

void pms_relief_begin(struct pms_pool *pool)
{
    pool->relief.look_at = look(pool) / LOOKS;
    if (pool->journal)
        pms_spill_begin(&pool->map);
}

void pms_relief_end(struct pms_pool *pool)
{
    pms_spill_end(&pool->map);
    pms_map_untell(&pool->map);
}
