/* A store that holds, what is done to it step by step, and its state as a number. */
#ifndef PMS_TESTS_HOLD_FIXTURE_H
#define PMS_TESTS_HOLD_FIXTURE_H

#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define SLOT_BYTES (96u << 10) /* an extent of its own */

static char path[256];
static int domain;

#define MUST(call)                                                        \
    do {                                                                  \
        if ((call) != PMS_OK) {                                           \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, e.what); \
            fflush(stdout);                                               \
            abort();                                                      \
        }                                                                 \
    } while (0)

/* ---- state as a number ---- */

static uint32_t digest_directory(struct pms_pool *pool, uint64_t dir, uint32_t crc);

/* the idle one of two slots is noise */
static uint32_t digest_group(struct pms_pool *pool, const struct pms_object *o, uint32_t crc)
{
    struct pms_object slot;
    struct pms_error e;
    if (o->meta_bytes == 0)
        return digest_directory(pool, o->data, crc);
    const char *name = o->meta[o->meta_bytes - 1] ? "1" : "0";
    MUST(pms_object_find(pool, o->data, name, 1, &slot, &e));
    return pms_crc32c(crc, pool->map.user + slot.data, slot.data_bytes);
}

static uint32_t digest_directory(struct pms_pool *pool, uint64_t dir, uint32_t crc)
{
    uint64_t node = 0;
    struct pms_error e;
    for (;;) {
        struct pms_object o;
        if (pms_object_next(pool, dir, &node, &o, &e) != PMS_OK || node == 0)
            return crc;
        crc = pms_crc32c(crc, o.name, o.name_bytes);
        crc = pms_crc32c(crc, o.meta, o.meta_bytes);
        if (o.kind == PMS_OBJECT_ARRAY && o.data)
            crc = pms_crc32c(crc, pool->map.user + o.data, o.data_bytes);
        if (o.kind == PMS_OBJECT_GROUP)
            crc = digest_group(pool, &o, crc);
    }
}

static uint32_t digest(struct pms_pool *pool) { return digest_directory(pool, 0, 0) | 1; }

/* ---- the store ---- */

static struct pms_pool *open_as(int mode, int hold)
{
    struct pms_options o = {.size = 4 << 20,
                            .mode = mode,
                            .domain = mode == PMS_MODE_READ ? 0 : domain,
                            .hot = 1,
                            .hold = hold};
    struct pms_pool *pool = NULL;
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        printf("open %s: %d %d %s\n", path, e.status, e.sys_errno, e.what);
    return pool;
}

static void shut(struct pms_pool *pool, int commit)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, commit, &e) == PMS_OK);
    pms_pool_release(pool);
}

static unsigned char *bytes_of(struct pms_pool *pool, const char *name)
{
    struct pms_object o;
    struct pms_error e;
    MUST(pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e));
    return pool->map.user + o.data;
}

static __attribute__((unused)) bool has(struct pms_pool *pool, const char *name)
{
    struct pms_object o;
    struct pms_error e;
    return pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e) == PMS_OK;
}

static uint64_t put_array(struct pms_pool *pool, const char *name, uint64_t bytes, uint8_t fill)
{
    struct pms_error e;
    uint64_t data;
    MUST(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "f", 1, bytes,
                              PMS_FILL_PATTERN, &fill, 1, 0, &data, &e));
    return data;
}

static void put_value(struct pms_pool *pool, const char *name, const char *value)
{
    struct pms_error e;
    MUST(pms_object_put_value(pool, 0, name, (uint32_t)strlen(name), value, (uint32_t)strlen(value),
                              &e));
}

static void del(struct pms_pool *pool, const char *name)
{
    struct pms_error e;
    MUST(pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e));
}

static void commit(struct pms_pool *pool)
{
    struct pms_error e;
    MUST(pms_commit(pool, &e));
}

static void back(struct pms_pool *pool)
{
    struct pms_error e;
    MUST(pms_back(pool, &e));
}

/* the next version of the slots "w", opened and filled */
static void fill_next(struct pms_pool *pool, int value)
{
    struct pms_object o;
    struct pms_error e;
    MUST(pms_slot_get(pool, 0, "w", 1, PMS_SLOT_NEXT, &o, &e));
    memset(pool->map.user + o.data, value, SLOT_BYTES);
    pms_unpin(pool, o.data);
}

static void flip(struct pms_pool *pool)
{
    struct pms_error e;
    MUST(pms_slot_flip(pool, 0, "w", 1, NULL, &e));
}

static void make_store(int hold)
{
    struct pms_pool *pool = open_as(PMS_MODE_TRUNCATE, hold);
    struct pms_error e;
    put_array(pool, "small", 64, 1);
    put_array(pool, "beside", 64, 2);
    put_array(pool, "medium", 12000, 3);
    put_array(pool, "large", 160000, 4);
    put_value(pool, "value", "one");
    MUST(pms_object_make_slots(pool, 0, "w", 1, "\x81\xa5slots", 8, "m", 1, SLOT_BYTES, 0, &e));
    commit(pool);
    put_value(pool, "value", "two");
    commit(pool);
    shut(pool, 1);
}

#endif
