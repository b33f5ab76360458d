/* Snapshots: the last committed state, read while transactions go on.
 *
 * Before a transaction first writes to a page, its content is in the undo log (capture). So a
 * page as of the snapshot is its content now with the log's entries laid over it, newest first,
 * or, once a later transaction has ended and its log is used again, the *kept page* that was
 * made of both at that moment. Nothing is copied when a snapshot opens, and a page that nobody
 * writes is never kept. DeepFreeze (CCGrid 2020) flushes checkpoints so; here there is no
 * checkpoint, only what capture has saved anyway.
 *
 * A reader copies first and looks for entries afterwards: whatever change its copy may have
 * seen, the entry was there before it (I3), so what it lays over the copy is complete. If the
 * transaction ended meanwhile it copies again. What nobody has written to since need not be
 * copied to be written elsewhere: it is read in place, and looked at again afterwards.
 *
 * Kept pages are bounded. An end of a transaction, or a first write into space that was free,
 * that would pass the bound waits for readers to release what they have read; a reader that
 * keeps it waiting too long loses its snapshot (PMS_E_STATE), not the writer its transaction.
 *
 * I6 space that is overwritten without a pre-image (fresh blocks, idle extents of slots) goes
 * through pms_undo_keep first. */
#ifndef PMS_LOG_SNAPSHOT_H
#define PMS_LOG_SNAPSHOT_H

#include "log/undo.h"

struct pms_snapshot;

struct pms_snapshot_stats {
    uint64_t kept_bytes; /* now, of all snapshots of the store */
    uint64_t peak_bytes; /* most at once, since the first of those open now was opened */
    uint64_t bound_bytes;
    uint64_t waits; /* of writers, since this snapshot was opened */
    uint64_t wait_ns;
};

/* Pins the state of the last commit. Takes the log lock for as long as it takes to note two
 * numbers, whatever the size of the store. bound_bytes: of kept pages; while snapshots are open
 * the largest of theirs holds. max_wait_ns: how long a writer waits at the bound before this
 * snapshot is given up (< 0: for ever). What the running transaction captured without a copy is
 * copied now (bare.h).  ERRORS: PMS_E_OS (no memory, or the file cannot be read), PMS_E_STATE. */
int pms_snapshot_open(struct pms_undo *u, const struct pms_superblock *super, uint64_t bound_bytes,
                      int64_t max_wait_ns, struct pms_snapshot **snapshot, struct pms_error *error);

/* Gives everything back; also after pms_snapshot_detach_all. No other call on it may be running. */
void pms_snapshot_close(struct pms_snapshot *s);

/* Closes them all for readers, and waits for those that are inside. Before the store goes. */
void pms_snapshot_detach_all(struct pms_undo *u);

/* Copies whole pages as of the snapshot. What is not state (superblock, anchors, session, logs,
 * beyond the end) reads as zeros. Any thread, several at once.  ERRORS: PMS_E_STATE: a writer
 * waited too long for room; PMS_E_CLOSED; PMS_E_INVALID: not whole pages. */
int pms_snapshot_read(struct pms_snapshot *s, uint64_t off, uint64_t bytes, void *dst,
                      struct pms_error *error);

/* Whether whole pages of the store itself are what they were when the snapshot was opened, and
 * what is stored to them from now on shows when this is asked again: none was written or
 * captured since, or kept for a snapshot, or released, or may be written without capture (an
 * idle slot). What was read from `at` meanwhile is as of the snapshot if both answers were yes.
 * crc: NULL, or where the CRC-32C of what is there goes (of any bytes, should they change
 * meanwhile). No for what is not state, and once the snapshot was given up or the store is
 * closed. The store may close as soon as the call is over, and `at` may be anything then: it is
 * for a system call to read, which fails where nothing is. The log lock is taken for a moment,
 * before the pages are looked at, and not held while they are looked at and summed up.
 * REQUIRES: not the log lock; whole pages.  Any thread, several at once. */
bool pms_snapshot_in_place(struct pms_snapshot *s, uint64_t off, uint64_t bytes,
                           const unsigned char **at, uint32_t *crc);

/* Says that a range will not be read again: its kept pages are given back, and no more are kept. */
void pms_snapshot_release(struct pms_snapshot *s, uint64_t off, uint64_t bytes);

/* Says which chunks will be read at all: live[i] != 0. live stays the caller's. Once. ERRORS:
 * PMS_E_OS. */
int pms_snapshot_only(struct pms_snapshot *s, uint64_t chunk_bytes, const uint8_t *live,
                      uint64_t chunks, struct pms_error *error);

/* Which pages may have changed between a former snapshot and this one: sets changed[i] for
 * chunks with a page that a transaction with a tag of at least `since` touched. since =
 * pms_snapshot_tag of the former one, of the same opening of the store. */
void pms_snapshot_changed(const struct pms_snapshot *s, uint64_t since, uint64_t chunk_bytes,
                          uint8_t *changed, uint64_t chunks);
uint64_t pms_snapshot_tag(const struct pms_snapshot *s);
const struct pms_superblock *pms_snapshot_super(const struct pms_snapshot *s);
void pms_snapshot_get_stats(struct pms_snapshot *s, struct pms_snapshot_stats *stats);

/* ---- for the writing side ---- */

/* Keeps what open snapshots need of the pages that this transaction wrote, before its log is used
 * again. May wait. REQUIRES: the log lock, which is given up while it waits. */
void pms_snapshot_keep_transaction(struct pms_undo *u);

#endif
