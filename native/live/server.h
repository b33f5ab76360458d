/* The writer's side of readers in other processes. One thread, the *porter*, hears at the doors of
 * all stores that are open for writing. A store that is asked gets an *attendant*: a thread that
 * answers for it alone, until nobody asks any more. So a store that is held up, by a long first
 * step or a disk that does not answer, is in no way of another one's readers: what an attendant
 * waits for is its store's alone, and the porter waits for no store.
 *
 * A reader's version is a snapshot (log/snapshot.h) that never makes a commit wait: where its
 * bound is reached it is given up, and the reader is told. While nobody reads the porter sleeps in
 * the kernel, and commits know nothing of it. An attendant holds the log lock as any snapshot's
 * reader does, for moments; it never takes the operation lock; and it waits for no reader: an
 * answer that one does not take is dropped.
 *
 * The program never waits for another process: a store is withdrawn under a lock that its attendant
 * holds over work on this store alone.
 *
 * The threads have a table of descriptors of their own (seam/holder.h says why), and take no
 * signals. Where the system allows no such table nobody is answered. */
#ifndef PMS_LIVE_SERVER_H
#define PMS_LIVE_SERVER_H

#include "live/wire.h"
#include "log/undo.h"

struct pms_door;

/* A store that is open for writing. The caller's memory, until withdrawn. */
struct pms_served {
    struct pms_undo *undo;
    const struct pms_superblock *super; /* changed under the log lock */
    const _Atomic uint64_t *epoch;      /* of the last commit */
    uint64_t device, inode;
    int64_t opened_ns;
    uint8_t secret[PMS_WIRE_KEY]; /* of the session record */
    struct pms_door *door;        /* NULL: not offered */
    uint64_t process;             /* pms_process_generation() where it was */
};

/* Readers are answered from now on, or from a moment later on. Where that cannot be they are not:
 * the store is as good. */
void pms_serve(struct pms_served *s);

/* From now on no reader is, and nothing of the store is looked at. REQUIRES: not the log lock. */
void pms_serve_no_more(struct pms_served *s);

void pms_serve_after_fork_in_child(void);

#endif
