/* Domain file: commits.
 *
 * Format: struct pms_record in layout.h. Validity: I1 in journal.h. Order of one commit:
 * straight-home pages and the record in any order, then one fdatasync, then it counts. So they are
 * written in pieces, several at once (pieces.h). */
#include "journal/journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/pages.h"
#include "base/process.h"
#include "base/thread.h"
#include "journal/plan.h"
#include "journal/state.h"

/* ---- room ---- */

/* Returns an error that the writer left, once. REQUIRES: mutex held. */
static int kept_error(struct pms_journal *j, struct pms_error *error)
{
    if (!j->failed)
        return PMS_OK;
    j->failed = false;
    if (error)
        *error = j->error;
    /* the journal still holds all: the writer tries again when there is need */
    pthread_cond_signal(&j->work);
    return j->error.status;
}

/* Waits until at most `most` bytes wait in the ring, or the writer fails. What is held goes too, if
 * it has to: the next commit may let go of it. REQUIRES: mutex held. */
static int wait_for_writer(struct pms_journal *j, uint64_t most, struct pms_error *error)
{
    while (j->tail - j->head > most && !j->failed) {
        if (j->tail - j->loose.position > most)
            j->letting_go = true;
        j->wanted = true;
        pthread_cond_signal(&j->work);
        pthread_cond_wait(&j->room, &j->mutex);
    }
    return kept_error(j, error);
}

/* Starts a new chain, with a ring of `window` bytes, on an empty journal. On an error the new
 * anchor may be on the medium or not, so nothing may be committed before another attempt
 * succeeds. */
static int reset(struct pms_journal *j, uint64_t window, struct pms_error *error)
{
    PMS_ASSERT(j->head == j->tail && j->homed == j->last && window <= j->ring.bytes);
    struct pms_janchor anchor = j->anchor;
    j->rechain = true;
    anchor.window = window;
    anchor.chain = j->chain;
    pms_anchor_rechain(&anchor);
    int status = pms_anchor_advance(j->map->fd, j->map->persist, &anchor, error);
    pthread_mutex_lock(&j->mutex);
    j->anchor.generation = anchor.generation;
    if (!status) {
        j->anchor = anchor;
        j->chain = anchor.chain;
        j->ring.window = window;
        j->rechain = false;
    }
    pthread_mutex_unlock(&j->mutex);
    return status;
}

static int wait_let_go(struct pms_journal *j, struct pms_error *error)
{
    pthread_mutex_lock(&j->mutex);
    int status = kept_error(j, error);
    while (!status && j->letting_go) {
        pthread_cond_signal(&j->work);
        pthread_cond_wait(&j->room, &j->mutex);
        status = kept_error(j, error);
    }
    pthread_mutex_unlock(&j->mutex);
    return status;
}

static int no_room(const struct pms_journal *j, uint64_t bytes, struct pms_error *error)
{
    int status = pms_fail(error, PMS_E_FULL, "the journal is too small for this transaction");
    if (error) {
        error->needed = bytes;
        error->available = j->ring.bytes;
    }
    return status;
}

/* A ring of eight such records, or of what the disk has room for (I5: one, at least). */
static uint64_t larger_window(const struct pms_journal *j, const struct pms_change *change,
                              uint64_t bytes)
{
    struct pms_backing *b = change->backing;
    uint64_t wanted = 8 * bytes < j->ring.bytes ? 8 * bytes : j->ring.bytes;
    if (!b || !b->persist)
        return wanted;
    if (!change->thin) /* for speed alone: all of it is backed, or some */
        (void)pms_backing_reach_bytes(b, wanted);
    uint64_t window = wanted < b->bytes ? wanted : b->bytes;
    return window > j->ring.window ? window : j->ring.window;
}

/* After it, `bytes` more fit behind the tail. A ring of eight records goes home by fours, and
 * what all four hold once. */
static int make_room(struct pms_journal *j, const struct pms_change *change, uint64_t bytes,
                     struct pms_error *error)
{
    uint64_t window = j->ring.window;
    if (bytes > window / 4 && window < j->ring.bytes)
        window = larger_window(j, change, bytes);
    /* pages of blocks that came and went again, which nobody is charged for any more */
    if (bytes > window && bytes <= j->ring.bytes && change->backing &&
        pms_backing_reach_bytes(change->backing, bytes) == 0)
        window = bytes;
    if (bytes > window)
        return no_room(j, bytes, error);
    bool anew = window != j->ring.window || j->rechain;
    uint64_t most = anew ? 0 : window - bytes;
    pthread_mutex_lock(&j->mutex);
    if (j->tail - j->head > most)
        j->stats.waits++;
    int status = wait_for_writer(j, most, error);
    pthread_mutex_unlock(&j->mutex);
    return !status && anew ? reset(j, window, error) : status;
}

