/* Transaction blocks (`with store.transaction()`) of threads and tasks, and who may change the
 * store now.
 *
 * While one is open its owner alone changes the store by calls. Entering one waits for another
 * thread's; every other call that changes the store is refused meanwhile, as half of its work, or
 * half of the transaction block, would go with the other. */
#include "commit/txblock.h"

#include <errno.h>
#include <time.h>

#include "commit/gate.h"
#include "commit/hold.h"
#include "commit/landing.h"
#include "commit/tx.h"
#include "commit/handler.h"

#define LOOK_AT_HANDLER 16u /* transaction blocks: a look is a system call */
#define ORPHAN                                                                                   \
    "a transaction block was open whose thread or task had ended: it was rolled back, with all " \
    "that was written since it was entered"
/* a thread that Python has joined may not have ended for the kernel yet */
#define GRACE_NS 20000000

/* ---- whose is open ---- */

static enum pms_whose (*ask_task)(const _Atomic uint64_t *task);

void pms_txblock_set_tasks(enum pms_whose (*whose)(const _Atomic uint64_t *task))
{
    ask_task = whose;
}

struct view { /* of a transaction block that is a task's, by the caller */
    uint64_t number;
    enum pms_whose whose;
};

static struct view ask(const struct pms_pool *pool)
{
    uint64_t number = atomic_load_explicit(&pool->gate.number, memory_order_relaxed);
    return (struct view){number, ask_task ? ask_task(&pool->gate.task) : PMS_ANOTHERS};
}

/* REQUIRES: no lock is held, as a program that has tasks is asked. What it says is true until
 * the caller acts: one that is the caller's is nobody else's to enter, and the number tells
 * whether it is still the same one. */
static inline struct view look(const struct pms_pool *pool)
{
    if (atomic_load_explicit(&pool->gate.task, memory_order_relaxed))
        return ask(pool);
    return (struct view){0, PMS_ANOTHERS};
}

/* REQUIRES in these three: the operation lock; a transaction block is open. */
static inline bool by_me(const struct pms_pool *pool)
{
    return pool->gate.owner.number == pms_thread_me()->number;
}

static inline bool is_mine(const struct pms_pool *pool, struct view v)
{
    if (!by_me(pool))
        return false;
    return !pool->gate.task || (v.whose == PMS_MINE && v.number == pool->gate.number);
}

/* Whether nobody can leave it any more. */
static bool is_orphan(const struct pms_pool *pool, struct view v)
{
    if (v.number == pool->gate.number && v.whose == PMS_OVER)
        return true;
    if (by_me(pool))
        return false;
    return pms_thread_has_ended(&pool->gate.owner);
}

static int busy(const struct pms_pool *pool, struct pms_error *error)
{
    bool task = by_me(pool);
    int status = pms_fail(error, PMS_E_BUSY,
                          task ? "another task of this thread is inside a transaction block"
                               : "another thread is inside a transaction block");
    if (error) {
        error->holder = task ? 0 : pool->gate.owner.id; /* 0: waiting would not help */
        error->offset = pool->gate.task;
    }
    return status;
}

bool pms_txblock_of_another_thread(const struct pms_pool *pool)
{
    return pool->gate.owner.number && !by_me(pool) &&
           !is_orphan(pool, (struct view){0, PMS_ANOTHERS});
}

void pms_txblock_forget(struct pms_pool *pool)
{
    pool->gate.depth = 0;
    pool->gate.owner.number = 0;
    atomic_store_explicit(&pool->gate.task, 0, memory_order_relaxed);
}

