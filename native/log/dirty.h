/* The dirty list: the ranges that the running transaction touched, for its commit to write back
 * and to protect again. All calls REQUIRE the log lock. */
#ifndef PMS_LOG_DIRTY_H
#define PMS_LOG_DIRTY_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/sort.h"

/* A user's range of at most this size can become hot: it stays writable. Larger ones are
 * protected again at every commit. */
#define PMS_HOT_RANGE_MAX (64u << 10)

enum pms_dirty_kind {
    PMS_DIRTY_ENGINE = 1, /* stored to by the engine; captured by granule */
    PMS_DIRTY_USER = 2,   /* whole pages captured; writable in the user's view */
    PMS_DIRTY_FRESH = 3,  /* dead at the last commit: written back at commit, no pre-image */
    /* as USER, captured before the transaction began; stays writable after it */
    PMS_DIRTY_HOT = 4,
    /* as FRESH, but stored to by the engine alone: never writable for the user on its account */
    PMS_DIRTY_BORN = 5,
    /* as USER, without an entry in the log, or with some: the pre-image is at home (bare.h) */
    PMS_DIRTY_BARE = 6,
    /* as USER, by a fault: of its pages perhaps one was stored to (commit/runs.h) */
    PMS_DIRTY_FAULTED = 7,
};

struct pms_dirty {
    uint64_t off;
    uint64_t len;
    union {
        uint64_t log_pos; /* HOT: offset of the entry's pre-image in the log */
        uint64_t filled;  /* BARE: so many of its first bytes have entries */
    };
    uint32_t kind;
    uint16_t idle; /* HOT: commits in a row that found it unchanged */
    bool kept;     /* HOT, while a commit runs: stays writable after it */
};

static_assert(offsetof(struct pms_dirty, off) == 0, "sorted by it");

struct pms_dirty_list {
    struct pms_dirty *at; /* in order; address space reserved, never moved */
    uint64_t count, room;
};

/* Adds a range. Neighbours of one kind become one. */
void pms_dirty_note(struct pms_dirty_list *l, enum pms_dirty_kind kind, uint64_t off, uint64_t len);

/* Adds a range that stays one of its own. */
void pms_dirty_add(struct pms_dirty_list *l, const struct pms_dirty *d);

static inline uint64_t pms_dirty_count(const struct pms_dirty_list *l) { return l->count; }

/* All of them, in order: from first up to end. */
static inline struct pms_dirty *pms_dirty_first(const struct pms_dirty_list *l) { return l->at; }
static inline struct pms_dirty *pms_dirty_end(const struct pms_dirty_list *l)
{
    return l->at + l->count;
}

/* Moves the wanted ones to the front, ascending, and returns their number: the order of the list
 * has no meaning any more. */
static inline uint64_t pms_dirty_pick(struct pms_dirty_list *l,
                                      bool (*wanted)(const struct pms_dirty *d))
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < l->count; i++) {
        if (!wanted(&l->at[i]))
            continue;
        struct pms_dirty x = l->at[i];
        l->at[i] = l->at[n];
        l->at[n++] = x;
    }
    pms_sort(l->at, n, sizeof *l->at);
    return n;
}

#endif
