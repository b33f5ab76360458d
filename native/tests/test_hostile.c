/* Damaged files and files made by an enemy: whatever the bytes, opening, checking, reading and
 * closing ends in an answer. No signal, no hang, no leak of file descriptors; a reader changes
 * no byte.
 *
 * Bits are flipped as they would by accident, and once more with checksums made right again, as
 * an enemy would. Children do it, many flips each: one that dies costs one failure, and the next
 * goes on behind it.
 *
 * PMS_HOSTILE_STEP=1 flips every bit and takes long; the default takes a sample.
 * PMS_HOSTILE_ONLY=variant runs the trials of one store (0 to 3), variant:trial one of them
 * alone. */
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
#include "store/store.h"
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
static uint64_t step; /* one bit of this many is flipped */

static uint64_t random_state;

static uint64_t random64(void) /* xorshift64* */
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

static struct pms_pool *open_store(int mode, int domain, struct pms_error *e)
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

static void must(int status)
{
    if (status != PMS_OK)
        abort();
}

static unsigned char *array(struct pms_pool *pool, uint64_t dir, const char *name, uint64_t bytes)
{
    struct pms_error e;
    uint64_t data;
    must(pms_object_put_array(pool, dir, name, (uint32_t)strlen(name), "meta", 4, bytes,
                              PMS_FILL_PATTERN, "ab", 2, 0, &data, &e));
    return pool->map.user + data;
}

static void value(struct pms_pool *pool, uint64_t dir, const char *name, const char *text)
{
    struct pms_error e;
    must(pms_object_put_value(pool, dir, name, (uint32_t)strlen(name), text, (uint32_t)strlen(text),
                              &e));
}

static void list(struct pms_pool *pool, uint64_t dir, const char *name)
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

/* Some of everything, three commits; a crashed one leaves a transaction in the middle of the
 * fourth. */
static void make_store(bool crashed)
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

static void build(void)
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

static void region(const char *name, uint64_t off, uint64_t bytes, enum seal seal, uint64_t sample)
{
    if (now->regions < REGIONS_MAX && off < now->bytes && bytes <= now->bytes - off)
        now->region[now->regions++] = (struct region){name, off, bytes, seal, sample};
}

/* As it is, and with the checksum made right again. */
static void sealed_region(const char *name, uint64_t off, uint64_t bytes, enum seal seal,
                          uint64_t sample)
{
    region(name, off, bytes, PLAIN, sample);
    region(name, off, bytes, seal, sample * 2);
}

static void fixed_regions(void)
{
    for (uint64_t copy = 0; copy < 2; copy++) {
        sealed_region("superblock's head", PMS_OFF_SUPER(copy), 192, SEAL_SUPER, 8);
        region("superblock", PMS_OFF_SUPER(copy), PMS_PAGE, PLAIN, 1);
        sealed_region("session", PMS_OFF_SESSION(copy), 64, SEAL_SESSION, 8);
        region("session", PMS_OFF_SESSION(copy), sizeof(struct pms_session), PLAIN, 1);
        sealed_region("journal anchor", PMS_OFF_JANCHOR(copy), 40, SEAL_JANCHOR, 8);
        region("journal anchor", PMS_OFF_JANCHOR(copy), sizeof(struct pms_janchor), PLAIN, 1);
    }
    sealed_region("anchor", PMS_OFF_ANCHOR, 8, SEAL_ANCHOR, 1000);
    region("root", PMS_OFF_ROOT, sizeof(struct pms_root), PLAIN, 8);
    region("root page", PMS_OFF_ROOT, PMS_PAGE, PLAIN, 1);
}

static void log_regions(const struct pms_superblock *super)
{
    for (uint64_t parity = 0; parity < 2; parity++) {
        uint64_t off = PMS_OFF_FASTLOG(parity), end = off + PMS_FASTLOG_BYTES;
        /* entry by entry, of whatever transaction */
        for (int i = 0; i < 12 && off + PMS_LINE <= end; i++) {
            struct pms_entry e;
            memcpy(&e, now->image + off, sizeof e);
            if (e.len == 0 || e.len > PMS_FASTLOG_BYTES)
                break;
            sealed_region("undo entry", off, 40, SEAL_ENTRY, i < 4 ? 8 : 2);
            off += e.len <= 32 ? PMS_LINE : PMS_LINE + (e.len + PMS_LINE - 1) / PMS_LINE * PMS_LINE;
        }
    }
    uint64_t log = super->segment[0].log_off;
    for (uint64_t at = 0, seen = 0; at + PMS_PAGE <= super->segment[0].log_bytes && seen < 6;
         at += PMS_PAGE) {
        uint64_t magic;
        memcpy(&magic, now->image + log + at, sizeof magic);
        if (magic != PMS_RECORD_MAGIC)
            continue;
        sealed_region("journal record", log + at,
                      sizeof(struct pms_record) + 3 * sizeof(struct pms_run), SEAL_RECORD, 8);
        region("journal record's images", log + at + PMS_PAGE, PMS_PAGE, PLAIN, 1);
        seen++;
    }
}

