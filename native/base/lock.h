/* A futex lock that the fault handler may take: no memory, no library, no owner. */
#ifndef PMS_BASE_LOCK_H
#define PMS_BASE_LOCK_H

#include <stdatomic.h>
#include <stdint.h>

struct pms_lock {
    _Atomic uint32_t word;
}; /* 0 free, 1 held, 2 held and waited for */

void pms_lock_acquire(struct pms_lock *lock);
void pms_lock_release(struct pms_lock *lock);

/* Waits while *word == expected, at most timeout_ns (< 0: for ever). Returns 0, ETIMEDOUT, EINTR
 * or EAGAIN. */
int pms_futex_wait(_Atomic uint32_t *word, uint32_t expected, int64_t timeout_ns);
void pms_futex_wake(_Atomic uint32_t *word, int count);

#endif
