/* Domain file: the first capture of a page copies nothing, and everything that needs its pre-image
 * finds it at home. */
#include <errno.h>

#include "journal/journal.h"
#include "log/bare.h"
#include "snapshot_store.h"

#define MIB (1u << 20)
#define BIG (3u * MIB + 40 * PMS_PAGE)

static struct pms_error e;

/* ---- a store whose pages nobody has written to in this session ---- */

static void close_store(void)
{
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static struct pms_pool *open_held(bool hold)
{
    struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .hot = 1, .hold = hold};
    struct pms_pool *p = NULL;
    CHECK(pms_pool_open(path, &o, &p, &e) == PMS_OK);
    return p;
}

static void reopen(void)
{
    close_store();
    pool = open_held(false);
}

static void make_store(int arrays, uint64_t bytes)
{
    uint64_t seed = 11;
    domain = PMS_DOMAIN_FILE;
    pool = open_store(path, PMS_MODE_TRUNCATE, 24u * MIB);
    for (int i = 0; i < arrays; i++)
        make(i, bytes, &seed);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    reopen();
    model_take();
}

static uint64_t bytes_of(uint32_t kind)
{
    uint64_t bytes = 0;
    pms_undo_lock(&pool->undo);
    const struct pms_dirty_list *l = &pool->undo.dirty;
    for (const struct pms_dirty *d = pms_dirty_first(l); d < pms_dirty_end(l); d++)
        bytes += d->kind == kind ? d->len : 0;
    pms_undo_unlock(&pool->undo);
    return bytes;
}

static uint32_t entries_of_the_log(void)
{
    pms_undo_lock(&pool->undo);
    uint32_t entries = pms_undo_entries(&pool->undo);
    pms_undo_unlock(&pool->undo);
    return entries;
}

static unsigned char *content(int i) { return memory(committed.array[i].off); }

static void declare(int i)
{
    struct pms_range r = {(uint64_t)(uintptr_t)content(i), committed.array[i].bytes};
    CHECK(pms_will_write(pool, &r, 1, &e) == PMS_OK);
}

static bool as_committed(const char *what)
{
    for (int i = 0; i < NAMES; i++) {
        const struct image *a = &committed.array[i];
        struct pms_object o;
        bool same = find(i, &o) ? a->content && o.data == a->off && o.data_bytes == a->bytes &&
                                      memcmp(memory(a->off), a->content, a->bytes) == 0
                                : !a->content;
        if (!same) {
            printf("array %d is not as it was committed: %s\n", i, what);
            return false;
        }
    }
    return true;
}

