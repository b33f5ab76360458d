/* The undo log of the running transaction, and the engine's only ways to store into the heap.
 *
 * The log is a list of extents: two small fast logs used in turn (by the parity of the
 * transaction), then the logs of all segments. Entries fill them in order. In domain file the
 * same bytes lie in anonymous memory: there the log serves roll back alone, and the journal
 * makes commits durable.
 *
 * I1 an entry is valid iff its tag is anchor.tx + 1, its seq is next and its checksum holds; the
 * log is the longest valid
 *    prefix, where an extent's end may come early (the next entry is then the first of the next
 *    extent).
 * I2 no target is stored to, or made writable, before its entry and every lower seq are durable.
 * I3 a byte that was live at the last commit changes only after its pre-image is durable. */
#ifndef PMS_LOG_UNDO_H
#define PMS_LOG_UNDO_H

#include "base/lock.h"
#include "seam/map.h"

enum pms_dirty_kind {
    PMS_DIRTY_ENGINE = 1, /* stored to by the engine; captured by granule */
    PMS_DIRTY_USER = 2,   /* whole pages captured; writable in the user's view */
    PMS_DIRTY_FRESH = 3,  /* dead at the last commit: written back at commit, no pre-image */
    /* as USER, captured before the transaction began; stays writable after it */
    PMS_DIRTY_HOT = 4,
    /* as FRESH, but stored to by the engine alone: never writable for the user on its account */
    PMS_DIRTY_BORN = 5,
};

struct pms_dirty {
    uint64_t off;
    uint64_t len;
    uint64_t log_pos; /* HOT: offset of the entry's pre-image from undo.log */
    uint32_t kind;
    uint32_t idle; /* HOT: commits in a row that found it unchanged */
};

struct pms_log_extent {
    uint64_t off, bytes;
};

/* an entry of the running transaction, for snapshots: read without the log lock, and checked
 * afterwards */
struct pms_taken {
    _Atomic uint64_t target, image; /* image: of its pre-image, from undo.log */
    _Atomic uint64_t len;
};

/* What all pages of a block have in common, kept in one place: a large block that changes as a
 * whole (a slot) is marked by one store, not by one for each page. A page that goes its own way
 * (captured alone) leaves it, until the block is marked as a whole again. */
struct pms_mark {
    _Atomic uint64_t value;
    uint64_t pages; /* of the block; 0: it was never marked as a whole */
    bool all;       /* none has left */
};

struct pms_whole {
    struct pms_mark tag, changed;
    /* tag of the last transaction that flipped a pair of slots away from this block */
    uint64_t left;
};

struct pms_snapshots;

struct pms_undo {
    struct pms_map *map;
    struct pms_persist *persist;
    struct pms_persist volatile_persist; /* counters of the log in domain file */
    struct pms_persist *log_persist;
    unsigned char *log; /* base of the log's extents */
    bool volatile_log;  /* domain file */
    /* [0] = fast log of this parity, [1..] = segments */
    struct pms_log_extent extent[PMS_MAX_SEGMENTS + 1];
    uint32_t extent_count;
    uint32_t at_extent; /* where the next entry goes */
    uint64_t at;
    uint64_t tag; /* anchor.tx + 1 */
    uint32_t seq;
    uint64_t scattered; /* log lines that granules of the user's pages took: see pms_write */
    /* entries appended since the last fence: only while the log lock is held (I2) */
    bool unfenced;
    bool stored;          /* the engine stored something in this transaction */
    bool gathering;       /* between pms_undo_gather and pms_undo_gathered */
    struct pms_lock lock; /* the log lock: taken by the fault handler */
    /* pms_undo_page_tag(p) == tag: every live byte of page p is captured or fresh */
    _Atomic uint64_t *page_tag;
    uint64_t (*granule)[2]; /* captured or born, for the engine's stores: 128 bits a page */
    /* of these, born: not on the list of what commit writes back, so written back at every store */
    uint64_t (*born)[2];
    /* this transaction's ranges, in order; address space reserved, never moved */
    struct pms_dirty *dirty;
    uint64_t dirty_count;
    uint64_t dirty_room;
    uint64_t captured_bytes; /* pre-image bytes appended, since open */
    /* PMS_CRC_BLOCK bytes of a pre-image, before they are checksummed; under the log lock */
    unsigned char *steady;
    struct pms_taken *taken; /* by seq; address space reserved, never moved */
    uint64_t taken_room;
    /* page: tag of the last transaction that may have changed it, since open */
    _Atomic uint64_t *changed;
    /* by a block's first page: what page_tag and changed refer to where they are a
     * PMS_MARK_WHOLE */
    struct pms_whole *whole;
    struct pms_snapshots *snapshots; /* open ones, or NULL; under the log lock */
    /* memory of those before, for the next, or NULL; under the log lock */
    struct pms_snapshots *spare_snapshots;
};

/* ---- for heap and directory. The caller holds the pool's operation lock; these take the log
 * lock themselves. ---- */

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

/* ---- for capture and tx ---- */

static inline void pms_undo_lock(struct pms_undo *u) { pms_lock_acquire(&u->lock); }

/* What the next holder appends comes above the entries appended so far, and it fences for its
 * own core alone. */
static inline void pms_undo_unlock(struct pms_undo *u)
{
    PMS_ASSERT(!u->unfenced); /* I2 */
    pms_lock_release(&u->lock);
}

int pms_undo_open(struct pms_undo *u, struct pms_map *map, bool volatile_log,
                  struct pms_error *error);
