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

/* A declared write of which the engine does the storing: captured by 32-byte granule, stored
 * through its own view, so that no page of the user's is unprotected and the log gets a line,
 * not a page. For small scattered writes from C. addr is in the user's view.
 * ERRORS: PMS_E_INVALID: not inside an array; PMS_E_READONLY, PMS_E_CLOSED, PMS_E_FORKED. */
int pms_write(struct pms_pool *pool, void *addr, const void *src, uint64_t bytes,
              struct pms_error *error);

#endif
