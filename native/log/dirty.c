#include "log/dirty.h"

/* A shorter list. But a user's range that can become hot stays one. */
static bool mergeable(enum pms_dirty_kind kind, uint64_t a, uint64_t b)
{
    if (kind != PMS_DIRTY_USER && kind != PMS_DIRTY_FAULTED)
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
