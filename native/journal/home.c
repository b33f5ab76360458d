/* Domain file: the thread that writes committed images home.
 *
 * Wait for half a ring, a caller in need of room, or quiet; take all records that are durable;
 * write their images home; sync; move the anchor; sync; only then is their space free. It reads
 * the images back from the file, never from the user's memory, which may hold uncommitted bytes
 * by now. Crash anywhere before the anchor is durable: recovery replays the same records. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* pthread_setname_np */
#endif
#include <errno.h>
#include <time.h>

#include "base/checksum.h"
#include "seam/footer.h"
#include "journal/state.h"

struct batch {
    struct pms_journal *journal;
    uint64_t from, upto;  /* positions */
    uint64_t homed, last; /* transactions before and at the end */
    uint64_t bytes;       /* written home */
    /* positions: end of the record at hand; what the chunk holds of it */
    uint64_t record_end, loaded, loaded_bytes;
    uint32_t crc; /* of its images up to there */
    struct pms_janchor anchor;
};

/* An image is left out only if a newer one of the same batch follows: a newer one beyond it may
 * yet turn out damaged. */
static bool wanted(const struct batch *b, uint64_t page, uint64_t tx)
{
    uint64_t newest = atomic_load_explicit(&b->journal->marks[page], memory_order_relaxed) >> 1;
    PMS_ASSERT(newest >= tx);
    return newest == tx || newest > b->last;
}

static int damaged(uint64_t tx, struct pms_error *error)
{
    return pms_fail(error, PMS_E_CORRUPT,
                    "journal record of transaction %llu was damaged after its commit",
                    (unsigned long long)tx);
}

static int load_next(struct batch *b, struct pms_error *error)
{
    struct pms_journal *j = b->journal;
    uint64_t position = b->loaded + b->loaded_bytes, left = b->record_end - position;
    uint64_t n = left < PMS_JOURNAL_CHUNK ? left : PMS_JOURNAL_CHUNK;
    b->loaded_bytes = 0;
    int status = pms_ring_read(&j->ring, position, j->chunk, n, error);
    if (status)
        return status;
    b->loaded = position;
    b->loaded_bytes = n;
    b->crc = pms_crc32c(b->crc, j->chunk, n);
    return PMS_OK;
}

/* The images from a position on, as many as the chunk at hand holds: they lie end to end, so
 * that one read serves many runs. Positions ascend. */
static int load(struct batch *b, uint64_t position, const unsigned char **images, uint64_t *bytes,
                struct pms_error *error)
{
    PMS_ASSERT(position >= b->loaded && position < b->record_end);
    while (position >= b->loaded + b->loaded_bytes) {
        int status = load_next(b, error);
        if (status)
            return status;
    }
    *images = b->journal->chunk + (position - b->loaded);
    *bytes = b->loaded + b->loaded_bytes - position;
    return PMS_OK;
}

/* What was written home came from the medium, not from memory. A record that is not what was
 * committed is not given up: it may be read better at the next attempt, or by recovery, which
 * replays it. */
static int check_images(struct batch *b, const struct pms_record *record, struct pms_error *error)
{
    if (!b->loaded_bytes) /* nothing of it was wanted */
        return PMS_OK;
    while (b->loaded + b->loaded_bytes < b->record_end) {
        int status = load_next(b, error);
        if (status)
            return status;
    }
    return b->crc == record->images_crc ? PMS_OK : damaged(record->tx, error);
}

static int home_pages(struct batch *b, uint64_t page, uint64_t pages, uint64_t image,
                      struct pms_error *error)
{
    struct pms_journal *j = b->journal;
    int fd = pms_journal_fd_of(j, pages, j->home_fd);
    int kept = pms_readers_keep(&j->readers, j->map, page, pages, error);
    if (kept)
        return kept;
    for (uint64_t done = 0, n; done < pages; done += n) {
        const unsigned char *images;
        int status = load(b, image + done * PMS_PAGE, &images, &n, error);
        if (status)
            return status;
        n = n / PMS_PAGE < pages - done ? n / PMS_PAGE : pages - done;
        int failed = pms_persist_pwrite(&j->home_persist, fd, images, n * PMS_PAGE,
                                        (page + done) * PMS_PAGE);
        if (failed) {
            errno = failed;
            return pms_fail_errno(error, "writing journaled pages home");
        }
        b->bytes += n * PMS_PAGE;
    }
    return PMS_OK;
}

/* Writes those of the run's pages home that are wanted, in as few calls as possible. */
static int home_run(struct batch *b, const struct pms_run *run, uint64_t image, uint64_t tx,
                    struct pms_error *error)
{
    for (uint64_t i = 0, n; i < run->pages; i += n) {
        bool write = wanted(b, run->page + i, tx);
        for (n = 1; i + n < run->pages && wanted(b, run->page + i + n, tx) == write;)
            n++;
        int status = write ? home_pages(b, run->page + i, n, image + i * PMS_PAGE, error) : PMS_OK;
        if (status)
            return status;
    }
    return PMS_OK;
}

