/* Reading a snapshot: copies of its pages, and the pages themselves where nobody wrote to them. */
#include <string.h>

#include "base/checksum.h"
#include "base/quiet.h"
#include "base/region.h"
#include "log/entries.h"
#include "log/marks.h"
#include "log/snapshot_state.h"

#define STRETCH 512u       /* pages of one optimistic copy: 2 MiB */
#define STRETCH_LOCKED 32u /* when writers are too fast for that: copied under the log lock */
#define TRIES 4
#define LOOK_MOST 4096u /* entries that are looked through twice */

static bool is_state(const struct pms_superblock *super, uint64_t page)
{
    return pms_region_of(super, page * PMS_PAGE).kind != PMS_REGION_NONE;
}

struct stretch { /* pages on their way out */
    struct pms_snapshot *s;
    uint64_t first, count;
    unsigned char *dst;
    uint64_t image[STRETCH]; /* of each page: where the log has it whole; 0: nowhere */
    uint8_t source[STRETCH]; /* likewise: */
};
enum { FROM_STORE, FROM_LOG, FROM_KEPT, FROM_NOTHING };

static bool copy_kept(struct stretch *x, uint64_t i)
{
    const struct pms_snapshots *all = x->s->undo->snapshots.open;
    uint32_t number = atomic_load_explicit(&x->s->slot[x->first + i], memory_order_acquire);
    if (number == 0)
        return false;
    if (number == PMS_SNAPSHOT_DONE)
        /* released, or lost: the caller is told or does not care */
        memset(x->dst + i * PMS_PAGE, 0, PMS_PAGE);
    else
        pms_quiet_copy(x->dst + i * PMS_PAGE, pms_snapshot_kept(all, number), PMS_PAGE);
    x->source[i] = FROM_KEPT;
    return true;
}

/* The part of entry e that concerns the stretch: [*at, *end) of the store, from *image on in the
 * log. false: none. */
static bool part_of(const struct stretch *x, uint64_t e, uint64_t *at, uint64_t *end,
                    uint64_t *image)
{
    const struct pms_taken *t = &x->s->undo->log.taken[e];
    uint64_t from = x->first * PMS_PAGE, to = from + x->count * PMS_PAGE;
    uint64_t target = atomic_load_explicit(&t->target, memory_order_relaxed);
    *end = target + atomic_load_explicit(&t->len, memory_order_relaxed);
    *image = atomic_load_explicit(&t->image, memory_order_relaxed);
    *at = target > from ? target : from;
    *image += *at - target;
    *end = *end < to ? *end : to;
    return target < to && *at < *end;
}

/* Which pages one of the n entries of the running transaction has whole, and none before it a
 * part of. */
static void look_in_log(struct stretch *x, uint64_t n, uint64_t log_end)
{
    uint64_t at, end, image;
    memset(x->image, 0, x->count * sizeof x->image[0]);
    for (uint64_t e = n <= LOOK_MOST ? n : 0; e-- > 0;) {
        if (!part_of(x, e, &at, &end, &image))
            continue;
        if (image + (end - at) > log_end)
            /* parts of two entries: the transaction ended meanwhile, and the caller will notice */
            return;
        for (uint64_t next; at < end; image += next - at, at = next) {
            next = (at / PMS_PAGE + 1) * PMS_PAGE < end ? (at / PMS_PAGE + 1) * PMS_PAGE : end;
            x->image[at / PMS_PAGE - x->first] = next - at == PMS_PAGE ? image : 0;
        }
    }
}

/* What the log has whole is taken from there: in the store somebody is writing to it now, on
 * another core, and it would be laid over anyway. */
static void copy_now(struct stretch *x)
{
    const struct pms_undo *u = x->s->undo;
    for (uint64_t i = 0; i < x->count; i++) {
        unsigned char *dst = x->dst + i * PMS_PAGE;
        x->source[i] = x->image[i] ? FROM_LOG : FROM_STORE;
        if (x->first + i >= x->s->pages || !is_state(&x->s->super, x->first + i)) {
            memset(dst, 0, PMS_PAGE);
            x->source[i] = FROM_NOTHING;
        } else if (!copy_kept(x, i)) {
            const unsigned char *page = pms_map_at(u->map, (x->first + i) * PMS_PAGE);
            pms_quiet_copy(dst, x->image[i] ? pms_undo_image(u, x->image[i]) : page, PMS_PAGE);
        }
    }
}

/* Pages of the store become what they were when the transaction of the first n entries began.
 * log_end: of the log's last extent. */
static void lay_over(struct stretch *x, uint64_t n, uint64_t log_end)
{
    uint64_t at, end, image;
    for (uint64_t i = 0; i < x->count; i++)
        if (x->source[i] <= FROM_LOG)
            copy_kept(x, i); /* kept since it was copied */
    for (uint64_t e = n; e-- > 0;) {
        if (!part_of(x, e, &at, &end, &image))
            continue;
        if (image + (end - at) > log_end)
            return; /* as above */
        for (uint64_t next; at < end; image += next - at, at = next) {
            next = (at / PMS_PAGE + 1) * PMS_PAGE < end ? (at / PMS_PAGE + 1) * PMS_PAGE : end;
            if (x->source[at / PMS_PAGE - x->first] == FROM_STORE)
                pms_quiet_copy(x->dst + (at - x->first * PMS_PAGE),
                               pms_undo_image(x->s->undo, image), next - at);
        }
    }
}

