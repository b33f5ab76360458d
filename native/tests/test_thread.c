/* Threads of the engine: what reaches them, and what the one that starts them keeps. */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/lock.h"
#include "base/thread.h"
#include "test.h"

static sigset_t mask;
static _Atomic uint32_t over;

static void *look(void *arg)
{
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    atomic_store((_Atomic uint32_t *)arg, 1);
    pms_futex_wake(arg, 1);
    return arg;
}

/* All that a program may have handlers of. */
static bool blocks_all_but_faults(void)
{
    for (int n = 1; n < 32; n++) /* two behind them are the C library's */
        if (n != SIGKILL && n != SIGSTOP && n != SIGSEGV && n != SIGBUS && !sigismember(&mask, n))
            return false;
    return sigismember(&mask, SIGRTMIN) == 1 && sigismember(&mask, SIGRTMAX) == 1;
}

static void no_handler_runs_there(void)
{
    for (int own_faults = 0; own_faults < 2; own_faults++)
        for (int joined = 0; joined < 2; joined++) {
            pthread_t thread;
            void *result = &over;
            atomic_store(&over, 0);
            sigfillset(&mask);
            CHECK(pms_thread_start(joined ? &thread : NULL,
                                   (struct pms_thread_kind){128u << 10, own_faults != 0}, look,
                                   &over) == 0);
            while (!atomic_load(&over))
                pms_futex_wait(&over, 0, -1);
            CHECK(!joined || pthread_join(thread, &result) == 0);
            CHECK(result == &over && blocks_all_but_faults());
            CHECK(sigismember(&mask, SIGSEGV) == !own_faults);
            CHECK(sigismember(&mask, SIGBUS) == !own_faults);
        }
}

static void who_starts_it_keeps_its_own_mask(void)
{
    sigset_t mine, after;
    pthread_t thread;
    sigemptyset(&mine);
    sigaddset(&mine, SIGUSR2);
    CHECK(pthread_sigmask(SIG_SETMASK, &mine, NULL) == 0);
    CHECK(pms_thread_start(&thread, (struct pms_thread_kind){0}, look, &over) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &after) == 0);
    for (int n = 1; n <= SIGRTMAX; n++)
        CHECK(sigismember(&after, n) == sigismember(&mine, n));
}

/* A stack that no address space has room for. */
static void a_start_that_fails_says_so(void)
{
    pthread_t thread;
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    CHECK(pms_thread_start(&thread, (struct pms_thread_kind){(size_t)1 << 50, false}, look,
                           &over) == ENOMEM);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int n = 1; n <= SIGRTMAX; n++)
        CHECK(sigismember(&after, n) == sigismember(&before, n));
}

int main(void)
{
    TEST(no_handler_runs_there);
    TEST(who_starts_it_keeps_its_own_mask);
    TEST(a_start_that_fails_says_so);
    return test_summary();
}
