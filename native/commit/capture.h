/* Capture before write: the fault handler and declared writes.
 *
 * Pages of the user's view are read-only until their content is in the undo log. The first store
 * into one faults; the handler appends the pre-image, fences (F1), makes the pages writable and
 * returns, and the store is tried again.
 *
 * The handler runs on any thread, at any user instruction that stores into the heap. It is
 * async-signal-safe: no memory, no library lock, small frame, all signals masked. Faults that
 * are not ours go to whoever had the signal before. */
#ifndef PMS_COMMIT_CAPTURE_H
#define PMS_COMMIT_CAPTURE_H

#include "commit/handler.h"
#include "heap/heap.h"
#include "log/entries.h"
#include "log/marks.h"

/* pre-images that fit the fast log beside the root's */
#define PMS_HOT_TOTAL_MAX (PMS_FASTLOG_BYTES - (16u << 10))
#define PMS_HOT_RANGES 64u

/* a sequential writer: where it will fault next, and how much it got last */
struct pms_stream {
    uint64_t next, bytes;
};
/* was this extent written whole in the last transaction? */
struct pms_density {
    uint64_t extent, tag, bytes;
    bool dense;
};

struct pms_capture {
    struct pms_watched watched; /* the handler's */
    struct pms_undo *undo;
    struct pms_map *map;
    struct pms_heap *heap;
    const struct pms_superblock *super;
    bool hot;
    uint8_t *heat; /* a page's captures in consecutive transactions */
    struct pms_stream stream[64];
    struct pms_density density[64];
    uint64_t faults, captures;
};

int pms_capture_open(struct pms_capture *c, struct pms_undo *undo, struct pms_heap *heap,
                     const struct pms_superblock *super, bool read_only, bool hot,
                     struct pms_error *error);
void pms_capture_close(struct pms_capture *c); /* no handler is inside afterwards */

/* Captures whole pages around the ranges (offsets) and makes them writable. One fence for all.
 * The ranges come back in another order.
 * ERRORS: PMS_E_INVALID: a range is not in a user's block. */
struct pms_span {
    uint64_t off, bytes;
};
int pms_capture_spans(struct pms_capture *c, struct pms_span *span, uint64_t count,
                      struct pms_error *error);

/* Appends the pre-images of those pages of the span that are not prepared; not fenced, and still
 * protected. kind: USER or FAULTED. REQUIRES: the log lock; whole pages, protected. */
void pms_capture_append(struct pms_capture *c, struct pms_span span, enum pms_dirty_kind kind);

/* Ends writing: protects what the transaction made writable, but for hot ranges. REQUIRES: the
 * log lock. */
void pms_capture_protect(struct pms_capture *c);

/* As above, hot ranges included. REQUIRES: the log lock. */
void pms_capture_protect_all(struct pms_capture *c);

/* Chooses the ranges that stay writable: written in each of the last transactions, small. Fills
 * hot[PMS_HOT_RANGES], returns how many. REQUIRES: the log lock, before pms_capture_protect. */
uint32_t pms_capture_choose_hot(struct pms_capture *c, struct pms_dirty *hot);

/* Copies the hot ranges into the next transaction's log (not fenced) and notes where (log_pos):
 * see pms_undo_copy_ahead. What the running transaction commits of them is these copies.
 * REQUIRES: the log lock; pms_capture_protect is done. */
void pms_capture_copy_hot(struct pms_capture *c, struct pms_dirty *hot, uint32_t count);

/* the commit failed */
void pms_capture_drop_hot(struct pms_capture *c, const struct pms_dirty *hot, uint32_t count);

/* The copies are entries of the transaction that has just begun. REQUIRES: the log lock; nothing
 * was appended yet. */
void pms_capture_take_hot(struct pms_capture *c, const struct pms_dirty *hot, uint32_t count);

/* True if any hot range differs from its pre-image, i.e. was written in this transaction. */
bool pms_capture_hot_changed(const struct pms_capture *c);

#endif
