#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/pages.h"
#include "log/bare.h"
#include "log/entries.h"
#include "log/marks.h"
#include "log/snapshot_state.h"

#define STRETCH_FREED 1024u /* pages given back at once: 4 MiB */
/* memory for kept pages is this much of it larger than asked for: the next snapshot's bound may
 * be */
#define SLACK 8u

/* ---- what is shared ---- */

static void shared_free(struct pms_snapshots *all)
{
    if (!all)
        return;
    pms_unreserve(all->page, all->capacity * PMS_PAGE);
    pms_unreserve(all->refs, (all->capacity + 1) * sizeof *all->refs);
    pms_unreserve(all->free, (all->capacity + 1) * sizeof *all->free);
    pms_unreserve(all->building, all->store_pages * sizeof *all->building);
    pms_unreserve(all->batch, all->capacity * sizeof *all->batch);
    pms_unreserve(all->page_of, (all->capacity + 1) * sizeof *all->page_of);
    free(all);
}

static bool reserve(struct pms_snapshots *all, uint64_t capacity)
{
    all->capacity = capacity;
    all->page = pms_reserve(capacity * PMS_PAGE);
    all->refs = pms_reserve((capacity + 1) * sizeof *all->refs);
    all->free = pms_reserve((capacity + 1) * sizeof *all->free);
    all->building = pms_reserve(all->store_pages * sizeof *all->building);
    all->batch = pms_reserve(capacity * sizeof *all->batch);
    all->page_of = pms_reserve((capacity + 1) * sizeof *all->page_of);
    return all->page && all->refs && all->free && all->building && all->batch && all->page_of;
}

static uint64_t state_pages(const struct pms_superblock *super)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < super->segment_count; i++)
        pages += super->segment[i].data_pages;
    return pages;
}

static uint64_t room_for(uint64_t bound_bytes, uint64_t most)
{
    uint64_t room = bound_bytes / PMS_PAGE > 0 ? bound_bytes / PMS_PAGE : 1;
    room = room < most ? room : most;
    return room < PMS_SNAPSHOT_DONE ? room : PMS_SNAPSHOT_DONE - 1;
}

/* With address space for all of the state, where that is to be had: a later snapshot's bound may
 * be larger. */
static struct pms_snapshots *shared_new(const struct pms_undo *u,
                                        const struct pms_superblock *super, uint64_t bound_bytes)
{
    struct pms_snapshots *all = calloc(1, sizeof *all);
    if (!all)
        return NULL;
    uint64_t most = u->map->reserve / PMS_PAGE, all_of_it = state_pages(super);
    all->store_pages = most;
    all->room = room_for(bound_bytes, most);
    uint64_t least = all->room + all->room / SLACK;
    bool made = reserve(all, least > all_of_it ? least : all_of_it);
    if (!made && all_of_it > least) {
        shared_free(all);
        all = shared_new(u, &(struct pms_superblock){0}, bound_bytes);
    } else if (!made) {
        shared_free(all);
        all = NULL;
    }
    if (made)
        (void)madvise(all->page, all->capacity * PMS_PAGE, MADV_HUGEPAGE);
    return all;
}

/* What the next snapshot of the store uses: a commit that keeps pages in memory which was never
 * touched waits for the system to make it. Puts a smaller one to be freed into *all. REQUIRES:
 * the log lock; no snapshot is open. */
static struct pms_snapshots *shared_choose(struct pms_undo *u, struct pms_snapshots **all)
{
    struct pms_snapshots *spare = u->snapshots.spare, *made = *all;
    u->snapshots.spare = NULL;
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
    struct pms_snapshots *old = u->snapshots.spare;
    PMS_ASSERT(!all->used);
    u->snapshots.spare = all;
    return old;
}

/* ---- opening and closing ---- */

static void snapshot_free(struct pms_snapshot *s)
{
    pms_unreserve((void *)s->slot, s->pages * sizeof *s->slot);
    free(s->live);
    free(s);
}

/* Whoever stores meanwhile waits for the log lock: it is given up now and then. REQUIRES: the log
 * lock. */
static int fill_log(struct pms_undo *u)
{
    bool more;
    int err;
    while ((err = pms_bare_fill(u, &more)) == 0 && more) {
        pms_undo_fence_locked(u);
        pms_undo_unlock(u);
        nanosleep(&(struct timespec){0, 1}, NULL); /* else who waits hardly ever gets it */
        pms_undo_lock(u);
    }
    pms_undo_fence_locked(u);
    return err;
}

/* Whether the log has what a snapshot needs of the running transaction. REQUIRES: the log lock,
 * given up meanwhile. */
static int make_readable(struct pms_undo *u, struct pms_error *error)
{
    errno = fill_log(u);
    int status = errno ? pms_fail_errno(error, "reading pages as the last commit left them")
                       : PMS_OK;
    if (status == PMS_OK && !pms_snapshot_all_taken(u))
        status = pms_fail(
            error, PMS_E_STATE,
            "the running transaction has too many pieces for a snapshot: commit first");
    return status;
}

