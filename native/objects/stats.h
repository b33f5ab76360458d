/* Facts and figures of a store. */
#ifndef PMS_OBJECTS_STATS_H
#define PMS_OBJECTS_STATS_H

#include "commit/pool.h"

struct pms_stats {
    uint64_t epoch, tx;
    uint64_t file_bytes, data_bytes, used_bytes, free_bytes, pinned_bytes, largest_free_bytes,
        blocks;
    uint64_t log_bytes, log_need_bytes;
    uint64_t commits, rollbacks, faults, captures, captured_bytes;
    uint64_t hot_ranges, hot_bytes;
    uint64_t fences, lines, syncs, protects;
    uint64_t journal_bytes, home_bytes, straight_bytes, home_syncs, journal_waits;
    uint64_t own_bytes, given_back_bytes;
};

/* Whether a reader's view is not, or may not be, the last commit any more: another open shows it.
 * 0 where nobody can commit. ERRORS: PMS_E_CLOSED, PMS_E_FORKED. */
int pms_is_old(struct pms_pool *pool, int *old, struct pms_error *error);

void pms_pool_info(const struct pms_pool *pool, struct pms_info *info);
int pms_pool_stats(struct pms_pool *pool, struct pms_stats *stats, struct pms_error *error);

#endif
