/* Chunks that a flush writes from where they are: whatever happens while the kernel reads them,
 * the file gets the snapshot's state, and checksums of what it got. The hook of the seam is
 * where the write begins: after the look whether a chunk is untouched, before the next. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/checksum.h"
#include "one_store.h"
#include "slot_pair.h"
#include "log/snapshot.h"
#include "flush/chunks.h"
#include "flush/transfer.h"

#define CHUNK (16u << 10)
#define ARRAY (200u << 10)
/* captured as a whole, small enough to become hot, and with chunks of its own */
#define HOT (48u << 10)
#define GREAT (8u << 20) /* more than the store has room for */
#define CHUNKS_MAX 4096u

static char file_path[300];
static struct pms_snapshot *snapshot;
static int fd;
static uint64_t array; /* where its bytes are */
static void (*disturb)(void);
static int fail_first, fail_again; /* errno of the first write, and of those after it; 0: none */
static int writes;

static int hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive != PMS_PRIM_PWRITE || pms_persist_hook_fd != fd)
        return 0;
    if (writes++ > 0)
        return fail_again;
    if (disturb)
        disturb();
    return fail_first;
}

/* ---- what may happen meanwhile ---- */

static void put(const char *name, uint32_t bytes, int value)
{
    uint64_t data;
    CHECK(ok(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                  PMS_FILL_ZERO, NULL, 0, 1, &data, &e)));
    memset(memory(data), value, bytes);
}

static void store_hot(void) { memset(memory(array), 7, HOT); }

static void store(void) { memset(memory(array) + 100000, 2, 20000); }

static void store_and_commit(void)
{
    store();
    CHECK(ok(pms_commit(pool, &e)));
}

static void commits(void)
{
    for (int i = 0; i < 3; i++) {
        memset(memory(array) + 50000 * i, 3 + i, 30000);
        CHECK(ok(pms_commit(pool, &e)));
    }
}

static void roll_back(void)
{
    store();
    CHECK(ok(pms_rollback(pool, &e)));
}

