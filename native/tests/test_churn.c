/* Random allocation and freeing of 16 B to 64 MiB in a whole store, with commits and roll backs:
 * little is lost to fragmentation, nothing leaks, and the check stays clean. A million
 * operations; PMS_CHURN_OPS asks for more or less.
 *
 * PMS_CHURN_GROW=MiB instead lets a store of 64 MiB grow by itself while so much is live, and
 * says how large it got (docs/EXPERIMENTS.md, Growth); PMS_CHURN_LARGEST=bits: blocks of
 * less than two to so many bytes (26). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DEFAULT_OPS 2000
#else
#define DEFAULT_OPS 1000000
#endif

#define FILE_BYTES (1ull << 30)
#define OCCUPANCY 0.85 /* of the data pages: what is freed to make room for */
#define BLOCKS_MAX 100000u
#define COMMIT_EVERY 20u

static char path[256];
static struct pms_pool *pool;
static struct pms_error e;

static struct object {
    uint32_t name;
    bool is_new;
    uint64_t bytes;
} object[BLOCKS_MAX], removed[COMMIT_EVERY * 64];
static uint32_t objects, removals;
static uint64_t live;

static uint64_t rnd(uint64_t below)
{
    static uint64_t x = 88172645463325252ull;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return x % below;
}

static unsigned largest = 26;

static uint64_t random_bytes(void) /* log-uniform from 2^4 to 2^largest */
{
    unsigned bits = 4 + (unsigned)rnd(largest - 4);
    return (1ull << bits) + rnd(1ull << bits);
}

static struct pms_stats stats(void)
{
    struct pms_stats s;
    CHECK(pms_pool_stats(pool, &s, &e) == PMS_OK);
    return s;
}

static void sound(void)
{
    static struct pms_check_report r;
    CHECK(pms_check(pool, &r, &e) == PMS_OK && r.problem_count == 0 && r.names == objects);
    if (r.problem_count)
        printf("  %s\n", r.problem[0]);
}

static bool put(uint32_t name, uint64_t bytes)
{
    uint64_t data;
    char text[16];
    int n = snprintf(text, sizeof text, "%u", name);
    int status = pms_object_put_array(pool, 0, text, (uint32_t)n, "m", 1, bytes, PMS_FILL_NONE,
                                      NULL, 0, 1, &data, &e);
    CHECK(status == PMS_OK || status == PMS_E_FULL);
    if (status != PMS_OK)
        return false;
    object[objects++] = (struct object){name, true, bytes};
    live += bytes;
    return true;
}

static void drop(uint32_t i)
{
    char text[16];
    int n = snprintf(text, sizeof text, "%u", object[i].name);
    CHECK(pms_object_remove(pool, 0, text, (uint32_t)n, &e) == PMS_OK);
    live -= object[i].bytes;
    if (!object[i].is_new)
        removed[removals++] = object[i];
    object[i] = object[--objects];
}

/* The model's side of a commit, or of a roll back. */
static void settle(bool committed)
{
    for (uint32_t i = 0; i < objects;) {
        if (object[i].is_new && !committed) {
            live -= object[i].bytes;
            object[i] = object[--objects];
            continue;
        }
        object[i++].is_new = false;
    }
    for (; removals > 0; removals--) {
        if (committed)
            continue;
        object[objects++] = removed[removals - 1];
        live += removed[removals - 1].bytes;
    }
}

static void finish_transaction(bool commit)
{
    CHECK((commit ? pms_commit(pool, &e) : pms_rollback(pool, &e)) == PMS_OK);
    settle(commit);
}