static void list_regions(uint64_t list)
{
    struct pms_list_header h;
    struct pms_list_node root, leaf;
    memcpy(&h, now->image + list, sizeof h);
    region("list's header", list, sizeof h, PLAIN, 16);
    if (h.level != 1 || h.root > now->bytes - sizeof root)
        return;
    memcpy(&root, now->image + h.root, sizeof root);
    region("list's root", h.root, 16 + root.used * sizeof root.child[0], PLAIN, 16);
    uint64_t first = root.child[0].node;
    memcpy(&leaf, now->image + first, sizeof leaf);
    region("list's leaf", first, sizeof leaf, PLAIN, 2);
    for (uint32_t i = 0; i < 4; i++)
        region("list's item", leaf.item[i], PMS_LINE, PLAIN, 8);
}

static void directory_regions(uint64_t dir)
{
    struct pms_dir_header h;
    if (dir == 0 || dir > now->bytes - sizeof h)
        return;
    memcpy(&h, now->image + dir, sizeof h);
    region("directory's header", dir, sizeof h, PLAIN, 16);
    region("directory's table", h.table, h.slots * sizeof(struct pms_dir_slot), PLAIN, 4);
    for (uint64_t node = h.first; node && node < now->bytes - sizeof(struct pms_node);) {
        struct pms_node n;
        memcpy(&n, now->image + node, sizeof n);
        region("node", node, sizeof n, PLAIN, 8);
        region("node's name and meta", node + sizeof n, n.name_bytes + n.meta_bytes, PLAIN, 1);
        if (n.kind == PMS_OBJECT_GROUP)
            directory_regions(n.data);
        if (n.kind == PMS_OBJECT_LIST)
            list_regions(n.data);
        node = n.next;
    }
}

static void choose_regions(void)
{
    struct pms_superblock super;
    struct pms_root root;
    memcpy(&super, now->image + PMS_OFF_SUPER(0), sizeof super);
    memcpy(&root, now->image + PMS_OFF_ROOT, sizeof root);
    now->regions = 0;
    fixed_regions();
    region("page table", super.segment[0].table_off, PMS_PAGE, PLAIN, 1);
    sealed_region("page table's head", super.segment[0].table_off, 52 * sizeof(struct pms_pte),
                  SEAL_PTE, 4);
    log_regions(&super);
    directory_regions(root.directory);
}

/* ---- checksums made right again ---- */

static void seal(const struct region *r, unsigned char *image, uint64_t byte)
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

static uint64_t stride(const struct region *r)
{
    uint64_t s = step / r->sample;
    return s ? s : 1;
}

static uint64_t flips(const struct region *r) { return (r->bytes * 8 + stride(r) - 1) / stride(r); }

static void flip(const struct region *r, uint64_t n, struct trial *t)
{
    uint64_t bit = n * stride(r);
    if (stride(r) > 1) /* not the same bit of every byte */
        bit += (n * 7919 + r->off / 64) % stride(r);
    bit %= r->bytes * 8;
    image[r->off + bit / 8] ^= (unsigned char)(1u << bit % 8);
    seal(r, image, bit / 8);
    *t = (struct trial){r->name, r->off + bit / 8, bit % 8 + (r->seal != PLAIN ? 100 : 0)};
}

static void fill_page(uint64_t page, int how)
{
    for (uint64_t i = 0; i < PMS_PAGE; i++)
        image[page * PMS_PAGE + i] = how == 0   ? 0
                                     : how == 1 ? 0xff
                                                : (unsigned char)(random64() >> 56);
}

static void copy_page(uint64_t to, uint64_t from)
{
    memcpy(image + to * PMS_PAGE, now->image + from * PMS_PAGE, PMS_PAGE);
}

