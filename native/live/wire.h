/* What a reader and the writer of a store say to each other: datagrams of this machine, in the
 * abstract namespace, so that no file is left behind by whoever is killed.
 *
 * Each side has one socket with a *key*: the kernel itself drops what does not begin with it, in
 * the call of who sends it, before it is in anybody's queue. The writer's key is the secret of the
 * session record, which lies in the store's file: who can say it may read the store. So nobody else
 * can send the writer anything, fill its queue, or wake it. The reader's key is drawn at random,
 * and told to the writer alone. No descriptor is ever part of what either says, and where the
 * system can refuse those that come all the same (Linux 6.16) it does.
 *
 * A reader asks one question at a time, and each has one answer; where a part of it is lost the
 * reader asks again. The writer tells by its
 * credentials who it is. Both are processes of one machine and one build's byte order; neither
 * trusts what the other sends to be well formed. */
#ifndef PMS_LIVE_WIRE_H
#define PMS_LIVE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/layout.h"

#define PMS_WIRE_MAGIC 0x32524d50u /* "PMR2": another number, another protocol */
#define PMS_WIRE_KEY 16u           /* bytes */
#define PMS_WIRE_RANGES 256u       /* of one question */
/* of one answer at most: so many datagrams, each with a piece, which is as much as the system finds
 * room for when its memory is in small parts, and no more than a reader's queue takes (10) */
#define PMS_WIRE_PIECE (64u << 10)
#define PMS_WIRE_ANSWER (4 * PMS_WIRE_PIECE)

enum pms_wire_op {
    PMS_WIRE_PIN = 1,   /* the last commit, from now on. Answer: the superblock */
    PMS_WIRE_READ = 2,  /* whole pages of it. Answer: their bytes, range after range */
    PMS_WIRE_EPOCH = 3, /* of the last commit, now. Answer: 8 bytes */
    PMS_WIRE_END = 4,   /* nothing is asked any more. No answer */
};

/* whole pages of the file */
struct pms_part {
    uint64_t off, bytes;
};

struct pms_question {
    uint8_t secret[PMS_WIRE_KEY]; /* the writer's key */
    uint8_t reader[PMS_WIRE_KEY]; /* the reader's: which one it is, too */
    uint64_t serial;              /* of this reader's questions: 1, 2, ... */
    uint64_t taken;               /* the last one whose answer has come; 0: none has */
    uint32_t magic;               /* PMS_WIRE_MAGIC */
    uint32_t op;                  /* enum pms_wire_op */
    uint32_t keep;                /* of PIN: the whole state is kept, not a little */
    uint32_t count;               /* of READ: so many ranges, at most an answer together */
    struct pms_part range[PMS_WIRE_RANGES]; /* only `count` of them are sent */
};
#define PMS_WIRE_HEAD offsetof(struct pms_question, range)

struct pms_answer {
    uint8_t reader[PMS_WIRE_KEY];
    uint64_t serial; /* of the question */
    uint32_t magic;
    int32_t status; /* enum pms_status */
    uint64_t bytes; /* of the whole answer; 0 where status is not PMS_OK */
    uint64_t part;  /* which piece of it follows: 0, 1, ... */
};

/* Where the writer that opened the file at that moment hears. */
socklen_t pms_wire_address(struct sockaddr_un *address, uint64_t device, uint64_t inode,
                           int64_t opened_ns);

/* From now on the socket takes nothing that does not begin with the key. Before it has an address.
 * false with errno: the system has no such filters. */
bool pms_wire_guard(int fd, const uint8_t key[PMS_WIRE_KEY]);

#endif
