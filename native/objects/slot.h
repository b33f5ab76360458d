/* Slots: a group of two arrays, "0" and "1", with a description that says which one is current. */
#ifndef PMS_OBJECTS_SLOT_H
#define PMS_OBJECTS_SLOT_H

#include "commit/pool.h"
#include "names/directory.h"

/* NEXT: the idle one, opened */
enum pms_slot_which { PMS_SLOT_CURRENT, PMS_SLOT_IDLE, PMS_SLOT_NEXT };
/* of a flip: while both are the pool's, it is not committed */
struct pms_slot_turn {
    uint64_t epoch, rollbacks;
};

/* ERRORS: PMS_E_NOT_FOUND: no slots have that path; PMS_E_CORRUPT. */
int pms_slot_find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                  struct pms_slot_pair *pair, struct pms_error *error);

/* Finds one of the pair, opens the idle one where it is to be NEXT (pms_pair_open), and pins it
 * as pms_object_get does, in one step: between two steps a landing in another thread's commit
 * may flip, and the block that was idle is what the last commit needs.
 * ERRORS: as pms_slot_find; NEXT: PMS_E_STATE, PMS_E_READONLY.  CRASH: the idle one's content is
 * undefined, as before. */
int pms_slot_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                 enum pms_slot_which which, struct pms_object *object, struct pms_error *error);

/* The idle one becomes the current one: what it holds at the next commit is durable with it, and
 * is captured like any other block afterwards. A roll back leaves undefined content in it. turn
 * (may be NULL): when that was, and before the call when it was done last (UINT64_MAX: never);
 * other threads commit at any time.
 * ERRORS: as pms_slot_find; PMS_E_STATE: flipped in this transaction already; PMS_E_READONLY. */
int pms_slot_flip(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                  struct pms_slot_turn *turn, struct pms_error *error);

#endif
