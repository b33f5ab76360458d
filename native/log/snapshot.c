#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checksum.h"
#include "base/quiet.h"
#include "log/snapshot_state.h"

#define RESERVE_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
#define STRETCH 512u       /* pages of one optimistic copy: 2 MiB */
#define STRETCH_LOCKED 32u /* when writers are too fast for that: copied under the log lock */
#define TRIES 4
#define LOOK_MOST 4096u     /* entries that are looked through twice */
#define STRETCH_FREED 1024u /* pages given back at once: 4 MiB */
/* memory for kept pages is this much of it larger than asked for: the next snapshot's bound may
 * be */
#define SLACK 8u

static void *reserve(uint64_t bytes)
{
    void *p = mmap(NULL, bytes ? (size_t)bytes : 1, PROT_READ | PROT_WRITE, RESERVE_FLAGS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void unreserve(void *p, uint64_t bytes)
{
    if (p)
        munmap(p, bytes ? (size_t)bytes : 1);
}

/* ---- what is shared ---- */

static void shared_free(struct pms_snapshots *all)
{
    if (!all)
        return;
    unreserve(all->page, all->capacity * PMS_PAGE);
    unreserve(all->refs, (all->capacity + 1) * sizeof *all->refs);
    unreserve(all->free, (all->capacity + 1) * sizeof *all->free);
    unreserve(all->building, all->store_pages * sizeof *all->building);
    unreserve(all->batch, all->capacity * sizeof *all->batch);
    unreserve(all->page_of, (all->capacity + 1) * sizeof *all->page_of);
    free(all);
}

static struct pms_snapshots *shared_new(const struct pms_undo *u, uint64_t bound_bytes)
{
    struct pms_snapshots *all = calloc(1, sizeof *all);
    if (!all)
        return NULL;
    uint64_t most = u->map->reserve / PMS_PAGE;
    all->store_pages = most;
    all->room = bound_bytes / PMS_PAGE > 0 ? bound_bytes / PMS_PAGE : 1;
    if (all->room > most)
        all->room = most;
    if (all->room >= PMS_SNAPSHOT_DONE)
        all->room = PMS_SNAPSHOT_DONE - 1;
    all->capacity = all->room + all->room / SLACK;
    all->page = reserve(all->capacity * PMS_PAGE);
    all->refs = reserve((all->capacity + 1) * sizeof *all->refs);
    all->free = reserve((all->capacity + 1) * sizeof *all->free);
    all->building = reserve(most * sizeof *all->building);
    all->batch = reserve(all->capacity * sizeof *all->batch);
    all->page_of = reserve((all->capacity + 1) * sizeof *all->page_of);
    if (all->page && all->refs && all->free && all->building && all->batch && all->page_of) {
        (void)madvise(all->page, all->capacity * PMS_PAGE, MADV_HUGEPAGE);
        return all;
    }
    shared_free(all);
    return NULL;
}

/* What the next snapshot of the store uses: a commit that keeps pages in memory which was never
 * touched waits for the system to make it. Puts a smaller one to be freed into *all. REQUIRES:
 * the log lock; no snapshot is open. */
static struct pms_snapshots *shared_choose(struct pms_undo *u, struct pms_snapshots **all)
{
    struct pms_snapshots *spare = u->spare_snapshots, *made = *all;
    u->spare_snapshots = NULL;
    *all = spare;
    if (!spare || spare->capacity < made->room || spare->store_pages != made->store_pages)
        return made;
    PMS_ASSERT(!spare->first && !spare->used && !spare->batch_count);
    *all = made;
    spare->room = made->room;
    /* pages that were used before are used first */
    spare->peak = spare->free_count = spare->made = 0;
    return spare;
}

/* Nobody needs it now. Returns what is to be freed. REQUIRES: the log lock. */
static struct pms_snapshots *shared_spare(struct pms_undo *u, struct pms_snapshots *all)
{
    struct pms_snapshots *old = u->spare_snapshots;
    PMS_ASSERT(!all->used);
    u->spare_snapshots = all;
    return old;
}

/* ---- opening and closing ---- */

static void snapshot_free(struct pms_snapshot *s)
{
    unreserve((void *)s->slot, s->pages * sizeof *s->slot);
    free(s->live);
    free(s);
}

int pms_snapshot_open(struct pms_undo *u, const struct pms_superblock *super, uint64_t bound_bytes,
                      int64_t max_wait_ns, struct pms_snapshot **out, struct pms_error *error)
{
    struct pms_snapshot *s = calloc(1, sizeof *s);
    struct pms_snapshots *all = shared_new(u, bound_bytes);
    *out = NULL;
    if (s) {
        s->undo = u;
        s->super = *super;
        s->pages = super->file_bytes / PMS_PAGE;
        s->max_wait_ns = max_wait_ns;
        s->slot = reserve(s->pages * sizeof *s->slot);
    }
    if (!s || !all || !s->slot) {
        errno = ENOMEM;
        shared_free(all);
        if (s)
            snapshot_free(s);
        return pms_fail_errno(error, "reserving memory for a snapshot");
    }
    pms_undo_lock(u);
    if (u->seq > u->taken_room) {
        pms_undo_unlock(u);
        shared_free(all);
        snapshot_free(s);
        return pms_fail(error, PMS_E_STATE,
                        "the running transaction has too many pieces for a snapshot: commit first");
    }
    if (!u->snapshots || (!u->snapshots->first && !u->snapshots->writers)) {
        struct pms_snapshots *empty = u->snapshots; /* writers had waited in it */
        u->snapshots = shared_choose(u, &all);
        if (empty)
            empty = shared_spare(u, empty);
        PMS_ASSERT(!empty);
    }
    s->tag = u->tag;
    s->next = u->snapshots->first;
    s->listed = true;
    u->snapshots->first = s;
    u->snapshots->done = 0; /* it may need what the others have */
    pms_undo_unlock(u);
    shared_free(all);
    *out = s;
    return PMS_OK;
}

static bool enter(struct pms_snapshot *s)
{
    pms_lock_acquire(&s->gate);
    bool may = !s->detached;
    s->inside += may;
    pms_lock_release(&s->gate);
    return may;
}

static void leave(struct pms_snapshot *s)
{
    pms_lock_acquire(&s->gate);
    s->inside--;
    pms_lock_release(&s->gate);
    atomic_fetch_add(&s->left, 1);
    pms_futex_wake(&s->left, 64);
}

static void wake_writers(struct pms_snapshots *all)
{
    atomic_fetch_add(&all->progress, 1);
    if (all->writers)
        pms_futex_wake(&all->progress, 64);
}

/* Off the list, if it is on it. Returns what is to be freed. REQUIRES: the log lock. */
static struct pms_snapshots *unlist(struct pms_undo *u, struct pms_snapshot *s)
{
    if (!s->listed)
        return NULL;
    s->listed = false;
    struct pms_snapshots *all = u->snapshots;
    struct pms_snapshot **at = &all->first;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    pms_snapshot_lose(all, s);
    wake_writers(all);
    if (all->first || all->writers)
        /* with writers in it, it stays, empty, for the next snapshot or until the store closes */
        return NULL;
    u->snapshots = NULL;
    return shared_spare(u, all);
}

static bool is_detached(struct pms_snapshot *s)
{
    pms_lock_acquire(&s->gate);
    bool detached = s->detached;
    pms_lock_release(&s->gate);
    return detached;
}

/* A snapshot that is about to be closed, if it is the only one: the system may take the memory
 * of kept pages back from now on, and until it does they cost nothing to use again. A stretch at
 * a time, for faults wait for the log lock (8 ms for 112 MB on small pages). */
static void let_memory_go(struct pms_snapshot *s)
{
    struct pms_undo *u = s->undo;
    uint64_t at = 0;
    for (bool more = true; more;) {
        pms_undo_lock(u);
        struct pms_snapshots *all = u->snapshots;
        if (s->listed && !s->lost) {
            pms_snapshot_lose(all, s);
            wake_writers(all);
        }
        more = s->listed && all->first == s && !s->next && !all->writers && !all->used &&
               at < all->made;
        if (more) {
            /* whole huge pages */
            uint64_t pages = STRETCH_FREED -
                             (uintptr_t)(all->page + at * PMS_PAGE) / PMS_PAGE % STRETCH_FREED;
            pages = pages < all->made - at ? pages : all->made - at;
            (void)madvise(all->page + at * PMS_PAGE, pages * PMS_PAGE, MADV_FREE);
            at += pages;
        }
        pms_undo_unlock(u);
    }
}

/* The store may be closing in another thread. What that one has not picked from the list before
 * it is off the list it never sees; what it has picked stays until it lets go. */
void pms_snapshot_close(struct pms_snapshot *s)
{
    if (enter(s)) {
        let_memory_go(s);
        pms_undo_lock(s->undo);
        struct pms_snapshots *last = unlist(s->undo, s);
        pms_undo_unlock(s->undo);
        leave(s);
        shared_free(last);
    }
    while (is_detached(s) && !atomic_load(&s->let_go))
        pms_futex_wait(&s->let_go, 0, -1);
    snapshot_free(s);
}

void pms_snapshot_detach_all(struct pms_undo *u)
{
    for (;;) {
        pms_undo_lock(u);
        struct pms_snapshot *s = u->snapshots ? u->snapshots->first : NULL;
        if (s) {
            pms_lock_acquire(&s->gate);
            s->detached = true;
            pms_lock_release(&s->gate);
        }
        struct pms_snapshots *rest = s ? NULL : u->snapshots,
                             *spare = s ? NULL : u->spare_snapshots;
        u->snapshots = s ? u->snapshots : NULL;
        u->spare_snapshots = s ? u->spare_snapshots : NULL;
        pms_undo_unlock(u);
        if (!s) {
            shared_free(rest);
            shared_free(spare);
            return;
        }
        for (;;) { /* a reader that is inside may still want the log lock */
            uint32_t seen = atomic_load(&s->left);
            pms_lock_acquire(&s->gate);
            bool busy = s->inside > 0;
            pms_lock_release(&s->gate);
            if (!busy)
                break;
            pms_futex_wait(&s->left, seen, -1);
        }
        pms_undo_lock(u);
        struct pms_snapshots *last = unlist(u, s);
        pms_undo_unlock(u);
        shared_free(last);
        /* from here on it may be gone: the kernel looks at the address alone */
        atomic_store(&s->let_go, 1);
        pms_futex_wake(&s->let_go, 1);
    }
}

/* ---- reading ---- */

static bool is_state(const struct pms_superblock *super, uint64_t page)
{
    uint64_t off = page * PMS_PAGE;
    if (off == PMS_OFF_ROOT)
        return true;
    for (uint32_t i = 0; i < super->segment_count; i++) {
        const struct pms_segment *g = &super->segment[i];
        if ((off >= g->table_off && off < g->log_off) ||
            (off >= g->data_off && off < g->data_off + g->data_pages * PMS_PAGE))
            return true;
    }
    return false;
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
    const struct pms_snapshots *all = x->s->undo->snapshots;
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
    const struct pms_taken *t = &x->s->undo->taken[e];
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
            pms_quiet_copy(dst, x->image[i] ? u->log + x->image[i] : page, PMS_PAGE);
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
                pms_quiet_copy(x->dst + (at - x->first * PMS_PAGE), x->s->undo->log + image,
                               next - at);
        }
    }
}