/* also after growth */
void pms_undo_set_extents(struct pms_undo *u, const struct pms_superblock *super);
void pms_undo_close(struct pms_undo *u);
/* empties the log of this transaction; dirty list too */
void pms_undo_begin(struct pms_undo *u, uint64_t tag);

/* Bytes of entries that fit for sure in one transaction, whatever their sizes (I5). */
uint64_t pms_undo_capacity(const struct pms_undo *u);

void pms_undo_after_fork_in_child(void);

/* Appends pre-images of [off, off+len), split where an extent ends; large ones by all cores. Not
 * fenced. Copied, then checksummed: checksum and pre-image agree whatever the copy holds. A torn
 * entry would hide every later one (I1, I2).
 * REQUIRES: the log lock. Async-signal-safe. */
void pms_undo_append(struct pms_undo *u, uint64_t off, uint64_t len);

/* Between the two, pre-images of what is appended are not copied yet: gathered copies all of
 * them, by all cores. Worth it from PMS_UNDO_PARALLEL bytes on. REQUIRES: the log lock, held
 * from one to the other; no fence and no store to a target between them (I2). */
#define PMS_UNDO_PARALLEL (4u << 20)
void pms_undo_gather(struct pms_undo *u);
void pms_undo_gathered(struct pms_undo *u);

/* Pages that stay writable while a transaction is committed (hot ranges) may be stored to
 * meanwhile. So their pre-images for the next transaction are copied before anything of this one
 * is made durable, and the copy is the truth: it is what this transaction commits, and whatever
 * differs from it afterwards is the next one's.
 *
 * copy_ahead writes such an entry, at the beginning of the next transaction's log; not fenced.
 * It is copied, then checksummed, so that both agree whatever the copy holds: a torn entry would
 * hide every later one (I1, I2). Returns where the image lies, from undo.log. take_ahead, once
 * that transaction has begun, makes the entry one of its own: first of all, in the order of the
 * copies. Or they are dropped, where the commit failed: else what that transaction appends one
 * day could end just before one of them, and they would follow as if they were its own.
 * (Recovery never uses a tag again that may have copies.)
 * REQUIRES: the log lock from the first copy until all are taken or dropped.
 * CRASH: an entry of the next tag: it counts from the moment when the anchor does (I1). */
struct pms_ahead {
    uint64_t at;
    uint32_t seq;
}; /* where the next copy goes; {0} at first */
uint64_t pms_undo_copy_ahead(struct pms_undo *u, struct pms_ahead *next, uint64_t off,
                             uint64_t len);
void pms_undo_take_ahead(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_drop_ahead(struct pms_undo *u, uint64_t image, uint64_t len); /* image: as returned */
void pms_undo_fence_locked(struct pms_undo *u);
void pms_undo_fenced(struct pms_undo *u); /* the caller has executed the fence */
/* private views; no-op in shared ones */
void pms_undo_make_writable(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_write_locked(struct pms_undo *u, uint64_t off, const void *src, uint64_t len);
void pms_undo_prepare_locked(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_note(struct pms_undo *u, enum pms_dirty_kind kind, uint64_t off, uint64_t len,
                   uint64_t log_pos);
#define PMS_TAG_IDLE (1ull << 62) /* a page's tag: see idle.h */
/* in page_tag and changed: the block that begins at this page has the mark, in `whole` */
#define PMS_MARK_WHOLE (1ull << 63)
/* needs no pre-image in this transaction (any more) */
bool pms_undo_page_prepared(const struct pms_undo *u, uint64_t page);
uint64_t pms_undo_page_tag(const struct pms_undo *u, uint64_t page);
/* of a block's mark as a whole; 0: none. REQUIRES: the operation lock */
uint64_t pms_undo_block_tag(const struct pms_undo *u, uint64_t off);
uint64_t pms_undo_page_changed(const struct pms_undo *u, uint64_t page);
/* for incremental snapshots */
void pms_undo_set_changed(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_set_prepared(struct pms_undo *u, uint64_t off, uint64_t len); /* whole pages */

/* Marks a whole block of the user's, of pages of its own. tag: of its pages; that it changed: by
 * this transaction. */
void pms_undo_tag_block(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t tag);
void pms_undo_change_block(struct pms_undo *u, uint64_t off, uint64_t len);
/* The block is about to be freed: its pages go their own ways, as it was marked. REQUIRES: it is
 * not idle; the operation lock. */
void pms_undo_part_block(struct pms_undo *u, uint64_t off);

/* Walks the valid prefix of the log of transaction tag (I1), oldest first; fn gets each entry
 * and its pre-image. Stops with fn's non-zero result. Reads only. */
int pms_undo_scan(const struct pms_undo *u, uint64_t tag,
                  int (*fn)(void *ctx, const struct pms_entry *entry, const void *image),
                  void *ctx);

/* Puts the valid prefix of transaction tag back, newest first, into dst_base + target (written
 * back, not fenced). Returns the number of entries, or -1 if an entry's target is no place for
 * one (then nothing was stored). */
int64_t pms_undo_apply(struct pms_undo *u, uint64_t tag, unsigned char *dst_base,
                       const struct pms_superblock *super, uint64_t *bytes);

/* Whether the user's pages are what the running transaction's entries say: only those that were
 * captured as whole pages, each of which has one entry; the engine's own granules nobody else
 * stores to. REQUIRES: the log lock; they are protected. */
bool pms_undo_is_applied(const struct pms_undo *u);

#endif
