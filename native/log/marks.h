/* What is known of whole pages: whether the running transaction needs a pre-image of them, and
 * which transaction changed them last. Where not said otherwise: REQUIRES the log lock to set,
 * nothing to ask. */
#ifndef PMS_LOG_MARKS_H
#define PMS_LOG_MARKS_H

#include "log/undo.h"

#define PMS_TAG_IDLE (1ull << 62) /* a page's tag: see idle.h */
/* of a page: the block that begins at this page has the mark, kept for all of it */
#define PMS_MARK_WHOLE (1ull << 63)

static inline uint64_t pms_mark_of(const struct pms_marks *m, uint64_t page)
{
    uint64_t mark = atomic_load_explicit(&m->page[page], memory_order_acquire);
    if (mark & PMS_MARK_WHOLE)
        mark = atomic_load_explicit(&m->whole[mark & ~PMS_MARK_WHOLE].value, memory_order_acquire);
    return mark;
}

static inline uint64_t pms_undo_page_tag(const struct pms_undo *u, uint64_t page)
{
    return pms_mark_of(&u->prepared, page);
}

/* needs no pre-image in this transaction (any more) */
static inline bool pms_undo_page_prepared(const struct pms_undo *u, uint64_t page)
{
    uint64_t tag = pms_undo_page_tag(u, page);
    return tag == u->tag || tag == PMS_TAG_IDLE;
}

/* for incremental snapshots */
static inline uint64_t pms_undo_page_changed(const struct pms_undo *u, uint64_t page)
{
    return pms_mark_of(&u->changed, page);
}

void pms_undo_set_changed(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_set_prepared(struct pms_undo *u, uint64_t off, uint64_t len); /* whole pages */

/* Marks a whole block of the user's, of pages of its own. tag: of its pages; that it changed: by
 * this transaction. */
void pms_undo_tag_block(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t tag);
void pms_undo_change_block(struct pms_undo *u, uint64_t off, uint64_t len);
/* of a block's mark as a whole; 0: none. REQUIRES: the operation lock */
uint64_t pms_undo_block_tag(const struct pms_undo *u, uint64_t off);
/* Where the block ends whose mark the page before `end` has; `end` if it has one of its own. */
uint64_t pms_undo_block_end(const struct pms_undo *u, uint64_t end);
/* The block is about to be freed: its pages go their own ways, as it was marked. REQUIRES: it is
 * not idle; the operation lock, not the log lock. */
void pms_undo_part_block(struct pms_undo *u, uint64_t off);

#endif
