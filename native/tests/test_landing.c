/* Landings: copies into idle slots, flips, and what else is pending, as one commit. With words
 * that come, come late, or never. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "crash/debug.h"
#include "log/idle.h"
#include "commit/landing.h"
#include "one_store.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "log/snapshot.h"
#include "test.h"
#include "flush/chunks.h"

#define LARGE (96u << 10) /* of a slot: an extent of its own */
#define SMALL 3000u       /* shares its pages */
#define STEPS 4
#define SECOND 1000000000ll

static const char *const names[] = {"a", "b"};
static const uint64_t sizes[] = {LARGE, SMALL};
static const char head[8] = "\x81\xa5slots";
static unsigned char source[LARGE];
static uint64_t here = 1, never; /* words that landings wait for */

static unsigned char *beside(void) /* an ordinary array */
{
    struct pms_object o = {0};
    CHECK(ok(pms_object_find(pool, 0, "beside", 6, &o, &e)));
    return memory(o.data);
}

static struct pms_slot_pair pair_of(int i)
{
    struct pms_slot_pair pair = {0};
    CHECK(ok(pms_slot_find(pool, 0, names[i], 1, &pair, &e)));
    return pair;
}

static unsigned char *current(int i)
{
    struct pms_slot_pair pair = pair_of(i);
    return memory(pair.data[pair.current]);
}

static void make(void) /* a large and a small pair, and an array, all zeros */
{
    uint64_t group, data;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    for (int i = 0; i < 2; i++) {
        CHECK(ok(pms_object_group(pool, 0, names[i], 1, 1, &group, &e)));
        for (int k = 0; k < 2; k++)
            CHECK(
                ok(pms_object_put_array(pool, group, k ? "1" : "0", 1, "m", 1, sizes[i],
                                        PMS_FILL_ZERO | PMS_FILL_OF_SLOT, NULL, 0, 0, &data, &e)));
        CHECK(ok(pms_object_describe_group(pool, 0, names[i], 1, head, 8, &e)));
    }
    CHECK(ok(pms_object_put_array(pool, 0, "beside", 6, "m", 1, 5000, PMS_FILL_ZERO, NULL, 0, 0,
                                  &data, &e)));
    CHECK(ok(pms_commit(pool, &e)));
}

static char meta[2][8];

/* Copies `value` into both pairs' idle slots, in two pieces each, and flips them. `word`: what
 * the last piece waits for. */
static struct pms_landing *landing(int value, const uint64_t *word, int64_t timeout_ns)
{
    struct pms_land_copy copy[4];
    struct pms_land_flip flip[2];
    memset(source, value, sizeof source);
    for (int i = 0; i < 2; i++) {
        struct pms_slot_pair pair = pair_of(i);
        uint64_t data = pair.data[!pair.current], half = sizes[i] / 2;
        memcpy(meta[i], head, 8);
        meta[i][7] = !pair.current;
        copy[2 * i] = (struct pms_land_copy){data, 0, half, source, &here};
        copy[2 * i + 1] = (struct pms_land_copy){data, half, sizes[i] - half, source + half,
                                                 i ? word : NULL};
        flip[i] = (struct pms_land_flip){0, data, names[i], meta[i], 1, 8};
    }
    struct pms_landing *l = pms_landing_new(copy, 4, flip, 2, timeout_ns, &e);
    CHECK(l != NULL);
    return l;
}

static bool all(const unsigned char *at, uint64_t n, int value)
{
    for (uint64_t i = 0; i < n; i++)
        if (at[i] != value)
            return false;
    return true;
}

static int state(void) /* the step that all of the store holds, or -1 */
{
    static struct pms_check_report r;
    int value = beside()[0];
    bool whole = all(current(0), LARGE, value) && all(current(1), SMALL, value) &&
                 all(beside(), 5000, value);
    return whole && ok(pms_check(pool, &r, &e)) && r.problem_count == 0 ? value : -1;
}

