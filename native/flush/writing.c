/* Chunks of a snapshot on their way to a file of a tier. */
#include <errno.h>
#include <limits.h>
#include <stdbool.h>

#include "base/checksum.h"
#include "base/layout.h"
#include "base/quiet.h"
#include "flush/turns.h"
#include "log/snapshot.h"
#include "seam/persist.h"

#define BATCH_LEAST (1ull << 20) /* is not worth another thread */
#define BATCH_MOST (PMS_TURNS_BATCH / PMS_PAGE)
#define BATCHES_A_SECOND 16u /* at least, where the rate is limited: an even stream */

struct work {
    struct pms_turns turns;
    struct pms_snapshot *snapshot;
    int fd;
    const uint64_t *chunk;
    const int64_t *known;
    uint32_t *crc;
    uint64_t *position;
    uint64_t at, end; /* of the file: where it begins, and (under the lock) what is taken */
};

int pms_snapshot_give_up(struct pms_snapshot *s, uint64_t off, uint64_t bytes,
                         struct pms_error *error)
{
    if (off % PMS_PAGE || bytes % PMS_PAGE)
        return pms_fail(error, PMS_E_INVALID, "whole pages are given up");
    pms_snapshot_release(s, off, bytes);
    return PMS_OK;
}

int pms_snapshot_take(struct pms_snapshot *s, uint64_t off, uint64_t bytes, void *dst, int release,
                      struct pms_error *error)
{
    int status = pms_snapshot_read(s, off, bytes, dst, error);
    if (status == PMS_OK && release)
        pms_snapshot_release(s, off, bytes);
    return status;
}

static uint64_t all_of_them(const struct pms_turns *t, uint64_t i, uint64_t most)
{
    (void)t;
    (void)i;
    return most;
}

/* Chunks in one write: the k-th of them is item which[k], and if it is copied it lies in the k-th
 * place of the buffer. */
struct outgoing {
    uint64_t which[BATCH_MOST];
    bool in_place[BATCH_MOST];
    uint64_t chunks;
    struct iovec iov[BATCH_MOST];
    int count; /* of iov: neighbours are one */
    uint64_t at;
};

static int copy_chunk(const struct work *w, uint64_t i, unsigned char *to, int release,
                      struct pms_error *error)
{
    uint64_t bytes = w->turns.item_bytes;
    int status = pms_snapshot_take(w->snapshot, w->chunk[i] * bytes, bytes, to, release, error);
    if (status == PMS_OK)
        w->crc[i] = pms_crc32c(0, to, bytes);
    return status;
}

static void add_chunk(struct outgoing *o, uint64_t i, const unsigned char *from, uint64_t bytes)
{
    struct iovec *last = &o->iov[o->count - (o->count > 0)];
    o->which[o->chunks++] = i;
    if (o->count && (const unsigned char *)last->iov_base + last->iov_len == from)
        last->iov_len += bytes;
    else
        o->iov[o->count++] = (struct iovec){(void *)(uintptr_t)from, bytes};
}

/* All but those that are known. Of one in place the checksum may be of a mixture: if that is the
 * known one, the caller looks at the chunk itself. */
static int gather_chunks(const struct work *w, uint64_t i, uint64_t n, unsigned char *buffer,
                         struct outgoing *o, struct pms_error *error)
{
    uint64_t bytes = w->turns.item_bytes;
    o->count = 0;
    o->chunks = 0;
    for (uint64_t end = i + n; i < end; i++) {
        const unsigned char *from;
        unsigned char *copy = buffer + o->chunks * bytes;
        bool in_place = pms_snapshot_in_place(w->snapshot, w->chunk[i] * bytes, bytes, &from,
                                              &w->crc[i]);
        if (!in_place) {
            int status = copy_chunk(w, i, copy, !w->known, error);
            if (status != PMS_OK)
                return status;
            from = copy;
        }
        if (w->known && w->known[i] == (int64_t)w->crc[i])
            continue;
        if (!in_place && w->known)
            pms_snapshot_release(w->snapshot, w->chunk[i] * bytes, bytes);
        o->in_place[o->chunks] = in_place;
        add_chunk(o, i, from, bytes);
    }
    return PMS_OK;
}

/* Where they go: without known ones each has its place, whoever comes first. */
static void find_room(struct work *w, uint64_t i, struct outgoing *o)
{
    uint64_t bytes = w->turns.item_bytes;
    o->at = w->at + i * bytes;
    if (!w->known)
        return;
    pms_lock_acquire(&w->turns.lock);
    o->at = w->end;
    w->end += o->chunks * bytes;
    pms_lock_release(&w->turns.lock);
    for (uint64_t k = 0; k < o->chunks; k++)
        w->position[o->which[k]] = o->at + k * bytes;
}

