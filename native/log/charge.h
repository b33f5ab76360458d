/* What the log has to have room for, and whether that room is there.
 *
 * I5 the backed part of the log takes the ordinary blocks that live, all of them captured, and what
 * was captured of slots in the running transaction. Blocks of slots are hardly ever captured: for
 * them it is backed when they are, and whoever captures them may find the disk full. */
#ifndef PMS_LOG_CHARGE_H
#define PMS_LOG_CHARGE_H

#include "log/undo.h"

/* The pages are of a slot, or are not. REQUIRES: the operation lock. */
void pms_charge_mark(struct pms_undo *u, uint64_t page, uint64_t pages, bool slot);

/* Async-signal-safe. */
static inline bool pms_charge_is_slot(const struct pms_undo *u, uint64_t page)
{
    uint64_t word = atomic_load_explicit(&u->charge.slot[page / 64], memory_order_relaxed);
    return word >> page % 64 & 1;
}

/* Ordinary blocks may take so many bytes of entries from now on, or as many as before if that is
 * more: what was captured in the running transaction still counts. ERRORS: errno (ENOSPC: the disk
 * is full); nothing has changed then. REQUIRES: the operation lock, not the log lock. */
int pms_charge_ordinary(struct pms_undo *u, uint64_t bytes);
/* the same under the log lock */
int pms_charge_ordinary_locked(struct pms_undo *u, uint64_t bytes);

/* They take no more than that. REQUIRES: the operation lock, since before the running transaction
 * began: what was captured in it still counts. */
void pms_charge_less(struct pms_undo *u, uint64_t bytes);

/* Captures of slots are about to take so many bytes of entries. ERRORS: as above. REQUIRES: the log
 * lock. Async-signal-safe. */
int pms_charge_slots(struct pms_undo *u, uint64_t bytes);

#endif