static int end_txblock(struct pms_pool *pool, enum pms_how how, struct pms_error *error)
{
    int status = how == PMS_COMMIT ? pms_tx_commit(pool, error) : PMS_OK;
    if ((how == PMS_UNDO || status != PMS_OK) && !pms_pool_failed(pool)) {
        int undone = pms_tx_rollback(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? undone : status;
    }
    pms_txblock_forget(pool);
    pthread_cond_signal(&pool->gate.left);
    return status;
}

/* ---- waiting for transaction blocks, entering and leaving them ---- */

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

/* Waits until the transaction block that is open, if one is, is the caller's. An orphan is rolled
 * back, and *undone set. REQUIRES: the operation lock, held again on return. ERRORS: PMS_E_BUSY,
 * for another task at once: as long as this thread waits, that cannot go on. */
static __attribute__((noinline)) int wait_for_txblock(struct pms_pool *pool, struct view v,
                                                      int64_t timeout_ns, bool *undone,
                                                      struct pms_error *error)
{
    struct timespec end;
    bool late = timeout_ns == 0;
    if (timeout_ns > 0)
        deadline(&end, timeout_ns);
    while (pool->gate.owner.number && !is_mine(pool, v)) {
        if (is_orphan(pool, v)) {
            *undone = true;
            return end_txblock(pool, PMS_UNDO, error);
        }
        if (late || by_me(pool))
            return busy(pool, error);
        int r = timeout_ns < 0 ? pthread_cond_wait(&pool->gate.left, &pool->gate.lock)
                               : pthread_cond_timedwait(&pool->gate.left, &pool->gate.lock, &end);
        if (pool->gate.closed)
            return pms_fail(error, PMS_E_CLOSED, "the store was closed");
        late = r == ETIMEDOUT;
    }
    return PMS_OK;
}

/* A call that enters no transaction block waits for none, or for a moment. On an error it is
 * left. REQUIRES: the store was entered; another's is open. */
static int wait_a_moment(struct pms_pool *pool, struct view v, bool *undone,
                         struct pms_error *error)
{
    int status = wait_for_txblock(pool, v, GRACE_NS, undone, error);
    if (!pool->gate.owner.number)
        /* whatever woke this thread was for one that enters a transaction block */
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
    return status != PMS_OK || !pool->gate.owner.number || is_mine(pool, v)
               ? status
               : wait_a_moment(pool, v, &undone, error);
}

static inline void open_txblock(struct pms_pool *pool, uint64_t task)
{
    pool->gate.owner = *pms_thread_me();
    atomic_store_explicit(&pool->gate.number, pool->gate.number + 1, memory_order_relaxed);
    atomic_store_explicit(&pool->gate.task, task, memory_order_relaxed);
}

static int commit_pending(struct pms_pool *pool, struct pms_error *error)
{
    if (pool->tx.commits % LOOK_AT_HANDLER == 0)
        pms_handler_install();
    return pms_tx_commit(pool, error);
}

/* Before a transaction block. One that is in doubt from its beginning could not be left. */
static int commit_before(struct pms_pool *pool, struct pms_error *error)
{
    if (pool->hold.on != PMS_HELD_FOR_JOB || (!pool->tx.landing && !pms_tx_pending(pool)))
        return commit_pending(pool, error);
    pms_landing_disarm(pool);
    return pms_fail(error, PMS_E_INDOUBT,
                    "a transaction block, which begins with a commit of what is pending, would be "
                    "in doubt: commit that first");
}

int pms_txblock_enter(struct pms_pool *pool, uint64_t task, int commit, int64_t timeout_ns,
                      struct pms_entered *entry, struct pms_error *error)
{
    struct view v = look(pool);
    bool undone = false;
    int status = pms_pool_enter_beside(pool, error);
    if (status != PMS_OK)
        return status;
    if (pool->gate.owner.number)
        status = wait_for_txblock(pool, v, timeout_ns, &undone, error);
    if (status == PMS_OK && pool->gate.depth == 0) {
        if (pool->hold.in_doubt)
            status = pms_hold_check_doubt(pool, error); /* it could not be left with a commit */
        else if (commit)
            status = commit_before(pool, error);
    }
    if (status == PMS_OK) {
        if (pool->gate.depth++ == 0)
            open_txblock(pool, task);
        *entry = (struct pms_entered){pool->gate.number, pool->gate.depth};
    } else if (!pool->gate.owner.number) {
        /* the wake-up that brought us here is the next one's */
        pthread_cond_signal(&pool->gate.left);
    }
    pms_pool_leave(pool);
    return status;
}

/* Somebody else than its owner wants it committed. Whether it is an orphan, and rolled
 * back. */
static bool undo_orphan(struct pms_pool *pool, struct view v)
{
    bool undone = false;
    return wait_for_txblock(pool, v, GRACE_NS, &undone, NULL) == PMS_OK && undone;
}

static int leave(struct pms_pool *pool, const struct pms_entered *entry, struct view v,
                 enum pms_how how, struct pms_error *error)
{
    bool mine = pool->gate.owner.number && is_mine(pool, v);
    if (mine && pool->gate.number == entry->number && entry->depth == 1) /* the usual case */
        return end_txblock(pool, how, error);
    if (!pool->gate.owner.number || pool->gate.number != entry->number)
        return pms_fail(
            error, PMS_E_STATE,
            "the transaction block was over before it was left: its outermost part was left, "
            "or nobody "
            "could leave it any more, which rolls it back");
    if (!mine && how == PMS_COMMIT) {
        if (undo_orphan(pool, v))
            return pms_fail(error, PMS_E_STATE, ORPHAN);
        int status = pms_fail(
            error, PMS_E_STATE,
            "a transaction is left by the thread that entered it, and by the same task");
        if (error)
            error->holder = pool->gate.owner.id;
        return status;
    }
    if (entry->depth == 1)
        return end_txblock(pool, how, error);
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
    if (pool->gate.owner.number && pool->gate.number == entry->number)
        status = commit_before(pool, error);
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
    if (!by_me(pool)) {
        bool undone = false;
        status = wait_for_txblock(pool, v, timeout_ns, &undone, error);
        if (!pool->gate.owner.number)
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
        status = end_txblock(pool, commit ? PMS_COMMIT : PMS_UNDO, error);
    pms_pool_leave(pool);
    return status;
}

int pms_pool_enter_alone(struct pms_pool *pool, const char *what, struct pms_error *error)
{
    bool undone = false;
    struct view v = look(pool);
    int status = pms_pool_enter_beside(pool, error);
    if (status == PMS_OK && pool->gate.owner.number && !is_mine(pool, v))
        status = wait_a_moment(pool, v, &undone, error);
    if (status != PMS_OK || (!pool->gate.owner.number && !undone))
        return status;
    if (!undone)
        status = pms_fail(
            error, PMS_E_STATE,
            "%s inside a transaction block: leaving the block commits it, an exception that "
            "leaves it rolls back",
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
