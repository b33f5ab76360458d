#include "flush/filling.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "base/layout.h"
#include "base/lock.h"
#include "base/pages.h"
#include "seam/huge.h"
#include "seam/persist.h"
#include "flush/transfer.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Of a block: */
enum { BARE, AT_IT, READY };

struct pms_filling {
    struct pms_persist persist;
    unsigned char *map; /* on a boundary of huge pages, in `raw` */
    void *raw;
    uint64_t bytes, raw_bytes;
    int fd;
    /* processor time of the last block on huge pages, of the last one without */
    _Atomic uint64_t huge_ns, plain_ns;
    _Atomic uint32_t state[]; /* of each block: what waits for it waits here */
};

int pms_filling_open(int fd, uint64_t bytes, struct pms_filling **out, struct pms_error *error)
{
    *out = NULL;
    if (!pms_huge_in_memory(fd) || bytes < PMS_PAGE)
        return PMS_OK;
    uint64_t blocks = (bytes + PMS_FILLING_BLOCK - 1) / PMS_FILLING_BLOCK;
    struct pms_filling *f = calloc(1, sizeof *f + blocks * sizeof f->state[0]);
    if (!f)
        return pms_fail_errno(error, "allocating memory");
    f->fd = fd;
    f->bytes = bytes;
    atomic_init(&f->huge_ns, UINT64_MAX); /* none yet */
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

static uint64_t spent_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static int reserve(struct pms_filling *f, uint64_t off, uint64_t bytes)
{
    int err = bytes ? pms_persist_reserve(&f->persist, f->fd, off, bytes) : 0;
    if (!PMS_CANNOT_RESERVE(err))
        return err;
    if (madvise(f->map + off, bytes, MADV_POPULATE_WRITE) == 0)
        return 0;
    return errno == EFAULT ? ENOSPC : errno; /* of a file that is long enough: there was no room */
}

/* What is there already is not reserved once more: the kernel lets one thread of a file at a time,
 * and another may be at it for long. Room that is only set aside: pages that the kernel makes one
 * by one are not touched, huge ones are zeroed, which takes a third of the time where the machine
 * has its memory, and ten times of it where a host has to find some. So what the last block of each
 * kind took decides. */
static int make_room(struct pms_filling *f, uint64_t off, uint64_t bytes, int filled)
{
    bool huge = filled || atomic_load(&f->huge_ns) < atomic_load(&f->plain_ns);
    uint64_t begun = spent_ns(), whole = huge ? pms_huge_down(bytes) : 0;
    uint64_t there = whole && pms_huge_make(f->map + off, whole) ? whole : 0;
    if (huge && bytes == PMS_FILLING_BLOCK)
        atomic_store(&f->huge_ns, there == bytes ? spent_ns() - begun : UINT64_MAX);
    int err = reserve(f, off + there, bytes - there);
    if (!huge && bytes == PMS_FILLING_BLOCK)
        atomic_store(&f->plain_ns, spent_ns() - begun);
    return err;
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
