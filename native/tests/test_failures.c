/* System calls that fail, at every place where the engine makes one: the state stays one of the
 * two it may be, the store goes on. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "heap/table.h"
#include "commit/pool_state.h"
#include "store/grow.h"
#include "objects/pms.h"
#include "test.h"

#define MIB (1ull << 20)

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define STRIDE 7 /* of the calls made to fail */
#else
#define STRIDE 2
#endif

static char path[256];
static int domain;
static struct pms_pool *pool;

/* ---- the nth primitive of a kind fails ---- */

static enum pms_primitive fail_kind;
static _Atomic int fail_at, fail_seen, fail_errno;

static int fail_nth(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    if (primitive != fail_kind || atomic_fetch_add(&fail_seen, 1) + 1 != atomic_load(&fail_at))
        return 0;
    return atomic_load(&fail_errno);
}

static void fail_from_now(enum pms_primitive kind, int n, int err)
{
    fail_kind = kind;
    atomic_store(&fail_seen, 0);
    atomic_store(&fail_at, n);
    atomic_store(&fail_errno, err);
    pms_persist_hook = fail_nth;
}

/* ---- a store ---- */

static void open_store(uint64_t size, uint64_t max_size)
{
    struct pms_options o = {
        .size = size, .max_size = max_size, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
}

static void close_store(void)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static int put(const char *name, uint64_t bytes, unsigned char **at)
{
    struct pms_error e;
    uint64_t data = 0;
    int status = pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                      PMS_FILL_ZERO, NULL, 0, 0, &data, &e);
    if (at)
        *at = pool->map.user + data;
    return status;
}

static void sound(void)
{
    struct pms_check_report *r = malloc(sizeof *r);
    struct pms_error e;
    CHECK(r && pms_check(pool, r, &e) == PMS_OK);
    if (r && r->problem_count)
        printf("  %s\n", r->problem[0]);
    CHECK(r && r->problem_count == 0);
    free(r);
}

/* ---- growth ---- */

static int put_again(const char *name, uint64_t bytes)
{
    int status = put(name, bytes, NULL);
    return status == PMS_E_OS ? put(name, bytes, NULL) : status;
}

static void growth_that_failed_may_be_tried_again(void)
{
    static const enum pms_primitive kinds[] = {PMS_PRIM_ALLOCATE, PMS_PRIM_PWRITE, PMS_PRIM_MAP};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        int refused = 0;
        for (int n = 1;; n++) {
            struct pms_error e;
            open_store(2 * MIB, 0);
            CHECK(put("before", 1000, NULL) == PMS_OK);
            CHECK(pms_commit(pool, &e) == PMS_OK);
            fail_from_now(kinds[k], n, EIO);
            int status = put("large", 24 * MIB, NULL);
            bool failed = atomic_load(&fail_seen) >= n;
            pms_persist_hook = NULL;
            /* A failure may also meet what the growth can do without: the superblock's second
             * copy, or the journal's thread. */
            CHECK(status == PMS_OK || (failed && status == PMS_E_OS));
            refused += status == PMS_E_OS;
            CHECK(put_again("small", 3 * MIB) == PMS_OK); /* less than what failed */
            CHECK(put_again("large", 24 * MIB) == PMS_OK);
            CHECK(pms_commit(pool, &e) == PMS_OK);
            sound();
            close_store();
            if (!failed)
                break;
        }
        CHECK(refused > 0);
    }
}

/* The file may name the new part or not: written there again, by another growth, it might name
 * half of one. */
