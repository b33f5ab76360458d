/* What is crashed: each workload runs operations of the engine on the base store, and commits any number of times.
 *
 * To add one: write a function of the calls below in workloads.c and put it into the table at its end. Everything else (recording,
 * images, kills, faults, the oracle) follows from the table. Between two wl_commit calls do whatever the engine offers; what a crash may
 * leave is the state of the last commit, or of the one in flight.
 *
 * After an operation failed (fault injection) all further ones do nothing. */
#ifndef CRASH_WORKLOAD_H
#define CRASH_WORKLOAD_H

#include <stdatomic.h>

#include "pool_state.h"

#define STATES_MAX 128u

struct board { /* shared between a process that works and the one that watches it */
    _Atomic uint32_t begun, acked; /* commits */
    _Atomic uint32_t states;
    uint32_t state[STATES_MAX];    /* digest of the store: before the workload, after each commit */
    _Atomic uint32_t failed_in_commit; /* an error ended the run inside a commit */
    _Atomic uint32_t opened;
    _Atomic uint64_t primitives;
};

struct wl {
    struct pms_pool *pool;
    struct board *board;
    bool failed;      /* an operation gave an error */
    bool keep_states; /* fill board->state */
    struct pms_error error;
};

struct workload {
    const char *name;
    void (*run)(struct wl *w);
    bool creates; /* begins without a file */
};
extern const struct workload wl_table[];
extern const unsigned wl_count;

void wl_make_base(const char *path, int domain);
struct pms_pool *wl_open(const char *path, int domain, int mode, struct pms_error *error);
uint32_t wl_digest(struct pms_pool *pool); /* names, metadata, contents, number of commits */
uint32_t wl_digest_if_committed(struct pms_pool *pool); /* what it would be had the last commit not given an error */

/* Opens (TR events begin), runs, closes. 0, or the exit code of a failed run. */
void wl_run(const struct workload *w, const char *path, int domain, struct board *board, bool keep_states, struct wl *result);

/* The record of failures, which no transaction holds: false if it is neither one record nor another. */
bool wl_history_whole(struct pms_pool *pool);

/* ---- operations ---- */
void wl_done(struct wl *w, int status); /* notes an error */
uint32_t *wl_data(struct wl *w, const char *name, uint64_t *count); /* the array, to be written; never NULL */
uint64_t wl_array(struct wl *w, uint64_t dir, const char *name, uint32_t n, uint32_t fill);
void wl_value(struct wl *w, uint64_t dir, const char *name, const char *value, uint32_t bytes);
void wl_remove(struct wl *w, uint64_t dir, const char *name);
uint64_t wl_group(struct wl *w, uint64_t dir, const char *name);
void wl_declare(struct wl *w, const char *const *names, unsigned count);
void wl_write(struct wl *w, const char *name, uint32_t at, uint32_t value); /* pms_write */
void wl_begin(struct wl *w);         /* enters a block; commits what is pending */
void wl_end(struct wl *w, bool commit); /* leaves it; an outermost one with commit is a commit */
void wl_commit(struct wl *w);
void wl_rollback(struct wl *w);
void wl_reopen(struct wl *w, const char *path, int domain); /* closes and opens again */

/* objects.c */
void wl_list_edits(struct wl *w);
void wl_list_splits(struct wl *w);
void wl_slots_flip(struct wl *w);
void wl_slots_back(struct wl *w);
void wl_slots_beside(struct wl *w);
void wl_slots_small(struct wl *w);
void wl_slots_freed(struct wl *w);
void wl_history(struct wl *w);
void wl_snapshot(struct wl *w);

#endif
