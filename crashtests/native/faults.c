#include "faults.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

ssize_t __real_pwritev(int fd, const struct iovec *iov, int count, off_t offset);
int __real_fdatasync(int fd);
int __real_posix_fallocate(int fd, off_t offset, off_t bytes);
int __real_ftruncate(int fd, off_t bytes);
int __real_mprotect(void *addr, size_t n, int prot);
void *__real_mmap(void *addr, size_t n, int prot, int flags, int fd, off_t offset);
ssize_t __wrap_pwritev(int fd, const struct iovec *iov, int count, off_t offset);
int __wrap_fdatasync(int fd);
int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes);
int __wrap_ftruncate(int fd, off_t bytes);
int __wrap_mprotect(void *addr, size_t n, int prot);
void *__wrap_mmap(void *addr, size_t n, int prot, int flags, int fd, off_t offset);

static _Atomic uint64_t seen, fail_at; /* 0: nothing is counted */
static struct fault_result *result;

const char *faults_name(enum fault_call call)
{
    static const char *const name[] = {"none",      "pwritev",  "fdatasync", "posix_fallocate",
                                       "ftruncate", "mprotect", "mmap"};
    return name[call];
}

static bool fails(enum fault_call call)
{
    uint64_t at = atomic_load(&fail_at);
    if (!at || atomic_fetch_add(&seen, 1) + 1 != at)
        return false;
    result->call = call;
    return true;
}

ssize_t __wrap_pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    if (fails(FAULT_PWRITEV)) {
        errno = atomic_load(&fail_at) % 2 ? ENOSPC : EIO;
        return -1;
    }
    if (atomic_load(&fail_at) && atomic_load(&seen) % 3 == 0 && iov[0].iov_len > 1) { /* short */
        struct iovec part = {iov[0].iov_base, iov[0].iov_len / 2};
        return __real_pwritev(fd, &part, 1, offset);
    }
    return __real_pwritev(fd, iov, count, offset);
}

int __wrap_fdatasync(int fd)
{
    if (!fails(FAULT_FDATASYNC))
        return __real_fdatasync(fd);
    errno = EIO;
    return -1;
}

int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes)
{
    return fails(FAULT_FALLOCATE) ? ENOSPC : __real_posix_fallocate(fd, offset, bytes);
}

int __wrap_ftruncate(int fd, off_t bytes)
{
    if (!fails(FAULT_FTRUNCATE))
        return __real_ftruncate(fd, bytes);
    errno = EIO;
    return -1;
}

int __wrap_mprotect(void *addr, size_t n, int prot)
{
    if (!fails(FAULT_MPROTECT))
        return __real_mprotect(addr, n, prot);
    errno = ENOMEM;
    return -1;
}

void *__wrap_mmap(void *addr, size_t n, int prot, int flags, int fd, off_t offset)
{
    if (!fails(FAULT_MMAP))
        return __real_mmap(addr, n, prot, flags, fd, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

static void broken(const char *what)
{
    if (!result->broken[0])
        snprintf(result->broken, sizeof result->broken, "%s", what);
}

/* After an error. A store whose sync failed must say so for ever; any other one must be rolled
 * back, and must work. */
static void go_on(struct wl *w)
{
    struct pms_error e = {0};
    bool in_commit = atomic_load(&w->board->failed_in_commit) != 0;
    if (!w->error.what[0])
        broken("an error without a message");
    if (pms_pool_failed(w->pool)) {
        if (in_commit)
            result->in_flight = wl_digest_if_committed(w->pool);
        if (pms_commit(w->pool, &e) == PMS_OK || e.status != PMS_E_READONLY)
            broken("a commit after a failed sync did not say that the store is read-only");
        return;
    }
    if (pms_txblock_depth(w->pool) && pms_end(w->pool, 0, &e) != PMS_OK)
        broken("leaving the block after an error failed");
    if (pms_rollback(w->pool, &e) != PMS_OK && !pms_pool_failed(w->pool))
        broken("the roll back after an error failed");
    w->failed = false;
    if (wl_digest(w->pool) != w->board->state[w->board->acked])
        broken("after an error and a roll back the state is not the last commit");
    wl_data(w, "keep", NULL)[14] = 4711;
    wl_value(w, 0, "went", "on", 2);
    wl_commit(w);
    if (w->failed && !pms_pool_failed(w->pool))
        broken("a transaction after an error and a roll back failed");
}

static void run_and_go_on(struct wl *w)
{
    extern const struct workload *faults_workload;
    faults_workload->run(w);
    if (w->failed && w->pool)
        go_on(w);
}

const struct workload *faults_workload;

void faults_run(const struct workload *w, const char *path, int domain, struct board *board,
                uint64_t n, struct fault_result *r)
{
    struct wl run;
    const struct workload wrapped = {w->name, run_and_go_on, w->leaks, w->heavy};
    faults_workload = w;
    result = r;
    atomic_store(&seen, 0);
    atomic_store(&fail_at, n);
    wl_run(&wrapped, path, domain, board, true, &run);
    atomic_store(&fail_at, 0);
}
