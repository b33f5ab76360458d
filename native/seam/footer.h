/* The file's last page, behind all that the superblock counts: how far the writer had come.
 *
 * A copy of a store that was open may be torn: whoever copies a file reads page after page,
 * while the writer goes on. What is read first says which transaction ran then (the anchor; the
 * journal's last record). What is read last is this page. If no store of a later transaction had
 * been let into the data by then, and no entry had been added to the log since it was read, then
 * the copy is the state of its first moment, and recovery brings it to the last commit. Else it
 * is refused.
 *
 * No part of the state: nothing of it is written back or synced, a store without it opens, and
 * only copies are held against it. That it is kept at all stands in the session record. It holds
 * for what reads a file from its beginning to its end: cp, scp, rsync, tar, shutil.
 *
 * It also says how much of the logs is backed, for whoever opens a store that was left open. */
#ifndef PMS_SEAM_FOOTER_H
#define PMS_SEAM_FOOTER_H

#include "seam/map.h"
#include "base/quiet.h"

struct pms_footer {
    uint64_t magic;
    _Atomic uint64_t word;   /* transaction (its low bits) and number of its entries */
    _Atomic uint64_t backed; /* of the logs, as pms_backing_known tells; 0: not known */
};

#define PMS_FOOTER_ENTRY_BITS 24u
/* for entries: the transaction is over, or has more than can be counted */
#define PMS_FOOTER_ALL ((1ull << PMS_FOOTER_ENTRY_BITS) - 1)

static inline uint64_t pms_footer_pack(uint64_t tx, uint64_t entries)
{
    return tx << PMS_FOOTER_ENTRY_BITS | (entries < PMS_FOOTER_ALL ? entries : PMS_FOOTER_ALL);
}

/* From here on data may hold what transaction tx stores to the targets of its first entries.
 * REQUIRES: the log lock; the entries are durable, no target is stored to yet.  CRASH: the old
 * word or the new one. */
static inline void pms_footer_note(const struct pms_map *m, uint64_t tx, uint64_t entries)
{
    if (!m->footer)
        return;
    atomic_store_explicit(&m->footer->word, pms_footer_pack(tx, entries), memory_order_relaxed);
    pms_store_fence(); /* the word, before stores to the targets: to whoever reads the file */
}

/* Domain file: images of all transactions up to tx are on their way home, and what those freed
 * may be overwritten. Two threads say so, the one that commits and the journal's.  REQUIRES:
 * their records are durable. */
static inline void pms_footer_raise(const struct pms_map *m, uint64_t tx)
{
    if (!m->footer)
        return;
    uint64_t word = atomic_load_explicit(&m->footer->word, memory_order_relaxed),
             next = pms_footer_pack(tx, PMS_FOOTER_ALL);
    while ((int64_t)(next - word) > 0 &&
           !atomic_compare_exchange_weak_explicit(&m->footer->word, &word, next,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
    pms_store_fence(); /* the word, before the pages that are written home */
}

/* Reserves the page behind file_bytes.  ERRORS: PMS_E_FULL, PMS_E_OS. */
int pms_footer_reserve(int fd, uint64_t file_bytes, struct pms_error *error);

/* Keeps the page from now on, as if noted; without memory for its mapping it says that it is not
 * kept. REQUIRES: reserved behind m->bytes. */
void pms_footer_begin(struct pms_map *m, uint64_t tx, uint64_t entries);

/* Before the file grows over it: from here on until the next begin a copy is refused. REQUIRES:
 * the log lock; no journal at work. */
void pms_footer_end(struct pms_map *m);

/* Unmaps it. REQUIRES: nobody notes any more. */
void pms_footer_close(struct pms_map *m);

/* What a copy was found to be: recovery says how far its logs reach. entries: PMS_FOOTER_ALL in
 * domain file, else those of the log that are valid. allowed: it is of one moment. A file that
 * ends before its footer is believed: a file that somebody made byte by byte (an image) is not a
 * copy of a running store. */
bool pms_footer_allows(int fd, uint64_t file_bytes, uint64_t tx, uint64_t entries);

/* What the last writer said of its logs; 0: nothing. */
uint64_t pms_footer_backed(int fd, uint64_t file_bytes);

/* Where it is said; NULL: nowhere. */
static inline _Atomic uint64_t *pms_footer_told(const struct pms_map *m)
{
    return m->footer ? &m->footer->backed : NULL;
}

#endif
