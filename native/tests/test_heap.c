/* The allocator: size classes, reuse (I6), commits, roll backs, pins, a full store, growth, hostile
 * tables. */
#include "heap_store.h"

/* ---- size classes ---- */

static void test_classes(void)
{
    static const double step = 1.0547660764816467; /* 2 ^ (1/13) */
    unsigned n = pms_class_count();
    uint32_t expected = 0, octave = 1024;
    double exact = 1024;
    CHECK(n <= 128 && pms_class_bytes(0) == 64 && pms_class_bytes(n - 1) == PMS_SMALL_MAX);
    for (unsigned c = 0; c < n; c++) {
        uint32_t bytes = pms_class_bytes(c), pages = pms_class_pages(c), slots = pms_class_slots(c);
        if (expected < 1024) {
            expected += 64;
        } else {
            uint32_t before = expected;
            while (expected == before) {
                exact *= step;
                expected = exact > 2 * octave * 0.999 ? 2 * octave
                                                      : (uint32_t)(exact / 64 + 0.999999) * 64;
                if (expected == 2 * octave)
                    exact = octave *= 2;
            }
        }
        CHECK(bytes == expected);
        CHECK(pages >= 16 && pages <= 64 && slots >= 8 && slots <= 1024 &&
              slots == pages * PMS_PAGE / bytes);
        CHECK(pages * PMS_PAGE - slots * bytes <= pages * PMS_PAGE / 25);
        CHECK(slots <= 2 * (pages - 1) * 64);
        for (uint32_t p = 16; p < pages; p++) /* no fewer pages would do */
            CHECK(p * PMS_PAGE / bytes < 8 ||
                  p * PMS_PAGE - p * PMS_PAGE / bytes * bytes > p * PMS_PAGE / 25);
    }
    for (uint64_t b = 1; b <= PMS_SMALL_MAX; b++) {
        unsigned c = pms_class_of(b);
        CHECK(pms_class_bytes(c) >= b && (c == 0 || pms_class_bytes(c - 1) < b));
    }
}

/* ---- I6 ---- */

static void test_reuse(uint64_t bytes)
{
    struct store s;
    store_open(&s, 4096, full_log(4096), 0);
    uint64_t a = alloc(&s, bytes), keep = alloc(&s, bytes);
    CHECK(pms_heap_is_fresh(s.heap, a) && walked(&s) == 2);
    release(&s, a);
    CHECK(!pms_heap_free(s.heap, keep, NULL) &&
          pms_heap_free(s.heap, a, &s.error) == PMS_E_INVALID && s.error.offset == a);
    CHECK(alloc(&s, bytes) == a); /* born and freed in one transaction: reused at once */
    keep = alloc(&s, bytes);
    commit(&s);
    CHECK(!pms_heap_is_fresh(s.heap, a) && !pms_heap_is_fresh(s.heap, keep));
    release(&s, a);
    uint64_t b = alloc(&s, bytes);
    CHECK(b != a); /* not before the commit */
    commit(&s);
    CHECK(alloc(&s, bytes) == a); /* but after it */
    commit(&s);
    check_index(&s);
    CHECK(pms_heap_free(s.heap, a + PMS_LINE / 2, NULL) == PMS_E_INVALID);
    CHECK(pms_heap_free(s.heap, 0, NULL) == PMS_E_INVALID &&
          pms_heap_free(s.heap, UINT64_MAX, NULL) == PMS_E_INVALID);
    store_close(&s);
}

