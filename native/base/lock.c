#include "base/lock.h"

#include <errno.h>
#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS 100

static inline void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int pms_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns)
{
    struct timespec t = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    long r = syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, timeout_ns < 0 ? NULL : &t,
                     NULL, 0);
    return r == 0 ? 0 : errno;
}

void pms_futex_wake(_Atomic uint32_t *word, int count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

/* Drepper, "Futexes are tricky" (2011), mutex 3, with a short spin. */
void pms_lock_acquire(struct pms_lock *lock)
{
    uint32_t free = 0;
    if (atomic_compare_exchange_strong_explicit(&lock->word, &free, 1, memory_order_acquire,
                                                memory_order_relaxed))
        return;
    for (int i = 0; i < SPINS; i++) {
        pause_cpu();
        free = 0;
        if (atomic_compare_exchange_weak_explicit(&lock->word, &free, 1, memory_order_acquire,
                                                  memory_order_relaxed))
            return;
    }
    while (atomic_exchange_explicit(&lock->word, 2, memory_order_acquire) != 0)
        pms_futex_wait(&lock->word, 2, -1);
}

void pms_lock_release(struct pms_lock *lock)
{
    if (atomic_exchange_explicit(&lock->word, 0, memory_order_release) == 2)
        pms_futex_wake(&lock->word, 1);
}