static void growth_whose_sync_failed_is_the_last(void)
{
    int refused = 0;
    for (int n = 1;; n++) {
        struct pms_error e;
        struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain, .hot = 1};
        open_store(2 * MIB, 0);
        CHECK(put("before", 1000, NULL) == PMS_OK);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        fail_from_now(PMS_PRIM_SYNC, n, EIO);
        int status = put("large", 8 * MIB, NULL);
        bool failed = atomic_load(&fail_seen) >= n;
        pms_persist_hook = NULL;
        if (status == PMS_OK) { /* none met it; or the journal's thread, which says so later */
            close_store();
            if (!failed)
                break;
            continue;
        }
        CHECK(status == PMS_E_OS);
        /* the journal's thread met it, before anything of the growth was written */
        if (!pms_pool_failed(pool)) {
            CHECK(put("large", 8 * MIB, NULL) == PMS_OK);
            close_store();
            continue;
        }
        refused++;
        CHECK(put("larger", 40 * MIB, NULL) == PMS_E_READONLY);
        CHECK(pms_pool_close(pool, 1, &e) == PMS_E_READONLY);
        pms_pool_release(pool);
        CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_OK);
        CHECK(put("before", 1000, NULL) == PMS_OK && put("large", 8 * MIB, NULL) == PMS_OK);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        sound();
        close_store();
    }
    CHECK(refused >= 3); /* of the page table, of the superblock, of its twin */
}

static void absurd_sizes_change_nothing(void)
{
    static const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 4096, 1ull << 63, (1ull << 63) + 1,
                                     1ull << 62, 1ull << 47,        1ull << 46};
    struct stat before, after;
    open_store(2 * MIB, 0);
    CHECK(stat(path, &before) == 0);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        CHECK(put("absurd", sizes[i], NULL) == PMS_E_FULL);
    CHECK(stat(path, &after) == 0 && after.st_size == before.st_size);
    sound();
    close_store();
    struct pms_options o = {.size = UINT64_MAX, .mode = PMS_MODE_TRUNCATE, .domain = domain};
    struct pms_error e;
    CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_E_INVALID);
}

/* Between the data of two segments lie a page table and a log. */
static void a_range_across_segments_is_refused(void)
{
    struct pms_error e;
    open_store(2 * MIB, 0);
    CHECK(pms_pool_grow(pool, 1 << 20, &e) == PMS_OK && pool->super.segment_count == 2);
    uint64_t next = pool->super.segment[1].data_off, end = pool->super.segment[1].table_off;
    unsigned char *last = pool->map.user + end - PMS_PAGE; /* free: a view may still hold it */
    struct pms_range whole = {(uint64_t)(uintptr_t)last, PMS_PAGE};
    struct pms_range across = {whole.addr, next - end + 2 * PMS_PAGE};
    CHECK(pms_will_write(pool, &whole, 1, &e) == PMS_OK);
    CHECK(pms_will_write(pool, &across, 1, &e) == PMS_E_INVALID);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    close_store();
}

/* ---- mprotect ---- */

#define ROWS 40u
#define ROW_BYTES (128u << 10) /* larger than what is captured whole */

static void fault_and_store(unsigned char *a, int round)
{
    struct pms_error e;
    for (uint32_t i = 0; i < ROWS; i++)
        a[i * ROW_BYTES] = (unsigned char)(round + 1);
    for (int i = 0; i < 20; i++) {
        /* in slabs of many classes: pages of the engine's that were never stored to */
        char name[24], value[8000];
        int n = snprintf(name, sizeof name, "v%d in round %d", i, round);
        memset(value, round, sizeof value);
        CHECK(pms_object_put_value(pool, 0, name, (uint32_t)n, value, (uint32_t)(400 * i + 1),
                                   &e) == PMS_OK);
    }
}

static int with_failing_mprotect(int n)
{
    struct pms_error e;
    unsigned char *a = NULL;
    test_checks_failed = 0;
    open_store(32 * MIB, 0);
    CHECK(put("a", ROWS * ROW_BYTES, &a) == PMS_OK);
    fault_and_store(a, 0);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    fail_from_now(PMS_PRIM_PROTECT, n, ENOMEM);
    fault_and_store(a, 1);
    CHECK(put("b", 100000, NULL) == PMS_OK);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    for (uint32_t i = 0; i < ROWS; i++)
        CHECK(a[i * ROW_BYTES] == 1);
    fault_and_store(a, 2);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    bool last = atomic_load(&fail_seen) < n;
    pms_persist_hook = NULL;
    for (uint32_t i = 0; i < ROWS; i++)
        CHECK(a[i * ROW_BYTES] == 3);
    sound();
    close_store();
    return test_checks_failed ? 1 : last ? 2 : 0;
}

/* ENOMEM: the process has too many mappings. In a child, for the engine's last word would be
 * abort(). */
