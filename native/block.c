/* Who may change the store now: the operation lock, and the blocks (`with store.transaction()`) of threads. */
#include "pool_state.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "handler.h"
#include "quiet.h"

#define SCATTERED_MAX 96u    /* lines of the fast log, in one transaction */
#define LOOK_AT_HANDLER 16u /* blocks: a look is a system call */

static __thread int64_t thread_id;

int64_t pms_thread_id(void)
{
    if (!thread_id)
        thread_id = (int64_t)syscall(SYS_gettid);
    return thread_id;
}

void pms_thread_after_fork_in_child(void) { thread_id = 0; } /* the child's only thread: it has another id than its parent's */

int pms_pool_enter(struct pms_pool *pool, struct pms_error *error)
{
    if (pms_pool_forked(pool)) /* before the lock: another thread may have held it at the fork */
        return pms_fail(error, PMS_E_FORKED, "the store was opened by the parent process");
    pthread_mutex_lock(&pool->op);
    if (!pool->closed)
        return PMS_OK;
    pthread_mutex_unlock(&pool->op);
    return pms_fail(error, PMS_E_CLOSED, "the store is closed");
}

int pms_pool_enter_write(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (!pool->read_only && !pool->failed)
        return PMS_OK;
    status = pms_fail(error, PMS_E_READONLY, pool->failed ? "an earlier failure left unknown what is durable"
                                                          : "the store is open for reading");
    pms_pool_leave(pool);
    return status;
}

void pms_pool_leave(struct pms_pool *pool)
{
    if (pool->undo.stored) /* what is written back already, before F2 of a commit by another thread */
        pms_persist_hand_over(&pool->persist);
    pthread_mutex_unlock(&pool->op);
}

static int busy(const struct pms_pool *pool, struct pms_error *error)
{
    int64_t holder = pool->block_owner;
    int status = pms_fail(error, PMS_E_BUSY, "another thread is inside a transaction block");
    if (error)
        error->holder = holder;
    return status;
}

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

/* Waits until no other thread has a block. REQUIRES: the operation lock, held again on return. */
static int wait_for_block(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error)
{
    struct timespec end;
    int64_t me = pms_thread_id();
    if (timeout_ns >= 0)
        deadline(&end, timeout_ns);
    while (pool->block_owner && pool->block_owner != me) {
        int r = timeout_ns < 0 ? pthread_cond_wait(&pool->block_left, &pool->op)
                               : pthread_cond_timedwait(&pool->block_left, &pool->op, &end);
        if (pool->closed)
            return pms_fail(error, PMS_E_CLOSED, "the store was closed");
        if (r == ETIMEDOUT && pool->block_owner && pool->block_owner != me)
            return busy(pool, error);
    }
    return PMS_OK;
}

int pms_begin(struct pms_pool *pool, int64_t timeout_ns, struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = wait_for_block(pool, timeout_ns, error);
    if (status == PMS_OK && pool->block_depth == 0) {
        if (pool->commits % LOOK_AT_HANDLER == 0)
            pms_handler_install();
        status = pms_tx_commit(pool, error);
    }
    if (status == PMS_OK) {
        pool->block_owner = pms_thread_id();
        pool->block_depth++;
    } else if (!pool->block_owner) {
        pthread_cond_signal(&pool->block_left); /* the wake-up that brought us here is the next one's */
    }
    pms_pool_leave(pool);
    return status;
}

static int leave_outermost(struct pms_pool *pool, int commit, struct pms_error *error)
{
    int status = commit ? pms_tx_commit(pool, error) : PMS_OK;
    if ((!commit || status != PMS_OK) && !pool->failed) {
        int undone = pms_tx_rollback(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? undone : status;
    }
    pool->block_depth = 0;
    pool->block_owner = 0;
    pthread_cond_signal(&pool->block_left);
    return status;
}

int pms_end(struct pms_pool *pool, int commit, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (pool->block_depth == 0 || pool->block_owner != pms_thread_id())
        status = pms_fail(error, PMS_E_STATE, "this thread is in no transaction block");
    else if (pool->block_depth > 1)
        pool->block_depth--;
    else
        status = leave_outermost(pool, commit, error);
    pms_pool_leave(pool);
    return status;
}

int pms_pool_enter_alone(struct pms_pool *pool, const char *what, struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK || !pool->block_owner)
        return status;
    if (pool->block_owner == pms_thread_id())
        status = pms_fail(error, PMS_E_STATE, "%s inside a transaction block: leaving the block commits it, an exception that leaves it rolls back", what);
    else
        status = busy(pool, error);
    pms_pool_leave(pool);
    return status;
}

int pms_commit(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_pool_enter_alone(pool, "commit()", error);
    if (status != PMS_OK)
        return status;
    if (pool->commits % LOOK_AT_HANDLER == 0)
        pms_handler_install();
    status = pms_tx_commit(pool, error);
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

int pms_block_depth(struct pms_pool *pool)
{
    if (pms_pool_enter(pool, NULL) != PMS_OK)
        return 0;
    int depth = pool->block_owner == pms_thread_id() ? pool->block_depth : 0;
    pms_pool_leave(pool);
    return depth;
}

uint64_t pms_epoch(struct pms_pool *pool)
{
    if (pms_pool_forked(pool)) /* the lock may be held for ever; the views are there if the parent was neither opening nor closing */
        return atomic_load(&pool->capture.forked) && !atomic_load(&pool->capture.unreadable) && !pool->closed ? pms_pool_root(pool)->epoch : 0;
    pthread_mutex_lock(&pool->op); /* else a close in another thread might unmap it under the read */
    uint64_t epoch = pool->closed ? 0 : pms_pool_root(pool)->epoch;
    pthread_mutex_unlock(&pool->op);
    return epoch;
}

uint64_t pms_rollbacks(const struct pms_pool *pool) { return pool->rollbacks; }

uint64_t pms_put_backs(const struct pms_pool *pool)
{
    pms_full_fence(); /* what the caller has read, before the count that tells whether it may have changed */
    return atomic_load(&pool->put_backs);
}

int pms_will_write(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count, struct pms_error *error)
{
    struct pms_span span[16];
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    uint64_t base = pool->info.base;
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

/* I5 counts pages of the user's as captured whole. What their granules cost on top has to fit beside the hot ranges in the fast log; when a
 * transaction has used that up, the pages are captured instead, and the granules with them. */
static int capture_scattered(struct pms_pool *pool, struct pms_span span, struct pms_error *error)
{
    uint64_t lines = span.bytes / PMS_GRANULE + 2;
    if (pool->undo.scattered + lines > SCATTERED_MAX)
        return pms_capture_spans(&pool->capture, &span, 1, error);
    pool->undo.scattered += lines;
    return PMS_OK;
}

int pms_write(struct pms_pool *pool, void *addr, const void *src, uint64_t bytes, struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_span span = {(uint64_t)(uintptr_t)addr - pool->info.base, bytes};
    if (!pool->map.shared) { /* one view: its pages are captured as if the user stored */
        status = pms_capture_spans(&pool->capture, &(struct pms_span){span.off, bytes}, 1, error); /* rounds its span to pages */
        if (status == PMS_OK)
            pms_persist_store(&pool->persist, pool->map.user + span.off, src, bytes);
    } else if (!pms_capture_is_users(&pool->capture, span)) {
        status = pms_fail(error, PMS_E_INVALID, "the range to write is not inside an array of this store");
    } else {
        status = capture_scattered(pool, span, error);
        if (status == PMS_OK)
            pms_undo_store(&pool->undo, span.off, src, bytes);
    }
    pms_pool_leave(pool);
    return status;
}
