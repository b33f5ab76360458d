/* The journal of domain file under crashes: the process dies at each write and each sync of a
 * workload, and again at each of the recovery; and the machine dies before each sync, with any
 * mixture of the sectors written since the one before. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>

#include "journal/state.h"
#include "journal_fixture.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 8u
#else
#define SLOWER 1u
#endif

#define CRASHED 42
#define SECTOR 512u

static unsigned char image[FILE_BYTES], other[FILE_BYTES], crashed_image[FILE_BYTES];

/* ---- death of the process ---- */

static _Atomic uint32_t countdown; /* primitives until death */
static int dying_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if ((primitive == PMS_PRIM_PWRITE || primitive == PMS_PRIM_SYNC) &&
        atomic_fetch_sub(&countdown, 1) == 1)
        _exit(CRASHED);
    return 0;
}

static void run_plan(int fd, uint64_t tx, _Atomic uint64_t *acknowledged)
{
    struct store s;
    struct pms_error error;
    store_open(&s, fd, tx);
    while (s.tx < tx_count) {
        MUST(store_step(&s, &error) == PMS_OK);
        atomic_store(acknowledged, s.tx);
        if (steps[s.tx].drain)
            MUST(pms_journal_drain(s.journal, &error) == PMS_OK);
    }
    store_close(&s);
}

