/* Directories against a model: random changes, commits, roll backs, a full store, seeded damage,
 * hostile bytes, times. */
#include "test.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/checksum.h"
#include "log/entries.h"
#include "names/directory_table.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 10u
#else
#define SLOWER 1u
#endif

#ifdef __SANITIZE_THREAD__
#define BIT_STEP 7u /* one thread: nothing to see for it in bits */
#else
#define BIT_STEP 1u
#endif

/* ---- a store in anonymous memory, with one directory ---- */

struct store {
    struct pms_superblock super;
    struct pms_persist persist;
    struct pms_map map;
    struct pms_undo undo;
    struct pms_heap *heap;
    struct pms_dir_ctx ctx;
    struct pms_error error;
    uint64_t tag;
    uint64_t dir;
};

static uint64_t pages_of(uint64_t bytes) { return (bytes + PMS_PAGE - 1) / PMS_PAGE; }

static void commit(struct store *s)
{
    pms_heap_committed(s->heap, false);
    pms_undo_begin(&s->undo, ++s->tag);
}

static void rollback(struct store *s)
{
    uint64_t bytes;
    CHECK(pms_undo_apply(&s->undo, s->tag, s->map.engine, &s->super, &bytes) >= 0);
    pms_undo_begin(&s->undo, ++s->tag);
    CHECK(pms_heap_rebuild(s->heap, &s->error) == PMS_OK);
}

static void store_open(struct store *s, uint64_t pages)
{
    memset(s, 0, sizeof *s);
    struct pms_segment *g = &s->super.segment[s->super.segment_count++];
    g->table_off = PMS_OFF_SEGMENTS;
    g->log_off = g->table_off + pages_of(pages * sizeof(struct pms_pte)) * PMS_PAGE;
    g->log_bytes = (2 * pages + 64) * PMS_PAGE;
    g->data_off = (g->log_off + g->log_bytes + PMS_HUGE - 1) / PMS_HUGE * PMS_HUGE;
    g->data_pages = pages;
    s->super.file_bytes = g->data_off + pages * PMS_PAGE;
    int fd = memfd_create("directory", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)s->super.file_bytes) == 0);
    CHECK(pms_map_open(&s->map, fd, s->super.file_bytes, s->super.file_bytes + (1u << 30),
                       PMS_MAP_SHARED, &s->persist, &s->error) == PMS_OK);
    uint64_t word = pages | (uint64_t)PMS_KIND_FREE << 44;
    struct pms_pte free_pages = {word | (uint64_t)pms_check16(g->data_off / PMS_PAGE, word) << 48,
                                 0};
    memcpy(pms_map_at(&s->map, g->table_off), &free_pages, sizeof free_pages);
    CHECK(pms_undo_open(&s->undo, &s->map, false, &s->error) == PMS_OK);
    pms_undo_set_extents(&s->undo, &s->super);
    CHECK(pms_heap_open(&s->heap, &s->undo, &s->super, &s->error) == PMS_OK);
    s->ctx = (struct pms_dir_ctx){&s->undo, s->heap, 0x5eed5eed5eed5eedull};
    pms_undo_begin(&s->undo, ++s->tag);
    CHECK(pms_dir_create(&s->ctx, &s->dir, &s->error) == PMS_OK);
}

static void store_close(struct store *s)
{
    int fd = s->map.fd;
    pms_heap_close(s->heap);
    pms_undo_close(&s->undo);
    pms_map_close(&s->map);
    close(fd);
}

static uint64_t random_state = 88172645463325252ull;
static uint64_t rnd(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) % n;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t live_blocks(const struct store *s)
{
    struct pms_heap_stats st;
    pms_heap_stats(s->heap, &st);
    return st.blocks;
}

static uint64_t user_block(struct store *s, uint64_t bytes) /* 0: no room */
{
    uint64_t off = 0;
    return pms_heap_alloc(s->heap, bytes, PMS_OWNER_USER, &off, NULL) == PMS_OK ? off : 0;
}

static int put(struct store *s, const char *name, const void *meta, uint32_t bytes)
{
    return pms_dir_put(&s->ctx, s->dir, name, (uint32_t)strlen(name), PMS_OBJECT_VALUE, meta, bytes,
                       0, 0, &s->error);
}

static int find(struct store *s, const char *name, struct pms_object *o)
{
    return pms_dir_find(&s->ctx, s->dir, name, (uint32_t)strlen(name), o, &s->error);
}

static int drop(struct store *s, const char *name)
{
    return pms_dir_remove(&s->ctx, s->dir, name, (uint32_t)strlen(name), &s->error);
}

