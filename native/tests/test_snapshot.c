/* Snapshots: the bound, closes and forks under them, chunks that changed, and the way back to a
 * store. */
#include "snapshot_store.h"

static char chunks_path[300], restored_path[300];

#define CHUNK (64u << 10)

/* ---- closing under a reader ---- */

static void *read_until_closed(void *arg)
{
    struct pms_snapshot *s = arg;
    struct pms_error e;
    unsigned char *buffer = malloc(1u << 20);
    int status;
    while ((status = pms_snapshot_read(s, PMS_OFF_SEGMENTS & ~(uint64_t)(PMS_PAGE - 1), 1u << 20,
                                       buffer, &e)) == PMS_OK) {
    }
    free(buffer);
    return (void *)(intptr_t)status;
}

static void the_store_closes_under_a_snapshot(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct pms_snapshot *s;
        pthread_t thread;
        void *status;
        uint64_t seed = 3;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 24u << 20);
        make(0, 1u << 20, &seed);
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
        pthread_create(&thread, NULL, read_until_closed, s);
        usleep(3000);
        CHECK(pms_pool_close(pool, 1, &e) == PMS_OK);
        pthread_join(thread, &status);
        CHECK((intptr_t)status == PMS_E_CLOSED);
        pms_snapshot_release(s, 0, 1u << 20);
        pms_snapshot_end(pool, s);
        pms_pool_release(pool);
    }
}

static void *end_it(void *snapshot)
{
    pms_snapshot_end(pool, snapshot);
    return NULL;
}

static void *close_it(void *arg)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    return arg;
}

/* Both wait for the log lock when it is given back: whoever comes first, the other must not look
 * at what is gone. */
static void a_snapshot_ends_while_the_store_closes(void)
{
    for (int round = 0; round < 60; round++) {
        struct pms_error e;
        struct pms_snapshot *s;
        pthread_t ends, closes;
        domain = PMS_DOMAIN_PROCESS;
        pool = open_store(path, PMS_MODE_TRUNCATE, 1u << 20);
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
        pms_lock_acquire(&pool->undo.lock);
        pthread_create(&ends, NULL, end_it, s);
        usleep(500);
        pthread_create(&closes, NULL, close_it, NULL);
        usleep(500);
        pms_lock_release(&pool->undo.lock);
        pthread_join(ends, NULL);
        pthread_join(closes, NULL);
        pms_pool_release(pool);
    }
}

