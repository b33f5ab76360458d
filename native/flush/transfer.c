#include "flush/transfer.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/checksum.h"
#include "flush/filling.h"
#include "base/layout.h"
#include "base/lock.h"
#include "base/pages.h"
#include "seam/persist.h"
#include "base/quiet.h"
#include "log/snapshot.h"

/* two copy and check while the disk has two requests to choose from */
#define THREADS 4u
#define BATCH_BYTES (4ull << 20) /* of one read or write */
#define BATCH_LEAST (1ull << 20) /* is not worth another thread */
#define BATCH_MOST (BATCH_BYTES / PMS_PAGE)
#define BATCHES_A_SECOND 16u /* at least, where the rate is limited: an even stream */
#define STACK_BYTES (256u << 10)

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* Counts, keeps to the rate, and stops when told to. */
static int proceed(struct pms_transfer *t, uint64_t bytes, struct pms_error *error)
{
    uint64_t zero = 0;
    __atomic_compare_exchange_n(&t->started_ns, &zero, now_ns(), false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
    uint64_t done = __atomic_add_fetch(&t->done_bytes, bytes, __ATOMIC_RELAXED);
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

/* ---- threads that take turns ---- */

/* What one call has to do. `carry` moves items i to i + n through a buffer of batch *
 * item_bytes; `together` says how many from i on, of at most `most`, can be carried at once. */
struct work {
    int (*carry)(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                 struct pms_error *error);
    uint64_t (*together)(const struct work *w, uint64_t i, uint64_t most);
    uint64_t count, batch, item_bytes;
    struct pms_transfer *transfer;
    struct pms_lock lock; /* of what follows */
    uint64_t next;        /* first item that nobody has taken */
    int status;           /* of the first that failed */
    struct pms_error error;

    struct pms_snapshot *snapshot;
    struct pms_filling *fill;
    int in_fd, out_fd;
    const uint64_t *from, *to;
    uint64_t at, out_end;
    const uint32_t *expected;
    uint32_t *crc;
    uint64_t *bad;
};

static bool take(struct work *w, uint64_t *i, uint64_t *n)
{
    pms_lock_acquire(&w->lock);
    bool more = w->status == PMS_OK && w->next < w->count;
    if (more) {
        *i = w->next;
        *n = w->together(w, *i, w->count - *i < w->batch ? w->count - *i : w->batch);
        w->next += *n;
    }
    pms_lock_release(&w->lock);
    return more;
}

static void fail_work(struct work *w, int status, const struct pms_error *error)
{
    pms_lock_acquire(&w->lock);
    if (w->status == PMS_OK) {
        w->status = status;
        w->error = *error;
    }
    pms_lock_release(&w->lock);
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
    struct work *w = arg;
    struct pms_error error = {0};
    void *raw;
    uint64_t raw_bytes, i, n;
    unsigned char *buffer = buffer_make(w->batch * w->item_bytes, &raw, &raw_bytes);
    if (!buffer) {
        int status = pms_fail_errno(&error, "allocating memory");
        fail_work(w, status, &error);
        return NULL;
    }
    while (take(w, &i, &n)) {
        int status = w->carry(w, i, n, buffer, &error);
        if (status != PMS_OK)
            fail_work(w, status, &error);
    }
    munmap(raw, raw_bytes);
    return NULL;
}

static int run_all(struct work *w, struct pms_error *error)
{
    pthread_t other[THREADS];
    uint64_t others = 0, batches = (w->count + w->batch - 1) / w->batch;
    sigset_t most, before;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    sigfillset(&most);
    sigdelset(&most, SIGSEGV);
    sigdelset(&most, SIGBUS);
    /* inherited: no handler of the program's ever runs in them */
    pthread_sigmask(SIG_SETMASK, &most, &before);
    while (others + 1 < THREADS && others + 1 < batches &&
           pthread_create(&other[others], &attr, run, w) == 0)
        others++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    run(w);
    while (others)
        pthread_join(other[--others], NULL);
    if (w->status != PMS_OK && error)
        *error = w->error;
    return w->status;
}

/* ---- out of a snapshot ---- */

int pms_snapshot_take(struct pms_snapshot *s, uint64_t off, uint64_t bytes, void *dst, int release,
                      struct pms_error *error)
{
    int status = pms_snapshot_read(s, off, bytes, dst, error);
    if (status == PMS_OK && release)
        pms_snapshot_release(s, off, bytes);
    return status;
}

static uint64_t all_of_them(const struct work *w, uint64_t i, uint64_t most)
{
    (void)w;
    (void)i;
    return most;
}

/* Chunks in one write. */
struct outgoing {
    struct iovec iov[BATCH_MOST];
    bool in_place[BATCH_MOST];
    int count; /* of iov: neighbours are one */
};

static int copy_chunk(const struct work *w, uint64_t i, unsigned char *to, struct pms_error *error)
{
    int status = pms_snapshot_take(w->snapshot, w->from[i] * w->item_bytes, w->item_bytes, to, 1,
                                   error);
    if (status == PMS_OK)
        w->crc[i] = pms_crc32c(0, to, w->item_bytes);
    return status;
}

static int gather_chunks(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                         struct outgoing *o, struct pms_error *error)
{
    const unsigned char *end = NULL; /* of what iov has */
    o->count = 0;
    for (uint64_t k = 0; k < n; k++) {
        const unsigned char *from;
        o->in_place[k] = pms_snapshot_in_place(w->snapshot, w->from[i + k] * w->item_bytes,
                                               w->item_bytes, &from, &w->crc[i + k]);
        if (!o->in_place[k]) {
            int status = copy_chunk(w, i + k, buffer + k * w->item_bytes, error);
            if (status != PMS_OK)
                return status;
            from = buffer + k * w->item_bytes;
        }
        if (from == end)
            o->iov[o->count - 1].iov_len += w->item_bytes;
        else
            o->iov[o->count++] = (struct iovec){(void *)(uintptr_t)from, w->item_bytes};
        end = from + w->item_bytes;
    }
    return PMS_OK;
}

static int put(const struct work *w, uint64_t i, uint64_t n, const unsigned char *from,
               struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    errno = pms_persist_pwrite(&p, w->out_fd, from, n * w->item_bytes, w->at + i * w->item_bytes);
    return errno ? pms_fail_errno(error, "writing chunks to a tier") : PMS_OK;
}

/* What was written in place is as of the snapshot, or written once more, from a copy. */
static int settle_chunks(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                         const struct outgoing *o, struct pms_error *error)
{
    const unsigned char *at;
    int status = PMS_OK;
    for (uint64_t k = 0; k < n && status == PMS_OK; k++) {
        uint64_t off = w->from[i + k] * w->item_bytes;
        unsigned char *copy = buffer + k * w->item_bytes;
        if (!o->in_place[k])
            continue;
        if (pms_snapshot_in_place(w->snapshot, off, w->item_bytes, &at, NULL)) {
            pms_snapshot_release(w->snapshot, off, w->item_bytes);
            continue;
        }
        status = copy_chunk(w, i + k, copy, error);
        if (status == PMS_OK)
            status = put(w, i + k, 1, copy, error);
    }
    return status;
}

/* Where the kernel did not write them in place, whatever the reason: copied. An error of the
 * file comes again. */
static int put_copies(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                      const struct outgoing *o, struct pms_error *error)
{
    int status = PMS_OK;
    for (uint64_t k = 0; k < n && status == PMS_OK; k++)
        if (o->in_place[k])
            status = copy_chunk(w, i + k, buffer + k * w->item_bytes, error);
    return status == PMS_OK ? put(w, i, n, buffer, error) : status;
}

/* Chunks that nobody has written to since the snapshot go to the file from where they are: half
 * the processor time of copying them. */
static int put_chunks(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                      struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    struct outgoing o;
    PMS_ASSERT(n <= BATCH_MOST);
    int status = gather_chunks(w, i, n, buffer, &o, error);
    if (status != PMS_OK)
        return status;
    pms_quiet_begin();
    int err = pms_persist_pwritev(&p, w->out_fd, o.iov, o.count, w->at + i * w->item_bytes);
    pms_quiet_end();
    return err ? put_copies(w, i, n, buffer, &o, error) : settle_chunks(w, i, n, buffer, &o, error);
}

static int write_chunks(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                        struct pms_error *error)
{
    int status = proceed(w->transfer, n * w->item_bytes, error);
    return status == PMS_OK ? put_chunks(w, i, n, buffer, error) : status;
}

int pms_snapshot_write(struct pms_snapshot *s, int fd, uint64_t chunk_bytes, const uint64_t *chunk,
                       uint64_t count, uint64_t at, uint32_t *crc, struct pms_transfer *transfer,
                       struct pms_error *error)
{
    if (!chunk_bytes || chunk_bytes % PMS_PAGE)
        return pms_fail(error, PMS_E_INVALID, "chunks are whole pages");
    uint64_t rate = __atomic_load_n(&transfer->bytes_per_second, __ATOMIC_RELAXED);
    uint64_t most = rate && rate / BATCHES_A_SECOND < BATCH_BYTES ? rate / BATCHES_A_SECOND
                                                                  : BATCH_BYTES;
    uint64_t share = count * chunk_bytes / THREADS; /* few are dealt out to all */
    if (share < BATCH_LEAST)
        share = BATCH_LEAST;
    most = share < most ? share : most;
    struct work w = {.carry = write_chunks,
                     .together = all_of_them,
                     .count = count,
                     .batch = chunk_bytes < most ? most / chunk_bytes : 1,
                     .item_bytes = chunk_bytes,
                     .transfer = transfer,
                     .snapshot = s,
                     .out_fd = fd,
                     .from = chunk,
                     .at = at,
                     .crc = crc};
    return run_all(&w, error);
}

/* ---- from file to file ---- */

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

static uint64_t neighbours(const struct work *w, uint64_t i, uint64_t most)
{
    uint64_t n = 1;
    while (n < most && w->from[i + n] == w->from[i] + n * w->item_bytes)
        n++;
    return n;
}

static int copy_piece(const struct work *w, uint64_t i, const unsigned char *piece, bool whole,
                      struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    uint64_t to = w->to[i], bytes = to >= w->out_end                  ? 0
                                    : w->out_end - to < w->item_bytes ? w->out_end - to
                                                                      : w->item_bytes;
    if (!whole)
        return pms_fail(error, PMS_E_CORRUPT, "the file of the chunk is too short");
    if (pms_crc32c(0, piece, w->item_bytes) != w->expected[i])
        return pms_fail(error, PMS_E_CORRUPT, "the chunk's checksum is wrong");
    errno = pms_persist_pwrite(&p, w->out_fd, piece, bytes, to);
    return errno ? pms_fail_errno(error, "writing the restored store") : PMS_OK;
}

static int copy_pieces(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                       struct pms_error *error)
{
    uint64_t got;
    int status = read_all(w->in_fd, buffer, n * w->item_bytes, w->from[i], &got, error);
    for (uint64_t k = 0; status == PMS_OK && k < n; k++) {
        status = copy_piece(w, i + k, buffer + k * w->item_bytes, got >= (k + 1) * w->item_bytes,
                            error);
        if (status == PMS_E_CORRUPT)
            __atomic_store_n(w->bad, i + k, __ATOMIC_RELAXED);
    }
    return status == PMS_OK ? proceed(w->transfer, n * w->item_bytes, error) : status;
}

/* ---- from a file to where it belongs in memory ---- */

/* How many of n pieces lie in the new store with all their bytes, and where. Those one after
 * another are one stretch. */
static uint64_t places(const struct work *w, uint64_t i, uint64_t n, struct iovec *iov, int *count)
{
    uint64_t end = 0, k = 0, all = pms_filling_bytes(w->fill);
    for (*count = 0;
         k < n && *count < IOV_MAX && w->to[i + k] < all && all - w->to[i + k] >= w->item_bytes;
         k++) {
        if (k && w->to[i + k] == end)
            iov[*count - 1].iov_len += w->item_bytes;
        else
            iov[(*count)++] = (struct iovec){pms_filling_at(w->fill, w->to[i + k]), w->item_bytes};
        end = w->to[i + k] + w->item_bytes;
    }
    return k;
}

static int check_pieces(const struct work *w, uint64_t i, uint64_t n, uint64_t got,
                        struct pms_error *error)
{
    for (uint64_t k = 0; k < n; k++) {
        bool whole = got >= (k + 1) * w->item_bytes;
        if (whole && pms_crc32c(0, pms_filling_at(w->fill, w->to[i + k]), w->item_bytes) ==
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
static int land_pieces(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                       struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    struct iovec iov[IOV_MAX];
    int count, status = PMS_OK;
    uint64_t got, here = places(w, i, n, iov, &count);
    for (int k = 0; status == PMS_OK && k < count; k++)
        status = pms_filling_room(
            w->fill, (uint64_t)((unsigned char *)iov[k].iov_base - pms_filling_at(w->fill, 0)),
            iov[k].iov_len, 1, w->transfer, error);
    if (status != PMS_OK)
        return status;
    if (here) {
        errno = pms_persist_preadv(&p, w->in_fd, iov, count, w->from[i], &got);
        status = errno ? pms_fail_errno(error, "reading chunks of a tier")
                       : check_pieces(w, i, here, got, error);
    }
    if (status == PMS_OK && here)
        status = proceed(w->transfer, here * w->item_bytes, error);
    return status == PMS_OK && here < n ? copy_pieces(w, i + here, n - here, buffer, error)
                                        : status;
}

int pms_transfer_copy(int in_fd, const uint64_t *from, int out_fd, struct pms_filling *fill,
                      const uint64_t *to, const uint32_t *crc, uint64_t count, uint64_t piece_bytes,
                      uint64_t out_end, uint64_t *bad, struct pms_transfer *transfer,
                      struct pms_error *error)
{
    struct work w = {.carry = fill ? land_pieces : copy_pieces,
                     .fill = fill,
                     .together = neighbours,
                     .count = count,
                     .batch = piece_bytes < BATCH_BYTES ? BATCH_BYTES / piece_bytes : 1,
                     .item_bytes = piece_bytes,
                     .transfer = transfer,
                     .in_fd = in_fd,
                     .from = from,
                     .out_fd = out_fd,
                     .to = to,
                     .expected = crc,
                     .out_end = out_end,
                     .bad = bad};
    return run_all(&w, error);
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

int pms_transfer_sync(int fd, struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    errno = pms_persist_sync(&p, fd);
    return errno ? pms_fail_errno(error, "syncing a tier's file") : PMS_OK;
}

uint32_t pms_checksum(uint32_t crc, const void *data, uint64_t bytes)
{
    return pms_crc32c(crc, data, bytes);
}