static int count_owner(void *arg, uint64_t off, const struct pms_object *object)
{
    (void)off;
    (void)object;
    ++*(uint64_t *)arg;
    return 0;
}

static int check(struct store *s, uint64_t *owned)
{
    *owned = 0;
    return pms_dir_check(&s->ctx, s->dir, count_owner, owned, &s->error);
}

static void check_sound(struct store *s)
{
    uint64_t owned;
    CHECK(check(s, &owned) == PMS_OK);
    CHECK(owned == live_blocks(s));
}

struct sum {
    const struct store *s;
    uint32_t crc;
};

static int sum_block(void *ctx, const struct pms_block *b)
{
    struct sum *sum = ctx;
    sum->crc = pms_crc32c(sum->crc, b, offsetof(struct pms_block, extent_off));
    if (b->kind == PMS_KIND_META_LARGE || b->kind == PMS_KIND_META_SLAB)
        sum->crc = pms_crc32c(sum->crc, pms_map_at(&sum->s->map, b->off), b->bytes);
    return 0;
}

/* every byte of every live block of the engine, and where the others lie */
static uint32_t metadata_sum(const struct store *s)
{
    struct sum sum = {s, 0};
    CHECK(pms_heap_walk(s->heap, sum_block, &sum, NULL) == PMS_OK);
    return sum.crc;
}

/* ---- the model: what each of NAMES names is bound to ---- */

#define NAMES 3000u
#define META_MAX 80000u

struct bound {
    uint64_t place, data, data_bytes;
    uint32_t seed, meta_bytes, kind;
    bool there;
};
struct model {
    struct bound bound[NAMES];
    uint64_t count, data_blocks, next_place;
};

