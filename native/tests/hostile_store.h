/* Stores that hold some of everything, to be damaged, and children in which they are opened:
 * whatever the bytes, opening, checking, reading and closing ends in an answer. */
#ifndef PMS_TESTS_HOSTILE_STORE_H
#define PMS_TESTS_HOSTILE_STORE_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checksum.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "seal.h"
#include "test.h"

#define SIZE (2u << 20) /* the least that holds some of everything */
#define SECONDS 60      /* for one trial, under any sanitizer: only a hang takes longer */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 5u
#else
#define SLOWER 1u
#endif

static char path[256];

static uint64_t random_state;

static inline uint64_t random64(void) /* xorshift64* */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 2685821657736338717ull;
}

/* ---- the stores to damage ---- */

enum seal {
    PLAIN,
    SEAL_SUPER,
    SEAL_SESSION,
    SEAL_JANCHOR,
    SEAL_ANCHOR,
    SEAL_ENTRY,
    SEAL_PTE,
    SEAL_RECORD
};

struct region {
    const char *name;
    uint64_t off, bytes;
    /* how its checksum is made right again; PLAIN: there is none, or it stays wrong */
    enum seal seal;
    uint64_t sample; /* one bit of step / sample is flipped */
};

#define REGIONS_MAX 128

static struct variant {
    const char *name;
    int domain;
    bool crashed;
    uint64_t bytes;
    unsigned char image[SIZE];
    struct region region[REGIONS_MAX];
    uint32_t regions;
} variants[] = {
    {.name = "process, closed", .domain = PMS_DOMAIN_PROCESS},
    {.name = "process, crashed", .domain = PMS_DOMAIN_PROCESS, .crashed = true},
    {.name = "file, closed", .domain = PMS_DOMAIN_FILE},
    {.name = "file, crashed", .domain = PMS_DOMAIN_FILE, .crashed = true},
};
static struct variant *now; /* the one that runs */

static inline struct pms_pool *open_store(int mode, int domain, struct pms_error *e)
{
    struct pms_options o = {.size = SIZE,
                            .max_size = mode == PMS_MODE_TRUNCATE ? SIZE : 0,
                            .mode = mode,
                            .domain = domain,
                            .hot = 1};
    struct pms_pool *pool = NULL;
    memset(e, 0, sizeof *e);
    int status = pms_pool_open(path, &o, &pool, e);
    /* images lie in another file, and damage may look like a torn copy: what is behind that is
     * wanted */
    if (status == PMS_E_COPIED) {
        o.force = 1;
        status = pms_pool_open(path, &o, &pool, e);
    }
    CHECK((status == PMS_OK) == (pool != NULL) && (status == PMS_OK || status == e->status));
    return pool;
}

static inline void must(int status)
{
    if (status != PMS_OK)
        abort();
}

static inline void list(struct pms_pool *pool, uint64_t dir, const char *name)
{
    static const unsigned char bytes[100];
    const struct pms_new_item items[2] = {
        {.meta = "item", .meta_bytes = 4, .kind = PMS_OBJECT_VALUE},
        {"meta", 4, sizeof bytes, bytes, PMS_OBJECT_ARRAY, PMS_FILL_COPY}};
    struct pms_error e;
    uint64_t at;
    must(pms_object_list(pool, dir, name, (uint32_t)strlen(name), 1, &at, &e));
    for (int i = 0; i < 70; i++) /* two leaves under a root */
        must(pms_sequence_splice(pool, at, NULL, 0, 0, 0, 1, items, 2, &e));
}

static inline unsigned char *array(struct pms_pool *pool, uint64_t dir, const char *name,
                                   uint64_t bytes)
{
    struct pms_error e;
    uint64_t data;
    must(pms_object_put_array(pool, dir, name, (uint32_t)strlen(name), "meta", 4, bytes,
                              PMS_FILL_PATTERN, "ab", 2, 0, &data, &e));
    return pool->map.user + data;
}