static int home_record(struct batch *b, uint64_t position, uint64_t tx, uint64_t *bytes,
                       struct pms_error *error)
{
    struct pms_ring *ring = &b->journal->ring;
    struct pms_record record;
    struct pms_run_reader reader;
    bool whole;
    uint64_t room = b->upto - position;
    int status = pms_record_probe(ring, position, room, room, &record, &whole, error);
    if (status)
        return status;
    if (!whole || record.tx != tx) /* it was, when it was committed: the medium lost it */
        return damaged(tx, error);
    b->record_end = position + record.bytes;
    b->loaded = position + pms_record_head(record.run_count);
    b->loaded_bytes = b->crc = 0;
    pms_runs_start(&reader, ring, position, &record);
    while (reader.left > 0) {
        struct pms_run run;
        uint64_t image;
        status = pms_runs_next(&reader, &run, &image, error);
        if (!status && !run.home)
            status = home_run(b, &run, image, tx, error);
        if (status)
            return status;
    }
    *bytes = record.bytes;
    return check_images(b, &record, error);
}

static int home_batch(struct batch *b, struct pms_error *error)
{
    uint64_t position = b->from;
    pms_footer_raise(b->journal->map, b->last);
    for (uint64_t tx = b->homed + 1; tx <= b->last; tx++) {
        uint64_t bytes = 0;
        int status = home_record(b, position, tx, &bytes, error);
        if (status)
            return status;
        position += bytes;
    }
    PMS_ASSERT(position == b->upto);
    return pms_anchor_advance(b->journal->home_fd, &b->journal->home_persist, &b->anchor, error);
}

/* ---- the thread ---- */

/* Waits on `work` for at most the idle time. True: it passed. REQUIRES: mutex held. */
static bool wait_idle(struct pms_journal *j)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += PMS_JOURNAL_IDLE_MS * 1000000l;
    until.tv_sec += until.tv_nsec / 1000000000l;
    until.tv_nsec %= 1000000000l;
    return pthread_cond_timedwait(&j->work, &j->mutex, &until) == ETIMEDOUT;
}

/* Returns false when the thread must end. REQUIRES: mutex held. */
static bool wait_for_work(struct pms_journal *j)
{
    for (;;) {
        if (j->stop)
            return false;
        if (j->failed || (!j->letting_go && j->head == j->loose.position)) {
            pthread_cond_wait(&j->work, &j->mutex);
            continue;
        }
        uint64_t tail = j->tail;
        if (j->letting_go || j->wanted || j->tail - j->head > j->ring.window / 2 ||
            (wait_idle(j) && tail == j->tail && !j->stop))
            return true;
    }
}

/* Under the mutex before and after; not while it works. */
static void run_batch(struct pms_journal *j)
{
    struct batch b = {.journal = j,
                      .from = j->head,
                      .upto = j->loose.position,
                      .homed = j->homed,
                      .last = j->loose.tx,
                      .anchor = j->anchor};
    struct pms_error error = {0};
    b.anchor.tx = j->loose.tx;
    b.anchor.head = j->loose.position;
    b.anchor.chain = j->loose.chain;
    pthread_mutex_unlock(&j->mutex);
    int status = home_batch(&b, &error);
    pthread_mutex_lock(&j->mutex);
    j->stats.home_syncs = j->home_persist.syncs;
    j->stats.home_bytes += b.bytes;
    j->anchor.generation = b.anchor.generation; /* also after a failure: see pms_anchor_advance */
    if (status) {
        j->failed = true;
        j->error = error;
    } else {
        PMS_ASSERT(j->head == b.from && j->homed == b.homed);
        j->anchor = b.anchor;
        j->head = b.upto;
        j->homed = b.last;
    }
    j->wanted = false; /* a caller that needs still more asks again */
    pthread_cond_broadcast(&j->room);
}

/* What the last record holds is over before any of its images goes home: else a recovery would find
 * the version before it neither there nor gone. Under the mutex before and after. */
static void let_go(struct pms_journal *j)
{
    struct pms_janchor anchor = j->anchor;
    struct pms_error error = {0};
    anchor.let_go = j->last;
    pthread_mutex_unlock(&j->mutex);
    int status = pms_anchor_advance(j->home_fd, &j->home_persist, &anchor, &error);
    pthread_mutex_lock(&j->mutex);
    j->stats.home_syncs = j->home_persist.syncs;
    j->anchor.generation = anchor.generation;
    if (status) {
        j->failed = true;
        j->error = error;
    } else {
        j->anchor = anchor;
        if (j->last == anchor.let_go) { /* else a commit has settled it meanwhile */
            j->loose = (struct pms_between){j->tail, j->last, j->chain};
            j->letting_go = false;
        }
    }
    pthread_cond_broadcast(&j->room);
}

void *pms_journal_home_main(void *journal)
{
    struct pms_journal *j = journal;
    pthread_setname_np(pthread_self(), "pms-journal");
    pthread_mutex_lock(&j->mutex);
    while (wait_for_work(j)) {
        if (j->letting_go)
            let_go(j);
        else
            run_batch(j);
    }
    pthread_mutex_unlock(&j->mutex);
    return NULL;
}