/* ---- commit ---- */

static void mark_pages(struct pms_journal *j)
{
    for (uint32_t i = 0; i < j->record->run_count; i++)
        pms_journal_mark(j, &pms_journal_runs(j)[i], j->record->tx);
}

static struct pms_between behind(const struct pms_journal *j)
{
    return (struct pms_between){j->tail, j->last, j->chain};
}

/* The record is durable: it counts. */
static void publish(struct pms_journal *j, const struct pms_plan *plan)
{
    const struct pms_record *record = j->record;
    mark_pages(j);
    pthread_mutex_lock(&j->mutex);
    bool idle = j->head == j->loose.position;
    j->loose = behind(j);
    j->tail += record->bytes;
    j->last = record->tx;
    j->chain = record->crc;
    if (!pms_record_holds(record))
        j->loose = behind(j);
    j->letting_go = false; /* what was held is not the last one any more */
    j->stats.commits++;
    j->stats.commit_syncs++;
    j->stats.journal_bytes += record->bytes;
    j->stats.straight_bytes += plan->straight_bytes;
    PMS_ASSERT(j->tail - j->head <= j->ring.window);
    if (idle || j->tail - j->head > j->ring.window / 2)
        pthread_cond_signal(&j->work);
    pthread_mutex_unlock(&j->mutex);
}

static uint64_t record_bytes(const struct pms_plan *plan)
{
    return pms_record_head(plan->journal->record->run_count) + plan->image_bytes;
}

/* Nothing more is committed, or waited for, once a sync failed. */
static int check_durable(const struct pms_journal *j, struct pms_error *error)
{
    return j->map->persist->failed_syncs
               ? pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable")
               : PMS_OK;
}

static int begin(struct pms_plan *plan, struct pms_error *error)
{
    struct pms_journal *j = plan->journal;
    int unknown = check_durable(j, error);
    if (unknown)
        return unknown;
    pthread_mutex_lock(&j->mutex);
    int status = kept_error(j, error);
    plan->homed = j->homed;
    pthread_mutex_unlock(&j->mutex);
    return status;
}

int pms_journal_commit(struct pms_journal *j, const struct pms_change *change,
                       struct pms_error *error)
{
    struct pms_plan plan = {.journal = j};
    PMS_ASSERT(change->tx == j->last + 1 && j->map->bytes <= j->map->reserve);
    int status = begin(&plan, error);
    if (status)
        return status;
    pms_plan_build(&plan, change->runs, change->run_count);
    uint64_t bytes = record_bytes(&plan);
    if (bytes > j->ring.window && bytes > larger_window(j, change, bytes)) {
        /* More than the blocks of the store need: for slots that may not go straight home while
         * the last record counts. */
        status = pms_journal_drain(j, error);
        if (!status)
            status = begin(&plan, error);
        if (status)
            return status;
        pms_plan_build(&plan, change->runs, change->run_count);
        bytes = record_bytes(&plan);
    }
    status = make_room(j, change, bytes, error);
    if (status)
        return status;
    *j->record = (struct pms_record){.magic = PMS_RECORD_MAGIC | (uint64_t)change->held
                                                                     << PMS_RECORD_HELD_BIT,
                                     .tx = change->tx,
                                     .bytes = bytes,
                                     .image_bytes = plan.image_bytes,
                                     .run_count = j->record->run_count,
                                     .chain = j->chain};
    if (plan.straight_bytes > 0) /* it may lie where the version was that was let go */
        status = wait_let_go(j, error);
    if (status)
        return status;
    status = pms_plan_write(&plan, change, error);
    if (status) {
        j->rechain = true; /* part of a record lies there that must never count */
        return status;
    }
    /* orders: straight-home pages and the record, before the commit is acknowledged and any page
     * it names changes at home */
    status = pms_persist_sync(j->map->persist, j->map->fd, "syncing a commit", error);
    if (!status)
        publish(j, &plan);
    return status;
}

int pms_journal_drain(struct pms_journal *j, struct pms_error *error)
{
    int unknown = check_durable(j, error);
    if (unknown)
        return unknown;
    pthread_mutex_lock(&j->mutex);
    int status = kept_error(j, error);
    while (!status && (j->letting_go || j->head != j->loose.position)) {
        j->wanted = true;
        pthread_cond_signal(&j->work);
        pthread_cond_wait(&j->room, &j->mutex);
        status = kept_error(j, error);
    }
    PMS_ASSERT(status || j->homed == j->loose.tx);
    pthread_mutex_unlock(&j->mutex);
    return status;
}

