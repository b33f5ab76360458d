/* Domain file: which of a commit's pages go home and which into its record, and how both are
 * written. Nothing of it counts before the commit's sync (journal.c). */
#include "journal/plan.h"

#include <errno.h>

#include "base/checksum.h"
#include "journal/state.h"
#include "seam/footer.h"

#define CHUNK_PAGES (PMS_JOURNAL_CHUNK / PMS_PAGE)

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
    if (!j->early)
        return most;
    while (n < most && !begins_piece(j, page + n))
        n++;
    return n;
}

/* ---- pieces ---- */

struct listing {
    struct pms_journal *journal;
    const struct pms_run *runs;
    uint64_t most; /* pages of a piece */
    uint64_t count;
};

static struct pms_piece *add_piece(struct listing *l, enum pms_piece_kind kind, uint32_t run,
                                   uint64_t done, uint64_t pages)
{
    struct pms_piece *piece = &l->journal->piece[l->count++];
    *piece = (struct pms_piece){.kind = kind, .run = run, .done = done, .pages = pages};
    return piece;
}

static void list_home(struct listing *l, uint32_t i)
{
    struct pms_journal *j = l->journal;
    const struct pms_run *run = &l->runs[i];
    for (uint64_t done = 0, n; done < run->pages; done += n) {
        uint64_t page = run->page + done, left = run->pages - done;
        n = sent_piece(j, page, left);
        if (n) {
            add_piece(l, PMS_PIECE_SENT, i, done, n)->crc = j->sent[page].crc;
            continue;
        }
        n = up_to_piece(j, page, left < l->most ? left : l->most);
        bool there = j->early && are_files(j, page, n); /* parts of pieces */
        if (!there)
            forget_sent(j, page, n);
        add_piece(l, there ? PMS_PIECE_THERE : PMS_PIECE_HOME, i, done, n);
    }
}

/* They lie end to end, whatever runs they are of. */
static void list_images(struct listing *l)
{
    const struct pms_record *record = l->journal->record;
    uint64_t position = l->journal->tail + pms_record_head(record->run_count), n;
    struct pms_piece *piece = NULL;
    for (uint32_t i = 0; i < record->run_count; i++)
        for (uint64_t done = 0; !l->runs[i].home && done < l->runs[i].pages; done += n) {
            if (!piece || piece->pages == l->most) {
                piece = add_piece(l, PMS_PIECE_IMAGES, i, done, 0);
                piece->position = position;
            }
            uint64_t room = l->most - piece->pages, left = l->runs[i].pages - done;
            n = left < room ? left : room;
            piece->pages += n;
            position += n * PMS_PAGE;
        }
}

int pms_plan_write(const struct pms_plan *plan, const struct pms_change *change,
                   struct pms_error *error)
{
    struct pms_journal *j = plan->journal;
    uint64_t most = pms_pieces_most(plan->image_bytes + plan->straight_bytes);
    struct listing l = {j, pms_journal_runs(j), most, 0};
    /* straight home goes what the transactions before freed, or may have */
    pms_footer_raise(j->map, change->tx - 1);
    for (uint32_t i = 0; i < j->record->run_count; i++) {
        const struct pms_run *run = &l.runs[i];
        int status = run->home ? pms_readers_keep(&j->readers, j->map, run->page, run->pages, error)
                               : PMS_OK;
        if (status)
            return status;
        if (run->home)
            list_home(&l, i);
    }
    list_images(&l);
    return pms_pieces_write(j, change, pms_journal_runs(j), l.count, most, error);
}

/* ---- before the commit ---- */

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
    struct listing l = {j, &run, CHUNK_PAGES, 0};
    PMS_ASSERT(pages <= CHUNK_PAGES);
    if (!pms_plan_begin_early(j, homed, page, pages) ||
        pms_readers_keep(&j->readers, j->map, page, pages, NULL) != PMS_OK)
        return false;
    list_home(&l, 0);
    if (pms_pieces_write(j, NULL, &run, l.count, l.most, NULL) != PMS_OK)
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
