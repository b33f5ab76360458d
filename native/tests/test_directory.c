/* Directories against a model: random changes, commits, roll backs, a full store, times. */
#include "directory_store.h"

/* ---- a store in anonymous memory, with one directory ---- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

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
    TEST(test_many_names);
    return test_summary();
}
