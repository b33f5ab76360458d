#include "log/entries.h"

#include <pthread.h>
#include <string.h>

#include "base/checksum.h"
#include "base/pages.h"
#include "base/quiet.h"
#include "log/marks.h"
#include "seam/footer.h"
#include "seam/spill.h"

/* a pre-image of at most this size shares its header's line */
#define ENTRY_INLINE 32u
#define ENTRY_MAX (2u << 20)   /* bytes of pre-image in one entry */
#define PARALLEL_PIECES 512u   /* entries of one parallel batch */
#define SPILL_STEP (16u << 20) /* of the log in memory, at once */

static uint64_t image_offset(uint64_t len)
{
    return len <= ENTRY_INLINE ? sizeof(struct pms_entry) : PMS_LINE;
}

uint64_t pms_undo_entry_bytes(uint64_t len)
{
    return len <= ENTRY_INLINE ? PMS_LINE : PMS_LINE + ((len + PMS_LINE - 1) & ~(PMS_LINE - 1ull));
}

/* ---- appending ---- */

struct piece { /* one entry whose place in the log is settled */
    uint64_t tag, pos, target;
    uint32_t len, seq;
};

/* Where the extent at hand lies in the spill; of halves, that of the running transaction. */
static struct pms_log_extent *lies_there(struct pms_undo *u)
{
    return &u->log.spilled[u->log.at_extent][u->log.halves ? u->tag & 1 : 0];
}

/* What lies behind `at` of the log in memory goes to the spill, for a step: nothing is there yet.
 */
static void spill_ahead(struct pms_undo *u, uint64_t at, uint64_t bytes)
{
    struct pms_log *l = &u->log;
    struct pms_log_extent *lies = lies_there(u), *x = &l->extent[l->at_extent];
    bool joins = lies->bytes && at >= lies->off && at <= lies->off + lies->bytes;
    uint64_t from = joins ? lies->off + lies->bytes : pms_page_up(at), most = x->off + x->bytes,
             to = pms_page_up(at + bytes) > from + SPILL_STEP ? pms_page_up(at + bytes)
                                                              : from + SPILL_STEP;
    to = to < most ? to : most;
    if (from >= to || !pms_spill_memory(u->map, l->base, from, to - from))
        return;
    if (!lies->bytes)
        *lies = (struct pms_log_extent){from, 0};
    uint64_t end = lies->off + lies->bytes > to ? lies->off + lies->bytes : to;
    lies->off = from < lies->off ? from : lies->off;
    lies->bytes = end - lies->off;
}

/* A place of the log in memory is about to be stored to: either it lies in the spill, or it takes
 * memory, which is counted. (Of halves the other one has taken as much.) */
static void take_memory(struct pms_undo *u, uint64_t at, uint64_t bytes)
{
    struct pms_log *l = &u->log;
    uint32_t i = l->at_extent;
    const struct pms_log_extent *lies = lies_there(u);
    if (at >= lies->off && at + bytes <= lies->off + lies->bytes)
        return;
    if (i && pms_map_is_short(u->map, l->memory_bytes, bytes))
        spill_ahead(u, at, bytes);
    uint64_t to = at + bytes - l->extent[i].off;
    if (to > l->used[i] && !(at >= lies->off && at < lies->off + lies->bytes))
        l->memory_bytes += (to - l->used[i]) << l->halves;
    l->used[i] = to > l->used[i] ? to : l->used[i];
}

/* Takes the next place in the log for as much of [off, off+len) as one entry holds there.
 * I5: the caller's ranges fit, because room was checked when their blocks were allocated. */
