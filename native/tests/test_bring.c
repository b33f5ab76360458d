/* Content that lies elsewhere goes straight home, before the commit that makes it count. */
#include "base/checksum.h"
#include "flush/bring.h"
#include "flush/chunks.h"
#include "journal/state.h"
#include "log/snapshot.h"
#include "pool_store.h"

#define MIB (1ull << 20)
#define COUNT 4

static struct pms_pool *pool;
static struct pms_error e;

/* pieces and pages that are not whole; whole ones; the smallest that may go */
static const uint64_t sizes[COUNT] = {3 * MIB + 4 * 777, 5 * MIB, 16 * PMS_PAGE, 2 * MIB - 4};
static unsigned char *content[COUNT];
static uint32_t *at[COUNT];
static uint32_t crc[COUNT][8];
static struct pms_bring bring[COUNT];

static bool ok(int status)
{
    if (status != PMS_OK)
        printf("  status %d errno %d %s\n", e.status, e.sys_errno, e.what);
    return status == PMS_OK;
}

static void name_of(int i, char name[8]) { snprintf(name, 8, "%d", i); }

static void open_it(int mode)
{
    domain = PMS_DOMAIN_FILE;
    pool = open_store(mode, 64 * MIB, &e);
}

static void fill(unsigned seed)
{
    for (int i = 0; i < COUNT; i++) {
        content[i] = realloc(content[i], sizes[i]);
        for (uint64_t k = 0; k < sizes[i]; k++)
            content[i][k] = (unsigned char)((k * (seed + 7)) >> 3 ^ k >> 13 ^ seed);
    }
}

/* Arrays, and for each what is to be in it. */
static void make_all(unsigned seed)
{
    fill(seed);
    for (int i = 0; i < COUNT; i++) {
        char name[8];
        name_of(i, name);
        bring[i] = (struct pms_bring){.src = content[i], .bytes = sizes[i], .crc = crc[i]};
        at[i] = array(pool, name, sizes[i] / 4, &bring[i].data);
    }
}

/* Some file systems have no O_DIRECT. */
static bool can(void) { return pool->journal->direct >= 0; }

static bool all_are_brought(void)
{
    bool all = true;
    for (int i = 0; i < COUNT; i++)
        all = all && bring[i].brought;
    return all || !can();
}

static void remove_all(void)
{
    for (int i = 0; i < COUNT; i++) {
        char name[8];
        name_of(i, name);
        CHECK(ok(pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e)));
    }
}

static void find_all(void)
{
    for (int i = 0; i < COUNT; i++) {
        char name[8];
        struct pms_object o = {0};
        name_of(i, name);
        CHECK(ok(pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e)));
        at[i] = (uint32_t *)(void *)(pool->map.user + o.data);
    }
}

static bool all_are_there(void)
{
    for (int i = 0; i < COUNT; i++)
        if (memcmp(at[i], content[i], sizes[i]) != 0)
            return false;
    return true;
}

static uint64_t own_of(int i)
{
    uint64_t pages = 0, run, end = bring[i].data + sizes[i] / PMS_PAGE * PMS_PAGE;
    for (uint64_t off = bring[i].data; off < end; off += PMS_PAGE)
        pages += !pms_map_foreign(&pool->map, off, PMS_PAGE, &run);
    return pages;
}

/* The process dies behind its commit: the last record counts only if what it says of its homes is
 * what is home. */
