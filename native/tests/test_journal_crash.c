/* The journal of domain file under crashes: the process dies at each write and each sync of a workload, and again at each of
 * the recovery; and the machine dies before each sync, with any mixture of the sectors written since the one before. */
#define _GNU_SOURCE /* memfd_create */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>

#include "journal_fixture.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 8u
#else
#define SLOWER 1u
#endif

#define CRASHED 42
#define SECTOR 512u

static unsigned char image[FILE_BYTES], other[FILE_BYTES], before[FILE_BYTES];

/* ---- death of the process ------------------------------------------------------------------------------------------ */

static _Atomic uint32_t countdown; /* primitives until death */
static int dying_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if ((primitive == PMS_PRIM_PWRITE || primitive == PMS_PRIM_SYNC) && atomic_fetch_sub(&countdown, 1) == 1)
        _exit(CRASHED);
    return 0;
}

static void run_plan(int fd, uint64_t tx, _Atomic uint64_t *acknowledged)
{
    struct store s;
    struct pms_error error;
    store_open(&s, fd, tx);
    while (s.tx < tx_count) {
        CHECK(store_step(&s, &error) == PMS_OK);
        atomic_store(acknowledged, s.tx);
        if (steps[s.tx].drain)
            CHECK(pms_journal_drain(s.journal, &error) == PMS_OK);
    }
    store_close(&s);
}

/* Runs the plan, or recovery, in a process that dies at its nth primitive. True: it did. */
static bool die_at(uint32_t nth, int fd, bool recovery, uint64_t tx, _Atomic uint64_t *acknowledged)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        atomic_store(&countdown, nth);
        pms_persist_hook = dying_hook;
        if (recovery)
            recover_tx(fd, NULL);
        else
            run_plan(fd, tx, acknowledged);
        _exit(0);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == CRASHED);
    return WEXITSTATUS(status) == CRASHED;
}

/* The store in fd, just crashed, is at one of two transactions: by mode r, by recovery killed anywhere and repeated, by
 * recovery; opening again changes nothing. Returns which; fd is recovered. */
static uint64_t check_recovery(int fd, uint64_t acknowledged, bool twice)
{
    load_file(fd, before);
    memcpy(image, before, FILE_BYTES);
    uint64_t tx = recover_tx(fd, image);
    CHECK(tx == acknowledged || tx == acknowledged + 1);
    CHECK(same_state(image, tx));
    load_file(fd, other);
    CHECK(memcmp(other, before, FILE_BYTES) == 0);
    for (uint32_t nth = 1; twice; nth++) {
        store_file(fd, before);
        if (!die_at(nth, fd, true, 0, NULL))
            break;
        CHECK(recover_tx(fd, NULL) == tx);
        load_file(fd, other);
        CHECK(same_state(other, tx));
    }
    store_file(fd, before);
    CHECK(recover_tx(fd, NULL) == tx);
    load_file(fd, other);
    CHECK(same_state(other, tx));
    CHECK(recover_tx(fd, NULL) == tx);
    load_file(fd, image);
    CHECK(memcmp(image, other, FILE_BYTES) == 0);
    return tx;
}

