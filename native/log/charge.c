#include "log/charge.h"

/* Beside what is counted: copies of hot ranges and the headers and partial pages of a journal's
 * record. */
#define SLACK (2u * PMS_FASTLOG_BYTES)
#define STEP (64u << 10) /* small blocks do not each take the lock */

static int reach(struct pms_undo *u, uint64_t ordinary, uint64_t of_slots)
{
    return pms_backing_reach(&u->charge.backing, ordinary + of_slots + SLACK);
}

static uint64_t in_steps(uint64_t bytes) { return (bytes + STEP - 1) & ~(uint64_t)(STEP - 1); }

int pms_charge_ordinary_locked(struct pms_undo *u, uint64_t bytes)
{
    bytes = in_steps(bytes);
    if (bytes < u->charge.ordinary)
        bytes = u->charge.ordinary;
    /* also if it is no more than before: the logs may be others */
    int err = reach(u, bytes, u->charge.of_slots);
    if (!err)
        u->charge.ordinary = bytes;
    return err;
}

int pms_charge_ordinary(struct pms_undo *u, uint64_t bytes)
{
    if (bytes <= u->charge.ordinary) /* which changes under the operation lock alone */
        return 0;
    pms_undo_lock(u);
    int err = pms_charge_ordinary_locked(u, bytes);
    pms_undo_unlock(u);
    return err;
}

void pms_charge_less(struct pms_undo *u, uint64_t bytes)
{
    if (bytes + 2 * STEP > u->charge.ordinary)
        return;
    pms_undo_lock(u);
    u->charge.ordinary = in_steps(bytes);
    pms_undo_unlock(u);
}

void pms_charge_mark(struct pms_undo *u, uint64_t page, uint64_t pages, bool slot)
{
    if (!slot && !u->charge.slots) /* none is marked */
        return;
    for (uint64_t end = page + pages, to; page < end; page = to) {
        to = (page / 64 + 1) * 64 < end ? (page / 64 + 1) * 64 : end;
        uint64_t bits = (to - page == 64 ? 0 : 1ull << (to - page)) - 1;
        _Atomic uint64_t *word = &u->charge.slot[page / 64];
        bits <<= page % 64;
        /* one writer */
        uint64_t old = atomic_load_explicit(word, memory_order_relaxed);
        uint64_t now = slot ? old | bits : old & ~bits;
        if (now != old)
            atomic_store_explicit(word, now, memory_order_relaxed);
    }
}

int pms_charge_slots(struct pms_undo *u, uint64_t bytes)
{
    int err = bytes ? reach(u, u->charge.ordinary, u->charge.of_slots + bytes) : 0;
    if (!err)
        u->charge.of_slots += bytes;
    return err;
}