static uint32_t name_of(uint32_t i, char *name) /* lengths from 2 to some 280 */
{
    int n = sprintf(name, "n%u%s", i,
                    i % 3 ? "" : ":\xc3\xa9t\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    for (uint32_t more = i % 50 == 0 ? 250 : i % 7; more; more--)
        name[n++] = 'x';
    name[n] = 0;
    return (uint32_t)n;
}

static const unsigned char *meta_of(const struct bound *b)
{
    static unsigned char meta[META_MAX];
    uint32_t x = b->seed | 1;
    for (uint32_t i = 0; i < b->meta_bytes; i++)
        meta[i] = (unsigned char)((x = x * 1664525 + 1013904223) >> 24);
    return meta;
}

static void check_object(const struct model *m, uint32_t i, const struct pms_object *o)
{
    const struct bound *b = &m->bound[i];
    char name[512];
    uint32_t bytes = name_of(i, name);
    CHECK(b->there && o->kind == b->kind && o->data == b->data && o->data_bytes == b->data_bytes);
    CHECK(o->name_bytes == bytes && memcmp(o->name, name, bytes) == 0);
    CHECK(o->meta_bytes == b->meta_bytes && memcmp(o->meta, meta_of(b), b->meta_bytes) == 0);
}

static uint32_t index_of(const struct pms_object *o)
{
    char name[16] = {0}; /* what follows a name in memory may be digits too */
    memcpy(name, o->name, o->name_bytes < 15 ? o->name_bytes : 15);
    return (uint32_t)strtoul(name + 1, NULL, 10);
}

static void check_all(struct store *s, const struct model *m)
{
    uint64_t node = 0, n = 0, place = 0, count;
    struct pms_object o;
    while (pms_dir_next(&s->ctx, s->dir, &node, &o, &s->error) == PMS_OK && node) {
        uint32_t i = index_of(&o);
        CHECK(i < NAMES && m->bound[i].place > place); /* order of insertion */
        place = m->bound[i].place;
        check_object(m, i, &o);
        n++;
    }
    CHECK(node == 0 && n == m->count);
    CHECK(pms_dir_count(&s->ctx, s->dir, &count, &s->error) == PMS_OK && count == n);
    CHECK(live_blocks(s) == 2 + m->count + m->data_blocks);
    check_sound(s);
}

static void random_put(struct store *s, struct model *m, uint32_t i)
{
    struct bound *b = &m->bound[i], b2 = *b;
    char name[512];
    uint32_t bytes = name_of(i, name);
    b2.seed = rnd(3) ? (uint32_t)rnd(1u << 31) : b->seed;
    if (rnd(3) || !b->there)
        b2.meta_bytes = (uint32_t)(rnd(50) ? rnd(200) : rnd(50) ? rnd(5000) : rnd(META_MAX));
    uint64_t how = rnd(4);
    if (how == 0 || (how == 1 && !b->data)) {
        b2.kind = PMS_OBJECT_VALUE;
        b2.data = b2.data_bytes = 0;
    } else if (how > 1) {
        b2.kind = PMS_OBJECT_ARRAY;
        b2.data_bytes = 1 + rnd(rnd(20) ? 300 : 20000);
        b2.data = user_block(s, b2.data_bytes);
        CHECK(b2.data);
    }
    if (!b->there) {
        b2.place = ++m->next_place;
        m->count++;
    }
    CHECK(pms_dir_put(&s->ctx, s->dir, name, bytes, b2.kind, meta_of(&b2), b2.meta_bytes, b2.data,
                      b2.data_bytes, &s->error) == PMS_OK);
    m->data_blocks += (uint64_t)(b2.data != 0) - (uint64_t)(b->there && b->data != 0);
    b2.there = true;
    *b = b2;
}

static void random_step(struct store *s, struct model *m, bool shrink)
{
    uint32_t i = (uint32_t)rnd(NAMES);
    struct bound *b = &m->bound[i];
    char name[512];
    uint32_t bytes = name_of(i, name);
    struct pms_object o;
    uint64_t what = rnd(10);
    if (what < 3) {
        int status = pms_dir_find(&s->ctx, s->dir, name, bytes, &o, &s->error);
        CHECK(status == (b->there ? PMS_OK : PMS_E_NOT_FOUND));
        if (status == PMS_OK)
            check_object(m, i, &o);
    } else if (what < (shrink ? 4 : 7)) {
        random_put(s, m, i);
    } else {
        CHECK(pms_dir_remove(&s->ctx, s->dir, name, bytes, &s->error) ==
              (b->there ? PMS_OK : PMS_E_NOT_FOUND));
        m->count -= b->there;
        m->data_blocks -= b->there && b->data;
        *b = (struct bound){0};
    }
}

static void test_model(void)
{
    static struct model m, committed;
    struct store s;
    store_open(&s, 16384);
    commit(&s);
    uint32_t sum = metadata_sum(&s);
    for (uint32_t i = 0; i < 200000 / SLOWER; i++) {
        random_step(&s, &m, i / 20000 % 2);
        if (rnd(500))
            continue;
        check_all(&s, &m);
        if (rnd(3)) {
            commit(&s);
            committed = m;
            sum = metadata_sum(&s);
        } else {
            rollback(&s);
            m = committed;
            CHECK(metadata_sum(&s) == sum);
            check_all(&s, &m);
        }
    }
    store_close(&s);
}

/* ---- what a put keeps ---- */

static void test_put_in_place(void)
{
    struct store s;
    struct pms_object o, o2;
    unsigned char meta[4000] = {7};
    store_open(&s, 1024);
    CHECK(put(&s, "a", meta, 10) == PMS_OK && put(&s, "b", meta, 10) == PMS_OK &&
          put(&s, "c", meta, 10) == PMS_OK);
    commit(&s);
    CHECK(find(&s, "b", &o) == PMS_OK && put(&s, "b", meta, 40) == PMS_OK &&
          find(&s, "b", &o2) == PMS_OK);
    CHECK(o.node == o2.node && o2.meta_bytes == 40); /* room to the end of the block */
    commit(&s);
    uint64_t captured = s.undo.log.captured_bytes, fences = s.persist.fences;
    /* nothing differs: nothing stored */
    CHECK(put(&s, "b", meta, 40) == PMS_OK && s.undo.log.captured_bytes == captured);
    meta[20] = 1;
    CHECK(put(&s, "b", meta, 40) == PMS_OK && s.undo.log.captured_bytes == captured + PMS_GRANULE &&
          s.persist.fences == fences + 1);
    CHECK(find(&s, "b", &o) == PMS_OK && o.meta[20] == 1 && o.meta[19] == 0 && o.meta[21] == 0);
    CHECK(put(&s, "b", o.meta, o.meta_bytes) == PMS_OK); /* its own bytes */
    CHECK(put(&s, "b", meta, sizeof meta) == PMS_OK && find(&s, "b", &o2) == PMS_OK &&
          o2.node != o.node);
    uint64_t node = 0;
    CHECK(pms_dir_next(&s.ctx, s.dir, &node, &o, NULL) == PMS_OK &&
          pms_dir_next(&s.ctx, s.dir, &node, &o, NULL) == PMS_OK);
    CHECK(o.node == o2.node && o.name[0] == 'b'); /* its place in the order */
    CHECK(put(&s, "b", NULL, 0) == PMS_OK && find(&s, "b", &o) == PMS_OK && o.meta_bytes == 0);
    check_sound(&s);
    store_close(&s);
}

static void test_arguments(void)
{
    static const char *const bad[] = {"",
                                      "\x80",
                                      "a\xc3",
                                      "\xc0\x80",
                                      "\xe0\x80\x80",
                                      "\xed\xa0\x80",
                                      "\xf4\x90\x80\x80",
                                      "\xf8\x88\x80\x80\x80",
                                      "\xff",
                                      "\xf0\x80\x80\x80",
                                      "\xe2\x82z",
                                      "a/b",
                                      "/"};
    static const char *const good[] = {
        "a", "\xc2\x80", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf", "\xef\xbf\xbf"};
    static char longest[PMS_NAME_MAX + 2];
    struct store s;
    struct pms_object o;
    store_open(&s, 1024);
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(put(&s, bad[i], "", 0) == PMS_E_INVALID && find(&s, bad[i], &o) == PMS_E_NOT_FOUND);
    for (unsigned i = 0; i < sizeof good / sizeof *good; i++)
        CHECK(put(&s, good[i], "x", 1) == PMS_OK && find(&s, good[i], &o) == PMS_OK);
    CHECK(pms_dir_put(&s.ctx, s.dir, "a\0b", 3, PMS_OBJECT_VALUE, "", 0, 0, 0, NULL) ==
          PMS_E_INVALID);
    memset(longest, 'n', sizeof longest - 1);
    CHECK(put(&s, longest, "", 0) == PMS_E_INVALID && find(&s, longest, &o) == PMS_E_NOT_FOUND);
    longest[PMS_NAME_MAX] = 0;
    CHECK(put(&s, longest, "", 0) == PMS_OK && find(&s, longest, &o) == PMS_OK &&
          o.name_bytes == PMS_NAME_MAX);
    uint64_t data = user_block(&s, 100);
    static const struct {
        uint32_t kind;
        uint64_t shift, bytes;
    } wrong[] = {{0, 0, 10},
                 {4, 0, 10},
                 {PMS_OBJECT_VALUE, 0, 10},
                 {PMS_OBJECT_GROUP, 0, 10},
                 {PMS_OBJECT_ARRAY, 64, 10},
                 {PMS_OBJECT_ARRAY, 0, 1000},
                 {PMS_OBJECT_ARRAY, 1, 10}};
    for (unsigned i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(pms_dir_put(&s.ctx, s.dir, "x", 1, wrong[i].kind, "", 0, data + wrong[i].shift,
                          wrong[i].bytes, NULL) == PMS_E_INVALID);
    CHECK(pms_dir_put(&s.ctx, s.dir, "x", 1, PMS_OBJECT_ARRAY, "", 0, 0, 1, NULL) == PMS_E_INVALID);
    CHECK(pms_dir_put(&s.ctx, s.dir, "x", 1, PMS_OBJECT_ARRAY, "", 0, data, 100, NULL) == PMS_OK);
    CHECK(pms_dir_find(&s.ctx, data, "x", 1, &o, NULL) == PMS_E_CORRUPT &&
          pms_dir_find(&s.ctx, 0, "x", 1, &o, NULL) == PMS_E_CORRUPT);
    check_sound(&s);
    store_close(&s);
}

static void test_groups(void)
{
    struct store s;
    uint64_t group, owned = 0;
    store_open(&s, 1024);
    uint64_t before = live_blocks(&s);
    CHECK(pms_dir_create(&s.ctx, &group, NULL) == PMS_OK);
    CHECK(pms_dir_put(&s.ctx, s.dir, "g", 1, PMS_OBJECT_GROUP, "", 0, group,
                      sizeof(struct pms_dir_header), NULL) == PMS_OK);
    CHECK(pms_dir_put(&s.ctx, group, "x", 1, PMS_OBJECT_VALUE, "v", 1, 0, 0, NULL) == PMS_OK);
    /* header, table, node: the group's header is for its own check */
    CHECK(check(&s, &owned) == PMS_OK && owned == 3);
    uint32_t sum = metadata_sum(&s);
    /* not empty */
    CHECK(drop(&s, "g") == PMS_E_INVALID && put(&s, "g", "", 0) == PMS_E_EXISTS &&
          metadata_sum(&s) == sum);
    CHECK(pms_dir_remove(&s.ctx, group, "x", 1, NULL) == PMS_OK);
    CHECK(drop(&s, "g") == PMS_OK && live_blocks(&s) == before);
    store_close(&s);
}

/* ---- a full store ---- */

static void fill_up(struct store *s, uint32_t *names)
{
    char name[32];
    static unsigned char meta[2000];
    for (;; ++*names) {
        sprintf(name, "%u", *names);
        uint32_t sum = *names % 16 ? 0 : metadata_sum(s);
        int status = put(s, name, meta, *names % 5 * 30);
        if (status == PMS_E_FULL && sum)
            CHECK(metadata_sum(s) == sum);
        if (status != PMS_OK) {
            CHECK(status == PMS_E_FULL);
            break;
        }
    }
}

static void test_full(void)
{
    static const uint64_t pages[] = {40, 130, 700, 3000};
    for (unsigned k = 0; k < sizeof pages / sizeof *pages; k++) {
        struct store s;
        struct pms_object o;
        static unsigned char meta[META_MAX];
        char name[32];
        uint32_t names = 0;
        store_open(&s, pages[k]);
        fill_up(&s, &names);
        commit(&s);
        fill_up(&s, &names);
        CHECK(names >= pages[k] / 5);
        /* what is left where only the next table had no room */
        for (uint32_t i = 2; i < names; i++) {
            sprintf(name, "%u", i);
            if (put(&s, name, meta, sizeof meta) != PMS_OK)
                break;
        }
        uint32_t sum = metadata_sum(&s);
        CHECK(put(&s, "more", meta, sizeof meta) == PMS_E_FULL &&
              put(&s, "1", meta, META_MAX) == PMS_E_FULL);
        CHECK(metadata_sum(&s) == sum && find(&s, "1", &o) == PMS_OK && o.meta_bytes == 30);
        check_sound(&s);
        for (uint32_t i = 0; i < names; i++) {
            sprintf(name, "%u", i * 7 % names); /* not every name once if 7 divides their number */
            CHECK(drop(&s, name) == (names % 7 || i < names / 7 ? PMS_OK : PMS_E_NOT_FOUND));
        }
        check_sound(&s);
        rollback(&s);
        CHECK(find(&s, "1", &o) == PMS_OK);
        check_sound(&s);
        store_close(&s);
    }
}

/* ---- tables ---- */

/* Names whose homes are at the table's very end, or its start: runs that wrap, and runs too long
 * to be sorted at once. */
static void test_crowded_homes(void)
{
    enum { CROWD = 1500 };
    static char name[CROWD][16];
    struct store s;
    struct pms_object o;
    uint32_t n = 0;
    store_open(&s, 4096);
    for (uint32_t i = 0; n < CROWD; i++) {
        sprintf(name[n], "%u", i);
        uint64_t hash = pms_hash(s.ctx.hash_seed, name[n], strlen(name[n]));
        if (hash >> 54 == 0x3ff || (n % 8 == 0 && hash >> 54 == 0) ||
            (n % 16 == 1 && rnd(200) == 0))
            n++;
    }
    for (int round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < CROWD; i++) {
            CHECK(put(&s, name[i], name[i], (uint32_t)strlen(name[i])) == PMS_OK);
            if (i % 64 == 0)
                check_sound(&s);
        }
        for (uint32_t i = 0; i < CROWD; i++)
            CHECK(find(&s, name[i], &o) == PMS_OK && memcmp(o.meta, name[i], o.meta_bytes) == 0);
        for (uint32_t i = 0; i < CROWD - 20; i++) {
            CHECK(drop(&s, name[(i * 7 + (uint32_t)round) % CROWD]) == PMS_OK);
            if (i % 64 == 0)
                check_sound(&s);
        }
        commit(&s);
    }
    store_close(&s);
}

static void test_table_size(void) /* churn does not grow a table, and a table shrinks again */
{
    struct store s;
    char name[32];
    store_open(&s, 8192);
    for (uint32_t i = 0; i < 20000; i++) {
        sprintf(name, "%u", i);
        CHECK(put(&s, name, "", 0) == PMS_OK);
        sprintf(name, "%u", i - 10000);
        if (i >= 10000)
            CHECK(drop(&s, name) == PMS_OK);
    }
    struct pms_dir_view v;
    CHECK(pms_dir_load(&s.ctx, s.dir, &v, NULL) == PMS_OK && v.h.count == 10000 &&
          v.h.slots <= 32768);
    for (uint32_t i = 10000; i < 60000; i++) {
        sprintf(name, "%u", i);
        CHECK(i >= 20000 || drop(&s, name) == PMS_OK);
        if (i >= 20000)
            CHECK(put(&s, name, "", 0) == PMS_OK && drop(&s, name) == PMS_OK);
    }
    CHECK(pms_dir_load(&s.ctx, s.dir, &v, NULL) == PMS_OK && v.h.count == 0);
    check_sound(&s);
    store_close(&s);
}

/* ---- damage ---- */

#define VICTIMS 12u

struct victim { /* a small directory and its bytes */
    struct store s;
    uint64_t node[VICTIMS], data[VICTIMS];
    struct {
        uint64_t off, bytes;
    } part[2 + VICTIMS];
};

static void victim_open(struct victim *x)
{
    char name[32];
    struct pms_object o;
    store_open(&x->s, 256);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        sprintf(name, "%u", i);
        x->data[i] = i % 3 ? user_block(&x->s, 100) : 0;
        CHECK(pms_dir_put(&x->s.ctx, x->s.dir, name, (uint32_t)strlen(name),
                          x->data[i] ? PMS_OBJECT_ARRAY : PMS_OBJECT_VALUE, name, i, x->data[i],
                          x->data[i] ? 100 : 0, NULL) == PMS_OK);
    }
    CHECK(put(&x->s, "gone", "", 0) == PMS_OK && put(&x->s, "gone too", "", 0) == PMS_OK);
    CHECK(drop(&x->s, "gone") == PMS_OK && drop(&x->s, "gone too") == PMS_OK);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        sprintf(name, "%u", i);
        CHECK(find(&x->s, name, &o) == PMS_OK);
        x->node[i] = o.node;
        x->part[2 + i].off = o.node;
        x->part[2 + i].bytes = sizeof(struct pms_node) + o.name_bytes + o.meta_bytes;
    }
    struct pms_dir_view v;
    CHECK(pms_dir_load(&x->s.ctx, x->s.dir, &v, NULL) == PMS_OK);
    x->part[0].off = x->s.dir;
    x->part[0].bytes = sizeof v.h;
    x->part[1].off = v.h.table;
    x->part[1].bytes = v.h.slots * sizeof *v.slot;
    commit(&x->s);
    check_sound(&x->s);
}