static int put(const struct work *w, uint64_t at, uint64_t n, const unsigned char *from,
               struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    errno = pms_persist_pwrite(&p, w->fd, from, n * w->turns.item_bytes, at);
    return errno ? pms_fail_errno(error, "writing chunks to a tier") : PMS_OK;
}

/* What was written in place is as of the snapshot, or written once more, from a copy. */
static int settle_chunks(const struct work *w, unsigned char *buffer, const struct outgoing *o,
                         struct pms_error *error)
{
    const unsigned char *at;
    int status = PMS_OK;
    uint64_t bytes = w->turns.item_bytes;
    for (uint64_t k = 0; k < o->chunks && status == PMS_OK; k++) {
        uint64_t off = w->chunk[o->which[k]] * bytes;
        unsigned char *copy = buffer + k * bytes;
        if (!o->in_place[k])
            continue;
        if (pms_snapshot_in_place(w->snapshot, off, bytes, &at, NULL)) {
            pms_snapshot_release(w->snapshot, off, bytes);
            continue;
        }
        status = copy_chunk(w, o->which[k], copy, 1, error);
        if (status == PMS_OK)
            status = put(w, o->at + k * bytes, 1, copy, error);
    }
    return status;
}

/* Where the kernel did not write them in place, whatever the reason: copied. An error of the
 * file comes again. */
static int put_copies(const struct work *w, unsigned char *buffer, const struct outgoing *o,
                      struct pms_error *error)
{
    int status = PMS_OK;
    for (uint64_t k = 0; k < o->chunks && status == PMS_OK; k++)
        if (o->in_place[k])
            status = copy_chunk(w, o->which[k], buffer + k * w->turns.item_bytes, 1, error);
    return status == PMS_OK ? put(w, o->at, o->chunks, buffer, error) : status;
}

/* Chunks that nobody has written to since the snapshot go to the file from where they are: half
 * the processor time of copying them. */
static int put_chunks(struct pms_turns *turns, uint64_t i, uint64_t n, unsigned char *buffer,
                      struct pms_error *error)
{
    struct work *w = (struct work *)turns;
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    struct outgoing o;
    PMS_ASSERT(n <= BATCH_MOST);
    int status = pms_turns_proceed(turns->transfer, n * turns->item_bytes, error);
    if (status == PMS_OK)
        status = gather_chunks(w, i, n, buffer, &o, error);
    if (status != PMS_OK)
        return status;
    __atomic_add_fetch(&turns->transfer->spared_bytes, (n - o.chunks) * turns->item_bytes,
                       __ATOMIC_RELAXED);
    if (!o.chunks)
        return PMS_OK;
    find_room(w, i, &o);
    pms_quiet_begin();
    int err = pms_persist_pwritev(&p, w->fd, o.iov, o.count, o.at);
    pms_quiet_end();
    return err ? put_copies(w, buffer, &o, error) : settle_chunks(w, buffer, &o, error);
}

int pms_snapshot_write(struct pms_snapshot *s, int fd, uint64_t chunk_bytes, const uint64_t *chunk,
                       uint64_t count, uint64_t at, uint32_t *crc, const int64_t *known,
                       uint64_t *position, struct pms_transfer *transfer, struct pms_error *error)
{
    if (!chunk_bytes || chunk_bytes % PMS_PAGE)
        return pms_fail(error, PMS_E_INVALID, "chunks are whole pages");
    uint64_t rate = __atomic_load_n(&transfer->bytes_per_second, __ATOMIC_RELAXED);
    uint64_t most = rate && rate / BATCHES_A_SECOND < PMS_TURNS_BATCH ? rate / BATCHES_A_SECOND
                                                                      : PMS_TURNS_BATCH;
    uint64_t share = count * chunk_bytes / PMS_TURNS_THREADS; /* few are dealt out to all */
    if (share < BATCH_LEAST)
        share = BATCH_LEAST;
    most = share < most ? share : most;
    for (uint64_t i = 0; known && i < count; i++)
        position[i] = PMS_CHUNK_SPARED;
    struct work w = {.turns = {.carry = put_chunks,
                               .together = all_of_them,
                               .count = count,
                               .batch = chunk_bytes < most ? most / chunk_bytes : 1,
                               .item_bytes = chunk_bytes,
                               .transfer = transfer},
                     .snapshot = s,
                     .fd = fd,
                     .chunk = chunk,
                     .known = known,
                     .crc = crc,
                     .position = position,
                     .at = at,
                     .end = at};
    return pms_turns_run(&w.turns, error);
}
