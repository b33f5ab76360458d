/* A pool: a store that is open. */
#ifndef PMS_COMMIT_POOL_H
#define PMS_COMMIT_POOL_H

#include "base/status.h"

struct pms_pool;

struct pms_info {  /* fixed from open on */
    uint64_t base; /* address of offset 0 in the user's view */
    uint64_t reserve_bytes;
    int32_t domain;       /* in force */
    int32_t flush;        /* enum pms_flush in force */
    int32_t sync_mapping; /* MAP_SYNC is in force */
    int32_t read_only;
    int32_t created;         /* this open made the store */
    int32_t clean;           /* the last writer closed it */
    uint64_t undone_entries; /* recovery: undo entries put back, */
    uint64_t undone_bytes;
    uint64_t replayed_records; /* journal records replayed, */
    uint64_t replayed_bytes;
    int32_t torn;         /* and whether an incomplete record or entry was dropped */
    int32_t asked_domain; /* at creation, by enum pms_domain */
    uint64_t opens;       /* for writing, since creation, this one included */
    uint64_t unclean_opens;
    uint64_t max_bytes; /* of the file ever; 0 = until the file system is full */
    uint8_t uuid[16];
    uint64_t inode;       /* of the file: a copy of it has another one */
    uint64_t permissions; /* of the file, when it was opened: 0600 and the like */
    int32_t beside; /* enum pms_sight_of: a reader without the lock, and whose pages it sees */
    int32_t reserved;
};

struct pms_slot_pair {
    uint64_t group, data[2], bytes;
    uint32_t current;
    uint32_t in_place; /* log is there for both, as for any block */
};

#endif
