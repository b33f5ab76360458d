#include "flush/bring.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"
#include "base/quiet.h"
#include "commit/gate.h"
#include "commit/txblock.h"
#include "flush/turns.h"
#include "journal/plan.h"
#include "journal/state.h"

static_assert(PMS_BRING_PIECE == PMS_JOURNAL_CHUNK, "what is written at once");

#define BATCH (PMS_TURNS_BATCH / PMS_BRING_PIECE)

struct piece {
    struct pms_bring *of;
    uint64_t at;
};

struct work {
    struct pms_turns turns;
    struct pms_pool *pool;
    struct piece *piece;
};

static uint64_t pages_of(const struct pms_bring *b) { return (b->bytes + PMS_PAGE - 1) / PMS_PAGE; }

static bool may_bring(struct pms_pool *pool, const struct pms_bring *b)
{
    struct pms_block block;
    uint64_t pages = pages_of(b), off = b->data;
    if (!pool->journal || pages < PMS_STRAIGHT_HOME_PAGES ||
        !pms_heap_find(pool->heap, off, &block) || block.kind != PMS_KIND_LARGE ||
        block.extent_off != off || block.extent_bytes < pages * PMS_PAGE ||
        !pms_heap_is_fresh(pool->heap, off) ||
        !pms_journal_begin_early(pool->journal, off / PMS_PAGE, pages))
        return false;
    pms_undo_lock(&pool->undo);
    bool quiet = pms_map_protect(&pool->map, off, pages * PMS_PAGE) == 0;
    pms_undo_unlock(&pool->undo);
    return quiet;
}

/* Of one block: they lie end to end. */
static uint64_t neighbours(const struct pms_turns *t, uint64_t i, uint64_t most)
{
    const struct piece *piece = ((const struct work *)t)->piece;
    uint64_t n = 1;
    while (n < most && piece[i + n].of == piece[i].of)
        n++;
    return n;
}

static uint32_t copy_piece(const struct pms_bring *b, uint64_t at, unsigned char *to)
{
    uint64_t left = b->bytes - at, bytes = left < PMS_BRING_PIECE ? left : PMS_BRING_PIECE,
             rest = -bytes & (PMS_PAGE - 1);
    pms_quiet_copy(to, (const unsigned char *)b->src + at, bytes);
    memset(to + bytes, 0, rest);
    b->crc[at / PMS_BRING_PIECE] = pms_crc32c(0, to, bytes);
    return pms_crc32c(b->crc[at / PMS_BRING_PIECE], to + bytes, rest);
}

static int bring_pieces(struct pms_turns *turns, uint64_t i, uint64_t n, unsigned char *buffer,
                        struct pms_error *error)
{
    struct work *w = (struct work *)turns;
    const struct pms_bring *b = w->piece[i].of;
    uint64_t at = w->piece[i].at, pages = pages_of(b) - at / PMS_PAGE;
    uint32_t crc[BATCH];
    PMS_ASSERT(n <= BATCH);
    for (uint64_t k = 0; k < n; k++)
        crc[k] = copy_piece(b, at + k * PMS_BRING_PIECE, buffer + k * PMS_BRING_PIECE);
    pages = pages < n * PMS_BRING_PIECE / PMS_PAGE ? pages : n * PMS_BRING_PIECE / PMS_PAGE;
    errno = pms_plan_write_pieces(w->pool->journal, (b->data + at) / PMS_PAGE, buffer, pages, crc);
    return errno ? pms_fail_errno(error, "writing new blocks home") : PMS_OK;
}

static uint64_t list_pieces(struct pms_bring *bring, uint64_t count, struct piece *piece)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t at = 0; bring[i].brought && at < bring[i].bytes; at += PMS_BRING_PIECE) {
            if (piece)
                piece[n] = (struct piece){&bring[i], at};
            n++;
        }
    return n;
}

/* The pages show what the file has, unless they are locked in memory. */
static bool show(struct pms_pool *pool, const struct pms_bring *b)
{
    pms_undo_lock(&pool->undo);
    bool shown = pms_map_give_back(&pool->map, b->data, pages_of(b) * PMS_PAGE);
    pms_undo_unlock(&pool->undo);
    return shown;
}

static int bring_all(struct pms_pool *pool, struct pms_bring *bring, uint64_t count,
                     struct pms_error *error)
{
    struct pms_transfer transfer = {0};
    for (uint64_t i = 0; i < count; i++)
        bring[i].brought = may_bring(pool, &bring[i]);
    uint64_t n = list_pieces(bring, count, NULL);
    if (!n)
        return PMS_OK;
    struct work w = {.turns = {.carry = bring_pieces,
                               .together = neighbours,
                               .count = n,
                               .batch = BATCH,
                               .item_bytes = PMS_BRING_PIECE,
                               .transfer = &transfer},
                     .pool = pool,
                     .piece = malloc(n * sizeof *w.piece)};
    if (!w.piece)
        return pms_fail_errno(error, "allocating memory");
    (void)list_pieces(bring, count, w.piece);
    int status = pms_turns_run(&w.turns, error);
    free(w.piece);
    for (uint64_t i = 0; status == PMS_OK && i < count; i++)
        bring[i].brought = bring[i].brought && show(pool, &bring[i]);
    pms_map_tell(&pool->map);
    return status;
}

int pms_bring_home(struct pms_pool *pool, struct pms_bring *bring, uint64_t count,
                   struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = bring_all(pool, bring, count, error);
    pms_pool_leave(pool);
    return status;
}
