/* A test that has one store open at a time, in each domain in turn. */
#ifndef PMS_TESTS_ONE_STORE_H
#define PMS_TESTS_ONE_STORE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
static char path[256];
static int domain;
static struct pms_pool *pool;
static struct pms_error e;

static bool ok(int status)
{
    if (status != PMS_OK)
        printf("  status %d errno %d %s\n", e.status, e.sys_errno, e.what);
    return status == PMS_OK;
}

static inline bool open_store(int mode)
{
    struct pms_options o = {.size = 4u << 20, .mode = mode, .domain = domain, .hot = 1};
    return ok(pms_pool_open(path, &o, &pool, &e));
}

static void close_store(void)
{
    CHECK(ok(pms_pool_close(pool, 0, &e)));
    pms_pool_release(pool);
}

static unsigned char *memory(uint64_t off)
{
    struct pms_info info;
    pms_pool_info(pool, &info);
    return (unsigned char *)(uintptr_t)(info.base + off);
}

/* The idle one of these slots may be written from now on. */
static inline int open_next(const char *name)
{
    struct pms_object o;
    int status = pms_slot_get(pool, 0, name, (uint32_t)strlen(name), PMS_SLOT_NEXT, &o, &e);
    if (status == PMS_OK)
        pms_unpin(pool, o.data);
    return status;
}

#endif
