/* The inside of a pool. */
#ifndef PMS_COMMIT_POOL_STATE_H
#define PMS_COMMIT_POOL_STATE_H

#include <pthread.h>

#include "commit/capture.h"
#include "journal/journal.h"
#include "commit/pool.h"
#include "base/process.h"
#include "base/thread.h"
#include "heap/super.h"
#include "live/server.h"
#include "live/sight.h"
#include "names/directory.h"

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
    bool read_only;  /* mode r */
    bool forced;     /* opened by force, whatever may be torn */
    bool before;     /* mode r: shows the held version */
    uint64_t backed; /* of the logs: so many bytes of entries have their room on the disk */
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
    _Atomic uint64_t *faulted, *unchanged; /* a bit a page: runs.c's, zero but while it gathers */
    uint64_t commits, rollbacks;
    _Atomic uint64_t epoch;      /* of the last commit; the root has that of one under way, too */
    _Atomic uint64_t put_backs;  /* odd while a roll back stores */
    struct pms_landing *landing; /* what the next commit waits for, or NULL: landing.h */
};

/* The version before the last commit, while its log is kept: hold.c, tx.c. */
struct pms_holding {
    /* for whom each commit holds the version before it, and releases the one before that */
    enum pms_held_for on;
    uint64_t tag;           /* the transaction whose log is kept; 0: none */
    enum pms_held_for held; /* for whom that is */
    bool before;   /* since before this open: what it needs of slots is not known one by one */
    bool in_doubt; /* held for a job, which has not allowed that it goes */
    bool going_back;
};

struct pms_relief {   /* relief.c's alone, under the operation lock */
    uint64_t look_at; /* bytes that commits have written by then */
    uint64_t born;    /* bytes of blocks since the last look, */
    uint64_t most;    /* and how many there may be */
    uint64_t spilled; /* bytes that were left in the spill at the last look */
    uint64_t given;   /* back to the file, since open */
};

struct pms_populate { /* populate.c's alone */
    pthread_t thread; /* if running */
    bool running;
    _Atomic bool stop, done;
    _Atomic uint64_t bytes;
};

/* Views of a store that was closed: outlive.c's alone, under the operation lock. */
struct pms_outliving {
    struct pms_pin *block;  /* what was pinned at the close, by offset; free */
    uint64_t count, alive;  /* of them: those that still are */
    uint64_t next, done;    /* the block that is copied next, and how far that one is */
    bool parted;            /* all of them; else some show the file's pages, and always will */
    bool working;           /* something is still done there, and unmaps what is left then */
    bool stuck;             /* there was no memory for a copy: under unlock.c's lock, as the next */
    struct pms_pool *after; /* in the list of those whose views may show the file */
    /* unlocks it, when nobody refers to it any more: neither copied nor waited for. Or NULL */
    void (*at_last)(struct pms_pool *pool);
};

struct pms_pool {
    struct pms_gate gate;
    struct pms_opened opened;
    struct pms_tx tx;
    struct pms_holding hold;
    struct pms_relief relief;
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
    /* who reads beside who writes: of a reader, and of a writer */
    struct pms_sight sight;
    struct pms_served served;
    struct pms_outliving left;
    /* anybody's, under the operation lock */
    uint64_t refs; /* the handle, and every pin */
    bool failed;   /* no more commits, for good; as after a sync that failed: pms_pool_failed */
};

/* What is durable is unknown, or what is allocated: nothing more is written, committed or said to
 * be there when the store was closed. Any sync of the store's file counts, whoever made it: the
 * kernel reports a lost write once, and perhaps it was a commit's. But for those of the journal's
 * thread, which writes again what it wrote before them. */
static inline bool pms_pool_failed(const struct pms_pool *pool)
{
    return (pool->persist.failed_syncs | pool->failed) != 0;
}

/* In a fork child of the owner, whatever the owner's threads were doing at the fork. */
static inline bool pms_pool_forked(const struct pms_pool *pool)
{
    return pool->gate.process != pms_process_generation();
}

/* The last transaction of which the file's pages may show something. */
static inline uint64_t pms_pool_home(const struct pms_pool *pool)
{
    bool held = pool->opened.domain == PMS_DOMAIN_FILE && pool->hold.tag;
    return pool->tx.last - held;
}

static inline struct pms_root *pms_pool_root(struct pms_pool *pool)
{
    return pms_map_at(&pool->map, PMS_OFF_ROOT);
}

static inline struct pms_dir_ctx pms_pool_dirs(struct pms_pool *pool)
{
    return (struct pms_dir_ctx){&pool->undo, pool->heap, pool->super.hash_seed};
}

#endif