/* Everything one can do, on whatever lies there. Only that it ends, and ends well, is checked. */
static bool exercise(struct victim *x)
{
    struct pms_object o;
    char name[32];
    uint64_t node = 0, n = 0, owned;
    bool sound = check(&x->s, &owned) == PMS_OK;
    while (pms_dir_next(&x->s.ctx, x->s.dir, &node, &o, &x->s.error) == PMS_OK && node)
        CHECK(n++ < 10 * VICTIMS);
    for (uint32_t i = 0; i < VICTIMS; i++) {
        sprintf(name, "%u", i);
        if (find(&x->s, name, &o) == PMS_OK) { /* what is handed out may be read */
            volatile uint32_t sum = pms_crc32c(pms_crc32c(0, o.name, o.name_bytes), o.meta,
                                               o.meta_bytes);
            (void)sum;
        }
    }
    for (uint32_t i = 0; i < 60; i++) {
        sprintf(name, "%u", i % (2 * VICTIMS));
        if (i % 4 == 3)
            drop(&x->s, name);
        else
            put(&x->s, name,
                "01234567890123456789012345678901234567890123456789012345678901234567890123456789",
                i % 75);
    }
    rollback(&x->s);
    return sound;
}

/* What a directory cannot know: sizes that are still possible, and data that is another's (its
 * owner's count tells). */
