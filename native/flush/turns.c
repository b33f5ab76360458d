#include "flush/turns.h"

#include <pthread.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <time.h>

#include "base/pages.h"
#include "base/thread.h"

#define STACK_BYTES (256u << 10)

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

int pms_turns_proceed(struct pms_transfer *t, uint64_t bytes, struct pms_error *error)
{
    uint64_t zero = 0;
    __atomic_compare_exchange_n(&t->started_ns, &zero, now_ns(), false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    uint64_t done = __atomic_add_fetch(&t->done_bytes, bytes, __ATOMIC_RELAXED);
    done -= __atomic_load_n(&t->spared_bytes, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&t->cancel, __ATOMIC_RELAXED)) {
        uint64_t rate = __atomic_load_n(&t->bytes_per_second, __ATOMIC_RELAXED);
        uint64_t due = rate ? (uint64_t)((double)done / (double)rate * 1e9) : 0;
        uint64_t spent = now_ns() - __atomic_load_n(&t->started_ns, __ATOMIC_RELAXED);
        if (spent >= due)
            return PMS_OK;
        uint64_t rest = due - spent < 50000000 ? due - spent : 50000000;
        struct timespec nap = {0, (long)rest};
        nanosleep(&nap, NULL);
    }
    return pms_fail(error, PMS_E_STATE, "cancelled");
}

static bool take(struct pms_turns *t, uint64_t *i, uint64_t *n)
{
    pms_lock_acquire(&t->lock);
    bool more = t->status == PMS_OK && t->next < t->count;
    if (more) {
        *i = t->next;
        *n = t->together(t, *i, t->count - *i < t->batch ? t->count - *i : t->batch);
        t->next += *n;
    }
    pms_lock_release(&t->lock);
    return more;
}

static void fail_work(struct pms_turns *t, int status, const struct pms_error *error)
{
    pms_lock_acquire(&t->lock);
    if (t->status == PMS_OK) {
        t->status = status;
        t->error = *error;
    }
    pms_lock_release(&t->lock);
}

/* On huge pages where the system has them: a request of a disk has room for so many pages,
 * whatever their size. */
static unsigned char *buffer_make(uint64_t bytes, void **raw, uint64_t *raw_bytes)
{
    *raw_bytes = bytes + (bytes < PMS_HUGE ? 0 : PMS_HUGE);
    *raw = mmap(NULL, *raw_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*raw == MAP_FAILED)
        return NULL;
    if (bytes < PMS_HUGE)
        return *raw;
    unsigned char *aligned = (unsigned char *)pms_huge_up((uintptr_t)*raw);
    (void)madvise(aligned, bytes, MADV_HUGEPAGE);
    return aligned;
}

static void *run(void *arg)
{
    struct pms_turns *t = arg;
    struct pms_error error = {0};
    void *raw;
    uint64_t raw_bytes, i, n;
    unsigned char *buffer = buffer_make(t->batch * t->item_bytes, &raw, &raw_bytes);
    if (!buffer) {
        int status = pms_fail_errno(&error, "allocating memory");
        fail_work(t, status, &error);
        return NULL;
    }
    while (take(t, &i, &n)) {
        int status = t->carry(t, i, n, buffer, &error);
        if (status != PMS_OK)
            fail_work(t, status, &error);
    }
    munmap(raw, raw_bytes);
    return NULL;
}

int pms_turns_run(struct pms_turns *t, struct pms_error *error)
{
    pthread_t other[PMS_TURNS_THREADS];
    uint64_t others = 0, batches = (t->count + t->batch - 1) / t->batch;
    while (others + 1 < PMS_TURNS_THREADS && others + 1 < batches &&
           pms_thread_start(&other[others], (struct pms_thread_kind){STACK_BYTES, true}, run, t) ==
               0)
        others++;
    run(t);
    while (others)
        pthread_join(other[--others], NULL);
    if (t->status != PMS_OK && error)
        *error = t->error;
    return t->status;
}
