/* Threads of the engine, and all threads, told apart for ever. The kernel gives the ids of threads
 * that have ended to new ones, which would be taken for them: so threads are numbered, and each has
 * a record of its number as long as it lives. */
#ifndef PMS_BASE_THREAD_H
#define PMS_BASE_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct pms_thread {
    int64_t number; /* 0: of no thread */
    int64_t id;     /* the kernel's */
    /* says whether the thread lives; NULL, where there was no memory for it: ask the kernel */
    struct pms_thread_record *record;
};

extern __thread struct pms_thread pms_thread_own;

void pms_thread_number(void);

static inline const struct pms_thread *pms_thread_me(void)
{
    if (!pms_thread_own.number)
        pms_thread_number();
    return &pms_thread_own;
}

bool pms_thread_has_ended(const struct pms_thread *thread);

/* A thread of the engine's. Signals are blocked in it, for no handler of the program's may run
 * there. own_faults: but for what its own stores raise: those into a store are captured, and a
 * thread that blocks them would be killed. stack_bytes: 0: what the system gives. thread: NULL:
 * nobody joins it. Returns 0 or errno, and never EAGAIN, which is what a lock that is held says. */
struct pms_thread_kind {
    size_t stack_bytes;
    bool own_faults;
};
int pms_thread_start(pthread_t *thread, struct pms_thread_kind kind, void *(*run)(void *arg),
                     void *arg);

void pms_thread_after_fork_in_child(void);

#endif