static bool may_be_sound(uint64_t part, uint64_t byte)
{
    return part >= 2 &&
           ((byte >= offsetof(struct pms_node, data) && byte < offsetof(struct pms_node, kind)) ||
            (byte >= offsetof(struct pms_node, meta_bytes) &&
             byte < offsetof(struct pms_node, name_bytes)) ||
            (byte >= offsetof(struct pms_node, meta_room) &&
             byte < offsetof(struct pms_node, reserved)));
}

static void test_every_bit(void)
{
    struct victim x;
    uint64_t bits = 0;
    victim_open(&x);
    for (unsigned k = 0; k < 2 + VICTIMS; k++) {
        unsigned char *p = pms_map_at(&x.s.map, x.part[k].off);
        for (uint64_t bit = 0; bit < x.part[k].bytes * 8; bit += BIT_STEP, bits++) {
            p[bit / 8] ^= (unsigned char)(1u << bit % 8);
            bool sound = exercise(&x);
            p[bit / 8] ^= (unsigned char)(1u << bit % 8);
            bool in_meta = k >= 2 && bit / 8 >= x.part[k].bytes - (k - 2); /* any meta is sound */
            CHECK(in_meta ? sound : !sound || may_be_sound(k, bit / 8));
        }
    }
    printf("     %llu bits flipped\n", (unsigned long long)bits);
    check_sound(&x.s);
    store_close(&x.s);
}

