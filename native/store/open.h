/* Opening a store. */
#ifndef PMS_STORE_OPEN_H
#define PMS_STORE_OPEN_H

#include "base/layout.h"
#include "commit/pool.h"

enum pms_mode {
    /* r:  changes no byte, a crashed file is shown as of its last commit */
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
    int32_t domain; /* enum pms_domain */
    int32_t hot;    /* 0: protect every page again at every commit */
    int32_t force;  /* 1: open a store that PMS_E_UNCLEAN or PMS_E_COPIED would refuse */
    int32_t hold;   /* 1: each commit holds the version before it */
    /* mode r: 1: without the lock, beside whoever writes (live/sight.h); 0: with a shared one, and
     * what is read is the file's pages */
    int32_t beside;
    int32_t before;          /* mode r with the lock: 1: the version before the last commit, held */
    int32_t keep;            /* beside a writer: 1: it keeps as much as the whole state for it */
    int64_t lock_timeout_ns; /* 0 = at once, < 0 = for ever */
};
#define PMS_DEFAULT_SIZE (64ull << 20)

int pms_pool_open(const char *path, const struct pms_options *options, struct pms_pool **pool,
                  struct pms_error *error);

#endif
