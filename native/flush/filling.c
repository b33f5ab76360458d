#include "flush/filling.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include "base/layout.h"
#include "base/lock.h"
#include "base/pages.h"
#include "seam/persist.h"
#include "flush/transfer.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define TMPFS_TYPE 0x01021994

/* Of a block: */
enum { BARE, AT_IT, READY };

struct pms_filling {
    struct pms_persist persist;
    unsigned char *map; /* on a boundary of huge pages, in `raw` */
    void *raw;
    uint64_t bytes, raw_bytes;
    int fd;
    _Atomic uint32_t state[]; /* of each block: what waits for it waits here */
};

static bool in_memory(int fd)
{
    struct statfs s;
    return fstatfs(fd, &s) == 0 && (uint64_t)s.f_type == TMPFS_TYPE;
}

int pms_filling_open(int fd, uint64_t bytes, struct pms_filling **out, struct pms_error *error)
{
    *out = NULL;
    if (!in_memory(fd) || bytes < PMS_PAGE)
        return PMS_OK;
    uint64_t blocks = (bytes + PMS_FILLING_BLOCK - 1) / PMS_FILLING_BLOCK;
    struct pms_filling *f = calloc(1, sizeof *f + blocks * sizeof f->state[0]);
    if (!f)
        return pms_fail_errno(error, "allocating memory");
    f->fd = fd;
    f->bytes = bytes;
    f->raw_bytes = bytes + PMS_HUGE;
    f->raw = mmap(NULL, f->raw_bytes, PROT_NONE, PMS_RESERVED, -1, 0);
    if (f->raw == MAP_FAILED) {
        int status = errno == ENOMEM
                         ? PMS_OK
                         : pms_fail_errno(error, "reserving address space for the restored store");
        free(f);
        return status;
    }
    f->map = (unsigned char *)pms_huge_up((uintptr_t)f->raw);
    errno = pms_persist_truncate(&f->persist, fd, bytes);
    if (!errno)
        errno = pms_persist_map(&f->persist, f->map, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                                0);
    if (errno) {
        int status = errno == ENOMEM ? PMS_OK : pms_fail_errno(error, "mapping the restored store");
        pms_filling_close(f);
        return status;
    }
    if (madvise(f->map, PMS_PAGE, MADV_POPULATE_WRITE) != 0 && errno == EINVAL)
        pms_filling_close(f);
    else
        *out = f;
    return PMS_OK;
}

void pms_filling_close(struct pms_filling *f)
{
    munmap(f->raw, f->raw_bytes);
    free(f);
}

uint64_t pms_filling_bytes(const struct pms_filling *f) { return f->bytes; }
unsigned char *pms_filling_at(const struct pms_filling *f, uint64_t off) { return f->map + off; }

/* One page of each huge page, then all of them at once: the kernel makes huge pages of what is
 * partly there, whatever it does at faults. It may have none, or not know how; the reservation
 * after it is what counts. */
static int make_room(struct pms_filling *f, uint64_t off, uint64_t bytes, int filled)
{
    for (uint64_t at = off; filled && at + PMS_HUGE <= off + bytes; at += PMS_HUGE)
        (void)madvise(f->map + at, PMS_PAGE, MADV_POPULATE_WRITE);
    if (filled)
        (void)madvise(f->map + off, bytes, MADV_COLLAPSE);
    int err = pms_persist_reserve(&f->persist, f->fd, off, bytes);
    if (!PMS_CANNOT_RESERVE(err))
        return err;
    if (madvise(f->map + off, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    return errno == EFAULT ? ENOSPC : errno; /* of a file that is long enough: there was no room */
}

static int room_of_block(struct pms_filling *f, uint64_t block, int filled, struct pms_error *error)
{
    for (;;) {
        uint32_t seen = BARE;
        if (atomic_compare_exchange_strong(&f->state[block], &seen, AT_IT)) {
            uint64_t off = block * PMS_FILLING_BLOCK;
            errno = make_room(
                f, off, f->bytes - off < PMS_FILLING_BLOCK ? f->bytes - off : PMS_FILLING_BLOCK,
                filled);
            int status = errno ? pms_fail_errno(error, "making room for the restored store")
                               : PMS_OK;
            /* whoever waits tries, and fails, itself */
            atomic_store(&f->state[block], status ? BARE : READY);
            pms_futex_wake(&f->state[block], 64);
            return status;
        }
        if (seen == READY)
            return PMS_OK;
        pms_futex_wait(&f->state[block], AT_IT, -1);
    }
}

int pms_filling_room(struct pms_filling *f, uint64_t off, uint64_t bytes, int filled,
                     const struct pms_transfer *transfer, struct pms_error *error)
{
    PMS_ASSERT(bytes > 0 && off < f->bytes && bytes <= f->bytes - off);
    for (uint64_t block = off / PMS_FILLING_BLOCK; block <= (off + bytes - 1) / PMS_FILLING_BLOCK;
         block++) {
        if (__atomic_load_n(&transfer->cancel, __ATOMIC_RELAXED))
            return pms_fail(error, PMS_E_STATE, "cancelled");
        int status = room_of_block(f, block, filled, error);
        if (status != PMS_OK) {
            if (error)
                error->needed = f->bytes;
            return status;
        }
    }
    return PMS_OK;
}
