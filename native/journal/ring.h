/* What the journal's commit, writer and recovery share: where a position lies, the anchors, and
 * records as read back.
 *
 * The logs of all segments, in order, are one linear space; its first `window` bytes are the
 * ring. A record may wrap, and cross from one segment's log into the next, at any page. */
#ifndef PMS_JOURNAL_RING_H
#define PMS_JOURNAL_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/layout.h"
#include "base/pages.h"
#include "base/status.h"
#include "seam/persist.h"

#define PMS_JOURNAL_CHUNK (1u << 20) /* images are streamed in pieces of at most so many bytes */

struct pms_ring {
    int fd;
    int direct; /* the file opened once more with O_DIRECT, or -1: see pms_ring_read */
    uint32_t count;
    uint32_t seed;   /* of the records' checksums: pms_session_seed */
    uint64_t bytes;  /* of the linear space */
    uint64_t window; /* of these, the ring */
    struct {
        uint64_t start; /* in the linear space */
        uint64_t off;   /* in the file */
        uint64_t bytes;
    } piece[PMS_MAX_SEGMENTS];
};

/* Fills the map of the linear space; the window starts as all of it. */
void pms_ring_init(struct pms_ring *ring, int fd, const struct pms_superblock *super,
                   uint32_t seed);

/* The offset in the file of a position; *room = bytes that follow it without a break, in the
 * file and in the ring. */
uint64_t pms_ring_place(const struct pms_ring *ring, uint64_t position, uint64_t *room);

/* Whole pages at page-aligned addresses pass the page cache by, where the ring has a descriptor
 * for it: what a commit writes is read once, soon, by the writer, and its place not again before
 * the ring has come round. In the page cache it would need new memory all the time.
 * ERRORS: PMS_E_OS; PMS_E_CORRUPT when the file ends before. */
int pms_ring_read(const struct pms_ring *ring, uint64_t position, void *to, size_t n,
                  struct pms_error *error);
int pms_ring_read_home(int fd, uint64_t offset, void *to, size_t n, struct pms_error *error);

/* Writes the vector at a position; changes iov. Not durable. REQUIRES: where the ring has
 * `direct`, whole pages at page-aligned addresses.
 * ERRORS: PMS_E_OS. */
int pms_ring_write(const struct pms_ring *ring, struct pms_persist *p, uint64_t position,
                   struct iovec *iov, int count, struct pms_error *error);

/* Reads the valid anchor with the higher generation and sets ring->window from it. *twins: the
 * other copy says the same.
 * ERRORS: PMS_E_OS; PMS_E_CORRUPT when neither copy is valid. */
int pms_anchor_read(struct pms_ring *ring, struct pms_janchor *anchor, bool *twins,
                    struct pms_error *error);

/* Makes everything written through fd durable, then the anchor (generation + 1, in the other
 * copy), then overwrites the copy before with the same again, so that at rest the loss of either
 * copy loses nothing. That twin is not yet durable on return, and need not be. On an error the
 * anchor in force is the one before or the new one, and stands.
 * CRASH: one copy is always valid: each is overwritten only after the other is durable. */
int pms_anchor_advance(int fd, struct pms_persist *p, struct pms_janchor *anchor,
                       struct pms_error *error);

/* A new start of the chain, which no record written before carries. Call before
 * pms_anchor_advance. */
void pms_anchor_rechain(struct pms_janchor *anchor);

/* A moment between two records. */
struct pms_between {
    uint64_t position; /* of the next record */
    uint64_t tx;       /* the last transaction before it */
    uint32_t chain;    /* what the next record carries */
};

static inline bool pms_record_is(const struct pms_record *record)
{
    return (record->magic & ~(~0ull << PMS_RECORD_HELD_BIT)) == PMS_RECORD_MAGIC &&
           record->magic >> PMS_RECORD_HELD_BIT <= PMS_HELD_FOR_JOB;
}

static inline enum pms_held_for pms_record_holds(const struct pms_record *record)
{
    return (enum pms_held_for)(record->magic >> PMS_RECORD_HELD_BIT);
}

static inline uint64_t pms_record_head(uint64_t run_count) /* bytes of header and runs, padded */
{
    return pms_page_up(sizeof(struct pms_record) + run_count * sizeof(struct pms_run));
}

enum pms_verdict {
    PMS_RECORD_ABSENT, /* something else lies here */
    PMS_RECORD_TORN,   /* began as the record asked for, but is not whole */
    PMS_RECORD_WHOLE,  /* so far as was looked */
};

/* Reads the header at a position and checks it and the runs' checksum: the record must end
 * within room bytes, and be of transaction tx with this chain. Images and run rules are not
 * looked at. */
int pms_record_load(const struct pms_ring *ring, uint64_t position, uint64_t room, uint64_t tx,
                    uint32_t chain, struct pms_record *record, enum pms_verdict *verdict,
                    struct pms_error *error);

/* The same without a transaction to look for: *whole when any header that passes lies here, and
 * it and its runs take at most head_most bytes (a bound on the work that a hostile file can ask
 * for). */
int pms_record_probe(const struct pms_ring *ring, uint64_t position, uint64_t room,
                     uint64_t head_most, struct pms_record *record, bool *whole,
                     struct pms_error *error);

/* Walks the runs of a record; `left` is how many are still to come. */
struct pms_run_reader {
    const struct pms_ring *ring;
    uint64_t position; /* of the runs not yet in the buffer */
    uint64_t image;    /* position of the next image */
    uint32_t left;
    uint32_t have, next;
    struct pms_run buffer[128];
};
void pms_runs_start(struct pms_run_reader *reader, const struct pms_ring *ring, uint64_t position,
                    const struct pms_record *record);

/* REQUIRES: left > 0. *image = position of the run's image (meaningless when run->home). ERRORS:
 * as pms_ring_read. */
int pms_runs_next(struct pms_run_reader *reader, struct pms_run *run, uint64_t *image,
                  struct pms_error *error);

#endif