static bool snapshot_shows(struct pms_snapshot *s, const struct model *m)
{
    bool same = true;
    for (int i = 0; i < NAMES; i++) {
        const struct image *a = &m->array[i];
        uint64_t from = a->off & ~(uint64_t)(PMS_PAGE - 1),
                 to = (a->off + a->bytes + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
        unsigned char *read = a->content ? malloc(to - from) : NULL;
        if (!read)
            continue;
        CHECK(pms_snapshot_read(s, from, to - from, read, &e) == PMS_OK);
        same = same && memcmp(read + (a->off - from), a->content, a->bytes) == 0;
        free(read);
    }
    return same;
}

/* Its pages, of the whole range, are the file's. */
static bool is_foreign(int i)
{
    uint64_t run, bytes = committed.array[i].bytes & ~(uint64_t)(PMS_PAGE - 1);
    return pms_map_foreign(&pool->map, committed.array[i].off, bytes, &run) && run == bytes;
}

/* ---- what is captured how ---- */

static void nothing_is_copied(void)
{
    make_store(2, BIG);
    CHECK(is_foreign(0) && is_foreign(1));
    uint32_t before = pms_undo_entries(&pool->undo);
    declare(0);
    CHECK(pms_undo_entries(&pool->undo) == before && bytes_of(PMS_DIRTY_BARE) == BIG);
    memset(content(0), 1, BIG);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    /* from here on it is the log that knows it */
    declare(0);
    CHECK(bytes_of(PMS_DIRTY_BARE) == 0 && bytes_of(PMS_DIRTY_USER) == BIG);
    memset(content(1), 2, BIG); /* by faults, which begin with little */
    CHECK(bytes_of(PMS_DIRTY_BARE) > BIG / 2);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    memset(committed.array[0].content, 1, BIG);
    CHECK(as_committed("rolled back"));
    close_store();
}

static void a_roll_back_gives_the_pages_back(void)
{
    make_store(1, BIG);
    for (int round = 0; round < 3; round++) {
        declare(0);
        CHECK(bytes_of(PMS_DIRTY_BARE) == BIG && !is_foreign(0));
        memset(content(0), 7, BIG);
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(is_foreign(0) && !pms_map_all_writable(&pool->map, committed.array[0].off, PMS_PAGE));
        CHECK(as_committed("given back"));
    }
    close_store();
}

/* Pages of both kinds, side by side. */
static void what_was_written_before_is_copied(void)
{
    make_store(1, BIG);
    memset(content(0) + MIB, 5, MIB);
    memset(committed.array[0].content + MIB, 5, MIB);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    declare(0);
    CHECK(bytes_of(PMS_DIRTY_USER) >= MIB && bytes_of(PMS_DIRTY_BARE) >= MIB &&
          bytes_of(PMS_DIRTY_USER) + bytes_of(PMS_DIRTY_BARE) == BIG);
    memset(content(0), 9, BIG);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(as_committed("of two kinds"));
    close_store();
}

static void held_versions_have_pre_images(void)
{
    make_store(1, BIG);
    close_store();
    pool = open_held(true);
    declare(0);
    CHECK(bytes_of(PMS_DIRTY_BARE) == 0 && bytes_of(PMS_DIRTY_USER) == BIG);
    memset(content(0), 9, BIG);
    CHECK(pms_commit(pool, &e) == PMS_OK && pms_back(pool, &e) == PMS_OK);
    CHECK(as_committed("gone back"));
    close_store();
}

static void pages_locked_in_memory_are_given_back(void)
{
    make_store(1, BIG);
    uint64_t off = committed.array[0].off;
    declare(0);
    memset(content(0), 9, BIG);
    if (mlock(pool->map.user + off, 32 * PMS_PAGE) == 0) {
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(as_committed("locked") && is_foreign(0));
        memset(content(0), 1, BIG);
        munlock(pool->map.user + off, 32 * PMS_PAGE);
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(as_committed("locked once"));
    }
    close_store();
}

/* ---- whoever asks for a pre-image ---- */

static void a_snapshot_of_the_running_transaction(void)
{
    struct pms_snapshot *s;
    make_store(3, BIG);
    declare(0);
    memset(content(0), 8, BIG);
    memset(content(1) + 5000, 8, BIG / 2);
    CHECK(bytes_of(PMS_DIRTY_BARE) > BIG);
    CHECK(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e) == PMS_OK);
    CHECK(bytes_of(PMS_DIRTY_BARE) == 0);
    declare(2); /* under it */
    CHECK(bytes_of(PMS_DIRTY_BARE) == 0);
    memset(content(2), 8, BIG);
    CHECK(snapshot_shows(s, &committed));
    CHECK(pms_commit(pool, &e) == PMS_OK && pms_journal_drain(pool->journal, &e) == PMS_OK);
    CHECK(snapshot_shows(s, &committed));
    pms_snapshot_end(pool, s);
    close_store();
}

/* The next flush of a tier has what was captured so. */
static void a_flush_knows_of_it(void)
{
    struct pms_snapshot *s;
    uint8_t changed[24];
    make_store(2, BIG);
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
    uint64_t tag = pms_snapshot_tag(s);
    pms_snapshot_end(pool, s);
    declare(0);
    memset(content(0), 8, BIG);
    CHECK(bytes_of(PMS_DIRTY_BARE) == BIG && pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
    pms_snapshot_changed(s, tag, MIB, changed, 24);
    for (uint64_t at = committed.array[0].off; at < committed.array[0].off + BIG; at += MIB)
        CHECK(changed[at / MIB]);
    pms_snapshot_end(pool, s);
    close_store();
}

static void a_snapshot_beside_a_roll_back(void)
{
    struct pms_snapshot *s;
    make_store(2, BIG);
    declare(0);
    memset(content(0), 8, BIG);
    CHECK(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e) == PMS_OK);
    memset(content(1), 8, BIG);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(as_committed("beside a snapshot") && snapshot_shows(s, &committed));
    pms_snapshot_end(pool, s);
    memset(content(0), 9, BIG);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(as_committed("after a snapshot"));
    close_store();
}

static bool show_home(int fd)
{
    return mmap(pool->map.home, pool->map.bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) ==
           pool->map.home;
}

