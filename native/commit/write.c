/* Declared writes. */
#include "commit/write.h"

#include <stdlib.h>

#include "commit/gate.h"
#include "commit/txblock.h"

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
