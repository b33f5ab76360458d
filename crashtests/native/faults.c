#include "faults.h"
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static _Atomic bool armed;
static _Atomic uint64_t seen;
static struct fault fault;
static struct fault_result *result;
static const struct wl *current;
static _Thread_local bool was_interrupted; /* the call is made again */

/* With what a call of each kind fails, in turn. */
static const struct kind {
    const char *name;
    int error[4];
} kinds[] = {
    [FAULT_NONE] = {"none", {0}},
    [FAULT_PWRITEV] = {"pwritev", {EIO, ENOSPC, EDQUOT}},
    [FAULT_PWRITE] = {"pwrite", {EIO, ENOSPC, EDQUOT}},
    [FAULT_PREADV] = {"preadv", {EIO}},
    [FAULT_PREAD] = {"pread", {EIO}},
    [FAULT_FDATASYNC] = {"fdatasync", {EIO, ENOSPC, EDQUOT}},
    [FAULT_FSYNC] = {"fsync", {EIO, ENOSPC, EDQUOT}},
    [FAULT_POSIX_FALLOCATE] = {"posix_fallocate", {ENOSPC, EDQUOT, EIO}},
    [FAULT_FALLOCATE] = {"fallocate", {ENOSPC, EDQUOT, EIO}},
    [FAULT_FTRUNCATE] = {"ftruncate", {EIO, ENOSPC}},
    [FAULT_MPROTECT] = {"mprotect", {ENOMEM}},
    [FAULT_MMAP] = {"mmap", {ENOMEM}},
    [FAULT_MUNMAP] = {"munmap", {ENOMEM}},
    [FAULT_MADVISE] = {"madvise", {ENOMEM, EINVAL}},
    [FAULT_OPEN] = {"open", {EMFILE, EIO, EACCES}},
    [FAULT_CLOSE] = {"close", {EIO, ENOSPC}},
    [FAULT_FSTAT] = {"fstat", {EIO}},
    [FAULT_FLOCK] = {"flock", {ENOLCK}},
};

const char *faults_name(enum fault_call call) { return kinds[call].name; }

int __real_fstat(int fd, struct stat *st);

static int error_of(enum fault_call call)
{
    const int *error = kinds[call].error;
    int count = 0;
    while (count < 4 && error[count])
        count++;
    return error[fault.nth % (uint64_t)count];
}

static bool on_journals_thread(void)
{
    char name[16] = "";
    return pthread_getname_np(pthread_self(), name, sizeof name) == 0 &&
           strcmp(name, "pms-journal") == 0;
}

/* 0, or with what this call fails. */
static int fails(enum fault_call call)
{
    if (!atomic_load(&armed) || fault.nth == 0)
        return 0;
    uint64_t n = atomic_fetch_add(&seen, 1) + 1;
    if (n == fault.nth) {
        result->in_background = on_journals_thread();
        result->error = error_of(call);
        result->call = call;
        result->closing = current->closing;
    } else if (!fault.lasting || n < fault.nth || call != result->call) {
        return 0;
    }
    return error_of(call);
}

/* Every other call, where that is asked for. */
static bool interrupts(void)
{
    was_interrupted = atomic_load(&armed) && fault.interrupted && !was_interrupted;
    return was_interrupted;
}

static bool fails_with_errno(enum fault_call call, bool may_be_interrupted)
{
    int err = may_be_interrupted && interrupts() ? EINTR : fails(call);
    if (err)
        errno = err;
    return err != 0;
}

static size_t shortened(size_t bytes)
{
    bool halve = atomic_load(&armed) && fault.interrupted && bytes > PMS_PAGE;
    return halve ? bytes / 2 / PMS_PAGE * PMS_PAGE : bytes;
}

/* The first part of it, where it has several. */
static int shorter(const struct iovec *iov, int count, struct iovec *first)
{
    *first = iov[0];
    if (!atomic_load(&armed) || !fault.interrupted)
        return count;
    first->iov_len = shortened(iov[0].iov_len);
    return 1;
}

#define WRAPPED(type, name, ...)     \
    type __real_##name(__VA_ARGS__); \
    type __wrap_##name(__VA_ARGS__); \
    type __wrap_##name(__VA_ARGS__)

WRAPPED(ssize_t, pwritev, int fd, const struct iovec *iov, int count, off_t offset)
{
    struct iovec first;
    if (fails_with_errno(FAULT_PWRITEV, true))
        return -1;
    int parts = shorter(iov, count, &first);
    return parts == count ? __real_pwritev(fd, iov, count, offset)
                          : __real_pwritev(fd, &first, 1, offset);
}

