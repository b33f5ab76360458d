/* The undo log of the running transaction, in parts that have one owner each. Others call the
 * owner; undo.c opens, begins and closes them all.
 *
 *   log                entries.c   pre-images, in entries; apply.c puts them back
 *   prepared, changed  marks.c     what is known of whole pages
 *   left               idle.c      what is known of slots
 *   granules           stores.c    what the engine captured of pages that it stores to
 *   dirty              dirty.c     the ranges that were touched
 *   snapshots          snapshot.c  who reads the last commit meanwhile */
#ifndef PMS_LOG_UNDO_H
#define PMS_LOG_UNDO_H

#include "base/lock.h"
#include "log/dirty.h"
#include "seam/backing.h"
#include "seam/map.h"

struct pms_log_extent {
    uint64_t off, bytes;
};

/* an entry of the running transaction, for snapshots: read without the log lock, and checked
 * afterwards */
struct pms_taken {
    _Atomic uint64_t target, image; /* image: of its pre-image, from the log's base */
    _Atomic uint64_t len;
};

/* A list of extents: two small fast logs used in turn (by the parity of the transaction), then
 * the logs of all segments. Entries fill them in order. In domain file the same bytes lie in
 * anonymous memory: there the log serves roll back alone, and the journal makes commits durable.
 * Under the log lock. */
struct pms_log {
    unsigned char *base;              /* of the extents */
    bool in_memory;                   /* domain file */
    struct pms_persist *persist, own; /* own: counters of a log in memory */
    /* [0] = fast log of this parity, [1..] = segments */
    struct pms_log_extent extent[PMS_MAX_SEGMENTS + 1];
    uint32_t extent_count;
    /* segments' logs are cut in halves (PMS_FEATURE_HOLD); extent: those of this parity */
    bool halves;
    uint32_t at_extent; /* where the next entry goes */
    uint64_t at;
    uint32_t seq;   /* of the next entry: so many there are */
    bool unfenced;  /* entries appended since the last fence: only while the lock is held (I2) */
    bool gathering; /* between pms_undo_gather and pms_undo_gathered */
    uint64_t captured_bytes; /* pre-image bytes appended, since open */
    /* PMS_CRC_BLOCK bytes of a pre-image, before they are checksummed */
    unsigned char *steady;
    struct pms_taken *taken; /* by seq; address space reserved, never moved */
    uint64_t taken_room;
    /* Of a log in memory, by extent: how far it was ever used, and where it lies in the spill, each
     * half for itself */
    uint64_t used[PMS_MAX_SEGMENTS + 1];
    struct pms_log_extent spilled[PMS_MAX_SEGMENTS + 1][2];
    uint64_t memory_bytes; /* that it takes */
};

/* A mark of each page. What all pages of a block have in common is kept in one place: a large
 * block that changes as a whole (a slot) is marked by one store, not by one for each page. A page
 * that goes its own way (captured alone) leaves it, until the block is marked as a whole again.
 * Set under the log lock, read by anyone. */
struct pms_marks {
    _Atomic uint64_t *page; /* its mark, or PMS_MARK_WHOLE and the first page of its block */
    struct pms_whole {
        _Atomic uint64_t value;
        uint64_t pages; /* of the block; 0: it was never marked as a whole */
        bool all;       /* none has left */
    } *whole;           /* by a block's first page */
};

/* For the engine's stores: 128 bits a page. Under the log lock. */
struct pms_granules {
    uint64_t (*captured)[2]; /* or born */
    /* of these, born: not on the list of what commit writes back, so written back at every store */
    uint64_t (*born)[2];
};

/* Where the half of transaction `to` begins; x: that of transaction `from`. */
static inline uint64_t pms_undo_half(const struct pms_log_extent *x, uint64_t from, uint64_t to)
{
    return x->off - (from & 1) * x->bytes + (to & 1) * x->bytes;
}

struct pms_undo;
struct pms_snapshots;

/* Under the log lock. */
struct pms_keeping {
    /* Keeps what open snapshots need of a range that is about to be overwritten without a
     * pre-image. May give up the log lock and wait. NULL until a snapshot registers it. */
    void (*keep)(struct pms_undo *u, uint64_t off, uint64_t len);
    struct pms_snapshots *open;  /* or NULL */
    struct pms_snapshots *spare; /* memory of those before, for the next, or NULL */
};

/* What of the logs has to be backed (room.h). Under the log lock. */
struct pms_log_charge {
    struct pms_backing backing;
    bool slots;        /* blocks of slots are marked: captures ask */
    uint64_t ordinary; /* bytes of entries that captures of all other live blocks may take */
    uint64_t of_slots; /* that captures of slots have taken in this transaction */
    /* A bit a page: of a slot, living or gone but for its views. The page table does not tell of
     * the latter. Set under the operation lock. */
    _Atomic uint64_t *slot;
};

/* Of `slot`, for so many pages. */
static inline uint64_t pms_charge_marks_bytes(uint64_t pages) { return (pages / 64 + 1) * 8; }

struct pms_undo {
    struct pms_map *map;
    struct pms_persist *persist;
    struct pms_lock lock; /* the log lock: taken by the fault handler */
    uint64_t tag;         /* of the running transaction: anchor.tx + 1 */
    bool stored;          /* the engine stored something in this transaction */
    struct pms_log log;
    /* pms_undo_page_tag(p) == tag: every live byte of page p is captured or fresh */
    struct pms_marks prepared;
    struct pms_marks changed; /* tag of the last transaction that may have changed it, since open */
    /* by a block's first page: tag of the last transaction that flipped a pair of slots away */
    uint64_t *left;
    struct pms_granules granules;
    struct pms_dirty_list dirty;
    struct pms_keeping snapshots;
    struct pms_log_charge charge;
};

static inline void pms_undo_lock(struct pms_undo *u) { pms_lock_acquire(&u->lock); }

/* What the next holder appends comes above the entries appended so far, and it fences for its
 * own core alone. */
static inline void pms_undo_unlock(struct pms_undo *u)
{
    PMS_ASSERT(!u->log.unfenced); /* I2 */
    pms_lock_release(&u->lock);
}

/* Before [off, off+len) is overwritten without a pre-image (I6). REQUIRES: the log lock, which
 * may be given up and taken again; nothing is under way that it protects. */
static inline void pms_undo_keep(struct pms_undo *u, uint64_t off, uint64_t len)
{
    if (u->snapshots.keep)
        u->snapshots.keep(u, off, len);
}

/* in_memory: the log is (domain file). ERRORS: PMS_E_OS (no memory). */
int pms_undo_open(struct pms_undo *u, struct pms_map *map, bool in_memory, struct pms_error *error);
/* also after growth */
void pms_undo_set_extents(struct pms_undo *u, const struct pms_superblock *super);
void pms_undo_close(struct pms_undo *u);
/* empties the log of this transaction; dirty list too */
void pms_undo_begin(struct pms_undo *u, uint64_t tag);

/* Memory of a log in memory that the transactions before needed, and nobody does now; its room in
 * the spill, too. false: it is needed. REQUIRES: the log lock. */
bool pms_undo_give_back(struct pms_undo *u);

/* Bytes of entries that fit for sure in one transaction, whatever their sizes (I5). */
uint64_t pms_undo_capacity(const struct pms_undo *u);
/* the same once logs are cut in halves, as they may be already */
uint64_t pms_undo_capacity_of_half(const struct pms_undo *u);

#endif
