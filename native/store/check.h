/* Check, which reads only, and a repair. */
#ifndef PMS_STORE_CHECK_H
#define PMS_STORE_CHECK_H

#include "commit/pool.h"

#define PMS_CHECK_PROBLEMS 32
struct pms_check_report {
    uint64_t blocks, names, groups, lists, extents;
    uint64_t leaks, leaked_bytes; /* blocks that belong to nobody: each is a problem too */
    uint32_t problem_count;       /* found; the first PMS_CHECK_PROBLEMS are described */
    uint32_t sound_copies;        /* of the superblock: bits 0 and 1. One is enough */
    char problem[PMS_CHECK_PROBLEMS][192];
    /* for who waits, read by another thread meanwhile: owners of blocks that were looked at, and
     * those of them that are names or items of lists */
    uint64_t owners, objects;
};
int pms_check(struct pms_pool *pool, struct pms_check_report *report, struct pms_error *error);

/* Checks, and frees the blocks that belong to nobody; part of the running transaction. ERRORS:
 * PMS_E_CORRUPT: there are other problems too (in the report), nothing was freed. */
int pms_free_leaks(struct pms_pool *pool, struct pms_check_report *report, struct pms_error *error);

#endif
