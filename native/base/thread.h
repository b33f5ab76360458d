/* Threads, told apart for ever. The kernel gives the ids of threads that have ended to new ones,
 * which would be taken for them: so threads are numbered, and each has a record of its number as
 * long as it lives. */
#ifndef PMS_BASE_THREAD_H
#define PMS_BASE_THREAD_H

#include <stdbool.h>
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

void pms_thread_after_fork_in_child(void);

#endif