static inline void value(struct pms_pool *pool, uint64_t dir, const char *name, const char *text)
{
    struct pms_error e;
    must(pms_object_put_value(pool, dir, name, (uint32_t)strlen(name), text, (uint32_t)strlen(text),
                              &e));
}

/* Some of everything, three commits; a crashed one leaves a transaction in the middle of the
 * fourth. */
static inline void make_store(bool crashed)
{
    struct pms_error e;
    uint64_t group;
    struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE, now->domain, &e);
    if (!pool)
        abort();
    unsigned char *a = array(pool, 0, "a", 64), *b = array(pool, 0, "b", 20000);
    value(pool, 0, "v", "value");
    must(pms_object_group(pool, 0, "g", 1, 1, &group, &e));
    value(pool, group, "inner", "value");
    list(pool, group, "list");
    must(pms_commit(pool, &e));
    memset(a, 1, 64);
    memset(b, 2, 20000);
    array(pool, group, "c", 100);
    must(pms_commit(pool, &e));
    must(pms_object_remove(pool, 0, "v", 1, &e));
    value(pool, 0, "w", "another");
    must(pms_commit(pool, &e));
    if (!crashed) {
        must(pms_pool_close(pool, 1, &e));
        _exit(0);
    }
    memset(a, 3, 64);
    value(pool, 0, "w", "changed");
    value(pool, 0, "x", "new");
    must(pms_object_remove(pool, group, "c", 1, &e));
    memset(b, 4, 100);
    _exit(0); /* as it is */
}

static inline void build(void)
{
    int ws = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        make_store(now->crashed);
    waitpid(pid, &ws, 0);
    int fd = open(path, O_RDONLY);
    ssize_t n = fd < 0 ? -1 : pread(fd, now->image, sizeof now->image, 0);
    CHECK(ws == 0 && n > (ssize_t)PMS_OFF_SEGMENTS);
    now->bytes = n > 0 ? (uint64_t)n : 0;
    close(fd);
}

/* ---- what to damage ---- */

static inline void region(const char *name, uint64_t off, uint64_t bytes, enum seal seal,
                          uint64_t sample)
{
    if (now->regions < REGIONS_MAX && off < now->bytes && bytes <= now->bytes - off)
        now->region[now->regions++] = (struct region){name, off, bytes, seal, sample};
}

/* ---- checksums made right again ---- */

static inline void seal(const struct region *r, unsigned char *image, uint64_t byte)
{
    struct pms_superblock super;
    switch (r->seal) {
    case PLAIN: break;
    case SEAL_SUPER: seal_super(image, r->off); break;
    case SEAL_SESSION: seal_session(image, r->off); break;
    case SEAL_JANCHOR: seal_janchor(image, r->off); break;
    case SEAL_ANCHOR: seal_anchor(image); break;
    case SEAL_ENTRY: seal_entry(image, now->bytes, r->off); break;
    case SEAL_RECORD: seal_record(image, now->bytes, r->off); break;
    case SEAL_PTE:
        memcpy(&super, now->image, sizeof super);
        seal_pte(image, &super.segment[0],
                 r->off + byte / sizeof(struct pms_pte) * sizeof(struct pms_pte));
        break;
    }
}

/* ---- trials: a number becomes a damaged file ---- */

struct trial { /* what a number stands for */
    const char *name;
    uint64_t a, b;
};

static unsigned char image[SIZE]; /* as it should be */
static uint64_t image_bytes;
static unsigned char file[SIZE]; /* as it was found */

/* ---- the trial itself ---- */

/* The file asks for MAP_SYNC, which is not to be had here: a true answer, whatever made it ask. */
static inline bool asks_for_dax(void)
{
    struct pms_superblock super;
    bool asks = false;
    for (uint64_t copy = 0; copy < 2 && image_bytes >= PMS_OFF_SUPER(1) + sizeof super; copy++) {
        memcpy(&super, image + PMS_OFF_SUPER(copy), sizeof super);
        asks = asks || super.domain == PMS_DOMAIN_DAX;
    }
    return asks;
}

