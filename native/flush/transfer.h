/* Chunks of a snapshot into a file, and pieces of a file into another, each with its CRC-32C.
 * By several threads (turns.h). */
#ifndef PMS_FLUSH_TRANSFER_H
#define PMS_FLUSH_TRANSFER_H

#include <stdint.h>

#include "base/status.h"

struct pms_filling;
struct pms_snapshot;

/* Shared by the threads of one transfer. Written by any; read with care for nothing but
 * progress. */
struct pms_transfer {
    uint64_t done_bytes;
    uint64_t spared_bytes;     /* of these, what was not written: see pms_snapshot_write */
    uint64_t bytes_per_second; /* that are written, of all threads together; 0: no limit */
    uint64_t started_ns;       /* 0: set by the first thread */
    int32_t cancel;            /* not 0: threads stop, PMS_E_STATE */
    int32_t reserved;
};

/* Copies whole pages as of the snapshot (see native/log/snapshot.h). release: and gives them up.
 */
int pms_snapshot_take(struct pms_snapshot *snapshot, uint64_t off, uint64_t bytes, void *dst,
                      int release, struct pms_error *error);
int pms_snapshot_give_up(struct pms_snapshot *snapshot, uint64_t off, uint64_t bytes,
                         struct pms_error *error);

/* Writes chunks, as of the snapshot, one after another into fd from `at` on, and gives them up
 * when they are written. crc[i] = CRC-32C of chunk i. fd may be open with O_DIRECT. The kernel
 * reads untouched chunks from the store itself: one that changes meanwhile is written once more,
 * which counts once in `transfer`; what it read while the store closed is anything, and the file
 * is not to be used.
 * known: NULL, or for each chunk a CRC-32C, or -1. One that has it now is not written and not
 * given up: the caller finds out whether it is the same chunk. The others are written in any
 * order; position[i] is where, or PMS_CHUNK_SPARED.
 * ERRORS: PMS_E_OS, PMS_E_FULL: of the file; PMS_E_STATE: cancelled, or given up; PMS_E_CLOSED;
 * PMS_E_INVALID: no whole pages. */
int pms_snapshot_write(struct pms_snapshot *snapshot, int fd, uint64_t chunk_bytes,
                       const uint64_t *chunk, uint64_t count, uint64_t at, uint32_t *crc,
                       const int64_t *known, uint64_t *position, struct pms_transfer *transfer,
                       struct pms_error *error);
#define PMS_CHUNK_SPARED UINT64_MAX

/* Copies `count` pieces of at most piece_bytes from in_fd to out_fd, each checked against its
 * CRC-32C (of piece_bytes in the source; the last bytes may lie past out_end and are dropped). A
 * piece that fails its check, or is not all there: PMS_E_CORRUPT, *bad = its index. Both may be
 * open with O_DIRECT, if all offsets and sizes are whole pages. fill: of out_fd
 * (native/flush/filling.h), or NULL: pieces are read to where they belong, and checked there. */
int pms_transfer_copy(int in_fd, const uint64_t *from, int out_fd, struct pms_filling *fill,
                      const uint64_t *to, const uint32_t *crc, uint64_t count, uint64_t piece_bytes,
                      uint64_t out_end, uint64_t *bad, struct pms_transfer *transfer,
                      struct pms_error *error);

/* Reads the pages of a mapping that are not in memory, before somebody looks at them: by faults
 * one comes after the other. Advice: nothing where the system cannot (before Linux 5.14), or the
 * disk. */
void pms_transfer_read_ahead(const void *at, uint64_t bytes);

/* Room for a file that is about to be written: in few extents, and an error now if there is
 * none. Nothing where the file system cannot.
 * ERRORS: PMS_E_OS, PMS_E_FULL. */
int pms_transfer_reserve(int fd, uint64_t bytes, struct pms_error *error);
int pms_transfer_sync(int fd, struct pms_error *error); /* fdatasync */

uint32_t pms_checksum(uint32_t crc, const void *data, uint64_t bytes); /* CRC-32C */

#endif
