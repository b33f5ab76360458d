/* Slots, as a flip sees them: a group of two arrays, and a description of which the last byte
 * says which one is current. Flipping stores that byte, logged, and publishes the idle block.
 *
 * REQUIRES in all of them: the operation lock. */
#ifndef PMS_COMMIT_PAIR_H
#define PMS_COMMIT_PAIR_H

#include "commit/pool_state.h"

/* What stands beside the group's name, in msgpack: {"slots": c}. */
#define PMS_PAIR_META 8u

struct pms_pair {
    struct pms_slot_pair slots;
    uint64_t where; /* of the description's last byte in the heap */
};

struct pms_pair_block {
    struct pms_block at;
    /* Its pages are its own, and it was live at the last commit: it may be idle. Blocks that
     * share their pages with others cannot be told apart by protection: they are captured like
     * all. So are those born in this transaction, which needs no pre-images. */
    bool alone;
};

/* The slots with that name in dir. ERRORS: PMS_E_NOT_FOUND, PMS_E_CORRUPT. */
int pms_pair_find(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                  struct pms_pair *pair, struct pms_error *error);

/* whether that is the description of slots of which `current` is the current one */
bool pms_pair_is_meta(const void *meta, uint32_t meta_bytes, uint32_t current);

/* ERRORS: PMS_E_INVALID: no block of an array starts there. */
int pms_pair_block(struct pms_pool *pool, uint64_t data, struct pms_pair_block *block,
                   struct pms_error *error);

/* The block may be written without capture from now on, over commits and roll backs, until it is
 * published or freed; one that is not alone is captured for this transaction instead.
 * REQUIRES: the last commit does not need what it holds.
 * ERRORS: PMS_E_STATE: its pair was flipped away from it in this transaction. */
int pms_pair_open(struct pms_pool *pool, const struct pms_pair_block *block,
                  struct pms_error *error);

/* Whole pages of it that its array takes; what is behind them fills a huge page up. */
uint64_t pms_pair_used(const struct pms_pair *pair, const struct pms_pair_block *block);

#endif
