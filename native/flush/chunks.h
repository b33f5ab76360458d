/* Between snapshots and the files of a tier: which chunks of a store there are, copied
 * out with their checksums, and back into a new store. A chunk is a stretch of the file of a
 * fixed size, a multiple of the page. Formats of a tier are Python's business (pmstore/tiers/);
 * bytes pass through here, on threads of the caller's, without the interpreter. */
#ifndef PMS_FLUSH_CHUNKS_H
#define PMS_FLUSH_CHUNKS_H

#include "base/layout.h"
#include "commit/pool.h"
#include "flush/transfer.h"
#include "heap/super.h"

struct pms_snapshot;

/* Pins the last commit. bound_bytes: of pages kept for it (0: a quarter of what is in use, 4 MiB
 * at least); max_wait_ns: how long a commit waits at the bound before the snapshot is given up
 * (< 0: for ever).  ERRORS: PMS_E_CLOSED, PMS_E_FORKED, PMS_E_OS. */
int pms_snapshot_begin(struct pms_pool *pool, uint64_t bound_bytes, int64_t max_wait_ns,
                       struct pms_snapshot **snapshot, struct pms_error *error);
void pms_snapshot_end(struct pms_pool *pool, struct pms_snapshot *snapshot);

struct pms_snapshot_info {
    uint64_t epoch; /* of the pinned commit */
    uint64_t tag;   /* `since` of a later snapshot, in the same opening */
    uint64_t file_bytes;
    uint64_t kept_bytes, peak_bytes, bound_bytes; /* pages kept for open snapshots */
    uint64_t waits, wait_ns;                      /* of commits, for room */
    uint8_t super[PMS_PAGE];                      /* what makes a store of the chunks again */
};
int pms_snapshot_info(struct pms_snapshot *snapshot, struct pms_snapshot_info *info,
                      struct pms_error *error);

/* state[i] of chunk i: 0 nothing in it; PMS_CHUNK_LIVE; with PMS_CHUNK_CHANGED if a transaction
 * since `since` may have changed it (since 0: all). Chunks with nothing in them are not kept
 * from now on: call it first, once.  ERRORS: PMS_E_CORRUPT (a page table). */
#define PMS_CHUNK_LIVE 1
#define PMS_CHUNK_CHANGED 2
int pms_snapshot_chunks(struct pms_snapshot *snapshot, uint64_t since, uint64_t chunk_bytes,
                        uint8_t *state, uint64_t count, struct pms_error *error);

/* A new store in an empty file: room (all of it reads as zeros) and the chunks, then the head,
 * which makes it a store. super: from struct pms_snapshot_info, maybe from an enemy: _begin
 * checks it. Durable after _seal. transfer: only to cancel. Room is made by _reserve, while
 * chunks are written, or, where the file system cannot (*reserved = 0), by _allocate, while
 * nobody writes. _reserve makes what a new store has: logs stay holes, which an open for writing
 * backs as far as I5 asks. _space: these stretches, and how many. */
int pms_restore_begin(const uint8_t *super, uint64_t *file_bytes, struct pms_error *error);
uint32_t pms_restore_space(const uint8_t *super, struct pms_stretch *stretch);
int pms_restore_reserve(int fd, const uint8_t *super, int *reserved,
                        const struct pms_transfer *transfer, struct pms_error *error);
int pms_restore_allocate(int fd, uint64_t file_bytes, const struct pms_transfer *transfer,
                         struct pms_error *error);
int pms_restore_seal(int fd, const uint8_t *super, int domain, struct pms_error *error);

#endif