/* While `what` runs, the file can be read up to here and no further. */
static void unreadable(uint64_t from, void (*what)(void))
{
    static unsigned char block[PMS_PAGE];
    char part[300];
    snprintf(part, sizeof part, "%s-part", path);
    int fd = pool->map.fd, short_fd = open(part, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    for (uint64_t at = 0; at < from; at += sizeof block)
        CHECK(pread(fd, block, sizeof block, (off_t)at) == sizeof block &&
              pwrite(short_fd, block, sizeof block, (off_t)at) == sizeof block);
    CHECK(short_fd >= 0 && show_home(short_fd));
    what();
    CHECK(show_home(fd));
    close(short_fd);
    unlink(part);
}

static void snapshot_fails(void)
{
    struct pms_snapshot *s;
    CHECK(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e) == PMS_E_OS && e.sys_errno == EIO);
}

static void asking_fails(void)
{
    int32_t written;
    struct pms_range r = {(uint64_t)(uintptr_t)content(0), BIG};
    CHECK(pms_written(pool, &r, 1, &written, &e) == PMS_E_OS && e.sys_errno == EIO);
}

static void reads_fail(bool give_up)
{
    struct pms_snapshot *s;
    make_store(2, BIG);
    declare(0);
    unreadable(0, asking_fails);
    memset(content(0), 8, BIG);
    unreadable(0, snapshot_fails);
    CHECK(bytes_of(PMS_DIRTY_BARE) == BIG);
    uint32_t entries = entries_of_the_log();
    unreadable(committed.array[0].off + 2 * MIB + PMS_PAGE, snapshot_fails);
    CHECK(bytes_of(PMS_DIRTY_BARE) == BIG && entries_of_the_log() > entries);
    if (give_up) {
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(as_committed("read in part"));
        memset(content(0), 9, BIG);
    }
    CHECK(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e) == PMS_OK);
    CHECK(bytes_of(PMS_DIRTY_USER) + bytes_of(PMS_DIRTY_FAULTED) == BIG);
    CHECK(snapshot_shows(s, &committed));
    pms_snapshot_end(pool, s);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(as_committed("after a failed read"));
    close_store();
}

static void what_cannot_be_read_is_said(void)
{
    reads_fail(false);
    reads_fail(true);
}

static void whether_anything_was_written(void)
{
    int32_t written = 7;
    make_store(2, BIG);
    struct pms_range both[2] = {{(uint64_t)(uintptr_t)content(0), BIG},
                                {(uint64_t)(uintptr_t)content(1), BIG}};
    declare(0);
    CHECK(pms_written(pool, both, 2, &written, &e) == PMS_OK && !written);
    content(0)[BIG - 3] ^= 1;
    CHECK(pms_written(pool, both, 2, &written, &e) == PMS_OK && written);
    CHECK(pms_written(pool, both + 1, 1, &written, &e) == PMS_OK && !written);
    both[0].bytes = BIG - 3;
    CHECK(pms_written(pool, both, 1, &written, &e) == PMS_OK && !written);
    both[0].bytes++;
    CHECK(pms_written(pool, both, 1, &written, &e) == PMS_OK && written);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    close_store();
}

static int fail_writes(enum pms_primitive p, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    return p == PMS_PRIM_PWRITE ? ENOSPC : 0;
}

static void a_commit_that_fails_is_rolled_back(void)
{
    make_store(2, BIG);
    declare(0);
    memset(content(0), 8, BIG);
    pms_persist_hook = fail_writes;
    int status = pms_commit(pool, &e);
    pms_persist_hook = NULL;
    CHECK(status == PMS_E_OS || status == PMS_E_FULL);
    memset(content(1), 8, BIG);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(as_committed("of a commit that failed"));
    reopen();
    CHECK(as_committed("of a commit that failed, reopened"));
    close_store();
}

