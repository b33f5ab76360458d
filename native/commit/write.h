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

#endif