static void test_hostile_words(void)
{
    struct victim x;
    victim_open(&x);
    for (uint32_t i = 0; i < 60000 / SLOWER; i++) {
        uint64_t *word[3], old[3], n = 1 + rnd(3);
        for (uint64_t j = 0; j < n; j++) {
            uint64_t k = rnd(3) ? rnd(2 + VICTIMS) : 0;
            const uint64_t interesting[] = {0,
                                            1,
                                            UINT64_MAX,
                                            64,
                                            x.s.dir,
                                            x.part[1].off,
                                            x.node[rnd(VICTIMS)],
                                            x.node[rnd(VICTIMS)],
                                            x.data[rnd(VICTIMS)],
                                            x.s.super.file_bytes - 64,
                                            x.s.super.segment[0].table_off,
                                            x.s.dir + 64,
                                            rnd(1ull << 40) & ~63ull,
                                            rnd(80)};
            word[j] = (uint64_t *)pms_map_at(&x.s.map, x.part[k].off) + rnd(x.part[k].bytes / 8);
            old[j] = *word[j];
            *word[j] = interesting[rnd(sizeof interesting / sizeof *interesting)];
        }
        exercise(&x);
        while (n--)
            *word[n] = old[n];
    }
    check_sound(&x.s);
    store_close(&x.s);
}