static inline bool answer_allowed(int status)
{
    return status == PMS_E_CORRUPT || status == PMS_E_NOT_A_STORE || status == PMS_E_VERSION ||
           status == PMS_E_UNCLEAN || (status == PMS_E_UNSUPPORTED && asks_for_dax());
}

static inline bool change_allowed(int status)
{
    return status == PMS_OK || status == PMS_E_CORRUPT || status == PMS_E_NOT_FOUND ||
           status == PMS_E_INVALID || status == PMS_E_FULL;
}

/* Makes the file what the image is. Few pages differ from the trial before: the others are not
 * written again. */
static inline void write_image(void)
{
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)image_bytes) == 0);
    ssize_t there = pread(fd, file, sizeof file, 0);
    CHECK(there == (ssize_t)image_bytes);
    for (uint64_t at = 0; at < image_bytes; at += PMS_PAGE) {
        uint64_t n = image_bytes - at < PMS_PAGE ? image_bytes - at : PMS_PAGE;
        if (memcmp(file + at, image + at, n) != 0)
            CHECK(pwrite(fd, image + at, n, (off_t)at) == (ssize_t)n);
    }
    close(fd);
}

static inline bool file_unchanged(void)
{
    struct stat st;
    int fd = open(path, O_RDONLY);
    bool same = fd >= 0 && fstat(fd, &st) == 0 && (uint64_t)st.st_size == image_bytes &&
                pread(fd, file, sizeof file, 0) == (ssize_t)image_bytes &&
                memcmp(file, image, image_bytes) == 0;
    close(fd);
    return same;
}

static _Atomic unsigned char sink; /* bytes are really read */

static inline void read_all(const unsigned char *p, uint64_t n)
{
    unsigned char sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum ^= p[i];
    atomic_store(&sink, sum);
}

static inline void iterate_list(struct pms_pool *pool, uint64_t list)
{
    struct pms_error e;
    struct pms_object o;
    uint64_t count = 0;
    int status = pms_sequence_count(pool, list, NULL, 0, &count, &e);
    CHECK(status == PMS_OK || status == PMS_E_CORRUPT);
    for (uint64_t i = 0; i < 300; i++) {
        status = pms_sequence_get(pool, list, NULL, 0, i, 0, &o, &e);
        CHECK(status == PMS_OK || status == PMS_E_CORRUPT ||
              (status == PMS_E_NOT_FOUND && i >= count));
        if (status != PMS_OK)
            continue;
        read_all(o.meta, o.meta_bytes);
        if (o.kind == PMS_OBJECT_ARRAY && o.data)
            read_all(pool->map.user + o.data, o.data_bytes);
    }
}

/* Reads names, metas and data of all objects as far as they can be had. */
static inline void iterate(struct pms_pool *pool, uint64_t dir, int depth)
{
    struct pms_error e;
    struct pms_object o;
    uint64_t node = 0, count;
    int status = pms_object_count(pool, dir, &count, &e);
    CHECK(status == PMS_OK || status == PMS_E_CORRUPT);
    for (int i = 0; i < 1000; i++) { /* a list may be a ring: pms_dir_next promises no end */
        status = pms_object_next(pool, dir, &node, &o, &e);
        CHECK(status == PMS_OK || status == PMS_E_CORRUPT);
        if (status != PMS_OK || node == 0)
            return;
        read_all(o.name, o.name_bytes);
        read_all(o.meta, o.meta_bytes);
        if (o.kind == PMS_OBJECT_GROUP && depth < 3)
            iterate(pool, o.data, depth + 1);
        if (o.kind == PMS_OBJECT_LIST)
            iterate_list(pool, o.data);
        if (o.kind == PMS_OBJECT_ARRAY && o.data)
            read_all(pool->map.user + o.data, o.data_bytes);
        struct pms_object again;
        status = pms_object_find(pool, dir, (const char *)o.name, o.name_bytes, &again, &e);
        CHECK(status == PMS_OK || status == PMS_E_CORRUPT || status == PMS_E_NOT_FOUND ||
              status == PMS_E_INVALID);
    }
}

