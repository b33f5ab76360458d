/* Stores that come while a transaction ends, at each of its primitives, as another thread's
 * might: they belong to this transaction or to the next, and the next commit makes them durable.
 * Never to neither. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define ARRAY_BYTES 4096u
#define LATE 5u     /* the byte that comes late, on a line of its own */
#define BESIDE 100u /* what is written in time */
#define MOST 400u

static char path[256], copy_path[300];
static int domain, hot_ranges;
static struct pms_pool *pool;
static volatile unsigned char *array;
static uint64_t data;

/* The store is a read from a file: where the page is read-only it fails with EFAULT instead of
 * waiting for a lock that we hold. */
static int source;
/* the thread that ends transactions: the journal's own writes are not counted */
static _Thread_local bool ends;
static unsigned countdown; /* primitives until the store; 0: none to come */
static bool landed, written_back;

static bool on_line(uintptr_t addr, size_t bytes)
{
    uintptr_t user = (uintptr_t)array + LATE, engine = (uintptr_t)pool->map.engine + data + LATE;
    uintptr_t from = addr & ~(uintptr_t)(PMS_LINE - 1), to = addr + bytes;
    return (user >= from && user < to) || (engine >= from && engine < to);
}

static int late_store(enum pms_primitive p, uintptr_t addr, size_t bytes)
{
    if (!ends)
        return 0;
    if (landed && p == PMS_PRIM_FLUSH && on_line(addr, bytes))
        written_back = true;
    if (countdown && --countdown == 0 &&
        pread(source, (void *)(uintptr_t)(array + LATE), 1, 0) == 1) {
        landed = true;
        written_back = false;
    }
    return 0;
}

static void commit(void)
{
    struct pms_error e;
    CHECK(pms_commit(pool, &e) == PMS_OK);
}

/* What a crash now would leave, recovered: the byte that came late. */
static int after_a_crash(void)
{
    static unsigned char block[1u << 20];
    int from = open(path, O_RDONLY | O_CLOEXEC),
        to = open(copy_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ssize_t n;
    while ((n = read(from, block, sizeof block)) > 0)
        CHECK(write(to, block, (size_t)n) == n);
    close(from);
    close(to);
    struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain, .hot = 1};
    struct pms_error e;
    struct pms_pool *other;
    if (pms_pool_open(copy_path, &o, &other, &e) != PMS_OK) {
        printf("%s\n", e.what);
        abort();
    }
    int late = other->map.user[data + LATE];
    CHECK(pms_pool_close(other, 0, &e) == PMS_OK);
    pms_pool_release(other);
    return late;
}

static void open_store(void)
{
    struct pms_options o = {
        .size = 1u << 20, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = hot_ranges};
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
    CHECK(pms_object_put_array(pool, 0, "a", 1, "m", 1, ARRAY_BYTES, PMS_FILL_ZERO, NULL, 0, 0,
                               &data, &e) == PMS_OK);
    array = pool->map.user + data;
    commit();
}

static void close_store(void)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static void make_hot(void)
{
    struct pms_error e;
    struct pms_stats st;
    for (int i = 0; i < 4; i++) {
        array[BESIDE]++;
        commit();
    }
    CHECK(pms_pool_stats(pool, &st, &e) == PMS_OK && (st.hot_ranges > 0) == (hot_ranges != 0));
}

/* Stores at each primitive of one end of a transaction, one after the other, until it has no
 * more. */
static void at_each_primitive(void (*end)(void))
{
    unsigned stores = 0, n = 1;
    open_store();
    for (; n < MOST; n++) {
        unsigned char value = (unsigned char)(n % 255 + 1);
        make_hot();
        CHECK(pwrite(source, &value, 1, 0) == 1);
        array[BESIDE]++;
        landed = false;
        countdown = n;
        pms_persist_hook = late_store;
        end();
        bool over = countdown > 0;
        countdown = 0;
        unsigned char now = array[LATE];
        CHECK(!landed || now == value || end != commit);
        commit(); /* nobody stores any more: what is in memory now is durable when it returns */
        pms_persist_hook = NULL;
        CHECK(array[LATE] == now);
        CHECK(after_a_crash() == now);
        if (domain == PMS_DOMAIN_EMULATED && landed && now == value)
            CHECK(written_back);
        stores += landed;
        if (over)
            break;
    }
    CHECK(n > 3 && n < MOST);
    CHECK(stores > 0);
    close_store();
}