/* no pre-images for what was dead at the last commit, if it is the user's */
static void test_fresh_pages(void)
{
    struct store s;
    static const uint64_t sizes[] = {64, 9000, 100000, PMS_HUGE};
    store_open(&s, 4096, full_log(4096), 0);
    for (unsigned i = 0; i < 8; i++) {
        struct pms_block b;
        uint64_t off = alloc_as(&s, sizes[i / 2], i % 2 ? PMS_OWNER_ENGINE : PMS_OWNER_USER);
        CHECK(pms_heap_find(s.heap, off, &b) && b.extent_bytes % PMS_PAGE == 0);
        for (uint64_t p = b.extent_off / PMS_PAGE; p < (b.extent_off + b.extent_bytes) / PMS_PAGE;
             p++)
            CHECK(pms_undo_page_prepared(&s.undo, p) == (i % 2 == 0));
    }
    commit(&s);
    uint64_t off = alloc(&s, 64); /* a slot of an older slab: its neighbours are live */
    CHECK(pms_heap_is_fresh(s.heap, off) && !pms_undo_page_prepared(&s.undo, off / PMS_PAGE));
    store_close(&s);
}

static void test_loop_without_commit(void) /* store["step"] = i does not fill the store */
{
    struct store s;
    store_open(&s, 512, full_log(512), 0);
    uint64_t small = alloc(&s, 100), large = alloc(&s, 700 << 10);
    for (int i = 0; i < 10000; i++) {
        uint64_t small2 = alloc(&s, 100), large2 = alloc(&s, 700 << 10);
        release(&s, small);
        release(&s, large);
        small = small2;
        large = large2;
    }
    CHECK(stats(&s).blocks == 2 && walked(&s) == 2);
    store_close(&s);
}

/* ---- roll back ---- */

struct listing {
    uint64_t n, off[70000];
};

static int list_block(void *ctx, const struct pms_block *b)
{
    struct listing *l = ctx;
    CHECK(l->n < 70000 && b->live);
    l->off[l->n++] = b->off;
    return 0;
}

static void test_rollback(void)
{
    struct store s;
    static struct listing before, after;
    static uint64_t off[512];
    store_open(&s, 8192, full_log(8192), 2048);
    for (int i = 0; i < 512; i++)
        off[i] = alloc_as(&s, log_uniform(4, 16), i % 3 ? PMS_OWNER_USER : PMS_OWNER_ENGINE);
    commit(&s);
    for (int round = 0; round < 20; round++) {
        before.n = after.n = 0;
        CHECK(!pms_heap_walk(s.heap, list_block, &before, NULL));
        struct pms_heap_stats st = stats(&s);
        for (int i = 0; i < 200; i++) {
            uint64_t victim = off[rnd(512)];
            pms_heap_free(s.heap, victim, NULL); /* maybe a second time: refused */
            alloc_as(&s, log_uniform(4, 18), i % 2 ? PMS_OWNER_USER : PMS_OWNER_ENGINE);
        }
        rollback(&s);
        CHECK(!pms_heap_walk(s.heap, list_block, &after, NULL));
        CHECK(memcmp(&before, &after, sizeof before) == 0);
        struct pms_heap_stats st2 = stats(&s);
        CHECK(memcmp(&st, &st2, sizeof st) == 0);
        check_index(&s);
    }
    for (int i = 0; i < 512; i++)
        release(&s, off[i]);
    commit(&s);
    CHECK(stats(&s).blocks == 0 && walked(&s) == 0);
    store_close(&s);
}

/* ---- pins ---- */

/* fills the store */
static void none_overlaps(struct store *s, uint64_t off, uint64_t bytes, uint64_t size)
{
    uint64_t got;
    while (pms_heap_alloc(s->heap, size, PMS_OWNER_USER, &got, NULL) == PMS_OK)
        CHECK(got + size <= off || got >= off + bytes);
}