/* Trial n of this variant. false: there are no more. */
static bool damage(uint64_t n, struct trial *t)
{
    uint64_t pages = now->bytes / PMS_PAGE, fine = step > 32 ? 17 * 512 * SLOWER : 512;
    memcpy(image, now->image, now->bytes);
    image_bytes = now->bytes;
    random_state = 0x9e3779b97f4a7c15ull ^ (n + 1);
    for (uint32_t i = 0; i < now->regions; i++) {
        if (n < flips(&now->region[i])) {
            flip(&now->region[i], n, t);
            return true;
        }
        n -= flips(&now->region[i]);
    }
    uint64_t every = step > 32 ? 8 * SLOWER : 1, cuts = now->bytes / fine;
    if (n < pages + cuts) { /* cut short at every page; at sectors, a sample of them */
        image_bytes = n < pages ? n * PMS_PAGE : (n - pages) * fine + 512;
        *t = (struct trial){"cut at", image_bytes, 0};
        return true;
    }
    n -= pages + cuts;
    if (n < 3 * pages / every) {
        uint64_t page = n / 3 * every + n % every;
        page = page < pages ? page : pages - 1;
        *t = (struct trial){"page overwritten", page * PMS_PAGE, n % 3};
        fill_page(page, (int)(n % 3));
        return true;
    }
    n -= 3 * pages / every;
    if (n < 200 / SLOWER) { /* a page in another's place: right checksums, wrong place */
        uint64_t to = random64() % pages, from = random64() % pages;
        *t = (struct trial){"page copied", to * PMS_PAGE, from * PMS_PAGE};
        copy_page(to, from);
        return true;
    }
    return false;
}

/* ---- the trial itself ---- */

/* The file asks for MAP_SYNC, which is not to be had here: a true answer, whatever made it ask. */
static bool asks_for_dax(void)
{
    struct pms_superblock super;
    bool asks = false;
    for (uint64_t copy = 0; copy < 2 && image_bytes >= PMS_OFF_SUPER(1) + sizeof super; copy++) {
        memcpy(&super, image + PMS_OFF_SUPER(copy), sizeof super);
        asks = asks || super.domain == PMS_DOMAIN_DAX;
    }
    return asks;
}

static bool answer_allowed(int status)
{
    return status == PMS_E_CORRUPT || status == PMS_E_NOT_A_STORE || status == PMS_E_VERSION ||
           status == PMS_E_UNCLEAN || (status == PMS_E_UNSUPPORTED && asks_for_dax());
}

static bool change_allowed(int status)
{
    return status == PMS_OK || status == PMS_E_CORRUPT || status == PMS_E_NOT_FOUND ||
           status == PMS_E_INVALID || status == PMS_E_FULL;
}

/* Makes the file what the image is. Few pages differ from the trial before: the others are not
 * written again. */
static void write_image(void)
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

static bool file_unchanged(void)
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

static void read_all(const unsigned char *p, uint64_t n)
{
    unsigned char sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum ^= p[i];
    atomic_store(&sink, sum);
}

static void iterate_list(struct pms_pool *pool, uint64_t list)
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
static void iterate(struct pms_pool *pool, uint64_t dir, int depth)
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

static void change_list(struct pms_pool *pool)
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
static void change(struct pms_pool *pool)
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

static void look(int mode)
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

static int lowest_free_fd(void)
{
    int fd = dup(STDOUT_FILENO);
    close(fd);
    return fd;
}

static void run_trial(const struct trial *t, uint64_t n)
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

struct shared {
    _Atomic uint64_t trial;
    _Atomic uint64_t failed;
    _Atomic bool done;
};
static struct shared *shared;

static void child(uint64_t from, uint64_t to)
{
    struct trial t;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    for (uint64_t n = from; n < to; n++) {
        atomic_store(&shared->trial, n);
        if (!damage(n, &t)) {
            atomic_store(&shared->done, true);
            break;
        }
        alarm(SECONDS);
        run_trial(&t, n);
    }
    fflush(stdout);
    atomic_fetch_add(&shared->failed, (uint64_t)test_checks_failed);
    _exit(0);
}

#define BATCH 1000u
#define DEATHS_MAX 20

/* Runs trials [from, to) in children; one that dies is told, and the next trial gets another
 * child. */