enum seed {
    COUNT_LESS,
    COUNT_MORE,
    USED_MORE,
    SLOTS_HALF,
    SLOTS_ODD,
    TABLE_ELSEWHERE,
    FIRST_SECOND,
    LAST_EARLIER,
    HEADER_RESERVED,
    SLOT_EMPTIED,
    SLOT_HASH,
    SLOT_TWICE,
    DELETED_HASH,
    SLOT_MOVED,
    NODE_PREV,
    NODE_NEXT_SKIPS,
    NODE_CYCLE,
    NODE_HASH,
    NODE_NAME,
    NODE_NAME_TWICE,
    NODE_NAME_BAD,
    NODE_KIND,
    NODE_META,
    NODE_ROOM,
    NODE_RESERVED,
    DATA_ELSEWHERE,
    DATA_LONGER,
    DATA_OF_VALUE,
    DATA_OF_ENGINE,
    SEEDS
};

static void damage_header(const struct victim *x, enum seed seed, struct pms_dir_header *h)
{
    switch (seed) {
    case COUNT_LESS: h->count--; break;
    case COUNT_MORE:
        h->count++;
        h->used = h->count > h->used ? h->count : h->used;
        break;
    case USED_MORE: h->used++; break;
    case SLOTS_HALF: h->slots /= 2; break;
    case SLOTS_ODD: h->slots--; break;
    case TABLE_ELSEWHERE: h->table = x->node[0]; break;
    case FIRST_SECOND: h->first = x->node[1]; break;
    case LAST_EARLIER: h->last = x->node[VICTIMS - 2]; break;
    default: h->reserved[1] = 1; break;
    }
}

static void damage_slot(const struct victim *x, enum seed seed, struct pms_dir_slot *table)
{
    uint64_t i = 0, j, empty = 0;
    while (table[i].node != x->node[5])
        i++;
    for (j = i + 1; table[j % 64].node <= PMS_DIR_DELETED; j++) {
    }
    while (table[empty].node != 0 || table[(empty + 63) % 64].node != 0 ||
           pms_dir_home(table[i].hash, 64) == empty)
        empty++; /* an empty slot after an empty slot: nobody's way leads there */
    switch (seed) {
    case SLOT_EMPTIED: table[i] = (struct pms_dir_slot){0, 0}; break;
    case SLOT_HASH: table[i].hash ^= 1; break;
    case SLOT_TWICE: table[i] = table[j % 64]; break;
    case DELETED_HASH: table[empty].hash = 1; break;
    default:
        table[empty] = table[i];
        table[i] = (struct pms_dir_slot){0, 0};
        break;
    }
}

static void damage_node(const struct victim *x, enum seed seed, struct pms_node *n)
{
    unsigned char *name = (unsigned char *)(n + 1);
    switch (seed) {
    case NODE_PREV: n->prev = x->node[1]; break;
    case NODE_NEXT_SKIPS: n->next = x->node[7]; break;
    case NODE_CYCLE: n->next = x->node[3]; break;
    case NODE_HASH: n->hash ^= 1; break;
    case NODE_NAME: name[0] = 'z'; break;
    case NODE_NAME_TWICE: name[0] = '4'; break; /* another node's */
    case NODE_NAME_BAD: name[0] = 0x80; break;
    case NODE_KIND: n->kind = 4; break;
    case NODE_META: n->meta_bytes = n->meta_room + 1; break;
    case NODE_ROOM: n->meta_room += 64; break;
    case NODE_RESERVED: n->reserved = 1; break;
    case DATA_ELSEWHERE: n->data += 64; break;
    case DATA_LONGER: n->data_bytes = 129; break;
    case DATA_OF_VALUE: n->kind = PMS_OBJECT_VALUE; break;
    default:
        n->data = x->node[0];
        n->data_bytes = 10;
        break;
    }
}

