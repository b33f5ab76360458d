#include "journal/pieces.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "base/checksum.h"
#include "base/quiet.h"
#include "journal/state.h"
#include "seam/spill.h"

struct writing {
    struct pms_journal *journal;
    const struct pms_change *change;
    struct pms_run *runs;
    uint64_t count, most;
    _Atomic uint64_t next, checked; /* pieces that are taken, and that have their checksum */
    bool headed;                    /* the header is written */
    _Atomic bool failing;
    int status; /* of the first that failed */
    struct pms_error error;
};

static void note(struct writing *w, int status, const struct pms_error *error)
{
    if (atomic_exchange(&w->failing, true))
        return;
    w->status = status;
    w->error = *error;
}

/* ---- a piece ---- */

/* Lays over a copy of pages what is committed of those that others may be storing to. */
static void lay_images(const struct pms_change *change, uint64_t page, uint64_t pages,
                       unsigned char *copy)
{
    for (uint32_t i = 0; change && i < change->image_count; i++) {
        const struct pms_image *m = &change->images[i];
        uint64_t from = m->page > page ? m->page : page;
        uint64_t end = m->page + m->pages < page + pages ? m->page + m->pages : page + pages;
        if (from < end)
            memcpy(copy + (from - page) * PMS_PAGE, m->bytes + (from - m->page) * PMS_PAGE,
                   (end - from) * PMS_PAGE);
    }
}

/* Pages as they are to be written: a copy, which is what is checksummed. A store between the
 * checksum and the kernel's own look, by a thread into hot pages or by a device into pages that
 * it was given before they were protected, would make this record, and every later one,
 * worthless. The copy is in the cache when it is checksummed, so it costs little beside that. */
static void copy_pages(const struct writing *w, uint64_t page, uint64_t pages, unsigned char *copy)
{
    pms_quiet_copy(copy, w->journal->map->user + page * PMS_PAGE, pages * PMS_PAGE);
    lay_images(w->change, page, pages, copy);
}

static void copy_piece(const struct writing *w, const struct pms_piece *piece, unsigned char *copy)
{
    const struct pms_run *run = &w->runs[piece->run];
    uint32_t home = run->home;
    uint64_t done = piece->done;
    for (uint64_t left = piece->pages; left > 0; run++, done = 0) {
        uint64_t n = run->pages - done < left ? run->pages - done : left;
        if (run->home != home)
            continue;
        copy_pages(w, run->page + done, n, copy);
        copy += n * PMS_PAGE;
        left -= n;
    }
}

static int write_piece(const struct writing *w, const struct pms_piece *piece, unsigned char *bytes,
                       struct pms_error *error)
{
    struct pms_journal *j = w->journal;
    const struct pms_run *run = &w->runs[piece->run];
    if (piece->kind == PMS_PIECE_SENT || piece->kind == PMS_PIECE_THERE)
        return PMS_OK;
    struct iovec iov = {bytes, piece->pages * PMS_PAGE};
    if (piece->kind == PMS_PIECE_IMAGES)
        return pms_ring_write(&j->ring, j->map->persist, piece->position, &iov, 1, error);
    errno = pms_persist_pwritev(j->map->persist, pms_journal_fd_of(j, run->pages, j->map->fd), &iov,
                                1, (run->page + piece->done) * PMS_PAGE);
    return errno ? pms_fail_errno(error, "writing fresh pages home") : PMS_OK;
}

/* ---- the header ---- */

/* Pieces of what goes straight home come in the order of their runs. Returns the images'. */
static uint32_t join(const struct writing *w)
{
    uint32_t images = 0;
    for (uint64_t i = 0; i < w->count; i++) {
        const struct pms_piece *piece = &w->journal->piece[i];
        struct pms_run *run = &w->runs[piece->run];
        uint32_t *crc = piece->kind == PMS_PIECE_IMAGES ? &images : &run->home_crc;
        *crc = pms_crc32c_join(*crc, piece->crc, piece->pages * PMS_PAGE);
    }
    return images;
}

/* behind: images that follow the header, or none. REQUIRES: all pieces have their checksum. */
static int write_head(struct writing *w, struct iovec behind, struct pms_error *error)
{
    struct pms_journal *j = w->journal;
    struct pms_record *record = j->record;
    uint64_t head = pms_record_head(record->run_count);
    size_t used = sizeof *record + record->run_count * sizeof(struct pms_run);
    struct iovec iov[2] = {{record, head}, behind};
    record->images_crc = join(w);
    record->crc = 0;
    record->crc = pms_crc32c(j->ring.seed, record, used);
    memset((unsigned char *)record + used, 0, head - used);
    if (!pms_spill_is_whole(j->map)) /* all pages were copied; without a header none counts */
        return pms_fail(error, PMS_E_OS,
                        "the disk lost memory of the transaction: nothing more is committed; open "
                        "the store again");
    int status = pms_ring_write(&j->ring, j->map->persist, j->tail, iov, 1 + (behind.iov_len > 0),
                                error);
    w->headed = status != PMS_E_FULL;
    return status;
}

/* A piece could not be written, so its record must not count: not even if what lies there happens
 * to be what it says. */
static void take_back(struct pms_journal *j)
{
    struct iovec zeros = {memset(j->bounce, 0, PMS_PAGE), PMS_PAGE};
    if (pms_ring_write(&j->ring, j->map->persist, j->tail, &zeros, 1, NULL) != PMS_OK)
        j->map->persist->failed_syncs++;
    else
        (void)pms_persist_sync(j->map->persist, j->map->fd, "taking a record back", NULL);
}

/* ---- all of them ---- */

static bool begins_images(const struct writing *w, const struct pms_piece *piece)
{
    return piece->kind == PMS_PIECE_IMAGES &&
           (piece == w->journal->piece || piece[-1].kind != PMS_PIECE_IMAGES);
}

static int carry_piece(struct writing *w, struct pms_piece *piece, unsigned char *buffer,
                       struct pms_error *error)
{
    if (piece->kind != PMS_PIECE_SENT) {
        copy_piece(w, piece, buffer);
        piece->crc = pms_crc32c(0, buffer, piece->pages * PMS_PAGE);
    }
    bool last = atomic_fetch_add(&w->checked, 1) + 1 == w->count;
    if (atomic_load(&w->failing))
        return PMS_OK;
    if (last && w->change) {
        bool together = begins_images(w, piece);
        struct iovec behind = {buffer, together ? piece->pages * PMS_PAGE : 0};
        int status = write_head(w, behind, error);
        if (status || together)
            return status;
    }
    return write_piece(w, piece, buffer, error);
}

static void carry(void *ctx, size_t lane)
{
    struct writing *w = ctx;
    unsigned char *buffer = w->journal->bounce + lane * w->most * PMS_PAGE;
    for (uint64_t i; (i = atomic_fetch_add(&w->next, 1)) < w->count;) {
        struct pms_error error = {0};
        int status = carry_piece(w, &w->journal->piece[i], buffer, &error);
        if (status)
            note(w, status, &error);
    }
}

int pms_pieces_write(struct pms_journal *j, const struct pms_change *change, struct pms_run *runs,
                     uint64_t count, uint64_t most, struct pms_error *error)
{
    struct writing w = {.journal = j, .change = change, .runs = runs, .count = count, .most = most};
    uint64_t lanes = PMS_PIECES_BYTES / PMS_PAGE / most;
    pms_overlap(carry, &w, count < lanes ? count : lanes);
    if (!change)
        (void)join(&w);
    PMS_ASSERT(count);
    if (w.status && w.headed)
        take_back(j);
    if (w.status && error)
        *error = w.error;
    return w.status;
}
