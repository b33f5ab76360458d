/* The seam's file half. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/layout.h"
#include "base/pages.h"
#include "seam/huge.h"
#include "seam/persist.h"

_Thread_local int pms_persist_hook_fd;

static int hook(enum pms_primitive primitive, int fd, uintptr_t addr, size_t bytes)
{
    pms_persist_hook_fn *call = atomic_load_explicit(&pms_persist_hook, memory_order_relaxed);
    if (__builtin_expect(call == NULL, 1))
        return 0;
    pms_persist_hook_fd = fd;
    return call(primitive, addr, bytes);
}

int pms_persist_pwrite(struct pms_persist *p, int fd, const void *data, size_t n, uint64_t offset)
{
    struct iovec one = {(void *)(uintptr_t)data, n};
    return pms_persist_pwritev(p, fd, &one, 1, offset);
}

/* Steps over what was written. */
static void advance(struct iovec **iov, int *count, size_t done)
{
    while (*count && done >= (*iov)->iov_len) {
        done -= (*iov)->iov_len;
        (*iov)++;
        (*count)--;
    }
    if (*count) {
        (*iov)->iov_base = (char *)(*iov)->iov_base + done;
        (*iov)->iov_len -= done;
    }
}

int pms_persist_pwritev(struct pms_persist *p, int fd, struct iovec *iov, int count,
                        uint64_t offset)
{
    (void)p;
    size_t total = 0;
    for (int i = 0; i < count; i++)
        total += iov[i].iov_len;
    int err = hook(PMS_PRIM_PWRITE, fd, (uintptr_t)offset, total);
    if (err)
        return err;
    advance(&iov, &count, 0);
    while (count) {
        ssize_t n = pwritev(fd, iov, count < IOV_MAX ? count : IOV_MAX, (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno;
        if (n == 0)
            return EIO;
        offset += (uint64_t)n;
        advance(&iov, &count, (size_t)n);
    }
    return 0;
}

/* Where a read ends between pages is the end of the file: with O_DIRECT nothing can be read from
 * there. */
int pms_persist_preadv(struct pms_persist *p, int fd, struct iovec *iov, int count, uint64_t offset,
                       uint64_t *done)
{
    (void)p;
    size_t total = 0;
    for (int i = 0; i < count; i++)
        total += iov[i].iov_len;
    *done = 0;
    (void)hook(PMS_PRIM_COPY, -1, (uintptr_t)iov->iov_base, total);
    while (*done < total) {
        ssize_t n = preadv(fd, iov, count < IOV_MAX ? count : IOV_MAX, (off_t)(offset + *done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno;
        *done += (uint64_t)n;
        if (n == 0 || *done % PMS_PAGE)
            break;
        advance(&iov, &count, (size_t)n);
    }
    return 0;
}

ssize_t pms_persist_read(int fd, void *to, size_t n, uint64_t offset)
{
    size_t done = 0;
    while (done < n) {
        ssize_t got = pread(fd, (unsigned char *)to + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return -1;
        if (got == 0)
            break;
        done += (size_t)got;
    }
    return (ssize_t)done;
}

int pms_persist_sync(struct pms_persist *p, int fd, const char *what, struct pms_error *error)
{
    int err = hook(PMS_PRIM_SYNC, fd, 0, 0);
    p->syncs += err == 0;
    while (!err && fdatasync(fd) != 0)
        err = errno == EINTR ? 0 : errno;
    if (!err)
        return PMS_OK;
    p->failed_syncs++;
    int status = pms_fail(error, PMS_E_OS, "%s", what);
    if (error)
        error->sys_errno = err;
    return status;
}

bool pms_persist_send(struct pms_persist *p, int fd, bool start, bool wait)
{
    unsigned int flags = SYNC_FILE_RANGE_WAIT_BEFORE;
    flags |= start ? SYNC_FILE_RANGE_WRITE : 0u;
    flags |= wait ? SYNC_FILE_RANGE_WAIT_AFTER : 0u;
    int err = hook(PMS_PRIM_SYNC, fd, 0, 0);
    if (!err && sync_file_range(fd, 0, 0, flags) != 0)
        err = errno;
    bool lost = err == EIO || err == ENOSPC || err == EDQUOT;
    p->failed_syncs += lost;
    return !lost;
}

int pms_persist_allocate(struct pms_persist *p, int fd, uint64_t offset, uint64_t bytes)
{
    (void)p;
    int err = hook(PMS_PRIM_ALLOCATE, fd, (uintptr_t)offset, (size_t)bytes);
    if (err)
        return err;
    do
        err = posix_fallocate(fd, (off_t)offset, (off_t)bytes);
    while (err == EINTR);
    return err;
}

static int reserve(int fd, uint64_t offset, uint64_t bytes)
{
    while (fallocate(fd, 0, (off_t)offset, (off_t)bytes) != 0)
        if (errno != EINTR)
            return errno;
    return 0;
}

int pms_persist_reserve(struct pms_persist *p, int fd, uint64_t offset, uint64_t bytes)
{
    (void)p;
    int err = hook(PMS_PRIM_ALLOCATE, fd, (uintptr_t)offset, (size_t)bytes);
    return err ? err : reserve(fd, offset, bytes);
}

int pms_persist_make(struct pms_persist *p, int fd, unsigned char *mapped, uint64_t offset,
                     uint64_t bytes)
{
    (void)p;
    uint64_t from = pms_huge_up(offset), to = pms_huge_down(offset + bytes);
    int err = hook(PMS_PRIM_ALLOCATE, fd, (uintptr_t)offset, (size_t)bytes);
    if (!err && from < to && pms_huge_fits(fd, bytes))
        (void)pms_huge_make(mapped + from, to - from);
    return err ? err : reserve(fd, offset, bytes);
}

int pms_persist_truncate(struct pms_persist *p, int fd, uint64_t bytes)
{
    (void)p;
    int err = hook(PMS_PRIM_ALLOCATE, fd, (uintptr_t)bytes, 0);
    if (err)
        return err;
    while (ftruncate(fd, (off_t)bytes) != 0)
        if (errno != EINTR)
            return errno;
    return 0;
}

void pms_persist_forget(int fd, uint64_t offset, uint64_t bytes)
{
    (void)posix_fadvise(fd, (off_t)offset, (off_t)bytes, POSIX_FADV_DONTNEED);
}

/* In the fault handler: must not be failed by a hook that means files. */
int pms_persist_protect(struct pms_persist *p, void *addr, size_t n, int prot)
{
    (void)p;
    int err = hook(PMS_PRIM_PROTECT, -1, (uintptr_t)addr, n);
    if (err)
        return err;
    return mprotect(addr, n, prot) == 0 ? 0 : errno;
}

int pms_persist_map(struct pms_persist *p, void *addr, size_t n, int prot, int flags, int fd,
                    uint64_t offset)
{
    (void)p;
    int err = hook(PMS_PRIM_MAP, fd, (uintptr_t)addr, n);
    if (err)
        return err;
    return mmap(addr, n, prot, flags | MAP_FIXED, fd, (off_t)offset) == MAP_FAILED ? errno : 0;
}
