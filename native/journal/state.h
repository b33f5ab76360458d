/* The open journal: shared by the committing side (journal.c) and the writer thread
 * (journal/home.c).
 *
 * One caller at a time commits, drains or closes. It owns `tail`, `last`, `chain` and the record
 * being built, and changes them under the mutex; the writer reads them there. `head`, `homed`
 * and the anchor are the writer's, and the caller's while the journal is empty and the writer
 * therefore idle. User memory is never touched under the mutex. */
#ifndef PMS_JOURNAL_STATE_H
#define PMS_JOURNAL_STATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "journal/journal.h"
#include "journal/pieces.h"
#include "journal/ring.h"

#define PMS_JOURNAL_IDLE_MS 200 /* a journal quiet for so long is written home */

struct pms_journal {
    struct pms_map *map;
    struct pms_ring ring; /* changed only while empty; its descriptors are the map's and the next */
    int direct;           /* -1: the file system has no O_DIRECT */
    /* The writer's own open file: the kernel reports a write-back error once to each open file,
     * so that with a shared one the sync of either side could swallow the other's. */
    int home_fd;
    struct pms_persist home_persist;

    /* For each page of the map's reserve: transaction << 1 of its newest journaled image, or
     * transaction << 1 | 1 if it was written straight home since. Set after the sync that made
     * it durable. Untouched parts cost nothing. */
    _Atomic uint64_t *marks;
    struct pms_sent *sent; /* likewise: see plan.h */
    struct pms_readers readers;
    /* header and runs being built: room for one run for each page of the reserve */
    struct pms_record *record;
    struct pms_piece *piece; /* each has a page at least */
    size_t marks_bytes, sent_bytes, record_bytes, piece_bytes;
    unsigned char *bounce; /* PMS_PIECES_BYTES: copies of pages, as they are written */
    unsigned char *chunk;  /* PMS_JOURNAL_CHUNK: the writer's */

    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t work; /* for the writer */
    pthread_cond_t room; /* for the caller: the head moved, or an error is kept */

    /* Under the mutex. */
    uint64_t head, tail;  /* positions: oldest record not known to be home; where the next goes */
    uint64_t homed, last; /* transactions: anchor's; last durable */
    uint32_t chain;       /* crc of the record of `last` */
    /* Records before it may go home: all, or all but the last one, which is held. */
    struct pms_between loose;
    bool letting_go; /* the last one shall: once the anchor says so, durably */
    struct pms_janchor anchor;
    bool stop, wanted; /* wanted: do not wait for half a ring */
    /* `error` is the writer's, not yet returned to a caller; the writer rests until it is */
    bool failed;
    struct pms_error error;
    struct pms_journal_stats stats;

    /* The caller's own. */
    /* a record that never counted lies at the tail, or a reset failed: start a new chain first */
    bool rechain;
    bool early; /* some pages were written straight home before their commit, since open */
};

static inline struct pms_run *pms_journal_runs(struct pms_journal *journal)
{
    return (struct pms_run *)(void *)(journal->record + 1);
}

#define PMS_JOURNAL_DIRECT_PAGES 16u

/* What a run is written home through. Long ones pass the page cache by: it holds pages that were
 * read by the first store into a private mapping one by one, and each of them costs every later
 * write and sync of the file a microsecond. Short ones gather there until the sync: one by one
 * each would wait for the disk. */
static inline int pms_journal_fd_of(const struct pms_journal *journal, uint64_t pages, int buffered)
{
    return journal->direct >= 0 && pages >= PMS_JOURNAL_DIRECT_PAGES ? journal->direct : buffered;
}

static inline void pms_journal_mark(struct pms_journal *journal, const struct pms_run *run,
                                    uint64_t tx)
{
    for (uint64_t page = run->page; page < run->page + run->pages; page++)
        atomic_store_explicit(&journal->marks[page], tx << 1 | run->home, memory_order_relaxed);
}

/* The record of the transaction behind the anchor, which is held, becomes the journal's last one.
 * ERRORS: PMS_E_OS, PMS_E_CORRUPT. */
int pms_journal_load_held(struct pms_journal *journal, struct pms_error *error);

/* The writer's thread. */
void *pms_journal_home_main(void *journal);

#endif