static void test_check_finds(void)
{
    for (enum seed seed = 0; seed < SEEDS; seed++) {
        struct victim x;
        uint64_t owned;
        victim_open(&x);
        if (seed <= HEADER_RESERVED)
            damage_header(&x, seed, pms_map_at(&x.s.map, x.s.dir));
        else if (seed <= SLOT_MOVED)
            damage_slot(&x, seed, pms_map_at(&x.s.map, x.part[1].off));
        else
            damage_node(&x, seed, pms_map_at(&x.s.map, x.node[5]));
        CHECK(check(&x.s, &owned) == PMS_E_CORRUPT && x.s.error.what[0] && x.s.error.offset);
        store_close(&x.s);
    }
}

static int stop_at_node(void *arg, uint64_t off, const struct pms_object *object)
{
    *(uint64_t *)arg = off;
    return object ? 77 : 0;
}

static void test_check_stops(void)
{
    struct victim x;
    uint64_t off;
    victim_open(&x);
    CHECK(pms_dir_check(&x.s.ctx, x.s.dir, stop_at_node, &off, NULL) == 77 && off == x.node[0]);
    store_close(&x.s);
}

/* ---- times ---- */

static void report(const char *what, double start, uint32_t n)
{
    printf("     %-28s %7.0f ns each\n", what, (now() - start) * 1e9 / n);
}

static void test_many_names(void)
{
    const uint32_t n = 1000000 / SLOWER;
    struct store s;
    struct pms_object o;
    char name[32];
    uint64_t node = 0, owned, walked = 0;
    store_open(&s, 400u << 20 >> 12);
    commit(&s);
    double start = now();
    for (uint32_t i = 0; i < n; i++) {
        sprintf(name, "layer.%u.weight", i);
        CHECK(put(&s, name, "0123456789abcdefghij", 20) == PMS_OK);
    }
    report("insert, one transaction", start, n);
    commit(&s);
    start = now();
    for (uint32_t i = 0; i < n; i++) {
        sprintf(name, "layer.%u.weight", (uint32_t)rnd(n));
        CHECK(find(&s, name, &o) == PMS_OK);
    }
    report("find, random", start, n);
    start = now();
    for (uint32_t i = 0; i < n; i++) {
        sprintf(name, "layer.%u.weight", i % 1000);
        CHECK(find(&s, name, &o) == PMS_OK);
    }
    report("find, warm", start, n);
    start = now();
    for (uint32_t i = 0; i < n; i++) {
        sprintf(name, "none.%u", i);
        CHECK(find(&s, name, &o) == PMS_E_NOT_FOUND);
    }
    report("find, absent", start, n);
    start = now();
    while (pms_dir_next(&s.ctx, s.dir, &node, &o, NULL) == PMS_OK && node)
        walked++;
    CHECK(walked == n);
    report("next", start, n);
    start = now();
    CHECK(check(&s, &owned) == PMS_OK && owned == n + 2);
    report("check", start, n);
    start = now();
    for (uint32_t i = 0; i < n; i++) {
        sprintf(name, "layer.%u.weight", i);
        CHECK(put(&s, name, "0123456789abcdefGhij", 20) == PMS_OK);
    }
    report("put in place", start, n);
    commit(&s);
    start = now();
    for (uint32_t i = 0; i < n; i++) {
        sprintf(name, "layer.%u.weight", i);
        CHECK(drop(&s, name) == PMS_OK);
    }
    report("remove, one transaction", start, n);
    check_sound(&s);
    rollback(&s);
    check_sound(&s);
    store_close(&s);
}

int main(void)
{
    TEST(test_put_in_place);
    TEST(test_arguments);
    TEST(test_groups);
    TEST(test_model);
    TEST(test_full);
    TEST(test_crowded_homes);
    TEST(test_table_size);
    TEST(test_check_finds);
    TEST(test_check_stops);
    TEST(test_every_bit);
    TEST(test_hostile_words);
    TEST(test_many_names);
    return test_summary();
}
