#include "log/bare.h"

#include "log/entries.h"
#include "log/marks.h"

#define BARE_LEAST (64u << 10) /* less is copied: cheaper than a system call to give it back */
#define SCAN_BYTES (16u << 10)
#define FILL_BYTES (1u << 20) /* read while others wait for the log lock */

static bool may_be_bare(const struct pms_undo *u)
{
    return u->log.in_memory && !u->log.halves && !u->snapshots.open;
}

uint64_t pms_bare_part(const struct pms_undo *u, uint64_t off, uint64_t len, bool *bare)
{
    uint64_t at = off, run;
    *bare = false;
    for (; at < off + len && may_be_bare(u); at += run) {
        if (!pms_map_foreign(u->map, at, off + len - at, &run) || run < BARE_LEAST)
            continue;
        *bare = at == off;
        return *bare ? run : at - off;
    }
    return len;
}

void pms_bare_capture(struct pms_undo *u, uint64_t off, uint64_t len)
{
    pms_undo_set_changed(u, off, len);
    u->log.captured_bytes += len;
    pms_dirty_note(&u->dirty, PMS_DIRTY_BARE, off, len);
}

void pms_bare_give_back(struct pms_undo *u)
{
    for (const struct pms_dirty *d = pms_dirty_first(&u->dirty); d < pms_dirty_end(&u->dirty); d++)
        if (d->kind == PMS_DIRTY_BARE)
            pms_map_disown(u->map, d->off, d->len);
}

int pms_bare_fill(struct pms_undo *u, bool *more)
{
    int err = 0;
    uint64_t room = FILL_BYTES;
    *more = false;
    for (struct pms_dirty *d = pms_dirty_first(&u->dirty);
         !err && !*more && d < pms_dirty_end(&u->dirty); d++) {
        uint64_t left = d->len - d->filled, filled = 0;
        if (d->kind != PMS_DIRTY_BARE)
            continue;
        *more = left > room;
        err = pms_undo_append_home(u, d->off + d->filled, *more ? room : left, &filled);
        room -= filled;
        d->filled += filled;
        if (d->filled == d->len) {
            d->kind = PMS_DIRTY_USER;
            d->filled = 0;
        }
    }
    return err;
}

int pms_bare_scan(const struct pms_undo *u, uint64_t from, uint64_t to,
                  int (*fn)(void *ctx, uint64_t target, uint64_t len, const unsigned char *image),
                  void *ctx)
{
    unsigned char image[SCAN_BYTES];
    for (const struct pms_dirty *d = pms_dirty_first(&u->dirty); d < pms_dirty_end(&u->dirty);
         d++) {
        uint64_t bare = d->off + d->filled, at = bare > from ? bare : from,
                 end = d->off + d->len < to ? d->off + d->len : to;
        for (uint64_t n; d->kind == PMS_DIRTY_BARE && at < end; at += n) {
            n = end - at < sizeof image ? end - at : sizeof image;
            int err = pms_map_read_home(u->map, at, n, image);
            int stop = err ? -err : fn(ctx, at, n, image);
            if (stop)
                return stop;
        }
    }
    return 0;
}
