/* What open snapshots need of pages that change: kept as they were when the running transaction
 * began. */
#include <time.h>

#include "base/quiet.h"
#include "log/entries.h"
#include "log/marks.h"
#include "log/snapshot_state.h"

#define SLICE_NS 20000000 /* a waiting writer looks at the time so often */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* ---- what is needed ---- REQUIRES: the log lock ---- */

static bool needs(const struct pms_snapshot *s, uint64_t page)
{
    if (s->lost || page >= s->pages ||
        atomic_load_explicit(&s->slot[page], memory_order_relaxed) != 0)
        return false;
    return !s->live || (page / s->live_pages < s->live_count && s->live[page / s->live_pages]);
}

static bool any_needs(const struct pms_snapshots *all, uint64_t page)
{
    for (const struct pms_snapshot *s = all->first; s; s = s->next)
        if (needs(s, page))
            return true;
    return false;
}

void pms_snapshot_unref(struct pms_snapshots *all, uint32_t number)
{
    PMS_ASSERT(number >= 1 && number <= all->made && all->refs[number] > 0);
    if (--all->refs[number])
        return;
    all->free[all->free_count++] = number;
    all->used--;
}

static uint32_t take_number(struct pms_snapshots *all) /* 0: the bound is reached */
{
    if (all->used == all->room)
        return 0;
    all->used++;
    if (all->used > all->peak)
        all->peak = all->used;
    return all->free_count ? all->free[--all->free_count] : (uint32_t)++all->made;
}

/* ---- keeping pages as they were when the running transaction began ---- REQUIRES: the log lock
 * ---- */

/* A kept page is made: all snapshots that need it refer to it. */
static void publish(struct pms_snapshots *all, uint64_t page, uint32_t number)
{
    all->refs[number] = 0;
    for (struct pms_snapshot *s = all->first; s; s = s->next) {
        if (!needs(s, page))
            continue;
        all->refs[number]++;
        atomic_store_explicit(&s->slot[page], number, memory_order_release);
    }
    PMS_ASSERT(all->refs[number] > 0);
}

/* Lays the entries from the first one on over the pages being made, newest first: the oldest
 * pre-image of a byte is the true one. */
static void finish_batch(struct pms_undo *u, uint64_t first)
{
    struct pms_snapshots *all = u->snapshots.open;
    for (uint64_t i = all->batch_count ? pms_undo_entries(u) : first; i-- > first;) {
        const struct pms_taken *t = &u->log.taken[i];
        uint64_t target = t->target, image = t->image, end = target + t->len;
        all->looks++;
        for (uint64_t at = target; at < end;) {
            uint64_t page = at / PMS_PAGE,
                     to = (page + 1) * PMS_PAGE < end ? (page + 1) * PMS_PAGE : end;
            if (all->building[page])
                pms_quiet_copy(pms_snapshot_kept(all, all->building[page]) + at % PMS_PAGE,
                               pms_undo_image(u, image + (at - target)), to - at);
            at = to;
        }
    }
    for (uint64_t i = 0; i < all->batch_count; i++) {
        uint64_t page = all->batch[i];
        publish(all, page, all->building[page]);
        all->building[page] = 0;
    }
    all->batch_count = 0;
}

/* Keeps a page whose content is at `at`; in parts: entries still have to be laid over it
 * (finish_batch). false: no room. */
static bool keep_page(struct pms_snapshots *all, uint64_t page, const unsigned char *at,
                      bool in_parts)
{
    if (all->building[page] || !any_needs(all, page))
        return true;
    uint32_t number = take_number(all);
    if (!number)
        return false;
    pms_quiet_copy(pms_snapshot_kept(all, number), at, PMS_PAGE);
    all->page_of[number] = page;
    if (in_parts) {
        all->building[page] = number;
        all->batch[all->batch_count++] = page;
    } else {
        publish(all, page, number);
    }
    return true;
}

void pms_snapshot_lose(struct pms_snapshots *all, struct pms_snapshot *s)
{
    s->lost = true;
    for (uint32_t number = 1; number <= all->made && all->used; number++) {
        uint64_t page = all->page_of[number];
        if (all->refs[number] == 0 || page >= s->pages || atomic_load(&s->slot[page]) != number)
            continue;
        atomic_store(&s->slot[page], PMS_SNAPSHOT_DONE);
        pms_snapshot_unref(all, number);
    }
}

