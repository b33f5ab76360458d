/* What a reader sees: the last commit as of its open, in private memory, while others may write.
 *
 * Nothing is shown that was not loaded: the root, the page tables and all blocks of the engine's
 * when the store is opened, and an array when it is first asked for. So a sight never changes, and
 * what is loaded stays, whatever becomes of the store.
 *
 * of the writer:  pages come from the process that has the store open (server.h), as of a snapshot
 *                 there.
 * of the file:    nobody had it open. Pages are the file's, laid under what recovery put into
 *                 private ones; they are copied, and then the session record is looked at: who
 *                 opens the store for writing changes it before anything that a reader may load.
 *
 * Either may be lost: the writer gave the snapshot up or ended; somebody opened the file. Then
 * nothing more can be loaded (PMS_E_LOST), and a new one has to be opened. */
#ifndef PMS_LIVE_SIGHT_H
#define PMS_LIVE_SIGHT_H

#include "live/client.h"
#include "log/undo.h"

enum pms_sight_of {
    PMS_SIGHT_NONE, /* the store is open for writing, or for reading under its lock */
    PMS_SIGHT_OF_FILE,
    PMS_SIGHT_OF_WRITER,
};

struct pms_sight {
    enum pms_sight_of of;
    bool lost;
    bool silent;                /* because the writer does not answer in time */
    bool interrupted;           /* by a signal: the last call may be made again */
    int fd;                     /* of the store */
    struct pms_client client;   /* of the writer */
    struct pms_session session; /* of the file */
    uint64_t *loaded;           /* a bit for each page */
    uint64_t pages;
};

/* Asks the process that opened the store for writing, as its session record says.
 * ERRORS: PMS_E_LOCKED: nobody hears there; PMS_E_OS. */
int pms_sight_connect(struct pms_sight *v, int fd, const struct pms_session *session,
                      struct pms_error *error);

/* Pins the last commit at the writer, and tells its superblock, which is checked. keep: as much
 * as the whole state is kept for it there.  ERRORS: PMS_E_LOST,
 * PMS_E_LOCKED, PMS_E_CORRUPT, PMS_E_OS with EINTR. */
int pms_sight_pin(struct pms_sight *v, bool keep, struct pms_superblock *super,
                  struct pms_error *error);

/* Once the map is there. ERRORS: PMS_E_OS. */
int pms_sight_begin(struct pms_sight *v, struct pms_map *map, struct pms_error *error);

/* Has the pages of these ranges in private memory; those that are there stay as they are. Nothing
 * happens where there is none. REQUIRES: the operation lock, or that nobody else knows the
 * store. ERRORS: PMS_E_LOST, PMS_E_LOCKED: some of them hold anything, and no more is loaded;
 * PMS_E_OS with EINTR: a signal came, and the same may be asked for again. */
int pms_sight_load(struct pms_sight *v, struct pms_undo *u, struct pms_map *map,
                   const struct pms_part *range, uint64_t count, struct pms_error *error);

/* Whether something was, or may have been, committed since: then a new one tells. epoch: of this
 * one. REQUIRES: the operation lock. */
bool pms_sight_is_old(struct pms_sight *v, uint64_t epoch);

void pms_sight_close(struct pms_sight *v);

#endif
