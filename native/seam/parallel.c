/* Worker threads for large copies, and for writes that wait for a disk. They sleep on a futex and
 * do nothing else: no memory, no locks, no signals but faults, so that even the fault handler may
 * put them to work. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "base/lock.h"
#include "base/thread.h"
#include "seam/persist.h"

#define WORKERS_MAX 7
#define WORKERS_OVERLAP 3 /* with the caller four: two compute, while a disk has two requests */
#define STACK_BYTES (128u << 10)
#define SPINS 2000 /* a job often follows at once; about 20 us */

#define CLOSED UINT32_MAX

/* One job at a time; its number and the next index to take are one word, so that a worker that
 * wakes up late takes nothing of a job that it has not looked at. The caller waits for indices
 * that were taken, not for workers: those may never get a core on a busy machine. */
static _Atomic uint64_t claim;      /* number of the job << 32 | next index, or CLOSED */
static _Atomic uint32_t round_word; /* number of the job: what workers wait for */
static _Atomic uint32_t done_word;  /* indices done: what the caller waits for */
static _Atomic uint32_t busy;
static _Atomic int workers;
static _Atomic int helpers; /* so many of them have a core of their own */
static void (*_Atomic job)(void *ctx, size_t i);
static void *_Atomic job_ctx;
static _Atomic uint32_t job_count;
static pthread_once_t once = PTHREAD_ONCE_INIT, once_more = PTHREAD_ONCE_INIT;

static void take_indices(uint32_t round)
{
    for (;;) {
        uint64_t taken = atomic_load_explicit(&claim, memory_order_acquire);
        void (*fn)(void *, size_t) = atomic_load_explicit(&job, memory_order_relaxed);
        void *ctx = atomic_load_explicit(&job_ctx, memory_order_relaxed);
        uint32_t n = atomic_load_explicit(&job_count, memory_order_relaxed), i = (uint32_t)taken;
        if (taken >> 32 != round || i >= n)
            return;
        /* If the word is still the same, what was read after it belongs to it: it is closed
         * before the job changes. */
        if (!atomic_compare_exchange_weak_explicit(&claim, &taken, taken + 1, memory_order_acq_rel,
                                                   memory_order_relaxed))
            continue;
        fn(ctx, i);
        if (atomic_fetch_add_explicit(&done_word, 1, memory_order_acq_rel) + 1 == n)
            pms_futex_wake(&done_word, 1);
    }
}

static void wait_change(_Atomic uint32_t *word, uint32_t seen)
{
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen)
            return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    while (atomic_load_explicit(word, memory_order_acquire) == seen)
        pms_futex_wait(word, seen, -1);
}

static void *work(void *arg)
{
    uint32_t seen = (uint32_t)(uintptr_t)arg;
    for (;;) {
        wait_change(&round_word, seen);
        seen = atomic_load_explicit(&round_word, memory_order_acquire);
        take_indices(seen);
    }
    return NULL;
}

static void start_up_to(long most)
{
    while (atomic_load(&workers) < most &&
           pms_thread_start(NULL, (struct pms_thread_kind){STACK_BYTES, true}, work,
                            (void *)(uintptr_t)atomic_load(&round_word)) == 0)
        atomic_fetch_add(&workers, 1);
}

static void start(void)
{
    long others = sysconf(_SC_NPROCESSORS_ONLN) - 1;
    start_up_to(others < WORKERS_MAX ? others : WORKERS_MAX);
    atomic_store(&helpers, atomic_load(&workers));
}

static void start_more(void) { start_up_to(WORKERS_OVERLAP); }

void pms_parallel_start(void) { pthread_once(&once, start); }

void pms_overlap_start(void)
{
    pms_parallel_start();
    pthread_once(&once_more, start_more);
}

static bool enter(void)
{
    uint32_t free = 0;
    return atomic_compare_exchange_strong_explicit(&busy, &free, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

static void run(void (*fn)(void *ctx, size_t i), void *ctx, size_t n, int wake)
{
    /* Busy: another thread's job, or the one that this call is part of (a worker's store was
     * captured). */
    if (wake == 0 || n < 2 || n >= CLOSED || !enter()) {
        for (size_t i = 0; i < n; i++)
            fn(ctx, i);
        return;
    }
    uint32_t round = atomic_load_explicit(&round_word, memory_order_relaxed) + 1;
    atomic_store_explicit(&claim, (uint64_t)round << 32 | CLOSED, memory_order_seq_cst);
    atomic_store_explicit(&job, fn, memory_order_release);
    atomic_store_explicit(&job_ctx, ctx, memory_order_release);
    atomic_store_explicit(&job_count, (uint32_t)n, memory_order_release);
    atomic_store_explicit(&done_word, 0, memory_order_relaxed);
    atomic_store_explicit(&claim, (uint64_t)round << 32, memory_order_release);
    atomic_store_explicit(&round_word, round, memory_order_release);
    pms_futex_wake(&round_word, wake);
    take_indices(round);
    for (uint32_t done; (done = atomic_load_explicit(&done_word, memory_order_acquire)) < n;)
        wait_change(&done_word, done);
    atomic_store_explicit(&busy, 0, memory_order_release);
}

void pms_parallel_for(void (*fn)(void *ctx, size_t i), void *ctx, size_t n)
{
    run(fn, ctx, n, atomic_load(&helpers));
}

void pms_overlap(void (*fn)(void *ctx, size_t i), void *ctx, size_t n)
{
    run(fn, ctx, n, atomic_load(&workers));
}

void pms_parallel_after_fork_in_child(void)
{
    atomic_store(&workers, 0);
    atomic_store(&helpers, 0);
    atomic_store(&busy, 0); /* whoever was at it did not come with us */
}