static void run_trials(uint64_t from, uint64_t to)
{
    int deaths = 0;
    atomic_store(&shared->done, false);
    atomic_store(&shared->failed, 0);
    while (from < to && !atomic_load(&shared->done) && deaths < DEATHS_MAX) {
        int ws = 0;
        uint64_t end = to - from > BATCH ? from + BATCH : to;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            test_checks_failed = 0;
            child(from, end);
        }
        waitpid(pid, &ws, 0);
        if (ws == 0) {
            from = end;
            continue;
        }
        struct trial t = {"", 0, 0};
        from = atomic_load(&shared->trial) + 1;
        damage(from - 1, &t);
        printf("  %s, trial %llu: %s %llu, %llu: killed by %s\n", now->name,
               (unsigned long long)from - 1, t.name, (unsigned long long)t.a,
               (unsigned long long)t.b, WIFSIGNALED(ws) ? strsignal(WTERMSIG(ws)) : "itself");
        deaths++;
    }
    CHECK(deaths == 0);
    CHECK(atomic_load(&shared->failed) == 0);
}

/* Stores are opened in children alone: opening starts threads, and a process that has some is no
 * good parent. */
static int in_child(void (*fn)(void))
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

static void check_sound(void)
{
    static struct pms_check_report r;
    struct pms_error e;
    memcpy(image, now->image, now->bytes);
    image_bytes = now->bytes;
    write_image();
    struct pms_pool *pool = open_store(PMS_MODE_READ, PMS_DOMAIN_AUTO, &e);
    CHECK(pool && pool->opened.info.clean == !now->crashed);
    if (!pool)
        return;
    CHECK(pms_check(pool, &r, &e) == PMS_OK && r.problem_count == 0 && r.names == 7 &&
          r.lists == 1);
    CHECK((pool->opened.info.undone_entries > 0) ==
          (now->crashed && now->domain == PMS_DOMAIN_PROCESS));
    pms_pool_release(pool);
    CHECK(file_unchanged());
}

static void the_store_is_sound(void)
{
    build();
    choose_regions();
    CHECK(in_child(check_sound) == 0);
}

static void every_damage_is_answered(void)
{
    const char *only = getenv("PMS_HOSTILE_ONLY");
    unsigned variant = 0;
    unsigned long long n = 0;
    int asked = only ? sscanf(only, "%u:%llu", &variant, &n) : 0;
    if (asked > 0 && variant != (unsigned)(now - variants))
        return;
    run_trials(n, asked == 2 ? n + 1 : UINT64_MAX);
}

/* ---- other files ---- */

static int open_status(int mode)
{
    struct pms_error e;
    struct pms_pool *pool = open_store(mode, PMS_DOMAIN_AUTO, &e);
    if (pool)
        pms_pool_release(pool);
    return pool ? PMS_OK : e.status;
}

static void check_foreign(const void *bytes, uint64_t n, int expected)
{
    memcpy(image, bytes, n);
    image_bytes = n;
    write_image();
    CHECK(open_status(PMS_MODE_READ) == expected && open_status(PMS_MODE_READ_WRITE) == expected);
    if (n)
        CHECK(open_status(PMS_MODE_APPEND) == expected); /* what is not ours is not replaced */
    CHECK(file_unchanged());
}

static void foreign_files(void)
{
    static unsigned char buffer[SIZE];
    check_foreign("", 0, PMS_E_NOT_A_STORE);
    check_foreign("Dear reader,\nthis is a text.\n", 29, PMS_E_NOT_A_STORE);
    check_foreign("P", 1, PMS_E_NOT_A_STORE);
    check_foreign(buffer, sizeof buffer, PMS_E_NOT_A_STORE); /* zeros */
    check_foreign(buffer, 1, PMS_E_NOT_A_STORE);
    check_foreign("\x7f"
                  "ELF\2\1\1\0\0\0\0\0\0\0\0\0",
                  16, PMS_E_NOT_A_STORE);
    memcpy(buffer, "PMEMPOOL", 8);
    check_foreign(buffer, 8 * PMS_PAGE, PMS_E_NOT_A_STORE);
    memset(buffer, 'x', sizeof buffer);
    check_foreign(buffer, sizeof buffer, PMS_E_NOT_A_STORE);
    memcpy(buffer, "PMSTORE\r", 8); /* as a text transfer leaves it */
    check_foreign(buffer, sizeof buffer, PMS_E_NOT_A_STORE);
}

