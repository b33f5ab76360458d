/* The file and its views in memory.
 *
 * user:   the addresses that arrays have. Pages are read-only between captures; they never move.
 * engine: where the engine itself reads and writes. In the byte-addressable domains a second,
 * always writable mapping of
 *         the same file, so that metadata, logs and rollback never touch the user's protections;
 *         in private views (domain
 *         file, mode r) the same as user, and the engine unprotects the pages it writes.
 * home:   reads what the file has. In shared views the same as engine. Memory, and no descriptor:
 *         the thread that answers readers has none of the program's (live/server.h). */
#ifndef PMS_SEAM_MAP_H
#define PMS_SEAM_MAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/layout.h"
#include "seam/persist.h"
#include "base/status.h"

struct pms_footer;

/* Where pages lie that there is no memory for: spill.h. Under the log lock, where it is not atomic.
 */
struct pms_spill {
    int fd, log_fd, folder; /* of pages, of memory; -1: none */
    _Atomic bool on;        /* pages may go there */
    _Atomic bool forking;   /* but not now */
    bool shown;             /* to the child of the last fork: what is stored after it */
    _Atomic uint64_t pages; /* of the user's view, that lie there */
    uint64_t unsent;        /* bytes: perhaps not on the disk */
    int64_t parted;         /* mappings that it makes */
};

struct pms_map {
    int fd;           /* of the mapped file; -1: none, private views begin as zeros */
    bool shared;      /* engine is an alias; stores reach the file */
    bool sync;        /* MAP_SYNC is in force */
    uint64_t bytes;   /* mapped, a multiple of PMS_PAGE */
    uint64_t reserve; /* address space set aside for growth: user never moves */
    unsigned char *user;
    unsigned char *engine;
    unsigned char *home; /* NULL: there is no file */
    /* one bit for each page of the reserve: page of user is PROT_WRITE */
    _Atomic uint64_t *writable;
    /* likewise: it has been, since it was given back. Private views: all others are the file's */
    _Atomic uint64_t *own;
    /* likewise: what was stored there was never committed, and no roll back took it away: it is of
     * no account, and not what the file has */
    _Atomic uint64_t *astray;
    /* likewise: of a page of the process's own: it lies in the spill; of these, it is private */
    _Atomic uint64_t *spilled, *frozen;
    struct pms_spill spill;
    _Atomic int64_t own_pages; /* of the process's own, but for those that lie in the spill */
    _Atomic int64_t told;      /* bytes of these that seam/memory.h knows of */
    bool any_astray;           /* since open */
    struct pms_footer *footer; /* the page behind `bytes`, where it is kept: footer.h */
    uint32_t apart;            /* ranges set apart so far */
    /* mappings that changes of protection have made: under the log lock, as these are */
    int64_t parted;
    struct pms_persist *persist;
};

enum pms_map_how { PMS_MAP_SHARED, PMS_MAP_SYNC, PMS_MAP_PRIVATE };

/* Maps [0, bytes) of fd; reserves max(reserve, bytes), less if the system refuses that much.
 * ERRORS: PMS_E_OS; PMS_E_UNSUPPORTED when MAP_SYNC is not to be had. */
int pms_map_open(struct pms_map *m, int fd, uint64_t bytes, uint64_t reserve, enum pms_map_how how,
                 struct pms_persist *persist, struct pms_error *error);

/* Extends all views to bytes, if they are smaller. Nothing moves. ERRORS: PMS_E_OS, PMS_E_FULL
 * (beyond the reserve). */
int pms_map_grow(struct pms_map *m, uint64_t bytes, struct pms_error *error);

void pms_map_close(struct pms_map *m); /* unmaps everything */

/* Changes protection of whole pages of the user's view and the bits that say so.
 * Async-signal-safe. Returns 0 or errno (ENOMEM: too many mappings). */
int pms_map_unprotect(struct pms_map *m, uint64_t off, uint64_t bytes);
int pms_map_protect(struct pms_map *m, uint64_t off, uint64_t bytes);

/* What a reader has not loaded: whoever reads it dies of it, rather than take it for something.
 * Returns 0 or errno. */
int pms_map_hide(struct pms_map *m);

/* Unprotects a range, whatever the mappings: when they run out (mappings.h), everything is
 * protected first, which makes one mapping of all that is not set apart, and pages that were
 * writable fault again. */
void pms_map_unprotect_surely(struct pms_map *m, uint64_t off, uint64_t bytes);
bool pms_map_all_writable(const struct pms_map *m, uint64_t off, uint64_t bytes);

