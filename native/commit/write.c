/* Declared writes, and whether there were any. */
#include "commit/write.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"
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

#define SAMPLE_BYTES 64u

struct summing {               /* of what is pending beside sorted ranges */
    const unsigned char *user; /* NULL: the bytes are only counted */
    const struct pms_span *beside;
    uint64_t count, left; /* bytes that may still come */
    uint32_t sum;
};

/* false: too much is pending */
static bool sum_piece(struct summing *s, uint64_t from, uint64_t to)
{
    if (from >= to)
        return true;
    if (to - from > s->left)
        return false;
    s->left -= to - from;
    if (!s->user)
        return true;
    const uint64_t place[2] = {from, to};
    s->sum = pms_crc32c(s->sum, place, sizeof place);
    s->sum = pms_crc32c(s->sum, s->user + from, (size_t)(to - from));
    return true;
}

static bool sum_range(struct summing *s, uint64_t from, uint64_t to)
{
    uint64_t low = 0, high = s->count; /* the first that ends behind `from` */
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (s->beside[middle].off + s->beside[middle].bytes <= from)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < s->count && s->beside[low].off < to; low++) {
        if (!sum_piece(s, from, s->beside[low].off))
            return false;
        uint64_t end = s->beside[low].off + s->beside[low].bytes;
        from = end > from ? end : from;
    }
    return sum_piece(s, from, to);
}

static bool sum_dirty(struct summing s, const struct pms_undo *undo, uint32_t *sum)
{
    const struct pms_dirty *d = pms_dirty_first(&undo->dirty), *end = pms_dirty_end(&undo->dirty);
    for (; d < end; d++)
        if (!sum_range(&s, d->off, d->off + d->len))
            return false;
    *sum = s.sum;
    return true;
}

static void sum_samples(struct summing *s)
{
    for (uint64_t i = 0; i < s->count; i++) {
        const unsigned char *at = s->user + s->beside[i].off;
        uint64_t bytes = s->beside[i].bytes, few = bytes < SAMPLE_BYTES ? bytes : SAMPLE_BYTES;
        s->sum = pms_crc32c(s->sum, at, (size_t)few);
        s->sum = pms_crc32c(s->sum, at + (bytes - few) / 2, (size_t)few);
        s->sum = pms_crc32c(s->sum, at + (bytes - few), (size_t)few);
    }
}

int pms_pending_sum(struct pms_pool *pool, const struct pms_range *ranges, uint64_t count,
                    uint64_t most, uint32_t *sum, int32_t *known, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_span *beside = count ? calloc(count, sizeof *beside) : NULL;
    if (count && !beside)
        status = pms_fail_errno(error, "allocating memory");
    uint64_t end = 0;
    for (uint64_t i = 0; status == PMS_OK && i < count; i++) {
        uint64_t at = ranges[i].addr - pool->opened.info.base;
        if (at > pool->map.bytes || ranges[i].bytes > pool->map.bytes - at)
            status = pms_fail(error, PMS_E_INVALID, "the range is not inside this store");
        beside[i] = (struct pms_span){at, ranges[i].bytes};
    }
    if (status == PMS_OK) {
        pms_sort(beside, count, sizeof *beside);
        for (uint64_t i = 0; i < count; i++) { /* those that lie in others count once */
            struct pms_span *b = &beside[i];
            uint64_t from = b->off > end ? b->off : end, to = b->off + b->bytes;
            *b = (struct pms_span){from, to > from ? to - from : 0};
            end = to > end ? to : end;
        }
        struct summing s = {.beside = beside, .count = count, .left = most};
        pms_undo_lock(&pool->undo);
        *known = sum_dirty(s, &pool->undo, &s.sum); /* too much is not read at all */
        s.user = pool->map.user;
        if (*known)
            (void)sum_dirty(s, &pool->undo, &s.sum);
        pms_undo_unlock(&pool->undo);
        if (*known)
            sum_samples(&s);
        *sum = s.sum;
    }
    free(beside);
    pms_pool_leave(pool);
    return status;
}