static void test_pins(uint64_t bytes)
{
    struct store s;
    store_open(&s, 2048, full_log(2048), 0);
    uint64_t a = alloc(&s, bytes);
    commit(&s);
    pin(&s, a);
    pin(&s, a);
    CHECK(stats(&s).pinned_bytes == 0);
    release(&s, a);
    CHECK(stats(&s).pinned_bytes >= bytes);
    commit(&s);
    none_overlaps(&s, a, bytes, bytes); /* freed, committed, pinned twice */
    rollback(&s);
    none_overlaps(&s, a, bytes, bytes);
    pms_heap_unpin(s.heap, a);
    rollback(&s);
    none_overlaps(&s, a, bytes, bytes); /* pinned once more */
    rollback(&s);
    pms_heap_unpin(s.heap, a);
    CHECK(alloc(&s, bytes) == a && stats(&s).pinned_bytes == 0);
    rollback(&s);
    check_index(&s);

    alloc(&s, bytes);
    /* born in a transaction that is rolled back: its extent is gone, the view lives */
    uint64_t born = alloc(&s, bytes);
    pin(&s, born);
    rollback(&s);
    CHECK(walked(&s) == 0 && stats(&s).pinned_bytes >= bytes);
    none_overlaps(&s, born, bytes, bytes);
    rollback(&s);
    none_overlaps(&s, born, bytes, 100000);
    CHECK(walked(&s) == stats(&s).blocks);
    commit(&s);
    rollback(&s); /* descriptors still tile, with the pinned pages inside a free one */
    pms_heap_unpin(s.heap, born);
    none_overlaps(&s, 0, 0, bytes);
    commit(&s);
    check_index(&s);

    store_close(&s);
}

static void test_pin_in_transaction(void)
{
    struct store s;
    store_open(&s, 128, full_log(128), 0);
    /* view taken, object deleted, view dropped: no commit is needed */
    for (int i = 0; i < 1000; i++)
        for (uint64_t bytes = 100; bytes <= 100000; bytes *= 1000) {
            uint64_t a = alloc(&s, bytes);
            pin(&s, a);
            release(&s, a);
            pms_heap_unpin(s.heap, a);
        }
    uint64_t a = alloc(&s, 100);
    commit(&s);
    pin(&s, a);
    release(&s, a);
    pms_heap_unpin(s.heap, a);
    CHECK(alloc(&s, 100) != a); /* was live at the last commit */
    rollback(&s);
    struct pms_block b;
    CHECK(pms_heap_find(s.heap, a + 5, &b) && b.off == a && b.live);
    store_close(&s);
}

/* ---- full ---- */

static void test_full(void)
{
    struct store s;
    store_open(&s, 1000, full_log(1000), 0);
    static uint64_t off[5000];
    for (uint64_t bytes = 1; bytes < 4 << 20; bytes = bytes * 7 + 3) {
        unsigned n = 0;
        while (pms_heap_alloc(s.heap, bytes, PMS_OWNER_USER, &off[n % 5000], &s.error) == PMS_OK)
            n++;
        CHECK(s.error.status == PMS_E_FULL && s.error.needed > s.error.available && n > 0 &&
              walked(&s) == n);
        struct pms_heap_stats st = stats(&s);
        CHECK(pms_heap_alloc(s.heap, bytes, PMS_OWNER_USER, &off[4999], NULL) == PMS_E_FULL);
        struct pms_heap_stats st2 = stats(&s);
        CHECK(memcmp(&st, &st2, sizeof st) == 0 && st.log_need <= pms_undo_capacity(&s.undo));
        if (bytes >= 1024) /* small blocks waste little of a full store */
            CHECK(st.used_bytes >= st.data_bytes * (bytes < 1 << 20 ? 90 : 50) / 100);
        commit(&s);
        static struct listing l;
        l.n = 0;
        pms_heap_walk(s.heap, list_block, &l, NULL);
        for (uint64_t i = 0; i < l.n; i++)
            release(&s, l.off[i]);
        commit(&s);
        CHECK(pms_heap_alloc(s.heap, (uint64_t)1 << 62, PMS_OWNER_USER, &off[0], NULL) ==
              PMS_E_FULL);
        commit(&s);
        /* no empty slab keeps it from being whole again */
        uint64_t whole = alloc(&s, 1000 * PMS_PAGE - PMS_HUGE);
        release(&s, whole);
        commit(&s);
        check_index(&s);
    }
    store_close(&s);

    store_open(&s, 1000, 300 * PMS_PAGE, 0); /* the log is what is short (I5) */
    unsigned n = 0;
    while (pms_heap_alloc(s.heap, 50 * PMS_PAGE, PMS_OWNER_USER, &off[n], &s.error) == PMS_OK)
        n++;
    CHECK(n == 5 && s.error.status == PMS_E_FULL &&
          s.error.available == pms_undo_capacity(&s.undo));
    release(&s, off[0]);
    CHECK(alloc(&s, 50 * PMS_PAGE) == off[0]);
    store_close(&s);

    /* an empty slab: its pages are given back, for the next transaction */
    store_open(&s, 64, full_log(64), 0);
    off[0] = alloc(&s, 64);
    commit(&s);
    release(&s, off[0]);
    commit(&s);
    CHECK(pms_heap_alloc(s.heap, 64 * PMS_PAGE, PMS_OWNER_USER, &off[0], NULL) == PMS_E_FULL);
    rollback(&s);
    CHECK(pms_heap_alloc(s.heap, 64 * PMS_PAGE, PMS_OWNER_USER, &off[0], NULL) == PMS_E_FULL);
    commit(&s);
    alloc(&s, 64 * PMS_PAGE);
    store_close(&s);

    /* smaller than a handful of slabs: small blocks take what there is */
    store_open(&s, 20, full_log(20), 0);
    for (n = 0; n < 40; n++)
        off[n] = alloc(&s, 1400 - n * 25);
    store_close(&s);
}

