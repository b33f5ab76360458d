/* A fork child may read the parent's arrays and nothing else: it must never write into the parent's store, nor keep its lock. */
#include "pool_state.h"

#include <stddef.h>
#include <sys/mman.h>

#include "handler.h"

static void disown(struct pms_capture *c)
{
    struct pms_pool *pool = (struct pms_pool *)((char *)c - offsetof(struct pms_pool, capture));
    atomic_store(&c->forked, 1);
    mprotect(pool->map.user, pool->map.bytes, PROT_READ);
    if (pool->map.shared)
        mprotect(pool->map.engine, pool->map.bytes, PROT_READ);
}

static void in_child(void)
{
    pms_handler_after_fork_in_child(disown);
    pms_parallel_after_fork_in_child();
    pms_undo_after_fork_in_child();
    pms_thread_after_fork_in_child();
}

void pms_fork_prepare_once(void) { pms_process_prepare(in_child); }