/* The same, of a range that was captured and will be stored to all over. true: some of its pages
 * were the file's (private views), and are better copied by pms_map_copy_ahead than one by one
 * by first stores: see map.c. Both are async-signal-safe; the second one changes nothing that
 * can be read.
 * REQUIRES: the log lock (the first), as all changes of protection do but those of pages that
 * nobody else stores to. */
bool pms_map_take(struct pms_map *m, uint64_t off, uint64_t bytes);
void pms_map_copy_ahead(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Whether pages from off on are still the file's: none of them was ever writable, and what they
 * show is what the file has (private views). *run: so many bytes, of these, are alike. */
bool pms_map_foreign(const struct pms_map *m, uint64_t off, uint64_t bytes, uint64_t *run);

/* The file's they are again: what was stored there is gone. REQUIRES: the log lock; they are
 * protected. */
void pms_map_disown(struct pms_map *m, uint64_t off, uint64_t bytes);

/* The same, of pages that others may be reading: they find the same bytes, as the file has them.
 * false: some have not changed, as they are locked in memory, or no mapping is left. REQUIRES: as
 * above. */
bool pms_map_give_back(struct pms_map *m, uint64_t off, uint64_t bytes);

/* The first page from `page` on, below `end`, that is not the file's; `end`: there is none. Private
 * views. */
uint64_t pms_map_next_own(const struct pms_map *m, uint64_t page, uint64_t end);
/* Of pages of the process's own that take memory: not of those that lie in the spill. */
uint64_t pms_map_own_bytes(const struct pms_map *m);
/* Tells seam/memory.h; untell: none. Async-signal-safe. */
void pms_map_tell(struct pms_map *m);
void pms_map_untell(struct pms_map *m);
/* Whether so many bytes more, with those `beside` the pages of stores, would be more than five
 * eighths of memory, and may go to the spill. Async-signal-safe. */
bool pms_map_is_short(struct pms_map *m, uint64_t beside, uint64_t bytes);
bool pms_map_is_spilled(const struct pms_map *m, uint64_t page);

/* Pages go astray, or are found again. REQUIRES: the log lock. */
void pms_map_set_astray(struct pms_map *m, uint64_t off, uint64_t bytes, bool on);
bool pms_map_is_astray(const struct pms_map *m, uint64_t page);

/* What the file has of a range, whatever the views show. Returns errno (EIO: it ends early). */
int pms_map_read_home(const struct pms_map *m, uint64_t off, uint64_t bytes, void *into);

/* Asks for huge pages behind the whole ones in a range (tmpfs, Linux 6.1): protection changes
 * cost 512 times less, and fewer address translations miss. Advice: where the system has none to
 * give nothing happens. */
void pms_map_prefer_huge(struct pms_map *m, uint64_t off, uint64_t bytes);

/* The range will change its protection as a whole, twice in every transaction. The kernel joins
 * it with its neighbours whenever they are protected alike, and parts them again, which costs
 * more than the change itself (5 us to 2.5 for 6 MiB on huge pages); from here on it keeps it a
 * mapping of its own. For few ranges: each is one or two of the mappings that a process may
 * have. */
void pms_map_set_apart(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Whether a fault on a page that is not in memory reads its neighbours too: the system reads up
 * to megabytes around it, and the fault waits. Advice, as above. */
void pms_map_read_around(struct pms_map *m, bool on);

/* An emulator of another CPU's programs (qemu-user) takes any advice, also one that there is not,
 * and does nothing. Async-signal-safe. */
bool pms_map_takes_any_advice(void);

/* ---- after the store ----
 *
 * What outlives its store: a range of a user's view becomes private to the process, whole, at the
 * same address, and writable: no store into it reaches the file any more. What nobody has stored to
 * is still the file's, until pms_map_own has copied it. Returns 0 or errno (ENOMEM): then it is
 * what it was. REQUIRES: the log lock; all pages protected. */
int pms_map_part(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Copies what is still the file's of a range that was parted, by all cores; others may store there
 * meanwhile. Returns 0 or errno (ENOMEM): some of it may still be the file's. What cannot be read,
 * as the file was cut off or its disk fails, is passed over. */
int pms_map_own(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Memory that nobody looks at any more, of a range that was parted. */
void pms_map_release(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Whoever looks there from now on finds nothing, and dies of it. Its memory is given back. */
void pms_map_forgo(struct pms_map *m, uint64_t off, uint64_t bytes);

/* Without the engine's view, and the file's. REQUIRES: the engine is closed. */
void pms_map_forgo_engine(struct pms_map *m);

/* the engine's address of a byte */
static inline void *pms_map_at(const struct pms_map *m, uint64_t off) { return m->engine + off; }
static inline uint64_t pms_map_offset(const struct pms_map *m, const void *addr)
{
    return (uint64_t)((const unsigned char *)addr - m->user);
}

#endif
