#include "journal/ring.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/checksum.h"

/* ---- positions ---- */

void pms_ring_init(struct pms_ring *ring, int fd, const struct pms_superblock *super, uint32_t seed)
{
    PMS_ASSERT(super->segment_count >= 1 && super->segment_count <= PMS_MAX_SEGMENTS);
    *ring = (struct pms_ring){.fd = fd, .direct = -1, .count = super->segment_count, .seed = seed};
    for (uint32_t i = 0; i < ring->count; i++) {
        PMS_ASSERT(super->segment[i].log_bytes % PMS_PAGE == 0);
        ring->piece[i].start = ring->bytes;
        ring->piece[i].off = super->segment[i].log_off;
        ring->piece[i].bytes = super->segment[i].log_bytes;
        ring->bytes += super->segment[i].log_bytes;
    }
    ring->window = ring->bytes;
}

uint64_t pms_ring_place(const struct pms_ring *ring, uint64_t position, uint64_t *room)
{
    PMS_ASSERT(ring->window > 0 && ring->window <= ring->bytes);
    uint64_t linear = position % ring->window;
    uint32_t i = 0;
    while (linear >= ring->piece[i].start + ring->piece[i].bytes)
        i++;
    PMS_ASSERT(i < ring->count);
    uint64_t end = ring->piece[i].start + ring->piece[i].bytes;
    *room = (end < ring->window ? end : ring->window) - linear;
    return ring->piece[i].off + (linear - ring->piece[i].start);
}

int pms_ring_read_home(int fd, uint64_t offset, void *to, size_t n, struct pms_error *error)
{
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(fd, (unsigned char *)to + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return pms_fail_errno(error, "reading the journal or a page it names");
        if (got == 0) {
            int status = pms_fail(error, PMS_E_CORRUPT,
                                  "the file ends inside the journal or a page it names");
            if (error)
                error->offset = offset + done;
            return status;
        }
        done += (size_t)got;
    }
    return PMS_OK;
}

int pms_ring_read(const struct pms_ring *ring, uint64_t position, void *to, size_t n,
                  struct pms_error *error)
{
    for (size_t done = 0; done < n;) {
        uint64_t room;
        uint64_t offset = pms_ring_place(ring, position + done, &room);
        size_t step = n - done < room ? n - done : (size_t)room;
        unsigned char *at = (unsigned char *)to + done;
        bool whole = (offset | step | (uintptr_t)at) % PMS_PAGE == 0;
        int status = pms_ring_read_home(whole && ring->direct >= 0 ? ring->direct : ring->fd,
                                        offset, at, step, error);
        if (status)
            return status;
        done += step;
    }
    return PMS_OK;
}

int pms_ring_write(const struct pms_ring *ring, struct pms_persist *p, uint64_t position,
                   struct iovec *iov, int count, struct pms_error *error)
{
    while (count > 0) {
        uint64_t room;
        uint64_t offset = pms_ring_place(ring, position, &room);
        uint64_t bytes = 0;
        int n = 0;
        while (n < count && iov[n].iov_len <= room - bytes)
            bytes += iov[n++].iov_len;
        struct iovec rest = {0};
        if (n < count && bytes < room) { /* this one goes on in the next piece */
            size_t part = (size_t)(room - bytes);
            rest = (struct iovec){(unsigned char *)iov[n].iov_base + part, iov[n].iov_len - part};
            iov[n].iov_len = part;
        }
        int failed = pms_persist_pwritev(p, ring->direct >= 0 ? ring->direct : ring->fd, iov,
                                         n + (rest.iov_len > 0), offset);
        if (failed) {
            errno = failed;
            return pms_fail_errno(error, "writing the journal");
        }
        if (rest.iov_len > 0) {
            bytes = room;
            iov[n] = rest;
        }
        position += bytes;
        iov += n;
        count -= n;
    }
    return PMS_OK;
}

/* ---- anchors ---- */

static uint32_t anchor_crc(const struct pms_janchor *anchor)
{
    return pms_crc32c(0, anchor, offsetof(struct pms_janchor, crc));
}

static bool anchor_valid(const struct pms_ring *ring, const struct pms_janchor *anchor,
                         unsigned copy)
{
    return anchor->crc == anchor_crc(anchor) && anchor->generation > 0 &&
           (anchor->generation & 1) == copy && anchor->generation < UINT64_MAX / 2 &&
           anchor->tx < UINT64_MAX / 4 && anchor->head < UINT64_MAX / 4 &&
           anchor->head % PMS_PAGE == 0 && anchor->window > 0 && anchor->window % PMS_PAGE == 0 &&
           anchor->window <= ring->bytes;
}

int pms_anchor_read(struct pms_ring *ring, struct pms_janchor *anchor, bool *twins,
                    struct pms_error *error)
{
    struct pms_janchor copy[2];
    bool valid[2];
    for (unsigned i = 0; i < 2; i++) {
        int status = pms_ring_read_home(ring->fd, PMS_OFF_JANCHOR(i), &copy[i], sizeof copy[i],
                                        error);
        if (status)
            return status;
        valid[i] = anchor_valid(ring, &copy[i], i);
    }
    *twins = valid[0] && valid[1] && copy[0].tx == copy[1].tx && copy[0].head == copy[1].head &&
             copy[0].window == copy[1].window && copy[0].chain == copy[1].chain &&
             copy[0].let_go == copy[1].let_go;
    if (!valid[0] && !valid[1]) {
        int status = pms_fail(error, PMS_E_CORRUPT,
                              "neither copy of the journal's anchor is valid");
        if (error)
            error->offset = PMS_OFF_JANCHOR(0);
        return status;
    }
    unsigned best = !valid[0] || (valid[1] && copy[1].generation > copy[0].generation);
    *anchor = copy[best];
    ring->window = anchor->window;
    return PMS_OK;
}

