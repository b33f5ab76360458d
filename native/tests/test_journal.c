/* The journal of domain file: commits against a model, an idle one, a full one, forks, figures. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "journal_fixture.h"
#include "journal/state.h"

static unsigned char image[FILE_BYTES], other[FILE_BYTES];

static pthread_t caller;

/* ---- commits ---- */

static _Atomic uint64_t caller_syncs;

static int count_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive == PMS_PRIM_SYNC && pthread_equal(pthread_self(), caller))
        atomic_fetch_add(&caller_syncs, 1);
    else if (primitive == PMS_PRIM_SYNC)
        usleep(500); /* a slow medium under the writer: commits have to wait for room */
    return 0;
}

/* Whether the file system lets a descriptor pass the page cache by. */
static bool can_direct(int fd)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    void *page = aligned_alloc(PMS_PAGE, PMS_PAGE);
    int direct = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
    bool can = direct >= 0 && pread(direct, page, PMS_PAGE, 0) == (ssize_t)PMS_PAGE &&
               pwrite(direct, page, PMS_PAGE, 0) == (ssize_t)PMS_PAGE;
    if (direct >= 0)
        close(direct);
    free(page);
    return can;
}

/* Opens where one more descriptor can be had, the writer's, and none that passes the page cache
 * by. */
static void store_open_buffered(struct store *s, int fd)
{
    struct rlimit before, few;
    MUST(getrlimit(RLIMIT_NOFILE, &before) == 0);
    int next = dup(fd);
    MUST(next >= 0 && close(next) == 0);
    few = (struct rlimit){(rlim_t)next + 1, before.rlim_max};
    MUST(setrlimit(RLIMIT_NOFILE, &few) == 0);
    store_open(s, fd, 0);
    MUST(setrlimit(RLIMIT_NOFILE, &before) == 0);
}

static void test_commits(uint64_t window, uint32_t drain_every, bool buffered)
{
    int fd = new_file();
    struct store s;
    struct pms_error error;
    struct pms_journal_stats stats;
    plan_steps(TX_MOST, 1 + drain_every, 9, drain_every);
    format(fd, window);
    caller = pthread_self();
    caller_syncs = 0;
    pms_persist_hook = count_hook;
    if (buffered)
        store_open_buffered(&s, fd);
    else
        store_open(&s, fd, 0);
    MUST((s.journal->direct >= 0) == (!buffered && can_direct(fd)));
    while (s.tx < tx_count) {
        MUST(store_step(&s, &error) == PMS_OK);
        if (steps[s.tx].drain) {
            MUST(pms_journal_drain(s.journal, &error) == PMS_OK);
            load_file(fd, image);
            MUST(same_state(image, s.tx));
        }
    }
    pms_journal_stats(s.journal, &stats);
    MUST(stats.commits == tx_count && stats.commit_syncs == tx_count);
    MUST(stats.straight_bytes > 0 && stats.journal_bytes > 0);
    if (!window)
        MUST(caller_syncs == tx_count); /* one sync each, whatever the writer does */
    if (!drain_every)
        MUST(stats.waits > 0);
    store_close(&s);
    pms_persist_hook = NULL;
    load_file(fd, image);
    MUST(same_state(image, tx_count));
    MUST(recover_tx(fd, NULL) == tx_count);
    load_file(fd, other);
    MUST(memcmp(image, other, FILE_BYTES) == 0); /* nothing to do: not a byte changed */
    close(fd);
}

/* A quiet journal gets empty by itself. */
static void test_idle(void)
{
    int fd = new_file();
    struct store s;
    struct pms_error error;
    plan_steps(2, 5, 3, 0);
    format(fd, 0);
    store_open(&s, fd, 0);
    MUST(store_step(&s, &error) == PMS_OK);
    MUST(store_step(&s, &error) == PMS_OK);
    struct pms_journal_stats stats;
    for (int i = 0; i < 6000; i++) {
        usleep(10000);
        pms_journal_stats(s.journal, &stats);
        if (stats.home_syncs > 0)
            break;
    }
    MUST(stats.home_syncs == 2 || stats.home_syncs == 4); /* 4: idle between the steps, too */
    store_close(&s);
    close(fd);
}

