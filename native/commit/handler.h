/* The SIGSEGV handler of the process: finds the store that an address belongs to, chains the
 * rest. */
#ifndef PMS_COMMIT_HANDLER_H
#define PMS_COMMIT_HANDLER_H

#include "seam/map.h"

#define PMS_MAX_STORES 64u /* open at once in one process */

/* A store whose user's view is watched. */
struct pms_watched {
    struct pms_map *map;
    /* A store by user code into that offset of the view faulted. true: it may be tried again;
     * false: not a place where users write. Async-signal-safe: no memory, no library lock. */
    bool (*fault)(struct pms_watched *w, uint64_t off);
    bool read_only;
    bool full;          /* why not: the disk has no room for a pre-image. Under the log lock */
    _Atomic int forked; /* this process is a child of the store's owner */
    /* and what it would read may be of several commits: no page can be read */
    _Atomic int unreadable;
};

bool pms_handler_register(struct pms_watched *w);   /* false: too many */
void pms_handler_unregister(struct pms_watched *w); /* no handler is inside w afterwards */

/* Puts the handler first again, chained to the one it finds, if another library took the signal. */
void pms_handler_install(void);

/* Around a fork, in the parent: calls fn for every open store; none is taken from the list in
 * between, and after it the same ones come. */
void pms_handler_before_fork(void (*fn)(struct pms_watched *w));
void pms_handler_after_fork(void (*fn)(struct pms_watched *w));
/* In a fork child: calls fn for every open store. prepared: it was one of those before the fork. */
void pms_handler_after_fork_in_child(void (*fn)(struct pms_watched *w, bool prepared));

#endif