int pms_snapshot_open(struct pms_undo *u, const struct pms_superblock *super, uint64_t bound_bytes,
                      int64_t max_wait_ns, struct pms_snapshot **out, struct pms_error *error)
{
    struct pms_snapshot *s = calloc(1, sizeof *s);
    struct pms_snapshots *all = shared_new(u, super, bound_bytes);
    *out = NULL;
    if (s) {
        s->undo = u;
        s->super = *super;
        s->pages = super->file_bytes / PMS_PAGE;
        s->max_wait_ns = max_wait_ns;
        s->slot = pms_reserve(s->pages * sizeof *s->slot);
    }
    if (!s || !all || !s->slot) {
        errno = ENOMEM;
        shared_free(all);
        if (s)
            snapshot_free(s);
        return pms_fail_errno(error, "reserving memory for a snapshot");
    }
    pms_undo_lock(u);
    int status = make_readable(u, error);
    if (status != PMS_OK) {
        pms_undo_unlock(u);
        shared_free(all);
        snapshot_free(s);
        return status;
    }
    if (!u->snapshots.open || (!u->snapshots.open->first && !u->snapshots.open->writers)) {
        struct pms_snapshots *empty = u->snapshots.open; /* writers had waited in it */
        u->snapshots.open = shared_choose(u, &all);
        if (empty)
            empty = shared_spare(u, empty);
        PMS_ASSERT(!empty);
    } else {
        struct pms_snapshots *open = u->snapshots.open;
        uint64_t room = room_for(bound_bytes, open->capacity);
        open->room = open->room > room ? open->room : room;
    }
    u->snapshots.keep = pms_snapshot_keep;
    s->tag = u->tag;
    s->next = u->snapshots.open->first;
    s->listed = true;
    u->snapshots.open->first = s;
    u->snapshots.open->done = 0; /* it may need what the others have */
    pms_undo_unlock(u);
    shared_free(all);
    *out = s;
    return PMS_OK;
}

bool pms_snapshot_enter(struct pms_snapshot *s)
{
    pms_lock_acquire(&s->gate);
    bool may = !s->detached;
    s->inside += may;
    pms_lock_release(&s->gate);
    return may;
}

void pms_snapshot_leave(struct pms_snapshot *s)
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
    struct pms_snapshots *all = u->snapshots.open;
    struct pms_snapshot **at = &all->first;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    pms_snapshot_lose(all, s);
    wake_writers(all);
    if (all->first || all->writers)
        /* with writers in it, it stays, empty, for the next snapshot or until the store closes */
        return NULL;
    u->snapshots.open = NULL;
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
        struct pms_snapshots *all = u->snapshots.open;
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
    if (pms_snapshot_enter(s)) {
        let_memory_go(s);
        pms_undo_lock(s->undo);
        struct pms_snapshots *last = unlist(s->undo, s);
        pms_undo_unlock(s->undo);
        pms_snapshot_leave(s);
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
        struct pms_snapshot *s = u->snapshots.open ? u->snapshots.open->first : NULL;
        if (s) {
            pms_lock_acquire(&s->gate);
            s->detached = true;
            pms_lock_release(&s->gate);
        }
        struct pms_snapshots *rest = s ? NULL : u->snapshots.open,
                             *spare = s ? NULL : u->snapshots.spare;
        u->snapshots.open = s ? u->snapshots.open : NULL;
        u->snapshots.spare = s ? u->snapshots.spare : NULL;
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

/* ---- saying what is read ---- */

void pms_snapshot_release(struct pms_snapshot *s, uint64_t off, uint64_t bytes)
{
    if (!bytes || !pms_snapshot_enter(s))
        return;
    struct pms_snapshots *all = s->undo->snapshots.open;
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
    pms_snapshot_leave(s);
}

int pms_snapshot_only(struct pms_snapshot *s, uint64_t chunk_bytes, const uint8_t *live,
                      uint64_t chunks, struct pms_error *error)
{
    PMS_ASSERT(chunk_bytes >= PMS_PAGE && chunk_bytes % PMS_PAGE == 0 && !s->live);
    uint8_t *copy = malloc(chunks ? chunks : 1);
    if (!copy)
        return pms_fail_errno(error, "allocating memory");
    memcpy(copy, live, chunks);
    if (!pms_snapshot_enter(s)) {
        free(copy);
        return pms_fail(error, PMS_E_CLOSED, "the store was closed under the snapshot");
    }
    pms_undo_lock(s->undo);
    s->live_pages = chunk_bytes / PMS_PAGE;
    s->live_count = chunks;
    s->live = copy;
    wake_writers(s->undo->snapshots.open);
    pms_undo_unlock(s->undo);
    pms_snapshot_leave(s);
    return PMS_OK;
}

/* ---- asking ---- */

void pms_snapshot_changed(const struct pms_snapshot *s, uint64_t since, uint64_t chunk_bytes,
                          uint8_t *changed, uint64_t chunks)
{
    uint64_t pages = chunk_bytes / PMS_PAGE;
    if (!pms_snapshot_enter((struct pms_snapshot *)(uintptr_t)s)) {
        memset(changed, 1, chunks);
        return;
    }
    for (uint64_t i = 0; i < chunks; i++) {
        uint64_t end = (i + 1) * pages < s->pages ? (i + 1) * pages : s->pages;
        changed[i] = 0;
        for (uint64_t p = i * pages; p < end && !changed[i]; p++)
            changed[i] = pms_undo_page_changed(s->undo, p) >= since;
    }
    pms_snapshot_leave((struct pms_snapshot *)(uintptr_t)s);
}

uint64_t pms_snapshot_tag(const struct pms_snapshot *s) { return s->tag; }
const struct pms_superblock *pms_snapshot_super(const struct pms_snapshot *s) { return &s->super; }

void pms_snapshot_get_stats(struct pms_snapshot *s, struct pms_snapshot_stats *stats)
{
    memset(stats, 0, sizeof *stats);
    if (!pms_snapshot_enter(s))
        return;
    pms_undo_lock(s->undo);
    const struct pms_snapshots *all = s->undo->snapshots.open;
    *stats = (struct pms_snapshot_stats){.kept_bytes = all->used * PMS_PAGE,
                                         .peak_bytes = all->peak * PMS_PAGE,
                                         .bound_bytes = all->room * PMS_PAGE,
                                         .waits = s->waits,
                                         .wait_ns = s->wait_ns};
    pms_undo_unlock(s->undo);
    pms_snapshot_leave(s);
}