/* A child sees the state of the fork, whatever the parent gives back or writes home. */
static void a_child_keeps_what_it_has(void)
{
    int go[2], ws = 0;
    char byte = 0;
    make_store(2, BIG);
    declare(0);
    memset(content(0), 8, BIG);
    CHECK(pipe(go) == 0);
    pid_t child = fork();
    if (child == 0) {
        alarm(120);
        close(go[1]);
        ssize_t n = read(go[0], &byte, 1);
        bool same = n == 1;
        for (size_t i = 0; i < BIG; i++)
            same = same && content(0)[i] == 8 && content(1)[i] == committed.array[1].content[i];
        _exit(same ? 0 : 1);
    }
    close(go[0]);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(as_committed("beside a child"));
    memset(content(0), 4, BIG);
    memset(content(1), 4, BIG);
    CHECK(pms_commit(pool, &e) == PMS_OK && pms_journal_drain(pool->journal, &e) == PMS_OK);
    CHECK(write(go[1], &byte, 1) == 1);
    CHECK(waitpid(child, &ws, 0) == child && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
    close(go[1]);
    close_store();
}

/* What was given back is the file's, and a view that outlives the store still is its own. */
static void a_view_that_outlives_a_roll_back(void)
{
    struct pms_object o;
    make_store(2, BIG);
    struct model *was = model_copy();
    CHECK(pms_object_get(pool, 0, "a0", 2, &o, &e) == PMS_OK); /* pinned */
    unsigned char *view = content(0);
    declare(0);
    memset(view, 8, BIG);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    struct pms_pool *closed = pool;
    CHECK(pms_pool_close(closed, 0, &e) == PMS_OK);
    struct pms_options again = {.mode = PMS_MODE_READ_WRITE, .hot = 1, .lock_timeout_ns = -1};
    CHECK(pms_pool_open(path, &again, &pool, &e) == PMS_OK);
    memset(content(0), 4, BIG);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    close_store();
    CHECK(memcmp(view, was->array[0].content, BIG) == 0);
    pms_unpin(closed, o.data);
    pms_pool_release(closed);
    model_free(was);
    free(was);
}

/* ---- threads that store while the transaction is rolled back ---- */

static _Atomic bool stop;

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"))) /* the protection of pages orders nothing for it */
#endif
static void *store_on(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    while (!atomic_load(&stop))
        ((volatile unsigned char *)content((int)(seed >> 60) % 2))[draw(&seed, BIG)] ^= 1;
    return NULL;
}

static void writers_beside_roll_backs(void)
{
    pthread_t thread[3];
    make_store(2, BIG);
    atomic_store(&stop, false);
    for (uintptr_t i = 0; i < 3; i++)
        pthread_create(&thread[i], NULL, store_on, (void *)(i * 0x123456789abcdefull + 1));
    for (int i = 0; i < 60 / SHARE; i++) {
        if (i % 2)
            declare(i / 2 % 2);
        CHECK(pms_rollback(pool, &e) == PMS_OK);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 3; i++)
        pthread_join(thread[i], NULL);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(as_committed("beside writers"));
    reopen();
    CHECK(as_committed("beside writers, reopened"));
    close_store();
}

static void *store_all(void *arg)
{
    (void)arg;
    for (int i = 0; i < 4; i++) {
        if (i % 2)
            declare(i);
        memset(content(i), 8, BIG);
    }
    return NULL;
}

/* What it needs is read a piece at a time, and others capture meanwhile. */
static void a_snapshot_beside_first_stores(void)
{
    for (int round = 0; round < 8 / SHARE + 1; round++) {
        struct pms_snapshot *s;
        pthread_t thread;
        make_store(4, BIG);
        declare(3);
        memset(content(3), 8, BIG);
        pthread_create(&thread, NULL, store_all, NULL);
        while (round % 2 &&
               pms_undo_page_tag(&pool->undo, committed.array[0].off / PMS_PAGE) != pool->undo.tag)
            sched_yield();
        CHECK(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e) == PMS_OK);
        CHECK(bytes_of(PMS_DIRTY_BARE) == 0);
        CHECK(snapshot_shows(s, &committed));
        pthread_join(thread, NULL);
        CHECK(bytes_of(PMS_DIRTY_BARE) == 0);
        CHECK(snapshot_shows(s, &committed));
        pms_snapshot_end(pool, s);
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(as_committed("beside a snapshot of first stores"));
        close_store();
    }
}

/* By system calls of this process; 0 where the system does not tell. */
static uint64_t bytes_read(void)
{
    uint64_t bytes = 0;
    FILE *f = fopen("/proc/self/io", "r");
    if (f && fscanf(f, "rchar: %lu", &bytes) != 1)
        bytes = 0;
    if (f)
        fclose(f);
    return bytes;
}

