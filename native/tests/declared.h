/* A write as a user declares it: the range is captured, then stored to. */
#ifndef PMS_TESTS_DECLARED_H
#define PMS_TESTS_DECLARED_H

#include <string.h>

#include "objects/pms.h"

static inline int declared_write(struct pms_pool *pool, void *addr, const void *src, uint64_t bytes,
                                 struct pms_error *error)
{
    struct pms_range r = {(uint64_t)(uintptr_t)addr, bytes};
    int status = pms_will_write(pool, &r, 1, error);
    if (status == PMS_OK)
        memcpy(addr, src, bytes);
    return status;
}

#endif
