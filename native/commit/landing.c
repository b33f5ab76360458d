
#include "commit/landing.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "commit/pair.h"
#include "log/idle.h"

/* between looks at a word: as a copy takes longer, looks become rarer */
#define POLL_FIRST_NS 5000ll
#define POLL_MOST_NS 200000ll

struct flip {
    struct pms_land_flip ask;
    struct pms_pair pair;
    struct pms_pair_block block; /* of the slot that it turns to */
};

struct pms_landing {
    struct pms_land_copy *copy;
    struct flip *flip;
    uint64_t copies, flips;
    int64_t timeout_ns, left_ns;
    struct pms_pool *pool; /* who holds it */
    struct pms_error error;
    int status;
    _Atomic uint32_t phase;
    _Atomic bool failed;
    _Atomic uint32_t owners; /* the program; the pool */
};

/* ---- life ---- */

static void *copy_of(const void *from, uint64_t count, size_t size)
{
    void *to = calloc(count ? count : 1, size);
    if (to && count && from)
        memcpy(to, from, count * size);
    return to;
}

void pms_landing_free(struct pms_landing *l)
{
    if (atomic_fetch_sub(&l->owners, 1) != 1)
        return;
    free(l->copy);
    free(l->flip);
    free(l);
}

void pms_landing_hold(struct pms_landing *l, struct pms_pool *pool)
{
    atomic_fetch_add(&l->owners, 1);
    l->pool = pool;
}

void pms_landing_drop(struct pms_landing *l)
{
    l->pool = NULL;
    pms_landing_free(l);
}

struct pms_pool *pms_landing_holder(const struct pms_landing *l) { return l->pool; }

bool pms_landing_is_started(const struct pms_landing *l) { return l->pool != NULL; }

struct pms_landing *pms_landing_new(const struct pms_land_copy *copies, uint64_t copy_count,
                                    const struct pms_land_flip *flips, uint64_t flip_count,
                                    int64_t timeout_ns, struct pms_error *error)
{
    struct pms_landing *l = calloc(1, sizeof *l);
    if (l) {
        l->copy = copy_of(copies, copy_count, sizeof *copies);
        l->flip = copy_of(NULL, flip_count, sizeof *l->flip);
        l->owners = 1;
    }
    if (!l || !l->copy || !l->flip) {
        if (l)
            pms_landing_free(l);
        pms_fail_errno(error, "allocating memory");
        return NULL;
    }
    l->copies = copy_count;
    l->flips = flip_count;
    l->timeout_ns = l->left_ns = timeout_ns;
    for (uint64_t i = 0; i < flip_count; i++)
        l->flip[i].ask = flips[i];
    return l;
}

static void reach(struct pms_landing *l, uint32_t phase)
{
    atomic_store(&l->phase, phase);
    pms_futex_wake(&l->phase, INT32_MAX);
}

bool pms_landing_wait(struct pms_landing *l, int phase, int64_t timeout_ns)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    int64_t end = (int64_t)t.tv_sec * 1000000000 + t.tv_nsec + timeout_ns;
    for (uint32_t now; (now = atomic_load(&l->phase)) < (uint32_t)phase;) {
        int64_t left = -1;
        if (timeout_ns >= 0) {
            clock_gettime(CLOCK_MONOTONIC, &t);
            left = end - ((int64_t)t.tv_sec * 1000000000 + t.tv_nsec);
            if (left <= 0)
                return false;
        }
        pms_futex_wait(&l->phase, now, left);
    }
    return true;
}

int pms_landing_result(const struct pms_landing *l, struct pms_error *error)
{
    if (l->status != PMS_OK && error)
        *error = l->error;
    return l->status;
}

void pms_landing_fail(struct pms_landing *l) { atomic_store(&l->failed, true); }

void pms_landing_finish(struct pms_landing *l, int status, const struct pms_error *error)
{
    l->status = status;
    if (status != PMS_OK && error)
        l->error = *error;
    reach(l, PMS_LANDING_DONE);
    pms_landing_free(l);
}

void pms_landing_disarm(struct pms_pool *pool)
{
    struct pms_error error;
    struct pms_landing *l = pool->tx.landing;
    pool->tx.landing = NULL;
    if (l)
        pms_landing_finish(
            l,
            pms_fail(&error, PMS_E_STATE, "the commit that mirrors were copied for did not happen"),
            &error);
}

/* ---- in the commit ---- */

/* The slots, and the block that they turn to. The description may name that one by now, if
 * another landing that was prepared with the same description has been committed meanwhile: the
 * last commit needs what it holds (I3). */
static int find(struct pms_pool *pool, struct flip *f, struct pms_error *error)
{
    const struct pms_land_flip *ask = &f->ask;
    const struct pms_slot_pair *slots = &f->pair.slots;
    int status = pms_pair_find(pool, ask->dir ? ask->dir : pms_pool_root(pool)->directory,
                               ask->name, ask->name_bytes, &f->pair, error);
    if (status == PMS_OK)
        status = pms_pair_block(pool, ask->data, &f->block, error);
    if (status != PMS_OK)
        return status;
    uint32_t number = slots->data[1] == ask->data;
    if (slots->data[number] != ask->data)
        return pms_fail(error, PMS_E_INVALID, "the block is none of those slots'");
    if (number == slots->current)
        return pms_fail(
            error, PMS_E_STATE,
            "another commit has flipped the slots since this one was prepared: commit again");
    if (!pms_pair_is_meta(ask->meta, ask->meta_bytes, number))
        return pms_fail(error, PMS_E_INVALID, "the slots' description is not what it was");
    return PMS_OK;
}