WRAPPED(ssize_t, preadv, int fd, const struct iovec *iov, int count, off_t offset)
{
    struct iovec first;
    if (fails_with_errno(FAULT_PREADV, true))
        return -1;
    int parts = shorter(iov, count, &first);
    return parts == count ? __real_preadv(fd, iov, count, offset)
                          : __real_preadv(fd, &first, 1, offset);
}

WRAPPED(ssize_t, pwrite, int fd, const void *from, size_t n, off_t offset)
{
    return fails_with_errno(FAULT_PWRITE, true) ? -1
                                                : __real_pwrite(fd, from, shortened(n), offset);
}

WRAPPED(ssize_t, pread, int fd, void *to, size_t n, off_t offset)
{
    return fails_with_errno(FAULT_PREAD, true) ? -1 : __real_pread(fd, to, shortened(n), offset);
}

/* Not one that it is flushed to. */
static bool is_stores(int fd)
{
    struct stat a, b;
    return current->pool && __real_fstat(fd, &a) == 0 &&
           __real_fstat(current->pool->opened.fd, &b) == 0 && a.st_ino == b.st_ino;
}

WRAPPED(int, fdatasync, int fd)
{
    if (!fails_with_errno(FAULT_FDATASYNC, true))
        return __real_fdatasync(fd);
    int saved = errno;
    result->of_store |= is_stores(fd);
    errno = saved;
    return -1;
}

WRAPPED(int, fsync, int fd) { return fails_with_errno(FAULT_FSYNC, true) ? -1 : __real_fsync(fd); }

WRAPPED(int, posix_fallocate, int fd, off_t offset, off_t bytes)
{
    int saved = errno;
    int err = fails_with_errno(FAULT_POSIX_FALLOCATE, true) ? errno : 0;
    errno = saved;
    return err ? err : __real_posix_fallocate(fd, offset, bytes);
}

WRAPPED(int, fallocate, int fd, int mode, off_t offset, off_t bytes)
{
    return fails_with_errno(FAULT_FALLOCATE, true) ? -1 : __real_fallocate(fd, mode, offset, bytes);
}

WRAPPED(int, ftruncate, int fd, off_t bytes)
{
    return fails_with_errno(FAULT_FTRUNCATE, true) ? -1 : __real_ftruncate(fd, bytes);
}

WRAPPED(int, mprotect, void *addr, size_t n, int prot)
{
    return fails_with_errno(FAULT_MPROTECT, false) ? -1 : __real_mprotect(addr, n, prot);
}

WRAPPED(void *, mmap, void *addr, size_t n, int prot, int flags, int fd, off_t offset)
{
    return fails_with_errno(FAULT_MMAP, false) ? MAP_FAILED
                                               : __real_mmap(addr, n, prot, flags, fd, offset);
}

WRAPPED(int, munmap, void *addr, size_t n)
{
    if (fails_with_errno(FAULT_MUNMAP, false))
        return -1;
    trace_unmap((uintptr_t)addr, n);
    return __real_munmap(addr, n);
}

WRAPPED(int, madvise, void *addr, size_t n, int advice)
{
    return fails_with_errno(FAULT_MADVISE, false) ? -1 : __real_madvise(addr, n, advice);
}

int __real_open(const char *path, int flags, mode_t mode);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    va_list given;
    va_start(given, flags);
    mode_t mode = flags & O_CREAT ? va_arg(given, mode_t) : 0;
    va_end(given);
    return fails_with_errno(FAULT_OPEN, true) ? -1 : __real_open(path, flags, mode);
}

/* It is closed nevertheless. */
WRAPPED(int, close, int fd)
{
    int err = fails(FAULT_CLOSE), closed = __real_close(fd);
    if (!err)
        return closed;
    errno = err;
    return -1;
}

WRAPPED(int, fstat, int fd, struct stat *st)
{
    return fails_with_errno(FAULT_FSTAT, false) ? -1 : __real_fstat(fd, st);
}

WRAPPED(int, flock, int fd, int how)
{
    return fails_with_errno(FAULT_FLOCK, false) ? -1 : __real_flock(fd, how);
}

static void broken(const char *rule, const char *what)
{
    if (!result->broken[0])
        snprintf(result->broken, sizeof result->broken, "%s%s%s", rule, *what ? ": " : "", what);
}

