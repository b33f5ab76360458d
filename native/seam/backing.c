#include "seam/backing.h"

#include <errno.h>

#include "base/pages.h"
#include "seam/huge.h"

/* More than is asked for, so that small blocks do not each make a system call; at edges of huge
 * pages where a log is large. */
#define STEP_SMALL (64u << 10)
#define STEP_SHARE 8u
#define MADE_AT_ONCE (STEP_SHARE * PMS_HUGE) /* each time waits for all cores */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

uint64_t pms_backing_known(const struct pms_backing *b)
{
    uint64_t room = 0;
    for (uint32_t i = 0; i < b->count; i++) {
        room += pms_log_room_of(b->part[i].backed);
        if (b->part[i].backed < b->part[i].bytes)
            break;
    }
    return room;
}

static void count(struct pms_backing *b)
{
    bool all = true;
    b->bytes = 0;
    for (uint32_t i = 0; i < b->count && all; i++) {
        b->bytes += b->part[i].backed;
        all = b->part[i].backed == b->part[i].bytes;
    }
    /* all: whoever needs more finds no place in the logs */
    b->room = all ? UINT64_MAX : pms_backing_known(b);
    if (b->told)
        atomic_store_explicit(b->told, pms_backing_known(b), memory_order_relaxed);
}

void pms_backing_tell(struct pms_backing *b, _Atomic uint64_t *told)
{
    b->told = told;
    count(b);
}

void pms_backing_open(struct pms_backing *b, int fd, const struct pms_map *map,
                      struct pms_persist *persist, bool sync)
{
    *b = (struct pms_backing){.fd = fd,
                              .map = map && pms_huge_in_memory(fd) ? map : NULL,
                              .persist = persist,
                              .sync = sync};
}

void pms_backing_learn(struct pms_backing *b, const struct pms_superblock *super, bool backed)
{
    if (!b->persist)
        return;
    /* cut in halves: format and growth left no holes, and the bit is set after they were filled */
    backed = backed || super->features_incompat & PMS_FEATURE_HOLD;
    for (uint32_t i = 0; i < super->segment_count; i++) {
        const struct pms_segment *s = &super->segment[i];
        uint64_t known = i < b->count ? b->part[i].backed : 0;
        b->part[i] = (struct pms_backed){s->log_off, s->log_bytes, backed ? s->log_bytes : known};
    }
    b->count = super->segment_count;
    count(b);
}

/* Of the linear space, what room bytes of entries take. */
static uint64_t bytes_for(const struct pms_backing *b, uint64_t room)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < b->count && room; i++) {
        uint64_t fits = pms_log_room_of(b->part[i].bytes);
        bytes += room <= fits ? least(pms_page_up(room) + 2 * PMS_PAGE, b->part[i].bytes)
                              : b->part[i].bytes;
        room -= least(room, fits);
    }
    return bytes;
}

void pms_backing_trust(struct pms_backing *b, uint64_t room)
{
    uint64_t left = bytes_for(b, room);
    for (uint32_t i = 0; i < b->count && left; i++) {
        uint64_t here = least(left, b->part[i].bytes);
        if (b->part[i].backed < here)
            b->part[i].backed = here;
        left -= here;
    }
    count(b);
}

/* The end of a step that reaches `to` at least. */
static uint64_t step_end(const struct pms_backed *p, uint64_t to)
{
    uint64_t step = p->bytes >= STEP_SHARE * PMS_HUGE ? PMS_HUGE : STEP_SMALL;
    return least((p->off + to + step - 1) / step * step - p->off, p->bytes);
}

static int reserve(const struct pms_backing *b, const struct pms_backed *p, uint64_t end)
{
    uint64_t off = p->off + p->backed, bytes = end - p->backed;
    /* what the store grows by is not mapped yet */
    return b->map && bytes >= MADE_AT_ONCE && off + bytes <= b->map->bytes
               ? pms_persist_make(b->persist, b->fd, b->map->engine, off, bytes)
               : pms_persist_reserve(b->persist, b->fd, off, bytes);
}

static int back(struct pms_backing *b, struct pms_backed *p, uint64_t to)
{
    uint64_t end = step_end(p, to);
    int err = reserve(b, p, end);
    if ((err == ENOSPC || err == EDQUOT) && end > to) { /* no more than is needed, then */
        end = to;
        err = reserve(b, p, end);
    }
    if (PMS_CANNOT_RESERVE(err)) {
        /* where the file system has no way to do it, format and open leave no holes */
        end = p->bytes;
        err = 0;
    }
    if (!err && b->sync)
        /* the allocation, before anything relies on what is stored there */
        err = b->failed = pms_persist_sync(b->persist, b->fd, "syncing", NULL) ? EIO : 0;
    if (!err)
        p->backed = end;
    return err;
}

int pms_backing_reach_bytes(struct pms_backing *b, uint64_t bytes)
{
    int err = b->failed;
    for (uint32_t i = 0; b->persist && i < b->count && bytes && !err; i++) {
        uint64_t here = least(bytes, b->part[i].bytes);
        if (b->part[i].backed < here)
            err = back(b, &b->part[i], here);
        bytes -= here;
    }
    count(b);
    return err;
}

int pms_backing_reach_slowly(struct pms_backing *b, uint64_t room)
{
    return pms_backing_reach_bytes(b, bytes_for(b, room));
}