static void only_what_is_asked_for_is_read(void)
{
    int32_t written = 7;
    make_store(3, BIG);
    struct pms_range ends[2] = {{(uint64_t)(uintptr_t)content(0), 1000},
                                {(uint64_t)(uintptr_t)content(2), 1000}};
    for (int i = 0; i < 3; i++)
        declare(i);
    content(1)[5] ^= 1;
    uint64_t before = bytes_read();
    CHECK(pms_written(pool, ends, 2, &written, &e) == PMS_OK && !written);
    CHECK(bytes_read() - before < BIG / 4);
    content(2)[999] ^= 1;
    CHECK(pms_written(pool, ends, 2, &written, &e) == PMS_OK && written);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    close_store();
}

/* ---- anything, at random ---- */

static void step(uint64_t *seed)
{
    struct pms_object o;
    int i = (int)draw(seed, NAMES);
    uint32_t what = draw(seed, 8);
    if (what < 3 || !find(i, &o)) {
        change(seed);
    } else if (what < 5) {
        struct pms_range r = {(uint64_t)(uintptr_t)memory(o.data), o.data_bytes};
        CHECK(pms_will_write(pool, &r, 1, &e) == PMS_OK);
        memset(memory(o.data), (int)draw(seed, 256), o.data_bytes / (1 + draw(seed, 3)));
    } else {
        uint64_t from = draw(seed, (uint32_t)o.data_bytes);
        memset(memory(o.data) + from, (int)draw(seed, 256), o.data_bytes - from);
    }
}

struct at_random {
    uint64_t seed;
    struct pms_snapshot *s;
    struct model *m;
    unsigned rolled, bare;
};

static void end_snapshot(struct at_random *r)
{
    if (!r->s)
        return;
    CHECK(snapshot_shows(r->s, r->m));
    pms_snapshot_end(pool, r->s);
    model_free(r->m);
    free(r->m);
    r->s = NULL;
}

static void round_at_random(struct at_random *r)
{
    bool snapshot = draw(&r->seed, 5) == 0;
    uint32_t steps = 1 + draw(&r->seed, 6), at = draw(&r->seed, steps);
    for (uint32_t i = 0; i < steps; i++) {
        step(&r->seed);
        if (snapshot && i == at) {
            end_snapshot(r);
            r->m = model_copy();
            CHECK(pms_snapshot_begin(pool, 1ull << 30, -1, &r->s, &e) == PMS_OK);
        }
    }
    r->bare += bytes_of(PMS_DIRTY_BARE) > 0;
    if (draw(&r->seed, 3) == 0) {
        CHECK(pms_commit(pool, &e) == PMS_OK);
        model_take();
    } else {
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(as_committed("at random"));
        r->rolled++;
    }
    if (draw(&r->seed, 3) == 0)
        end_snapshot(r);
    if (draw(&r->seed, 4) == 0) {
        end_snapshot(r);
        reopen();
        CHECK(as_committed("at random, reopened"));
    }
}

static void rolled_back_at_random(void)
{
    const char *given = getenv("PMS_TEST_SEED");
    struct at_random r = {.seed = given ? strtoull(given, NULL, 0) : 20261123};
    make_store(12, 1100000);
    int before = test_checks_failed;
    for (int i = 0; i < 240 / SHARE && test_checks_failed == before; i++)
        round_at_random(&r);
    CHECK(r.rolled > 20 / SHARE && r.bare > 20 / SHARE);
    printf("  %u transactions with pages whose pre-images were at home, %u roll backs\n", r.bare,
           r.rolled);
    end_snapshot(&r);
    close_store();
}

int main(void)
{
    const char *folder = getenv("PMS_TEST_DIR");
    snprintf(path, sizeof path, "%s/pms-test-bare-%ld", folder ? folder : "/dev/shm",
             (long)getpid());
    TEST(nothing_is_copied);
    TEST(a_roll_back_gives_the_pages_back);
    TEST(what_was_written_before_is_copied);
    TEST(held_versions_have_pre_images);
    TEST(pages_locked_in_memory_are_given_back);
    TEST(a_snapshot_of_the_running_transaction);
    TEST(a_flush_knows_of_it);
    TEST(a_snapshot_beside_a_roll_back);
    TEST(what_cannot_be_read_is_said);
    TEST(whether_anything_was_written);
    TEST(a_commit_that_fails_is_rolled_back);
    TEST(a_child_keeps_what_it_has);
    TEST(a_view_that_outlives_a_roll_back);
    TEST(writers_beside_roll_backs);
    TEST(a_snapshot_beside_first_stores);
    TEST(only_what_is_asked_for_is_read);
    TEST(rolled_back_at_random);
    model_free(&committed);
    unlink(path);
    return test_summary();
}
