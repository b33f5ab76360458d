/* The inside of a pool: what tx.c, pool.c, object.c, check.c and fork.c share. Not for anybody
 * else. */
#ifndef PMS_COMMIT_POOL_STATE_H
#define PMS_COMMIT_POOL_STATE_H

#include <pthread.h>

#include "commit/capture.h"
#include "journal/journal.h"
#include "commit/pool.h"
#include "base/process.h"
#include "base/thread.h"
#include "heap/super.h"

/* Who may operate on the store now: the operation lock, and whose transaction block is open.
 * Changed by txblock.c alone; close closes it. */
struct pms_gate {
    pthread_mutex_t lock;    /* the operation lock */
    pthread_cond_t left;     /* a transaction block was left */
    uint64_t process;        /* pms_process_generation of the store's owner */
    _Atomic uint64_t number; /* of the open transaction block, or of the last one */
    _Atomic uint64_t task;   /* whose it is in its thread; 0: the thread's, or none is open */
    struct pms_thread owner; /* its thread; of no thread: none is open */
    int depth;
    bool closed;
};

/* What open finds and chooses. Nobody changes it afterwards; close closes the files. */
struct pms_opened {
    char *path; /* real path */
    int fd;
    int lock_fd; /* the holder's: holder.h */
    enum pms_domain domain;
    bool read_only; /* mode r */
    bool forced;    /* opened by force, whatever may be torn */
    struct pms_info info;
};

/* Where the store's transactions are. Changed by commits and roll backs alone (tx.c). */
struct pms_tx {
    uint64_t last; /* finished transaction */
    /* dirty ranges that the running transaction began with: hot ones and the root's */
    uint64_t begun;
    /* domain file: of one commit; address space reserved by open, never moved */
    struct pms_run *runs;
    uint64_t runs_room;
    uint64_t commits, rollbacks;
    _Atomic uint64_t put_backs;  /* odd while a roll back stores */
    struct pms_landing *landing; /* what the next commit waits for, or NULL: landing.h */
};

struct pms_populate { /* populate.c's alone */
    pthread_t thread; /* if running */
    bool running;
    _Atomic bool stop, done;
    _Atomic uint64_t bytes;
};

struct pms_pool {
    struct pms_gate gate;
    struct pms_opened opened;
    struct pms_tx tx;
    struct pms_populate populate;
    /* what the file says of itself: changed by growth, and by whoever writes it */
    struct pms_superblock super;
    struct pms_session session;
    bool session_unsynced; /* its newest copy was not synced; the other one was */
    /* the engine: each part is changed by its own functions */
    struct pms_persist persist;
    struct pms_map map;
    struct pms_undo undo;
    struct pms_heap *heap;
    struct pms_capture capture;
    struct pms_journal *journal; /* domain file, opened for writing */
    /* anybody's, under the operation lock */
    uint64_t refs; /* the handle, and every pin */
    bool failed;   /* a sync failed: what is durable is unknown; no more commits. For good */
};

/* REQUIRES in all of them: the operation lock. */

/* The first transaction after open: captures what every commit changes. */
void pms_tx_start(struct pms_pool *pool);

/* True if anything was written since the last commit. */
bool pms_tx_pending(struct pms_pool *pool);

/* Everything written so far becomes the state that survives. Nothing pending: nothing happens.
 * ERRORS (domain file): PMS_E_FULL, PMS_E_OS: not committed, the transaction goes on; if the
 * sync itself failed the pool is `failed`. */
int pms_tx_commit(struct pms_pool *pool, struct pms_error *error);

/* Back to the last commit, in memory too. ERRORS: PMS_E_CORRUPT, PMS_E_OS from rebuilding the
 * index. */
int pms_tx_rollback(struct pms_pool *pool, struct pms_error *error);

/* Makes room for a block of bytes by growing the file. ERRORS: PMS_E_FULL, PMS_E_OS. */
int pms_pool_grow(struct pms_pool *pool, uint64_t bytes, struct pms_error *error);

/* A block, the file grown if need be. ERRORS: PMS_E_FULL, PMS_E_OS. */
int pms_pool_allocate(struct pms_pool *pool, uint64_t bytes, enum pms_owner owner, uint64_t *off,
                      struct pms_error *error);

/* A new block of the user's, filled (enum pms_fill); 0 if bytes is. ERRORS: PMS_E_FULL,
 * PMS_E_OS: nothing changed. */
int pms_pool_new_data(struct pms_pool *pool, uint64_t bytes, int fill, const void *src,
                      uint64_t src_bytes, uint64_t *data, struct pms_error *error);

/* Goes down a path (see pool.h) to its last name: *dir (0: the root) becomes the directory that
 * has it. ERRORS: PMS_E_NOT_FOUND, PMS_E_CORRUPT. */
int pms_object_step_down(struct pms_pool *pool, uint64_t *dir, const char **path,
                         uint32_t *path_bytes, struct pms_error *error);

/* Pins the object's block, if it is an array that has one; pms_unpin takes it back. ERRORS:
 * PMS_E_OS, PMS_E_INVALID. */
int pms_object_pin(struct pms_pool *pool, const struct pms_object *object, struct pms_error *error);

/* Enters an operation: not closed, not a fork child. Takes the lock. ERRORS: PMS_E_CLOSED,
 * PMS_E_FORKED. */
int pms_pool_enter(struct pms_pool *pool, struct pms_error *error);
/* As above, for what is no part of a transaction, or makes its own way with blocks. ERRORS also:
 * PMS_E_READONLY. */
int pms_pool_enter_beside(struct pms_pool *pool, struct pms_error *error);
/* As above, for changes. ERRORS also: PMS_E_BUSY: a block is open that is not the caller's. */
int pms_pool_enter_write(struct pms_pool *pool, struct pms_error *error);
/* As pms_pool_enter_write, while no block is open. ERRORS also: PMS_E_STATE, PMS_E_BUSY. what:
 * for the message. */
int pms_pool_enter_alone(struct pms_pool *pool, const char *what, struct pms_error *error);
static inline void pms_pool_leave(struct pms_pool *pool)
{
    /* what is written back already, before F2 of a commit by another thread */
    if (pool->undo.stored)
        pms_persist_hand_over(&pool->persist);
    pthread_mutex_unlock(&pool->gate.lock);
}
/* gives up one of pool->refs; not under the operation lock */
void pms_pool_unref(struct pms_pool *pool);

/* In a fork child of the owner, whatever the owner's threads were doing at the fork. */
static inline bool pms_pool_forked(const struct pms_pool *pool)
{
    return pool->gate.process != pms_process_generation();
}

/* Whether one is open that can be waited for. */
bool pms_txblock_of_another_thread(const struct pms_pool *pool);
/* No block is open any more. */
static inline void pms_txblock_forget(struct pms_pool *pool)
{
    pool->gate.depth = 0;
    pool->gate.owner.number = 0;
    atomic_store_explicit(&pool->gate.task, 0, memory_order_relaxed);
}

static inline struct pms_root *pms_pool_root(struct pms_pool *pool)
{
    return pms_map_at(&pool->map, PMS_OFF_ROOT);
}

static inline struct pms_dir_ctx pms_pool_dirs(struct pms_pool *pool)
{
    return (struct pms_dir_ctx){&pool->undo, pool->heap, pool->super.hash_seed};
}

void pms_fork_prepare_once(void); /* installs the fork handlers of the process */

#endif
