/* Open snapshots themselves, for snapshot.c (opening), reading.c and kept.c (what they need of
 * pages that change). */
#ifndef PMS_LOG_SNAPSHOT_STATE_H
#define PMS_LOG_SNAPSHOT_STATE_H

#include "log/snapshot.h"

#define PMS_SNAPSHOT_DONE UINT32_MAX /* in a slot: released */

/* What all open snapshots of a store share. Kept pages are numbered from 1; 0 in a slot: nothing
 * kept, still needed. */
struct pms_snapshots {
    struct pms_snapshot *first;
    unsigned char *page; /* kept pages */
    uint32_t *refs;      /* of each: snapshots that need it */
    uint32_t *free;      /* stack of numbers given back */
    uint32_t *building;  /* by page of the store: number of a kept page that is being made */
    uint64_t *batch;     /* pages being made */
    uint64_t *page_of;   /* of each kept page: which page of the store it is */
    uint64_t batch_count;
    /* of this transaction the first `done` entries have nothing (more) that any of the snapshots
     * needs */
    uint64_t done_tag, done;
    uint64_t looks;                              /* entries looked at so far, to keep their pages */
    uint64_t capacity;                           /* pages that the arrays have a place for */
    uint64_t room, used, peak, free_count, made; /* pages */
    uint64_t store_pages;
    uint32_t writers;          /* that wait */
    _Atomic uint32_t progress; /* changes when pages are released: what a writer waits for */
};

struct pms_snapshot {
    struct pms_undo *undo;
    struct pms_snapshot *next;
    struct pms_superblock super;
    /* transaction that ran when it was opened: the first whose writes do not belong to it */
    uint64_t tag;
    uint64_t pages;                  /* of the store then */
    _Atomic uint32_t *slot;          /* by page */
    uint8_t *live;                   /* by chunk, or NULL: what will be read at all */
    uint64_t live_pages, live_count; /* pages a chunk; chunks */
    int64_t max_wait_ns;
    uint64_t waits, wait_ns;
    bool lost;            /* a writer waited too long: under the log lock */
    bool listed;          /* under the log lock */
    struct pms_lock gate; /* protects the next two, and outlives the store */
    bool detached;
    uint32_t inside;
    _Atomic uint32_t left;   /* +1 when a reader leaves */
    _Atomic uint32_t let_go; /* 1: who detached it will not look at it again */
};

/* A reader that is inside keeps the store from going. false: it was closed. */
bool pms_snapshot_enter(struct pms_snapshot *s);
void pms_snapshot_leave(struct pms_snapshot *s);

/* All of these: REQUIRES the log lock. */

/* No: the transaction has more entries than the list has room for. */
static inline bool pms_snapshot_all_taken(const struct pms_undo *u)
{
    return u->log.seq <= u->log.taken_room;
}

static inline unsigned char *pms_snapshot_kept(const struct pms_snapshots *all, uint32_t number)
{
    return all->page + (number - 1ull) * PMS_PAGE;
}

/* struct pms_keeping's keep (I6). */
void pms_snapshot_keep(struct pms_undo *u, uint64_t off, uint64_t bytes);

void pms_snapshot_unref(struct pms_snapshots *all, uint32_t number); /* of a kept page */

/* A snapshot that cannot be served any more: what it kept goes back. */
void pms_snapshot_lose(struct pms_snapshots *all, struct pms_snapshot *s);

#endif