static void a_fork_child_leaves_it_alone(void)
{
    struct pms_error e;
    struct pms_snapshot *s, *t;
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(path, PMS_MODE_TRUNCATE, 4u << 20);
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
    pid_t child = fork();
    if (child == 0) {
        int status = pms_snapshot_begin(pool, 0, -1, &t, &e);
        pms_snapshot_end(pool, s);
        _exit(status == PMS_E_FORKED ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    pms_snapshot_end(pool, s);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* ---- to a file and back ---- */

struct tier {
    uint64_t count, *chunk, *at;
    uint32_t *crc;
    uint8_t super[PMS_PAGE];
    uint64_t file_bytes, tag;
};

static void save(struct tier *t, uint64_t since, uint64_t *written)
{
    struct pms_error e;
    struct pms_snapshot *s;
    struct pms_snapshot_info info;
    struct pms_transfer transfer = {0};
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
    CHECK(pms_snapshot_info(s, &info, &e) == PMS_OK);
    uint64_t n = (info.file_bytes + CHUNK - 1) / CHUNK;
    uint8_t *state = malloc(n);
    CHECK(pms_snapshot_chunks(s, since, CHUNK, state, n, &e) == PMS_OK);
    *t = (struct tier){.chunk = malloc(n * 8),
                       .at = malloc(n * 8),
                       .crc = malloc(n * 4),
                       .file_bytes = info.file_bytes,
                       .tag = info.tag};
    memcpy(t->super, info.super, sizeof t->super);
    *written = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (state[i])
            t->chunk[t->count++] = i;
        *written += state[i] == (PMS_CHUNK_LIVE | PMS_CHUNK_CHANGED);
    }
    int fd = open(chunks_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(pms_snapshot_write(s, fd, CHUNK, t->chunk, t->count, 0, t->crc, NULL, NULL, &transfer,
                             &e) == PMS_OK);
    CHECK(transfer.done_bytes == t->count * CHUNK && pms_transfer_sync(fd, &e) == PMS_OK);
    for (uint64_t i = 0; i < t->count; i++)
        t->at[i] = i * CHUNK;
    close(fd);
    free(state);
    pms_snapshot_end(pool, s);
}

/* filled: through a mapping, where the file system is memory. */
static int load_by(struct tier *t, bool filled, struct pms_error *e)
{
    struct pms_transfer transfer = {0};
    uint64_t bytes = 0, bad = 0, *to = malloc(t->count * 8);
    struct pms_filling *f = NULL;
    int in = open(chunks_path, O_RDONLY | O_CLOEXEC),
        out = open(restored_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    for (uint64_t i = 0; i < t->count; i++)
        to[i] = t->chunk[i] * CHUNK;
    int status = pms_restore_begin(t->super, &bytes, e);
    if (status == PMS_OK && filled)
        status = pms_filling_open(out, bytes, &f, e);
    int reserved = f != NULL;
    if (status == PMS_OK && !f)
        status = pms_restore_reserve(out, t->super, &reserved, &(struct pms_transfer){0}, e);
    if (status == PMS_OK && !reserved)
        status = pms_restore_allocate(out, bytes, &(struct pms_transfer){0}, e);
    if (status == PMS_OK)
        status = pms_transfer_copy(in, t->at, out, f, to, t->crc, t->count, CHUNK, bytes, &bad,
                                   &transfer, e);
    if (status == PMS_OK && f)
        status = pms_filling_room(f, 0, bytes, 0, &transfer, e);
    if (f)
        pms_filling_close(f);
    if (status == PMS_OK)
        status = pms_restore_seal(out, t->super, PMS_DOMAIN_AUTO, e);
    close(in);
    close(out);
    free(to);
    return status;
}

static int load(struct tier *t, struct pms_error *e) { return load_by(t, false, e); }

static bool same_from(uint64_t off, int a, int b)
{
    static unsigned char x[1 << 16], y[1 << 16];
    for (ssize_t n; (n = pread(a, x, sizeof x, (off_t)off)) > 0; off += (uint64_t)n)
        if (pread(b, y, sizeof y, (off_t)off) != n || memcmp(x, y, (size_t)n) != 0)
            return false;
    return pread(b, y, 1, (off_t)off) == 0;
}

/* All that a reader looks at, and all data: never a hole. */
static uint64_t space_of(const struct tier *t)
{
    struct pms_stretch stretch[PMS_STRETCHES_MOST];
    uint64_t bytes = 0;
    for (uint32_t i = 0, n = pms_restore_space(t->super, stretch); i < n; i++)
        bytes += stretch[i].bytes;
    return bytes;
}

static void both_ways_are_the_same(struct tier *t)
{
    struct pms_error e;
    struct stat status;
    CHECK(load(t, &e) == PMS_OK);
    int plain = open(restored_path, O_RDONLY | O_CLOEXEC);
    CHECK(plain >= 0 && unlink(restored_path) == 0);
    CHECK(fstat(plain, &status) == 0 && (uint64_t)status.st_size == t->file_bytes);
    CHECK((uint64_t)status.st_blocks * 512 >= space_of(t) && space_of(t) < t->file_bytes);
    CHECK(load_by(t, true, &e) == PMS_OK);
    int filled = open(restored_path, O_RDONLY | O_CLOEXEC);
    CHECK(same_from(PMS_OFF_ROOT, plain, filled));
    CHECK(fstat(filled, &status) == 0 && (uint64_t)status.st_blocks * 512 >= t->file_bytes);
    close(plain);
    close(filled);
}

static void drop(struct tier *t)
{
    free(t->chunk);
    free(t->at);
    free(t->crc);
}

static void a_snapshot_becomes_a_store_again(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct tier t;
        uint64_t seed = 11, written;
        static struct pms_check_report report;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 2u << 20); /* it grows */
        for (int i = 0; i < 200; i++) {
            change(&seed);
            if (i % 20 == 19)
                CHECK(pms_commit(pool, &e) == PMS_OK);
        }
        model_take();
        struct model *m = model_copy();
        for (int i = 0; i < 10; i++)
            change(&seed); /* uncommitted */
        save(&t, 0, &written);
        CHECK(written == t.count);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        uint8_t uuid[16];
        memcpy(uuid, pool->super.uuid, 16);
        pms_pool_release(pool);
        both_ways_are_the_same(&t);
        pool = open_store(restored_path, PMS_MODE_READ_WRITE, 0);
        CHECK(pool != NULL && pms_epoch(pool) == m->epoch &&
              memcmp(uuid, pool->super.uuid, 16) != 0);
        CHECK(pms_check(pool, &report, &e) == PMS_OK && report.problem_count == 0);
        for (int i = 0; i < NAMES; i++) {
            struct pms_object o;
            bool there = find(i, &o);
            CHECK(there == (m->array[i].content != NULL));
            CHECK(!there || (o.data == m->array[i].off &&
                             memcmp(memory(o.data), m->array[i].content, m->array[i].bytes) == 0));
        }
        for (int i = 0; i < 20; i++) /* and it can be worked with */
            change(&seed);
        CHECK(pms_commit(pool, &e) == PMS_OK && pms_epoch(pool) == m->epoch + 1);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);

        int fd = open(chunks_path, O_RDWR | O_CLOEXEC); /* a byte of the tier goes bad */
        unsigned char byte;
        CHECK(pread(fd, &byte, 1, CHUNK + 5) == 1);
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, CHUNK + 5) == 1);
        CHECK(load(&t, &e) == PMS_E_CORRUPT && load_by(&t, true, &e) == PMS_E_CORRUPT);
        CHECK(ftruncate(fd, (off_t)(t.count * CHUNK - 1)) == 0);
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, CHUNK + 5) == 1);
        CHECK(load(&t, &e) == PMS_E_CORRUPT && load_by(&t, true, &e) == PMS_E_CORRUPT);
        close(fd);
        t.super[100] ^= 1;
        CHECK(load(&t, &e) == PMS_E_CORRUPT);
        drop(&t);
        model_free(m);
        free(m);
        model_free(&committed);
    }
}

