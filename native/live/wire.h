/* What a reader and the writer of a store say to each other: a stream socket of this machine, in
 * the abstract namespace, so that no file is left behind by whoever is killed.
 *
 * The reader shows that it may read the store: its first question carries a descriptor of the file
 * that is open for reading. The writer shows who it is by its credentials. Both are processes of
 * one machine and one build's byte order; neither trusts what the other sends to be well formed. */
#ifndef PMS_LIVE_WIRE_H
#define PMS_LIVE_WIRE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/layout.h"

#define PMS_WIRE_MAGIC 0x31524d50u  /* "PMR1": another number, another protocol */
#define PMS_WIRE_RANGES 256u        /* of one question */
#define PMS_WIRE_PIECE (256u << 10) /* most bytes of one answer */

enum pms_wire_op {
    PMS_WIRE_PIN = 1,   /* the last commit, from now on. Answer: the superblock */
    PMS_WIRE_READ = 2,  /* whole pages of it. Answers: their bytes, in pieces, range by range */
    PMS_WIRE_EPOCH = 3, /* of the last commit, now. Answer: 8 bytes */
};

/* whole pages of the file */
struct pms_part {
    uint64_t off, bytes;
};

struct pms_question {
    uint32_t magic;
    uint32_t op;
    uint32_t keep;  /* of PIN: at most the whole state is kept for it, not a little */
    uint32_t count; /* of READ: so many ranges follow */
};

struct pms_answer {
    uint32_t magic;
    int32_t status; /* enum pms_status; not PMS_OK: the question is over */
    uint64_t bytes; /* that follow */
};

/* The address of the writer that opened the file at that moment. */
socklen_t pms_wire_address(struct sockaddr_un *address, uint64_t device, uint64_t inode,
                           int64_t opened_ns);

/* Whether a descriptor that came with a question is the store's file, open for reading. */
bool pms_wire_may_read(int fd, uint64_t device, uint64_t inode);

#endif