static void mappings_that_run_out_are_no_failure(void)
{
    for (int n = 1, status = 0;; n += STRIDE) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0)
            _exit(with_failing_mprotect(n));
        CHECK(waitpid(child, &status, 0) == child);
        if (!WIFEXITED(status) || WEXITSTATUS(status) == 1)
            printf("  domain %d, mprotect %d failed: status %x\n", domain, n, (unsigned)status);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) != 1);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            break;
    }
}

/* ---- close with more views than the process may have mappings ---- */

#define VIEWS 2000u
#define SPARE 1000u

/* Leaves the process with about `spare` mappings. */
static void use_up_mappings(uint32_t spare)
{
    const uint32_t most = 1u << 20;
    unsigned char *p = mmap(NULL, (size_t)most * PMS_PAGE, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(p != MAP_FAILED);
    uint32_t n = 0;
    while (n + 2 < most && mprotect(p + (size_t)n * PMS_PAGE, PMS_PAGE, PROT_READ) == 0)
        n += 2; /* two mappings each */
    CHECK(n + 2 < most && n > spare);
    CHECK(mprotect(p, (size_t)spare * PMS_PAGE, PROT_READ) == 0);
}

static int close_with_views(void)
{
    static unsigned char *view[VIEWS];
    struct pms_object o; /* pinned, as it is got */
    struct pms_error e;
    test_checks_failed = 0;
    open_store(64 * MIB, 0);
    for (uint32_t i = 0; i < VIEWS; i++) {
        char name[16];
        snprintf(name, sizeof name, "a%u", i);
        CHECK(put(name, PMS_PAGE, &view[i]) == PMS_OK);
        CHECK(pms_object_get(pool, 0, name, (uint32_t)strlen(name), &o, &e) == PMS_OK);
        memcpy(view[i], &i, sizeof i);
    }
    CHECK(pms_commit(pool, &e) == PMS_OK);
    use_up_mappings(SPARE);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    for (uint32_t i = 0; i < VIEWS; i++) {
        uint32_t found;
        memcpy(&found, view[i], sizeof found);
        CHECK(found == i);
        view[i][5]++;
    }
    return test_checks_failed != 0;
}

static void close_keeps_any_number_of_views(void)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0)
        _exit(close_with_views());
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- more ranges than pages ---- */

static void many_ranges_on_few_pages(void)
{
    struct pms_error e;
    open_store(16 * MIB, 0);
    char name[16];
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 3000; i++) {
            int n = snprintf(name, sizeof name, "n%d", i * 7 % 3000);
            CHECK(pms_object_put_value(pool, 0, name, (uint32_t)n, round ? "1" : "0", 1, &e) ==
                  PMS_OK);
        }
        if (pool->journal)
            pool->tx.runs_room = 200; /* as if the store were as small */
        CHECK(pms_commit(pool, &e) == PMS_OK);
        if (pool->journal)
            pool->tx.runs_room = pool->map.reserve / PMS_PAGE;
    }
    sound();
    close_store();
}

/* ---- a file that says more is allocated than the log can hold ---- */

static void log_too_small_for_what_is_allocated(void)
{
    struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain};
    struct pms_error e;
    open_store(2 * MIB, 0);
    struct pms_segment s = pool->super.segment[0];
    close_store();
    struct pms_descriptor all = {.page = s.data_off / PMS_PAGE,
                                 .pages = s.data_pages,
                                 .aux = 1,
                                 .kind = PMS_KIND_META_LARGE};
    struct pms_pte entry = pms_table_encode(&all);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && pwrite(fd, &entry, sizeof entry, (off_t)s.table_off) == (ssize_t)sizeof entry);
    close(fd);
    /* I5 can not hold: a transaction could end in abort() */
    CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_E_CORRUPT);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-failures-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_FILE};
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(growth_that_failed_may_be_tried_again);
        TEST(growth_whose_sync_failed_is_the_last);
        TEST(absurd_sizes_change_nothing);
        TEST(a_range_across_segments_is_refused);
        TEST(mappings_that_run_out_are_no_failure);
        TEST(many_ranges_on_few_pages);
        TEST(close_keeps_any_number_of_views);
        TEST(log_too_small_for_what_is_allocated);
    }
    unlink(path);
    return test_summary();
}
