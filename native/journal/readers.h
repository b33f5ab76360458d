/* Domain file: fork children that read the store.
 *
 * A private page that nobody has stored to is the file's, also in a fork child; when a later
 * commit is written home there, the child would see it. So before a page is written home, each
 * living child whose page it still is gets a copy of its own, made in the child's memory by the
 * owner: through the child's /proc/self/mem, which the child opens and hands over while it is
 * being forked, a byte of the page is read and stored back. What a child sees is the state of
 * the fork, whole, for as long as the owner has the store open.
 *
 * Only pages that are first captured after a fork are the file's in a child and written home
 * later: whatever was captured before is private memory, which fork copies. So nothing needs to
 * wait for a fork. A child of a child is not known here: it may not read. */
#ifndef PMS_JOURNAL_READERS_H
#define PMS_JOURNAL_READERS_H

#include <pthread.h>

#include "seam/map.h"

struct pms_reader;

struct pms_readers {
    pthread_mutex_t lock; /* held from before a fork to after it */
    struct pms_reader *first;
    _Atomic uint32_t count;
};

void pms_readers_open(struct pms_readers *r);
void pms_readers_close(struct pms_readers *r);

/* Around a fork, in this order; the second in the parent, the third in the child.  ERRORS:
 * false: the child cannot be helped to see one state, and must not read. */
void pms_readers_before_fork(struct pms_readers *r, const struct pms_map *map);
void pms_readers_after_fork(struct pms_readers *r);
bool pms_readers_in_child(struct pms_readers *r, const struct pms_map *map);

/* Before pages change at home: no child sees it. Those that do not answer in five seconds, however
 * many they are, must not read, and are told so when they come to ask.  ERRORS: PMS_E_OS: a child
 * has no memory: the pages must not change. */
int pms_readers_keep(struct pms_readers *r, const struct pms_map *map, uint64_t page,
                     uint64_t pages, struct pms_error *error);

#endif
