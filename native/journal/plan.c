/* Domain file: which of a commit's pages go home and which into its record, and how both are
 * written. Nothing of it counts before the commit's sync (journal.c). */
#include "journal/plan.h"

#include <errno.h>
#include <string.h>

#include "base/checksum.h"
#include "base/quiet.h"
#include "journal/state.h"
#include "seam/footer.h"
#include "seam/spill.h"

#define CHUNK_PAGES (PMS_JOURNAL_CHUNK / PMS_PAGE)
#define IOV_MOST CHUNK_PAGES

/* ---- planning ---- */

/* A page must not be written straight home while an image waits for it (the older image would
 * land on top), nor if the last record wrote it straight home (until the new record is durable,
 * the last one's checksum of it must still hold). */
static bool blocked(const struct pms_plan *plan, uint64_t page)
{
    uint64_t mark = atomic_load_explicit(&plan->journal->marks[page], memory_order_relaxed);
    uint64_t tx = mark >> 1;
    return tx > plan->homed && (!(mark & 1) || tx == plan->journal->last);
}

static void add_run(struct pms_plan *plan, uint64_t page, uint64_t pages, bool home)
{
    struct pms_record *record = plan->journal->record;
    pms_journal_runs(plan->journal)[record->run_count++] = (struct pms_run){
        .page = page, .pages = (uint32_t)pages, .home = home};
    *(home ? &plan->straight_bytes : &plan->image_bytes) += pages * PMS_PAGE;
}

/* Splits a run at the pages that may not be written straight home. */
static void add_home_run(struct pms_plan *plan, const struct pms_run *run)
{
    uint64_t end = run->page + run->pages;
    for (uint64_t page = run->page, next; page < end; page = next) {
        bool held = blocked(plan, page);
        for (next = page + 1; next < end && blocked(plan, next) == held;)
            next++;
        add_run(plan, page, next - page, !held);
    }
}

void pms_plan_build(struct pms_plan *plan, const struct pms_run *runs, uint32_t run_count)
{
    const struct pms_map *map = plan->journal->map;
    uint64_t from = 0;
    plan->journal->record->run_count = 0;
    plan->image_bytes = plan->straight_bytes = 0;
    for (uint32_t i = 0; i < run_count; i++) {
        PMS_ASSERT(runs[i].pages > 0 && runs[i].page >= from);
        from = runs[i].page + runs[i].pages;
        PMS_ASSERT(from <= map->bytes / PMS_PAGE);
        if (runs[i].home)
            add_home_run(plan, &runs[i]);
        else
            add_run(plan, runs[i].page, runs[i].pages, false);
    }
}

/* ---- writing ---- */

/* A batch of images on their way: at most one chunk of bytes, so that what was checksummed is
 * still in the cache when the kernel copies it. */
struct sink {
    struct pms_journal *journal;
    const struct pms_change *change;
    uint64_t position; /* of the batch */
    uint32_t crc;      /* of all images so far */
    bool sent;         /* a batch was written */
    int count;         /* of iov, without the header's */
    size_t bytes, bounced;
    struct iovec iov[IOV_MOST + 1]; /* [0] is for the header */
};

/* Lays over a copy of pages what is committed of those that others may be storing to. */
static void lay_images(const struct pms_change *change, uint64_t page, uint64_t pages,
                       unsigned char *copy)
{
    for (uint32_t i = 0; i < change->image_count; i++) {
        const struct pms_image *m = &change->images[i];
        uint64_t from = m->page > page ? m->page : page;
        uint64_t end = m->page + m->pages < page + pages ? m->page + m->pages : page + pages;
        if (from < end)
            memcpy(copy + (from - page) * PMS_PAGE, m->bytes + (from - m->page) * PMS_PAGE,
                   (end - from) * PMS_PAGE);
    }
}

/* Pages as they are to be written: a copy, which is what is checksummed. A store between the
 * checksum and the kernel's own look, by a thread into hot pages or by a device into pages that
 * it was given before they were protected, would make this record, and every later one,
 * worthless. The copy is in the cache when it is checksummed, so it costs little beside that. */
static const unsigned char *stable(struct pms_journal *j, const struct pms_change *change,
                                   uint64_t page, uint64_t pages, size_t *bounced)
{
    unsigned char *copy = j->bounce + *bounced;
    PMS_ASSERT(*bounced + pages * PMS_PAGE <= PMS_JOURNAL_CHUNK);
    pms_quiet_copy(copy, j->map->user + page * PMS_PAGE, pages * PMS_PAGE);
    lay_images(change, page, pages, copy);
    *bounced += pages * PMS_PAGE;
    return copy;
}

