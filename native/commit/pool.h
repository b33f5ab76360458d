/* A store, as the outside sees it: open, transactions, objects, close. The only header that
 * pmstore/engine/_ffi.py knows (through pms.cdef).
 *
 * Threads: every function may be called from any thread; the operation lock makes them take
 * turns. Arrays are written by anybody, without a call. Forks: in a child every call answers
 * PMS_E_FORKED, and the child's memory is read-only. What it shows there: in domain file the
 * state of the fork, for as long as the owner has the store open (readers.h); else the owner's
 * memory, as it is written. */
#ifndef PMS_COMMIT_POOL_H
#define PMS_COMMIT_POOL_H

#include "names/directory.h"
#include "base/status.h"

struct pms_pool;

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

struct pms_info {  /* fixed from open on */
    uint64_t base; /* address of offset 0 in the user's view */
    uint64_t reserve_bytes;
    int32_t domain;       /* in force */
    int32_t flush;        /* enum pms_flush in force */
    int32_t sync_mapping; /* MAP_SYNC is in force */
    int32_t read_only;
    int32_t created;         /* this open made the store */
    int32_t clean;           /* the last writer closed it */
    uint64_t undone_entries; /* recovery: undo entries put back, */
    uint64_t undone_bytes;
    uint64_t replayed_records; /* journal records replayed, */
    uint64_t replayed_bytes;
    int32_t torn;         /* and whether an incomplete record or entry was dropped */
    int32_t asked_domain; /* at creation, by enum pms_domain */
    uint64_t opens;       /* for writing, since creation, this one included */
    uint64_t unclean_opens;
    uint64_t max_bytes; /* of the file ever; 0 = until the file system is full */
    uint8_t uuid[16];
    uint64_t inode;       /* of the file: a copy of it has another one */
    uint64_t permissions; /* of the file, when it was opened: 0600 and the like */
};

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

enum pms_fill {
    PMS_FILL_NONE = 0,
    PMS_FILL_ZERO = 1,
    PMS_FILL_COPY = 2,
    PMS_FILL_PATTERN = 3,
    PMS_FILL_SLOT = 4
};

/* ---- life ---- */
int pms_pool_open(const char *path, const struct pms_options *options, struct pms_pool **pool,
                  struct pms_error *error);

/* Commits or rolls back what is pending, gives live views private copies of their blocks at the
 * same address, marks the store clean, unlocks. The handle stays valid (every call answers
 * PMS_E_CLOSED) until pms_pool_release and the last unpin. Idempotent. A block that is open is
 * rolled back whole, never committed.
 * ERRORS with commit: PMS_E_BUSY: another thread is in a block: not closed; pms_block_wait, or
 * close without. PMS_E_STATE: closed, and a block that was open was rolled back. PMS_E_CLOSED:
 * it was closed before. */
int pms_pool_close(struct pms_pool *pool, int commit, struct pms_error *error);
void pms_pool_release(struct pms_pool *pool);
void pms_pool_info(const struct pms_pool *pool, struct pms_info *info);
int pms_pool_stats(struct pms_pool *pool, struct pms_stats *stats, struct pms_error *error);

/* ---- transactions ---- */

/* A block belongs to the thread that enters it and, if task is not 0, to that task of an event
 * loop of the thread. While one is open, calls by others that change the store answer
 * PMS_E_BUSY; they may read. What others store into arrays belongs to it. A block whose thread
 * or task has ended is rolled back by the first call that it is in the way of. */
/* one time that a block was entered; depth 1: the outermost */
struct pms_entered {
    uint64_t block;
    int32_t depth;
};

enum pms_whose { PMS_ANOTHERS, PMS_MINE, PMS_OVER }; /* OVER: of a task that has ended */

/* For a program that has tasks: whose *task is, asked with no lock held. Once in a process,
 * before there are any. */
void pms_block_set_tasks(enum pms_whose (*whose)(const _Atomic uint64_t *task));

/* Enters a block. Outermost: waits for another thread's block, and commits what is pending if
 * commit is set; else pms_block_commit_pending does. Nested: only counts.
 * ERRORS: PMS_E_BUSY after timeout_ns (< 0: for ever; holder 0: of another task of this thread,
 * at once). */
