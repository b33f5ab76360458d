/* Domain file: the redo journal.
 *
 * A commit appends one record (header, page runs, page images) and calls fdatasync once: that is
 * the commit point. Extents that were dead at the last commit may be written straight home
 * before that same sync; the record carries their checksums. A thread of its own writes
 * committed images home, syncs, moves the anchor (two checksummed copies in separate sectors),
 * syncs, and only then gives journal space back.
 *
 * I1 a record is valid iff tx = last + 1, chain = crc of the one before, and its checksums hold;
 * the last record's home runs
 *    must match their checksums too (an earlier one's need not: a later transaction may have
 *    changed them since).
 * I3 home pages change only after the record that holds their new content is durable. A page
 * whose image waits in the journal is never written straight home (it would be overwritten by
 * the older image). */
#ifndef PMS_JOURNAL_JOURNAL_H
#define PMS_JOURNAL_JOURNAL_H

#include <pthread.h>

#include "log/undo.h"
#include "journal/readers.h"

struct pms_journal;

struct pms_journal_recovery {
    uint64_t tx;      /* last transaction that is whole: home or in the journal */
    uint64_t records; /* replayed */
    uint64_t bytes;   /* of images replayed */
    bool torn;        /* an incomplete record followed */
    /* The version before tx is: it is what is home, and tx is in the journal alone. */
    enum pms_held_for held;
};

/* Formats anchors (tx = 0) and zero-fills the first PMS_JOURNAL_INITIAL bytes of the log, so
 * that first commits need no block allocation. Durable on return. Also used when a store changes
 * over from a byte-addressable domain: tx = its anchor. */
#define PMS_JOURNAL_INITIAL (8u << 20)
int pms_journal_format(int fd, struct pms_persist *p, const struct pms_superblock *super,
                       uint64_t tx, struct pms_error *error);

struct pms_journal_asked {
    unsigned char *into;
    bool before; /* with into: without the held record: what is home is the version before it */
    /* The session record says that the last writer closed the store. All its commits are home then,
     * but for a held one: if the anchors say so too, nothing is looked for behind them (8 MiB to
     * read, which is most of a cold open). */
    bool closed;
    /* whether home can still be the version before tx, whose record says so; NULL: no */
    bool (*may_hold)(const void *ctx, uint64_t tx);
    const void *ctx;
};

/* Replays the journal. into = NULL: writes images home through fd, syncs, resets the anchors:
 * the file is whole and the journal empty, but for a last record that holds: it stays, and the
 * version before it is home. into != NULL: copies all images to into + offset instead and changes
 * nothing in the file (mode r). The last record, if not whole, is dropped (torn); one that is
 * damaged although a later commit is there is an error. into must be writable. Checks every length
 * and offset. ERRORS: PMS_E_CORRUPT (no valid anchor, a damaged record in the middle, a run outside
 * the file's engine and data pages), PMS_E_OS. */
int pms_journal_recover(int fd, struct pms_persist *p, const struct pms_superblock *super,
                        const struct pms_journal_asked *asked, struct pms_journal_recovery *result,
                        struct pms_error *error);

/* Starts the writer thread, which opens the file once more through /proc/self/fd. The journal is
 * empty at tx, but for its record if that is held (pms_journal_recover has run). */
int pms_journal_open(struct pms_journal **journal, struct pms_map *map,
                     const struct pms_superblock *super, uint64_t tx, struct pms_error *error);

/* Bytes of the logs that the ring takes now. */
uint64_t pms_journal_window(const struct pms_journal *journal);

/* Makes transaction tx durable: runs of pages, ascending, disjoint, whose content is read from
 * map->user, but for those of which there is an image. Runs with home = 1 are candidates
 * for writing straight home (not where an image still waits for such a page). One fdatasync, unless
 * there is no room and older images must be written home first. held: the version before tx can be
 * had back until the next commit, or until let go; the one before that is over, also if this fails.
 * A version that was let go is so durably before any page is written straight home. ERRORS:
 * PMS_E_OS, PMS_E_FULL: not committed, for sure unless a sync failed (persist->failed_syncs);
 * PMS_E_READONLY after that. */
