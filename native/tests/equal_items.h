/* Arrays all of whose items are one number, so that half a version can be told from a whole one. */
#ifndef PMS_TESTS_EQUAL_ITEMS_H
#define PMS_TESTS_EQUAL_ITEMS_H

#include <stdlib.h>
#include <string.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define ITEMS 3000u

static char path[256];

static inline uint64_t *array(struct pms_pool *p, uint64_t off)
{
    struct pms_info info;
    pms_pool_info(p, &info);
    return (uint64_t *)(uintptr_t)(info.base + off);
}

static inline uint64_t put(struct pms_pool *p, const char *name, uint64_t items, uint64_t value)
{
    uint64_t off = 0;
    uint64_t *source = malloc(items * 8);
    struct pms_error e;
    for (uint64_t i = 0; i < items; i++)
        source[i] = value;
    CHECK(pms_object_put_array(p, 0, name, (uint32_t)strlen(name), "m", 1, items * 8, PMS_FILL_COPY,
                               source, items * 8, 0, &off, &e) == PMS_OK);
    free(source);
    return off;
}

#endif
