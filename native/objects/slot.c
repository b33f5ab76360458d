/* Slots: an object with two blocks, of which logged data names the current one. What the engine
 * adds is that the other one can be written without capture. */
#include "objects/slot.h"
#include "commit/gate.h"
#include "commit/txblock.h"
#include "objects/object.h"
#include "commit/hold.h"
#include "commit/pair.h"
#include "commit/relief.h"
#include "log/idle.h"

static int open_block(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    struct pms_pair_block b;
    int status = pms_pair_block(pool, data, &b, error);
    return status == PMS_OK ? pms_pair_open(pool, &b, error) : status;
}

static int find_pair(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                     struct pms_pair *pair, struct pms_error *error)
{
    int status = pms_object_step_down(pool, &dir, &path, &path_bytes, error);
    return status == PMS_OK ? pms_pair_find(pool, dir, path, path_bytes, pair, error) : status;
}

int pms_slot_find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                  struct pms_slot_pair *slots, struct pms_error *error)
{
    struct pms_pair pair;
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = find_pair(pool, dir, path, path_bytes, &pair, error);
    if (status == PMS_OK) {
        struct pms_block b;
        *slots = pair.slots;
        slots->in_place = !(slots->data[0] && pms_heap_find(pool->heap, slots->data[0], &b) &&
                            b.slot);
    }
    pms_pool_leave(pool);
    return status;
}

/* Of the pair, the array with that number, pinned. */
static int get_array(struct pms_pool *pool, const struct pms_slot_pair *slots, uint32_t number,
                     struct pms_object *object, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    int status = pms_dir_find(&dirs, slots->group, number ? "1" : "0", 1, object, error);
    return status == PMS_OK ? pms_object_pin(pool, object, error) : status;
}

int pms_slot_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                 enum pms_slot_which which, struct pms_object *object, struct pms_error *error)
{
    struct pms_pair pair;
    int status = which == PMS_SLOT_NEXT ? pms_pool_enter_write(pool, error)
                                        : pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = find_pair(pool, dir, path, path_bytes, &pair, error);
    uint32_t number = status != PMS_OK            ? 0
                      : which == PMS_SLOT_CURRENT ? pair.slots.current
                                                  : !pair.slots.current;
    if (status == PMS_OK && which == PMS_SLOT_NEXT && pair.slots.data[number])
        status = open_block(pool, pair.slots.data[number], error);
    if (status == PMS_OK)
        status = get_array(pool, &pair.slots, number, object, error);
    pms_pool_leave(pool);
    return status;
}

/* again: it was flipped in this transaction already. name: for the message. REQUIRES: the
 * operation lock. */
static int flip(struct pms_pool *pool, const struct pms_pair *pair, bool again, const char *name,
                uint32_t name_bytes, struct pms_error *error)
{
    const struct pms_slot_pair *slots = &pair->slots;
    struct pms_pair_block idle = {0}, before = {0};
    unsigned char next = !slots->current;
    int status = PMS_OK;
    if (slots->bytes)
        status = pms_pair_block(pool, slots->data[next], &idle, error);
    if (slots->bytes && status == PMS_OK)
        status = pms_pair_block(pool, slots->data[slots->current], &before, error);
    if (status != PMS_OK)
        return status;
    if (again || (idle.alone && pms_idle_is_left(&pool->undo, idle.at.extent_off)))
        return pms_fail(error, PMS_E_STATE,
                        "slots '%.*s' were flipped in this transaction already: commit first",
                        (int)name_bytes, name);
    if (idle.alone)
        status = pms_hold_leave_slot(pool, idle.at.extent_off, error);
    if (status != PMS_OK)
        return status;
    pms_undo_store(&pool->undo, pair->where, &next, sizeof next);
    if (idle.alone)
        pms_idle_publish(&pool->undo, idle.at.extent_off, idle.at.extent_bytes,
                         pms_pair_used(pair, &idle));
    if (before.alone)
        pms_idle_leave(&pool->undo, before.at.extent_off);
    pms_relief_born(pool, slots->bytes);
    return PMS_OK;
}

int pms_slot_flip(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                  struct pms_slot_turn *turn, struct pms_error *error)
{
    struct pms_pair pair;
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    bool again = turn && turn->epoch == pms_pool_root(pool)->epoch &&
                 turn->rollbacks == pool->tx.rollbacks;
    status = pms_object_step_down(pool, &dir, &name, &name_bytes, error);
    if (status == PMS_OK)
        status = pms_pair_find(pool, dir, name, name_bytes, &pair, error);
    if (status == PMS_OK)
        status = flip(pool, &pair, again, name, name_bytes, error);
    if (turn && status == PMS_OK)
        *turn = (struct pms_slot_turn){pms_pool_root(pool)->epoch, pool->tx.rollbacks};
    pms_pool_leave(pool);
    return status;
}
