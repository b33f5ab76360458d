/* Worker threads for large copies. They sleep on a futex and do nothing else: no memory, no locks, no signals, so that even the
 * fault handler may put them to work. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "lock.h"
#include "persist.h"

#define WORKERS_MAX 7
#define STACK_BYTES (128u << 10)
#define SPINS 2000 /* a job often follows at once; about 20 us */

static _Atomic uint32_t round_word;  /* +1 for each job: what workers wait for */
static _Atomic uint32_t done_word;   /* workers that finished the job */
static _Atomic size_t next_index;
static _Atomic int workers;
static void (*job)(void *ctx, size_t i);
static void *job_ctx;
static size_t job_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void take_indices(void)
{
    size_t i;
    while ((i = atomic_fetch_add_explicit(&next_index, 1, memory_order_relaxed)) < job_count)
        job(job_ctx, i);
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
        seen++; /* the caller waits for every worker, so no round is ever missed */
        take_indices();
        atomic_fetch_add_explicit(&done_word, 1, memory_order_release);
        pms_futex_wake(&done_word, 1);
    }
    return NULL;
}

static void start(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    sigset_t all, before;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* inherited: Python's handlers never run on a worker */
    for (long i = 1; i < cores && i <= WORKERS_MAX; i++) {
        pthread_t thread;
        if (pthread_create(&thread, &attr, work, (void *)(uintptr_t)atomic_load(&round_word)) != 0)
            break;
        atomic_fetch_add(&workers, 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
}

void pms_parallel_start(void) { pthread_once(&once, start); }

void pms_parallel_for(void (*fn)(void *ctx, size_t i), void *ctx, size_t n)
{
    uint32_t helpers = (uint32_t)atomic_load(&workers);
    if (helpers == 0 || n < 2) {
        for (size_t i = 0; i < n; i++)
            fn(ctx, i);
        return;
    }
    job = fn;
    job_ctx = ctx;
    job_count = n;
    atomic_store_explicit(&next_index, 0, memory_order_relaxed);
    atomic_store_explicit(&done_word, 0, memory_order_relaxed);
    atomic_fetch_add_explicit(&round_word, 1, memory_order_release);
    pms_futex_wake(&round_word, WORKERS_MAX);
    take_indices();
    for (uint32_t done; (done = atomic_load_explicit(&done_word, memory_order_acquire)) < helpers;)
        wait_change(&done_word, done);
}

void pms_parallel_after_fork_in_child(void) { atomic_store(&workers, 0); }