void pms_journal_let_go(struct pms_journal *j)
{
    pthread_mutex_lock(&j->mutex);
    if (j->loose.tx != j->last) {
        j->letting_go = true;
        pthread_cond_signal(&j->work);
    }
    pthread_mutex_unlock(&j->mutex);
}

int pms_journal_let_go_surely(struct pms_journal *j, struct pms_error *error)
{
    int unknown = check_durable(j, error);
    if (unknown)
        return unknown;
    pms_journal_let_go(j);
    return wait_let_go(j, error);
}

void pms_journal_set_super(struct pms_journal *j, const struct pms_superblock *super)
{
    pthread_mutex_lock(&j->mutex);
    PMS_ASSERT(j->head == j->loose.position && !j->letting_go);
    uint64_t window = j->ring.window;
    uint64_t before = j->ring.bytes;
    pms_ring_init(&j->ring, j->map->fd, super, j->map->persist->log_seed);
    j->ring.direct = j->direct;
    PMS_ASSERT(j->ring.bytes >= before); /* segments are only added: positions keep their places */
    j->ring.window = window;
    pthread_mutex_unlock(&j->mutex);
}

void pms_journal_stats(struct pms_journal *j, struct pms_journal_stats *stats)
{
    pthread_mutex_lock(&j->mutex);
    *stats = j->stats;
    pthread_mutex_unlock(&j->mutex);
}

/* ---- what is home ---- */

/* the caller's own, though under the mutex where others ask for them */
uint64_t pms_journal_written(const struct pms_journal *j)
{
    return j->stats.journal_bytes + j->stats.straight_bytes;
}

uint64_t pms_journal_homed(struct pms_journal *j, enum pms_journal_ask ask)
{
    pthread_mutex_lock(&j->mutex);
    while (ask != PMS_JOURNAL_LOOK && !j->failed && j->head != j->loose.position) {
        j->wanted = true;
        pthread_cond_signal(&j->work);
        if (ask == PMS_JOURNAL_HURRY)
            break;
        pthread_cond_wait(&j->room, &j->mutex);
    }
    uint64_t homed = j->homed;
    pthread_mutex_unlock(&j->mutex);
    return homed;
}

/* What was written straight home was synced by its commit, and no older image follows (plan.c). */
uint64_t pms_journal_age(const struct pms_journal *j, uint64_t page, uint64_t homed)
{
    uint64_t mark = atomic_load_explicit(&j->marks[page], memory_order_relaxed), tx = mark >> 1;
    return mark && (mark & 1 || tx <= homed) ? j->last - tx : UINT64_MAX;
}

/* Not where the version may lie that was let go, and is not so durably. */
static bool may_send(struct pms_journal *j, uint64_t pages, uint64_t *homed)
{
    if (j->direct < 0 || pages < PMS_JOURNAL_DIRECT_PAGES || check_durable(j, NULL))
        return false;
    pthread_mutex_lock(&j->mutex);
    *homed = j->homed;
    bool may = !j->letting_go;
    pthread_mutex_unlock(&j->mutex);
    return may;
}

bool pms_journal_write_early(struct pms_journal *j, uint64_t page, uint64_t pages)
{
    uint64_t homed;
    return may_send(j, pages, &homed) && pms_plan_write_early(j, homed, page, pages);
}

bool pms_journal_begin_early(struct pms_journal *j, uint64_t page, uint64_t pages)
{
    uint64_t homed;
    return may_send(j, pages, &homed) &&
           pms_readers_keep(&j->readers, j->map, page, pages, NULL) == PMS_OK &&
           pms_plan_begin_early(j, homed, page, pages);
}

/* ---- open and close ---- */

uint64_t pms_journal_window(const struct pms_journal *j) { return j->ring.window; }

struct pms_readers *pms_journal_readers(struct pms_journal *j) { return &j->readers; }

static void release(struct pms_journal *j)
{
    pms_readers_close(&j->readers);
    pms_unreserve((void *)j->marks, j->marks_bytes);
    pms_unreserve(j->sent, j->sent_bytes);
    pms_unreserve(j->record, j->record_bytes);
    pms_process_close(j->home_fd);
    pms_process_close(j->direct);
    pms_unreserve(j->piece, j->piece_bytes);
    free(j->bounce);
    free(j->chunk);
    free(j);
}

/* A descriptor that passes the page cache by. File systems differ in what they allow: it is
 * tried with an empty page of the ring, read and written back as it was. Without one the journal is
 * written as any file. */
static int open_direct(struct pms_journal *j, const char *path)
{
    uint64_t room, offset = pms_ring_place(&j->ring, j->tail, &room);
    if (j->tail - j->head > j->ring.window - PMS_PAGE)
        return -1; /* a held record takes it all: none of it may be in flight */
    int fd = pms_process_open(path, O_RDWR | O_DIRECT, 0);
    if (fd >= 0 && pread(fd, j->chunk, PMS_PAGE, (off_t)offset) == (ssize_t)PMS_PAGE &&
        pms_persist_pwrite(j->map->persist, fd, j->chunk, PMS_PAGE, offset) == 0)
        return fd;
    pms_process_close(fd);
    return -1;
}