static int await(struct pms_landing *l, const uint64_t *word, struct pms_error *error)
{
    for (int64_t pause = POLL_FIRST_NS; !__atomic_load_n(word, __ATOMIC_ACQUIRE);) {
        if (atomic_load(&l->failed))
            return pms_fail(error, PMS_E_STATE, "a copy from the device failed");
        if (l->timeout_ns >= 0 && l->left_ns <= 0)
            return pms_fail(error, PMS_E_STATE, "copies from the device did not come in time");
        nanosleep(&(struct timespec){0, pause}, NULL);
        l->left_ns -= pause;
        pause = pause * 2 < POLL_MOST_NS ? pause * 2 : POLL_MOST_NS;
    }
    return atomic_load(&l->failed) ? pms_fail(error, PMS_E_STATE, "a copy from the device failed")
                                   : PMS_OK;
}

/* Through the engine's view, which no protection concerns. A private view is the only one: there
 * the block has pages of its own, or nothing is sealed yet. They were opened or captured under
 * the log lock, so that no capture gives them up (pms_map_take). */
static void copy_in(struct pms_pool *pool, const struct pms_land_copy *c)
{
    uint64_t off = c->data + c->at, first = off & ~(uint64_t)(PMS_PAGE - 1);
    if (!pool->map.shared)
        pms_map_unprotect_surely(&pool->map, first,
                                 ((off + c->bytes + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1)) -
                                     first);
    pms_persist_copy(&pool->persist, pms_map_at(&pool->map, off), c->src, c->bytes);
}

static int land_one(struct pms_pool *pool, struct pms_landing *l, struct pms_land_copy *c,
                    struct pms_error *error)
{
    int status = c->landed ? await(l, c->landed, error) : PMS_OK;
    if (status == PMS_OK && c->src && c->bytes)
        copy_in(pool, c);
    return status;
}

/* In a private view a small block cannot be written without opening its pages to everybody: so
 * it is before all are sealed. */
static int land_early(struct pms_pool *pool, struct pms_landing *l, struct pms_land_copy *c,
                      const struct flip *into, struct pms_error *error)
{
    if (pool->map.shared || into->block.at.kind == PMS_KIND_LARGE)
        return PMS_OK;
    int status = land_one(pool, l, c, error);
    *c = (struct pms_land_copy){.data = c->data};
    return status;
}

static int open_copies(struct pms_pool *pool, struct pms_landing *l, struct pms_error *error)
{
    for (uint64_t i = 0; i < l->copies; i++) {
        struct pms_land_copy *c = &l->copy[i];
        const struct flip *into = NULL;
        for (uint64_t k = 0; k < l->flips && !into; k++)
            into = l->flip[k].ask.data == c->data ? &l->flip[k] : NULL;
        if (!into || c->at > into->block.at.bytes || c->bytes > into->block.at.bytes - c->at)
            return pms_fail(error, PMS_E_INVALID, "a copy does not lie in its block");
        if (!c->src && !into->block.alone)
            return pms_fail(error, PMS_E_INVALID,
                            "only a block with pages of its own is written from outside");
        int status = land_early(pool, l, c, into, error);
        if (status != PMS_OK)
            return status;
    }
    return PMS_OK;
}

int pms_landing_open(struct pms_pool *pool, struct pms_landing *l, struct pms_error *error)
{
    int status = PMS_OK;
    for (uint64_t i = 0; status == PMS_OK && i < l->flips; i++) {
        status = find(pool, &l->flip[i], error);
        if (status == PMS_OK)
            status = pms_pair_open(pool, &l->flip[i].block, error);
    }
    return status == PMS_OK ? open_copies(pool, l, error) : status;
}

void pms_landing_capture(struct pms_pool *pool, struct pms_landing *l)
{
    for (uint64_t i = 0; i < l->flips; i++)
        pms_undo_prepare_locked(&pool->undo, l->flip[i].pair.where, 1);
    /* F1: the descriptions' pre-images, before they are stored to */
    pms_undo_fence_locked(&pool->undo);
}

static void describe(struct pms_pool *pool, const struct flip *f, uint32_t current)
{
    pms_undo_write_locked(&pool->undo, f->pair.where, &(unsigned char){current != 0}, 1);
}

int pms_landing_land(struct pms_pool *pool, struct pms_landing *l, struct pms_error *error)
{
    int status = PMS_OK;
    /* racing writers fault, and wait for the lock; hot ranges too, for it may last */
    pms_capture_protect_all(&pool->capture);
    reach(l, PMS_LANDING_SEALED);
    for (uint64_t i = 0; status == PMS_OK && i < l->copies; i++)
        status = land_one(pool, l, &l->copy[i], error);
    if (status == PMS_OK && atomic_load(&l->failed))
        status = pms_fail(error, PMS_E_STATE, "a copy from the device failed");
    reach(l, PMS_LANDING_COPIED);
    if (status != PMS_OK)
        return status;
    for (uint64_t i = 0; i < l->flips; i++) {
        const struct flip *f = &l->flip[i];
        if (f->block.alone)
            pms_idle_publish_locked(&pool->undo, f->block.at.extent_off, f->block.at.extent_bytes,
                                    pms_pair_used(&f->pair, &f->block));
        describe(pool, f, !f->pair.slots.current);
        if (pool->hold.on)
            pms_idle_leave(&pool->undo, f->pair.slots.data[f->pair.slots.current]);
    }
    return PMS_OK;
}

bool pms_landing_flips(const struct pms_landing *l) { return l && l->flips > 0; }

void pms_landing_unflip(struct pms_pool *pool, struct pms_landing *l)
{
    for (uint64_t i = 0; i < l->flips; i++)
        describe(pool, &l->flip[i], l->flip[i].pair.slots.current);
}