static void look_at_error(const struct wl *w)
{
    if (!w->error.what[0])
        broken("an error without a message", "");
    if (w->error.status != w->status)
        broken("an error whose message is of another failure", w->error.what);
    bool of_sync = result->call == FAULT_FDATASYNC && w->error.sys_errno == EIO;
    if (w->status == PMS_E_OS && w->error.sys_errno != result->error && !of_sync)
        broken("another number than the call gave", w->error.what);
}

static void transaction(struct wl *w)
{
    wl_data(w, "keep", NULL)[14] = 4711;
    wl_value(w, 0, "went", "on", 2);
    wl_commit(w);
}

/* After an error. A store whose sync failed must say so for ever; any other one must be rolled
 * back, and must work. */
static void go_on(struct wl *w)
{
    struct pms_error e = {0};
    bool in_commit = atomic_load(&w->board->failed_in_commit) != 0;
    if (pms_pool_failed(w->pool)) {
        if (in_commit)
            result->in_flight = wl_digest_if_committed(w->pool);
        if (pms_commit(w->pool, &e) == PMS_OK || e.status != PMS_E_READONLY)
            broken("a commit after a failed sync did not say that the store is read-only", "");
        return;
    }
    if (pms_txblock_depth(w->pool) && pms_end(w->pool, 0, &e) != PMS_OK)
        broken("leaving the block after an error failed", "");
    if (pms_rollback(w->pool, &e) != PMS_OK && !pms_pool_failed(w->pool))
        broken("the roll back after an error failed", "");
    if (fault.lasting)
        atomic_store(&armed, false);
    w->failed = false;
    w->status = PMS_OK;
    if (wl_digest(w->pool) != w->board->state[w->board->acked])
        broken("after an error and a roll back the state is not the last commit", "");
    transaction(w);
    if (w->failed && fault.lasting && w->pool->journal && !pms_pool_failed(w->pool)) {
        /* the journal's thread had tried once more while the fault was there: that is told by one
         * commit */
        if (pms_rollback(w->pool, &e) != PMS_OK)
            broken("the second roll back failed", "");
        w->failed = false;
        transaction(w);
    }
    if (w->failed && !pms_pool_failed(w->pool))
        broken("a transaction after an error and a roll back failed", w->error.what);
}

static const struct workload *wrapped;

static void run_and_go_on(struct wl *w)
{
    wrapped->run(w);
    if (w->failed)
        look_at_error(w);
    if (w->failed && w->pool)
        go_on(w);
}

static bool says_closed(const char *path)
{
    struct pms_session session;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool closed = fd >= 0 && pms_session_read(fd, &session, NULL) == PMS_OK &&
                  session.state == PMS_SESSION_CLEAN;
    close(fd);
    return closed;
}

void faults_run(const struct workload *w, const char *path, int domain, struct board *board,
                struct fault f, struct fault_result *r)
{
    struct wl run;
    const struct workload going_on = {w->name, run_and_go_on, w->leaks, w->heavy};
    wrapped = w;
    result = r;
    fault = f;
    current = &run;
    atomic_store(&seen, 0);
    atomic_store(&armed, true);
    wl_run(&going_on, path, domain, board, true, &run);
    atomic_store(&armed, false);
    if (!atomic_load(&board->opened))
        look_at_error(&run);
    if (f.interrupted && run.failed)
        broken("interrupted", run.error.what);
    /* At a close all else is synced before the mark, and before the bit that logs are whole. */
    bool of_mark = r->closing && (strcmp(run.error.what, "syncing the session record") == 0 ||
                                  strcmp(run.error.what, "syncing the superblock") == 0);
    if (r->call == FAULT_FDATASYNC && r->of_store && !r->in_background && !of_mark &&
        says_closed(path))
        broken("a store whose sync failed is marked as closed", run.error.what);
}

void faults_leave_open(const struct workload *w, const char *path, int domain, struct board *board)
{
    struct wl run = {.board = board, .keep_states = true};
    run.pool = wl_open(path, domain, PMS_MODE_READ_WRITE, &run.error);
    if (!run.pool)
        return;
    w->run(&run);
    wl_data(&run, "keep", NULL)[3] = 99;
    memset(wl_data(&run, "medium", NULL), 99, 9000);
    wl_array(&run, 0, "uncommitted", 5000, 99);
    atomic_store(&board->opened, 1);
}

static void recovery(struct wl *w)
{
    wl_data(w, "keep", NULL)[5] = 5;
    wl_array(w, 0, "after", 3000, 5);
    wl_commit(w);
}

const struct workload faults_recovery = {"recovery", recovery, false, 0};
