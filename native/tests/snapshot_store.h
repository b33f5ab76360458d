/* A store whose arrays are known as of its last commit. */
#ifndef PMS_TESTS_SNAPSHOT_STORE_H
#define PMS_TESTS_SNAPSHOT_STORE_H

#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "flush/filling.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "store/grow.h"
#include "log/snapshot_state.h"
#include "declared.h"
#include "test.h"
#include "flush/chunks.h"

#define NAMES 24
#ifdef __SANITIZE_THREAD__
#define SHARE 4 /* of the steps: everything is that much slower */
#else
#define SHARE 1
#endif

static char path[256];
static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
static int domain;

struct image { /* of one array as of a commit */
    uint64_t off, bytes;
    unsigned char *content; /* NULL: there is no such array */
};
struct model {
    struct image array[NAMES];
    uint64_t epoch;
};

static struct pms_pool *pool;
static struct model committed;

static inline uint32_t draw(uint64_t *state, uint32_t n)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33) % n;
}

static inline struct pms_pool *open_store(const char *where, int mode, uint64_t bytes)
{
    struct pms_options o = {.size = bytes,
                            .mode = mode,
                            .domain = mode == PMS_MODE_TRUNCATE ? domain : PMS_DOMAIN_AUTO,
                            .hot = 1};
    struct pms_pool *p = NULL;
    struct pms_error e = {0};
    if (pms_pool_open(where, &o, &p, &e) != PMS_OK)
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
    return p;
}

static inline unsigned char *memory(uint64_t off)
{
    struct pms_info info;
    pms_pool_info(pool, &info);
    return (unsigned char *)(uintptr_t)(info.base + off);
}

static inline void model_free(struct model *m)
{
    for (int i = 0; i < NAMES; i++)
        free(m->array[i].content);
    memset(m, 0, sizeof *m);
}

static inline bool find(int i, struct pms_object *o)
{
    char name[8];
    struct pms_error e;
    int n = snprintf(name, sizeof name, "a%d", i);
    return pms_object_find(pool, 0, name, (uint32_t)n, o, &e) == PMS_OK;
}

/* What is in the arrays now becomes what was committed. */
static inline void model_take(void)
{
    model_free(&committed);
    for (int i = 0; i < NAMES; i++) {
        struct pms_object o;
        if (!find(i, &o))
            continue;
        committed.array[i] = (struct image){o.data, o.data_bytes, malloc(o.data_bytes)};
        memcpy(committed.array[i].content, memory(o.data), o.data_bytes);
    }
    committed.epoch = pms_epoch(pool);
}

static inline struct model *model_copy(void)
{
    struct model *m = malloc(sizeof *m);
    *m = committed;
    for (int i = 0; i < NAMES; i++) {
        if (!m->array[i].content)
            continue;
        m->array[i].content = malloc(m->array[i].bytes);
        memcpy(m->array[i].content, committed.array[i].content, m->array[i].bytes);
    }
    return m;
}

/* ---- the writer ---- */

static inline void make(int i, uint64_t bytes, uint64_t *seed)
{
    char name[8];
    struct pms_error e;
    uint64_t data, pattern = draw(seed, 1000000) * 0x9e3779b97f4a7c15ull;
    int n = snprintf(name, sizeof name, "a%d", i);
    int status = pms_object_put_array(pool, 0, name, (uint32_t)n, "m", 1, bytes, PMS_FILL_PATTERN,
                                      &pattern, 8, 0, &data, &e);
    if (status != PMS_OK)
        printf("put: %d %s\n", e.status, e.what);
    CHECK(status == PMS_OK);
}

static inline void change(uint64_t *seed)
{
    static const uint64_t sizes[] = {48, 700, 5000, 33000, 70000, 300000, 1100000};
    struct pms_object o;
    struct pms_error e;
    int i = (int)draw(seed, NAMES);
    bool there = find(i, &o);
    uint32_t what = draw(seed, 10);
    if (!there || what == 0) {
        make(i, sizes[draw(seed, 7)] + draw(seed, 64), seed);
    } else if (what == 1) {
        char name[8];
        int n = snprintf(name, sizeof name, "a%d", i);
        CHECK(pms_object_remove(pool, 0, name, (uint32_t)n, &e) == PMS_OK);
    } else if (what == 2) { /* declared */
        unsigned char bytes[40];
        memset(bytes, (int)draw(seed, 256), sizeof bytes);
        uint64_t n = o.data_bytes < sizeof bytes ? o.data_bytes : sizeof bytes;
        uint64_t at = draw(seed, (uint32_t)(o.data_bytes - n + 1));
        CHECK(declared_write(pool, memory(o.data) + at, bytes, n, &e) == PMS_OK);
    } else if (what < 6) { /* all of it */
        memset(memory(o.data), (int)draw(seed, 256), o.data_bytes);
    } else { /* here and there */
        for (int k = 0; k < 20; k++)
            memory(o.data)[draw(seed, (uint32_t)o.data_bytes)] = (unsigned char)draw(seed, 256);
    }
}

#endif
