/* Who may change the store now: the operation lock, and the blocks (`with store.transaction()`)
 * of threads and tasks.
 *
 * While a block is open its owner alone changes the store by calls. Entering a block waits for
 * another thread's; every other call that changes the store is refused meanwhile, as half of its
 * work, or half of the block, would go with the other. */
#include "commit/pool_state.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "commit/handler.h"
#include "base/quiet.h"

#define SCATTERED_MAX 96u   /* lines of the fast log, in one transaction */
#define LOOK_AT_HANDLER 16u /* blocks: a look is a system call */
#define ORPHAN \
    "a transaction block was open whose thread or task had ended: it was rolled back, with all that was written since it was entered"
/* a thread that Python has joined may not have ended for the kernel yet */
#define GRACE_NS 20000000

/* The kernel gives the ids of threads that have ended to new ones, which would join what the old
 * ones left open, or be taken for them: so threads are numbered, and each has a record of its
 * number as long as it lives. Records are used again, and never freed: whoever has seen one may
 * look at it at any time. */
struct pms_thread {
    _Atomic int64_t number; /* 0: of no thread */
    struct pms_thread *next_free;
};
static __thread int64_t thread_number, thread_id;
static __thread struct pms_thread *thread_record; /* NULL where there was no memory for it */
static _Atomic int64_t thread_numbers;
static struct pms_thread *free_records;
static struct pms_lock records_lock;
static pthread_key_t record_key;
static bool have_key;
static pthread_once_t record_once = PTHREAD_ONCE_INIT;

static void end_thread(void *record)
{
    struct pms_thread *r = record;
    thread_number = 0;
    thread_record = NULL;
    atomic_store(&r->number, 0);
    pms_lock_acquire(&records_lock);
    r->next_free = free_records;
    free_records = r;
    pms_lock_release(&records_lock);
}

static void make_key(void) { have_key = pthread_key_create(&record_key, end_thread) == 0; }

static struct pms_thread *new_record(void)
{
    pthread_once(&record_once, make_key);
    if (!have_key)
        return NULL;
    pms_lock_acquire(&records_lock);
    struct pms_thread *r = free_records;
    if (r)
        free_records = r->next_free;
    pms_lock_release(&records_lock);
    if (!r)
        r = calloc(1, sizeof *r);
    if (r && pthread_setspecific(record_key, r) != 0) {
        free(r);
        r = NULL;
    }
    return r;
}

static int64_t number_thread(void)
{
    thread_id = (int64_t)syscall(SYS_gettid);
    thread_number = atomic_fetch_add(&thread_numbers, 1) + 1;
    thread_record = new_record();
    if (thread_record)
        atomic_store(&thread_record->number, thread_number);
    return thread_number;
}

static inline int64_t me(void) { return thread_number ? thread_number : number_thread(); }

void pms_thread_after_fork_in_child(void)
{
    thread_number = 0;                   /* the child's only thread is another than its parent's */
    atomic_store(&records_lock.word, 0); /* who held it did not come with us */
}

/* ---- whose block is open ---- */

static enum pms_whose (*ask_task)(const _Atomic uint64_t *task);

void pms_txblock_set_tasks(enum pms_whose (*whose)(const _Atomic uint64_t *task))
{
    ask_task = whose;
}

struct view { /* of a block that is a task's, by the caller */
    uint64_t block;
    enum pms_whose whose;
};

static struct view ask(const struct pms_pool *pool)
{
    uint64_t block = atomic_load_explicit(&pool->gate.number, memory_order_relaxed);
    return (struct view){block, ask_task ? ask_task(&pool->gate.task) : PMS_ANOTHERS};
}

/* REQUIRES: no lock is held, as a program that has tasks is asked. What it says is true until
 * the caller acts: a block that is the caller's is nobody else's to enter, and the number tells
 * whether it is still the same one. */
