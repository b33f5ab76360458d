/* The undo log: everything that is live fits (I5), and faults and declared writes in a store. */
#include "undo_bench.h"

/* A user's store, while the hook watches. The compiler sees nobody who could look at the hook
 * meanwhile. */
static void poke(unsigned char *addr, unsigned char value)
{
    trace_start();
    __asm__ volatile("" : : : "memory");
    *(volatile unsigned char *)addr = value;
    __asm__ volatile("" : : : "memory");
    pms_persist_hook = NULL;
}

/* ---- I5: everything fits ---- */

/* Every data page on its own, and every granule of the page tables on its own, in an order given
 * by `way`. */
static void capture_everything(struct bench *b, int way)
{
    pms_undo_begin(&b->undo, b->undo.tag + 1);
    if (way & 1) { /* the fast log is a bonus: not counted on */
        b->undo.log.at_extent = 1;
        b->undo.log.at = 0;
    }
    pms_undo_prepare_locked(&b->undo, PMS_OFF_ROOT, PMS_GRANULE);
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < b->super.segment_count; i++) {
            const struct pms_segment *s = &b->super.segment[i];
            if ((pass == 0) == ((way & 2) != 0))
                for (uint64_t at_byte = 0; at_byte < s->data_pages * sizeof(struct pms_pte);
                     at_byte += PMS_GRANULE)
                    pms_undo_append(&b->undo, s->table_off + at_byte, PMS_GRANULE);
            else
                for (uint64_t page = 0; page < s->data_pages; page++)
                    pms_undo_append(&b->undo, s->data_off + page * PMS_PAGE, PMS_PAGE);
        }
    pms_undo_fence_locked(&b->undo);
}

static void worst_case_fits(void)
{
    static const struct {
        uint64_t file, growth;
    } size[] = {{MIB, 0}, {MIB + 4096 * 3, 0}, {9 * MIB, 0}, {40 * MIB, 0}, {MIB, 3 * MIB}};
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        struct bench b;
        bench_open(&b, size[i].file, size[i].growth);
        uint64_t need = 0;
        for (uint32_t s = 0; s < b.super.segment_count; s++)
            need += b.super.segment[s].data_pages *
                    (PMS_PAGE + PMS_LINE + sizeof(struct pms_pte) * PMS_LINE / PMS_GRANULE);
        CHECK(pms_undo_capacity(&b.undo) >= need);
        for (int way = 0; way < 4; way++) {
            capture_everything(&b, way); /* an assertion of take_place's would end us */
            CHECK(b.undo.log.at_extent < b.undo.log.extent_count);
        }
        uint64_t data = b.super.segment[0].data_pages * PMS_PAGE;
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        /* in one piece, by all cores where it is large */
        pms_undo_append(&b.undo, data_of(&b), data);
        CHECK(scan(&b, b.undo.tag)->bytes == data);
        bench_close(&b);
    }
}

/* ---- in a store ---- */

static void shut(struct pms_pool *pool)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static unsigned char *array(struct pms_pool *pool, const char *name, uint64_t bytes)
{
    struct pms_error e;
    uint64_t data = 0;
    int status = pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                      PMS_FILL_ZERO, NULL, 0, 1, &data, &e);
    return status == PMS_OK ? pool->map.user + data : NULL;
}

static void a_fault_opens_its_page_after_the_entry(void)
{
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    static const uint64_t size[] = {64, 5000, 100000, 10 << 20};
    struct pms_error e;
    for (size_t d = 0; d < 3; d++) {
        struct pms_pool *pool = store(domains[d], 32 * MIB, 0);
        unsigned char *a[4];
        char name[] = "a";
        for (size_t i = 0; i < 4; i++, name[0]++)
            a[i] = array(pool, name, size[i]);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        for (size_t i = 0; i < 4; i++) {
            unsigned char *page = pool->map.user +
                                  ((uint64_t)(a[i] + size[i] / 2 - pool->map.user) & ~4095ull);
            poke(a[i] + size[i] / 2, 1);
            uint32_t opened = first_change(0, page, PMS_PAGE);
            CHECK(steps < TRACE_MAX && opened < steps &&
                  trace[opened].primitive == PMS_PRIM_PROTECT);
            /* no other page before */
            CHECK(first_change(0, pool->map.user, pool->map.bytes) == opened);
            check_fenced_before(&pool->undo, opened);
            CHECK(count_of(PMS_PRIM_FENCE) == 1 && count_of(PMS_PRIM_PROTECT) == 1);
            poke(a[i] + size[i] / 2, 2); /* captured: no more steps */
            CHECK(steps == 0);
        }
        struct pms_range both[2] = {{(uint64_t)(uintptr_t)(a[2] + 40960), 10},
                                    {(uint64_t)(uintptr_t)a[3], 9 << 20}};
        CHECK(pms_commit(pool, &e) == PMS_OK);
        trace_start();
        CHECK(pms_will_write(pool, both, 2, &e) == PMS_OK);
        pms_persist_hook = NULL;
        uint32_t opened = first_change(0, pool->map.user, pool->map.bytes);
        CHECK(opened < steps && trace[opened].primitive == PMS_PRIM_PROTECT);
        check_fenced_before(&pool->undo, opened);
        for (uint32_t i = opened; i < steps; i++) /* both captured before either opens */
            CHECK(!in_log(&trace[i], &pool->undo) && trace[i].primitive != PMS_PRIM_FENCE);
        shut(pool);
    }
}

