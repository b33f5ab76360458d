/* A log without a store around it: a planned file in memory, both views, no heap. */
#ifndef PMS_TESTS_UNDO_BENCH_H
#define PMS_TESTS_UNDO_BENCH_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checksum.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "declared.h"
#include "test.h"

#define MIB (1ull << 20)

static uint64_t random_state = 0x2545f4914f6cdd1dull;

static inline uint64_t random64(void) /* xorshift64*: the same sequence in every run */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 2685821657736338717ull;
}

static inline void scramble(unsigned char *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        p[i] = (unsigned char)(random64() >> 56);
}

/* ---- a log without a store around it: a planned file in memory, both views, no heap ---- */

struct bench {
    int fd;
    struct pms_persist persist;
    struct pms_superblock super;
    struct pms_map map;
    struct pms_undo undo;
};

static inline void bench_open(struct bench *b, uint64_t file_bytes, uint64_t growth)
{
    struct pms_error e;
    memset(b, 0, sizeof *b);
    b->persist.flush = pms_persist_best_flush();
    b->fd = memfd_create("undo", MFD_CLOEXEC);
    bool good = pms_super_plan(&b->super, file_bytes, 0, PMS_DOMAIN_EMULATED, 0, &e) == PMS_OK &&
                (!growth || pms_super_plan_growth(&b->super, growth, &e) == PMS_OK) &&
                ftruncate(b->fd, (off_t)b->super.file_bytes) == 0 &&
                pms_map_open(&b->map, b->fd, b->super.file_bytes, 0, PMS_MAP_SHARED, &b->persist,
                             &e) == PMS_OK &&
                pms_undo_open(&b->undo, &b->map, false, &e) == PMS_OK;
    if (!good)
        abort();
    pms_undo_set_extents(&b->undo, &b->super);
    pms_undo_begin(&b->undo, 1);
}

static inline void bench_close(struct bench *b)
{
    pms_undo_close(&b->undo);
    pms_map_close(&b->map);
    close(b->fd);
}

static inline unsigned char *at(const struct bench *b, uint64_t off)
{
    return pms_map_at(&b->map, off);
}

static inline uint64_t data_of(const struct bench *b) { return b->super.segment[0].data_off; }

/* ---- what a reader takes ---- */

#define TAKEN_MAX 4096
struct taken {
    uint32_t count;
    uint64_t bytes;
    struct pms_entry entry[TAKEN_MAX];
    uint64_t image[TAKEN_MAX]; /* from the log's base */
    const struct pms_undo *undo;
};

static inline int take(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct taken *t = ctx;
    if (t->count < TAKEN_MAX) {
        t->entry[t->count] = *entry;
        t->image[t->count] = (uint64_t)((const unsigned char *)image - t->undo->log.base);
    }
    t->bytes += entry->len;
    t->count++;
    return 0;
}

static inline const struct taken *scan(const struct bench *b, uint64_t tag)
{
    static struct taken t;
    t.count = 0;
    t.bytes = 0;
    t.undo = &b->undo;
    CHECK(pms_undo_scan(&b->undo, tag, take, &t) == 0);
    return &t;
}

/* ---- there and back ---- */

static inline unsigned char *copy_of(const struct bench *b, uint64_t off, uint64_t n)
{
    unsigned char *p = malloc(n);
    if (!p)
        abort();
    return memcpy(p, at(b, off), n);
}

/* ---- the order of primitives ---- */

#define TRACE_MAX 4096
struct step {
    enum pms_primitive primitive;
    uintptr_t addr;
    size_t bytes;
};
static struct step trace[TRACE_MAX];
static _Atomic uint32_t steps; /* workers of a parallel copy record too */

static inline int record(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    uint32_t at = atomic_fetch_add(&steps, 1);
    if (at < TRACE_MAX)
        trace[at] = (struct step){primitive, addr, bytes};
    return 0;
}

static inline void trace_start(void)
{
    steps = 0;
    pms_persist_hook = record;
}

static inline bool touches(const struct step *s, const unsigned char *from, uint64_t bytes)
{
    uintptr_t begin = (uintptr_t)from;
    return s->addr < begin + bytes && s->addr + s->bytes > begin;
}

static inline bool in_log(const struct step *s, const struct pms_undo *u)
{
    for (uint32_t i = 0; i < u->log.extent_count; i++)
        if (touches(s, u->log.base + u->log.extent[i].off, u->log.extent[i].bytes))
            return true;
    return false;
}

static inline bool is_store(const struct step *s)
{
    return s->primitive == PMS_PRIM_STORE || s->primitive == PMS_PRIM_COPY;
}

static inline uint32_t count_of(enum pms_primitive primitive)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < steps; i++)
        n += trace[i].primitive == primitive;
    return n;
}

/* I2, on what was traced: every store to the log is followed by a fence before the step at
 * `until`. */
static inline void check_fenced_before(const struct pms_undo *u, uint32_t until)
{
    bool unfenced = false, any = false;
    for (uint32_t i = 0; i < until; i++) {
        if (trace[i].primitive == PMS_PRIM_FENCE)
            unfenced = false;
        if (is_store(&trace[i]) && in_log(&trace[i], u))
            unfenced = any = true;
    }
    CHECK(any && !unfenced);
}

/* The first step from `from` on that stores into, or changes the protection of, a range; `steps`
 * if there is none. */
static inline uint32_t first_change(uint32_t from, const unsigned char *addr, uint64_t bytes)
{
    uint32_t i = from;
    while (i < steps && !((is_store(&trace[i]) || trace[i].primitive == PMS_PRIM_PROTECT) &&
                          touches(&trace[i], addr, bytes)))
        i++;
    return i;
}

/* How fn ends, in a child. */
static inline int wait_status(void (*fn)(struct bench *b), struct bench *b)
{
    int ws = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        close(STDERR_FILENO);

        fn(b);
        _exit(0);
    }
    waitpid(pid, &ws, 0);
    return ws;
}

/* ---- in a store ---- */

static char path[256];

static inline struct pms_pool *store(int domain, uint64_t size, uint64_t max_size)
{
    struct pms_options o = {
        .size = size, .max_size = max_size, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    struct pms_pool *pool = NULL;
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK) {
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
        abort();
    }
    return pool;
}

#endif