static int count_entry(void *count, const struct pms_entry *entry, const void *image)
{
    (void)entry, (void)image;
    ++*(uint32_t *)count;
    return 0;
}

static void beside_a_commit(void) { at_each_primitive(commit); }

static void roll_back(void)
{
    struct pms_error e;
    CHECK(pms_rollback(pool, &e) == PMS_OK);
}

static void beside_a_roll_back(void) { at_each_primitive(roll_back); }

/* What came late is undone with the next transaction, or was committed with this one: memory and
 * file agree. */
static void commit_and_roll_back(void)
{
    commit();
    pms_persist_hook = NULL;
    roll_back();
}

static void before_a_roll_back(void) { at_each_primitive(commit_and_roll_back); }

/* ---- a commit that fails ---- */

static int no_space(enum pms_primitive p, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    return p == PMS_PRIM_PWRITE ? ENOSPC : 0;
}

#define RANGES 3u
#define APART 3u /* pages from one hot page to the next */

/* What it copied of hot ranges is no entry of any transaction. Here the next one's entries (the
 * root's line, two pages) end where the third copy begins, with the number before its number. */
static void a_failed_commit_leaves_no_entries(void)
{
    struct pms_error e;
    uint32_t entries = 0;
    uint64_t at;
    hot_ranges = 1;
    domain = PMS_DOMAIN_FILE;
    open_store();
    CHECK(pms_object_put_array(pool, 0, "b", 1, "m", 1, 128u << 10, PMS_FILL_ZERO, NULL, 0, 0, &at,
                               &e) == PMS_OK);
    commit();
    volatile unsigned char *pages = pool->map.user + at;
    for (int i = 0; i < 6; i++) {
        for (uint32_t k = 0; k < RANGES; k++) {
            struct pms_range r = {(uint64_t)(uintptr_t)pages + (uint64_t)k * APART * PMS_PAGE, 1};
            CHECK(pms_will_write(pool, &r, 1, &e) == PMS_OK);
            pages[k * APART * PMS_PAGE]++;
        }
        commit();
    }
    struct pms_stats st;
    CHECK(pms_pool_stats(pool, &st, &e) == PMS_OK && st.hot_ranges == RANGES);
    for (uint32_t k = 0; k < RANGES; k++)
        pages[k * APART * PMS_PAGE]++;
    pms_persist_hook = no_space;
    CHECK(pms_commit(pool, &e) == PMS_E_FULL);
    pms_persist_hook = NULL;
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    struct pms_range two = {(uint64_t)(uintptr_t)pages + 16 * PMS_PAGE, 2 * PMS_PAGE};
    CHECK(pms_will_write(pool, &two, 1, &e) == PMS_OK);
    pms_undo_scan(&pool->undo, pool->undo.tag, count_entry, &entries);
    CHECK(entries == pool->undo.log.seq);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    for (uint32_t k = 0; k < RANGES; k++)
        CHECK(pages[k * APART * PMS_PAGE] == 6);
    close_store();
}

int main(void)
{
    ends = true;
    const char *dir = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-late-%ld", dir, (long)getpid());
    snprintf(copy_path, sizeof copy_path, "%s-copy", path);
    char source_path[300];
    snprintf(source_path, sizeof source_path, "%s-source", path);
    source = open(source_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    unlink(source_path);
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        for (hot_ranges = 0; hot_ranges < 2; hot_ranges++) {
            TEST(beside_a_commit);
            TEST(beside_a_roll_back);
            TEST(before_a_roll_back);
        }
    }
    TEST(a_failed_commit_leaves_no_entries);
    unlink(path);
    unlink(copy_path);
    close(source);
    return test_summary();
}
