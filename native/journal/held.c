/* Domain file: the last record, while it is held.
 *
 * It stays in the ring and is not written home: what is home is the version before it. A live store
 * has that version in its log too, as it has after each commit. One that is opened has to find it:
 * the record's images are shown over what is home, and what they cover is appended to the log. */
#include <errno.h>
#include <string.h>

#include "base/region.h"
#include "journal/state.h"
#include "log/entries.h"

int pms_journal_load_held(struct pms_journal *j, struct pms_error *error)
{
    struct pms_record record;
    struct pms_run_reader reader;
    enum pms_verdict verdict;
    int status = pms_record_load(&j->ring, j->head, j->ring.window, j->homed + 1, j->chain, &record,
                                 &verdict, error);
    if (status)
        return status;
    if (verdict != PMS_RECORD_WHOLE || !pms_record_holds(&record))
        return pms_fail(error, PMS_E_CORRUPT, "the held journal record is not there");
    j->tail += record.bytes;
    j->last = record.tx;
    j->chain = record.crc;
    pms_runs_start(&reader, &j->ring, j->head, &record);
    while (reader.left > 0) {
        struct pms_run run;
        uint64_t image;
        status = pms_runs_next(&reader, &run, &image, error);
        if (status)
            return status;
        pms_journal_mark(j, &run, record.tx);
    }
    return PMS_OK;
}

struct showing {
    struct pms_journal *journal;
    struct pms_undo *undo;
    const struct pms_superblock *super;
    uint64_t left; /* of the log */
};

static bool take_log(struct showing *s, uint64_t bytes)
{
    if (bytes > s->left)
        return false;
    s->left -= bytes;
    return true;
}

/* Of a page table, or the root: what differs, as the transaction captured it. Entries of pages in
 * the middle of an extent may be left from long ago, and mean nothing (heap/hold.c). */
static bool log_granules(struct showing *s, uint64_t off, const unsigned char *image)
{
    const unsigned char *home = s->journal->map->user + off;
    for (uint64_t at = 0; at < PMS_PAGE; at += PMS_GRANULE) {
        if (memcmp(home + at, image + at, PMS_GRANULE) == 0)
            continue;
        if (!take_log(s, PMS_LINE))
            return false;
        pms_undo_append(s->undo, off + at, PMS_GRANULE);
    }
    return true;
}

static int log_pages(struct showing *s, uint64_t off, uint64_t bytes, bool *fits)
{
    *fits = take_log(s, bytes + bytes / PMS_PAGE * PMS_LINE);
    if (*fits)
        pms_undo_append(s->undo, off, bytes);
    return PMS_OK;
}

static int log_changes(struct showing *s, uint64_t off, uint64_t bytes, uint64_t image, bool *fits,
                       struct pms_error *error)
{
    const struct pms_journal *j = s->journal;
    int status = PMS_OK;
    *fits = true;
    for (uint64_t at = 0; *fits && at < bytes && status == PMS_OK; at += PMS_PAGE) {
        status = pms_ring_read(&j->ring, image + at, j->bounce, PMS_PAGE, error);
        *fits = status == PMS_OK && log_granules(s, off + at, j->bounce);
    }
    return status;
}

static int show_part(struct showing *s, uint64_t page, uint64_t pages, enum pms_region_kind kind,
                     uint64_t image, struct pms_error *error)
{
    const struct pms_journal *j = s->journal;
    uint64_t off = page * PMS_PAGE, bytes = pages * PMS_PAGE;
    bool fits;
    int status = kind == PMS_REGION_DATA ? log_pages(s, off, bytes, &fits)
                                         : log_changes(s, off, bytes, image, &fits, error);
    if (status)
        return status;
    if (!fits)
        return pms_fail(error, PMS_E_CORRUPT, "the held journal record does not fit into the log");
    pms_map_unprotect_surely(j->map, off, bytes);
    return pms_ring_read(&j->ring, image, j->map->user + off, bytes, error);
}

static int show_run(struct showing *s, const struct pms_run *run, uint64_t image,
                    struct pms_error *error)
{
    for (uint64_t done = 0, n; done < run->pages; done += n) {
        enum pms_region_kind kind;
        n = pms_region_pages(s->super, run->page + done, &kind);
        PMS_ASSERT(n > 0); /* recovery checked it */
        n = n < run->pages - done ? n : run->pages - done;
        int status = show_part(s, run->page + done, n, kind, image + done * PMS_PAGE, error);
        if (status)
            return status;
    }
    return PMS_OK;
}

static int show_record(struct showing *s, struct pms_error *error)
{
    struct pms_journal *j = s->journal;
    struct pms_record record;
    struct pms_run_reader reader;
    int status = pms_ring_read(&j->ring, j->head, &record, sizeof record, error);
    if (status)
        return status;
    pms_runs_start(&reader, &j->ring, j->head, &record);
    while (reader.left > 0) {
        struct pms_run run;
        uint64_t image;
        status = pms_runs_next(&reader, &run, &image, error);
        if (!status && !run.home)
            status = show_run(s, &run, image, error);
        if (status)
            return status;
    }
    return PMS_OK;
}

int pms_journal_show_held(struct pms_journal *j, struct pms_undo *u,
                          const struct pms_superblock *super, struct pms_error *error)
{
    struct showing s = {j, u, super, pms_undo_capacity(u)};
    PMS_ASSERT(j->last == j->homed + 1 && u->log.in_memory && pms_undo_entries(u) == 0);
    pms_undo_lock(u);
    int status = show_record(&s, error);
    pms_undo_fence_locked(u);
    pms_undo_unlock(u);
    if (!status && !pms_undo_sound(u, u->tag, super))
        status = pms_fail(error, PMS_E_CORRUPT,
                          "the held journal record changes what no transaction does");
    errno = pms_map_protect(j->map, 0, j->map->bytes);
    return status || !errno ? status : pms_fail_errno(error, "protecting the store's pages");
}
