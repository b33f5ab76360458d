/* Many arrays in a store of domain file, and how much memory the process has of its own. */
#ifndef PMS_TESTS_MANY_ARRAYS_H
#define PMS_TESTS_MANY_ARRAYS_H

#include "pool_store.h"

#define MIB (1ull << 20)
#define SHARE (16 * MIB) /* of pages of the process's own */
#define ARRAYS 48
#define BYTES (2 * MIB)
#define WORDS (BYTES / 4)

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define RSS_TELLS false
#define STRIDE 64 /* words: each page is written and looked at, in part */
#else
#define RSS_TELLS true
#define STRIDE 1
#endif

static struct pms_pool *pool;
static struct pms_error e;
static uint32_t *at[ARRAYS];
static uint64_t offset[ARRAYS];

static inline bool ok(int status)
{
    if (status != PMS_OK)
        printf("  status %d errno %d %s\n", e.status, e.sys_errno, e.what);
    return status == PMS_OK;
}

static inline uint64_t anonymous(void) /* bytes that the process has */
{
    char line[200];
    uint64_t kib = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, "RssAnon:", 8) == 0)
            kib = strtoull(line + 8, NULL, 10);
    if (f)
        fclose(f);
    return kib << 10;
}

static inline void name_of(int i, char name[8]) { snprintf(name, 8, "%d", i); }

static inline void write_array(int i, uint32_t value)
{
    for (uint64_t w = 0; w < WORDS; w += STRIDE)
        at[i][w] = value + (uint32_t)w;
}

static inline bool array_is(const uint32_t *words, uint32_t value)
{
    for (uint64_t w = 0; w < WORDS; w += STRIDE)
        if (words[w] != value + (uint32_t)w)
            return false;
    return true;
}

static inline bool all_are(uint32_t value)
{
    for (int i = 0; i < ARRAYS; i++)
        if (!array_is(at[i], value + (uint32_t)i))
            return false;
    return true;
}

static inline void make(int i)
{
    char name[8];
    name_of(i, name);
    at[i] = array(pool, name, WORDS, &offset[i]);
}

static inline void find_all(void)
{
    for (int i = 0; i < ARRAYS; i++) {
        char name[8];
        struct pms_object o;
        name_of(i, name);
        CHECK(ok(pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e)));
        offset[i] = o.data;
        at[i] = (uint32_t *)(void *)(pool->map.user + o.data);
    }
}

#endif
