/* The history record: lies in the session record, so it is double-buffered, checksummed and
 * outside transactions (I7). */
#include "store/history.h"
#include "commit/gate.h"

#include <string.h>

int pms_history_read(struct pms_pool *pool, void *out, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    memcpy(out, pool->session.history, PMS_HISTORY_BYTES);
    pms_pool_leave(pool);
    return PMS_OK;
}

/* dax, file: synced, each time into the other copy. process, emulated: a sync would write the
 * whole store to the disk, so there is none; all such writes go to one copy, and the one synced
 * at open stays whole whatever happens to the machine. */
static int write_session(struct pms_pool *pool, struct pms_session *next, struct pms_error *error)
{
    if (pool->opened.domain == PMS_DOMAIN_DAX || pool->opened.domain == PMS_DOMAIN_FILE)
        return pms_session_write(pool->opened.fd, &pool->persist, next, error);
    next->generation += pool->session_unsynced ? 2 : 1;
    return pms_session_write_unsynced(pool->opened.fd, &pool->persist, next, error);
}

int pms_history_write(struct pms_pool *pool, const void *data, uint32_t bytes,
                      struct pms_error *error)
{
    if (bytes > PMS_HISTORY_BYTES)
        return pms_fail(error, PMS_E_INVALID, "a history record has at most %u bytes",
                        PMS_HISTORY_BYTES);
    int status = pms_pool_enter_beside(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_session next = pool->session;
    memset(next.history, 0, sizeof next.history);
    if (bytes)
        memcpy(next.history, data, bytes);
    status = write_session(pool, &next, error);
    if (status == PMS_OK) {
        pool->session = next;
        pool->session_unsynced = pool->opened.domain != PMS_DOMAIN_DAX &&
                                 pool->opened.domain != PMS_DOMAIN_FILE;
    }
    pms_pool_leave(pool);
    return status;
}
