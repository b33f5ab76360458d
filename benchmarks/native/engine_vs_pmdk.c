/* The engine beside libpmemobj, in one process, rounds interleaved. Prints one JSON row per
 * method and case.
 *
 * usage: engine_vs_pmdk DIR ROUNDS [quick]     (DIR on tmpfs; PMEM_IS_PMEM_FORCE=1; with
 * count_pmem.so preloaded, counts alone; quick: blocks of three sizes instead of eleven) */
#include <libpmemobj.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* the allocator without names, which libpmemobj does not have either */
#include "commit/pool_state.h"
#include "objects/pms.h"

#define ROUNDS_MAX 1000
#define SMALL_TX 1000 /* transactions of one small round */
#define LARGE (256ull << 20)
#define ARENA (1ull << 20)
#define ALLOC_MAX 256 /* blocks at once */

/* Of count_pmem.c, if it is preloaded. */
extern void pmem_counts(uint64_t *fences, uint64_t *lines) __attribute__((weak));

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void must(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "engine_vs_pmdk: %s failed\n", what);
        exit(1);
    }
}

/* ---- what is compared: a way of doing one thing n times ---- */

struct side { /* one store or pool */
    struct pms_pool *mine;
    PMEMobjpool *theirs;
    char *arena; /* ARENA bytes */
    char *large; /* LARGE bytes, or NULL */
    const char *source;
    bool declared;
};

struct way {
    const char *method, *durability;
    struct side *side;
    void (*run)(struct side *s, uint64_t bytes, uint64_t n);
};

static void counts_of(const struct side *s, uint64_t *fences, uint64_t *lines)
{
    *fences = *lines = 0;
    if (s->mine) {
        *fences = s->mine->persist.fences;
        *lines = s->mine->persist.lines;
    } else if (s->theirs && pmem_counts) {
        pmem_counts(fences, lines);
    }
}

/* Interleaved rounds of all ways; one row each. */
static void compare(const char *name, const struct way *ways, int count, uint64_t bytes, uint64_t n,
                    int rounds)
{
    static double us[8][ROUNDS_MAX];
    must(count <= 8 && rounds <= ROUNDS_MAX, "compare");
    uint64_t fences[8] = {0}, lines[8] = {0};
    for (int i = -2; i < rounds; i++) { /* the first two warm up */
        for (int w = 0; w < count; w++) {
            uint64_t f0, l0, f1, l1;
            counts_of(ways[w].side, &f0, &l0);
            double t = now();
            ways[w].run(ways[w].side, bytes, n);
            us[w][i < 0 ? 0 : i] = (now() - t) / (double)n;
            counts_of(ways[w].side, &f1, &l1);
            fences[w] = f1 - f0;
            lines[w] = l1 - l0;
        }
    }
    for (int w = 0; w < count; w++) {
        qsort(us[w], (size_t)rounds, sizeof **us, by_value);
        printf(
            "{\"method\": \"%s\", \"case\": \"%s\", \"median_us\": %.4f, \"min_us\": %.4f, \"max_us\": %.4f, "
            "\"durability\": \"%s\", \"extra\": {",
            ways[w].method, name, us[w][rounds / 2], us[w][0], us[w][rounds - 1],
            ways[w].durability);
        if (ways[w].side->mine || (ways[w].side->theirs && pmem_counts))
            printf("\"fences\": %.2f, \"lines\": %.2f", (double)fences[w] / (double)n,
                   (double)lines[w] / (double)n);
        printf("}}\n");
    }
    fflush(stdout);
}

/* ---- transactions ---- */

static void mine_empty(struct side *s, uint64_t bytes, uint64_t n)
{
    struct pms_error e;
    (void)bytes;
    for (uint64_t i = 0; i < n; i++) {
        pms_begin(s->mine, -1, &e);
        pms_end(s->mine, 1, &e);
    }
}

static void pmdk_empty(struct side *s, uint64_t bytes, uint64_t n)
{
    (void)bytes;
    for (uint64_t i = 0; i < n; i++) {
        TX_BEGIN(s->theirs) {}
        TX_END
    }
}

/* Declare (snapshot), overwrite, commit. */
static void mine_snapshot(struct side *s, uint64_t bytes, uint64_t n)
{
    struct pms_error e;
    struct pms_range r = {(uint64_t)(uintptr_t)s->arena, bytes};
    for (uint64_t i = 0; i < n; i++) {
        pms_begin(s->mine, -1, &e);
        pms_will_write(s->mine, &r, 1, &e);
        memset(s->arena, (int)i + 1, bytes);
        pms_end(s->mine, 1, &e);
    }
}

