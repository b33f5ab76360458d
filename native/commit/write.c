/* Declared writes, and whether there were any. */
#include "commit/write.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/sort.h"
#include "commit/gate.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "log/bare.h"
#include "log/entries.h"

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

struct look { /* for changes, at ranges that lie in [from, to) */
    const struct pms_pool *pool;
    const struct pms_range *ranges;
    uint64_t count, from, to;
};

static bool differs(const struct look *l, uint64_t target, uint64_t len, const unsigned char *image)
{
    uint64_t base = l->pool->opened.info.base;
    if (target >= l->to || target + len <= l->from)
        return false;
    for (uint64_t i = 0; i < l->count; i++) {
        uint64_t at = l->ranges[i].addr - base, end = at + l->ranges[i].bytes;
        at = at > target ? at : target;
        end = end < target + len ? end : target + len;
        if (at < end &&
            memcmp(l->pool->map.user + at, image + (at - target), (size_t)(end - at)) != 0)
            return true;
    }
    return false;
}

static int entry_differs(void *ctx, const struct pms_entry *entry, const void *image)
{
    return differs(ctx, entry->target, entry->len, image);
}

static int home_differs(void *ctx, uint64_t target, uint64_t len, const unsigned char *image)
{
    return differs(ctx, target, len, image);
}

/* REQUIRES: the log lock. */
static bool any_differs(struct look *l)
{
    const struct pms_undo *u = &l->pool->undo;
    uint32_t entries = pms_undo_entries(u);
    if (entries > u->log.taken_room)
        return pms_undo_scan(u, u->tag, entry_differs, l) != 0;
    for (uint32_t e = 0; e < entries; e++) {
        const struct pms_taken *t = &u->log.taken[e];
        if (differs(l, atomic_load(&t->target), atomic_load(&t->len),
                    pms_undo_image(u, atomic_load(&t->image))))
            return true;
    }
    return false;
}

/* Of each range what lies in it, and no more: it may come from a disk. REQUIRES: the log lock. */
static int any_differs_at_home(const struct look *l)
{
    int differ = 0;
    for (uint64_t i = 0; i < l->count && !differ; i++) {
        uint64_t at = l->ranges[i].addr - l->pool->opened.info.base;
        struct look one = {l->pool, &l->ranges[i], 1, at, at + l->ranges[i].bytes};
        differ = pms_bare_scan(&l->pool->undo, one.from, one.to, home_differs, &one);
    }
    return differ;
}

int pms_written(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count,
                int32_t *written, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct look l = {.pool = pool, .ranges = ranges, .count = count, .from = UINT64_MAX};
    for (uint64_t i = 0; status == PMS_OK && i < count; i++) {
        uint64_t at = ranges[i].addr - pool->opened.info.base;
        if (at > pool->map.bytes || ranges[i].bytes > pool->map.bytes - at)
            status = pms_fail(error, PMS_E_INVALID, "the range is not inside this store");
        l.from = at < l.from ? at : l.from;
        l.to = at + ranges[i].bytes > l.to ? at + ranges[i].bytes : l.to;
    }
    if (status == PMS_OK && !count) {
        *written = pms_tx_pending(pool);
    } else if (status == PMS_OK) {
        pms_undo_lock(&pool->undo);
        int differ = any_differs(&l);
        if (!differ)
            differ = any_differs_at_home(&l);
        pms_undo_unlock(&pool->undo);
        *written = differ > 0;
        errno = differ < 0 ? -differ : 0;
        if (errno)
            status = pms_fail_errno(error, "reading the store's file");
    }
    pms_pool_leave(pool);
    return status;
}