static void step(int value) /* armed: the next commit carries it out, whoever asks for it */
{
    struct pms_landing *l = landing(value, &here, SECOND);
    memset(beside(), value, 5000);
    CHECK(ok(pms_landing_arm(pool, l, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(pms_landing_wait(l, PMS_LANDING_DONE, 0) && ok(pms_landing_result(l, &e)));
    pms_landing_free(l);
}

static void copies_flips_and_writes_are_one_commit(void)
{
    make();
    for (int i = 1; i <= STEPS; i++) {
        uint64_t epoch = pms_epoch(pool);
        step(i);
        CHECK(state() == i && pms_epoch(pool) == epoch + 1);
    }
    close_store();
    CHECK(open_store(PMS_MODE_READ_WRITE));
    CHECK(state() == STEPS);
    memset(current(0), 9, LARGE); /* what was published is captured like anything */
    memset(current(1), 9, SMALL);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(state() == STEPS);
    close_store();
}

static void *write_beside(void *arg)
{
    (void)arg;
    memset(beside(), 77, 5000); /* every call, and every store into the heap, waits */
    return NULL;
}

static void what_is_written_after_the_seal_is_of_the_next_transaction(void)
{
    static uint64_t word;
    pthread_t thread;
    make();
    step(1);
    __atomic_store_n(&word, 0, __ATOMIC_RELEASE);
    struct pms_landing *l = landing(2, &word, -1);
    memset(beside(), 2, 5000);
    CHECK(ok(pms_landing_start(pool, l, PMS_LANDING_NEW, &e)));
    /* there small slots are copied, and waited for, before the seal */
    if (domain != PMS_DOMAIN_FILE)
        CHECK(pms_landing_wait(l, PMS_LANDING_SEALED, -1) &&
              !pms_landing_wait(l, PMS_LANDING_COPIED, 0));
    else
        __atomic_store_n(&word, 1, __ATOMIC_RELEASE);
    CHECK(pms_landing_wait(l, PMS_LANDING_SEALED, -1));
    CHECK(pthread_create(&thread, NULL, write_beside, NULL) == 0);
    __atomic_store_n(&word, 1, __ATOMIC_RELEASE);
    CHECK(pms_landing_wait(l, PMS_LANDING_DONE, -1) && ok(pms_landing_result(l, &e)));
    pthread_join(thread, NULL);
    CHECK(all(beside(), 5000, 77) && all(current(0), LARGE, 2));
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(state() == 2);
    pms_landing_free(l);
    close_store();
}

/* Nothing happened, and what was pending is pending still: the commit after it has all but the
 * landing. */
static void failed(struct pms_landing *l, int status)
{
    struct pms_slot_pair before = pair_of(0);
    uint64_t epoch = pms_epoch(pool);
    memset(beside(), 5, 5000);
    CHECK(ok(pms_landing_arm(pool, l, &e)));
    CHECK(pms_commit(pool, &e) == status && pms_epoch(pool) == epoch);
    CHECK(pms_landing_wait(l, PMS_LANDING_DONE, 0) && pms_landing_result(l, &e) == status);
    CHECK(pair_of(0).current == before.current && all(current(0), LARGE, 1) &&
          all(current(1), SMALL, 1));
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(pms_epoch(pool) == epoch + 1 && all(beside(), 5000, 5));
    pms_landing_free(l);
    memset(beside(), 1, 5000);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(state() == 1);
}

static void copies_that_fail_or_are_late(void)
{
    make();
    step(1);
    failed(landing(2, &never, 3000000), PMS_E_STATE);
    struct pms_landing *l = landing(3, &never, -1);
    pms_landing_fail(l);
    failed(l, PMS_E_STATE);
    step(4);
    CHECK(state() == 4);
    close_store();
}

static void a_roll_back_or_another_one_disarms_it(void)
{
    make();
    step(1);
    struct pms_landing *first = landing(2, &here, -1), *second = landing(3, &here, -1);
    CHECK(ok(pms_landing_arm(pool, first, &e)) && ok(pms_landing_arm(pool, second, &e)));
    CHECK(pms_landing_wait(first, PMS_LANDING_DONE, 0) &&
          pms_landing_result(first, &e) == PMS_E_STATE);
    CHECK(!pms_landing_wait(second, PMS_LANDING_DONE, 0));
    memset(beside(), 2, 5000);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(pms_landing_wait(second, PMS_LANDING_DONE, 0) &&
          pms_landing_result(second, &e) == PMS_E_STATE);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(state() == 1);
    pms_landing_free(first);
    pms_landing_free(second);
    close_store();
}

static int no_space(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    return primitive == PMS_PRIM_PWRITE ? ENOSPC : 0;
}

/* The record was not written: the slots are as they were, whether the transaction goes on or not.
 */
static void a_commit_that_fails_flips_nothing(void)
{
    if (domain != PMS_DOMAIN_FILE)
        return;
    for (int goes_on = 0; goes_on < 2; goes_on++) {
        make();
        step(1);
        uint32_t now[] = {pair_of(0).current, pair_of(1).current};
        struct pms_landing *l = landing(2, &here, SECOND);
        CHECK(ok(pms_landing_arm(pool, l, &e)));
        CHECK(ok(pms_landing_arm(pool, l, &e)));
        pms_persist_hook = no_space;
        CHECK(pms_commit(pool, &e) == PMS_E_FULL);
        pms_persist_hook = NULL;
        CHECK(pms_landing_result(l, &e) == PMS_E_FULL);
        pms_landing_free(l);
        CHECK(ok(goes_on ? pms_commit(pool, &e) : pms_rollback(pool, &e)));
        CHECK(pair_of(0).current == now[0] && pair_of(1).current == now[1] && state() == 1);
        close_store();
        CHECK(open_store(PMS_MODE_READ_WRITE) && state() == 1);
        step(3);
        CHECK(state() == 3);
        close_store();
    }
}

static void bad_landings(void)
{
    make();
    step(1);
    struct pms_slot_pair large = pair_of(0), small = pair_of(1);
    char next[8];
    memcpy(next, head, 8);
    next[7] = !large.current;
    struct pms_land_flip flip = {0, large.data[!large.current], "a", next, 1, 8};
    struct pms_land_copy copy = {flip.data, LARGE - 10, PMS_PAGE, source, NULL};
    failed(pms_landing_new(&copy, 1, &flip, 1, -1, &e), PMS_E_INVALID); /* past its block's end */
    copy = (struct pms_land_copy){small.data[!small.current], 0, 10, source, NULL};
    /* into a block that does not flip */
    failed(pms_landing_new(&copy, 1, &flip, 1, -1, &e), PMS_E_INVALID);
    struct pms_land_flip other = {0, small.data[!small.current], "b", next, 1, 8};
    copy = (struct pms_land_copy){other.data, 0, 10, NULL, NULL};
    /* small, and written from outside */
    failed(pms_landing_new(&copy, 1, &other, 1, -1, &e), PMS_E_INVALID);
    other = (struct pms_land_flip){0, flip.data, "nobody", next, 6, 8};
    failed(pms_landing_new(NULL, 0, &other, 1, -1, &e), PMS_E_NOT_FOUND);
    other = (struct pms_land_flip){0, flip.data, "a", next, 1, 7};
    /* a description of another length */
    failed(pms_landing_new(NULL, 0, &other, 1, -1, &e), PMS_E_INVALID);
    other = (struct pms_land_flip){0, flip.data, "b", next, 1, 8};
    failed(pms_landing_new(NULL, 0, &other, 1, -1, &e), PMS_E_INVALID); /* of other slots */
    other = (struct pms_land_flip){0, flip.data + PMS_PAGE, "a", next, 1, 8};
    failed(pms_landing_new(NULL, 0, &other, 1, -1, &e), PMS_E_INVALID); /* the middle of a block */
    close_store();
}

/* Two threads that commit a mirror at once: the second one's block is what the first one's
 * commit has named. */
static void a_landing_into_what_another_one_committed(void)
{
    make();
    step(1);
    struct pms_landing *first = landing(2, &here, -1), *second = landing(3, &here, -1);
    memset(source, 2, sizeof source);
    CHECK(ok(pms_landing_arm(pool, first, &e)));
    memset(beside(), 2, 5000);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(state() == 2);
    memset(source, 3, sizeof source);
    CHECK(ok(pms_landing_arm(pool, second, &e)));
    CHECK(pms_commit(pool, &e) == PMS_E_STATE);
    CHECK(pms_landing_wait(second, PMS_LANDING_DONE, 0) &&
          pms_landing_result(second, &e) == PMS_E_STATE);
    CHECK(state() == 2 && !pms_idle_is(&pool->undo, pair_of(0).data[pair_of(0).current]));
    pms_landing_free(first);
    pms_landing_free(second);
    close_store();
}

static void kills(void)
{
    _Atomic int *done = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bool killed = true;
    const char *asked = getenv("PMS_CRASH_STEP");
    uint64_t stride = asked ? (uint64_t)atoi(asked) : 3, points = 0;
    for (uint64_t n = 1; killed; n += stride, points++) {
        int ws;
        make();
        close_store();
        *done = 0;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            test_checks_failed = 0;
            if (!open_store(PMS_MODE_READ_WRITE))
                _exit(9);
            pms_debug_kill_at(n);
            for (int i = 1; i <= STEPS; i++) {
                step(i);
                *done = i;
            }
            _exit(test_checks_failed != 0);
        }
        waitpid(pid, &ws, 0);
        killed = WIFSIGNALED(ws);
        CHECK(killed ? WTERMSIG(ws) == SIGKILL : WEXITSTATUS(ws) == 0);
        CHECK(open_store(PMS_MODE_READ_WRITE));
        int found = state();
        CHECK(found == *done || found == *done + 1);
        step(66);
        CHECK(state() == 66);
        close_store();
    }
    printf("  domain %d: killed at %llu primitives\n", domain, (unsigned long long)points - 1);
    munmap((void *)done, 4096);
}

/* A commit that has to wait for a snapshot's room gives up the log lock, so it waits before it
 * seals. */
static void a_slow_flush_breaks_no_seal(void)
{
    uint64_t big;
    struct pms_snapshot *s;
    char flipped[8];
    make();
    CHECK(ok(pms_object_put_array(pool, 0, "big", 3, "m", 1, 1u << 19, PMS_FILL_ZERO, NULL, 0, 0,
                                  &big, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    struct pms_slot_pair pair = pair_of(0);
    /* idle already: the landing itself need not wait */
    CHECK(ok(open_next(names[0])));
    CHECK(ok(pms_snapshot_begin(pool, 32 * PMS_PAGE, SECOND / 2, &s, &e)));
    memset(memory(big), 1, 1u << 19); /* more pages than may be kept */
    memset(beside(), 1, 5000);
    memcpy(flipped, head, 8);
    flipped[7] = (char)!pair.current;
    struct pms_land_copy copy = {pair.data[!pair.current], 0, LARGE, source, &here};
    struct pms_land_flip flip = {0, pair.data[!pair.current], names[0], flipped, 1, 8};
    struct pms_landing *l = pms_landing_new(&copy, 1, &flip, 1, -1, &e);
    CHECK(l && ok(pms_landing_start(pool, l, PMS_LANDING_NEW, &e)));
    CHECK(pms_landing_wait(l, PMS_LANDING_SEALED, -1));
    /* waits in its fault for the commit to be over, and is of the next transaction */
    memset(beside(), 2, 5000);
    CHECK(pms_landing_wait(l, PMS_LANDING_DONE, -1) && ok(pms_landing_result(l, &e)));
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(beside()[0] == 1);
    pms_snapshot_end(pool, s);
    pms_landing_free(l);
    close_store();
}

static void what_is_copied_may_be_written_when_start_returns(void)
{
    make();
    for (int value = 1; value <= STEPS; value++) {
        struct pms_landing *l = landing(value, &here, -1);
        memset(beside(), value, 5000);
        CHECK(!pms_landing_is_started(l));
        CHECK(ok(pms_landing_start(pool, l, PMS_LANDING_COPIED, &e)));
        memset(source, 99, sizeof source);
        CHECK(pms_landing_is_started(l));
        CHECK(pms_landing_wait(l, PMS_LANDING_DONE, -1) && ok(pms_landing_result(l, &e)));
        CHECK(pms_landing_is_started(l) && state() == value);
        pms_landing_free(l);
    }
    close_store();
}

static void a_landing_that_fails_leaves_nothing_pending(void)
{
    char flipped[8];
    make();
    struct pms_slot_pair pair = pair_of(0);
    uint64_t epoch = pms_epoch(pool);
    memcpy(flipped, head, 8);
    flipped[7] = (char)!pair.current;
    struct pms_land_copy copy = {pair.data[!pair.current], 0, LARGE, source, &never};
    struct pms_land_flip flip = {0, pair.data[!pair.current], names[0], flipped, 1, 8};
    struct pms_landing *l = pms_landing_new(&copy, 1, &flip, 1, SECOND / 100, &e);
    CHECK(l && ok(pms_landing_start(pool, l, PMS_LANDING_NEW, &e)));
    CHECK(pms_landing_wait(l, PMS_LANDING_DONE, -1) && pms_landing_result(l, &e) == PMS_E_STATE);
    CHECK(ok(pms_commit(pool, &e)) && pms_epoch(pool) == epoch);
    pms_landing_free(l);
    close_store();
}

/* While a commit waits for a snapshot's room others may store: what they did is pending still
 * when the landing has failed. */
static void what_was_written_while_a_landing_that_fails_waited(void)
{
    char flipped[8];
    struct pms_snapshot *s;
    struct pms_snapshot_stats stats = {0};
    make();
    struct pms_slot_pair pair = pair_of(0);
    uint64_t epoch = pms_epoch(pool);
    unsigned char *at = beside();
    memcpy(flipped, head, 8);
    flipped[7] = (char)!pair.current;
    struct pms_land_copy copy = {pair.data[!pair.current], 0, LARGE, source, &never};
    struct pms_land_flip flip = {0, pair.data[!pair.current], names[0], flipped, 1, 8};
    /* idle already: opening it need not wait */
    CHECK(ok(open_next(names[0])));
    /* the root's page, and no room for the description's */
    CHECK(ok(pms_snapshot_begin(pool, PMS_PAGE, -1, &s, &e)));
    struct pms_landing *l = pms_landing_new(&copy, 1, &flip, 1, SECOND / 100, &e);
    CHECK(l && ok(pms_landing_start(pool, l, PMS_LANDING_NEW, &e)));
    while (!stats.waits)
        pms_snapshot_get_stats(s, &stats);
    at[0] = 9;
    pms_snapshot_end(pool, s);
    CHECK(pms_landing_wait(l, PMS_LANDING_DONE, -1) && pms_landing_result(l, &e) == PMS_E_STATE);
    CHECK(ok(pms_commit(pool, &e)) && pms_epoch(pool) == epoch + 1);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(at[0] == 9);
    pms_landing_free(l);
    close_store();
    CHECK(open_store(PMS_MODE_READ_WRITE));
    CHECK(beside()[0] == 9);
    close_store();
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-landing-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    const size_t count = sizeof domains / sizeof domains[0];
    /* first: a fork while a thread of a landing ends is asking for trouble */
    for (size_t i = 0; i < count; i++) {
        domain = domains[i];
        TEST(kills);
    }
    for (size_t i = 0; i < count; i++) {
        domain = domains[i];
        TEST(copies_flips_and_writes_are_one_commit);
        TEST(what_is_written_after_the_seal_is_of_the_next_transaction);
        TEST(what_is_copied_may_be_written_when_start_returns);
        TEST(a_slow_flush_breaks_no_seal);
        TEST(a_landing_that_fails_leaves_nothing_pending);
        TEST(what_was_written_while_a_landing_that_fails_waited);
        TEST(copies_that_fail_or_are_late);
        TEST(a_roll_back_or_another_one_disarms_it);
        TEST(a_commit_that_fails_flips_nothing);
        TEST(bad_landings);
        TEST(a_landing_into_what_another_one_committed);
    }
    unlink(path);
    return test_summary();
}