static void pmdk_snapshot(struct side *s, uint64_t bytes, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        TX_BEGIN(s->theirs)
        {
            pmemobj_tx_add_range_direct(s->arena, bytes);
            memset(s->arena, (int)i + 1, bytes);
        }
        TX_END
    }
}

/* ---- blocks: n allocations and n frees, each in a transaction of its own. Times are of a pair
 * ---- */

static void mine_alloc_free(struct side *s, uint64_t bytes, uint64_t n)
{
    static uint64_t off[ALLOC_MAX];
    struct pms_error e;
    for (uint64_t i = 0; i < n; i++) {
        pms_begin(s->mine, -1, &e);
        must(pms_heap_alloc(s->mine->heap, bytes, PMS_OWNER_USER, &off[i], &e) == PMS_OK,
             "pms_heap_alloc");
        pms_end(s->mine, 1, &e);
    }
    for (uint64_t i = 0; i < n; i++) {
        pms_begin(s->mine, -1, &e);
        must(pms_heap_free(s->mine->heap, off[i], &e) == PMS_OK, "pms_heap_free");
        pms_end(s->mine, 1, &e);
    }
}

static void mine_named(struct side *s, uint64_t bytes, uint64_t n)
{
    struct pms_error e;
    uint64_t off;
    for (uint64_t i = 0; i < n; i++) {
        char name[16];
        uint32_t length = (uint32_t)snprintf(name, sizeof name, "%u", (unsigned)i);
        pms_begin(s->mine, -1, &e);
        must(pms_object_put_array(s->mine, 0, name, length, "m", 1, bytes, PMS_FILL_NONE, NULL, 0,
                                  1, &off, &e) == PMS_OK,
             "put");
        pms_end(s->mine, 1, &e);
    }
    for (uint64_t i = 0; i < n; i++) {
        char name[16];
        uint32_t length = (uint32_t)snprintf(name, sizeof name, "%u", (unsigned)i);
        pms_begin(s->mine, -1, &e);
        must(pms_object_remove(s->mine, 0, name, length, &e) == PMS_OK, "remove");
        pms_end(s->mine, 1, &e);
    }
}

static void pmdk_alloc_free(struct side *s, uint64_t bytes, uint64_t n)
{
    static PMEMoid oid[ALLOC_MAX];
    for (uint64_t i = 0; i < n; i++) {
        TX_BEGIN(s->theirs) { oid[i] = pmemobj_tx_alloc(bytes, 7); }
        TX_END
        must(!OID_IS_NULL(oid[i]), "pmemobj_tx_alloc");
    }
    for (uint64_t i = 0; i < n; i++) {
        TX_BEGIN(s->theirs) { pmemobj_tx_free(oid[i]); }
        TX_END
    }
}

/* ---- two threads, each with a word of its own ---- */

struct worker {
    struct side *side;
    uint64_t n;
    int number;
};

static void *mine_worker(void *arg)
{
    struct worker *w = arg;
    struct pms_error e;
    char *own = w->side->arena + 4096 * w->number;
    struct pms_range r = {(uint64_t)(uintptr_t)own, 8};
    for (uint64_t i = 0; i < w->n; i++) {
        pms_begin(w->side->mine, -1, &e);
        pms_will_write(w->side->mine, &r, 1, &e);
        memcpy(own, &i, 8);
        pms_end(w->side->mine, 1, &e);
    }
    return NULL;
}

static void *pmdk_worker(void *arg)
{
    struct worker *w = arg;
    uint64_t *p = (uint64_t *)(void *)(w->side->arena + 4096 * w->number);
    for (uint64_t i = 0; i < w->n; i++) {
        TX_BEGIN(w->side->theirs)
        {
            pmemobj_tx_add_range_direct(p, 8);
            *p = i;
        }
        TX_END
    }
    return NULL;
}

static void two_threads(struct side *s, uint64_t n, void *(*work)(void *))
{
    pthread_t t[2];
    struct worker w[2] = {{s, n / 2, 1}, {s, n / 2, 2}};
    for (int i = 0; i < 2; i++)
        must(pthread_create(&t[i], NULL, work, &w[i]) == 0, "pthread_create");
    for (int i = 0; i < 2; i++)
        pthread_join(t[i], NULL);
}