static void in_a_child(void (*fn)(void))
{
#ifdef __SANITIZE_THREAD__ /* does not know threads of a fork child: closed, then */
    open_it(PMS_MODE_READ_WRITE);
    fn();
    shut(pool, 0);
#else
    pid_t child = fork();
    if (child == 0) {
        open_it(PMS_MODE_READ_WRITE);
        fn();
        _exit(test_checks_failed != 0);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
    open_it(PMS_MODE_READ_WRITE);
    find_all();
}

static void new_store(void)
{
    open_it(PMS_MODE_TRUNCATE);
    shut(pool, 0);
}

static void store_what_was_not_brought(void)
{
    for (int i = 0; i < COUNT; i++)
        if (!bring[i].brought)
            memcpy(at[i], content[i], sizes[i]);
}

/* ---- what is brought ---- */

static void bring_and_commit(void)
{
    make_all(1);
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)) && all_are_brought());
    store_what_was_not_brought();
    CHECK(all_are_there());
    for (int i = 0; i < COUNT; i++) {
        CHECK(own_of(i) == 0 || !can());
        for (uint64_t k = 0; can() && k < sizes[i]; k += PMS_BRING_PIECE) {
            uint64_t n = sizes[i] - k < PMS_BRING_PIECE ? sizes[i] - k : PMS_BRING_PIECE;
            CHECK(crc[i][k / PMS_BRING_PIECE] == pms_crc32c(0, content[i] + k, n));
        }
    }
    struct pms_stats before, after;
    CHECK(ok(pms_pool_stats(pool, &before, &e)) && ok(pms_commit(pool, &e)) &&
          ok(pms_pool_stats(pool, &after, &e)));
    CHECK(after.straight_bytes > before.straight_bytes && all_are_there());
}

static void it_counts_with_the_commit(void)
{
    new_store();
    fill(1);
    in_a_child(bring_and_commit);
    CHECK(all_are_there());
    shut(pool, 0);
}

static void bring_and_store(void)
{
    make_all(2);
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)) && all_are_brought());
    store_what_was_not_brought();
    for (int i = 0; i < COUNT; i++) {
        content[i][sizes[i] / 2] ^= 1;
        ((unsigned char *)at[i])[sizes[i] / 2] ^= 1;
    }
    CHECK(ok(pms_commit(pool, &e)) && all_are_there());
}

static void what_is_stored_to_afterwards_is_written_again(void)
{
    new_store();
    in_a_child(bring_and_store);
    fill(2);
    for (int i = 0; i < COUNT; i++)
        content[i][sizes[i] / 2] ^= 1;
    CHECK(all_are_there());
    shut(pool, 0);
}

static void bring_twice(void)
{
    make_all(3);
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)) && all_are_brought());
    store_what_was_not_brought();
    for (int i = 0; i < COUNT; i++)
        memset(content[i], 60 + i, sizes[i]);
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)) && all_are_brought());
    store_what_was_not_brought();
    CHECK(ok(pms_commit(pool, &e)) && all_are_there());
}

static void the_last_one_counts(void)
{
    new_store();
    in_a_child(bring_twice);
    for (int i = 0; i < COUNT; i++)
        memset(content[i], 60 + i, sizes[i]);
    CHECK(all_are_there());
    shut(pool, 0);
}

static void bring_alone(void)
{
    make_all(4);
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)) && all_are_brought());
    store_what_was_not_brought();
}

static void without_a_commit_nothing_counts(void)
{
    struct pms_check_report report = {0};
    struct pms_object o;
    open_it(PMS_MODE_TRUNCATE);
    for (int round = 0; round < 3; round++) {
        bring_alone();
        CHECK(ok(pms_rollback(pool, &e)));
        CHECK(pms_object_find(pool, 0, "1", 1, &o, &e) == PMS_E_NOT_FOUND);
    }
    CHECK(ok(pms_check(pool, &report, &e)) && report.problem_count == 0);
    /* as many bytes as were brought before the roll back, and not brought now */
    make_all(5);
    for (int i = 0; i < COUNT; i++)
        memcpy(at[i], content[i], sizes[i]);
    CHECK(ok(pms_commit(pool, &e)) && all_are_there());
    shut(pool, 0);
    open_it(PMS_MODE_READ_WRITE);
    find_all();
    CHECK(all_are_there());
    shut(pool, 0);
}

/* ---- what is not ---- */