/* ---- growth ---- */

static void test_growth(void)
{
    struct store s;
    store_open(&s, 256, full_log(256), 0);
    uint64_t a = alloc(&s, 1 << 19), b;
    commit(&s);
    release(&s, a);
    CHECK(pms_heap_alloc(s.heap, 1 << 20, PMS_OWNER_USER, &b, NULL) == PMS_E_FULL);
    add_segment(&s, 1024, full_log(1024));
    CHECK(ftruncate(s.map.fd, (off_t)s.super.file_bytes) == 0);
    CHECK(pms_map_grow(&s.map, s.super.file_bytes, &s.error) == PMS_OK);
    format_segment(&s, 1);
    pms_undo_set_extents(&s.undo, &s.super);
    CHECK(pms_heap_add_segment(s.heap, 1, &s.error) == PMS_OK);
    b = alloc(&s, 1 << 20);
    CHECK(b >= s.super.segment[1].data_off);
    /* freed in this transaction: growing does not forget it */
    none_overlaps(&s, a, 1 << 19, 1 << 18);
    rollback(&s);
    CHECK(stats(&s).blocks == 1 && walked(&s) == 1);
    check_index(&s);
    store_close(&s);
}

/* ---- hostile tables ---- */

struct bounds {
    uint64_t from, to;
};

static int within(void *ctx, const struct pms_block *b)
{
    const struct bounds *x = ctx;
    CHECK(b->off >= x->from && b->extent_off >= x->from && b->off + b->bytes <= x->to);
    CHECK(b->off + b->bytes <= b->extent_off + b->extent_bytes &&
          b->extent_off + b->extent_bytes <= x->to);
    return 0;
}

/* of a live block */
static bool in_descriptor(const struct store *s, const uint64_t *off, unsigned n, unsigned bit)
{
    for (unsigned i = 0; i < n; i++) {
        struct pms_block b;
        if (pms_heap_find(s->heap, off[i], &b) && b.live &&
            bit / 128 == b.extent_off / PMS_PAGE - s->super.segment[0].data_off / PMS_PAGE)
            return bit % 128 < 64;
    }
    return false;
}

