/* What is where; and the superblock's twin. */
#ifndef PMS_OBJECTS_USAGE_H
#define PMS_OBJECTS_USAGE_H

#include "commit/pool.h"

#define PMS_USAGE_CELLS 64
#define PMS_USAGE_SEGMENTS 60
struct pms_segment_usage {
    uint64_t table_off, log_bytes, data_off, data_bytes;
    uint64_t used_bytes, blocks;
    uint64_t cell[PMS_USAGE_CELLS]; /* bytes in use of each of as many equal parts of the data */
};
/* ERRORS: PMS_E_CORRUPT. */
int pms_usage(struct pms_pool *pool, struct pms_segment_usage usage[PMS_USAGE_SEGMENTS],
              uint32_t *segments, struct pms_error *error);

/* Writes the superblock that is in use into the other copy, durable on return.  CRASH: the copy
 * in use holds. */
int pms_mend_superblock(struct pms_pool *pool, struct pms_error *error);

#endif