static inline void change_list(struct pms_pool *pool)
{
    const struct pms_new_item item = {.meta = "item", .meta_bytes = 4, .kind = PMS_OBJECT_VALUE};
    struct pms_error e;
    uint64_t group, list;
    if (pms_object_group(pool, 0, "g", 1, 0, &group, &e) != PMS_OK ||
        pms_object_list(pool, group, "list", 4, 0, &list, &e) != PMS_OK)
        return;
    CHECK(change_allowed(pms_sequence_splice(pool, list, NULL, 0, 1, 0, 1, &item, 1, &e)));
    CHECK(change_allowed(pms_sequence_splice(pool, list, NULL, 0, 3, 2, 1, &item, 1, &e)));
    for (int i = 0; i < 40; i++)
        CHECK(change_allowed(pms_sequence_splice(pool, list, NULL, 0, 0, 3, 1, NULL, 0, &e)));
}

/* Changes a store that opened: what the check would complain about must not bring the writer
 * down either. */
static inline void change(struct pms_pool *pool)
{
    struct pms_error e;
    struct pms_object o;
    uint64_t node = 0, data;
    int status = pms_object_put_value(pool, 0, "late", 4, "value", 5, &e);
    CHECK(change_allowed(status));
    change_list(pool);
    status = pms_object_put_array(pool, 0, "later", 5, "m", 1, 300, PMS_FILL_ZERO, NULL, 0, 0,
                                  &data, &e);
    CHECK(change_allowed(status));
    for (int i = 0; i < 5 && pms_object_next(pool, 0, &node, &o, &e) == PMS_OK && node; i++) {
        char name[64];
        uint32_t n = o.name_bytes < sizeof name ? o.name_bytes : sizeof name;
        memcpy(name, o.name, n); /* the entry's own bytes go with it */
        CHECK(change_allowed(pms_object_remove(pool, 0, name, n, &e)));
        node = 0;
    }
    CHECK(change_allowed(pms_commit(pool, &e)));
}

static inline void look(int mode)
{
    static struct pms_check_report r;
    struct pms_error e;
    struct pms_pool *pool = open_store(mode, PMS_DOMAIN_AUTO, &e);
    if (!pool) {
        CHECK(answer_allowed(e.status));
        if (!answer_allowed(e.status))
            printf("  status %d errno %d: %s\n", e.status, e.sys_errno, e.what);
        return;
    }
    CHECK(pms_check(pool, &r, &e) == PMS_OK);
    iterate(pool, 0, 0);
    if (mode != PMS_MODE_READ)
        change(pool);
    int status = pms_pool_close(pool, 0, &e);
    CHECK(status == PMS_OK || status == PMS_E_CORRUPT);
    pms_pool_release(pool);
}

static inline int lowest_free_fd(void)
{
    int fd = dup(STDOUT_FILENO);
    close(fd);
    return fd;
}

static inline void run_trial(const struct trial *t, uint64_t n)
{
    int before = test_checks_failed, fds = lowest_free_fd();
    write_image();
    look(PMS_MODE_READ);
    CHECK(file_unchanged());
    look(PMS_MODE_READ_WRITE);
    CHECK(lowest_free_fd() == fds);
    if (test_checks_failed != before)
        printf("  %s, trial %llu: %s %llu, %llu\n", now->name, (unsigned long long)n, t->name,
               (unsigned long long)t->a, (unsigned long long)t->b);
}

/* ---- children ---- */

/* Stores are opened in children alone: opening starts threads, and a process that has some is no
 * good parent. */
static inline int in_child(void (*fn)(void))
{
    int ws = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        test_checks_failed = 0;
        alarm(SECONDS);
        fn();
        fflush(stdout);
        _exit(test_checks_failed != 0);
    }
    waitpid(pid, &ws, 0);
    return ws;
}

#endif
