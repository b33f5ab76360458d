#include "flush/transfer.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/checksum.h"
#include "base/layout.h"
#include "base/pages.h"
#include "flush/filling.h"
#include "flush/turns.h"
#include "seam/persist.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

/* ---- from file to file ---- */

struct pieces {
    struct pms_turns turns;
    struct pms_filling *fill;
    int in_fd, out_fd;
    const uint64_t *from, *to;
    uint64_t out_end;
    const uint32_t *expected;
    uint64_t *bad;
};

static int read_all(int fd, unsigned char *to, uint64_t bytes, uint64_t off, uint64_t *got,
                    struct pms_error *error)
{
    for (*got = 0; *got < bytes;) {
        ssize_t n = pread(fd, to + *got, bytes - *got, (off_t)(off + *got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return pms_fail_errno(error, "reading chunks of a tier");
        *got += (uint64_t)n;
        if (n == 0 || *got % PMS_PAGE)
            break; /* the end; with O_DIRECT nothing can be read from there */
    }
    return PMS_OK;
}

static uint64_t neighbours(const struct pms_turns *turns, uint64_t i, uint64_t most)
{
    const struct pieces *w = (const struct pieces *)turns;
    uint64_t n = 1;
    while (n < most && w->from[i + n] == w->from[i] + n * w->turns.item_bytes)
        n++;
    return n;
}

static int copy_piece(const struct pieces *w, uint64_t i, const unsigned char *piece, bool whole,
                      struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    uint64_t to = w->to[i], bytes = to >= w->out_end                        ? 0
                                    : w->out_end - to < w->turns.item_bytes ? w->out_end - to
                                                                            : w->turns.item_bytes;
    if (!whole)
        return pms_fail(error, PMS_E_CORRUPT, "the file of the chunk is too short");
    if (pms_crc32c(0, piece, w->turns.item_bytes) != w->expected[i])
        return pms_fail(error, PMS_E_CORRUPT, "the chunk's checksum is wrong");
    errno = pms_persist_pwrite(&p, w->out_fd, piece, bytes, to);
    return errno ? pms_fail_errno(error, "writing the restored store") : PMS_OK;
}

static int copy_pieces(struct pms_turns *turns, uint64_t i, uint64_t n, unsigned char *buffer,
                       struct pms_error *error)
{
    const struct pieces *w = (const struct pieces *)turns;
    uint64_t got;
    int status = read_all(w->in_fd, buffer, n * w->turns.item_bytes, w->from[i], &got, error);
    for (uint64_t k = 0; status == PMS_OK && k < n; k++) {
        status = copy_piece(w, i + k, buffer + k * w->turns.item_bytes,
                            got >= (k + 1) * w->turns.item_bytes, error);
        if (status == PMS_E_CORRUPT)
            __atomic_store_n(w->bad, i + k, __ATOMIC_RELAXED);
    }
    return status == PMS_OK ? pms_turns_proceed(w->turns.transfer, n * w->turns.item_bytes, error)
                            : status;
}

/* ---- from a file to where it belongs in memory ---- */

/* How many of n pieces lie in the new store with all their bytes, and where. Those one after
 * another are one stretch. */
static uint64_t places(const struct pieces *w, uint64_t i, uint64_t n, struct iovec *iov,
                       int *count)
{
    uint64_t end = 0, k = 0, all = pms_filling_bytes(w->fill);
    for (*count = 0; k < n && *count < IOV_MAX && w->to[i + k] < all &&
                     all - w->to[i + k] >= w->turns.item_bytes;
         k++) {
        if (k && w->to[i + k] == end)
            iov[*count - 1].iov_len += w->turns.item_bytes;
        else
            iov[(*count)++] = (struct iovec){pms_filling_at(w->fill, w->to[i + k]),
                                             w->turns.item_bytes};
        end = w->to[i + k] + w->turns.item_bytes;
    }
    return k;
}

static int check_pieces(const struct pieces *w, uint64_t i, uint64_t n, uint64_t got,
                        struct pms_error *error)
{
    for (uint64_t k = 0; k < n; k++) {
        bool whole = got >= (k + 1) * w->turns.item_bytes;
        if (whole && pms_crc32c(0, pms_filling_at(w->fill, w->to[i + k]), w->turns.item_bytes) ==
                         w->expected[i + k])
            continue;
        __atomic_store_n(w->bad, i + k, __ATOMIC_RELAXED);
        return pms_fail(error, PMS_E_CORRUPT,
                        whole ? "the chunk's checksum is wrong"
                              : "the file of the chunk is too short");
    }
    return PMS_OK;
}

/* What does not lie in it with all its bytes goes through the buffer. */
static int land_pieces(struct pms_turns *turns, uint64_t i, uint64_t n, unsigned char *buffer,
                       struct pms_error *error)
{
    const struct pieces *w = (const struct pieces *)turns;
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    struct iovec iov[IOV_MAX];
    int count, status = PMS_OK;
    uint64_t got, here = places(w, i, n, iov, &count);
    for (int k = 0; status == PMS_OK && k < count; k++)
        status = pms_filling_room(
            w->fill, (uint64_t)((unsigned char *)iov[k].iov_base - pms_filling_at(w->fill, 0)),
            iov[k].iov_len, 1, w->turns.transfer, error);
    if (status != PMS_OK)
        return status;
    if (here) {
        errno = pms_persist_preadv(&p, w->in_fd, iov, count, w->from[i], &got);
        status = errno ? pms_fail_errno(error, "reading chunks of a tier")
                       : check_pieces(w, i, here, got, error);
    }
    if (status == PMS_OK && here)
        status = pms_turns_proceed(w->turns.transfer, here * w->turns.item_bytes, error);
    return status == PMS_OK && here < n ? copy_pieces(turns, i + here, n - here, buffer, error)
                                        : status;
}

int pms_transfer_copy(int in_fd, const uint64_t *from, int out_fd, struct pms_filling *fill,
                      const uint64_t *to, const uint32_t *crc, uint64_t count, uint64_t piece_bytes,
                      uint64_t out_end, uint64_t *bad, struct pms_transfer *transfer,
                      struct pms_error *error)
{
    struct pieces w = {
        .turns = {.carry = fill ? land_pieces : copy_pieces,
                  .together = neighbours,
                  .count = count,
                  .batch = piece_bytes < PMS_TURNS_BATCH ? PMS_TURNS_BATCH / piece_bytes : 1,
                  .item_bytes = piece_bytes,
                  .transfer = transfer},
        .fill = fill,
        .in_fd = in_fd,
        .from = from,
        .out_fd = out_fd,
        .to = to,
        .expected = crc,
        .out_end = out_end,
        .bad = bad};
    return pms_turns_run(&w.turns, error);
}

/* ---- the file itself ---- */

int pms_transfer_reserve(int fd, uint64_t bytes, struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    errno = bytes ? pms_persist_reserve(&p, fd, 0, bytes) : 0;
    return !errno || PMS_CANNOT_RESERVE(errno)
               ? PMS_OK
               : pms_fail_errno(error, "allocating room for chunks in a tier");
}

void pms_transfer_read_ahead(const void *at, uint64_t bytes)
{
    uint64_t from = pms_page_down((uintptr_t)at), to = pms_page_up((uintptr_t)at + bytes);
    (void)madvise((void *)(uintptr_t)from, to - from, MADV_POPULATE_READ);
}

int pms_transfer_sync(int fd, struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    return pms_persist_sync(&p, fd, "writing a tier's file to its disk", error);
}

uint32_t pms_checksum(uint32_t crc, const void *data, uint64_t bytes)
{
    return pms_crc32c(crc, data, bytes);
}
