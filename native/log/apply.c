/* Putting the log back: roll back and recovery. */
#include <string.h>

#include "base/pages.h"
#include "base/region.h"
#include "log/entries.h"
#include "log/stores.h"

/* Pre-images belong to one region that transactions change, and nowhere else. */
static bool target_allowed(const struct pms_superblock *super, uint64_t off, uint64_t len)
{
    struct pms_region region = pms_region_of(super, off);
    return region.kind != PMS_REGION_NONE && len <= region.end - off;
}

struct image { /* where one belongs, and where it is */
    uint64_t target, len;
    const void *at;
};

struct apply {
    const struct pms_superblock *super;
    uint64_t seen, from; /* entries walked over; the first one that is wanted */
    uint64_t count, bytes, room;
    bool fixed;          /* room is all there is */
    struct image *image; /* reserved memory, grown by doubling, unless fixed */
};
enum { APPLY_BAD_TARGET = -1, APPLY_NO_MEMORY = -2, APPLY_ENOUGH = -3 };

static int more_room(struct apply *a)
{
    uint64_t room = a->room ? a->room * 2 : 4096;
    struct image *more = pms_reserve(room * sizeof *more);
    if (!more)
        return APPLY_NO_MEMORY;
    if (a->count)
        memcpy(more, a->image, a->count * sizeof *more);
    pms_unreserve(a->image, a->room * sizeof *more);
    a->image = more;
    a->room = room;
    return 0;
}

static int collect(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct apply *a = ctx;
    if (!target_allowed(a->super, entry->target, entry->len))
        return APPLY_BAD_TARGET;
    if (a->seen++ < a->from)
        return 0;
    int status = a->count < a->room ? 0 : a->fixed ? APPLY_ENOUGH : more_room(a);
    if (status)
        return status;
    a->image[a->count++] = (struct image){entry->target, entry->len, image};
    a->bytes += entry->len;
    return 0;
}

static void put_back(struct pms_undo *u, const struct apply *a, unsigned char *dst_base)
{
    /* newest first: the oldest pre-image of a byte is the true one */
    for (uint64_t i = a->count; i-- > 0;) {
        const struct image *x = &a->image[i];
        pms_undo_make_writable(u, x->target, x->len);
        pms_persist_copy(u->persist, dst_base + x->target, x->at, x->len);
    }
}

/* A roll back may not fail for want of memory: walks the log again for each handful of entries. */
static int64_t apply_by_handfuls(struct pms_undo *u, uint64_t tag, unsigned char *dst_base,
                                 const struct pms_superblock *super, uint64_t *bytes)
{
    struct image image[256];
    struct apply all = {.super = super, .from = UINT64_MAX};
    *bytes = 0;
    if (pms_undo_scan(u, tag, collect, &all))
        return -1;
    for (uint64_t end = all.seen; end > 0;) {
        struct apply a = {.super = super, .room = 256, .fixed = true, .image = image};
        a.from = end > a.room ? end - a.room : 0;
        a.room = end - a.from;
        pms_undo_scan(u, tag, collect, &a);
        put_back(u, &a, dst_base);
        *bytes += a.bytes;
        end = a.from;
    }
    return (int64_t)all.seen;
}

int64_t pms_undo_apply(struct pms_undo *u, uint64_t tag, unsigned char *dst_base,
                       const struct pms_superblock *super, uint64_t *bytes)
{
    struct apply a = {.super = super};
    uint64_t put = 0;
    int bad = pms_undo_scan(u, tag, collect, &a);
    if (!bad)
        put_back(u, &a, dst_base);
    int64_t count = bad ? -1 : (int64_t)a.count;
    pms_unreserve(a.image, a.room * sizeof *a.image);
    if (bad == APPLY_NO_MEMORY)
        count = apply_by_handfuls(u, tag, dst_base, super, &put);
    if (bytes)
        *bytes = bad == APPLY_NO_MEMORY ? put : a.bytes;
    return count;
}

struct sound {
    const struct pms_superblock *super;
    uint64_t left; /* of the log */
};

static int check_entry(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct sound *s = ctx;
    uint64_t bytes = pms_undo_entry_bytes(entry->len);
    (void)image;
    if (!target_allowed(s->super, entry->target, entry->len) || bytes > s->left)
        return APPLY_BAD_TARGET;
    s->left -= bytes;
    return 0;
}

bool pms_undo_sound(const struct pms_undo *u, uint64_t tag, const struct pms_superblock *super)
{
    /* what was captured was live, and all of it fits (I5) */
    struct sound s = {super, pms_undo_capacity(u)};
    return pms_undo_scan(u, tag, check_entry, &s) == 0;
}

static int compare(void *ctx, const struct pms_entry *entry, const void *image)
{
    const struct pms_map *map = ctx;
    bool pages = entry->target % PMS_PAGE == 0 && entry->len % PMS_PAGE == 0;
    return pages && memcmp(map->user + entry->target, image, entry->len) != 0;
}

bool pms_undo_is_applied(const struct pms_undo *u)
{
    return pms_undo_scan(u, u->tag, compare, u->map) == 0;
}
