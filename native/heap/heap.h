/* The allocator: size classes in slabs, larger blocks as page extents. Best fit, single writer.
 *
 * What is on the medium is the page table (layout.h), changed through stores.h alone, so a roll
 * back or a crash restores it with everything else (I4). The index of free space is volatile and
 * rebuilt from the page table at open and after a roll back, in time proportional to the number
 * of extents, whatever their size.
 *
 * I6 a block freed in a transaction is reused only after it committed, and never while it is
 * pinned (a view of it lives). A
 *    block born and freed in one transaction may be reused at once.
 * Free extents are merged in the index only; on the medium neighbours may both be FREE. They keep
 * their pages on the disk: a full disk might refuse others. */
#ifndef PMS_HEAP_HEAP_H
#define PMS_HEAP_HEAP_H

#include "heap/owner.h"
#include "log/stores.h"

#define PMS_SMALL_MAX (32u << 10)

struct pms_block {
    uint64_t off;                      /* of the block */
    uint64_t bytes;                    /* room: the slot's or the extent's size */
    uint64_t extent_off, extent_bytes; /* the slab or extent that holds it */
    enum pms_kind kind;
    bool live; /* allocated, as the medium says now */
    bool slot; /* of a pair of slots: charged when it is captured (I5) */
};

struct pms_heap; /* volatile index */

/* Builds the index. Checks everything it follows. Keeps undo and super. ERRORS: PMS_E_CORRUPT,
 * PMS_E_OS (no memory). */
int pms_heap_open(struct pms_heap **heap, struct pms_undo *undo, const struct pms_superblock *super,
                  struct pms_error *error);
void pms_heap_close(struct pms_heap *heap);

/* After roll back: builds the index anew from the medium; pins survive. ERRORS: PMS_E_CORRUPT,
 * PMS_E_OS. */
int pms_heap_rebuild(struct pms_heap *heap, struct pms_error *error);

/* After growth, in the middle of a transaction too: adds segment i of the superblock to the
 * index. ERRORS: PMS_E_CORRUPT, PMS_E_OS. */
int pms_heap_add_segment(struct pms_heap *heap, uint32_t i, struct pms_error *error);

/* A block of at least bytes (> 0), 64-byte aligned; extents of PMS_HUGE and more aligned to
 * PMS_HUGE. Content undefined (old bytes; the caller zeroes or fills). ERRORS: PMS_E_FULL
 * (needed, available), PMS_E_OS (no memory), PMS_E_INVALID (bytes is 0); nothing changed but
 * where empty slabs went.  CRASH: as if it had not been. */
int pms_heap_alloc(struct pms_heap *heap, uint64_t bytes, enum pms_owner owner, uint64_t *off,
                   struct pms_error *error);

/* A block of a pair of slots, of more than PMS_SMALL_MAX bytes: as above, but no log is backed for
 * it. REQUIRES: the superblock has PMS_FEATURE_THIN. */
int pms_heap_alloc_slot(struct pms_heap *heap, uint64_t bytes, uint64_t *off,
                        struct pms_error *error);

/* Frees the block at off (its first byte). Never fails on a live block; PMS_E_INVALID else. */
int pms_heap_free(struct pms_heap *heap, uint64_t off, struct pms_error *error);

/* A view keeps the block from being reused, whatever becomes of it. Counted. Unpin: after the
 * last one a dead block returns to the index. ERRORS of pin: PMS_E_INVALID (no block starts at
 * off), PMS_E_OS (no memory); nothing is pinned then. */
int pms_heap_pin(struct pms_heap *heap, uint64_t off, struct pms_error *error);
void pms_heap_unpin(struct pms_heap *heap, uint64_t off);

/* Hands over what is pinned, by offset: memory of the caller's from here on (free). NULL: nothing
 * is. The heap knows of no pin any more. */
struct pms_pin *pms_heap_take_pins(struct pms_heap *heap, uint64_t *count);

/* After the commit point: blocks freed by the transaction become reusable (I6). hold: not yet, but
 * those that were held. */
void pms_heap_committed(struct pms_heap *heap, bool hold);

/* What is held becomes reusable. */
void pms_heap_release(struct pms_heap *heap);

/* After the index was built: blocks that the transaction `tag` freed, whose log is kept, are held.
 * REQUIRES: it is the last one that was committed. ERRORS: PMS_E_OS (no memory). */
int pms_heap_hold(struct pms_heap *heap, uint64_t tag, struct pms_error *error);

/* The block that holds the byte at off; live tells whether a slot is in use. false: outside all
 * segments, in a free extent (also one that a view still holds) or past a slab's slots.
 * Async-signal-safe, no lock, beside any other call but close: the answer is exact for live
 * blocks, whose extents do not change. */
bool pms_heap_find(const struct pms_heap *heap, uint64_t off, struct pms_block *block);

/* The first extent in use that begins at or after a page: off, bytes and kind of *extent. false:
 * there is none. */
bool pms_heap_next_used(const struct pms_heap *heap, uint64_t page, struct pms_block *extent);

/* True if the block at off was born in the running transaction. */
bool pms_heap_is_fresh(const struct pms_heap *heap, uint64_t off);

/* I5: of a page table for so many pages, captured granule by granule. */
static inline uint64_t pms_heap_table_cost(uint64_t pages)
{
    return pages * 2 * sizeof(struct pms_pte);
}

struct pms_heap_stats {
    uint64_t data_bytes;   /* all data pages */
    uint64_t used_bytes;   /* pages of extents in use; slabs count by slots in use */
    uint64_t free_bytes;   /* reusable now */
    uint64_t pinned_bytes; /* dead, held by views */
    uint64_t largest_free; /* bytes */
    uint64_t blocks;       /* live */
    uint64_t log_need;     /* I5: bytes of log that capture of everything live may take */
    uint64_t slot_need;    /* of these, of slots */
};
void pms_heap_stats(const struct pms_heap *heap, struct pms_heap_stats *stats);

/* Walks all extents and bitmaps of the medium: fn for each live block. For pms_check. Returns
 * fn's first non-zero result, or PMS_E_CORRUPT with error filled. */
int pms_heap_walk(const struct pms_heap *heap, int (*fn)(void *ctx, const struct pms_block *block),
                  void *ctx, struct pms_error *error);

/* Size class arithmetic (static, part of the format). */
unsigned pms_class_of(uint64_t bytes); /* bytes <= PMS_SMALL_MAX */
uint32_t pms_class_bytes(unsigned cls);
uint32_t pms_class_pages(unsigned cls); /* of its slabs */
uint32_t pms_class_slots(unsigned cls);
unsigned pms_class_count(void);

#endif
