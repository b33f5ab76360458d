/* The operation lock: who comes in. */
#ifndef PMS_COMMIT_GATE_H
#define PMS_COMMIT_GATE_H

#include "commit/pool_state.h"

/* Enters an operation: not closed, not a fork child. Takes the lock. ERRORS: PMS_E_CLOSED,
 * PMS_E_FORKED. */
int pms_pool_enter(struct pms_pool *pool, struct pms_error *error);
/* As above, for what is no part of a transaction, or makes its own way with
 * transaction blocks. ERRORS also:
 * PMS_E_READONLY. */
int pms_pool_enter_beside(struct pms_pool *pool, struct pms_error *error);
static inline void pms_pool_leave(struct pms_pool *pool)
{
    /* what is written back already, before F2 of a commit by another thread */
    if (pool->undo.stored)
        pms_persist_hand_over(&pool->persist);
    pthread_mutex_unlock(&pool->gate.lock);
}

#endif
