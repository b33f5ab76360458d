#include "log/undo.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "base/checksum.h"
#include "seam/footer.h"
#include "base/quiet.h"
#include "log/snapshot.h"

/* a pre-image of at most this size shares its header's line */
#define ENTRY_INLINE 32u
#define ENTRY_MAX (2u << 20)        /* bytes of pre-image in one entry */
#define PARALLEL_PIECES 512u        /* entries of one parallel batch */
#define SMALL_RANGE (64u << 10)     /* PMS_HOT_RANGE_MAX */
#define DIRTY_SPACING PMS_LINE      /* ranges are merged, and blocks are a line at least */
#define DIRTY_ROOM_MAX (1ull << 27) /* ranges; address space only, memory as they come */
#define RESERVE_FLAGS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

static uint64_t image_offset(uint32_t len)
{
    return len <= ENTRY_INLINE ? sizeof(struct pms_entry) : PMS_LINE;
}

static uint64_t entry_bytes(uint64_t len)
{
    return len <= ENTRY_INLINE ? PMS_LINE : PMS_LINE + round_up(len, PMS_LINE);
}

static void *reserve(uint64_t bytes)
{
    void *p = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, RESERVE_FLAGS, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void unreserve(void *p, uint64_t bytes)
{
    if (p)
        munmap(p, (size_t)bytes);
}

int pms_undo_open(struct pms_undo *u, struct pms_map *map, bool volatile_log,
                  struct pms_error *error)
{
    memset(u, 0, sizeof *u);
    u->map = map;
    u->persist = map->persist;
    u->volatile_log = volatile_log;
    u->log_persist = volatile_log ? &u->volatile_persist : map->persist;
    uint64_t pages = map->reserve / PMS_PAGE;
    u->dirty_room = map->reserve / DIRTY_SPACING < DIRTY_ROOM_MAX ? map->reserve / DIRTY_SPACING
                                                                  : DIRTY_ROOM_MAX;
    u->page_tag = reserve(pages * sizeof *u->page_tag);
    u->granule = reserve(pages * sizeof *u->granule);
    u->born = reserve(pages * sizeof *u->born);
    u->dirty = reserve(u->dirty_room * sizeof *u->dirty);
    u->steady = reserve(PMS_CRC_BLOCK);
    u->taken_room = u->dirty_room;
    u->taken = reserve(u->taken_room * sizeof *u->taken);
    u->changed = reserve(pages * sizeof *u->changed);
    u->whole = reserve(pages * sizeof *u->whole);
    u->log = volatile_log ? reserve(map->reserve) : map->engine;
    if (!u->page_tag || !u->granule || !u->born || !u->dirty || !u->steady || !u->taken ||
        !u->changed || !u->whole || !u->log) {
        int status = pms_fail_errno(error, "reserving memory for the undo log");
        pms_undo_close(u);
        return status;
    }
    return PMS_OK;
}

void pms_undo_close(struct pms_undo *u)
{
    if (!u->map)
        return;
    uint64_t pages = u->map->reserve / PMS_PAGE;
    unreserve((void *)u->page_tag, pages * sizeof *u->page_tag);
    unreserve(u->granule, pages * sizeof *u->granule);
    unreserve(u->born, pages * sizeof *u->born);
    unreserve(u->dirty, u->dirty_room * sizeof *u->dirty);
    unreserve(u->steady, PMS_CRC_BLOCK);
    unreserve(u->taken, u->taken_room * sizeof *u->taken);
    unreserve((void *)u->changed, pages * sizeof *u->changed);
    unreserve(u->whole, pages * sizeof *u->whole);
    if (u->volatile_log)
        unreserve(u->log, u->map->reserve);
    memset(u, 0, sizeof *u);
}

/* A log in memory: beyond its first part, which is all that small transactions use, it lies on
 * huge pages, cheaper by far to touch first. */
static void prefer_huge(struct pms_undo *u, const struct pms_log_extent *extent)
{
    uint64_t from = round_up(extent->off + PMS_HUGE, PMS_HUGE), to = extent->off + extent->bytes;
    if (u->volatile_log && to >= from + PMS_HUGE)
        (void)madvise(u->log + from, (size_t)(to - from), MADV_HUGEPAGE);
}

void pms_undo_set_extents(struct pms_undo *u, const struct pms_superblock *super)
{
    for (uint32_t i = 0; i < super->segment_count; i++) {
        u->extent[i + 1] = (struct pms_log_extent){super->segment[i].log_off,
                                                   super->segment[i].log_bytes};
        prefer_huge(u, &u->extent[i + 1]);
    }
    u->extent_count = super->segment_count + 1;
}

uint64_t pms_undo_capacity(const struct pms_undo *u)
{
    /* the fast log is a bonus; at an extent's end at most one page and a header stay unused */
    uint64_t sum = 0;
    for (uint32_t i = 1; i < u->extent_count; i++)
        sum += u->extent[i].bytes > 2 * PMS_PAGE ? u->extent[i].bytes - 2 * PMS_PAGE : 0;
    return sum;
}

static void clear_granules(struct pms_undo *u)
{
    for (uint64_t i = 0; i < u->dirty_count; i++) {
        const struct pms_dirty *d = &u->dirty[i];
        if (d->kind != PMS_DIRTY_ENGINE && d->kind != PMS_DIRTY_BORN)
            continue;
        uint64_t first = d->off / PMS_PAGE, last = (d->off + d->len - 1) / PMS_PAGE;
        memset(u->granule[first], 0, (last - first + 1) * sizeof *u->granule);
        if (d->kind == PMS_DIRTY_BORN)
            memset(u->born[first], 0, (last - first + 1) * sizeof *u->born);
    }
}

void pms_undo_begin(struct pms_undo *u, uint64_t tag)
{
    PMS_ASSERT(tag > u->tag && tag <= PMS_TX_MASK);
    clear_granules(u);
    u->dirty_count = 0;
    u->tag = tag;
    u->seq = 0;
    u->stored = false;
    u->scattered = 0;
    u->extent[0] = (struct pms_log_extent){PMS_OFF_FASTLOG(tag & 1), PMS_FASTLOG_BYTES};
    u->at_extent = 0;
    u->at = 0;
    u->unfenced = false;
}

/* ---- appending ---- */

struct piece { /* one entry whose place in the log is settled */
    uint64_t tag, pos, target;
    uint32_t len, seq;
};

/* Takes the next place in the log for as much of [off, off+len) as one entry holds there.
 * I5: the caller's ranges fit, because room was checked when their blocks were allocated. */
static struct piece take_place(struct pms_undo *u, uint64_t off, uint64_t len)
{
    uint64_t n = len < ENTRY_MAX ? len : ENTRY_MAX;
    for (;;) {
        PMS_ASSERT(u->at_extent < u->extent_count);
        uint64_t room = u->extent[u->at_extent].bytes - u->at;
        if (entry_bytes(n) <= room)
            break;
        if (n > PMS_PAGE && room >= PMS_LINE + PMS_PAGE) {
            n = (room - PMS_LINE) & ~(uint64_t)(PMS_PAGE - 1);
            break;
        }
        u->at_extent++;
        u->at = 0;
    }
    struct piece p = {u->tag, u->extent[u->at_extent].off + u->at, off, (uint32_t)n, u->seq++};
    u->at += entry_bytes(n);
    if (p.seq < u->taken_room) {
        struct pms_taken *t = &u->taken[p.seq];
        atomic_store_explicit(&t->target, off, memory_order_relaxed);
        atomic_store_explicit(&t->image, p.pos + image_offset(p.len), memory_order_relaxed);
        atomic_store_explicit(&t->len, n, memory_order_relaxed);
    }
    return p;
}

/* Runs on any thread and in the fault handler. What is checksummed is the copy: the source is
 * read once, since what no page protection stops (a device, a read into pinned pages that is
 * still under way) may store to it meanwhile. steady: this thread's, for a block at a time. */
static void write_entry(const struct pms_undo *u, struct pms_persist *p, const struct piece *e,
                        const unsigned char *src, void *steady)
{
    unsigned char *dst = u->log + e->pos;
    struct {
        struct pms_entry head;
        unsigned char image[ENTRY_INLINE];
    } line = {{e->tag, e->target, e->seq, e->len, 0, 0}, {0}};
    uint32_t crc = pms_crc32c(u->persist->log_seed, &line.head, 28);
    if (e->len <= ENTRY_INLINE) {
        pms_quiet_copy(line.image, src, e->len);
        line.head.crc = pms_crc32c(crc, line.image, e->len);
    } else {
        line.head.crc = pms_persist_copy_crc(p, dst + PMS_LINE, src, e->len, crc, steady);
    }
    pms_persist_copy(p, dst, &line, sizeof line);
}

struct batch {
    const struct pms_undo *u;
    pthread_t caller; /* may be in the fault handler, on a small stack: has u->steady */
    size_t count;
    struct piece piece[PARALLEL_PIECES];
    struct pms_persist counters[PARALLEL_PIECES]; /* one for each piece: workers do not share */
};

static void write_piece_by(struct batch *b, size_t i, void *steady)
{
    write_entry(b->u, &b->counters[i], &b->piece[i], b->u->map->user + b->piece[i].target, steady);
    /* This core's copies before whatever the caller lets happen next: an sfence orders one
     * core's stores only. */
    pms_persist_fence(&b->counters[i]);
}

static __attribute__((noinline)) void write_piece_by_worker(struct batch *b, size_t i)
{
    unsigned char steady[PMS_CRC_BLOCK];
    write_piece_by(b, i, steady);
}

static void write_piece(void *ctx, size_t i)
{
    struct batch *b = ctx;
    if (pthread_equal(b->caller, pthread_self()))
        write_piece_by(b, i, b->u->steady);
    else
        write_piece_by_worker(b, i);
}

/* Too large for the handler's stack. Two stores may capture at once: the lock is held from
 * gather to gathered. */
static struct batch batch;
static struct pms_lock parallel_lock;

/* who held it did not come with us */
void pms_undo_after_fork_in_child(void) { atomic_store(&parallel_lock.word, 0); }

static void copy_batch(struct pms_undo *u)
{
    batch.caller = pthread_self();
    pms_parallel_for(write_piece, &batch, batch.count);
    for (size_t i = 0; i < batch.count; i++)
        pms_persist_add(u->log_persist, &batch.counters[i]);
    batch.count = 0;
}

void pms_undo_gather(struct pms_undo *u)
{
    PMS_ASSERT(!u->gathering);
    pms_lock_acquire(&parallel_lock);
    u->gathering = true;
    batch.u = u;
    batch.count = 0;
}

void pms_undo_gathered(struct pms_undo *u)
{
    PMS_ASSERT(u->gathering);
    copy_batch(u);
    u->gathering = false;
    pms_lock_release(&parallel_lock);
}

static void gather_entry(struct pms_undo *u, const struct piece *p)
{
    if (batch.count == PARALLEL_PIECES)
        copy_batch(u);
    batch.counters[batch.count] = (struct pms_persist){.flush = u->log_persist->flush};
    batch.piece[batch.count++] = *p;
}

#define FILL_MIN 64u /* words */

/* Thousands of pages are marked at once where a large block changes: as fast as the memory takes
 * it. Each word is whole at any time. */
static void fill(_Atomic uint64_t *word, uint64_t count, uint64_t value)
{
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
    if (count >= FILL_MIN) {
        /* what follows it is seen after it */
        __asm__ volatile("rep stosq" : "+D"(word), "+c"(count) : "a"(value) : "memory");
        return;
    }
#endif
    for (uint64_t i = 0; i < count; i++)
        atomic_store_explicit(&word[i], value, memory_order_release);
}

static uint64_t look(const _Atomic uint64_t *word, const struct pms_undo *u, bool tag)
{
    uint64_t value = atomic_load_explicit(word, memory_order_acquire);
    if (!(value & PMS_MARK_WHOLE))
        return value;
    const struct pms_whole *w = &u->whole[value & ~PMS_MARK_WHOLE];
    return atomic_load_explicit(tag ? &w->tag.value : &w->changed.value, memory_order_acquire);
}

uint64_t pms_undo_page_tag(const struct pms_undo *u, uint64_t page)
{
    return look(&u->page_tag[page], u, true);
}

uint64_t pms_undo_page_changed(const struct pms_undo *u, uint64_t page)
{
    return look(&u->changed[page], u, false);
}

/* The pages leave the marks of their blocks, where those have one. */
static void set_pages(struct pms_undo *u, bool tag, uint64_t off, uint64_t len, uint64_t value)
{
    _Atomic uint64_t *marks = tag ? u->page_tag : u->changed;
    uint64_t first = off / PMS_PAGE, last = (off + len - 1) / PMS_PAGE;
    for (uint64_t p = first; p <= last; p++) {
        uint64_t old = atomic_load_explicit(&marks[p], memory_order_relaxed);
        if (!(old & PMS_MARK_WHOLE))
            continue;
        uint64_t block = old & ~PMS_MARK_WHOLE;
        struct pms_mark *m = tag ? &u->whole[block].tag : &u->whole[block].changed;
        m->all = false;
        p = block + m->pages - 1; /* the range may reach into the next block */
    }
    fill(&marks[first], last - first + 1, value);
}

static void set_block(_Atomic uint64_t *marks, struct pms_mark *m, uint64_t off, uint64_t len,
                      uint64_t value)
{
    PMS_ASSERT(off % PMS_PAGE == 0 && len % PMS_PAGE == 0 && len > 0 &&
               (m->pages == 0 || m->pages == len / PMS_PAGE));
    atomic_store_explicit(&m->value, value, memory_order_release);
    if (!m->all)
        fill(&marks[off / PMS_PAGE], len / PMS_PAGE, PMS_MARK_WHOLE | off / PMS_PAGE);
    m->pages = len / PMS_PAGE;
    m->all = true;
}

uint64_t pms_undo_block_tag(const struct pms_undo *u, uint64_t off)
{
    const struct pms_mark *m = &u->whole[off / PMS_PAGE].tag;
    return m->pages ? atomic_load_explicit(&m->value, memory_order_relaxed) : 0;
}

static void part(_Atomic uint64_t *marks, struct pms_mark *m, uint64_t first)
{
    uint64_t value = atomic_load_explicit(&m->value, memory_order_relaxed);
    for (uint64_t p = first; p < first + m->pages; p++)
        if (atomic_load_explicit(&marks[p], memory_order_relaxed) & PMS_MARK_WHOLE)
            atomic_store_explicit(&marks[p], value, memory_order_release);
    m->pages = 0;
    m->all = false;
}

void pms_undo_part_block(struct pms_undo *u, uint64_t off)
{
    struct pms_whole *w = &u->whole[off / PMS_PAGE];
    pms_undo_lock(u); /* the fault handler marks pages too */
    PMS_ASSERT(pms_undo_block_tag(u, off) != PMS_TAG_IDLE);
    /* published just now: without the mark nobody knows that all of it is to be protected */
    if (pms_undo_block_tag(u, off) == u->tag)
        pms_undo_note(u, PMS_DIRTY_FRESH, off, w->tag.pages * PMS_PAGE, 0);
    part(u->page_tag, &w->tag, off / PMS_PAGE);
    part(u->changed, &w->changed, off / PMS_PAGE);
    pms_undo_unlock(u);
}

void pms_undo_set_changed(struct pms_undo *u, uint64_t off, uint64_t len)
{
    set_pages(u, false, off, len, u->tag);
}

void pms_undo_tag_block(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t tag)
{
    set_block(u->page_tag, &u->whole[off / PMS_PAGE].tag, off, len, tag);
}

void pms_undo_change_block(struct pms_undo *u, uint64_t off, uint64_t len)
{
    set_block(u->changed, &u->whole[off / PMS_PAGE].changed, off, len, u->tag);
}

void pms_undo_append(struct pms_undo *u, uint64_t off, uint64_t len)
{
    bool alone = !u->gathering && len >= PMS_UNDO_PARALLEL;
    pms_undo_set_changed(u, off, len);
    u->captured_bytes += len;
    u->unfenced = true;
    if (alone)
        pms_undo_gather(u);
    while (len) {
        struct piece p = take_place(u, off, len);
        if (u->gathering)
            gather_entry(u, &p);
        else
            write_entry(u, u->log_persist, &p, u->map->user + off, u->steady);
        off += p.len;
        len -= p.len;
    }
    if (alone)
        pms_undo_gathered(u);
}

uint64_t pms_undo_copy_ahead(struct pms_undo *u, struct pms_ahead *next, uint64_t off, uint64_t len)
{
    PMS_ASSERT(len <= SMALL_RANGE && next->at + entry_bytes(len) <= PMS_FASTLOG_BYTES);
    struct piece p = {u->tag + 1, PMS_OFF_FASTLOG((u->tag + 1) & 1) + next->at, off, (uint32_t)len,
                      next->seq++};
    next->at += entry_bytes(len);
    write_entry(u, u->log_persist, &p, u->map->user + off, u->steady);
    return p.pos + image_offset(p.len);
}

void pms_undo_take_ahead(struct pms_undo *u, uint64_t off, uint64_t len)
{
    struct piece p = take_place(u, off, len);
    /* where it was written: both count from the log's beginning */
    PMS_ASSERT(p.len == len && u->at_extent == 0);
    pms_undo_set_changed(u, off, len);
    u->captured_bytes += len;
}

void pms_undo_drop_ahead(struct pms_undo *u, uint64_t image, uint64_t len)
{
    /* nothing to make durable; in the other domains a commit does not fail once it copied */
    PMS_ASSERT(u->volatile_log);
    pms_persist_zero(u->log_persist, u->log + image - image_offset((uint32_t)len),
                     sizeof(struct pms_entry));
}

void pms_undo_fenced(struct pms_undo *u)
{
    u->unfenced = false;
    if (!u->volatile_log)
        pms_footer_note(u->map, u->tag, u->seq);
}

void pms_undo_fence_locked(struct pms_undo *u)
{
    PMS_ASSERT(!u->gathering);
    if (!u->unfenced)
        return;
    /* F1: entries appended so far, before any store to their targets (I2) */
    pms_persist_fence(u->log_persist);
    pms_undo_fenced(u);
}

/* ---- what this transaction touched ---- */

/* Neighbours become one range: a shorter list. But a small user's range stays one that can
 * become hot. */
static bool mergeable(enum pms_dirty_kind kind, uint64_t a, uint64_t b)
{
    if (kind == PMS_DIRTY_HOT)
        return false;
    return kind != PMS_DIRTY_USER || a + b <= SMALL_RANGE || (a >= SMALL_RANGE && b >= SMALL_RANGE);
}

void pms_undo_note(struct pms_undo *u, enum pms_dirty_kind kind, uint64_t off, uint64_t len,
                   uint64_t log_pos)
{
    struct pms_dirty *last = &u->dirty[u->dirty_count - (u->dirty_count > 0)];
    if (u->dirty_count && last->kind == (uint32_t)kind && mergeable(kind, last->len, len)) {
        if (last->off + last->len == off) {
            last->len += len;
            return;
        }
        if (off >= last->off && off + len <= last->off + last->len)
            return;
    }
    PMS_ASSERT(u->dirty_count < u->dirty_room);
    u->dirty[u->dirty_count++] = (struct pms_dirty){off, len, log_pos, kind, 0};
}

bool pms_undo_page_prepared(const struct pms_undo *u, uint64_t page)
{
    uint64_t tag = pms_undo_page_tag(u, page);
    return tag == u->tag || tag == PMS_TAG_IDLE;
}

void pms_undo_set_prepared(struct pms_undo *u, uint64_t off, uint64_t len)
{
    PMS_ASSERT(off % PMS_PAGE == 0 && len % PMS_PAGE == 0);
    set_pages(u, true, off, len, u->tag);
}

/* ---- the engine's stores ---- */

#define PAGE_GRANULES (PMS_PAGE / PMS_GRANULE)

static bool granule_get(uint64_t (*bits)[2], uint64_t g)
{
    return bits[g / PAGE_GRANULES][g % PAGE_GRANULES / 64] >> (g % 64) & 1;
}

static void granule_set(uint64_t (*bits)[2], uint64_t g)
{
    bits[g / PAGE_GRANULES][g % PAGE_GRANULES / 64] |= 1ull << (g % 64);
}

static bool granule_prepared(const struct pms_undo *u, uint64_t g)
{
    return granule_get(u->granule, g) || pms_undo_page_prepared(u, g / PAGE_GRANULES);
}

void pms_undo_prepare_locked(struct pms_undo *u, uint64_t off, uint64_t len)
{
    uint64_t g = off / PMS_GRANULE, end = (off + len + PMS_GRANULE - 1) / PMS_GRANULE;
    while (g < end) {
        if (granule_prepared(u, g)) {
            g++;
            continue;
        }
        uint64_t first = g;
        for (; g < end && !granule_prepared(u, g); g++)
            granule_set(u->granule, g);
        pms_undo_append(u, first * PMS_GRANULE, (g - first) * PMS_GRANULE);
        pms_undo_note(u, PMS_DIRTY_ENGINE, first * PMS_GRANULE, (g - first) * PMS_GRANULE, 0);
    }
}

/* In private views engine and user share their pages: those the engine stores to stay writable
 * once they are. */
void pms_undo_make_writable(struct pms_undo *u, uint64_t off, uint64_t len)
{
    uint64_t first = off & ~(uint64_t)(PMS_PAGE - 1), end = round_up(off + len, PMS_PAGE);
    if (!u->map->shared)
        pms_map_unprotect_surely(u->map, first, end - first);
}

static bool any_born(const struct pms_undo *u, uint64_t off, uint64_t len)
{
    for (uint64_t g = off / PMS_GRANULE; g * PMS_GRANULE < off + len; g++)
        if (granule_get(u->born, g))
            return true;
    return false;
}

static void store_locked(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    u->stored = true;
    pms_undo_make_writable(u, off, len);
    pms_persist_store(u->persist, pms_map_at(u->map, off), src, len);
    if (any_born(u, off, len)) /* what was captured is written back at commit */
        pms_persist_flush(u->persist, pms_map_at(u->map, off), len);
}

void pms_undo_write_locked(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    PMS_ASSERT(!u->unfenced); /* I2 */
    for (uint64_t g = off / PMS_GRANULE; g * PMS_GRANULE < off + len; g++)
        PMS_ASSERT(granule_prepared(u, g)); /* I3 */
    store_locked(u, off, src, len);
}

void pms_undo_store_all(struct pms_undo *u, const struct pms_store *s, uint32_t count)
{
    pms_undo_lock(u);
    for (uint32_t i = 0; i < count; i++)
        pms_undo_prepare_locked(u, s[i].off, s[i].len);
    /* F1: the entries of all ranges, before the first store to one (I2) */
    pms_undo_fence_locked(u);
    for (uint32_t i = 0; i < count; i++)
        store_locked(u, s[i].off, s[i].src, s[i].len);
    pms_undo_unlock(u);
}

void pms_undo_store(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    pms_undo_store_all(u, &(struct pms_store){off, src, len}, 1);
}

/* Marks the granules of a range that needs no pre-image. false: all of them were marked before. */
static bool mark_born(struct pms_undo *u, uint64_t off, uint64_t len)
{
    bool any = false;
    for (uint64_t g = off / PMS_GRANULE, end = (off + len + PMS_GRANULE - 1) / PMS_GRANULE;
         g < end;) {
        uint64_t *word = u->born[g / PAGE_GRANULES], *prepared = u->granule[g / PAGE_GRANULES];
        if (g % PAGE_GRANULES == 0 && end - g >= PAGE_GRANULES) { /* whole pages at once */
            any |= (word[0] & word[1]) != ~0ull;
            word[0] = word[1] = prepared[0] = prepared[1] = ~0ull;
            g += PAGE_GRANULES;
        } else {
            any |= !granule_get(u->born, g);
            granule_set(u->granule, g);
            granule_set(u->born, g++);
        }
    }
    return any;
}

void pms_undo_note_born(struct pms_undo *u, uint64_t off, uint64_t len)
{
    pms_snapshot_keep(u, off, len); /* I6 */
    pms_undo_lock(u);
    u->stored = true;
    pms_undo_set_changed(u, off, len);
    /* else it is on the list: a block that comes and goes must not make it longer for ever */
    if (mark_born(u, off, len))
        pms_undo_note(u, PMS_DIRTY_BORN, off, len, 0);
    pms_undo_make_writable(u, off, len);
    pms_undo_unlock(u);
}

void pms_undo_store_fresh(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    if (!len)
        return;
    pms_undo_note_born(u, off, len);
    /* Not under the lock: a large copy would keep faulting threads waiting, and nobody else
     * knows this block yet. */
    struct pms_persist own = {.flush = u->persist->flush};
    if (src)
        pms_persist_copy(&own, pms_map_at(u->map, off), src, len);
    else
        pms_persist_zero(&own, pms_map_at(u->map, off), len);
    pms_undo_count(u, &own);
}

void pms_undo_count(struct pms_undo *u, const struct pms_persist *own)
{
    pms_undo_lock(u); /* the fault handler counts too */
    pms_persist_add(u->persist, own);
    pms_undo_unlock(u);
}

static bool all_listed(const struct pms_undo *u, uint64_t off, uint64_t len)
{
    for (uint64_t p = off / PMS_PAGE, end = (off + len) / PMS_PAGE; p < end; p++)
        if (pms_undo_page_tag(u, p) != u->tag)
            return false;
    return true;
}

void pms_undo_mark_fresh(struct pms_undo *u, uint64_t off, uint64_t len)
{
    pms_snapshot_keep(u, off, len); /* I6 */
    pms_undo_lock(u);
    u->stored = true;
    pms_undo_set_changed(u, off, len);
    if (!all_listed(u, off, len)) { /* else the list has these pages already */
        pms_undo_set_prepared(u, off, len);
        pms_undo_note(u, PMS_DIRTY_FRESH, off, len, 0);
    }
    pms_undo_unlock(u);
}

/* ---- reading the log back ---- */

static bool entry_valid(const struct pms_undo *u, const struct pms_log_extent *x, uint64_t at,
                        uint64_t tag, uint32_t seq, struct pms_entry *out)
{
    if (at + PMS_LINE > x->bytes)
        return false;
    const unsigned char *p = u->log + x->off + at;
    memcpy(out, p, sizeof *out);
    if (out->tag != tag || out->seq != seq || out->len == 0 || out->len > ENTRY_MAX ||
        out->reserved != 0)
        return false;
    if (at + entry_bytes(out->len) > x->bytes)
        return false;
    uint32_t crc = pms_crc32c(u->persist->log_seed, out, 28);
    return pms_crc32c(crc, p + image_offset(out->len), out->len) == out->crc;
}

int pms_undo_scan(const struct pms_undo *u, uint64_t tag,
                  int (*fn)(void *ctx, const struct pms_entry *entry, const void *image), void *ctx)
{
    uint32_t seq = 0;
    for (uint32_t i = 0; i < u->extent_count; i++) {
        struct pms_log_extent x = u->extent[i];
        if (i == 0)
            x.off = PMS_OFF_FASTLOG(tag & 1);
        uint64_t at = 0;
        struct pms_entry e;
        for (; entry_valid(u, &x, at, tag, seq, &e); seq++) {
            int stop = fn(ctx, &e, u->log + x.off + at + image_offset(e.len));
            if (stop)
                return stop;
            at += entry_bytes(e.len);
        }
    }
    return 0;
}

/* Pre-images belong on the root page, in page tables or in data pages, and nowhere else. */
static bool target_allowed(const struct pms_superblock *super, uint64_t off, uint64_t len)
{
    if (len > super->file_bytes || off > super->file_bytes - len)
        return false;
    if (off >= PMS_OFF_ROOT && off + len <= PMS_OFF_ROOT + PMS_PAGE)
        return true;
    for (uint32_t i = 0; i < super->segment_count; i++) {
        const struct pms_segment *s = &super->segment[i];
        /* the last granule may hold one entry alone */
        uint64_t table_bytes = s->data_pages * sizeof(struct pms_pte);
        if (off >= s->table_off &&
            off + len <= s->table_off + (table_bytes + PMS_GRANULE - 1) / PMS_GRANULE * PMS_GRANULE)
            return true;
        if (off >= s->data_off && off + len <= s->data_off + s->data_pages * PMS_PAGE)
            return true;
    }
    return false;
}

struct apply {
    const struct pms_undo *u;
    const struct pms_superblock *super;
    uint64_t seen, from; /* entries walked over; the first one that is wanted */
    uint64_t count, bytes, room;
    bool fixed;              /* room is all there is */
    uint64_t *pos;           /* of each entry's image, from u->log */
    struct pms_entry *entry; /* anonymous memory, grown by doubling, unless fixed */
};
enum { APPLY_BAD_TARGET = -1, APPLY_NO_MEMORY = -2, APPLY_ENOUGH = -3 };

static int more_room(struct apply *a)
{
    uint64_t room = a->room ? a->room * 2 : 4096;
    struct pms_entry *e = reserve(room * (sizeof *e + sizeof *a->pos));
    if (!e)
        return APPLY_NO_MEMORY;
    uint64_t *pos = (uint64_t *)(e + room);
    if (a->room) {
        memcpy(e, a->entry, a->count * sizeof *e);
        memcpy(pos, a->pos, a->count * sizeof *pos);
        unreserve(a->entry, a->room * (sizeof *e + sizeof *pos));
    }
    a->entry = e;
    a->pos = pos;
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
    a->entry[a->count] = *entry;
    a->pos[a->count++] = (uint64_t)((const unsigned char *)image - a->u->log);
    a->bytes += entry->len;
    return 0;
}

static int count_only(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct apply *a = ctx;
    (void)image;
    a->seen++;
    return target_allowed(a->super, entry->target, entry->len) ? 0 : APPLY_BAD_TARGET;
}

static void put_back(struct pms_undo *u, const struct apply *a, unsigned char *dst_base)
{
    /* newest first: the oldest pre-image of a byte is the true one */
    for (uint64_t i = a->count; i-- > 0;) {
        pms_undo_make_writable(u, a->entry[i].target, a->entry[i].len);
        pms_persist_copy(u->persist, dst_base + a->entry[i].target, u->log + a->pos[i],
                         a->entry[i].len);
    }
}

/* A roll back may not fail for want of memory: walks the log again for each handful of entries. */
static int64_t apply_by_handfuls(struct pms_undo *u, uint64_t tag, unsigned char *dst_base,
                                 const struct pms_superblock *super, uint64_t *bytes)
{
    struct pms_entry entry[256];
    uint64_t pos[256];
    struct apply all = {.u = u, .super = super};
    *bytes = 0;
    if (pms_undo_scan(u, tag, count_only, &all))
        return -1;
    for (uint64_t end = all.seen; end > 0;) {
        struct apply a = {
            .u = u, .super = super, .room = 256, .fixed = true, .entry = entry, .pos = pos};
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
    struct apply a = {.u = u, .super = super};
    uint64_t put = 0;
    int bad = pms_undo_scan(u, tag, collect, &a);
    if (!bad)
        put_back(u, &a, dst_base);
    int64_t count = bad ? -1 : (int64_t)a.count;
    if (a.room)
        unreserve(a.entry, a.room * (sizeof *a.entry + sizeof *a.pos));
    if (bad == APPLY_NO_MEMORY)
        count = apply_by_handfuls(u, tag, dst_base, super, &put);
    if (bytes)
        *bytes = bad == APPLY_NO_MEMORY ? put : a.bytes;
    return count;
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
