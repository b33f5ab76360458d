/* Domain file: a commit's pages on their way, in pieces, by several threads: some are copied and
 * checksummed while the disk writes others. */
#ifndef PMS_JOURNAL_PIECES_H
#define PMS_JOURNAL_PIECES_H

#include "journal/journal.h"
#include "journal/ring.h"

#define PMS_PIECE_PAGES 64u
/* their buffers, and hardly less than a disk has to choose from */
#define PMS_PIECES_BYTES (8u * PMS_PIECE_PAGES * PMS_PAGE)

/* Pages of a piece, at most, of so many bytes in all: little is not cut, for each write of its own
 * takes as long as the disk does to answer. */
static inline uint64_t pms_pieces_most(uint64_t bytes)
{
    return bytes <= PMS_JOURNAL_CHUNK ? PMS_JOURNAL_CHUNK / PMS_PAGE : PMS_PIECE_PAGES;
}

enum pms_piece_kind {
    PMS_PIECE_IMAGES, /* into the record */
    PMS_PIECE_HOME,   /* straight home */
    PMS_PIECE_THERE,  /* home has it: only its checksum is asked for */
    PMS_PIECE_SENT,   /* and that is known, too */
};

/* Pages of one run, or images of several. */
struct pms_piece {
    enum pms_piece_kind kind;
    uint32_t crc;      /* of its bytes, once they are copied */
    uint32_t run;      /* its first page is of it, */
    uint64_t done;     /* behind so many others */
    uint64_t pages;    /* SENT: any; else at most what pms_pieces_most says */
    uint64_t position; /* IMAGES: in the ring */
};

/* Writes the pieces of journal->piece, those of runs in order and images last, and puts the
 * checksums of what went straight home into the runs. most: pms_pieces_most. change: as it is
 * committed, with the record's header, at the ring's tail; NULL: pieces alone. The header is
 * written once all are checksummed, in one call with the images where these are one piece.
 *
 * REQUIRES: room for it; the header's fields but for the checksums. ERRORS: PMS_E_OS: what was
 * written does not count, for sure unless a sync failed. CRASH: a record whose checksum is wrong
 * does not count, nor does one whose straight-home pages are not what it says. */
int pms_pieces_write(struct pms_journal *journal, const struct pms_change *change,
                     struct pms_run *runs, uint64_t count, uint64_t most, struct pms_error *error);

#endif