static void what_is_not_new_is_left_alone(void)
{
    open_it(PMS_MODE_TRUNCATE);
    make_all(6);
    CHECK(ok(pms_commit(pool, &e)));
    uint64_t data;
    uint32_t *small = array(pool, "small", 16 * PMS_PAGE / 4 - 1024, &data);
    /* the last record has nothing to do with them */
    CHECK(ok(pms_commit(pool, &e)) && ok(pms_journal_drain(pool->journal, &e)));
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)));
    for (int i = 0; i < COUNT; i++)
        CHECK(!bring[i].brought && at[i][0] == 0 && at[i][sizes[i] / 4 - 1] == 0);
    CHECK(ok(pms_object_remove(pool, 0, "small", 5, &e)) && ok(pms_commit(pool, &e)));
    small = array(pool, "small", 16 * PMS_PAGE / 4 - 1024, &data);
    struct pms_bring little = {
        .data = data, .src = content[1], .bytes = 15 * PMS_PAGE, .crc = crc[0]};
    CHECK(ok(pms_bring_home(pool, &little, 1, &e)) && !little.brought && small[0] == 0);
    little.data = data + 64; /* no block begins there */
    little.bytes = 16 * PMS_PAGE;
    CHECK(ok(pms_bring_home(pool, &little, 1, &e)) && !little.brought);
    shut(pool, 0);
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(PMS_MODE_TRUNCATE, 64 * MIB, &e);
    make_all(6);
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)) && !bring[1].brought && at[1][5] == 0);
    shut(pool, 0);
}

/* Over blocks that were freed, whose images wait to be written home. */
static void no_older_image_lands_on_it(void)
{
    open_it(PMS_MODE_TRUNCATE);
    make_all(7);
    CHECK(ok(pms_commit(pool, &e)) && ok(pms_journal_drain(pool->journal, &e)));
    for (unsigned round = 1; round < 4; round++) {
        for (int i = 0; i < COUNT; i++)
            memset(at[i], (int)round, sizes[i]);
        CHECK(ok(pms_commit(pool, &e))); /* images, in the journal */
        remove_all();
        CHECK(ok(pms_commit(pool, &e)));
        make_all(7 + round);
        CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)));
        store_what_was_not_brought();
        CHECK(ok(pms_commit(pool, &e)) && ok(pms_journal_drain(pool->journal, &e)));
        CHECK(all_are_there());
        shut(pool, 0);
        open_it(PMS_MODE_READ_WRITE);
        find_all();
        CHECK(all_are_there());
    }
    shut(pool, 0);
}

/* What it pinned lies where the new blocks do. */
static void a_snapshot_reads_what_was_there(void)
{
    struct pms_snapshot *s = NULL;
    unsigned char *read = malloc(sizes[1]), *old = malloc(sizes[1]);
    open_it(PMS_MODE_TRUNCATE);
    make_all(11);
    CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)) && all_are_brought());
    store_what_was_not_brought();
    CHECK(ok(pms_commit(pool, &e)));
    memcpy(old, content[1], sizes[1]);
    uint64_t off = bring[1].data;
    CHECK(ok(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e)));
    remove_all();
    CHECK(ok(pms_commit(pool, &e)));
    for (unsigned round = 0; round < 3; round++) {
        make_all(12 + round);
        CHECK(ok(pms_bring_home(pool, bring, COUNT, &e)));
        store_what_was_not_brought();
        CHECK(ok(pms_commit(pool, &e)));
        CHECK(ok(pms_snapshot_read(s, off, sizes[1], read, &e)));
        CHECK(memcmp(read, old, sizes[1]) == 0);
        remove_all();
        CHECK(ok(pms_commit(pool, &e)));
    }
    pms_snapshot_end(pool, s);
    free(read);
    free(old);
    shut(pool, 0);
}

static int fail_writes(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    return primitive == PMS_PRIM_PWRITE && bytes > MIB ? EIO : 0;
}

static void a_write_that_fails(void)
{
    open_it(PMS_MODE_TRUNCATE);
    make_all(15);
    atomic_store(&pms_persist_hook, fail_writes);
    CHECK(!can() || (pms_bring_home(pool, bring, COUNT, &e) == PMS_E_OS && e.sys_errno == EIO));
    atomic_store(&pms_persist_hook, NULL);
    CHECK(ok(pms_rollback(pool, &e)));
    bring_and_commit();
    shut(pool, 0);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-bring-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    TEST(it_counts_with_the_commit);
    TEST(what_is_stored_to_afterwards_is_written_again);
    TEST(the_last_one_counts);
    TEST(without_a_commit_nothing_counts);
    TEST(what_is_not_new_is_left_alone);
    TEST(no_older_image_lands_on_it);
    TEST(a_snapshot_reads_what_was_there);
    TEST(a_write_that_fails);
    for (int i = 0; i < COUNT; i++)
        free(content[i]);
    unlink(path);
    return test_summary();
}