static int acquire(struct pms_journal *j, struct pms_error *error)
{
    uint64_t pages = j->map->reserve / PMS_PAGE;
    j->marks_bytes = pages * sizeof j->marks[0];
    j->sent_bytes = pages * sizeof j->sent[0];
    j->record_bytes = pms_record_head(pages);
    j->piece_bytes = pages * sizeof j->piece[0];
    j->marks = pms_reserve(j->marks_bytes);
    j->sent = pms_reserve(j->sent_bytes);
    j->record = pms_reserve(j->record_bytes);
    j->piece = pms_reserve(j->piece_bytes);
    j->bounce = aligned_alloc(PMS_PAGE, PMS_PIECES_BYTES);
    j->chunk = aligned_alloc(PMS_PAGE, PMS_JOURNAL_CHUNK);
    if (!j->marks || !j->sent || !j->record || !j->piece || !j->bounce || !j->chunk)
        return pms_fail_errno(error, "memory for the journal");
    return PMS_OK;
}

static int open_again(struct pms_journal *j, struct pms_error *error)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", j->map->fd);
    j->home_fd = pms_process_open(path, O_RDWR, 0);
    if (j->home_fd < 0)
        return pms_fail_errno(error, "opening the file a second time through /proc/self/fd");
    j->ring.direct = j->direct = open_direct(j, path);
    return PMS_OK;
}

static int load_anchor(struct pms_journal *j, const struct pms_superblock *super, uint64_t tx,
                       struct pms_error *error)
{
    bool twins;
    pms_ring_init(&j->ring, j->map->fd, super, j->map->persist->log_seed);
    int status = pms_anchor_read(&j->ring, &j->anchor, &twins, error);
    if (status)
        return status;
    if (j->anchor.tx != tx && j->anchor.tx + 1 != tx)
        return pms_fail(error, PMS_E_CORRUPT,
                        "the journal's anchor is at transaction %llu, the store at %llu",
                        (unsigned long long)j->anchor.tx, (unsigned long long)tx);
    /* what formatting wrote and recovery read: every commit would have to */
    for (uint32_t i = 0; i < j->ring.count; i++)
        pms_persist_forget(j->map->fd, j->ring.piece[i].off, j->ring.piece[i].bytes);
    j->head = j->tail = j->anchor.head;
    j->homed = j->last = j->anchor.tx;
    j->chain = j->anchor.chain;
    j->loose = behind(j);
    return j->last == tx ? PMS_OK : pms_journal_load_held(j, error);
}

static int start(struct pms_journal *j, struct pms_error *error)
{
    pthread_condattr_t monotonic;
    pthread_mutex_init(&j->mutex, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&j->work, &monotonic);
    pthread_cond_init(&j->room, NULL);
    pthread_condattr_destroy(&monotonic);
    pms_overlap_start();
    errno = pms_thread_start(&j->thread, (struct pms_thread_kind){0}, pms_journal_home_main, j);
    if (!errno)
        return PMS_OK;
    return pms_fail_errno(error, "starting the journal's thread: no memory, or too many threads");
}

int pms_journal_open(struct pms_journal **journal, struct pms_map *map,
                     const struct pms_superblock *super, uint64_t tx, struct pms_error *error)
{
    struct pms_journal *j = calloc(1, sizeof *j);
    *journal = NULL;
    if (!j)
        return pms_fail_errno(error, "memory for the journal");
    j->map = map;
    j->home_fd = j->direct = -1;
    pms_readers_open(&j->readers);
    int status = acquire(j, error);
    if (!status)
        status = load_anchor(j, super, tx, error);
    if (!status)
        status = open_again(j, error);
    if (!status)
        status = start(j, error);
    if (status)
        release(j);
    else
        *journal = j;
    return status;
}

int pms_journal_close(struct pms_journal *j, bool in_child, struct pms_error *error)
{
    int status = PMS_OK;
    if (!in_child) { /* in a fork child there is no thread, and its locks may be held for ever */
        status = pms_journal_drain(j, error);
        pthread_mutex_lock(&j->mutex);
        j->stop = true;
        pthread_cond_signal(&j->work);
        pthread_mutex_unlock(&j->mutex);
        pthread_join(j->thread, NULL);
        pthread_cond_destroy(&j->work);
        pthread_cond_destroy(&j->room);
        pthread_mutex_destroy(&j->mutex);
    }
    release(j);
    return status;
}
