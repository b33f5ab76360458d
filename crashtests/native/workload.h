/* What is crashed: each workload runs operations of the engine on the base store, and commits
 * any number of times.
 *
 * To add one: write a function of the calls below (calls.c) in workloads.c and put it into the
 * table at its end. Everything else (recording, images, kills, faults, the oracle) follows from
 * the table. Between two wl_commit calls do whatever the engine offers; what a crash may leave
 * is the state of the last commit, or of the one in flight.
 *
 * After an operation failed (fault injection) all further ones do nothing. */
#ifndef CRASH_WORKLOAD_H
#define CRASH_WORKLOAD_H

#include <stdatomic.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "flush/chunks.h"

#define STATES_MAX 128u

struct board { /* shared between a process that works and the one that watches it */
    _Atomic uint32_t begun, acked; /* commits */
    _Atomic uint32_t states;
    uint32_t state[STATES_MAX]; /* digest of the store: before the workload, after each commit */
    _Atomic uint32_t failed_in_commit; /* an error ended the run inside a commit */
    _Atomic uint32_t opened;
    _Atomic uint64_t primitives;
};

struct wl {
    struct pms_pool *pool;
    struct board *board;
    bool failed;      /* an operation gave an error */
    bool closing;     /* the store */
    int status;       /* of the first one that did */
    bool keep_states; /* fill board->state */
    struct pms_error error;
    uint32_t *fork_data; /* what a child looks at */
};

struct workload {
    const char *name;
    void (*run)(struct wl *w);
    bool leaks; /* blocks may belong to nobody for a while */
    /* its images are large: at most so many under model (ii), and a tenth under others; 0: no
     * limit */
    uint32_t heavy;
};
extern const struct workload wl_table[];
extern const unsigned wl_count;

void wl_make_base(const char *path, int domain);
struct pms_pool *wl_open(const char *path, int domain, int mode, struct pms_error *error);
uint32_t wl_digest(struct pms_pool *pool); /* names, metadata, contents, number of commits */
/* what it would be had the last commit not given an error */
uint32_t wl_digest_if_committed(struct pms_pool *pool);

/* Opens (TR events begin), runs, closes. 0, or the exit code of a failed run. */
void wl_run(const struct workload *w, const char *path, int domain, struct board *board,
            bool keep_states, struct wl *result);

/* The record of failures, which no transaction holds: false if it is neither one record nor
 * another. */
bool wl_history_whole(struct pms_pool *pool);

/* ---- operations ---- */
void wl_done(struct wl *w, int status); /* notes an error */
/* the array, to be written; never NULL */
uint32_t *wl_data(struct wl *w, const char *name, uint64_t *count);
uint64_t wl_array(struct wl *w, uint64_t dir, const char *name, uint32_t n, uint32_t fill);
void wl_value(struct wl *w, uint64_t dir, const char *name, const char *value, uint32_t bytes);
void wl_remove(struct wl *w, uint64_t dir, const char *name);
uint64_t wl_group(struct wl *w, uint64_t dir, const char *name);
void wl_declare(struct wl *w, const char *const *names, unsigned count);
void wl_write(struct wl *w, const char *name, uint32_t at, uint32_t value); /* declared */
void wl_begin(struct wl *w);            /* enters a block; commits what is pending */
void wl_end(struct wl *w, bool commit); /* leaves it; an outermost one with commit is a commit */
void wl_commit(struct wl *w);
void wl_rollback(struct wl *w);
/* commit: a function that does so */
void wl_commit_by(struct wl *w, int (*commit)(struct wl *w, void *arg), void *arg);
void wl_reopen_holding(struct wl *w); /* each commit holds the version before it from now on */
void wl_back(struct wl *w);           /* to that, by a commit */
void wl_reopen(struct wl *w);         /* closes, what is pending rolled back, and opens again */

/* objects.c */
#define PAIR_WORDS 10000u /* a block with pages of its own */
uint64_t wl_list(struct wl *w, const char *name);
void wl_splice(struct wl *w, uint64_t list, uint64_t at, uint64_t remove, uint64_t step,
               uint32_t add, uint32_t value);
void wl_make_pair(struct wl *w, const char *name, uint32_t words);
/* the idle slot, at most PAIR_WORDS */
uint32_t *wl_fill_next(struct wl *w, const char *name, uint32_t words, uint32_t value);
void wl_flip(struct wl *w, const char *name);
uint32_t *wl_current(struct wl *w, const char *name);
void wl_list_edits(struct wl *w);
void wl_list_splits(struct wl *w);
void wl_slots(struct wl *w);
void wl_slots_flip(struct wl *w);
void wl_slots_back(struct wl *w);
void wl_slots_beside(struct wl *w);
void wl_slots_small(struct wl *w);
void wl_slots_freed(struct wl *w);
void wl_history(struct wl *w);
void wl_held(struct wl *w);
void wl_held_grow(struct wl *w);

/* beside.c */
#define FLUSH_PAGES 4096u
struct wl_flush { /* of one snapshot after another into a file */
    char path[300];
    int fd; /* 0: none yet */
    struct pms_snapshot *snapshot;
    struct pms_snapshot_info info; /* of the last one */
    bool complete;
    uint8_t state[FLUSH_PAGES];
    uint64_t pages, next, all, left; /* all: to be written; left: of these */
    uint32_t promised;               /* digest */
};
void wl_flush_begin(struct wl *w, struct wl_flush *f);
/* up to that part of what is to be written */
void wl_flush_some(struct wl *w, struct wl_flush *f, uint32_t done, uint32_t of);
/* the rest; what was written has to be the commit that it began at */
void wl_flush_end(struct wl *w, struct wl_flush *f);
void wl_flush_close(struct wl *w, struct wl_flush *f); /* and the file is removed */
void wl_flush(struct wl *w);
void wl_slots_flush(struct wl *w);
void wl_grow_beside(struct wl *w);
void wl_grow_between(struct wl *w);
void wl_mirrors(struct wl *w);
void wl_fork(struct wl *w);
void wl_repair(struct wl *w);

/* threads.c */
void wl_threads(struct wl *w);
void wl_faults_between(struct wl *w);
void wl_turns(struct wl *w);
void wl_all_cores(struct wl *w);

/* blocks.c */
void wl_churn(struct wl *w);
void wl_pins(struct wl *w);

/* brought.c */
void wl_bring(struct wl *w, uint32_t seed);         /* two new arrays */
void wl_store_same(struct wl *w, const char *name); /* what is there, on each page */
/* a third of its pages changes, a third changes and changes back */
void wl_store_back(struct wl *w, const char *name, uint32_t value);
void wl_brought(struct wl *w);
void wl_brought_over(struct wl *w);
void wl_brought_held(struct wl *w);
void wl_unchanged(struct wl *w);

/* script.c */
extern uint64_t wl_mixture_seed;
extern const char *wl_script_text;
void wl_mixture_1(struct wl *w);
void wl_mixture_2(struct wl *w);
void wl_mixture_3(struct wl *w);
void wl_script(struct wl *w);

#endif
