/* Content for new blocks that lies elsewhere: straight home, and not through memory.
 *
 * A block that the running transaction bore is dead at the last commit, so it may be written home
 * before its commit (I3, native/journal/journal.h). What is to be in it is copied to a buffer,
 * checksummed and written, by several threads (turns.h): so the disk is at work while others copy.
 * The pages are the file's then, and take no memory; whoever looks at them reads the file. */
#ifndef PMS_FLUSH_BRING_H
#define PMS_FLUSH_BRING_H

#include "commit/pool.h"

#define PMS_BRING_PIECE (1u << 20) /* has a checksum of its own */

struct pms_bring {
    uint64_t data; /* offset of the block */
    const void *src;
    uint64_t bytes;
    uint32_t *crc;   /* CRC-32C of each piece */
    int32_t brought; /* not 0: it is home */
    int32_t reserved;
};

/* Brings home what it can. What it cannot (not domain file; the file system has no O_DIRECT; a
 * block of an older transaction, a small one, one of which an image waits, memory that is locked)
 * is left as it is: the caller stores it as ever. Nothing counts before a commit does.
 *
 * REQUIRES: nobody stores to the blocks meanwhile. ERRORS: PMS_E_OS, PMS_E_FULL: what is in the
 * blocks is anything. CRASH: as if there had been no transaction. */
int pms_bring_home(struct pms_pool *pool, struct pms_bring *bring, uint64_t count,
                   struct pms_error *error);

#endif
