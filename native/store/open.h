/* Opening, growing and closing a store, and what is to say about it. */
#ifndef PMS_STORE_OPEN_H
#define PMS_STORE_OPEN_H

#include "commit/pool.h"

enum pms_mode {
    /* r:  shared lock, changes no byte, a crashed file is shown as of its last commit */
    PMS_MODE_READ = 1,
    PMS_MODE_READ_WRITE = 2, /* r+: must exist */
    PMS_MODE_APPEND = 3,     /* a:  open, or create if it does not exist or is empty */
    PMS_MODE_TRUNCATE = 4,   /* w:  create, replacing what is there */
    PMS_MODE_EXCLUSIVE = 5,  /* x:  create, must not exist */
};

struct pms_options {
    uint64_t size;     /* of the file at creation; 0 = PMS_DEFAULT_SIZE */
    uint64_t max_size; /* 0 = until the file system is full */
    int32_t mode;
    int32_t domain;          /* enum pms_domain */
    int32_t hot;             /* 0: protect every page again at every commit */
    int32_t force;           /* 1: open a store that PMS_E_UNCLEAN or PMS_E_COPIED would refuse */
    int64_t lock_timeout_ns; /* 0 = at once, < 0 = for ever */
};
#define PMS_DEFAULT_SIZE (64ull << 20)
#define PMS_MIN_SIZE (1ull << 20)

struct pms_stats {
    uint64_t epoch, tx;
    uint64_t file_bytes, data_bytes, used_bytes, free_bytes, pinned_bytes, largest_free_bytes,
        blocks;
    uint64_t log_bytes, log_need_bytes;
    uint64_t commits, rollbacks, faults, captures, captured_bytes;
    uint64_t hot_ranges, hot_bytes;
    uint64_t fences, lines, syncs, protects;
    uint64_t journal_bytes, home_bytes, straight_bytes, home_syncs, journal_waits;
};

int pms_pool_open(const char *path, const struct pms_options *options, struct pms_pool **pool,
                  struct pms_error *error);

/* Commits or rolls back what is pending, gives live views private copies of their blocks at the
 * same address, marks the store clean, unlocks. The handle stays valid (every call answers
 * PMS_E_CLOSED) until pms_pool_release and the last unpin. Idempotent. A transaction block that is
 * open is rolled back whole, never committed.
 * ERRORS with commit: PMS_E_BUSY: another thread is in one: not closed; pms_txblock_wait, or
 * close without. PMS_E_STATE: closed, and one that was open was rolled back. PMS_E_CLOSED:
 * it was closed before. */
int pms_pool_close(struct pms_pool *pool, int commit, struct pms_error *error);
void pms_pool_release(struct pms_pool *pool);
void pms_pool_info(const struct pms_pool *pool, struct pms_info *info);
int pms_pool_stats(struct pms_pool *pool, struct pms_stats *stats, struct pms_error *error);

/* Makes room for a block of bytes by growing the file. ERRORS: PMS_E_FULL, PMS_E_OS. */
int pms_pool_grow(struct pms_pool *pool, uint64_t bytes, struct pms_error *error);

#endif