/* Stored to without a word after a part of it was declared, and the other way round. */
static void roll_back_after_both_kinds_of_write(void)
{
    struct pms_error e;
    struct pms_pool *pool = store(PMS_DOMAIN_EMULATED, 4 * MIB, 0);
    unsigned char *a = array(pool, "a", 8192), before[8192];
    scramble(before, sizeof before);
    CHECK(declared_write(pool, a, before, sizeof before, &e) == PMS_OK &&
          pms_commit(pool, &e) == PMS_OK);
    for (int round = 0; round < 3; round++) {
        CHECK(declared_write(pool, a + 64, "declared", 8, &e) == PMS_OK);
        memset(a, 1, 100); /* over it */
        CHECK(declared_write(pool, a + 64, "declared", 8, &e) == PMS_OK);
        CHECK(memcmp(a + 64, "declared", 8) == 0 && a[0] == 1);
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(memcmp(a, before, sizeof before) == 0);
    }
    shut(pool);
}

static void put_value(struct pms_pool *pool, int i, char fill, uint32_t bytes, int expected)
{
    char name[16], value[600];
    struct pms_error e;
    snprintf(name, sizeof name, "v%d", i);
    memset(value, fill, sizeof value);
    CHECK(pms_object_put_value(pool, 0, name, (uint32_t)strlen(name), value, bytes, &e) ==
          expected);
}

/* I5 for the engine's own blocks: in a store full of names every one is changed, and then
 * removed, in one transaction. */
static void a_full_directory_fits(void)
{
    struct pms_error e;
    struct pms_pool *pool = store(PMS_DOMAIN_EMULATED, 2 * MIB, 2 * MIB);
    int n = 0;
    for (;; n++) {
        char name[16];
        snprintf(name, sizeof name, "v%d", n);
        int status = pms_object_put_value(pool, 0, name, (uint32_t)strlen(name), "0123456789", 10,
                                          &e);
        if (status == PMS_E_FULL)
            break;
        CHECK(status == PMS_OK && n < 100000);
        if (status != PMS_OK || n == 100000)
            break;
    }
    CHECK(n > 1000 && pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_begin(pool, 0, &e) == PMS_OK);
    for (int i = n; i-- > 0;) /* from the far end: no two captures join */
        put_value(pool, i, 'x', 10, PMS_OK);
    for (int i = 0; i < n; i++) {
        char name[16];
        /* scattered, where 7919 and n have no common factor */
        snprintf(name, sizeof name, "v%d", i * 7919 % n);
        pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e);
    }
    CHECK(pms_end(pool, 0, &e) == PMS_OK);
    uint64_t count = 0;
    CHECK(pms_object_count(pool, 0, &count, &e) == PMS_OK && count == (uint64_t)n);
    shut(pool);
}

/* I5 for small declared writes: the log takes each page once. */
static void write_every_granule(struct bench *unused)
{
    (void)unused;
    struct pms_error e;
    struct pms_pool *pool = store(PMS_DOMAIN_EMULATED, 8 * MIB, 8 * MIB);
    unsigned char *a[100];
    int n = 0;
    for (char name[16]; n < 100; n++) {
        snprintf(name, sizeof name, "a%d", n);
        if (!(a[n] = array(pool, name, 200000)))
            break;
    }
    if (pms_commit(pool, &e) != PMS_OK || n == 0)
        _exit(3);
    for (int i = 0; i < n; i++)
        for (uint64_t off = 0; off + 8 <= 200000; off += PMS_GRANULE) {
            int status = declared_write(pool, a[i] + off, "12345678", 8, &e);
            if (status != PMS_OK && status != PMS_E_FULL)
                _exit(4);
        }
    /* and every page without a word: that cannot be refused */
    for (int i = 0; i < n; i++)
        memset(a[i], 9, 200000);
    if (pms_rollback(pool, &e) != PMS_OK || a[0][0] != 0 || a[n - 1][199968] != 0)
        _exit(5);
    pms_pool_close(pool, 0, &e);
    pms_pool_release(pool);
}

static void scattered_declared_writes_fit(void)
{
    CHECK(wait_status(write_every_granule, NULL) == 0);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-undo-room-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    TEST(worst_case_fits);
    TEST(a_fault_opens_its_page_after_the_entry);
    TEST(roll_back_after_both_kinds_of_write);
    TEST(a_full_directory_fits);
    TEST(scattered_declared_writes_fit);
    unlink(path);
    return test_summary();
}