static int sink_flush(struct sink *sink, struct pms_error *error)
{
    struct pms_journal *j = sink->journal;
    int status = pms_ring_write(&j->ring, j->map->persist, sink->position, sink->iov + 1,
                                sink->count, error);
    sink->position += sink->bytes;
    sink->sent = true;
    sink->count = 0;
    sink->bytes = sink->bounced = 0;
    return status;
}

static int sink_run(struct sink *sink, const struct pms_run *run, struct pms_error *error)
{
    for (uint64_t done = 0; done < run->pages;) {
        if (sink->count == IOV_MOST || sink->bytes == PMS_JOURNAL_CHUNK) {
            int status = sink_flush(sink, error);
            if (status)
                return status;
        }
        uint64_t n = (PMS_JOURNAL_CHUNK - sink->bytes) / PMS_PAGE;
        if (n > run->pages - done)
            n = run->pages - done;
        const unsigned char *from = stable(sink->journal, sink->change, run->page + done, n,
                                           &sink->bounced);
        sink->crc = pms_crc32c(sink->crc, from, n * PMS_PAGE);
        sink->iov[1 + sink->count++] = (struct iovec){(void *)(uintptr_t)from, n * PMS_PAGE};
        sink->bytes += n * PMS_PAGE;
        done += n;
    }
    return PMS_OK;
}

int pms_plan_write_record(struct pms_journal *j, const struct pms_change *change,
                          struct pms_error *error)
{
    struct pms_record *record = j->record;
    uint64_t head = pms_record_head(record->run_count);
    size_t used = sizeof *record + record->run_count * sizeof(struct pms_run);
    struct sink sink = {.journal = j, .change = change, .position = j->tail + head};
    for (uint32_t i = 0; i < record->run_count; i++) {
        const struct pms_run *run = &pms_journal_runs(j)[i];
        int status = run->home ? PMS_OK : sink_run(&sink, run, error);
        if (status)
            return status;
    }
    record->images_crc = sink.crc;
    record->crc = 0;
    record->crc = pms_crc32c(j->ring.seed, record, used);
    memset((unsigned char *)record + used, 0, head - used);
    /* What lies in the spill is read once more by the write: it has to be read before it is asked
     * whether the disk lost any of it. */
    bool first = sink.sent || pms_spill_any(j->map);
    int status = first && sink.count > 0 ? sink_flush(&sink, error) : PMS_OK;
    if (status)
        return status;
    if (!pms_spill_is_whole(j->map)) /* all images were read; without a header none counts */
        return pms_fail(error, PMS_E_OS,
                        "the disk lost memory of the transaction: nothing more is committed; open "
                        "the store again");
    sink.iov[0] = (struct iovec){record, head};
    return pms_ring_write(&j->ring, j->map->persist, j->tail, sink.iov, 1 + sink.count, error);
}

/* ---- what is home already ---- */

static void note_sent(struct pms_journal *j, uint64_t page, uint64_t pages, uint32_t crc)
{
    for (uint64_t i = 0; i < pages; i++)
        j->sent[page + i] = (struct pms_sent){
            .tx = j->last + 1, .crc = crc, .pages = (uint16_t)pages, .at = (uint16_t)i};
}

static void forget_sent(struct pms_journal *j, uint64_t page, uint64_t pages)
{
    for (uint64_t i = 0; j->early && i < pages; i++)
        j->sent[page + i].tx = 0;
}

static bool begins_piece(const struct pms_journal *j, uint64_t page)
{
    return j->sent[page].tx == j->last + 1 && j->sent[page].at == 0;
}

static bool are_files(const struct pms_journal *j, uint64_t page, uint64_t pages)
{
    uint64_t run;
    return pms_map_foreign(j->map, page * PMS_PAGE, pages * PMS_PAGE, &run) &&
           run == pages * PMS_PAGE;
}

/* The pages of the piece that begins here, if all of it is as it was sent, and was given back to
 * the file; else 0. */