/* REQUIRES: the log lock. */
static uint64_t log_end(const struct pms_undo *u)
{
    const struct pms_log_extent *last = &u->log.extent[u->log.extent_count - 1];
    return last->off + last->bytes;
}

/* Entries are immutable while their transaction runs: laid over without the lock, and thrown
 * away if it ended meanwhile. */
static bool try_stretch(struct stretch *x)
{
    struct pms_undo *u = x->s->undo;
    pms_undo_lock(u);
    uint64_t tag = u->tag, n = pms_undo_entries(u), end = log_end(u);
    pms_undo_unlock(u);
    if (n > u->log.taken_room)
        return false;
    look_in_log(x, n, end);
    copy_now(x);
    pms_full_fence(); /* the copies, before the count of entries is read: I3 turned round */
    pms_undo_lock(u);
    bool same = u->tag == tag;
    n = pms_undo_entries(u);
    end = log_end(u);
    pms_undo_unlock(u);
    if (!same || n > u->log.taken_room)
        return false;
    lay_over(x, n, end);
    pms_undo_lock(u);
    same = u->tag == tag;
    pms_undo_unlock(u);
    return same;
}

static void read_stretch(struct stretch *x)
{
    for (int i = 0; i < TRIES; i++)
        if (try_stretch(x))
            return;
    struct stretch part = {.s = x->s};
    for (uint64_t at = 0; at < x->count; at += STRETCH_LOCKED) {
        part.first = x->first + at;
        part.count = x->count - at < STRETCH_LOCKED ? x->count - at : STRETCH_LOCKED;
        part.dst = x->dst + at * PMS_PAGE;
        memset(part.image, 0, part.count * sizeof part.image[0]);
        pms_undo_lock(x->s->undo);
        copy_now(&part);
        if (pms_snapshot_all_taken(x->s->undo))
            lay_over(&part, pms_undo_entries(x->s->undo), log_end(x->s->undo));
        pms_undo_unlock(x->s->undo);
    }
}

static int lost(struct pms_snapshot *s, struct pms_error *error)
{
    pms_undo_lock(s->undo);
    bool gone = s->lost;
    pms_undo_unlock(s->undo);
    if (!gone)
        return PMS_OK;
    return pms_fail(
        error, PMS_E_STATE,
        "the snapshot was given up: a commit waited too long for room to keep pages for it");
}

int pms_snapshot_read(struct pms_snapshot *s, uint64_t off, uint64_t bytes, void *dst,
                      struct pms_error *error)
{
    if (off % PMS_PAGE || bytes % PMS_PAGE || off > (1ull << 50) || bytes > (1ull << 50))
        return pms_fail(error, PMS_E_INVALID, "a snapshot is read in whole pages");
    if (!pms_snapshot_enter(s))
        return pms_fail(error, PMS_E_CLOSED, "the store was closed under the snapshot");
    struct stretch x = {.s = s, .first = off / PMS_PAGE, .dst = dst};
    for (uint64_t left = bytes / PMS_PAGE; left; left -= x.count) {
        x.count = left < STRETCH ? left : STRETCH;
        read_stretch(&x);
        x.first += x.count;
        x.dst += x.count * PMS_PAGE;
    }
    /* afterwards: what was copied is whole unless it was lost before */
    int status = lost(s, error);
    pms_snapshot_leave(s);
    return status;
}

/* A transaction marks a page as changed before it makes it writable. Without such a mark only
 * idle slots are written to: those opened since were kept first (I6), unless the snapshot was
 * lost; the others are told by their tag. */
static bool is_untouched(const struct pms_snapshot *s, uint64_t page)
{
    const struct pms_undo *u = s->undo;
    return page < s->pages && is_state(&s->super, page) &&
           atomic_load_explicit(&s->slot[page], memory_order_acquire) == 0 &&
           pms_undo_page_changed(u, page) < s->tag && pms_undo_page_tag(u, page) != PMS_TAG_IDLE;
}

bool pms_snapshot_in_place(struct pms_snapshot *s, uint64_t off, uint64_t bytes,
                           const unsigned char **at, uint32_t *crc)
{
    PMS_ASSERT(off % PMS_PAGE == 0 && bytes % PMS_PAGE == 0);
    if (!pms_snapshot_enter(s))
        return false;
    uint64_t page = off / PMS_PAGE, end = page + bytes / PMS_PAGE;
    /* what the caller has read, before the marks that tell whether it may have changed */
    pms_full_fence();
    /* A store that the caller has seen was made under the lock after its mark, or faulted and
     * took it: the mark is seen from here on. */
    pms_undo_lock(s->undo);
    bool untouched = !s->lost;
    pms_undo_unlock(s->undo);
    while (untouched && page < end)
        untouched = is_untouched(s, page++);
    *at = (const unsigned char *)pms_map_at(s->undo->map, off);
    if (untouched && crc) {
        pms_quiet_begin();
        *crc = pms_crc32c(0, *at, bytes);
        pms_quiet_end();
    }
    pms_snapshot_leave(s);
    return untouched;
}
