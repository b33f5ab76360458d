/* Domain file: formatting the journal, and replaying it.
 *
 * Recovery reads the chain twice: first to learn which record is the last whole one, then to
 * replay. It holds one chunk of memory whatever the file says. Crash anywhere: the anchors
 * change only after all images are home and synced, so the next recovery finds the same chain
 * and does the same. A last record that holds stays in the ring, as it was committed: the home is
 * the version before it (held.c shows the record over it). */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"
#include "base/region.h"
#include "journal/journal.h"
#include "journal/ring.h"

struct recovery {
    struct pms_ring ring;
    struct pms_janchor anchor;
    const struct pms_superblock *super;
    struct pms_persist *persist;
    const struct pms_journal_asked *asked;
    unsigned char *chunk; /* PMS_JOURNAL_CHUNK bytes */
    /* after the scan: behind the last whole record; of what is to be home */
    struct pms_between end, home;
    bool closed; /* the last writer closed the store, and both anchors hold */
    struct pms_journal_recovery *result;
};

/* ---- rules of runs ---- */

static bool run_allowed(const struct pms_superblock *super, const struct pms_run *run,
                        uint64_t from)
{
    if (run->pages == 0 || run->page < from || run->page >= super->file_bytes / PMS_PAGE ||
        run->pages > super->file_bytes / PMS_PAGE - run->page)
        return false;
    if (run->home > 1 || run->reserved != 0 || (!run->home && run->home_crc != 0))
        return false;
    for (uint64_t done = 0; done < run->pages;) {
        enum pms_region_kind kind;
        uint64_t part = pms_region_pages(super, run->page + done, &kind);
        if (part == 0)
            return false;
        done += part;
    }
    return true;
}

static int bad_run(uint64_t tx, const struct pms_run *run, struct pms_error *error)
{
    int status = pms_fail(error, PMS_E_CORRUPT,
                          "journal record of transaction %llu: run of %u pages breaks the rules",
                          (unsigned long long)tx, run->pages);
    if (error)
        error->offset = run->page * PMS_PAGE;
    return status;
}

/* A header whose checksum holds, and its runs: anything against the rules is damage or malice,
 * not a torn write. */
static int check_runs(struct recovery *r, uint64_t position, const struct pms_record *record,
                      struct pms_error *error)
{
    struct pms_run_reader reader;
    uint64_t from = 0, images = 0;
    pms_runs_start(&reader, &r->ring, position, record);
    while (reader.left > 0) {
        struct pms_run run;
        uint64_t image;
        int status = pms_runs_next(&reader, &run, &image, error);
        if (status)
            return status;
        if (!run_allowed(r->super, &run, from))
            return bad_run(record->tx, &run, error);
        from = run.page + run.pages;
        if (!run.home)
            /* at most 2^32 runs of 2^44 bytes, ascending in the file: no overflow */
            images += (uint64_t)run.pages * PMS_PAGE;
    }
    if (images == record->image_bytes)
        return PMS_OK;
    return pms_fail(error, PMS_E_CORRUPT,
                    "journal record of transaction %llu: its runs do not add up",
                    (unsigned long long)record->tx);
}

/* ---- scan ---- */

static int images_match(struct recovery *r, uint64_t position, const struct pms_record *record,
                        bool *match, struct pms_error *error)
{
    uint64_t at = position + pms_record_head(record->run_count);
    uint32_t crc = 0;
    for (uint64_t left = record->image_bytes; left > 0;) {
        size_t n = left < PMS_JOURNAL_CHUNK ? (size_t)left : PMS_JOURNAL_CHUNK;
        int status = pms_ring_read(&r->ring, at, r->chunk, n, error);
        if (status)
            return status;
        crc = pms_crc32c(crc, r->chunk, n);
        at += n;
        left -= n;
    }
    *match = crc == record->images_crc;
    return PMS_OK;
}

