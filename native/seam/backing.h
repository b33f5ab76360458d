/* How far a store's logs lie on the disk. Their place in the file is set aside as a whole, but what
 * no transaction can need yet is a hole (FORMAT.md, I5). The logs of all segments, in order, are
 * one linear space (as for the journal); its first bytes are backed, the rest is a hole.
 *
 * What was backed once stays: nothing is ever given back. A store into a hole of a full disk ends
 * the process (SIGBUS), so nobody writes where it is not backed. */
#ifndef PMS_SEAM_BACKING_H
#define PMS_SEAM_BACKING_H

#include <stdbool.h>
#include <stdint.h>

#include "base/layout.h"
#include "seam/map.h"
#include "seam/persist.h"

struct pms_backing {
    int fd;
    struct pms_persist *persist; /* NULL: everything is backed, or nobody writes */
    bool sync;                   /* an allocation is to be durable before it is relied on */
    int failed;                  /* errno of a sync: what a later one says is no answer */
    const struct pms_map *map;   /* of the file, where it lies in memory; else NULL */
    uint32_t count;
    struct pms_backed {
        uint64_t off, bytes; /* of a segment's log */
        uint64_t backed;     /* of these, from its beginning */
    } part[PMS_MAX_SEGMENTS];
    _Atomic uint64_t
        *told;      /* what is known is said there, for whom a crash leaves the file; NULL */
    uint64_t bytes; /* of the linear space that are backed */
    uint64_t room;  /* of entries that fit there for sure, as pms_undo_capacity counts */
};

/* Nothing is known to be backed yet. map: of the file, if stores reach it there; or NULL. */
void pms_backing_open(struct pms_backing *b, int fd, const struct pms_map *map,
                      struct pms_persist *persist, bool sync);

/* The superblock's logs are those; what is known of those that stay stays. backed: all of them
 * are. */
void pms_backing_learn(struct pms_backing *b, const struct pms_superblock *super, bool backed);

/* The first `room` bytes of entries were backed when somebody wrote it down. */
void pms_backing_trust(struct pms_backing *b, uint64_t room);

/* From here on what is known is said there, too; NULL: nowhere any more. */
void pms_backing_tell(struct pms_backing *b, _Atomic uint64_t *told);

/* What can be written down for it: more segments may be added. */
uint64_t pms_backing_known(const struct pms_backing *b);

/* After it room bytes of entries fit for sure, if the logs are so large. Async-signal-safe. Returns
 * errno; ENOSPC, EDQUOT: the disk is full, and what was backed is as before. After a sync that
 * failed no more is backed.
 * CRASH: some more of the logs lies on the disk; no byte that can be read changes. */
int pms_backing_reach_slowly(struct pms_backing *b, uint64_t room);
static inline int pms_backing_reach(struct pms_backing *b, uint64_t room)
{
    return !b->persist || room <= b->room ? 0 : pms_backing_reach_slowly(b, room);
}

/* The same for the first bytes of the linear space. */
int pms_backing_reach_bytes(struct pms_backing *b, uint64_t bytes);

/* Of log bytes, those that entries fill for sure: at its end at most one page and a header stay
 * unused. */
static inline uint64_t pms_log_room_of(uint64_t log_bytes)
{
    return log_bytes > 2 * PMS_PAGE ? log_bytes - 2 * PMS_PAGE : 0;
}

#endif
