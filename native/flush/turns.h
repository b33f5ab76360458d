/* Threads that take turns at batches, so that copying and checksums of some go on while the disk
 * is busy with others. */
#ifndef PMS_FLUSH_TURNS_H
#define PMS_FLUSH_TURNS_H

#include <stdint.h>

#include "base/lock.h"
#include "base/status.h"
#include "flush/transfer.h"

#define PMS_TURNS_BATCH (4ull << 20) /* bytes of one read or write */
/* two copy and check while the disk has two requests to choose from */
#define PMS_TURNS_THREADS 4u

/* What one call has to do: the first part of the caller's own. `carry` moves items i to i + n
 * through a buffer of batch * item_bytes; `together` says how many from i on, of at most `most`,
 * can be carried at once. */
struct pms_turns {
    int (*carry)(struct pms_turns *t, uint64_t i, uint64_t n, unsigned char *buffer,
                 struct pms_error *error);
    uint64_t (*together)(const struct pms_turns *t, uint64_t i, uint64_t most);
    uint64_t count, batch, item_bytes;
    struct pms_transfer *transfer;
    struct pms_lock lock; /* of what follows */
    uint64_t next;        /* first item that nobody has taken */
    int status;           /* of the first that failed */
    struct pms_error error;
};

/* Carries all items. ERRORS: what `carry` says first; PMS_E_OS: no memory. */
int pms_turns_run(struct pms_turns *t, struct pms_error *error);

/* Counts, keeps to the rate, and stops when told to. ERRORS: PMS_E_STATE: cancelled. */
int pms_turns_proceed(struct pms_transfer *transfer, uint64_t bytes, struct pms_error *error);

#endif