struct wait {
    uint64_t began, now;
}; /* of one writer; 0: it has not waited yet */

/* Waits until something was released; gives up snapshots whose time is over. REQUIRES: the log
 * lock, given up meanwhile. */
static void wait_for_room(struct pms_undo *u, struct wait *w)
{
    struct pms_snapshots *all = u->snapshots.open;
    uint64_t before = now_ns(), waited = w->began ? before - w->now : 0;
    bool first = w->began == 0, expired = false;
    w->began = first ? before : w->began;
    w->now = before;
    for (struct pms_snapshot *s = all->first; s; s = s->next) {
        s->wait_ns += waited;
        s->waits += first;
        if (!s->lost && s->max_wait_ns >= 0 && before - w->began >= (uint64_t)s->max_wait_ns) {
            pms_snapshot_lose(all, s);
            expired = true;
        }
    }
    if (expired)
        return;
    uint32_t seen = atomic_load(&all->progress); /* nothing is released while the lock is held */
    all->writers++;
    pms_undo_unlock(u);
    pms_futex_wait(&all->progress, seen, SLICE_NS);
    pms_undo_lock(u);
    all->writers--;
}

/* The pages of an entry above which all are kept. One that it has whole is what the log has: an
 * older entry would have had it kept. */
static bool keep_entry(struct pms_undo *u, const struct pms_taken *t)
{
    uint64_t from = t->target, to = from + t->len;
    for (uint64_t page = from / PMS_PAGE; page * PMS_PAGE < to; page++) {
        uint64_t at = page * PMS_PAGE;
        bool whole = at >= from && at + PMS_PAGE <= to;
        const unsigned char *image = whole ? pms_undo_image(u, t->image) + (at - from)
                                           : pms_map_at(u->map, at);
        if (!keep_page(u->snapshots.open, page, image, !whole))
            return false;
    }
    return true;
}

/* Keeps what the entries of the running transaction have pre-images of, each entry once: what
 * was kept is not needed again, until another snapshot is opened. false: no room for all. */
static bool keep_entries(struct pms_undo *u)
{
    struct pms_snapshots *all = u->snapshots.open;
    uint64_t n = pms_undo_entries(u), first = all->done_tag == u->tag ? all->done : 0, i = first;
    for (; i < n && keep_entry(u, &u->log.taken[i]); i++)
        all->looks++;
    finish_batch(u, first);
    all->done_tag = u->tag;
    all->done = i;
    return i == n;
}

/* A page that this transaction has not changed yet is what the store has. Of one that it has,
 * entries may tell otherwise: those of all pages are kept then, as the commit would do it. To
 * look for this one's alone took as long, for every block that is made. */
static bool keep_span(struct pms_undo *u, uint64_t off, uint64_t bytes)
{
    for (uint64_t page = off / PMS_PAGE, last = (off + bytes - 1) / PMS_PAGE; page <= last;
         page++) {
        if (!any_needs(u->snapshots.open, page))
            continue;
        if (pms_undo_page_changed(u, page) == u->tag && !keep_entries(u))
            return false;
        if (!keep_page(u->snapshots.open, page, pms_map_at(u->map, page * PMS_PAGE), false))
            return false;
    }
    return true;
}

/* Entries that the list has no room for: a transaction of more than a hundred million of them. */
static bool too_many(struct pms_undo *u)
{
    if (pms_snapshot_all_taken(u))
        return false;
    for (struct pms_snapshot *s = u->snapshots.open->first; s; s = s->next)
        pms_snapshot_lose(u->snapshots.open, s);
    return true;
}

static void keep(struct pms_undo *u, uint64_t off, uint64_t bytes)
{
    struct wait wait = {0};
    while (u->snapshots.open && !too_many(u)) {
        if (bytes ? keep_span(u, off, bytes) : keep_entries(u))
            return;
        wait_for_room(u, &wait);
    }
}

void pms_snapshot_keep_transaction(struct pms_undo *u) { keep(u, 0, 0); }

void pms_snapshot_keep(struct pms_undo *u, uint64_t off, uint64_t bytes)
{
    if (bytes)
        keep(u, off, bytes);
}