static void test_hostile(void)
{
    struct store s;
    store_open(&s, 100, full_log(100), 0);
    uint64_t off[6];
    for (unsigned i = 0; i < 6; i++)
        off[i] = alloc_as(&s, i % 2 ? 40000 : 3000, i < 3 ? PMS_OWNER_USER : PMS_OWNER_ENGINE);
    commit(&s);
    release(&s, off[1]);
    commit(&s);
    unsigned char *table = pms_map_at(&s.map, s.super.segment[0].table_off);
    unsigned corrupt = 0, bits = 100 * sizeof(struct pms_pte) * 8;
    for (unsigned bit = 0; bit < bits; bit++) {
        bool checked = in_descriptor(&s, off, 6, bit);
        table[bit / 8] ^= (unsigned char)(1u << (bit % 8));
        struct pms_heap *h;
        struct pms_block b;
        int status = pms_heap_open(&h, &s.undo, &s.super, &s.error);
        CHECK(status == PMS_OK ||
              (status == PMS_E_CORRUPT && s.error.offset >= s.super.segment[0].table_off));
        CHECK(!checked || status == PMS_E_CORRUPT);
        corrupt += status != PMS_OK;
        for (unsigned i = 0; i < 6; i++)
            /* the index of the sound table over the broken one */
            pms_heap_find(s.heap, off[i], &b);
        uint64_t n = 0;
        CHECK(pms_heap_walk(s.heap, count_block, &n, NULL) == status);
        pms_heap_close(h);
        table[bit / 8] ^= (unsigned char)(1u << (bit % 8));
    }
    CHECK(corrupt > bits / 20);
    struct bounds data = {s.super.segment[0].data_off,
                          s.super.segment[0].data_off + 100 * PMS_PAGE};
    /* descriptors with right check bits, but any content */
    for (unsigned i = 0; i < 200000 / SLOWER; i++) {
        static unsigned char saved[100 * sizeof(struct pms_pte)];
        memcpy(saved, table, sizeof saved);
        for (unsigned k = 0; k < 3; k++) {
            uint64_t page = rnd(100), word = rnd(120) | rnd(100) << 36 | rnd(8) << 44;
            if (rnd(8) == 0)
                word = rnd(1ull << 48);
            uint64_t salt = s.super.segment[0].data_off / PMS_PAGE + page;
            struct pms_pte pte = {word | (uint64_t)pms_check16(salt, word) << 48,
                                  rnd(3) ? 0 : rnd(1 << 20)};
            memcpy(table + page * sizeof pte, &pte, sizeof pte);
        }
        struct pms_heap *h;
        int status = pms_heap_open(&h, &s.undo, &s.super, &s.error);
        CHECK(status == PMS_OK || status == PMS_E_CORRUPT);
        if (h)
            CHECK(pms_heap_walk(h, within, &data, NULL) == PMS_OK);
        pms_heap_close(h);
        memcpy(table, saved, sizeof saved);
    }
    struct pms_superblock bad = s.super;
    struct pms_heap *h;
    uint64_t *fields[] = {&bad.segment[0].table_off, &bad.segment[0].data_off,
                          &bad.segment[0].data_pages};
    for (unsigned i = 0; i < 3; i++)
        for (unsigned bit = 0; bit < 64; bit++) {
            *fields[i] ^= 1ull << bit;
            int status = pms_heap_open(&h, &s.undo, &bad, &s.error);
            CHECK(status == PMS_OK || status == PMS_E_CORRUPT);
            pms_heap_close(h);
            *fields[i] ^= 1ull << bit;
        }
    store_close(&s);
}

/* ---- times ---- */

static void test_reuse_of_sizes(void)
{
    test_reuse(64);
    test_reuse(5000);
    test_reuse(1 << 20);
    test_reuse(3 << 20);
}

static void test_pins_of_sizes(void)
{
    test_pins(100);
    test_pins(30000);
    test_pins(300000);
    test_pins(PMS_HUGE + 1);
}

int main(void)
{
    TEST(test_classes);
    TEST(test_reuse_of_sizes);
    TEST(test_fresh_pages);
    TEST(test_loop_without_commit);
    TEST(test_rollback);
    TEST(test_pins_of_sizes);
    TEST(test_pin_in_transaction);
    TEST(test_full);
    TEST(test_growth);
    TEST(test_hostile);
    return test_summary();
}