int pms_block_enter(struct pms_pool *pool, uint64_t task, int commit, int64_t timeout_ns,
                    struct pms_entered *entry, struct pms_error *error);

/* REQUIRES: the outermost entry, nothing has been written in it. ERRORS: those of a commit;
 * PMS_E_STATE: it was rolled back. */
int pms_block_commit_pending(struct pms_pool *pool, const struct pms_entered *entry,
                             struct pms_error *error);

/* Leaves a block. Outermost: ends it, however often it was entered. PMS_AS_IT_IS: what is
 * pending stays so.
 * ERRORS: PMS_E_STATE: the block is over; or, with a holder, it is to be committed by somebody
 * else than its owner: nothing is changed. */
enum pms_how { PMS_UNDO, PMS_COMMIT, PMS_AS_IT_IS };
int pms_block_leave(struct pms_pool *pool, const struct pms_entered *entry, enum pms_how how,
                    struct pms_error *error);

/* Waits until no other thread is in a block. ERRORS: PMS_E_BUSY; PMS_E_STATE: one whose owner
 * had ended was rolled back. */
int pms_block_wait(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error);

/* The same without tasks, blocks left in the order in which they were entered. */
int pms_begin(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error);
int pms_end(struct pms_pool *pool, int commit, struct pms_error *error);

/* Outside blocks (in one: PMS_E_STATE; in another thread's: PMS_E_BUSY). */
int pms_commit(struct pms_pool *pool, struct pms_error *error);
int pms_rollback(struct pms_pool *pool, struct pms_error *error);
int pms_block_depth(struct pms_pool *pool); /* of the caller's block; 0 = none */
uint64_t pms_epoch(struct pms_pool *pool);  /* of the last commit; 0 when closed */
/* changes when cached knowledge of the directory must be dropped */
uint64_t pms_rollbacks(const struct pms_pool *pool);
/* changes before a roll back's first store and after its last: what was read meanwhile is
 * nobody's */
uint64_t pms_put_backs(const struct pms_pool *pool);

/* Captures ranges of the user's view before they are written: pairs of address and length.
 * Ranges outside the store are PMS_E_INVALID. One fence for all. */
struct pms_range {
    uint64_t addr, bytes;
};
int pms_will_write(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count,
                   struct pms_error *error);

/* A declared write of which the engine does the storing: captured by 32-byte granule, stored
 * through its own view, so that no page of the user's is unprotected and the log gets a line,
 * not a page. For small scattered writes from C. addr is in the user's view.
 * ERRORS: PMS_E_INVALID: not inside an array; PMS_E_READONLY, PMS_E_CLOSED, PMS_E_FORKED. */
int pms_write(struct pms_pool *pool, void *addr, const void *src, uint64_t bytes,
              struct pms_error *error);

/* ---- objects ---- A path is one or more names, with a NUL between two; each but the last is
 * that of a group in the one before it, the first in the directory dir (0: the root). What is
 * found by a number holds until the next change; a path is walked in the step that uses it.
 * Calls that put something make the groups that are missing, and take them back if they fail; no
 * path of theirs leads into slots.
 * ERRORS of all: PMS_E_NOT_FOUND; of those that put also PMS_E_EXISTS: a name on the way is no
 * group, or the last one is a group or a list. */
int pms_object_find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                    struct pms_object *object, struct pms_error *error);
/* As pms_object_find, and the block of an array is pinned in the same step (see pms_unpin): it
 * stays what it was found as, whoever removes its name meanwhile. ERRORS also: PMS_E_OS. */
int pms_object_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                   struct pms_object *object, struct pms_error *error);
int pms_object_next(struct pms_pool *pool, uint64_t dir, uint64_t *node, struct pms_object *object,
                    struct pms_error *error);
int pms_object_count(struct pms_pool *pool, uint64_t dir, uint64_t *count, struct pms_error *error);
int pms_object_put_value(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                         const char *meta, uint32_t meta_bytes, struct pms_error *error);

