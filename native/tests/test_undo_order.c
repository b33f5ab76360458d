/* The undo log: the order of primitives around every store (I2, I3), as the seam's hook sees it. */
#include "undo_bench.h"

/* ---- the order of primitives ---- */

static void a_store_comes_after_its_entry(void)
{
    static const uint64_t size[] = {1, 8, 31, 32, 33, 100, 4096, 10000};
    struct bench b;
    unsigned char src[10000];
    bench_open(&b, MIB, 0);
    memset(src, 0x77, sizeof src);
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        uint64_t off = data_of(&b) + i * 16384 + 5;
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        trace_start();
        pms_undo_store(&b.undo, off, src, size[i]);
        pms_persist_hook = NULL;
        uint32_t changed = first_change(0, at(&b, off), size[i]);
        CHECK(changed == steps - 1); /* the last step, and the only one there */
        check_fenced_before(&b.undo, changed);
        CHECK(count_of(PMS_PRIM_FENCE) == 1);
        CHECK(memcmp(at(&b, off), src, size[i]) == 0);
    }
    bench_close(&b);
}

/* What a crash right before the store to the target would find: the pre-image, durable by then.
 * Looks from inside the hook. */
static struct {
    const struct bench *b;
    uint64_t off, len;
    const unsigned char *before;
    uint32_t looked, good;
} witness;

static int covers_witness(void *ctx, const struct pms_entry *e, const void *image)
{
    (void)ctx;
    uint64_t in = witness.off - e->target;
    bool all = e->target <= witness.off && witness.off + witness.len <= e->target + e->len;
    return all && memcmp((const unsigned char *)image + in, witness.before, witness.len) == 0;
}

static int look_in_log(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    struct step s = {primitive, addr, bytes};
    if (is_store(&s) && touches(&s, at(witness.b, witness.off), witness.len)) {
        witness.looked++;
        witness.good += pms_undo_scan(&witness.b->undo, witness.b->undo.tag, covers_witness,
                                      NULL) == 1;
    }
    return 0;
}

static void the_log_has_it_when_the_store_comes(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    scramble(at(&b, data_of(&b)), 16 * PMS_PAGE);
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t off = data_of(&b) + random64() % (15 * PMS_PAGE), len = 1 + random64() % 700;
        unsigned char *before = copy_of(&b, off, len), src[700];
        memset(src, (int)i, sizeof src);
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        witness.b = &b;
        witness.off = off;
        witness.len = len;
        witness.before = before;
        pms_persist_hook = look_in_log;
        pms_undo_store(&b.undo, off, src, len);
        pms_persist_hook = NULL;
        free(before);
    }
    CHECK(witness.looked == 200 && witness.good == 200);
    bench_close(&b);
}

static const struct pms_undo *lock_of;
static uint32_t unfenced_steps, free_steps;

static int record_lock(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    unfenced_steps += lock_of->log.unfenced;
    free_steps += atomic_load(&lock_of->lock.word) == 0;
    return record(primitive, addr, bytes);
}

/* With one fence, and the log lock held throughout: an entry of another thread, fenced for that
 * thread's core alone, must not come to lie above one that is not durable yet. */
static void several_stores_share_a_fence(void)
{
    static const char text[] = "0123456789012345678901234567890123456789";
    struct pms_store store[5];
    struct bench b;
    bench_open(&b, MIB, 0);
    uint64_t data = data_of(&b), fences = b.persist.fences;
    for (uint64_t i = 0; i < 5; i++)
        store[i] = (struct pms_store){data + i * 200, text, 40};
    lock_of = &b.undo;
    trace_start();
    pms_persist_hook = record_lock;
    pms_undo_store_all(&b.undo, store, 5);
    pms_persist_hook = NULL;
    CHECK(b.persist.fences == fences + 1 && count_of(PMS_PRIM_FENCE) == 1 && !b.undo.log.unfenced);
    CHECK(unfenced_steps > 0 && free_steps == 0);
    /* no target before the fence */
    check_fenced_before(&b.undo, first_change(0, at(&b, data), PMS_PAGE));
    for (uint64_t i = 0; i < 5; i++)
        CHECK(memcmp(at(&b, data + i * 200), text, 40) == 0);
    pms_undo_store_all(&b.undo, store, 5); /* nothing new: no fence */
    CHECK(b.persist.fences == fences + 1 && b.undo.log.seq == 5);
    bench_close(&b);
}