static uint32_t crash_everywhere(uint32_t seed, uint64_t window, uint32_t pages_most, uint32_t drain_every)
{
    static unsigned char start[FILE_BYTES];
    _Atomic uint64_t *acknowledged =
        mmap(NULL, PMS_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int fd = new_file();
    uint32_t nth = 1;
    bool crashed = true;
    CHECK(acknowledged != MAP_FAILED);
    plan_steps(14, seed, pages_most, drain_every);
    format(fd, window);
    load_file(fd, start);
    for (; crashed; nth += 1 + draw(2 * SLOWER - 1)) {
        store_file(fd, start);
        atomic_store(acknowledged, 0);
        crashed = die_at(nth, fd, false, 0, acknowledged);
        uint64_t tx = check_recovery(fd, *acknowledged, draw(4 * SLOWER) == 0);
        CHECK(crashed || tx == tx_count);
        if (draw(2)) { /* on it goes, to the end */
            run_plan(fd, tx, acknowledged);
            load_file(fd, image);
            CHECK(same_state(image, tx_count));
        }
    }
    munmap((void *)acknowledged, PMS_PAGE);
    close(fd);
    return nth;
}

/* ---- death of the machine ------------------------------------------------------------------------------------------ */

/* Before each sync: what the last sync made durable, plus any of the sectors that changed since. The hook's caller is the only
 * thread that writes then: the workload drains before the ring is half full. */
static unsigned char durable[FILE_BYTES], now[FILE_BYTES], mixture[FILE_BYTES];
static int recorded_fd, scratch_fd;
static uint64_t recorded_ack;
static uint32_t mixtures_each, mixtures_done;
static pthread_mutex_t recorder = PTHREAD_MUTEX_INITIALIZER;

static void check_mixture(void)
{
    struct pms_journal_recovery result;
    int (*hook)(enum pms_primitive, uintptr_t, size_t) = pms_persist_hook;
    pms_persist_hook = NULL;
    store_file(scratch_fd, mixture);
    CHECK(recover_status(scratch_fd, NULL, &result) == PMS_OK);
    CHECK(result.tx == recorded_ack || result.tx == recorded_ack + 1);
    load_file(scratch_fd, image);
    CHECK(same_state(image, result.tx));
    CHECK(recover_tx(scratch_fd, NULL) == result.tx);
    pms_persist_hook = hook;
    mixtures_done++;
}

static void check_mixtures(void)
{
    static uint32_t dirty[FILE_BYTES / SECTOR];
    uint32_t n = 0;
    load_file(recorded_fd, now);
    for (uint32_t i = 0; i < FILE_BYTES / SECTOR; i++)
        if (memcmp(now + i * SECTOR, durable + i * SECTOR, SECTOR) != 0)
            dirty[n++] = i;
    /* none, all, each alone, all but each, then random subsets with some sectors of garbage */
    uint32_t single = n <= 40 / SLOWER ? n : 0;
    for (uint32_t k = 0; k < 2 + 2 * single + mixtures_each; k++) {
        uint32_t alone = (k - 2) % (single ? single : 1);
        memcpy(mixture, durable, FILE_BYTES);
        for (uint32_t i = 0; i < n; i++) {
            unsigned char *to = mixture + dirty[i] * SECTOR;
            bool take = k < 2 ? k == 1 : k < 2 + single ? i == alone : k < 2 + 2 * single ? i != alone : draw(8) >= k % 8;
            if (take)
                memcpy(to, now + dirty[i] * SECTOR, SECTOR);
            else if (k >= 2 + 2 * single && draw(16) == 0)
                memset(to, (int)draw(256), SECTOR);
        }
        check_mixture();
    }
}

static int recording_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive != PMS_PRIM_SYNC)
        return 0;
    pthread_mutex_lock(&recorder);
    check_mixtures();
    memcpy(durable, now, FILE_BYTES);
    pthread_mutex_unlock(&recorder);
    return 0;
}

static void crash_sectors(uint32_t seed, uint64_t window, bool first_crashes)
{
    struct store s;
    struct pms_error error;
    plan_steps(16, seed, 4, 1 + seed % 3);
    recorded_fd = new_file();
    scratch_fd = new_file();
    format(recorded_fd, window);
    uint64_t tx = 0;
    if (first_crashes) { /* begin on what a killed process left: records of another try lie in the ring */
        _Atomic uint64_t *acknowledged =
            mmap(NULL, PMS_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        die_at(8 + seed, recorded_fd, false, 0, acknowledged);
        load_file(recorded_fd, durable);
        recorded_ack = *acknowledged;
        tx = recover_tx(recorded_fd, NULL);
        munmap((void *)acknowledged, PMS_PAGE);
    }
    load_file(recorded_fd, durable);
    recorded_ack = tx;
    mixtures_each = 24 / SLOWER;
    store_open(&s, recorded_fd, tx);
    pms_persist_hook = recording_hook;
    while (s.tx < tx_count) {
        pthread_mutex_lock(&recorder);
        recorded_ack = s.tx;
        pthread_mutex_unlock(&recorder);
        if (steps[s.tx + 1].count > 0 && s.tx % 2) /* nothing else may write while a commit does */
            CHECK(pms_journal_drain(s.journal, &error) == PMS_OK);
        CHECK(store_step(&s, &error) == PMS_OK);
        pthread_mutex_lock(&recorder);
        recorded_ack = s.tx;
        pthread_mutex_unlock(&recorder);
        CHECK(pms_journal_drain(s.journal, &error) == PMS_OK || true);
    }
    store_close(&s);
    pms_persist_hook = NULL;
    load_file(recorded_fd, image);
    CHECK(same_state(image, tx_count));
    close(recorded_fd);
    close(scratch_fd);
}

int main(int argc, char **argv)
{
    uint32_t rounds = argc > 1 ? (uint32_t)atoi(argv[1]) : 1, points = 0;
    for (uint32_t i = 0; i < rounds; i++) {
        points += crash_everywhere(1 + 10 * i, 0, 5, 4);
        points += crash_everywhere(2 + 10 * i, 0, 12, 0);              /* the ring is full again and again */
        points += crash_everywhere(3 + 10 * i, 3 * PMS_PAGE, 6, 0);    /* and grows */
        points += crash_everywhere(4 + 10 * i, 11 * PMS_PAGE, 3, 3);   /* and wraps */
        for (uint32_t k = 0; k < 6; k++)
            crash_sectors(6 * i + k, k % 2 ? 3 * PMS_PAGE : 0, k >= 3);
    }
    printf("test_journal_crash: ok, killed at %u points, %u mixtures of sectors\n", points, mixtures_done);
    return 0;
}