/* Allocates, fills and publishes in one step. fill: see enum; src has src_bytes (COPY:
 * data_bytes of them; PATTERN: repeated). SLOT: zeros, in a block that will often change its
 * protection as a whole. COPY of the very array that is there changes nothing. must_be_new:
 * PMS_E_EXISTS if the name is taken. *data = offset of the block (0 if data_bytes is 0). */
int pms_object_put_array(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                         const char *meta, uint32_t meta_bytes, uint64_t data_bytes, int fill,
                         const void *src, uint64_t src_bytes, int must_be_new, uint64_t *data,
                         struct pms_error *error);

/* A group: *dir = its directory. Opens it if there (PMS_E_EXISTS if the name is another kind of
 * object). */
int pms_object_group(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                     int create, uint64_t *group, struct pms_error *error);
/* Puts a description beside a group's name (it has none when it is made): pms_object_find gives
 * it as meta. */
int pms_object_describe_group(struct pms_pool *pool, uint64_t dir, const char *path,
                              uint32_t path_bytes, const char *meta, uint32_t meta_bytes,
                              struct pms_error *error);
/* The same for a list: *list is for the functions below. It holds until the list is removed, or
 * a roll back. */
int pms_object_list(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                    int create, uint64_t *list, struct pms_error *error);
/* Removes a value, an array, or a group or list with everything in it. */
int pms_object_remove(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                      struct pms_error *error);

/* ---- lists ---- */
struct pms_new_item {
    const void *meta;
    uint64_t meta_bytes;
    uint64_t data_bytes; /* of an array; 0: it has no block */
    const void *src;     /* COPY: of data_bytes bytes */
    uint32_t kind;       /* PMS_OBJECT_VALUE or PMS_OBJECT_ARRAY */
    uint32_t fill;       /* of the data: enum pms_fill but PATTERN */
};
/* Of the list with that path; without a path, of the list that dir is (pms_object_list). pin: as
 * pms_object_get.
 * ERRORS: PMS_E_NOT_FOUND: no list is there, or the index is past its end. */
int pms_sequence_count(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                       uint64_t *count, struct pms_error *error);
int pms_sequence_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                     uint64_t index, int pin, struct pms_object *object, struct pms_error *error);

#define PMS_LIST_END UINT64_MAX /* the index behind the last item */

/* Replaces `remove` items, at index, index + step, ..., by `count` new ones: append, insert,
 * delete, assignment to an index or a slice, all in one step. What is more than the removed ones
 * goes behind the last (step 1 only).
 * ERRORS: PMS_E_INVALID (past the end); PMS_E_FULL: nothing changed. Without new items it needs
 * no room. */
int pms_sequence_splice(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                        uint64_t index, uint64_t remove, uint64_t step,
                        const struct pms_new_item *items, uint64_t count, struct pms_error *error);

/* ---- slots: a group of two arrays, "0" and "1", with a description that says which one is
 * current ---- */

struct pms_slot_pair {
    uint64_t group, data[2], bytes;
    uint32_t current;
};

/* NEXT: the idle one, opened */
enum pms_slot_which { PMS_SLOT_CURRENT, PMS_SLOT_IDLE, PMS_SLOT_NEXT };
/* of a flip: while both are the pool's, it is not committed */
struct pms_slot_turn {
    uint64_t epoch, rollbacks;
};

/* Makes a pair of arrays of zeros in one step; about: says which one is current. ERRORS:
 * PMS_E_EXISTS, PMS_E_FULL: nothing changed. */
int pms_object_make_slots(struct pms_pool *pool, uint64_t dir, const char *path,
                          uint32_t path_bytes, const char *about, uint32_t about_bytes,
                          const char *meta, uint32_t meta_bytes, uint64_t data_bytes,
                          struct pms_error *error);

/* ERRORS: PMS_E_NOT_FOUND: no slots have that path; PMS_E_CORRUPT. */
int pms_slot_find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                  struct pms_slot_pair *pair, struct pms_error *error);

/* The block at data may be written without capture from now on, over commits and roll backs,
 * until it is published or freed; a small one is captured for this transaction instead.
 * REQUIRES: the last commit does not need what it holds.
 * ERRORS: PMS_E_INVALID: no array's block; PMS_E_STATE: its pair was flipped away from it in
 * this transaction; PMS_E_READONLY.  CRASH: undefined content, as before. */
