/* A store from the outside, in the domain of the round that runs. */
#ifndef PMS_TESTS_POOL_STORE_H
#define PMS_TESTS_POOL_STORE_H

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "declared.h"
#include "test.h"

static char path[256];
static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
static int domain; /* of the round that runs */

static inline struct pms_pool *open_store(int mode, uint64_t size, struct pms_error *e)
{
    struct pms_options o = {.size = size,
                            .mode = mode,
                            .domain = mode == PMS_MODE_READ ? PMS_DOMAIN_AUTO : domain,
                            .hot = 1};
    struct pms_pool *pool = NULL;
    memset(e, 0, sizeof *e);
    int status = pms_pool_open(path, &o, &pool, e);
    CHECK((status == PMS_OK) == (pool != NULL));
    return pool;
}

static inline struct pms_pool *fresh(uint64_t size)
{
    struct pms_error e;
    struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE, size, &e);
    if (!pool)
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
    CHECK(pool != NULL);
    return pool;
}

static inline void shut(struct pms_pool *pool, int commit)
{
    struct pms_error e = {0};
    CHECK(pms_pool_close(pool, commit, &e) == PMS_OK);
    pms_pool_release(pool);
}

static inline uint32_t *array(struct pms_pool *pool, const char *name, uint64_t n, uint64_t *off)
{
    struct pms_error e;
    uint64_t data = 0;
    CHECK(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, n * 4, PMS_FILL_ZERO,
                               NULL, 0, 1, &data, &e) == PMS_OK);
    struct pms_info info;
    pms_pool_info(pool, &info);
    if (off)
        *off = data;
    return (uint32_t *)(uintptr_t)(info.base + data);
}

#endif