static void changed_chunks_are_known(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct tier t, later;
        uint64_t seed = 5, written;
        struct pms_object o;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 64u << 20);
        make(0, 16u << 20, &seed);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        save(&t, 0, &written);
        CHECK(written == t.count && t.count > 256);
        save(&later, t.tag, &written);
        CHECK(written <= 3); /* the root; what commits capture ahead */
        drop(&later);
        CHECK(find(0, &o));
        memory(o.data)[5u << 20] = 7;
        memory(o.data)[9u << 20] = 7;
        CHECK(pms_commit(pool, &e) == PMS_OK);
        memory(o.data)[12u << 20] = 7; /* not committed: may be told as changed, need not */
        save(&later, t.tag, &written);
        CHECK(written >= 3 && written <= 6);
        drop(&later);
        drop(&t);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

/* Also where nothing is put into the new part: its page table begins in a chunk that may have
 * been flushed before. */
static void growth_is_a_change(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct pms_snapshot *s;
        struct pms_snapshot_info info;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 4u << 20);
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK &&
              pms_snapshot_info(s, &info, &e) == PMS_OK);
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_grow(pool, 1 << 20, &e) == PMS_OK && pool->super.segment_count == 2);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        uint64_t since = info.tag, pages, page = pool->super.segment[1].table_off / PMS_PAGE;
        uint64_t end = pool->super.segment[1].log_off / PMS_PAGE;
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK &&
              pms_snapshot_info(s, &info, &e) == PMS_OK);
        pages = info.file_bytes / PMS_PAGE;
        uint8_t *state = malloc(pages);
        CHECK(pms_snapshot_chunks(s, since, PMS_PAGE, state, pages, &e) == PMS_OK);
        for (; page < end; page++)
            CHECK(state[page] == (PMS_CHUNK_LIVE | PMS_CHUNK_CHANGED));
        free(state);
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