static int run_matches(struct recovery *r, const struct pms_run *run, bool *match,
                       struct pms_error *error)
{
    uint64_t off = run->page * PMS_PAGE;
    uint32_t crc = 0;
    for (uint64_t left = (uint64_t)run->pages * PMS_PAGE; left > 0;) {
        size_t n = left < PMS_JOURNAL_CHUNK ? (size_t)left : PMS_JOURNAL_CHUNK;
        int status = pms_ring_read_home(r->ring.fd, off, r->chunk, n, error);
        if (status)
            return status;
        crc = pms_crc32c(crc, r->chunk, n);
        off += n;
        left -= n;
    }
    *match = crc == run->home_crc;
    return PMS_OK;
}

static int homes_match(struct recovery *r, uint64_t position, const struct pms_record *record,
                       bool *match, struct pms_error *error)
{
    struct pms_run_reader reader;
    *match = true;
    pms_runs_start(&reader, &r->ring, position, record);
    while (reader.left > 0 && *match) {
        struct pms_run run;
        uint64_t image;
        int status = pms_runs_next(&reader, &run, &image, error);
        if (!status && run.home)
            status = run_matches(r, &run, match, error);
        if (status)
            return status;
    }
    return PMS_OK;
}

static uint64_t ring_left(const struct recovery *r, uint64_t position)
{
    return r->ring.window - (position - r->anchor.head);
}

static struct pms_between start_of(const struct recovery *r)
{
    return (struct pms_between){r->anchor.head, r->anchor.tx, r->anchor.chain};
}

/* The record of transaction tx at a position, up to its images. */
static int look(struct recovery *r, uint64_t position, uint64_t tx, uint32_t chain,
                struct pms_record *record, enum pms_verdict *verdict, struct pms_error *error)
{
    bool match;
    int status = pms_record_load(&r->ring, position, ring_left(r, position), tx, chain, record,
                                 verdict, error);
    if (status || *verdict != PMS_RECORD_WHOLE)
        return status;
    status = check_runs(r, position, record, error);
    if (!status)
        status = images_match(r, position, record, &match, error);
    if (!status && !match)
        *verdict = PMS_RECORD_TORN;
    return status;
}

/* A commit begins only after the one before is durable. So a record of a later transaction
 * beyond one that is not whole means that an acknowledged commit was damaged: better an error
 * than a silent loss. Looks a bounded way ahead. */
static int check_nothing_after(struct recovery *r, struct pms_error *error)
{
    uint64_t left = ring_left(r, r->end.position);
    if (left > PMS_JOURNAL_INITIAL)
        left = PMS_JOURNAL_INITIAL;
    for (uint64_t done = PMS_PAGE; done < left; done += PMS_PAGE) {
        struct pms_record record;
        bool whole;
        uint64_t at = r->end.position + done;
        int status = pms_record_probe(&r->ring, at, ring_left(r, at), PMS_JOURNAL_CHUNK, &record,
                                      &whole, error);
        if (status)
            return status;
        if (whole && record.tx > r->end.tx + 1)
            return pms_fail(
                error, PMS_E_CORRUPT,
                "journal record of transaction %llu is damaged: that of %llu, committed later, "
                "is there",
                (unsigned long long)r->end.tx + 1, (unsigned long long)record.tx);
    }
    return PMS_OK;
}

struct found { /* a whole record, and what lies before and behind it */
    struct pms_between before, behind;
    struct pms_record record;
};

/* Whether the version before the last record can be had back. */
static bool holds(const struct recovery *r, const struct found *last)
{
    uint64_t tx = last->behind.tx;
    return tx > r->anchor.tx && pms_record_holds(&last->record) && r->anchor.let_go != tx &&
           r->asked->may_hold && r->asked->may_hold(r->asked->ctx, tx);
}

/* Finds the last whole record. Only its home runs must match: those of one before may have been
 * written again since. */
