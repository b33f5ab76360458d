#include "log/dirty.h"

#include <assert.h>
#include <stddef.h>

#include "base/sort.h"
#include "base/status.h"

static_assert(offsetof(struct pms_dirty, off) == 0, "sorted by it");

/* A shorter list. But a user's range that can become hot stays one. */
static bool mergeable(enum pms_dirty_kind kind, uint64_t a, uint64_t b)
{
    if (kind != PMS_DIRTY_USER)
        return kind != PMS_DIRTY_HOT;
    return a + b <= PMS_HOT_RANGE_MAX || (a >= PMS_HOT_RANGE_MAX && b >= PMS_HOT_RANGE_MAX);
}

void pms_dirty_note(struct pms_dirty_list *l, enum pms_dirty_kind kind, uint64_t off, uint64_t len)
{
    struct pms_dirty *last = &l->at[l->count - (l->count > 0)];
    if (l->count && last->kind == (uint32_t)kind && mergeable(kind, last->len, len)) {
        if (last->off + last->len == off) {
            last->len += len;
            return;
        }
        if (off >= last->off && off + len <= last->off + last->len)
            return;
    }
    pms_dirty_add(l, &(struct pms_dirty){.off = off, .len = len, .kind = kind});
}

void pms_dirty_add(struct pms_dirty_list *l, const struct pms_dirty *d)
{
    PMS_ASSERT(l->count < l->room);
    l->at[l->count++] = *d;
}

uint64_t pms_dirty_pick(struct pms_dirty_list *l, bool (*wanted)(const struct pms_dirty *d))
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < l->count; i++) {
        if (!wanted(&l->at[i]))
            continue;
        struct pms_dirty x = l->at[i];
        l->at[i] = l->at[n];
        l->at[n++] = x;
    }
    pms_sort(l->at, n, sizeof *l->at);
    return n;
}