/* A part of a page is declared, then it is stored to anywhere; and its neighbour. */
static void a_page_is_stored_to_after_a_part_was_declared(void)
{
    for (int d = 0; d < 3; d++) {
        static unsigned char got[4 * PMS_PAGE];
        struct pms_error e;
        struct pms_snapshot *s;
        uint64_t data;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 8u << 20);
        CHECK(pms_object_put_array(pool, 0, "a", 1, "m", 1, 1u << 20, PMS_FILL_PATTERN, "x", 1, 0,
                                   &data, &e) == PMS_OK);
        CHECK(pms_commit(pool, &e) == PMS_OK && pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
        uint64_t first = (data + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
        for (int step = 0; step < 4; step++) {
            CHECK(step != 0 ||
                  declared_write(pool, memory(first + 100), "12345678", 8, &e) == PMS_OK);
            if (step == 1)
                memory(first)[3000] = 'y'; /* this page, whole, and its neighbours */
            CHECK(step != 2 ||
                  declared_write(pool, memory(first + PMS_PAGE + 50), "12345678", 8, &e) == PMS_OK);
            CHECK(step != 3 || pms_commit(pool, &e) == PMS_OK);
            CHECK(pms_snapshot_read(s, first, sizeof got, got, &e) == PMS_OK);
            for (size_t i = 0; i < sizeof got; i++)
                CHECK(got[i] == 'x');
        }
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

static void a_transfer_is_cancelled_and_limited(void)
{
    struct pms_error e;
    struct pms_snapshot *s;
    struct pms_snapshot_info info;
    uint64_t seed = 5;
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(path, PMS_MODE_TRUNCATE, 24u << 20);
    make(0, 8u << 20, &seed);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK &&
          pms_snapshot_info(s, &info, &e) == PMS_OK);
    uint64_t chunk[128];
    uint32_t crc[128];
    for (uint64_t i = 0; i < 128; i++)
        chunk[i] = i;
    struct pms_transfer t = {.bytes_per_second = 80u << 20};
    struct timespec from, to;
    int fd = open(chunks_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    clock_gettime(CLOCK_MONOTONIC, &from);
    /* 8 MiB at 80 MiB/s */
    CHECK(pms_snapshot_write(s, fd, CHUNK, chunk, 128, 0, crc, NULL, NULL, &t, &e) == PMS_OK);
    clock_gettime(CLOCK_MONOTONIC, &to);
    CHECK((double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec) >= 0.095);
    t.cancel = 1;
    CHECK(pms_snapshot_write(s, fd, CHUNK, chunk, 128, 0, crc, NULL, NULL, &t, &e) == PMS_E_STATE);
    close(fd);
    pms_snapshot_end(pool, s);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* Memory that was never touched is slow to touch first, and it is a commit that would. A smaller
 * one does not do. */
static void memory_for_kept_pages_is_used_again(void)
{
    struct pms_error e;
    struct pms_object o;
    struct pms_snapshot *s;
    struct pms_snapshot_info info;
    unsigned char page[PMS_PAGE];
    uint64_t seed = 9,
             bounds[] = {8u << 20, (8u << 20) + (512u << 10), 4u << 20, 16u << 20, 16u << 20};
    const struct pms_snapshots *before = NULL;
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(path, PMS_MODE_TRUNCATE, 64u << 20);
    make(0, 2u << 20, &seed);
    CHECK(pms_commit(pool, &e) == PMS_OK && find(0, &o));
    for (unsigned i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        CHECK(pms_snapshot_begin(pool, bounds[i], -1, &s, &e) == PMS_OK);
        const struct pms_snapshots *now = pool->undo.snapshots.open;
        CHECK(!pool->undo.snapshots.spare && (i == 0 || i == 3 || now == before));
        for (uint64_t at = 0; at < o.data_bytes; at += PMS_PAGE)
            memory(o.data)[at] = (unsigned char)(i + 100);
        CHECK(pms_commit(pool, &e) == PMS_OK && pms_snapshot_info(s, &info, &e) == PMS_OK);
        CHECK(info.bound_bytes == bounds[i] && /* this one's */ info.kept_bytes >= o.data_bytes &&
              info.peak_bytes == info.kept_bytes);
        for (uint64_t at = o.data; i && at < o.data + o.data_bytes; at += PMS_PAGE)
            CHECK(pms_snapshot_read(s, at, PMS_PAGE, page, &e) == PMS_OK && page[0] == i - 1 + 100);
        pms_snapshot_end(pool, s);
        CHECK(pool->undo.snapshots.spare == now && !pool->undo.snapshots.open);
        before = now;
    }
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* Blocks that are made on pages which the transaction has written to: what its log tells is
 * looked at once, not for every block. Shown by a count, and by what the snapshot reads. */
static void many_new_blocks_while_a_snapshot_is_open(void)
{
    enum { PAIRS = 3000 / SHARE, HALF = PMS_PAGE / 2 };
    for (int d = 0; d < 3; d++) {
        static unsigned char got[PMS_PAGE];
        static uint64_t at[2 * PAIRS];
        char name[12];
        struct pms_error e;
        struct pms_snapshot *s;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 192u << 20);
        for (uint32_t i = 0; i < 2 * PAIRS; i++) {
            uint32_t n = (uint32_t)snprintf(name, sizeof name, "%u", i);
            CHECK(pms_object_put_array(pool, 0, name, n, "m", 1, HALF, PMS_FILL_PATTERN, "x", 1, 0,
                                       &at[i], &e) == PMS_OK);
        }
        CHECK(pms_commit(pool, &e) == PMS_OK);
        for (uint32_t i = 0; i < 2 * PAIRS; i += 2)
            CHECK(pms_object_remove(pool, 0, name, (uint32_t)snprintf(name, sizeof name, "%u", i),
                                    &e) == PMS_OK);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        CHECK(pms_snapshot_begin(pool, 96u << 20, -1, &s, &e) == PMS_OK);
        for (uint32_t i = 1; i < 2 * PAIRS; i += 2)
            memory(at[i])[5] = 'y';
        for (uint32_t i = 0; i < 2 * PAIRS; i += 2) {
            uint32_t n = (uint32_t)snprintf(name, sizeof name, "n%u", i);
            CHECK(pms_object_put_array(pool, 0, name, n, "m", 1, HALF, PMS_FILL_PATTERN, "z", 1, 1,
                                       &at[i], &e) == PMS_OK);
        }
        CHECK(pool->undo.log.seq > PAIRS / 2 && pool->undo.snapshots.open->looks > 0);
        CHECK(pool->undo.snapshots.open->looks <= 3 * (uint64_t)pool->undo.log.seq);
        for (int committed_too = 0; committed_too < 2; committed_too++) {
            for (uint32_t i = 1; i < 2 * PAIRS; i += 2) {
                uint64_t page = at[i] & ~(uint64_t)(PMS_PAGE - 1);
                CHECK(pms_snapshot_read(s, page, PMS_PAGE, got, &e) == PMS_OK);
                for (uint32_t k = 0; k < HALF; k++)
                    CHECK(got[at[i] - page + k] == 'x');
                i += committed_too ? 0 : PAIRS / 50 * 2;
            }
            CHECK(committed_too || pms_commit(pool, &e) == PMS_OK);
        }
        CHECK(pool->undo.snapshots.open->looks <= 3ull * 8 * PAIRS);
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

int main(void)
{
    snprintf(path, sizeof path, "/dev/shm/pms-test-snapshot-%d", (int)getpid());
    snprintf(chunks_path, sizeof chunks_path, "%s.chunks", path);
    snprintf(restored_path, sizeof restored_path, "%s.restored", path);
    TEST(the_store_closes_under_a_snapshot);
    TEST(a_snapshot_ends_while_the_store_closes);
    TEST(a_fork_child_leaves_it_alone);
    TEST(a_snapshot_becomes_a_store_again);
    TEST(changed_chunks_are_known);
    TEST(growth_is_a_change);
    TEST(a_page_is_stored_to_after_a_part_was_declared);
    TEST(many_new_blocks_while_a_snapshot_is_open);
    TEST(a_transfer_is_cancelled_and_limited);
    TEST(memory_for_kept_pages_is_used_again);
    unlink(path);
    unlink(chunks_path);
    unlink(restored_path);
    return test_summary();
}
