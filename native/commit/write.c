/* Declared writes. */
#include "commit/write.h"

#include <stdlib.h>

#include "commit/gate.h"
#include "commit/txblock.h"

#define SCATTERED_MAX 96u /* lines of the fast log, in one transaction */

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