static inline struct view look(const struct pms_pool *pool)
{
    if (atomic_load_explicit(&pool->gate.task, memory_order_relaxed))
        return ask(pool);
    return (struct view){0, PMS_ANOTHERS};
}

/* REQUIRES in these two: the operation lock; a block is open. */
static inline bool is_mine(const struct pms_pool *pool, struct view v)
{
    if (pool->gate.owner != me())
        return false;
    return !pool->gate.task || (v.whose == PMS_MINE && v.block == pool->gate.number);
}

/* Whether nobody can leave the block any more. */
static bool is_orphan(const struct pms_pool *pool, struct view v)
{
    if (v.block == pool->gate.number && v.whose == PMS_OVER)
        return true;
    if (pool->gate.owner == me())
        return false;
    if (pool->gate.record)
        return atomic_load(&pool->gate.record->number) != pool->gate.owner;
    return syscall(SYS_tgkill, getpid(), pool->gate.thread, 0) != 0 && errno == ESRCH;
}

static int busy(const struct pms_pool *pool, struct pms_error *error)
{
    bool task = pool->gate.owner == me();
    int status = pms_fail(error, PMS_E_BUSY,
                          task ? "another task of this thread is inside a transaction block"
                               : "another thread is inside a transaction block");
    if (error) {
        error->holder = task ? 0 : pool->gate.thread; /* 0: waiting would not help */
        error->offset = pool->gate.task;
    }
    return status;
}

bool pms_txblock_of_another_thread(const struct pms_pool *pool)
{
    return pool->gate.owner && pool->gate.owner != me() &&
           !is_orphan(pool, (struct view){0, PMS_ANOTHERS});
}