struct pms_image {
    uint64_t page, pages;
    const unsigned char *bytes;
};
struct pms_change {
    uint64_t tx;
    enum pms_held_for held;
    const struct pms_run *runs;
    uint32_t run_count;
    /* of pages that others may be storing to: what is committed of them */
    const struct pms_image *images;
    uint32_t image_count;
    /* of the logs: the ring lies in what is backed, and grows there. thin: by no more than it has
     * to. */
    struct pms_backing *backing;
    bool thin;
};
/* fresh extents from this size on are candidates: they are not written twice */
#define PMS_STRAIGHT_HOME_PAGES 16u

int pms_journal_commit(struct pms_journal *journal, const struct pms_change *change,
                       struct pms_error *error);

/* Everything home, synced, journal empty, but for the record of the last transaction if that is
 * held. */
int pms_journal_drain(struct pms_journal *journal, struct pms_error *error);

/* The version before the last commit is not needed any more, if it was held. Not durable: the
 * writer thread sees to that. let_go_surely waits for it. CRASH: held or not. */
void pms_journal_let_go(struct pms_journal *journal);
int pms_journal_let_go_surely(struct pms_journal *journal, struct pms_error *error);

/* For an open that found the last transaction held: shows its images over what is home, in the
 * private view, and appends pre-images of them to the log, under the tag that runs: as if the
 * transaction had just been committed. REQUIRES: the log is empty. ERRORS: PMS_E_OS,
 * PMS_E_CORRUPT: they do not fit into the log. */
int pms_journal_show_held(struct pms_journal *journal, struct pms_undo *undo,
                          const struct pms_superblock *super, struct pms_error *error);

/* Call before growth changes the superblock's segments (drain first), then set the new one. */
void pms_journal_set_super(struct pms_journal *journal, const struct pms_superblock *super);

/* Bytes that commits have written, since open: a measure of what becomes the process's own. */
uint64_t pms_journal_written(const struct pms_journal *journal);

/* The last transaction whose images are home, and synced. hurry: the writer begins with the others
 * at once; wait: and has written them, but for what is held. An error of its is kept for a caller
 * that can be told. */
enum pms_journal_ask { PMS_JOURNAL_LOOK, PMS_JOURNAL_HURRY, PMS_JOURNAL_WAIT };
uint64_t pms_journal_homed(struct pms_journal *journal, enum pms_journal_ask ask);

/* How many transactions ago a page was last committed in this session, where home has it as it was
 * committed then, synced; UINT64_MAX: home has not, or it was not. homed: as told just now.
 * REQUIRES: no commit runs. */
uint64_t pms_journal_age(const struct pms_journal *journal, uint64_t page, uint64_t homed);

/* Pages that were born in the running transaction go straight home now, and stay there if nobody
 * stores to them again. false: they are not home. REQUIRES: as for pms_journal_age, and nobody
 * stores to them meanwhile. CRASH: they are dead. */
bool pms_journal_write_early(struct pms_journal *journal, uint64_t page, uint64_t pages);

/* The same, of what lies elsewhere, piece by piece: see plan.h. */
bool pms_journal_begin_early(struct pms_journal *journal, uint64_t page, uint64_t pages);

struct pms_journal_stats {
    uint64_t commits, commit_syncs, home_syncs, journal_bytes, home_bytes, straight_bytes, waits;
};
void pms_journal_stats(struct pms_journal *journal, struct pms_journal_stats *stats);

/* fork children, from which later home writes are hidden */
struct pms_readers *pms_journal_readers(struct pms_journal *journal);

/* Drains, stops the thread, frees. After a fork in the child: only frees (pass in_child = true). */
int pms_journal_close(struct pms_journal *journal, bool in_child, struct pms_error *error);

#endif
