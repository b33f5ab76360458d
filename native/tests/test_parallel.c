/* Work on all cores: the seam's worker threads. */
#include "random_bytes.h"

/* ---- workers ---- */

#define INDICES_MAX 300

/* plain: each index is one thread's, and the caller reads after all */
struct tally {
    uint32_t hits[INDICES_MAX];
};

static void hit(void *ctx, size_t i) { ((struct tally *)ctx)->hits[i]++; }

static void check_round(size_t n)
{
    /* gone when this returns: a worker that lingers is seen by the sanitizers */
    struct tally t = {{0}};
    bool once = true;
    pms_parallel_for(hit, &t, n);
    for (size_t i = 0; i < INDICES_MAX; i++)
        once &= t.hits[i] == (i < n);
    CHECK(once);
}

static void test_parallel_without_workers(void)
{
    for (size_t n = 0; n < 5; n++)
        check_round(n);
}

static void test_parallel_runs_each_index_once(void)
{
    pms_parallel_start();
    pms_parallel_start(); /* does nothing */
    for (size_t round = 0; round < 1000; round++) {
        check_round(round % INDICES_MAX);
        if (round % 100 == 99)
            usleep(2000); /* the workers sleep, not spin */
    }
}

/* The caller and one worker at least are inside before any other index is given out: then both
 * take indices at full speed. */
struct meeting {
    struct tally t; /* first: hit() takes either */
    _Atomic unsigned arrived;
    _Atomic bool met;
    pthread_t caller;
};

static void meet(void *ctx, size_t i)
{
    struct meeting *m = ctx;
    if (i < 2) {
        atomic_fetch_add(&m->arrived, 1);
        for (unsigned waited = 0; atomic_load(&m->arrived) < 2 && waited < 1000000; waited++)
            usleep(50);
        atomic_store(&m->met, atomic_load(&m->arrived) == 2);
    }
    m->t.hits[i]++;
}

static void test_parallel_is_parallel(void)
{
    if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
        return; /* no workers */
    for (unsigned round = 0; round < 200; round++) {
        struct meeting m = {.met = false};
        unsigned hits = 0;
        pms_parallel_for(meet, &m, INDICES_MAX);
        for (size_t i = 0; i < INDICES_MAX; i++)
            hits += m.t.hits[i] == 1;
        CHECK(atomic_load(&m.met) && hits == INDICES_MAX);
    }
}

static void dawdle(void *ctx, size_t i)
{
    struct meeting *m = ctx;
    if (!pthread_equal(pthread_self(), m->caller))
        usleep(3000);
    m->t.hits[i]++;
}

static void test_parallel_waits_for_slow_workers(void)
{
    for (unsigned round = 0; round < 20; round++) {
        struct meeting m = {.caller = pthread_self()};
        unsigned hits = 0;
        usleep(round % 2 ? 0 : 2000);
        /* the next job must not reach workers that are still in the last */
        for (unsigned job = 0; job < 5; job++)
            pms_parallel_for(job ? hit : dawdle, &m.t, INDICES_MAX);
        for (size_t i = 0; i < INDICES_MAX; i++)
            hits += m.t.hits[i];
        CHECK(hits == 5 * INDICES_MAX);
    }
}

static void *start_workers(void *arg)
{
    pms_parallel_start();
    return arg;
}

static void test_parallel_starts_in_any_thread(void)
{
    pthread_t thread[LOCKERS];
    for (int i = 0; i < LOCKERS; i++)
        CHECK(pthread_create(&thread[i], NULL, start_workers, NULL) == 0);
    for (int i = 0; i < LOCKERS; i++)
        pthread_join(thread[i], NULL);
    check_round(INDICES_MAX);
}

static void *run_rounds(void *arg)
{
    for (size_t round = 0; round < 500; round++)
        check_round((round + (size_t)(uintptr_t)arg) % INDICES_MAX);
    return NULL;
}

/* An optimizer's step and a capture, say: whoever finds the workers busy does it all alone. */
static void test_parallel_callers_do_not_mix(void)
{
    pthread_t thread[3];
    for (uintptr_t i = 0; i < 3; i++)
        CHECK(pthread_create(&thread[i], NULL, run_rounds, (void *)(i * 100)) == 0);
    for (int i = 0; i < 3; i++)
        pthread_join(thread[i], NULL);
}

static void nest(void *ctx, size_t i)
{
    check_round(20);
    hit(ctx, i);
}

static void test_parallel_may_nest(void) /* a store faults inside a job, and its capture is large */
{
    struct tally t = {{0}};
    pms_parallel_for(nest, &t, 50);
    for (size_t i = 0; i < 50; i++)
        CHECK(t.hits[i] == 1);
}

struct pieces {
    struct pms_persist p[4];
    unsigned char *dst;
    const unsigned char *src;
    size_t bytes;
};

static void copy_piece(void *ctx, size_t i) /* counters are plain: each piece has its own */
{
    struct pieces *w = ctx;
    pms_persist_copy(&w->p[i], w->dst + i * w->bytes, w->src + i * w->bytes, w->bytes);
    pms_persist_fence(&w->p[i]);
}

static void test_parallel_copy(void)
{
    struct pieces w = {.dst = aligned(4 * MIB), .src = random_bytes(4 * MIB), .bytes = MIB};
    uint64_t lines = 0;
    for (int i = 0; i < 4; i++)
        w.p[i].flush = pms_persist_best_flush();
    pms_parallel_for(copy_piece, &w, 4);
    for (int i = 0; i < 4; i++)
        lines += w.p[i].lines;
    CHECK(memcmp(w.dst, w.src, 4 * MIB) == 0 && lines == 4 * MIB / LINE);
    free(w.dst);
    free((void *)(uintptr_t)w.src);
}

static void test_parallel_in_a_fork_child(void)
{
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        alarm(120); /* to wait for a worker that is not there would be for ever */
        pms_parallel_after_fork_in_child();
        int before = test_checks_failed;
        check_round(INDICES_MAX);
        _exit(test_checks_failed != before);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_round(INDICES_MAX); /* the parent has its workers still */
}

int main(void)
{
    TEST(test_parallel_without_workers);
    TEST(test_parallel_runs_each_index_once);
    TEST(test_parallel_is_parallel);
    TEST(test_parallel_waits_for_slow_workers);
    TEST(test_parallel_starts_in_any_thread);
    TEST(test_parallel_callers_do_not_mix);
    TEST(test_parallel_may_nest);
    TEST(test_parallel_copy);
    TEST(test_parallel_in_a_fork_child);
    return test_summary();
}
