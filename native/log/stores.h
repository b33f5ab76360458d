/* The engine's only ways to store into the heap, for heap and names. The caller holds the
 * operation lock; these take the log lock themselves, but for the _locked ones.
 *
 * I3 a byte that was live at the last commit changes only after its pre-image is durable. (What
 * users store: commit/capture.c. Slots: idle.h.) */
#ifndef PMS_LOG_STORES_H
#define PMS_LOG_STORES_H

#include "log/undo.h"

struct pms_store {
    uint64_t off;
    const void *src;
    uint64_t len;
};

/* Stores several ranges, all captured first, with one fence if something had to be captured. The
 * log lock is held from the first entry to the last store: an entry that another thread's fault
 * appends above these relies on their being durable (I2).
 * REQUIRES: transaction active; the ranges lie in engine-owned space, none empty, none over
 * another; no src lies in a page that may fault.
 * ERRORS: none (I5).  CRASH: each entry absent or whole; no target touched until all entries are
 * durable. */
void pms_undo_store_all(struct pms_undo *u, const struct pms_store *s, uint32_t count);
/* one range */
void pms_undo_store(struct pms_undo *u, uint64_t off, const void *src, uint64_t len);

/* The two halves of it: a caller that does more under the log lock. Between them a fence (I2). */
void pms_undo_prepare_locked(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_write_locked(struct pms_undo *u, uint64_t off, const void *src, uint64_t len);
/* private views; no-op in shared ones */
void pms_undo_make_writable(struct pms_undo *u, uint64_t off, uint64_t len);

/* Stores into a block that was dead at the last commit (born in this transaction): no pre-image;
 * the range is written back at commit. src NULL: zeros. */
void pms_undo_store_fresh(struct pms_undo *u, uint64_t off, const void *src, uint64_t len);

/* The same for a block that the caller fills itself, through the engine's view, by
 * pms_persist_copy or _zero with counters of its own, which it adds afterwards. */
void pms_undo_note_born(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_count(struct pms_undo *u, const struct pms_persist *own);

/* Declares whole pages dead at the last commit: the user may write there without capture from
 * now on. */
void pms_undo_mark_fresh(struct pms_undo *u, uint64_t off, uint64_t len);

/* The engine captured a part of this page, or the page is born. REQUIRES: the log lock. */
static inline bool pms_undo_is_engines(const struct pms_undo *u, uint64_t page)
{
    return (u->granules.captured[page][0] | u->granules.captured[page][1]) != 0;
}

#endif