static void other_versions(void)
{
    struct pms_superblock super;
    for (int field = 0; field < 3; field++) {
        memcpy(image, variants[0].image, variants[0].bytes);
        image_bytes = variants[0].bytes;
        for (uint64_t copy = 0; copy < 2; copy++) {
            memcpy(&super, image + PMS_OFF_SUPER(copy), sizeof super);
            super.version = field == 0 ? PMS_VERSION + 1 : field == 1 ? 0 : PMS_VERSION;
            super.features_incompat = field == 2 ? PMS_FEATURE_HOLD << 1 : 0;
            super.crc = pms_crc32c(0, &super, offsetof(struct pms_superblock, crc));
            memcpy(image + PMS_OFF_SUPER(copy), &super, sizeof super);
        }
        write_image();
        CHECK(open_status(PMS_MODE_READ) == PMS_E_VERSION &&
              open_status(PMS_MODE_READ_WRITE) == PMS_E_VERSION);
        CHECK(open_status(PMS_MODE_APPEND) == PMS_E_VERSION && file_unchanged());
    }
}

static void foreign_files_are_refused(void) { CHECK(in_child(foreign_files) == 0); }
static void other_versions_are_named(void) { CHECK(in_child(other_versions) == 0); }

static void put_word(uint64_t off, uint64_t word) { memcpy(image + off, &word, sizeof word); }

static const struct {
    unsigned variant;
    uint64_t tx;
} last[] = {
    {0, PMS_TX_MASK},     {1, PMS_TX_MASK}, {0, PMS_TX_MASK - 1}, {2, PMS_TX_MASK},
    {2, PMS_TX_MASK + 1}, {2, ~0ull},       {3, ~0ull - 1},
};
static size_t which;

static void run_last(void)
{
    now = variants + last[which].variant;
    memcpy(image, now->image, now->bytes);
    image_bytes = now->bytes;
    if (last[which].variant < 2)
        put_word(PMS_OFF_ANCHOR, pms_anchor_pack(last[which].tx));
    for (uint64_t copy = 0; copy < 2 && last[which].variant >= 2; copy++) {
        uint64_t off = PMS_OFF_JANCHOR(copy), bytes = offsetof(struct pms_janchor, crc);
        put_word(off + offsetof(struct pms_janchor, tx), last[which].tx);
        seal_crc(image, off, bytes);
    }
    run_trial(&(struct trial){"last transaction", last[which].variant, last[which].tx}, which);
}

/* The last number that a transaction can have: there is no next one. Of the anchor, then of both
 * journal anchors. */
static void numbers_that_run_out_are_answered(void)
{
    for (which = 0; which < sizeof last / sizeof last[0]; which++) {
        int ws = in_child(run_last);
        CHECK(ws == 0);
        if (ws)
            printf("  %s, anchor at transaction %llx: %s\n", variants[last[which].variant].name,
                   (unsigned long long)last[which].tx,
                   WIFSIGNALED(ws) ? strsignal(WTERMSIG(ws)) : "a wrong answer");
    }
}

/* Noise of any size; noise behind a right magic; noise behind a right superblock. */
static void noise(void)
{
    struct trial t = {"noise", 0, 0};
    for (uint64_t n = 0; n < 300 / SLOWER; n++) {
        random_state = n + 77;
        uint64_t keep = n % 3 == 0 ? 0 : n % 3 == 1 ? 8 : PMS_PAGE * (1 + n % 8);
        memcpy(image, variants[n % 4].image, SIZE);
        image_bytes = n % 3 == 2 ? variants[n % 4].bytes : random64() % SIZE;
        for (uint64_t i = keep; i < image_bytes; i++)
            image[i] = (unsigned char)(random64() >> 56);
        t.a = n;
        alarm(SECONDS);
        run_trial(&t, n);
    }
}

static void noise_is_answered(void) { CHECK(in_child(noise) == 0); }

int main(void)
{
    const char *asked = getenv("PMS_HOSTILE_STEP");
    step = asked ? strtoull(asked, NULL, 10) : 800 * SLOWER;
    step = step ? step : 1;
    snprintf(path, sizeof path, "%s/pms-test-hostile-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (now = variants; now < variants + 4; now++) {
        printf("%s: ", now->name);
        TEST(the_store_is_sound);
        printf("%s: ", now->name);
        TEST(every_damage_is_answered);
        printf("  %llu trials in %u regions\n", (unsigned long long)atomic_load(&shared->trial),
               now->regions);
    }
    now = variants;
    TEST(foreign_files_are_refused);
    TEST(other_versions_are_named);
    TEST(numbers_that_run_out_are_answered);
    TEST(noise_is_answered);
    unlink(path);
    return test_summary();
}