static struct piece take_place(struct pms_undo *u, uint64_t off, uint64_t len)
{
    struct pms_log *l = &u->log;
    uint64_t n = len < ENTRY_MAX ? len : ENTRY_MAX;
    for (;;) {
        PMS_ASSERT(l->at_extent < l->extent_count);
        uint64_t room = l->extent[l->at_extent].bytes - l->at;
        if (pms_undo_entry_bytes(n) <= room)
            break;
        if (n > PMS_PAGE && room >= PMS_LINE + PMS_PAGE) {
            n = (room - PMS_LINE) & ~(uint64_t)(PMS_PAGE - 1);
            break;
        }
        l->at_extent++;
        l->at = 0;
    }
    struct piece p = {u->tag, l->extent[l->at_extent].off + l->at, off, (uint32_t)n, l->seq++};
    if (l->in_memory)
        take_memory(u, p.pos, pms_undo_entry_bytes(n));
    l->at += pms_undo_entry_bytes(n);
    if (p.seq < l->taken_room) {
        struct pms_taken *t = &l->taken[p.seq];
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
    unsigned char *dst = u->log.base + e->pos;
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
    pthread_t caller; /* may be in the fault handler, on a small stack: has the log's steady */
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
        write_piece_by(b, i, b->u->log.steady);
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
        pms_persist_add(u->log.persist, &batch.counters[i]);
    batch.count = 0;
}

void pms_undo_gather(struct pms_undo *u)
{
    PMS_ASSERT(!u->log.gathering);
    pms_lock_acquire(&parallel_lock);
    u->log.gathering = true;
    batch.u = u;
    batch.count = 0;
}

void pms_undo_gathered(struct pms_undo *u)
{
    PMS_ASSERT(u->log.gathering);
    copy_batch(u);
    u->log.gathering = false;
    pms_lock_release(&parallel_lock);
}

static void gather_entry(struct pms_undo *u, const struct piece *p)
{
    if (batch.count == PARALLEL_PIECES)
        copy_batch(u);
    batch.counters[batch.count] = (struct pms_persist){.flush = u->log.persist->flush};
    batch.piece[batch.count++] = *p;
}

void pms_undo_append(struct pms_undo *u, uint64_t off, uint64_t len)
{
    bool alone = !u->log.gathering && len >= PMS_UNDO_PARALLEL;
    pms_undo_set_changed(u, off, len);
    u->log.captured_bytes += len;
    u->log.unfenced = true;
    if (alone)
        pms_undo_gather(u);
    while (len) {
        struct piece p = take_place(u, off, len);
        if (u->log.gathering)
            gather_entry(u, &p);
        else
            write_entry(u, u->log.persist, &p, u->map->user + off, u->log.steady);
        off += p.len;
        len -= p.len;
    }
    if (alone)
        pms_undo_gathered(u);
}

int pms_undo_append_home(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t *done)
{
    struct pms_log *l = &u->log;
    l->unfenced = true;
    for (*done = 0; *done < len;) {
        uint64_t at = l->at;
        uint32_t at_extent = l->at_extent;
        struct piece p = take_place(u, off + *done, len - *done);
        unsigned char *image = l->base + p.pos + image_offset(p.len);
        int err = pms_map_read_home(u->map, p.target, p.len, image);
        if (err) { /* nobody took the place: it has no header */
            l->at = at;
            l->at_extent = at_extent;
            l->seq--;
            return err;
        }
        write_entry(u, l->persist, &p, image, l->steady); /* what is there already, with its sum */
        *done += p.len;
    }
    return 0;
}

uint64_t pms_undo_copy_ahead(struct pms_undo *u, struct pms_ahead *next, uint64_t off, uint64_t len)
{
    PMS_ASSERT(len <= PMS_HOT_RANGE_MAX &&
               next->at + pms_undo_entry_bytes(len) <= PMS_FASTLOG_BYTES);
    struct piece p = {u->tag + 1, PMS_OFF_FASTLOG((u->tag + 1) & 1) + next->at, off, (uint32_t)len,
                      next->seq++};
    next->at += pms_undo_entry_bytes(len);
    write_entry(u, u->log.persist, &p, u->map->user + off, u->log.steady);
    return p.pos + image_offset(p.len);
}

void pms_undo_take_ahead(struct pms_undo *u, uint64_t off, uint64_t len)
{
    struct piece p = take_place(u, off, len);
    /* where it was written: both count from the log's beginning */
    PMS_ASSERT(p.len == len && u->log.at_extent == 0);
    pms_undo_set_changed(u, off, len);
    u->log.captured_bytes += len;
}

void pms_undo_drop_ahead(struct pms_undo *u, uint64_t image, uint64_t len)
{
    /* nothing to make durable; in the other domains a commit does not fail once it copied */
    PMS_ASSERT(u->log.in_memory);
    pms_persist_zero(u->log.persist, u->log.base + image - image_offset(len),
                     sizeof(struct pms_entry));
}

void pms_undo_fenced(struct pms_undo *u)
{
    u->log.unfenced = false;
    if (!u->log.in_memory)
        pms_footer_note(u->map, u->tag, u->log.seq);
}

void pms_undo_fence_locked(struct pms_undo *u)
{
    PMS_ASSERT(!u->log.gathering);
    if (!u->log.unfenced)
        return;
    /* F1: entries appended so far, before any store to their targets (I2) */
    pms_persist_fence(u->log.persist);
    pms_undo_fenced(u);
}

/* ---- reading the log back ---- */

static bool entry_valid(const struct pms_undo *u, const struct pms_log_extent *x, uint64_t at,
                        uint64_t tag, uint32_t seq, struct pms_entry *out)
{
    if (at + PMS_LINE > x->bytes)
        return false;
    const unsigned char *p = u->log.base + x->off + at;
    memcpy(out, p, sizeof *out);
    if (out->tag != tag || out->seq != seq || out->len == 0 || out->len > ENTRY_MAX ||
        out->reserved != 0)
        return false;
    if (at + pms_undo_entry_bytes(out->len) > x->bytes)
        return false;
    uint32_t crc = pms_crc32c(u->persist->log_seed, out, 28);
    return pms_crc32c(crc, p + image_offset(out->len), out->len) == out->crc;
}

int pms_undo_scan(const struct pms_undo *u, uint64_t tag,
                  int (*fn)(void *ctx, const struct pms_entry *entry, const void *image), void *ctx)
{
    uint32_t seq = 0;
    for (uint32_t i = 0; i < u->log.extent_count; i++) {
        struct pms_log_extent x = u->log.extent[i];
        if (i == 0)
            x.off = PMS_OFF_FASTLOG(tag & 1);
        else if (u->log.halves)
            x.off = pms_undo_half(&x, u->tag, tag);
        uint64_t at = 0;
        struct pms_entry e;
        for (; entry_valid(u, &x, at, tag, seq, &e); seq++) {
            int stop = fn(ctx, &e, u->log.base + x.off + at + image_offset(e.len));
            if (stop)
                return stop;
            at += pms_undo_entry_bytes(e.len);
        }
    }
    return 0;
}
