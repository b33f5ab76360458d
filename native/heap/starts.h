/* Where descriptors start: a bitmap of pages with summaries. One writer; readers need no lock: what
 * lies between the start of a live extent and its end is never written, so a search from there
 * finds its start whatever goes on elsewhere. */
#ifndef PMS_HEAP_STARTS_H
#define PMS_HEAP_STARTS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PMS_NO_PAGE UINT64_MAX

#define PMS_STARTS_LEVELS 7u
struct pms_starts {
    /* a bit of level n+1: a word of level n that is not zero */
    _Atomic uint64_t *level[PMS_STARTS_LEVELS];
    unsigned levels;
    uint64_t pages;
    void *memory;
    size_t memory_bytes;
};

int pms_starts_open(struct pms_starts *s, uint64_t pages); /* 0 or -1 with errno */
void pms_starts_close(struct pms_starts *s);
void pms_starts_set(struct pms_starts *s, uint64_t page);
void pms_starts_clear(struct pms_starts *s, uint64_t from, uint64_t to); /* all in [from, to) */
bool pms_starts_has(const struct pms_starts *s, uint64_t page);
/* last at or before page. Async-signal-safe */
uint64_t pms_starts_before(const struct pms_starts *s, uint64_t page);
uint64_t pms_starts_after(const struct pms_starts *s, uint64_t page); /* first at or after page */

#endif