int pms_slot_open(struct pms_pool *pool, uint64_t data, struct pms_error *error);

/* Finds one of the pair, opens the idle one where it is to be NEXT, and pins it as
 * pms_object_get does, in one step: between two steps a landing in another thread's commit may
 * flip, and the block that was idle is what the last commit needs.
 * ERRORS: as pms_slot_find and pms_slot_open. */
int pms_slot_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                 enum pms_slot_which which, struct pms_object *object, struct pms_error *error);

/* The idle one becomes the current one: what it holds at the next commit is durable with it, and
 * is captured like any other block afterwards. A roll back leaves undefined content in it. turn
 * (may be NULL): when that was, and before the call when it was done last (UINT64_MAX: never);
 * other threads commit at any time.
 * ERRORS: as pms_slot_find; PMS_E_STATE: flipped in this transaction already; PMS_E_READONLY. */
int pms_slot_flip(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                  struct pms_slot_turn *turn, struct pms_error *error);

/* ---- views ---- */
int pms_pin(struct pms_pool *pool, uint64_t data, struct pms_error *error);
void pms_unpin(struct pms_pool *pool, uint64_t data);
/* 1: a name or a list has the block; 0 */
int pms_is_live(struct pms_pool *pool, uint64_t data, struct pms_error *error);

/* ---- the one record outside transactions: what a roll back must not take back (history of
 * failures) ---- */

/* out: PMS_HISTORY_BYTES; zeros until something was written. */
int pms_history_read(struct pms_pool *pool, void *out, struct pms_error *error);

/* Replaces the record, inside or outside a block; no commit, and no roll back touches it.
 * Durable on return as far as the domain reaches: synced in dax and file; in process and
 * emulated it survives the process, and a machine crash may bring back an older one.
 * ERRORS: PMS_E_INVALID: longer than PMS_HISTORY_BYTES; PMS_E_READONLY; PMS_E_OS: not written
 * (dax, file: the store goes read-only, as after any failed sync).  CRASH: the old or the new
 * record holds. */
int pms_history_write(struct pms_pool *pool, const void *data, uint32_t bytes,
                      struct pms_error *error);

/* ---- check: reads only ---- */
#define PMS_CHECK_PROBLEMS 32
struct pms_check_report {
    uint64_t blocks, names, groups, lists, extents;
    uint64_t leaks, leaked_bytes; /* blocks that belong to nobody: each is a problem too */
    uint32_t problem_count;       /* found; the first PMS_CHECK_PROBLEMS are described */
    uint32_t sound_copies;        /* of the superblock: bits 0 and 1. One is enough */
    char problem[PMS_CHECK_PROBLEMS][192];
};
int pms_check(struct pms_pool *pool, struct pms_check_report *report, struct pms_error *error);

/* ---- repair ---- */

/* Checks, and frees the blocks that belong to nobody; part of the running transaction. ERRORS:
 * PMS_E_CORRUPT: there are other problems too (in the report), nothing was freed. */
int pms_free_leaks(struct pms_pool *pool, struct pms_check_report *report, struct pms_error *error);

/* Writes the superblock that is in use into the other copy, durable on return.  CRASH: the copy
 * in use holds. */
int pms_mend_superblock(struct pms_pool *pool, struct pms_error *error);

/* ---- what is where ---- */
#define PMS_USAGE_CELLS 64
#define PMS_USAGE_SEGMENTS 60
struct pms_segment_usage {
    uint64_t table_off, log_bytes, data_off, data_bytes;
    uint64_t used_bytes, blocks;
    uint64_t cell[PMS_USAGE_CELLS]; /* bytes in use of each of as many equal parts of the data */
};
/* ERRORS: PMS_E_CORRUPT. */
int pms_usage(struct pms_pool *pool, struct pms_segment_usage usage[PMS_USAGE_SEGMENTS],
              uint32_t *segments, struct pms_error *error);

/* ---- process-wide ---- */
/* puts the fault handler first again, chained to what is there now */
void pms_handler_install(void);

#endif
