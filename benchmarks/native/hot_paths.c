/* The engine's hot paths, each a function that does one operation n times: callgrind counts the
 * instructions inside.
 *
 * usage: hot_paths DIR PATH N      (without a PATH: prints their names) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checksum.h"
#include "commit/pool_state.h"
#include "objects/pms.h"

#define ARRAY (64u << 10)

static struct pms_pool *pool;
static struct pms_error error;
static char *array;

static void must(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "hot_paths: %s failed: %s\n", what, error.what);
        exit(1);
    }
}

#define PATH __attribute__((noinline)) void

PATH path_empty_transaction(uint64_t n);
PATH path_empty_transaction(uint64_t n)
{
    while (n--) {
        pms_begin(pool, -1, &error);
        pms_end(pool, 1, &error);
    }
}

PATH path_write_8_bytes(uint64_t n);
PATH path_write_8_bytes(uint64_t n)
{
    struct pms_range range = {(uint64_t)(uintptr_t)array, sizeof n};
    while (n--) {
        pms_begin(pool, -1, &error);
        pms_will_write(pool, &range, 1, &error);
        memcpy(array, &n, sizeof n);
        pms_end(pool, 1, &error);
    }
}

PATH path_hot_page(uint64_t n);
PATH path_hot_page(uint64_t n) /* written in every transaction: captured ahead, no fault */
{
    while (n--) {
        pms_begin(pool, -1, &error);
        memcpy(array, &n, sizeof n);
        pms_end(pool, 1, &error);
    }
}

PATH path_declared_64_kib(uint64_t n);
PATH path_declared_64_kib(uint64_t n)
{
    struct pms_range range = {(uint64_t)(uintptr_t)array, ARRAY};
    while (n--) {
        pms_begin(pool, -1, &error);
        pms_will_write(pool, &range, 1, &error);
        memcpy(array, &n, sizeof n);
        pms_end(pool, 1, &error);
    }
}

PATH path_put_value(uint64_t n);
PATH path_put_value(uint64_t n)
{
    while (n--) {
        must(pms_object_put_value(pool, 0, "step", 4, (const char *)&n, sizeof n, &error) == PMS_OK,
             "put");
        pms_commit(pool, &error);
    }
}

PATH path_put_array_4_kib(uint64_t n);
PATH path_put_array_4_kib(uint64_t n) /* a new block each time; the old one is freed */
{
    static char source[4096];
    uint64_t off;
    while (n--) {
        memcpy(source, &n, sizeof n);
        must(pms_object_put_array(pool, 0, "copy", 4, "m", 1, sizeof source, PMS_FILL_COPY, source,
                                  sizeof source, 0, &off, &error) == PMS_OK,
             "put");
        pms_commit(pool, &error);
    }
}

PATH path_find(uint64_t n);
PATH path_find(uint64_t n)
{
    struct pms_object found;
    while (n--)
        must(pms_object_find(pool, 0, "array", 5, &found, &error) == PMS_OK, "find");
}

PATH path_allocate_and_free_64_bytes(uint64_t n);
PATH path_allocate_and_free_64_bytes(uint64_t n)
{
    uint64_t off;
    while (n--) {
        pms_begin(pool, -1, &error);
        must(pms_heap_alloc(pool->heap, 64, PMS_OWNER_USER, &off, &error) == PMS_OK, "alloc");
        pms_end(pool, 1, &error);
        pms_begin(pool, -1, &error);
        must(pms_heap_free(pool->heap, off, &error) == PMS_OK, "free");
        pms_end(pool, 1, &error);
    }
}

PATH path_roll_back_8_bytes(uint64_t n);
PATH path_roll_back_8_bytes(uint64_t n)
{
    struct pms_range range = {(uint64_t)(uintptr_t)array, sizeof n};
    while (n--) {
        pms_begin(pool, -1, &error);
        pms_will_write(pool, &range, 1, &error);
        memcpy(array, &n, sizeof n);
        pms_end(pool, 0, &error);
    }
}

PATH path_checksum_4_kib(uint64_t n);
PATH path_checksum_4_kib(uint64_t n)
{
    uint32_t crc = 0;
    while (n--)
        crc = pms_crc32c(crc, array, 4096);
    must(crc != 1, "checksum");
}

static const struct {
    const char *name;
    void (*run)(uint64_t n);
} paths[] = {
    {"path_empty_transaction", path_empty_transaction},
    {"path_write_8_bytes", path_write_8_bytes},
    {"path_hot_page", path_hot_page},
    {"path_declared_64_kib", path_declared_64_kib},
    {"path_put_value", path_put_value},
    {"path_put_array_4_kib", path_put_array_4_kib},
    {"path_find", path_find},
    {"path_allocate_and_free_64_bytes", path_allocate_and_free_64_bytes},
    {"path_roll_back_8_bytes", path_roll_back_8_bytes},
    {"path_checksum_4_kib", path_checksum_4_kib},
};
#define PATHS (sizeof paths / sizeof *paths)

int main(int argc, char **argv)
{
    if (argc != 4) {
        for (size_t i = 0; i < PATHS; i++)
            puts(paths[i].name);
        return 0;
    }
    char file[512];
    struct pms_info info;
    uint64_t off;
    struct pms_options options = {
        .size = 16u << 20, .mode = PMS_MODE_TRUNCATE, .domain = PMS_DOMAIN_PROCESS, .hot = 1};
    snprintf(file, sizeof file, "%s/store", argv[1]);
    must(pms_pool_open(file, &options, &pool, &error) == PMS_OK, "open");
    pms_pool_info(pool, &info);
    must(pms_object_put_array(pool, 0, "array", 5, "m", 1, ARRAY, PMS_FILL_ZERO, NULL, 0, 1, &off,
                              &error) == PMS_OK,
         "array");
    array = (char *)(uintptr_t)info.base + off;
    must(pms_commit(pool, &error) == PMS_OK, "commit");
    for (size_t i = 0; i < PATHS; i++)
        if (!strcmp(paths[i].name, argv[2]))
            paths[i].run((uint64_t)atoi(argv[3]));
    must(pms_pool_close(pool, 1, &error) == PMS_OK, "close");
    pms_pool_release(pool);
    unlink(file);
    return 0;
}