static uint64_t sent_piece(const struct pms_journal *j, uint64_t page, uint64_t most)
{
    const struct pms_sent *s = &j->sent[page];
    if (!j->early || !begins_piece(j, page) || s->pages > most || !are_files(j, page, s->pages))
        return 0;
    for (uint64_t i = 1; i < s->pages; i++)
        if (s[i].tx != s->tx || s[i].at != i || s[i].crc != s->crc)
            return 0;
    return s->pages;
}

/* Pages from here on, up to the next piece: as many as are written at once. */
static uint64_t up_to_piece(const struct pms_journal *j, uint64_t page, uint64_t most)
{
    uint64_t n = 1;
    most = most < CHUNK_PAGES ? most : CHUNK_PAGES;
    if (!j->early)
        return most;
    while (n < most && !begins_piece(j, page + n))
        n++;
    return n;
}

static int put_home(struct pms_journal *j, const struct pms_run *run, uint64_t page, uint64_t n,
                    const unsigned char *from, struct pms_error *error)
{
    if (j->early && are_files(j, page, n)) /* parts of pieces */
        return PMS_OK;
    forget_sent(j, page, n);
    errno = pms_persist_pwrite(j->map->persist, pms_journal_fd_of(j, run->pages, j->map->fd), from,
                               n * PMS_PAGE, page * PMS_PAGE);
    return errno ? pms_fail_errno(error, "writing fresh pages home") : PMS_OK;
}

static int write_home(struct pms_journal *j, const struct pms_change *change, struct pms_run *run,
                      struct pms_error *error)
{
    uint32_t crc = 0;
    int status = pms_readers_keep(&j->readers, j->map, run->page, run->pages, error);
    for (uint64_t done = 0, n; status == PMS_OK && done < run->pages; done += n) {
        uint64_t page = run->page + done, left = run->pages - done;
        size_t bounced = 0;
        n = sent_piece(j, page, left);
        if (n) {
            crc = pms_crc32c_join(crc, j->sent[page].crc, n * PMS_PAGE);
            continue;
        }
        n = up_to_piece(j, page, left);
        const unsigned char *from = stable(j, change, page, n, &bounced);
        crc = pms_crc32c(crc, from, n * PMS_PAGE);
        status = put_home(j, run, page, n, from, error);
    }
    run->home_crc = crc;
    return status;
}

bool pms_plan_begin_early(struct pms_journal *j, uint64_t homed, uint64_t page, uint64_t pages)
{
    struct pms_plan plan = {.journal = j, .homed = homed};
    PMS_ASSERT(j->direct >= 0 && pages >= PMS_JOURNAL_DIRECT_PAGES);
    for (uint64_t p = page; p < page + pages; p++)
        if (blocked(&plan, p))
            return false;
    pms_footer_raise(j->map, j->last); /* as for all that goes straight home */
    j->early = true;
    return true;
}

bool pms_plan_write_early(struct pms_journal *j, uint64_t homed, uint64_t page, uint64_t pages)
{
    struct pms_run run = {.page = page, .pages = (uint32_t)pages, .home = 1};
    PMS_ASSERT(pages <= CHUNK_PAGES);
    if (!pms_plan_begin_early(j, homed, page, pages) ||
        write_home(j, &(struct pms_change){0}, &run, NULL) != PMS_OK)
        return false;
    note_sent(j, page, pages, run.home_crc);
    return true;
}

int pms_plan_write_pieces(struct pms_journal *j, uint64_t page, const void *bytes, uint64_t pages,
                          const uint32_t *crc)
{
    forget_sent(j, page, pages);
    int err = pms_persist_pwrite(j->map->persist, j->direct, bytes, pages * PMS_PAGE,
                                 page * PMS_PAGE);
    for (uint64_t done = 0, n; !err && done < pages; done += n) {
        n = pages - done < CHUNK_PAGES ? pages - done : CHUNK_PAGES;
        note_sent(j, page + done, n, crc[done / CHUNK_PAGES]);
    }
    return err;
}

int pms_plan_write_homes(struct pms_journal *j, const struct pms_change *change,
                         struct pms_error *error)
{
    /* straight home goes what the transactions before freed, or may have */
    pms_footer_raise(j->map, change->tx - 1);
    for (uint32_t i = 0; i < j->record->run_count; i++) {
        struct pms_run *run = &pms_journal_runs(j)[i];
        int status = run->home ? write_home(j, change, run, error) : PMS_OK;
        if (status)
            return status;
    }
    return PMS_OK;
}