/* REQUIRES: the log lock. */
static uint64_t log_end(const struct pms_undo *u)
{
    const struct pms_log_extent *last = &u->extent[u->extent_count - 1];
    return last->off + last->bytes;
}

/* Entries are immutable while their transaction runs: laid over without the lock, and thrown
 * away if it ended meanwhile. */
static bool try_stretch(struct stretch *x)
{
    struct pms_undo *u = x->s->undo;
    pms_undo_lock(u);
    uint64_t tag = u->tag, n = pms_snapshot_taken(u), end = log_end(u);
    pms_undo_unlock(u);
    if (n > u->taken_room)
        return false;
    look_in_log(x, n, end);
    copy_now(x);
    pms_full_fence(); /* the copies, before the count of entries is read: I3 turned round */
    pms_undo_lock(u);
    bool same = u->tag == tag;
    n = pms_snapshot_taken(u);
    end = log_end(u);
    pms_undo_unlock(u);
    if (!same || n > u->taken_room)
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
        if (pms_snapshot_taken(x->s->undo) <= x->s->undo->taken_room)
            lay_over(&part, pms_snapshot_taken(x->s->undo), log_end(x->s->undo));
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
    if (!enter(s))
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
    leave(s);
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
    if (!enter(s))
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
    leave(s);
    return untouched;
}

