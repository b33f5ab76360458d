/* LD_PRELOAD: records, or makes fail, what a process does to the files below one directory. The
 * files of storage tiers are written by Python and by native threads alike; here both come
 * through the C library. See crashtests/tiers.py.
 *
 * A record is a struct head, then the path, then a second path or the bytes. Writes are recorded
 * before they happen, syncs and changes of names afterwards: what the record says was durable,
 * was. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FDS 4096
enum kind { CREATE = 1, WRITE, SYNC, RENAME, LINK, UNLINK, MKDIR, SIZE, MARK };
struct head {
    uint32_t kind, path, rest, more;
    uint64_t off;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static char *path_of[FDS];
static int out = -1;
static long fail_at; /* 0: none; else counts down */
static int fail_errno;
static long hits;

void recorder_start(const char *directory, const char *trace)
{
    snprintf(root, sizeof root, "%s", directory);
    out = trace && *trace ? (int)syscall(SYS_openat, AT_FDCWD, trace,
                                         O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644)
                          : -1;
}

/* The nth operation from now on fails. Returns how many were counted since the last call. */
long recorder_fail(long n, int error)
{
    pthread_mutex_lock(&mutex);
    long counted = hits;
    fail_at = n;
    fail_errno = error;
    hits = 0;
    pthread_mutex_unlock(&mutex);
    return counted;
}

static bool ours(const char *path)
{
    size_t n = strlen(root);
    return n && path && strncmp(path, root, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static bool fails(void)
{
    pthread_mutex_lock(&mutex);
    hits++;
    bool now = fail_at && --fail_at == 0;
    pthread_mutex_unlock(&mutex);
    if (now)
        errno = fail_errno;
    return now;
}

static void record(enum kind kind, const char *path, const void *rest, size_t bytes, uint64_t off)
{
    if (out < 0)
        return;
    int saved = errno;
    struct head h = {
        .kind = kind, .path = (uint32_t)strlen(path), .rest = (uint32_t)bytes, .off = off};
    struct iovec v[3] = {
        {&h, sizeof h}, {(void *)(uintptr_t)path, h.path}, {(void *)(uintptr_t)rest, bytes}};
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < 3; i++)
        for (size_t at = 0; at < v[i].iov_len;) {
            long n = syscall(SYS_write, out, (char *)v[i].iov_base + at, v[i].iov_len - at);
            if (n <= 0)
                abort();
            at += (size_t)n;
        }
    pthread_mutex_unlock(&mutex);
    errno = saved;
}

void recorder_mark(uint64_t number) { record(MARK, "", NULL, 0, number); }

static const char *of_fd(int fd) { return fd >= 0 && fd < FDS ? path_of[fd] : NULL; }

static int opened(const char *path, int flags, int fd, bool there)
{
    if (fd >= 0 && fd < FDS) {
        path_of[fd] = strdup(path);
        if ((flags & O_CREAT) && !there)
            record(CREATE, path, NULL, 0, 0);
    }
    return fd;
}

static int do_open(const char *path, int flags, mode_t mode)
{
    int again; /* a descriptor that is opened a second time */
    if (sscanf(path, "/proc/self/fd/%d", &again) == 1 && of_fd(again))
        return opened(of_fd(again), flags, (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode),
                      true);
    if (!ours(path))
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
    bool there = syscall(SYS_faccessat, AT_FDCWD, path, F_OK) == 0;
    if ((flags & O_CREAT) && !there && fails())
        return -1;
    return opened(path, flags, (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode), there);
}

#define OPEN(name, flags)                                                    \
    int name(const char *path, int flags, ...)                               \
    {                                                                        \
        va_list a;                                                           \
        va_start(a, flags);                                                  \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(a, mode_t) : 0; \
        va_end(a);                                                           \
        return do_open(path, flags, mode);                                   \
    }
OPEN(open, flags)
OPEN(open64, flags)

int close(int fd)
{
    if (fd >= 0 && fd < FDS && path_of[fd]) {
        free(path_of[fd]);
        path_of[fd] = NULL;
    }
    return (int)syscall(SYS_close, fd);
}

static ssize_t do_pwrite(int fd, const void *data, size_t bytes, off_t off)
{
    const char *path = of_fd(fd);
    if (path) {
        if (fails()) {
            /* some of it may have got there */
            syscall(SYS_pwrite64, fd, data, bytes / 2 & ~(size_t)511, off);
            return -1;
        }
        record(WRITE, path, data, bytes, (uint64_t)off);
    }
    return syscall(SYS_pwrite64, fd, data, bytes, off);
}
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t off)
{
    return do_pwrite(fd, data, bytes, off);
}
ssize_t pwrite64(int fd, const void *data, size_t bytes, off_t off)
{
    return do_pwrite(fd, data, bytes, off);
}

