/* Facts and figures of a store. */
#include "objects/stats.h"

#include "commit/gate.h"

void pms_pool_info(const struct pms_pool *pool, struct pms_info *info)
{
    *info = pool->opened.info;
}

int pms_pool_stats(struct pms_pool *pool, struct pms_stats *stats, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_heap_stats h;
    struct pms_journal_stats j = {0};
    pms_heap_stats(pool->heap, &h);
    if (pool->journal)
        pms_journal_stats(pool->journal, &j);
    *stats = (struct pms_stats){
        .epoch = pms_pool_root(pool)->epoch,
        .tx = pool->tx.last,
        .file_bytes = pool->super.file_bytes,
        .data_bytes = h.data_bytes,
        .used_bytes = h.used_bytes,
        .free_bytes = h.free_bytes,
        .pinned_bytes = h.pinned_bytes,
        .largest_free_bytes = h.largest_free,
        .blocks = h.blocks,
        .log_bytes = pms_undo_capacity(&pool->undo),
        .log_need_bytes = h.log_need,
        .commits = pool->tx.commits,
        .rollbacks = pool->tx.rollbacks,
        .faults = pool->capture.faults,
        .captures = pool->capture.captures,
        .captured_bytes = pool->undo.log.captured_bytes,
        .fences = pool->persist.fences,
        .lines = pool->persist.lines,
        .syncs = pool->persist.syncs,
        .journal_bytes = j.journal_bytes,
        .home_bytes = j.home_bytes,
        .straight_bytes = j.straight_bytes,
        .home_syncs = j.home_syncs,
        .journal_waits = j.waits,
        .own_bytes = pms_map_own_bytes(&pool->map),
        .given_back_bytes = pool->relief.given,
    };
    const struct pms_dirty *d = pms_dirty_first(&pool->undo.dirty);
    for (uint64_t i = 0; i < pool->tx.begun && i < pms_dirty_count(&pool->undo.dirty); i++) {
        stats->hot_ranges += d[i].kind == PMS_DIRTY_HOT;
        stats->hot_bytes += d[i].kind == PMS_DIRTY_HOT ? d[i].len : 0;
    }
    pms_pool_leave(pool);
    return PMS_OK;
}

int pms_is_old(struct pms_pool *pool, int *old, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    *old = pms_sight_is_old(&pool->sight, atomic_load(&pool->tx.epoch));
    pms_pool_leave(pool);
    return PMS_OK;
}
