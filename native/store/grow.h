/* Growing a store. REQUIRES in all: the operation lock. */
#ifndef PMS_STORE_GROW_H
#define PMS_STORE_GROW_H

#include "commit/pool.h"
#include "heap/heap.h"

/* Makes room for a block of bytes by growing the file. ERRORS: PMS_E_FULL, PMS_E_OS. */
int pms_pool_grow(struct pms_pool *pool, uint64_t bytes, struct pms_error *error);

/* Makes room for the logs of two transactions, so that logs can be cut in halves (I5). They are not
 * yet. ERRORS: PMS_E_FULL, PMS_E_OS. */
int pms_pool_grow_for_halves(struct pms_pool *pool, struct pms_error *error);

/* A block, the file grown if need be. ERRORS: PMS_E_FULL, PMS_E_OS. */
int pms_pool_allocate(struct pms_pool *pool, uint64_t bytes, enum pms_owner owner, uint64_t *off,
                      struct pms_error *error);

/* A block of slots: no log is backed for it. Marked in the page table; the superblock says first
 * that there are such marks. ERRORS: as above. */
int pms_pool_allocate_slot(struct pms_pool *pool, uint64_t bytes, uint64_t *off,
                           struct pms_error *error);

#endif
