/* What one commit of domain file writes: straight home, or into its record. */
#ifndef PMS_JOURNAL_PLAN_H
#define PMS_JOURNAL_PLAN_H

#include "journal/journal.h"

struct pms_plan {
    struct pms_journal *journal;
    uint64_t homed; /* the anchor's transaction when the plan was made */
    uint64_t image_bytes, straight_bytes;
};

/* What is home before its commit: for each page of the map's reserve, which piece it lies in, and
 * of the piece's first page its checksum. It holds for the transaction alone in which it was sent,
 * and until something else is written there. */
struct pms_sent {
    uint64_t tx;
    uint32_t crc;
    uint16_t pages, at; /* of the piece; the page's place in it */
};

/* Sets the runs of the journal's record, and counts their bytes.
 *
 * REQUIRES: the runs in order, none over another; `journal` and `homed` are set. Writes nothing
 * to the medium. */
void pms_plan_build(struct pms_plan *plan, const struct pms_run *runs, uint32_t run_count);

/* Writes what goes straight home, and the record behind the ring's tail.
 *
 * REQUIRES, ERRORS, CRASH: as pms_pieces_write (pieces.h). What lies where it goes straight home is
 * of freed blocks, and dead. */
int pms_plan_write(const struct pms_plan *plan, const struct pms_change *change,
                   struct pms_error *error);

/* Writes pages straight home before their commit does, which writes those again that are stored to
 * after it. false: some of them may not be, or could not be written: then the commit sees to it.
 *
 * REQUIRES: they were dead at the last commit; nobody stores to them meanwhile; the file passes the
 * page cache by (`direct`), so that a write which failed has said so. No commit runs. CRASH: as
 * above. */
bool pms_plan_write_early(struct pms_journal *journal, uint64_t homed, uint64_t page,
                          uint64_t pages);

/* The same, of what lies elsewhere. _begin: before anything is written; the rest as above. _pieces:
 * whole pages that nobody stores to; crc: of each PMS_JOURNAL_CHUNK of them. By several threads, of
 * any parts of what was begun. ERRORS: errno of the write: then what is home is anything, and
 * dead. */
bool pms_plan_begin_early(struct pms_journal *journal, uint64_t homed, uint64_t page,
                          uint64_t pages);
int pms_plan_write_pieces(struct pms_journal *journal, uint64_t page, const void *bytes,
                          uint64_t pages, const uint32_t *crc);

#endif