/* Runs the plan, or recovery, in a process that dies at its nth primitive. True: it did. */
static bool die_at(uint32_t nth, int fd, bool recovery, uint64_t tx, _Atomic uint64_t *acknowledged)
{
    pid_t pid = fork();
    MUST(pid >= 0);
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
    MUST(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    MUST(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == CRASHED);
    return WEXITSTATUS(status) == CRASHED;
}

/* The store in fd, just crashed, is at one of two transactions: by mode r, by recovery killed
 * anywhere and repeated, by recovery; opening again changes nothing. Returns which; fd is
 * recovered. */
static uint64_t check_recovery(int fd, uint64_t acknowledged, bool twice)
{
    load_file(fd, crashed_image);
    memcpy(image, crashed_image, FILE_BYTES);
    uint64_t tx = recover_tx(fd, image);
    MUST(tx == acknowledged || tx == acknowledged + 1);
    MUST(same_state(image, tx));
    load_file(fd, other);
    MUST(memcmp(other, crashed_image, FILE_BYTES) == 0);
    for (uint32_t nth = 1; twice; nth++) {
        store_file(fd, crashed_image);
        if (!die_at(nth, fd, true, 0, NULL))
            break;
        MUST(recover_tx(fd, NULL) == tx);
        load_file(fd, other);
        MUST(same_state(other, tx));
    }
    store_file(fd, crashed_image);
    MUST(recover_tx(fd, NULL) == tx);
    load_file(fd, other);
    MUST(same_state(other, tx));
    MUST(recover_tx(fd, NULL) == tx);
    load_file(fd, image);
    MUST(memcmp(image, other, FILE_BYTES) == 0);
    return tx;
}

static uint32_t points_done;

static void crash_everywhere(uint32_t seed, uint64_t window, uint32_t pages_most,
                             uint32_t drain_every)
{
    static unsigned char start[FILE_BYTES];
    _Atomic uint64_t *acknowledged = mmap(NULL, PMS_PAGE, PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int fd = new_file();
    uint32_t nth = 1;
    bool crashed = true;
    MUST(acknowledged != MAP_FAILED);
    plan_steps(14, seed, pages_most, drain_every);
    format(fd, window);
    load_file(fd, start);
    for (; crashed; nth += 1 + draw(2 * SLOWER - 1)) {
        points_done++;
        store_file(fd, start);
        atomic_store(acknowledged, 0);
        crashed = die_at(nth, fd, false, 0, acknowledged);
        uint64_t tx = check_recovery(fd, *acknowledged, draw(4 * SLOWER) == 0);
        MUST(crashed || tx == tx_count);
        if (draw(2)) { /* on it goes, to the end */
            run_plan(fd, tx, acknowledged);
            load_file(fd, image);
            MUST(same_state(image, tx_count));
        }
    }
    munmap((void *)acknowledged, PMS_PAGE);
    close(fd);
}

/* ---- death of the machine ---- */

/* Before each sync: what the last sync made durable, plus any of the sectors that changed since.
 * So that one thread writes at a time, the writer is held until the caller waits for it; the
 * journal's mutex orders the two. */
static unsigned char durable[FILE_BYTES], now[FILE_BYTES], mixture[FILE_BYTES];
static int recorded_fd, scratch_fd;
static uint64_t recorded_ack;
static uint32_t mixtures_done;
static struct store recorded;
static _Thread_local bool checking; /* the primitives are those of a check, not of the store */

static void check_mixture(void)
{
    struct pms_journal_recovery result;
    checking = true;
    store_file(scratch_fd, mixture);
    MUST(recover_status(scratch_fd, NULL, &result) == PMS_OK);
    MUST(result.tx == recorded_ack || result.tx == recorded_ack + 1);
    load_file(scratch_fd, image);
    MUST(same_state(image, result.tx));
    MUST(recover_tx(scratch_fd, NULL) == result.tx);
    checking = false;
    mixtures_done++;
}

/* None, all, each alone, all but each, then random subsets with some sectors of garbage. */
static void check_mixtures(void)
{
    static uint32_t dirty[FILE_BYTES / SECTOR];
    uint32_t n = 0;
    for (uint32_t i = 0; i < FILE_BYTES / SECTOR; i++)
        if (memcmp(now + i * SECTOR, durable + i * SECTOR, SECTOR) != 0)
            dirty[n++] = i;
    uint32_t single = n <= 40 / SLOWER ? n : 0;
    for (uint32_t k = 0; k < 2 + 2 * single + 24 / SLOWER; k++) {
        uint32_t alone = (k - 2) % (single ? single : 1);
        memcpy(mixture, durable, FILE_BYTES);
        for (uint32_t i = 0; i < n; i++) {
            unsigned char *to = mixture + dirty[i] * SECTOR;
            bool take = k < 2                ? k == 1
                        : k < 2 + single     ? i == alone
                        : k < 2 + 2 * single ? i != alone
                                             : draw(8) >= k % 8;
            if (take)
                memcpy(to, now + dirty[i] * SECTOR, SECTOR);
            else if (k >= 2 + 2 * single && draw(16) == 0)
                memset(to, (int)draw(256), SECTOR);
        }
        check_mixture();
    }
}

static void wait_for_turn(void)
{
    for (bool mine = !is_writer(); !mine;) {
        pthread_mutex_lock(&recorded.journal->mutex);
        mine = recorded.journal->wanted;
        pthread_mutex_unlock(&recorded.journal->mutex);
        if (!mine)
            usleep(100);
    }
}

static int recording_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (checking || (primitive != PMS_PRIM_SYNC && primitive != PMS_PRIM_PWRITE))
        return 0;
    wait_for_turn();
    if (primitive == PMS_PRIM_SYNC) {
        load_file(recorded_fd, now);
        check_mixtures();
        memcpy(durable, now, FILE_BYTES);
    }
    return 0;
}

/* Begins on what a killed process left, so that records of another try lie in the ring; its
 * recovery is recorded too. */
static uint64_t first_life(uint32_t nth)
{
    _Atomic uint64_t *acknowledged = mmap(NULL, PMS_PAGE, PROT_READ | PROT_WRITE,
                                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(acknowledged != MAP_FAILED);
    die_at(nth, recorded_fd, false, 0, acknowledged);
    load_file(recorded_fd, durable);
    recorded_ack = *acknowledged;
    pms_persist_hook = recording_hook;
    uint64_t tx = recover_tx(recorded_fd, NULL);
    pms_persist_hook = NULL;
    MUST(tx == recorded_ack || tx == recorded_ack + 1);
    munmap((void *)acknowledged, PMS_PAGE);
    return tx;
}

static void crash_sectors(uint32_t seed, uint64_t window, uint32_t drain_every, bool second_life)
{
    struct pms_error error;
    plan_steps(16, seed, 5, drain_every);
    recorded_fd = new_file();
    scratch_fd = new_file();
    format(recorded_fd, window);
    uint64_t tx = second_life ? first_life(8 + seed) : 0;
    load_file(recorded_fd, durable);
    recorded_ack = tx;
    store_open(&recorded, recorded_fd, tx);
    pms_persist_hook = recording_hook;
    while (recorded.tx < tx_count) {
        MUST(store_step(&recorded, &error) == PMS_OK);
        recorded_ack = recorded.tx;
        if (steps[recorded.tx].drain)
            MUST(pms_journal_drain(recorded.journal, &error) == PMS_OK);
    }
    store_close(&recorded);
    pms_persist_hook = NULL;
    load_file(recorded_fd, image);
    MUST(same_state(image, tx_count));
    close(recorded_fd);
    close(scratch_fd);
}

/* ---- the tests ---- */

static uint32_t round_no;

static void test_killed(void) { crash_everywhere(1 + 10 * round_no, 0, 5, 4); }
static void test_killed_ring_full(void) { crash_everywhere(2 + 10 * round_no, 0, 12, 0); }
static void test_killed_window_grows(void)
{
    crash_everywhere(3 + 10 * round_no, 3 * PMS_PAGE, 6, 0);
}
static void test_killed_wrapping(void) { crash_everywhere(4 + 10 * round_no, 11 * PMS_PAGE, 3, 3); }

static void test_power_failure(void)
{
    for (uint32_t k = 0; k < 8; k++)
        crash_sectors(8 * round_no + k, k % 2 ? 3 * PMS_PAGE : 0, k % 4, k >= 4);
}

int main(int argc, char **argv)
{
    uint32_t rounds = argc > 1 ? (uint32_t)atoi(argv[1]) : 1;
    for (round_no = 0; round_no < rounds; round_no++) {
        TEST(test_killed);
        TEST(test_killed_ring_full);
        TEST(test_killed_window_grows);
        TEST(test_killed_wrapping);
        TEST(test_power_failure);
    }
    printf("killed at %u points, %u mixtures of sectors\n", points_done, mixtures_done);
    return test_summary();
}