static void churn(void)
{
    const char *asked = getenv("PMS_CHURN_OPS");
    uint64_t ops = asked ? strtoull(asked, NULL, 10) : DEFAULT_OPS;
    struct pms_options o = {.size = FILE_BYTES,
                            .max_size = FILE_BYTES,
                            .mode = PMS_MODE_TRUNCATE,
                            .domain = PMS_DOMAIN_PROCESS};
    if (pms_pool_open(path, &o, &pool, &e) == PMS_E_OS || e.status == PMS_E_FULL) {
        printf("  skipped: no room for a file of 1 GiB in %s (PMS_TEST_DIR names another folder)\n",
               path);
        return;
    }
    CHECK(pool != NULL);
    struct pms_stats before = stats();
    double room = (double)before.data_bytes;
    uint64_t refused_count = 0;
    for (uint64_t op = 0; op < ops && test_checks_failed == 0; op++) {
        uint64_t bytes = random_bytes();
        while (objects && ((double)(live + bytes) > OCCUPANCY * room || objects == BLOCKS_MAX)) {
            if (removals == sizeof removed / sizeof removed[0])
                finish_transaction(true);
            drop((uint32_t)rnd(objects));
        }
        if (removals) /* what was freed is for the next transaction */
            finish_transaction(true);
        refused_count += !put((uint32_t)op, bytes);
        if (op % COMMIT_EVERY == 0)
            finish_transaction(rnd(10) != 0);
        if (op % (ops / 8) == 0)
            sound();
    }
    finish_transaction(true);
    sound();
    struct pms_stats full = stats();
    /* rounding to classes and pages, slabs, names */
    double lost = 1 - (double)(live + full.free_bytes) / room;
    double refused = (double)refused_count / (double)ops;
    uint32_t name = (uint32_t)ops;
    while (put(name, 64 << 10) && objects < BLOCKS_MAX)
        name++;
    double unusable = 1 - (double)live / room;
    printf("  %llu operations: %.2f %% of requests refused at %.0f %% occupancy, %.2f %% lost to "
           "rounding, %.2f %% of the room cannot be had in "
           "64 KiB pieces\n",
           (unsigned long long)ops, 100 * refused, 100 * OCCUPANCY, 100 * lost, 100 * unusable);
    /* refused: 64 MiB asked of so small a store; test_heap_times.c has the figure for 4 GiB */
    CHECK(lost <= 0.1 && unusable <= 0.1);
    finish_transaction(true);
    sound();
    while (objects) {
        drop(objects - 1);
        if (removals == 1000)
            finish_transaction(true);
    }
    finish_transaction(true);
    sound();
    struct pms_stats after = stats();
    CHECK(after.blocks == before.blocks && after.pinned_bytes == 0); /* nothing leaks */
    printf("  %llu bytes in use before, %llu after\n", (unsigned long long)before.used_bytes,
           (unsigned long long)after.used_bytes);
    CHECK(pms_pool_close(pool, 1, &e) == PMS_OK);
    pms_pool_release(pool);
}

static void growth(void)
{
    const char *asked = getenv("PMS_CHURN_OPS");
    uint64_t ops = asked ? strtoull(asked, NULL, 10) : 30000,
             most = strtoull(getenv("PMS_CHURN_GROW"), NULL, 10) << 20;
    struct pms_options o = {.mode = PMS_MODE_TRUNCATE, .domain = PMS_DOMAIN_PROCESS};
    CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_OK);
    for (uint64_t op = 0; pool && op < ops && test_checks_failed == 0; op++) {
        uint64_t bytes = random_bytes();
        while (objects && (live + bytes > most || objects == BLOCKS_MAX) &&
               removals < sizeof removed / sizeof removed[0])
            drop((uint32_t)rnd(objects));
        CHECK(put((uint32_t)op, bytes));
        if (op % COMMIT_EVERY == 0)
            finish_transaction(true);
    }
    finish_transaction(true);
    sound();
    struct pms_stats s = stats();
    printf("  %llu operations, blocks below 2^%u bytes: live %.0f MiB, file %.0f (%u segments), "
           "its data %.0f, free of that %.0f, largest piece "
           "%.0f\n",
           (unsigned long long)ops, largest, (double)live / 0x1p20, (double)s.file_bytes / 0x1p20,
           pool->super.segment_count, (double)s.data_bytes / 0x1p20, (double)s.free_bytes / 0x1p20,
           (double)s.largest_free_bytes / 0x1p20);
    CHECK(pms_pool_close(pool, 1, &e) == PMS_OK);
    pms_pool_release(pool);
}

int main(void)
{
    if (getenv("PMS_CHURN_LARGEST"))
        largest = (unsigned)strtoul(getenv("PMS_CHURN_LARGEST"), NULL, 10);
    snprintf(path, sizeof path, "%s/pms-test-churn-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    if (getenv("PMS_CHURN_GROW"))
        TEST(growth);
    else
        TEST(churn);
    unlink(path);
    return test_summary();
}
