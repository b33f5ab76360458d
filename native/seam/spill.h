/* Domain file: what a transaction takes beyond the memory that there is.
 *
 * A page that was stored to is the process's own, and before its commit there is no place of the
 * store's that it could be written to. So where memory is short (pms_map_is_short), pages that are
 * about to become the process's own are copied into a file that has no name, beside the store, at
 * the same offset, and are mapped from there, shared. They are the process's own like any others:
 * captured, protected, put back, committed. But the system writes them to that file and drops them
 * from memory as it needs to, and reads them when somebody looks. The log in memory goes the same
 * way.
 *
 * The store's file knows nothing of it: until the commit all is as ever, and the file without a
 * name ends with the process. Behind the commit the pages become the store's file's again
 * (commit/relief.h).
 *
 * A fork child sees what it saw: before a fork the pages become private, which copies nothing, and
 * the next ones go to another file. What is stored there after it takes memory.
 *
 * Where it cannot be had (no O_TMPFILE, no room on the disk, few mappings left, pages that are
 * locked in memory) pages take memory as ever. */
#ifndef PMS_SEAM_SPILL_H
#define PMS_SEAM_SPILL_H

#include "seam/map.h"

#define PMS_SPILL_LEAST (64u << 10) /* less takes memory: each run may be a mapping */

/* At open and at close: from begin on, until the end, pages may go there. What lies there stays
 * mapped. Neither fails. */
void pms_spill_begin(struct pms_map *m);
void pms_spill_end(struct pms_map *m);

/* All of these: REQUIRES the log lock. Async-signal-safe. */

/* Moves pages there that are the file's: they show the same, and are protected. Next they become
 * writable. false: they are what they were. */
bool pms_spill_pages(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Lays memory there whose content is of no account: base + off, for the places from off on. */
bool pms_spill_memory(struct pms_map *m, unsigned char *base, uint64_t off, uint64_t bytes);

/* Pages that lie there show the store's file again. REQUIRES: all of them do; they are protected.
 * Returns 0 or errno: nothing has changed. */
int pms_spill_back(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Pages that lie there become private, and their file without a name is left to them. Returns 0 or
 * errno: some still are not. */
int pms_spill_freeze(struct pms_map *m);

/* Around a fork, without the log lock: in between nothing goes there. What lies there already is
 * frozen in between. */
void pms_spill_before_fork(struct pms_map *m);
void pms_spill_after_fork(struct pms_map *m);
void pms_spill_after_fork_in_child(struct pms_map *m);

/* Whether what lies there is what was stored: else the disk has lost some of it, and nothing more
 * is committed (failed_syncs). What is read there after this was asked is not meant. */
bool pms_spill_is_whole(struct pms_map *m);

/* Files without a name where nothing lies give their room back. memory: none does. */
void pms_spill_forget(struct pms_map *m, bool memory);

/* Whether something may lie there. */
static inline bool pms_spill_any(const struct pms_map *m)
{
    return m->spill.fd >= 0 || m->spill.log_fd >= 0;
}

static inline uint64_t pms_spill_bytes(const struct pms_map *m)
{
    return atomic_load(&m->spill.pages) * PMS_PAGE;
}

#endif