static int end_block(struct pms_pool *pool, enum pms_how how, struct pms_error *error)
{
    int status = how == PMS_COMMIT ? pms_tx_commit(pool, error) : PMS_OK;
    if ((how == PMS_UNDO || status != PMS_OK) && !pool->failed) {
        int undone = pms_tx_rollback(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? undone : status;
    }
    pms_txblock_forget(pool);
    pthread_cond_signal(&pool->gate.left);
    return status;
}

/* ---- the operation lock ---- */

int pms_pool_enter(struct pms_pool *pool, struct pms_error *error)
{
    if (pms_pool_forked(pool)) /* before the lock: another thread may have held it at the fork */
        return pms_fail(error, PMS_E_FORKED, "the store was opened by the parent process");
    pthread_mutex_lock(&pool->gate.lock);
    if (!pool->gate.closed)
        return PMS_OK;
    pthread_mutex_unlock(&pool->gate.lock);
    return pms_fail(error, PMS_E_CLOSED, "the store is closed");
}

int pms_pool_enter_beside(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (!pool->opened.read_only && !pool->failed)
        return PMS_OK;
    status = pms_fail(error, PMS_E_READONLY,
                      pool->failed ? "an earlier failure left unknown what is durable"
                                   : "the store is open for reading");
    pms_pool_leave(pool);
    return status;
}

void pms_pool_leave(struct pms_pool *pool)
{
    /* what is written back already, before F2 of a commit by another thread */
    if (pool->undo.stored)
        pms_persist_hand_over(&pool->persist);
    pthread_mutex_unlock(&pool->gate.lock);
}

/* ---- blocks ---- */

static void deadline(struct timespec *t, int64_t timeout_ns)
{
    clock_gettime(CLOCK_MONOTONIC, t);
    t->tv_sec += timeout_ns / 1000000000;
    t->tv_nsec += timeout_ns % 1000000000;
    if (t->tv_nsec >= 1000000000) {
        t->tv_sec++;
        t->tv_nsec -= 1000000000;
    }
}

/* Waits until the block that is open, if one is, is the caller's. An orphan is rolled back, and
 * *undone set. REQUIRES: the operation lock, held again on return. ERRORS: PMS_E_BUSY, for
 * another task at once: as long as this thread waits, that cannot go on. */
static __attribute__((noinline)) int wait_for_block(struct pms_pool *pool, struct view v,
                                                    int64_t timeout_ns, bool *undone,
                                                    struct pms_error *error)
{
    struct timespec end;
    bool late = timeout_ns == 0;
    if (timeout_ns > 0)
        deadline(&end, timeout_ns);
    while (pool->gate.owner && !is_mine(pool, v)) {
        if (is_orphan(pool, v)) {
            *undone = true;
            return end_block(pool, PMS_UNDO, error);
        }
        if (late || pool->gate.owner == me())
            return busy(pool, error);
        int r = timeout_ns < 0 ? pthread_cond_wait(&pool->gate.left, &pool->gate.lock)
                               : pthread_cond_timedwait(&pool->gate.left, &pool->gate.lock, &end);
        if (pool->gate.closed)
            return pms_fail(error, PMS_E_CLOSED, "the store was closed");
        late = r == ETIMEDOUT;
    }
    return PMS_OK;
}

/* A call that is no block's waits for none, or for a moment. On an error it is left. REQUIRES:
 * it was entered; another's block is open. */
static int wait_a_moment(struct pms_pool *pool, struct view v, bool *undone,
                         struct pms_error *error)
{
    int status = wait_for_block(pool, v, GRACE_NS, undone, error);
    if (!pool->gate.owner)
        /* whatever woke this thread was for one that enters a block */
        pthread_cond_signal(&pool->gate.left);
    if (status != PMS_OK)
        pms_pool_leave(pool);
    return status;
}

int pms_pool_enter_write(struct pms_pool *pool, struct pms_error *error)
{
    struct view v = look(pool);
    bool undone = false;
    int status = pms_pool_enter_beside(pool, error);
    return status != PMS_OK || !pool->gate.owner || is_mine(pool, v)
               ? status
               : wait_a_moment(pool, v, &undone, error);
}

static inline void open_block(struct pms_pool *pool, uint64_t task)
{
    pool->gate.owner = me();
    pool->gate.thread = thread_id;
    pool->gate.record = thread_record;
    atomic_store_explicit(&pool->gate.number, pool->gate.number + 1, memory_order_relaxed);
    atomic_store_explicit(&pool->gate.task, task, memory_order_relaxed);
}

static int commit_pending(struct pms_pool *pool, struct pms_error *error)
{
    if (pool->tx.commits % LOOK_AT_HANDLER == 0)
        pms_handler_install();
    return pms_tx_commit(pool, error);
}

int pms_txblock_enter(struct pms_pool *pool, uint64_t task, int commit, int64_t timeout_ns,
                      struct pms_entered *entry, struct pms_error *error)
{
    struct view v = look(pool);
    bool undone = false;
    int status = pms_pool_enter_beside(pool, error);
    if (status != PMS_OK)
        return status;
    if (pool->gate.owner)
        status = wait_for_block(pool, v, timeout_ns, &undone, error);
    if (status == PMS_OK && pool->gate.depth == 0 && commit)
        status = commit_pending(pool, error);
    if (status == PMS_OK) {
        if (pool->gate.depth++ == 0)
            open_block(pool, task);
        *entry = (struct pms_entered){pool->gate.number, pool->gate.depth};
    } else if (!pool->gate.owner) {
        /* the wake-up that brought us here is the next one's */
        pthread_cond_signal(&pool->gate.left);
    }
    pms_pool_leave(pool);
    return status;
}

/* Somebody else than its owner wants the block committed. Whether it is an orphan, and rolled
 * back. */
static bool undo_orphan(struct pms_pool *pool, struct view v)
{
    bool undone = false;
    return wait_for_block(pool, v, GRACE_NS, &undone, NULL) == PMS_OK && undone;
}

static int leave(struct pms_pool *pool, const struct pms_entered *entry, struct view v,
                 enum pms_how how, struct pms_error *error)
{
    bool mine = pool->gate.owner && is_mine(pool, v);
    if (mine && pool->gate.number == entry->number && entry->depth == 1) /* the usual case */
        return end_block(pool, how, error);
    if (!pool->gate.owner || pool->gate.number != entry->number)
        return pms_fail(
            error, PMS_E_STATE,
            "the transaction block was over before it was left: its outermost part was left, or nobody "
            "could leave it any more, which rolls it back");
    if (!mine && how == PMS_COMMIT) {
        if (undo_orphan(pool, v))
            return pms_fail(error, PMS_E_STATE, ORPHAN);
        int status = pms_fail(
            error, PMS_E_STATE,
            "a transaction is left by the thread that entered it, and by the same task");
        if (error)
            error->holder = pool->gate.thread;
        return status;
    }
    if (entry->depth == 1)
        return end_block(pool, how, error);
    pool->gate.depth--;
    return PMS_OK;
}

int pms_txblock_leave(struct pms_pool *pool, const struct pms_entered *entry, enum pms_how how,
                      struct pms_error *error)
{
    struct view v = look(pool);
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = leave(pool, entry, v, how, error);
    pms_pool_leave(pool);
    return status;
}

int pms_txblock_commit_pending(struct pms_pool *pool, const struct pms_entered *entry,
                               struct pms_error *error)
{
    int status = pms_pool_enter_beside(pool, error);
    if (status != PMS_OK)
        return status;
    PMS_ASSERT(entry->depth == 1);
    if (pool->gate.owner && pool->gate.number == entry->number)
        status = commit_pending(pool, error);
    else
        status = pms_fail(error, PMS_E_STATE,
                          "the transaction block was rolled back while it was entered");
    pms_pool_leave(pool);
    return status;
}

int pms_txblock_wait(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error)
{
    struct view v = look(pool);
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (pool->gate.owner != me()) {
        bool undone = false;
        status = wait_for_block(pool, v, timeout_ns, &undone, error);
        if (!pool->gate.owner)
            pthread_cond_signal(&pool->gate.left); /* as in pms_txblock_enter: the next one's */
        if (undone)
            status = pms_fail(error, PMS_E_STATE, ORPHAN);
    }
    pms_pool_leave(pool);
    return status;
}

int pms_begin(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error)
{
    struct pms_entered entry;
    return pms_txblock_enter(pool, 0, 1, timeout_ns, &entry, error);
}

int pms_end(struct pms_pool *pool, int commit, struct pms_error *error)
{
    struct view v = look(pool);
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (pool->gate.depth == 0 || !is_mine(pool, v))
        status = pms_fail(error, PMS_E_STATE, "this thread is in no transaction block");
    else if (pool->gate.depth > 1)
        pool->gate.depth--;
    else
        status = end_block(pool, commit ? PMS_COMMIT : PMS_UNDO, error);
    pms_pool_leave(pool);
    return status;
}

int pms_pool_enter_alone(struct pms_pool *pool, const char *what, struct pms_error *error)
{
    bool undone = false;
    struct view v = look(pool);
    int status = pms_pool_enter_beside(pool, error);
    if (status == PMS_OK && pool->gate.owner && !is_mine(pool, v))
        status = wait_a_moment(pool, v, &undone, error);
    if (status != PMS_OK || (!pool->gate.owner && !undone))
        return status;
    if (!undone)
        status = pms_fail(
            error, PMS_E_STATE,
            "%s inside a transaction block: leaving the block commits it, an exception that leaves it rolls back",
            what);
    else /* what the caller stored into arrays meanwhile went with it, and he is told */
        status = pms_fail(error, PMS_E_STATE, ORPHAN);
    pms_pool_leave(pool);
    return status;
}

int pms_commit(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_alone(pool, "commit()", error);
    if (status != PMS_OK)
        return status;
    status = commit_pending(pool, error);
    pms_pool_leave(pool);
    return status;
}

int pms_rollback(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_alone(pool, "rollback()", error);
    if (status != PMS_OK)
        return status;
    status = pms_tx_rollback(pool, error);
    pms_pool_leave(pool);
    return status;
}

int pms_txblock_depth(struct pms_pool *pool)
{
    struct view v = look(pool);
    if (pms_pool_enter(pool, NULL) != PMS_OK)
        return 0;
    int depth = is_mine(pool, v) ? pool->gate.depth : 0;
    pms_pool_leave(pool);
    return depth;
}

uint64_t pms_epoch(struct pms_pool *pool)
{
    /* the lock may be held for ever; the views are there if the parent was neither opening nor
     * closing */
    if (pms_pool_forked(pool))
        return atomic_load(&pool->capture.forked) && !atomic_load(&pool->capture.unreadable) &&
                       !pool->gate.closed
                   ? pms_pool_root(pool)->epoch
                   : 0;
    /* else a close in another thread might unmap it under the read */
    pthread_mutex_lock(&pool->gate.lock);
    uint64_t epoch = pool->gate.closed ? 0 : pms_pool_root(pool)->epoch;
    pthread_mutex_unlock(&pool->gate.lock);
    return epoch;
}

uint64_t pms_rollbacks(const struct pms_pool *pool) { return pool->tx.rollbacks; }

uint64_t pms_put_backs(const struct pms_pool *pool)
{
    /* what the caller has read, before the count that tells whether it may have changed */
    pms_full_fence();
    return atomic_load(&pool->tx.put_backs);
}

int pms_will_write(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count,
                   struct pms_error *error)
{
    struct pms_span span[16];
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    uint64_t base = pool->opened.info.base;
    /* A span is a range with an offset for its address; few of them need no memory. */
    struct pms_span *s = span, *more = NULL;
    if (count > 16) {
        more = calloc(count, sizeof *more);
        if (!more)
            status = pms_fail_errno(error, "allocating memory");
        s = more;
    }
    for (uint64_t i = 0; status == PMS_OK && i < count; i++)
        s[i] = (struct pms_span){ranges[i].addr - base, ranges[i].bytes};
    if (status == PMS_OK)
        status = pms_capture_spans(&pool->capture, s, count, error);
    free(more);
    pms_pool_leave(pool);
    return status;
}

/* I5 counts pages of the user's as captured whole. What their granules cost on top has to fit
 * beside the hot ranges in the fast log; when a transaction has used that up, the pages are
 * captured instead, and the granules with them. */
static int capture_scattered(struct pms_pool *pool, struct pms_span span, struct pms_error *error)
{
    uint64_t lines = span.bytes / PMS_GRANULE + 2;
    if (pool->undo.scattered + lines > SCATTERED_MAX)
        return pms_capture_spans(&pool->capture, &span, 1, error);
    pool->undo.scattered += lines;
    return PMS_OK;
}

int pms_write(struct pms_pool *pool, void *addr, const void *src, uint64_t bytes,
              struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_span span = {(uint64_t)(uintptr_t)addr - pool->opened.info.base, bytes};
    if (!pool->map.shared) { /* one view: its pages are captured as if the user stored */
        /* rounds its span to pages */
        status = pms_capture_spans(&pool->capture, &(struct pms_span){span.off, bytes}, 1, error);
        if (status == PMS_OK)
            pms_persist_store(&pool->persist, pool->map.user + span.off, src, bytes);
    } else if (!pms_capture_is_users(&pool->capture, span)) {
        status = pms_fail(error, PMS_E_INVALID,
                          "the range to write is not inside an array of this store");
    } else {
        status = capture_scattered(pool, span, error);
        if (status == PMS_OK)
            pms_undo_store(&pool->undo, span.off, src, bytes);
    }
    pms_pool_leave(pool);
    return status;
}