void pms_snapshot_release(struct pms_snapshot *s, uint64_t off, uint64_t bytes)
{
    if (!bytes || !enter(s))
        return;
    struct pms_snapshots *all = s->undo->snapshots;
    pms_undo_lock(s->undo);
    for (uint64_t p = off / PMS_PAGE, end = (off + bytes) / PMS_PAGE; p < end && p < s->pages;
         p++) {
        uint32_t number = atomic_load_explicit(&s->slot[p], memory_order_relaxed);
        atomic_store_explicit(&s->slot[p], PMS_SNAPSHOT_DONE, memory_order_relaxed);
        if (number && number != PMS_SNAPSHOT_DONE)
            pms_snapshot_unref(all, number);
    }
    wake_writers(all);
    pms_undo_unlock(s->undo);
    leave(s);
}

int pms_snapshot_only(struct pms_snapshot *s, uint64_t chunk_bytes, const uint8_t *live,
                      uint64_t chunks, struct pms_error *error)
{
    PMS_ASSERT(chunk_bytes >= PMS_PAGE && chunk_bytes % PMS_PAGE == 0 && !s->live);
    uint8_t *copy = malloc(chunks ? chunks : 1);
    if (!copy)
        return pms_fail_errno(error, "allocating memory");
    memcpy(copy, live, chunks);
    if (!enter(s)) {
        free(copy);
        return pms_fail(error, PMS_E_CLOSED, "the store was closed under the snapshot");
    }
    pms_undo_lock(s->undo);
    s->live_pages = chunk_bytes / PMS_PAGE;
    s->live_count = chunks;
    s->live = copy;
    wake_writers(s->undo->snapshots);
    pms_undo_unlock(s->undo);
    leave(s);
    return PMS_OK;
}