static void test_full_and_grow(void)
{
    int fd = new_file();
    struct store s;
    struct pms_error error;
    plan_steps(1, 6, 3, 0);
    format(fd, 0);
    store_open(&s, fd, 0);
    s.super.segment_count = 1; /* as before growth: the log of segment 0 alone, 14 pages */
    pms_journal_set_super(
        s.journal, &(struct pms_superblock){.segment_count = 2,
                                            .segment = {s.super.segment[0], s.super.segment[1]}});
    struct pms_run big = {.page = DATA0_PAGE, .pages = LOG0 + LOG1};
    store_write(&s, &big, 1, 77);
    MUST(pms_journal_commit(s.journal, &(struct pms_change){.tx = 1, .runs = &big, .run_count = 1},
                            &error) == PMS_E_FULL);
    MUST(error.needed == (LOG0 + LOG1 + 1) * PMS_PAGE &&
         error.available == (LOG0 + LOG1) * PMS_PAGE);
    big.pages--; /* just fits */
    MUST(pms_journal_commit(s.journal, &(struct pms_change){.tx = 1, .runs = &big, .run_count = 1},
                            &error) == PMS_OK);
    store_close(&s);
    close(fd);

    /* growth: positions keep their places, and the window may then take in the new log */
    fd = new_file();
    struct pms_superblock one = fixture_super();
    struct pms_persist p = {0};
    one.segment_count = 1;
    MUST(pms_journal_format(fd, &p, &one, 0, &error) == PMS_OK);
    memset(&s, 0, sizeof s);
    MUST(pms_map_open(&s.map, fd, FILE_BYTES, FILE_BYTES, PMS_MAP_PRIVATE, &s.persist, &error) ==
         PMS_OK);
    MUST(pms_journal_open(&s.journal, &s.map, &one, 0, &error) == PMS_OK);
    MUST(store_step(&s, &error) == PMS_OK);
    big = (struct pms_run){.page = DATA0_PAGE, .pages = LOG0 + 2};
    store_write(&s, &big, 1, 78);
    MUST(pms_journal_commit(s.journal, &(struct pms_change){.tx = 2, .runs = &big, .run_count = 1},
                            &error) == PMS_E_FULL);
    MUST(pms_journal_drain(s.journal, &error) == PMS_OK);
    s.super = fixture_super();
    pms_journal_set_super(s.journal, &s.super);
    MUST(pms_journal_commit(s.journal, &(struct pms_change){.tx = 2, .runs = &big, .run_count = 1},
                            &error) == PMS_OK);
    store_close(&s);
    MUST(recover_tx(fd, NULL) == 2);
    close(fd);
}

static void test_fork(void)
{
    int fd = new_file();
    struct store s;
    struct pms_error error;
    plan_steps(3, 7, 3, 0);
    format(fd, 0);
    store_open(&s, fd, 0);
    MUST(store_step(&s, &error) == PMS_OK);
    pid_t pid = fork();
    if (pid == 0) {
        pms_journal_close(s.journal, true, &error);
        _exit(0);
    }
    int status;
    MUST(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    MUST(store_step(&s, &error) == PMS_OK);
    store_close(&s);
    close(fd);
}

/* ---- figures ---- */

static double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* On a real file system, `rounds` commits of 8 KiB, each beside a bare pwrite of as much and
 * fdatasync. */
static void bench(uint32_t rounds)
{
    char name[] = "/tmp/pms-journal-XXXXXX", plain[] = "/tmp/pms-plain-XXXXXX";
    int fd = mkstemp(name), bare = mkstemp(plain);
    double *a = calloc(rounds, sizeof *a), *b = calloc(rounds, sizeof *b);
    struct store s;
    struct pms_error error;
    MUST(fd >= 0 && bare >= 0 && a && b);
    memset(image, 1, FILE_BYTES);
    store_file(fd, image);
    store_file(bare, image);
    format(fd, 0);
    fsync(bare);
    store_open(&s, fd, 0);
    for (uint32_t i = 0; i < rounds; i++) {
        struct pms_run run = {.page = DATA0_PAGE + draw(DATA0 - 1), .pages = 2};
        store_write(&s, &run, 1, 1 + 3 * i);
        double t0 = now_us();
        MUST(pms_journal_commit(s.journal,
                                &(struct pms_change){.tx = i + 1, .runs = &run, .run_count = 1},
                                &error) == PMS_OK);
        double t1 = now_us();
        MUST(pwrite(bare, image, 2 * PMS_PAGE, (off_t)(i % 64 * 2 * PMS_PAGE)) == 2 * PMS_PAGE);
        MUST(fdatasync(bare) == 0);
        double t2 = now_us();
        a[i] = t1 - t0;
        b[i] = t2 - t1;
    }
    store_close(&s);
    qsort(a, rounds, sizeof *a, by_value);
    qsort(b, rounds, sizeof *b, by_value);
    printf(
        "commit of 8 KiB: median %.0f us, p90 %.0f us; pwrite + fdatasync: median %.0f us, p90 %.0f us\n",
        a[rounds / 2], a[rounds * 9 / 10], b[rounds / 2], b[rounds * 9 / 10]);
    free(a);
    free(b);
    close(fd);
    close(bare);
    unlink(name);
    unlink(plain);
}

static uint32_t bench_rounds = 50;

static void test_commits_whole_ring(void) { test_commits(0, 0, false); }

static void test_commits_growing_window(void) { test_commits(4 * PMS_PAGE, 0, false); }

static void test_commits_drained(void) { test_commits(0, 5, false); }

static void test_commits_through_the_page_cache(void) { test_commits(4 * PMS_PAGE, 3, true); }

static void test_latency(void) { bench(bench_rounds); }

int main(int argc, char **argv)
{
    if (argc > 1)
        bench_rounds = (uint32_t)atoi(argv[1]);
    TEST(test_commits_whole_ring);
    TEST(test_commits_growing_window);
    TEST(test_commits_drained);
    TEST(test_commits_through_the_page_cache);
    TEST(test_idle);
    TEST(test_full_and_grow);
    TEST(test_fork);
    TEST(test_latency);
    return test_summary();
}