static int scan(struct recovery *r, struct pms_error *error)
{
    struct found last = {start_of(r), start_of(r), {0}}, one_before = last;
    struct pms_record next;
    enum pms_verdict verdict;
    bool match = true;
    int status;
    for (;;) {
        const struct pms_between *at = &last.behind;
        status = look(r, at->position, at->tx + 1, at->chain, &next, &verdict, error);
        if (status || verdict != PMS_RECORD_WHOLE)
            break;
        one_before = last; /* as it stands if the record just found must be dropped */
        last.record = next;
        last.before = one_before.behind;
        last.behind = (struct pms_between){last.before.position + next.bytes, last.before.tx + 1,
                                           next.crc};
    }
    if (!status && last.behind.tx > r->anchor.tx)
        status = homes_match(r, last.before.position, &last.record, &match, error);
    if (status)
        return status;
    if (!match)
        last = one_before;
    r->end = r->home = last.behind;
    if (holds(r, &last)) {
        r->home = last.before;
        r->result->held = pms_record_holds(&last.record);
    }
    r->result->torn = !match || verdict == PMS_RECORD_TORN;
    bool all_home = r->closed && r->home.tx == r->anchor.tx && !r->result->torn;
    return all_home ? PMS_OK : check_nothing_after(r, error);
}

/* ---- replay ---- */

/* To a reader without the lock, after the scan. */
static int changed_meanwhile(struct pms_error *error)
{
    return pms_fail(error, PMS_E_CORRUPT, "the journal was written to while it was read");
}

static int replay_run(struct recovery *r, const struct pms_run *run, uint64_t image,
                      struct pms_error *error)
{
    uint64_t off = run->page * PMS_PAGE;
    unsigned char *into = r->asked->into;
    for (uint64_t left = (uint64_t)run->pages * PMS_PAGE; left > 0;) {
        size_t n = left < PMS_JOURNAL_CHUNK ? (size_t)left : PMS_JOURNAL_CHUNK;
        unsigned char *to = into ? into + off : r->chunk;
        int status = pms_ring_read(&r->ring, image, to, n, error);
        if (status)
            return status;
        int failed = into ? 0 : pms_persist_pwrite(r->persist, r->ring.fd, to, n, off);
        if (failed) {
            errno = failed;
            return pms_fail_errno(error, "replaying the journal");
        }
        r->result->bytes += n;
        image += n;
        off += n;
        left -= n;
    }
    return PMS_OK;
}

static int replay(struct recovery *r, struct pms_error *error)
{
    /* whoever sees the store in memory alone sees the held record too */
    const struct pms_between *end = r->asked->into && !r->asked->before ? &r->end : &r->home;
    uint64_t position = r->anchor.head;
    for (uint64_t tx = r->anchor.tx; tx < end->tx; tx++) {
        struct pms_record record;
        struct pms_run_reader reader;
        int status = pms_ring_read(&r->ring, position, &record, sizeof record, error);
        if (status)
            return status;
        if (!pms_record_is(&record) || record.tx != tx + 1)
            return changed_meanwhile(error);
        pms_runs_start(&reader, &r->ring, position, &record);
        while (reader.left > 0) {
            struct pms_run run;
            uint64_t image;
            status = pms_runs_next(&reader, &run, &image, error);
            if (!status && !run_allowed(r->super, &run, 0))
                status = changed_meanwhile(error);
            if (!status && !run.home)
                status = replay_run(r, &run, image, error);
            if (status)
                return status;
        }
        position += record.bytes;
        r->result->records++;
    }
    return position == end->position ? PMS_OK : changed_meanwhile(error);
}

/* The held record stays, and so does the chain. What was dropped as torn behind it would follow it
 * still, should a later write complete it by accident: so it loses its header. */