ssize_t pwritev(int fd, const struct iovec *v, int count, off_t off)
{
    if (!of_fd(fd))
        return syscall(SYS_pwritev, fd, v, count, off, 0);
    ssize_t done = 0;
    for (int i = 0; i < count; i++) {
        ssize_t n = do_pwrite(fd, v[i].iov_base, v[i].iov_len, off + done);
        if (n < 0)
            return done ? done : n;
        done += n;
        if ((size_t)n < v[i].iov_len)
            break;
    }
    return done;
}
ssize_t pwritev64(int fd, const struct iovec *v, int count, off_t off)
{
    return pwritev(fd, v, count, off);
}

static int do_truncate(int fd, off_t bytes)
{
    const char *path = of_fd(fd);
    if (path && fails())
        return -1;
    int status = (int)syscall(SYS_ftruncate, fd, bytes);
    if (path && status == 0)
        record(SIZE, path, NULL, 0, (uint64_t)bytes);
    return status;
}
int ftruncate(int fd, off_t bytes) { return do_truncate(fd, bytes); }
int ftruncate64(int fd, off_t bytes) { return do_truncate(fd, bytes); }

static int do_sync(int fd, long call)
{
    const char *path = of_fd(fd);
    if (path && fails())
        return -1;
    int status = (int)syscall(call, fd);
    if (path && status == 0)
        record(SYNC, path, NULL, 0, 0);
    return status;
}
int fsync(int fd) { return do_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return do_sync(fd, SYS_fdatasync); }

static int do_allocate(int fd, off_t off, off_t bytes)
{
    const char *path = of_fd(fd);
    if (path && fails())
        return errno;
    int error = syscall(SYS_fallocate, fd, 0, off, bytes) == 0 ? 0 : errno;
    if (path && !error)
        record(SIZE, path, NULL, 0, (uint64_t)(off + bytes));
    return error;
}
int posix_fallocate(int fd, off_t off, off_t bytes) { return do_allocate(fd, off, bytes); }
int posix_fallocate64(int fd, off_t off, off_t bytes) { return do_allocate(fd, off, bytes); }

static int do_fallocate(int fd, int mode, off_t off, off_t bytes)
{
    int error = mode ? EOPNOTSUPP : do_allocate(fd, off, bytes); /* others are not recorded */
    if (error)
        errno = error;
    return error ? -1 : 0;
}
int fallocate(int fd, int mode, off_t off, off_t bytes)
{
    return do_fallocate(fd, mode, off, bytes);
}
int fallocate64(int fd, int mode, off_t off, off_t bytes)
{
    return do_fallocate(fd, mode, off, bytes);
}

/* What is open by the old name goes on under the new one. */
static void renamed(const char *from, const char *to)
{
    record(RENAME, from, to, strlen(to), 0);
    for (int fd = 0; fd < FDS; fd++)
        if (path_of[fd] && strcmp(path_of[fd], from) == 0) {
            free(path_of[fd]);
            path_of[fd] = strdup(to);
        }
}

static int names(enum kind kind, const char *from, const char *to, long call)
{
    if (ours(from) && fails())
        return -1;
    int status = (int)syscall(call, from, to);
    if (ours(from) && status == 0 && kind == RENAME)
        renamed(from, to);
    else if (ours(from) && status == 0)
        record(kind, from, to, strlen(to), 0);
    return status;
}
int rename(const char *from, const char *to) { return names(RENAME, from, to, SYS_rename); }

/* The engine renames a new store by renameat2, which it calls by its number. */
long syscall(long number, ...)
{
    static long (*_Atomic next)(long number, ...);
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(rest, long);
    va_end(rest);
    if (!next)
        next = (long (*)(long number, ...))dlsym(RTLD_NEXT, "syscall");
    const char *from = number == SYS_renameat2 ? (const char *)a[1] : "", *to = (const char *)a[3];
    bool recorded = *from && ours(from);
    if (recorded && fails())
        return -1;
    long status = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (recorded && status == 0)
        renamed(from, to);
    return status;
}

int link(const char *from, const char *to) { return names(LINK, from, to, SYS_link); }
int linkat(int a, const char *from, int b, const char *to, int flags)
{
    return ours(from) ? names(LINK, from, to, SYS_link)
                      : (int)syscall(SYS_linkat, a, from, b, to, flags);
}

static int do_unlink(const char *path)
{
    if (ours(path) && fails())
        return -1;
    int status = (int)syscall(SYS_unlink, path);
    if (ours(path) && status == 0)
        record(UNLINK, path, NULL, 0, 0);
    return status;
}
int unlink(const char *path) { return do_unlink(path); }

int mkdir(const char *path, mode_t mode)
{
    if (ours(path) && fails())
        return -1;
    int status = (int)syscall(SYS_mkdir, path, mode);
    if (ours(path) && status == 0)
        record(MKDIR, path, NULL, 0, 0);
    return status;
}