static void free_and_use_again(void)
{
    CHECK(ok(pms_object_remove(pool, 0, "a", 1, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    put("b", ARRAY, 7);
    put("c", 60000, 8);
    CHECK(ok(pms_commit(pool, &e)));
}

static void grow(void)
{
    uint64_t before = pool->super.file_bytes;
    uint32_t segments = pool->super.segment_count;
    put("great", GREAT, 9);
    CHECK(pool->super.file_bytes >= before + GREAT && pool->super.segment_count > segments);
}

static void grow_and_commit(void)
{
    grow();
    CHECK(ok(pms_commit(pool, &e)));
}

static void names(void) /* stores of the engine's alone */
{
    for (int i = 0; i < 200; i++) {
        char name[8];
        int n = snprintf(name, sizeof name, "v%d", i);
        CHECK(ok(pms_object_put_value(pool, 0, name, (uint32_t)n, "value", 5, &e)));
        if (i % 50 == 49)
            CHECK(ok(pms_commit(pool, &e)));
    }
}

static void scribble(void) /* opened before or now */
{
    struct pair p;
    CHECK(find(&p));
    CHECK(ok(open_next("w")));
    memset(memory(p.slot[!p.current]), 0x55, BYTES);
}

/* captured like anything else: the pages leave the mark that the slot has as a whole */
static void write_current(void)
{
    struct pair p;
    CHECK(find(&p));
    memset(memory(p.slot[p.current]) + BYTES / 3, 0x33, BYTES / 3);
}

static void write_current_and_commit(void)
{
    write_current();
    CHECK(ok(pms_commit(pool, &e)));
}

static void flip_and_commit(void)
{
    struct pair p;
    CHECK(find(&p));
    flip(&p, 0x66, true);
    CHECK(ok(pms_commit(pool, &e)));
    flip(&p, 0x77, true);
    CHECK(ok(pms_commit(pool, &e)));
}

static void flip_back(void) /* without a write before; then a step in place */
{
    struct pair p;
    CHECK(find(&p));
    CHECK(ok(pms_slot_flip(pool, 0, "w", 1, NULL, &e)));
    memset(memory(p.slot[!p.current]), 0x44, BYTES);
}

static void free_idle(void)
{
    scribble();
    CHECK(ok(pms_object_remove(pool, 0, "w", 1, &e)));
    CHECK(ok(pms_commit(pool, &e)));
}

/* ---- one flush ---- */

struct flush {
    uint64_t chunk[CHUNKS_MAX], count;
    uint32_t crc[CHUNKS_MAX];
    unsigned char *expected;
};
static struct flush f;

static void fill_store(bool idle_is_open)
{
    struct pair p;
    if (!open_store(PMS_MODE_TRUNCATE))
        abort();
    make_pair();
    put("a", ARRAY, 1);
    CHECK(ok(pms_commit(pool, &e)));
    struct pms_object o;
    CHECK(ok(pms_object_find(pool, 0, "a", 1, &o, &e)));
    array = o.data;
    CHECK(find(&p));
    flip(&p, 0x11, true);
    CHECK(ok(pms_commit(pool, &e)));
    flip(&p, 0x22, true); /* both versions are live bytes of a commit */
    CHECK(ok(pms_commit(pool, &e)));
    if (idle_is_open)
        scribble();
}

static void pin(void)
{
    struct pms_snapshot_info info;
    uint8_t state[CHUNKS_MAX];
    CHECK(ok(pms_snapshot_begin(pool, 0, -1, &snapshot, &e)) &&
          ok(pms_snapshot_info(snapshot, &info, &e)));
    uint64_t n = (info.file_bytes + CHUNK - 1) / CHUNK;
    CHECK(n <= CHUNKS_MAX && ok(pms_snapshot_chunks(snapshot, 0, CHUNK, state, n, &e)));
    f.count = 0;
    for (uint64_t i = 0; i < n; i++)
        if (state[i])
            f.chunk[f.count++] = i;
    CHECK(f.count > (ARRAY + 2 * BYTES) / CHUNK);
    f.expected = malloc(f.count * CHUNK);
    for (uint64_t i = 0; i < f.count; i++)
        CHECK(ok(
            pms_snapshot_take(snapshot, f.chunk[i] * CHUNK, CHUNK, f.expected + i * CHUNK, 0, &e)));
    fd = open(file_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
}

static void begin(bool idle_is_open)
{
    fill_store(idle_is_open);
    pin();
}

static int run_flush(void (*what)(void), int fail)
{
    struct pms_transfer transfer = {0};
    disturb = what;
    fail_first = fail;
    writes = 0;
    pms_persist_hook = hook;
    int status = pms_snapshot_write(snapshot, fd, CHUNK, f.chunk, f.count, 0, f.crc, NULL, NULL,
                                    &transfer, &e);
    pms_persist_hook = NULL;
    return status;
}

static void end(void)
{
    close(fd);
    free(f.expected);
}

/* idle: what lies there is of no account, but its checksum has to be right. */
static void check_file(uint64_t idle)
{
    static unsigned char got[CHUNK];
    for (uint64_t i = 0; i < f.count; i++) {
        uint64_t off = f.chunk[i] * CHUNK;
        CHECK(pread(fd, got, CHUNK, (off_t)(i * CHUNK)) == CHUNK);
        CHECK(pms_crc32c(0, got, CHUNK) == f.crc[i]);
        for (uint64_t at = 0; at < CHUNK; at += PMS_PAGE) {
            bool scratch = idle && off + at >= idle && off + at < idle + BYTES;
            CHECK(scratch || memcmp(got + at, f.expected + i * CHUNK + at, PMS_PAGE) == 0);
        }
    }
}

static bool in_place(uint64_t off, uint64_t bytes)
{
    const unsigned char *at = NULL;
    uint32_t crc = 0, want = 0;
    uint64_t first = off & ~(uint64_t)(PMS_PAGE - 1),
             n = (bytes + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
    bool yes = pms_snapshot_in_place(snapshot, first, n, &at, &crc);
    if (yes)
        want = pms_crc32c(0, pool->map.engine + first, n);
    CHECK(!yes || (at == pool->map.engine + first && crc == want));
    return yes;
}

static void whatever_happens_meanwhile(void)
{
    static const struct {
        const char *name;
        void (*what)(void);
        bool idle_is_open;
    } cases[] = {
        {"nothing", NULL, false},
        {"store", store, false},
        {"commit", store_and_commit, false},
        {"commits", commits, false},
        {"roll back", roll_back, false},
        {"free", free_and_use_again, false},
        {"grow", grow, false},
        {"grow and commit", grow_and_commit, false},
        {"names", names, false},
        {"scribble", scribble, false},
        {"write current", write_current, false},
        {"write current and commit", write_current_and_commit, false},
        {"scribble, open", scribble, true},
        {"flip", flip_and_commit, false},
        {"flip, open", flip_and_commit, true},
        {"flip back", flip_back, false},
        {"free idle", free_idle, false},
        {"free idle, open", free_idle, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct pair p;
        uint64_t failed = (uint64_t)test_checks_failed;
        begin(cases[i].idle_is_open);
        CHECK(find(&p));
        CHECK(in_place(array, ARRAY) && in_place(p.slot[p.current], BYTES));
        /* it may be scribbled into, and no mark says so */
        CHECK(in_place(p.slot[!p.current], BYTES) != cases[i].idle_is_open);
        CHECK(ok(run_flush(cases[i].what, 0)));
        /* something was written again */
        CHECK((writes > 1) ==
              (cases[i].what && !(cases[i].what == scribble && cases[i].idle_is_open)));
        check_file(cases[i].idle_is_open ? p.slot[!p.current] : 0);
        if ((uint64_t)test_checks_failed != failed)
            printf("  in domain %d: %s\n", domain, cases[i].name);
        end();
        pms_snapshot_end(pool, snapshot);
        close_store();
    }
}

/* Every third chunk is as it is known, every third is known otherwise, every third is new. */
static void what_is_known_is_left(void (*what)(void), int fail)
{
    static int64_t known[CHUNKS_MAX];
    static uint64_t position[CHUNKS_MAX];
    static unsigned char got[CHUNK];
    struct pms_transfer transfer = {0};
    begin(false);
    uint64_t spared = 0, end_of_file = 0;
    for (uint64_t i = 0; i < f.count; i++) {
        int64_t crc = pms_crc32c(0, f.expected + i * CHUNK, CHUNK);
        known[i] = i % 3 == 0 ? crc : i % 3 == 1 ? crc ^ 1 : -1;
    }
    disturb = what;
    fail_first = fail;
    writes = 0;
    pms_persist_hook = hook;
    CHECK(ok(pms_snapshot_write(snapshot, fd, CHUNK, f.chunk, f.count, 3 * CHUNK, f.crc, known,
                                position, &transfer, &e)));
    pms_persist_hook = NULL;
    for (uint64_t i = 0; i < f.count; i++) {
        const unsigned char *want = f.expected + i * CHUNK;
        CHECK((position[i] == PMS_CHUNK_SPARED) == (i % 3 == 0));
        CHECK(f.crc[i] == pms_crc32c(0, want, CHUNK));
        if (i % 3 == 0) { /* it can still be read */
            CHECK(ok(pms_snapshot_take(snapshot, f.chunk[i] * CHUNK, CHUNK, got, 0, &e)));
            CHECK(memcmp(got, want, CHUNK) == 0);
            spared++;
            continue;
        }
        CHECK(position[i] >= 3 * CHUNK && (position[i] - 3 * CHUNK) % CHUNK == 0);
        CHECK(pread(fd, got, CHUNK, (off_t)position[i]) == CHUNK);
        CHECK(memcmp(got, want, CHUNK) == 0);        /* at places of their own, therefore */
        CHECK(!in_place(f.chunk[i] * CHUNK, CHUNK)); /* given up */
        end_of_file = position[i] > end_of_file ? position[i] : end_of_file;
    }
    CHECK(end_of_file == (3 + f.count - spared - 1) * CHUNK);
    CHECK(transfer.done_bytes == f.count * CHUNK && transfer.spared_bytes == spared * CHUNK);
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

static void known_chunks_are_left(void)
{
    what_is_known_is_left(NULL, 0);
    what_is_known_is_left(store, 0);
    what_is_known_is_left(store_and_commit, 0);
    what_is_known_is_left(commits, 0);
    what_is_known_is_left(free_and_use_again, 0);
    what_is_known_is_left(grow_and_commit, 0);
    what_is_known_is_left(store_and_commit, EFAULT);
}

static void what_was_touched_is_not_read_in_place(void)
{
    begin(false);
    store();
    CHECK(!in_place(array, ARRAY) && in_place(array, 90000) && !in_place(array + 100000, 1));
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(!in_place(array + 100000, 1));
    CHECK(!in_place(PMS_OFF_ROOT, PMS_PAGE)); /* written by every commit */
    CHECK(!in_place(0, PMS_PAGE));            /* no state */
    CHECK(ok(run_flush(NULL, 0)));
    check_file(0);
    CHECK(!in_place(array, PMS_PAGE)); /* given up */
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

/* It stays writable, so no fault tells of a store into it: captured ahead, it counts as written
 * already. */
static void a_hot_range_is_copied(void)
{
    struct pms_object o;
    struct pms_stats stats;
    fill_store(false);
    put("h", HOT, 0);
    CHECK(ok(pms_commit(pool, &e)) && ok(pms_object_find(pool, 0, "h", 1, &o, &e)));
    array = o.data;
    for (int i = 1; i <= 5; i++) {
        memset(memory(array), i, HOT);
        CHECK(ok(pms_commit(pool, &e)));
    }
    CHECK(ok(pms_pool_stats(pool, &stats, &e)) && stats.hot_ranges == 1 && stats.hot_bytes == HOT);
    pin();
    CHECK(!in_place(array, PMS_PAGE) && !in_place(array + HOT / 2, PMS_PAGE));
    memset(memory(array), 6, HOT / 2); /* seen by the copy */
    CHECK(ok(run_flush(store_hot, 0)));
    CHECK(writes == 1); /* nothing had to be written again */
    check_file(0);
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

/* As memory of a device may be, which the kernel cannot write from. */
static void where_it_cannot_be_read_in_place(void)
{
    begin(false);
    CHECK(ok(run_flush(store_and_commit, EFAULT)));
    CHECK(writes == 2);
    check_file(0);
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

static int always(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    return primitive == PMS_PRIM_PWRITE && pms_persist_hook_fd == fd ? ENOSPC : 0;
}

static void an_error_of_the_file_is_told(void)
{
    struct pms_transfer transfer = {0};
    begin(false);
    pms_persist_hook = always;
    CHECK(pms_snapshot_write(snapshot, fd, CHUNK, f.chunk, f.count, 0, f.crc, NULL, NULL, &transfer,
                             &e) == PMS_E_FULL);
    pms_persist_hook = NULL;
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

static void an_error_when_it_is_written_again_is_told(void)
{
    begin(false);
    fail_again = ENOSPC;
    CHECK(run_flush(store_and_commit, 0) == PMS_E_FULL);
    fail_again = 0;
    CHECK(writes == 2); /* the first of several to be written again: no more is tried */
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

/* Nothing is kept for a snapshot that was given up, and an idle slot that is freed has no mark. */
static void lose_it(void)
{
    struct pair p;
    CHECK(find(&p));
    store_and_commit(); /* passes the bound */
    flip(&p, 0x66, true);
    CHECK(ok(pms_commit(pool, &e)));
    free_idle();
}

static void a_lost_snapshot_is_told(bool before)
{
    struct pair p;
    begin(false);
    CHECK(find(&p));
    uint64_t current = p.slot[p.current], count = 0;
    pms_snapshot_end(pool, snapshot);
    CHECK(ok(pms_snapshot_begin(pool, PMS_PAGE, 0, &snapshot, &e)));
    for (uint64_t i = 0; i < f.count; i++) /* nothing but that slot is asked for */
        if (f.chunk[i] * CHUNK >= current && (f.chunk[i] + 1) * CHUNK <= current + BYTES)
            f.chunk[count++] = f.chunk[i];
    CHECK(count > 2);
    f.count = count;
    if (before)
        lose_it();
    CHECK(run_flush(before ? NULL : lose_it, 0) == PMS_E_STATE);
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

static void a_snapshot_lost_before(void) { a_lost_snapshot_is_told(true); }
static void a_snapshot_lost_meanwhile(void) { a_lost_snapshot_is_told(false); }

static void chunks_are_whole_pages(void)
{
    struct pms_transfer transfer = {0};
    begin(false);
    CHECK(pms_snapshot_write(snapshot, fd, 5000, f.chunk, f.count, 0, f.crc, NULL, NULL, &transfer,
                             &e) == PMS_E_INVALID);
    CHECK(pms_snapshot_write(snapshot, fd, 0, f.chunk, f.count, 0, f.crc, NULL, NULL, &transfer,
                             &e) == PMS_E_INVALID);
    end();
    pms_snapshot_end(pool, snapshot);
    close_store();
}

/* Batches by several threads, and one that stores and commits all the time. */

#define LARGE (12u << 20)

static _Atomic bool stop;

static void *write_on(void *unused)
{
    struct pms_error own;
    uint32_t draw = 1;
    (void)unused;
    while (!stop) {
        for (int i = 0; i < 20; i++) {
            draw = draw * 1664525u + 1013904223u;
            memset(memory(array) + (draw >> 8) % (LARGE - 30000), (int)(draw >> 28) | 0x80, 30000);
        }
        CHECK(pms_commit(pool, &own) == PMS_OK);
    }
    return NULL;
}

static void beside_a_thread_that_writes(void)
{
    static uint64_t chunk[LARGE / CHUNK + 1];
    static uint32_t crc[LARGE / CHUNK + 1];
    static unsigned char got[CHUNK];
    if (!open_store(PMS_MODE_TRUNCATE))
        abort();
    put("large", LARGE, 0);
    struct pms_object o;
    CHECK(ok(pms_object_find(pool, 0, "large", 5, &o, &e)));
    array = o.data;
    for (int round = 1; round <= 6; round++) {
        struct pms_transfer transfer = {0};
        pthread_t writer;
        uint64_t n = 0;
        memset(memory(array), round, LARGE);
        CHECK(ok(pms_commit(pool, &e)) && ok(pms_snapshot_begin(pool, LARGE, -1, &snapshot, &e)));
        for (uint64_t c = (array + CHUNK - 1) / CHUNK; (c + 1) * CHUNK <= array + LARGE; c++)
            chunk[n++] = c;
        fd = open(file_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        stop = false;
        CHECK(pthread_create(&writer, NULL, write_on, NULL) == 0);
        CHECK(ok(
            pms_snapshot_write(snapshot, fd, CHUNK, chunk, n, 0, crc, NULL, NULL, &transfer, &e)));
        stop = true;
        pthread_join(writer, NULL);
        for (uint64_t i = 0; i < n; i++) {
            CHECK(pread(fd, got, CHUNK, (off_t)(i * CHUNK)) == CHUNK &&
                  pms_crc32c(0, got, CHUNK) == crc[i]);
            CHECK(got[0] == round && memcmp(got, got + 1, CHUNK - 1) == 0);
        }
        close(fd);
        pms_snapshot_end(pool, snapshot);
    }
    close_store();
}

static void close_pool(void) { CHECK(ok(pms_pool_close(pool, 0, &e))); }

static void a_store_that_closes(void)
{
    begin(false);
    CHECK(run_flush(close_pool, 0) == PMS_E_CLOSED);
    const unsigned char *at;
    CHECK(!pms_snapshot_in_place(snapshot, array & ~(uint64_t)(PMS_PAGE - 1), PMS_PAGE, &at, NULL));
    end();
    pms_snapshot_end(pool, snapshot);
    pms_pool_release(pool);
}

int main(void)
{
    const char *folder = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-in-place-%ld", folder, (long)getpid());
    snprintf(file_path, sizeof file_path, "%s-chunks", path);
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(whatever_happens_meanwhile);
        TEST(known_chunks_are_left);
        TEST(what_was_touched_is_not_read_in_place);
        TEST(a_hot_range_is_copied);
        TEST(where_it_cannot_be_read_in_place);
        TEST(an_error_of_the_file_is_told);
        TEST(an_error_when_it_is_written_again_is_told);
        TEST(a_snapshot_lost_before);
        TEST(a_snapshot_lost_meanwhile);
        TEST(chunks_are_whole_pages);
        TEST(beside_a_thread_that_writes);
        TEST(a_store_that_closes);
    }
    unlink(path);
    unlink(file_path);
    return test_summary();
}
