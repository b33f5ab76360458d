/* Declared writes. */
#ifndef PMS_COMMIT_WRITE_H
#define PMS_COMMIT_WRITE_H

#include "commit/pool.h"

/* Captures ranges of the user's view before they are written: pairs of address and length.
 * Ranges outside the store are PMS_E_INVALID. One fence for all. */
struct pms_range {
    uint64_t addr, bytes;
};
int pms_will_write(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count,
                   struct pms_error *error);

/* Whether a byte of the ranges is another than in the last commit: compares what was captured of
 * them. What is written without capture (idle slots) is not seen. No ranges: whether anything was
 * written or captured at all. */
int pms_written(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count,
                int32_t *written, struct pms_error *error);

/* A sum over what is pending, to see whether any of it is written again: of all that was written or
 * captured since the last commit, and of each of the ranges, of which its first bytes, some in its
 * middle and its last ones are enough (who gives them has other means as well). known = 0, and no
 * sum, if more than `most` bytes are pending beside the ranges. */
int pms_pending_sum(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count,
                    uint64_t most, uint32_t *sum, int32_t *known, struct pms_error *error);

#endif