/* ---- asking ---- */

void pms_snapshot_changed(const struct pms_snapshot *s, uint64_t since, uint64_t chunk_bytes,
                          uint8_t *changed, uint64_t chunks)
{
    uint64_t pages = chunk_bytes / PMS_PAGE;
    if (!enter((struct pms_snapshot *)(uintptr_t)s)) {
        memset(changed, 1, chunks);
        return;
    }
    for (uint64_t i = 0; i < chunks; i++) {
        uint64_t end = (i + 1) * pages < s->pages ? (i + 1) * pages : s->pages;
        changed[i] = 0;
        for (uint64_t p = i * pages; p < end && !changed[i]; p++)
            changed[i] = pms_undo_page_changed(s->undo, p) >= since;
    }
    leave((struct pms_snapshot *)(uintptr_t)s);
}

uint64_t pms_snapshot_tag(const struct pms_snapshot *s) { return s->tag; }
const struct pms_superblock *pms_snapshot_super(const struct pms_snapshot *s) { return &s->super; }

void pms_snapshot_get_stats(struct pms_snapshot *s, struct pms_snapshot_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    if (!enter(s))
        return;
    pms_undo_lock(s->undo);
    const struct pms_snapshots *all = s->undo->snapshots;
    *stats = (struct pms_snapshot_stats){.kept_bytes = all->used * PMS_PAGE,
                                         .peak_bytes = all->peak * PMS_PAGE,
                                         .bound_bytes = all->room * PMS_PAGE,
                                         .waits = s->waits,
                                         .wait_ns = s->wait_ns};
    pms_undo_unlock(s->undo);
    leave(s);
}