static void a_granule_is_captured_once(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    uint64_t off = data_of(&b) + 64, captured = b.undo.log.captured_bytes;
    pms_undo_store(&b.undo, off, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + PMS_GRANULE && b.undo.log.seq == 1);
    uint64_t fences = b.persist.fences;
    for (int i = 0; i < 10; i++)
        pms_undo_store(&b.undo, off + (uint64_t)i, "x", 1);
    CHECK(b.undo.log.captured_bytes == captured + PMS_GRANULE && b.persist.fences == fences);
    /* one of four is there */
    pms_undo_store(&b.undo, off - 32,
                   "0123456789012345678901234567890123456789012345678901234567890123456789", 70);
    CHECK(b.undo.log.captured_bytes == captured + 3 * PMS_GRANULE && b.undo.log.seq == 3 &&
          b.persist.fences == fences + 1);
    pms_undo_set_prepared(&b.undo, off & ~4095ull, PMS_PAGE); /* its page is captured whole */
    pms_undo_store(&b.undo, off + 1000, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + 3 * PMS_GRANULE);
    /* dead before: no pre-image, also of what comes after */
    pms_undo_store_fresh(&b.undo, off + 8192, "abc", 3);
    pms_undo_store(&b.undo, off + 8193, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + 3 * PMS_GRANULE);
    pms_undo_begin(&b.undo, b.undo.tag + 1); /* the next transaction starts afresh */
    pms_undo_store(&b.undo, off, "abc", 3);
    pms_undo_store(&b.undo, off + 1000, "abc", 3);
    pms_undo_store(&b.undo, off + 8192, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + 6 * PMS_GRANULE && b.undo.log.seq == 3);
    bench_close(&b);
}

/* Stores that break I2 or I3 end the process before they reach the medium. */
static bool dies(void (*fn)(struct bench *b), struct bench *b)
{
    int ws = wait_status(fn, b);
    return WIFSIGNALED(ws) && WTERMSIG(ws) == SIGABRT;
}

static void write_unprepared(struct bench *b)
{
    pms_undo_write_locked(&b->undo, data_of(b), "a", 1);
}

static void write_unfenced(struct bench *b)
{
    pms_undo_prepare_locked(&b->undo, data_of(b), 1);
    pms_undo_write_locked(&b->undo, data_of(b), "a", 1);
}

static void unlock_unfenced(struct bench *b)
{
    pms_undo_lock(&b->undo);
    pms_undo_append(&b->undo, data_of(b), 1);
    pms_undo_unlock(&b->undo);
}

/* a tag is used once */
static void begin_again(struct bench *b) { pms_undo_begin(&b->undo, b->undo.tag); }

static void broken_order_is_fatal(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    *at(&b, data_of(&b)) = 'z';
    CHECK(dies(write_unprepared, &b));
    CHECK(dies(write_unfenced, &b));
    CHECK(dies(unlock_unfenced, &b));
    CHECK(dies(begin_again, &b));
    CHECK(*at(&b, data_of(&b)) == 'z');
    bench_close(&b);
}

int main(void)
{
    TEST(broken_order_is_fatal);
    TEST(a_store_comes_after_its_entry);
    TEST(the_log_has_it_when_the_store_comes);
    TEST(several_stores_share_a_fence);
    TEST(a_granule_is_captured_once);
    return test_summary();
}
