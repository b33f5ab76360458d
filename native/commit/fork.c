/* A fork child may read the parent's arrays and nothing else: it must never write into the
 * parent's store, nor keep its lock. */
#include "commit/fork.h"
#include "commit/pool_state.h"

#include <stddef.h>
#include <sys/mman.h>

#include "base/thread.h"
#include "commit/handler.h"
#include "commit/unlock.h"
#include "live/server.h"
#include "seam/holder.h"
#include "seam/spill.h"

static struct pms_pool *pool_of(struct pms_watched *w)
{
    return (struct pms_pool *)((char *)w - offsetof(struct pms_pool, capture.watched));
}

/* The owner's store, in domain file: what is written home later must not change what the child
 * reads. */
static struct pms_readers *readers_of(struct pms_watched *w)
{
    return atomic_load(&w->forked) || !pool_of(w)->journal
               ? NULL
               : pms_journal_readers(pool_of(w)->journal);
}

/* What lies in the spill is a child's own. */
static void freeze(struct pms_pool *pool)
{
    pms_undo_lock(&pool->undo);
    pool->map.spill.shown = pms_spill_freeze(&pool->map) != 0;
    pms_undo_unlock(&pool->undo);
}

static void prepare(struct pms_watched *w)
{
    struct pms_pool *pool = pool_of(w);
    if (!readers_of(w))
        return;
    pms_spill_before_fork(&pool->map);
    if (pms_spill_bytes(&pool->map))
        freeze(pool);
    pms_readers_before_fork(readers_of(w), &pool->map);
}

static void resume(struct pms_watched *w)
{
    struct pms_pool *pool = pool_of(w);
    if (!readers_of(w))
        return;
    pms_readers_after_fork(readers_of(w));
    pms_spill_after_fork(&pool->map);
}

static void disown(struct pms_watched *w, bool prepared)
{
    struct pms_pool *pool = pool_of(w);
    bool of_file = pool->journal != NULL, readable = true;
    mprotect(pool->map.user, pool->map.bytes, PROT_READ);
    if (of_file)
        readable = prepared && readers_of(w) && !pool->map.spill.shown &&
                   pms_readers_in_child(readers_of(w), &pool->map);
    if (!readable) {
        atomic_store(&w->unreadable, 1);
        mprotect(pool->map.user, pool->map.bytes, PROT_NONE);
    }
    atomic_store(&w->forked, 1);
    pms_spill_after_fork_in_child(&pool->map);
    if (pool->map.shared)
        mprotect(pool->map.engine, pool->map.bytes, PROT_READ);
}

static void before(void) { pms_handler_before_fork(prepare); }
static void in_parent(void) { pms_handler_after_fork(resume); }

static void in_child(void)
{
    pms_handler_after_fork_in_child(disown);
    pms_holder_after_fork_in_child();
    pms_serve_after_fork_in_child();
    pms_parallel_after_fork_in_child();
    pms_undo_after_fork_in_child();
    pms_thread_after_fork_in_child();
}

void pms_fork_prepare_once(void)
{
    pms_process_prepare(&(struct pms_fork_hooks){before, in_parent, in_child});
    pms_unlock_prepare_once(); /* behind them: it waits before they take anything */
}