static int anchor_write(int fd, struct pms_persist *p, struct pms_janchor *anchor,
                        struct pms_error *error)
{
    struct pms_janchor next = *anchor;
    next.generation++;
    next.crc = anchor_crc(&next);
    *anchor = next; /* also if this fails: the sector may hold either, and no later anchor may have
                       a lower generation */
    errno = pms_persist_pwrite(p, fd, &next, sizeof next, PMS_OFF_JANCHOR(next.generation & 1));
    return errno ? pms_fail_errno(error, "moving the journal's anchor") : PMS_OK;
}

int pms_anchor_advance(int fd, struct pms_persist *p, struct pms_janchor *anchor,
                       struct pms_error *error)
{
    /* orders: pages written home, and the twin of the last anchor, before the anchor that relies
     * on both */
    int status = pms_persist_sync(p, fd, "moving the journal's anchor", error);
    if (!status)
        status = anchor_write(fd, p, anchor, error);
    /* orders: the anchor before its twin, and before the ring's space is used again */
    if (!status) {
        status = pms_persist_sync(p, fd, "moving the journal's anchor", error);
        if (!status && anchor_write(fd, p, anchor, NULL) == PMS_OK)
            return PMS_OK;
    }
    /* Whichever copy failed or was not synced may be bad now; the other is durable. An odd step
     * makes the next attempt write the bad one again. If only the twin failed, the anchor holds. */
    anchor->generation++;
    return status;
}

void pms_anchor_rechain(struct pms_janchor *anchor)
{
    uint32_t before = anchor->chain;
    uint64_t salt[2] = {anchor->generation, anchor->tx};
    anchor->chain = pms_crc32c(before, salt, sizeof salt);
    if (anchor->chain == before)
        anchor->chain++;
}

/* ---- records ---- */

static bool record_shape(const struct pms_record *record, uint64_t room)
{
    return record->bytes <= room && record->image_bytes % PMS_PAGE == 0 &&
           record->image_bytes <= record->bytes &&
           record->bytes - record->image_bytes == pms_record_head(record->run_count);
}

/* The checksum of the header and of the runs. REQUIRES: record_shape, which bounds run_count. */
static int record_crc(const struct pms_ring *ring, uint64_t position,
                      const struct pms_record *record, uint32_t *crc, struct pms_error *error)
{
    struct pms_record header = *record;
    struct pms_run_reader reader;
    header.crc = 0;
    *crc = pms_crc32c(ring->seed, &header, sizeof header);
    pms_runs_start(&reader, ring, position, record);
    while (reader.left > 0) {
        struct pms_run run;
        uint64_t image;
        int status = pms_runs_next(&reader, &run, &image, error);
        if (status)
            return status;
        *crc = pms_crc32c(*crc, &run, sizeof run);
    }
    return PMS_OK;
}

int pms_record_probe(const struct pms_ring *ring, uint64_t position, uint64_t room,
                     uint64_t head_most, struct pms_record *record, bool *whole,
                     struct pms_error *error)
{
    uint32_t crc;
    *whole = false;
    int status = pms_ring_read(ring, position, record, sizeof *record, error);
    if (status || !pms_record_is(record) || !record_shape(record, room) ||
        pms_record_head(record->run_count) > head_most)
        return status;
    status = record_crc(ring, position, record, &crc, error);
    *whole = !status && crc == record->crc;
    return status;
}

int pms_record_load(const struct pms_ring *ring, uint64_t position, uint64_t room, uint64_t tx,
                    uint32_t chain, struct pms_record *record, enum pms_verdict *verdict,
                    struct pms_error *error)
{
    bool whole;
    *verdict = PMS_RECORD_ABSENT;
    if (room < PMS_PAGE)
        return PMS_OK;
    int status = pms_record_probe(ring, position, room, room, record, &whole, error);
    if (status)
        return status;
    if (pms_record_is(record) && record->tx == tx && record->chain == chain)
        *verdict = whole ? PMS_RECORD_WHOLE : PMS_RECORD_TORN;
    return PMS_OK;
}

void pms_runs_start(struct pms_run_reader *reader, const struct pms_ring *ring, uint64_t position,
                    const struct pms_record *record)
{
    reader->ring = ring;
    reader->position = position + sizeof *record;
    reader->image = position + pms_record_head(record->run_count);
    reader->left = record->run_count;
    reader->have = reader->next = 0;
}

int pms_runs_next(struct pms_run_reader *reader, struct pms_run *run, uint64_t *image,
                  struct pms_error *error)
{
    const uint32_t most = sizeof reader->buffer / sizeof reader->buffer[0];
    PMS_ASSERT(reader->left > 0);
    if (reader->next == reader->have) {
        reader->have = reader->left < most ? reader->left : most;
        reader->next = 0;
        size_t bytes = reader->have * sizeof *run;
        int status = pms_ring_read(reader->ring, reader->position, reader->buffer, bytes, error);
        if (status)
            return status;
        reader->position += bytes;
    }
    *run = reader->buffer[reader->next++];
    *image = reader->image;
    if (!run->home)
        reader->image += (uint64_t)run->pages * PMS_PAGE;
    reader->left--;
    return PMS_OK;
}
