/* The engine beside libpmemobj, in one process, rounds interleaved. Prints one JSON row per method and case.
 *
 * usage: engine_vs_pmdk DIR ROUNDS      (DIR on tmpfs; PMEM_IS_PMEM_FORCE=1) */
#include <libpmemobj.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"

#define ROUNDS_MAX 1000
#define SMALL_TX 2000            /* transactions of one small round */
#define LARGE (256ull << 20)

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

static void report(const char *method, const char *name, const char *durability, double *us, int n)
{
    qsort(us, (size_t)n, sizeof *us, by_value);
    printf("{\"method\": \"%s\", \"case\": \"%s\", \"median_us\": %.4f, \"min_us\": %.4f, \"max_us\": %.4f, \"durability\": \"%s\"}\n",
           method, name, us[n / 2], us[0], us[n - 1], durability);
    fflush(stdout);
}

static void must(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "engine_vs_pmdk: %s failed\n", what);
        exit(1);
    }
}

struct mine {
    struct pms_pool *pool;
    char *base;
    uint64_t small, large;
};

static struct mine open_mine(const char *dir, const char *file, int domain)
{
    struct mine m;
    char path[512];
    struct pms_error e;
    struct pms_info info;
    struct pms_options o = {.size = 700ull << 20, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    snprintf(path, sizeof path, "%s/%s", dir, file);
    must(pms_pool_open(path, &o, &m.pool, &e) == PMS_OK, "open");
    must(pms_object_put_array(m.pool, 0, "s", 1, "m", 1, 4096, PMS_FILL_ZERO, NULL, 0, 1, &m.small, &e) == PMS_OK, "small");
    must(pms_object_put_array(m.pool, 0, "l", 1, "m", 1, LARGE, PMS_FILL_ZERO, NULL, 0, 1, &m.large, &e) == PMS_OK, "large");
    must(pms_commit(m.pool, &e) == PMS_OK, "commit");
    unlink(path);
    pms_pool_info(m.pool, &info);
    m.base = (char *)(uintptr_t)info.base;
    return m;
}

/* ---- small transactions ---- */

static double mine_small(struct mine *m)
{
    struct pms_error e;
    volatile uint64_t *p = (volatile uint64_t *)(void *)(m->base + m->small);
    struct pms_range r = {(uint64_t)(uintptr_t)p, 8};
    double t = now();
    for (uint64_t i = 0; i < SMALL_TX; i++) {
        pms_begin(m->pool, -1, &e);
        pms_will_write(m->pool, &r, 1, &e);
        *p += 1;
        pms_end(m->pool, 1, &e);
    }
    return (now() - t) / SMALL_TX;
}

static double mine_engine(struct mine *m)
{
    struct pms_error e;
    uint64_t *p = (uint64_t *)(void *)(m->base + m->small + 2048);
    double t = now();
    for (uint64_t i = 0; i < SMALL_TX; i++) {
        pms_begin(m->pool, -1, &e);
        pms_write(m->pool, p, &i, 8, &e);
        pms_end(m->pool, 1, &e);
    }
    return (now() - t) / SMALL_TX;
}

static double mine_empty(struct mine *m)
{
    struct pms_error e;
    double t = now();
    for (uint64_t i = 0; i < SMALL_TX; i++) {
        pms_begin(m->pool, -1, &e);
        pms_end(m->pool, 1, &e);
    }
    return (now() - t) / SMALL_TX;
}

static double pmdk_small(PMEMobjpool *pop, uint64_t *p)
{
    double t = now();
    for (uint64_t i = 0; i < SMALL_TX; i++) {
        TX_BEGIN(pop) {
            pmemobj_tx_add_range_direct(p, 8);
            *p += 1;
        } TX_END
    }
    return (now() - t) / SMALL_TX;
}

static double pmdk_empty(PMEMobjpool *pop)
{
    double t = now();
    for (uint64_t i = 0; i < SMALL_TX; i++) {
        TX_BEGIN(pop) {
        } TX_END
    }
    return (now() - t) / SMALL_TX;
}

/* ---- one large array ---- */

static double mine_large(struct mine *m, const char *src, int declare)
{
    struct pms_error e;
    char *p = m->base + m->large;
    struct pms_range r = {(uint64_t)(uintptr_t)p, LARGE};
    double t = now();
    pms_begin(m->pool, -1, &e);
    if (declare)
        pms_will_write(m->pool, &r, 1, &e);
    memcpy(p, src, LARGE);
    pms_end(m->pool, 1, &e);
    return now() - t;
}

static double pmdk_large(PMEMobjpool *pop, char *p, const char *src)
{
    double t = now();
    TX_BEGIN(pop) {
        pmemobj_tx_add_range_direct(p, LARGE);
        memcpy(p, src, LARGE);
    } TX_END
    return now() - t;
}

static double plain_large(char *p, const char *src)
{
    double t = now();
    memcpy(p, src, LARGE);
    return now() - t;
}

int main(int argc, char **argv)
{
    static double us[8][ROUNDS_MAX];
    must(argc == 3, "usage: engine_vs_pmdk DIR ROUNDS");
    int rounds = atoi(argv[2]);
    char path[512];
    snprintf(path, sizeof path, "%s/pmdk", argv[1]);
    unlink(path);
    PMEMobjpool *pop = pmemobj_create(path, "bench", 900ull << 20, 0600);
    must(pop != NULL, "pmemobj_create");
    unlink(path);
    PMEMoid small, large;
    must(pmemobj_zalloc(pop, &small, 4096, 1) == 0 && pmemobj_zalloc(pop, &large, LARGE, 2) == 0, "pmemobj_zalloc");
    struct mine emulated = open_mine(argv[1], "emulated", PMS_DOMAIN_EMULATED), process = open_mine(argv[1], "process", PMS_DOMAIN_PROCESS),
                engine = open_mine(argv[1], "engine", PMS_DOMAIN_EMULATED);
    char *src = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    char *dst = mmap(NULL, LARGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    memset(src, 1, LARGE);

    for (int i = -3; i < rounds; i++) { /* the first three warm up */
        int k = i < 0 ? 0 : i;
        us[0][k] = pmdk_small(pop, pmemobj_direct(small));
        us[1][k] = mine_small(&emulated);
        us[2][k] = mine_small(&process);
        us[3][k] = pmdk_empty(pop);
        us[4][k] = mine_empty(&emulated);
        us[5][k] = mine_engine(&engine);
    }
    report("libpmemobj", "8 B add_range + commit", "model of PM", us[0], rounds);
    report("pmstore emulated", "8 B add_range + commit", "model of PM", us[1], rounds);
    report("pmstore process", "8 B add_range + commit", "kill-safe", us[2], rounds);
    report("pmstore emulated, pms_write", "8 B add_range + commit", "model of PM", us[5], rounds);
    report("libpmemobj", "empty", "model of PM", us[3], rounds);
    report("pmstore emulated", "empty", "model of PM", us[4], rounds);

    int few = rounds / 8 > 5 ? rounds / 8 : 5;
    for (int i = -1; i < few; i++) {
        int k = i < 0 ? 0 : i;
        us[0][k] = plain_large(dst, src);
        us[1][k] = pmdk_large(pop, pmemobj_direct(large), src);
        us[2][k] = mine_large(&emulated, src, 1);
        us[3][k] = mine_large(&process, src, 1);
        us[4][k] = mine_large(&process, src, 0);
        us[5][k] = mine_large(&emulated, src, 0);
    }
    report("memcpy", "256 MiB overwrite", "none", us[0], few);
    report("libpmemobj", "256 MiB overwrite", "model of PM", us[1], few);
    report("pmstore emulated declared", "256 MiB overwrite", "model of PM", us[2], few);
    report("pmstore process declared", "256 MiB overwrite", "kill-safe", us[3], few);
    report("pmstore process undeclared", "256 MiB overwrite", "kill-safe", us[4], few);
    report("pmstore emulated undeclared", "256 MiB overwrite", "model of PM", us[5], few);
    pmemobj_close(pop);
    return 0;
}