static int clear_behind(struct recovery *r, struct pms_error *error)
{
    if (r->ring.window - (r->end.position - r->home.position) < PMS_PAGE)
        return PMS_OK; /* nothing fits there */
    memset(r->chunk, 0, PMS_PAGE);
    struct iovec iov = {r->chunk, PMS_PAGE};
    return pms_ring_write(&r->ring, r->persist, r->end.position, &iov, 1, error);
}

/* The journal is empty from here on, but for the held record, and nothing that lies in the ring can
 * be valid again: not a record dropped as torn either, should a later write complete it by
 * accident. */
static int reset(struct recovery *r, struct pms_error *error)
{
    int status = PMS_OK;
    r->anchor.tx = r->home.tx;
    r->anchor.head = r->home.position;
    r->anchor.chain = r->home.chain;
    if (r->end.tx == r->home.tx)
        pms_anchor_rechain(&r->anchor);
    else
        status = clear_behind(r, error);
    if (!status)
        status = pms_anchor_advance(r->ring.fd, r->persist, &r->anchor, error);
    if (status)
        return status;
    /* orders: the anchor's twin before whatever the caller does next */
    return pms_persist_sync(r->persist, r->ring.fd, "syncing the journal's anchor", error);
}

int pms_journal_recover(int fd, struct pms_persist *p, const struct pms_superblock *super,
                        const struct pms_journal_asked *asked, struct pms_journal_recovery *result,
                        struct pms_error *error)
{
    struct recovery r = {.super = super, .persist = p, .asked = asked, .result = result};
    bool twins;
    *result = (struct pms_journal_recovery){0};
    pms_ring_init(&r.ring, fd, super, p->log_seed);
    int status = pms_anchor_read(&r.ring, &r.anchor, &twins, error);
    if (status)
        return status;
    r.closed = asked->closed && twins;
    r.chunk = malloc(PMS_JOURNAL_CHUNK);
    if (!r.chunk)
        return pms_fail_errno(error, "memory for recovery");
    status = scan(&r, error);
    if (!status)
        status = replay(&r, error);
    if (!status && !asked->into && (result->records > 0 || result->torn || !twins))
        status = reset(&r, error);
    result->tx = r.end.tx;
    free(r.chunk);
    return status;
}

/* ---- format ---- */

static int zero_ring(const struct pms_ring *ring, struct pms_persist *p, struct pms_error *error)
{
    unsigned char *zeros = calloc(1, PMS_JOURNAL_CHUNK);
    int status = zeros ? PMS_OK : pms_fail_errno(error, "memory for formatting");
    for (uint64_t done = 0; done < ring->window && !status;) {
        uint64_t left = ring->window - done;
        struct iovec iov = {zeros, left < PMS_JOURNAL_CHUNK ? (size_t)left : PMS_JOURNAL_CHUNK};
        size_t n = iov.iov_len;
        status = pms_ring_write(ring, p, done, &iov, 1, error);
        done += n;
    }
    free(zeros);
    return status;
}

int pms_journal_format(int fd, struct pms_persist *p, const struct pms_superblock *super,
                       uint64_t tx, struct pms_error *error)
{
    struct recovery r = {.super = super, .persist = p, .end.tx = tx, .home.tx = tx};
    bool twins;
    pms_ring_init(&r.ring, fd, super, p->log_seed);
    /* A store that was in this domain before has anchors; the new ones must outrank them. */
    int status = pms_anchor_read(&r.ring, &r.anchor, &twins, error);
    if (status == PMS_E_CORRUPT)
        r.anchor = (struct pms_janchor){0};
    else if (status)
        return status;
    uint64_t generation = r.anchor.generation;
    memset(&r.anchor, 0, sizeof r.anchor);
    r.anchor.generation = generation;
    r.ring.window = r.ring.bytes < PMS_JOURNAL_INITIAL ? r.ring.bytes : PMS_JOURNAL_INITIAL;
    r.anchor.window = r.ring.window;
    status = zero_ring(&r.ring, p, error);
    return status ? status : reset(&r, error);
}