static void mine_threads(struct side *s, uint64_t bytes, uint64_t n)
{
    (void)bytes;
    two_threads(s, n, mine_worker);
}

static void pmdk_threads(struct side *s, uint64_t bytes, uint64_t n)
{
    (void)bytes;
    two_threads(s, n, pmdk_worker);
}

/* ---- one large array ---- */

static void mine_large(struct side *s, uint64_t bytes, uint64_t n)
{
    struct pms_error e;
    struct pms_range r = {(uint64_t)(uintptr_t)s->large, bytes};
    (void)n;
    pms_begin(s->mine, -1, &e);
    if (s->declared)
        pms_will_write(s->mine, &r, 1, &e);
    memcpy(s->large, s->source, bytes);
    pms_end(s->mine, 1, &e);
}

static void pmdk_large(struct side *s, uint64_t bytes, uint64_t n)
{
    (void)n;
    TX_BEGIN(s->theirs)
    {
        pmemobj_tx_add_range_direct(s->large, bytes);
        memcpy(s->large, s->source, bytes);
    }
    TX_END
}

static void plain_large(struct side *s, uint64_t bytes, uint64_t n)
{
    (void)n;
    memcpy(s->large, s->source, bytes);
}

/* ---- making the sides ---- */

static struct side open_mine(const char *dir, int domain, uint64_t size, bool large)
{
    struct side s = {0};
    char path[512];
    struct pms_error e;
    struct pms_info info;
    uint64_t off;
    struct pms_options o = {.size = size, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    snprintf(path, sizeof path, "%s/store", dir);
    must(pms_pool_open(path, &o, &s.mine, &e) == PMS_OK, "open");
    pms_pool_info(s.mine, &info);
    must(pms_object_put_array(s.mine, 0, "a", 1, "m", 1, ARENA, PMS_FILL_ZERO, NULL, 0, 1, &off,
                              &e) == PMS_OK,
         "arena");
    s.arena = (char *)(uintptr_t)info.base + off;
    if (large) {
        must(pms_object_put_array(s.mine, 0, "l", 1, "m", 1, LARGE, PMS_FILL_ZERO, NULL, 0, 1, &off,
                                  &e) == PMS_OK,
             "large");
        s.large = (char *)(uintptr_t)info.base + off;
    }
    must(pms_commit(s.mine, &e) == PMS_OK, "commit");
    unlink(path);
    return s;
}

static struct side open_theirs(const char *dir, uint64_t size, bool large)
{
    struct side s = {0};
    char path[512];
    PMEMoid oid;
    snprintf(path, sizeof path, "%s/pmdk", dir);
    s.theirs = pmemobj_create(path, "bench", size, 0600);
    must(s.theirs != NULL, "pmemobj_create");
    unlink(path);
    must(pmemobj_zalloc(s.theirs, &oid, ARENA, 1) == 0, "pmemobj_zalloc");
    s.arena = pmemobj_direct(oid);
    if (large) {
        must(pmemobj_zalloc(s.theirs, &oid, LARGE, 2) == 0, "pmemobj_zalloc");
        s.large = pmemobj_direct(oid);
    }
    return s;
}

static void close_side(struct side *s)
{
    struct pms_error e;
    if (s->theirs)
        pmemobj_close(s->theirs);
    if (s->mine) {
        pms_pool_close(s->mine, 1, &e);
        pms_pool_release(s->mine);
    }
}

/* ---- the questions ---- */

/* on tmpfs; on persistent memory the same instructions survive a power failure */
#define PM "kill-safe"
#define KILL "kill-safe"

static void transactions(const char *dir, int rounds)
{
    struct side theirs = open_theirs(dir, 64ull << 20, false),
                emulated = open_mine(dir, PMS_DOMAIN_EMULATED, 64ull << 20, false),
                process = open_mine(dir, PMS_DOMAIN_PROCESS, 64ull << 20, false);
    const struct way empty[] = {{"libpmemobj", PM, &theirs, pmdk_empty},
                                {"pmstore emulated", PM, &emulated, mine_empty}};
    compare("empty transaction", empty, 2, 0, SMALL_TX, rounds);
    const struct way snapshot[] = {{"libpmemobj", PM, &theirs, pmdk_snapshot},
                                   {"pmstore emulated, declared", PM, &emulated, mine_snapshot},
                                   {"pmstore process, declared", KILL, &process, mine_snapshot}};
    compare("8 B snapshot, overwrite, commit", snapshot, 3, 8, SMALL_TX, rounds);
    compare("64 B snapshot, overwrite, commit", snapshot, 3, 64, SMALL_TX, rounds);
    compare("4 KiB snapshot, overwrite, commit", snapshot, 3, 4096, SMALL_TX / 4, rounds);
    compare("1 MiB snapshot, overwrite, commit", snapshot, 3, ARENA, 4, rounds);
    const struct way threads[] = {{"libpmemobj", PM, &theirs, pmdk_threads},
                                  {"pmstore emulated, declared", PM, &emulated, mine_threads}};
    compare("8 B, 2 threads, time a transaction", threads, 2, 8, SMALL_TX, rounds);
    close_side(&theirs);
    close_side(&emulated);
    close_side(&process);
}

static void blocks(const char *dir, int rounds, bool quick)
{
    static const uint64_t sizes[] = {16,        64,      256,     1 << 10,  4 << 10, 32 << 10,
                                     256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};
    static const char *const names[] = {"16 B",    "64 B",  "256 B", "1 KiB",  "4 KiB", "32 KiB",
                                        "256 KiB", "1 MiB", "4 MiB", "16 MiB", "64 MiB"};
    struct side theirs = open_theirs(dir, 400ull << 20, false),
                emulated = open_mine(dir, PMS_DOMAIN_EMULATED, 700ull << 20, false);
    struct side process = open_mine(dir, PMS_DOMAIN_PROCESS, 700ull << 20, false);
    const struct way ways[] = {{"libpmemobj", PM, &theirs, pmdk_alloc_free},
                               {"pmstore emulated", PM, &emulated, mine_alloc_free},
                               {"pmstore process", KILL, &process, mine_alloc_free},
                               {"pmstore emulated, with a name", PM, &emulated, mine_named}};
    for (int i = 0; i < (int)(sizeof sizes / sizeof *sizes); i += quick ? 5 : 1) {
        uint64_t fit = (256ull << 20) / sizes[i], n = fit < ALLOC_MAX ? fit : ALLOC_MAX;
        char name[64];
        snprintf(name, sizeof name, "allocate and free %s, two transactions", names[i]);
        compare(name, ways, 4, sizes[i], n, rounds);
    }
    close_side(&theirs);
    close_side(&emulated);
    close_side(&process);
}

static void large(const char *dir, char *source, int rounds)
{
    char *dst = mmap(NULL, LARGE, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    must(dst != MAP_FAILED, "mmap");
    struct side plain = {.large = dst, .source = source};
    struct side theirs = open_theirs(dir, 900ull << 20, true);
    struct side emulated = open_mine(dir, PMS_DOMAIN_EMULATED, 700ull << 20, true);
    struct side process = open_mine(dir, PMS_DOMAIN_PROCESS, 700ull << 20, true);
    struct side faulted_emulated = emulated, faulted_process = process;
    theirs.source = emulated.source = process.source = faulted_emulated.source =
        faulted_process.source = source;
    emulated.declared = process.declared = true;
    const struct way ways[] = {{"memcpy", "none", &plain, plain_large},
                               {"libpmemobj", PM, &theirs, pmdk_large},
                               {"pmstore emulated, declared", PM, &emulated, mine_large},
                               {"pmstore process, declared", KILL, &process, mine_large},
                               {"pmstore emulated, faulted", PM, &faulted_emulated, mine_large},
                               {"pmstore process, faulted", KILL, &faulted_process, mine_large}};
    compare("256 MiB overwrite", ways, 6, LARGE, 1, rounds);
    close_side(&theirs);
    close_side(&emulated);
    close_side(&process);
    munmap(dst, LARGE);
}

int main(int argc, char **argv)
{
    must(argc == 3 || argc == 4, "usage: engine_vs_pmdk DIR ROUNDS [quick]");
    int rounds = atoi(argv[2]);
    bool quick = argc == 4;
    char *source = mmap(NULL, LARGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    must(source != MAP_FAILED, "mmap");
    memset(source, 1, LARGE);
    for (uint64_t i = 0; i < ARENA; i++)
        source[i] = (char)(i * 31);
    transactions(argv[1], rounds);
    blocks(argv[1], rounds, quick);
    if (!pmem_counts)
        large(argv[1], source, rounds / 8 > 5 ? rounds / 8 : 5);
    return 0;
}
