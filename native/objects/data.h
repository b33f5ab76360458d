/* New blocks of the user's. */
#ifndef PMS_OBJECTS_DATA_H
#define PMS_OBJECTS_DATA_H

#include "commit/pool.h"

enum pms_fill {
    PMS_FILL_NONE = 0,
    PMS_FILL_ZERO = 1,
    PMS_FILL_COPY = 2,
    PMS_FILL_PATTERN = 3,
    /* beside one of these: the block is one of a pair of slots, whose log waits until it is
     * captured */
    PMS_FILL_OF_SLOT = 8
};

/* Inside the engine. REQUIRES: the operation lock.
 * A new block of the user's, filled (enum pms_fill); 0 if bytes is. ERRORS: PMS_E_FULL,
 * PMS_E_OS: nothing changed. */
int pms_pool_new_data(struct pms_pool *pool, uint64_t bytes, int fill, const void *src,
                      uint64_t src_bytes, uint64_t *data, struct pms_error *error);

#endif
