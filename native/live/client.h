/* The reader's side of what wire.h says: one question, one answer, and a deadline for both. */
#ifndef PMS_LIVE_CLIENT_H
#define PMS_LIVE_CLIENT_H

#include <sys/uio.h>

#include "live/wire.h"

struct pms_error;
struct pms_session;

enum pms_heard {
    PMS_HEARD_ANSWER,
    PMS_HEARD_NOTHING,  /* for as long as was to be waited */
    PMS_HEARD_LOSS,     /* of a part of it: asked again */
    PMS_HEARD_SIGNAL,   /* came, and no answer soon after it: the same may be asked again */
    PMS_HEARD_END,      /* nobody is there any more */
    PMS_HEARD_REFUSAL,  /* what was asked for is not kept any more */
    PMS_HEARD_NONSENSE, /* no writer says so */
    PMS_HEARD_STRANGER, /* another user's process answers in the writer's place */
    PMS_HEARD_CLOSED,   /* the program has closed our socket */
};

struct pms_client {
    int socket;
    uint64_t socket_inode; /* by which it is known again: the program may close descriptors */
    struct sockaddr_un writer;
    socklen_t writer_bytes;
    uint32_t owner; /* of the store's file */
    uint8_t secret[PMS_WIRE_KEY], key[PMS_WIRE_KEY];
    uint64_t serial, taken;
    int64_t until_ns, signal_ns; /* of the questions since pms_client_begin; 0: no signal came */
};

/* Whoever opened that file for writing, as its session record says. PMS_E_LOCKED: nobody hears
 * there. ERRORS: PMS_E_OS. */
int pms_client_open(struct pms_client *c, int fd, const struct pms_session *session,
                    struct pms_error *error);

/* For some questions that have so many bytes as their answer: how long they may take altogether. */
void pms_client_begin(struct pms_client *c, uint64_t bytes);

/* Asks, and waits for exactly as many bytes as there is room for in `to`. q: op, keep, count and
 * ranges; the rest is filled in. count of `to` <= PMS_WIRE_RANGES. */
enum pms_heard pms_client_ask(struct pms_client *c, struct pms_question *q, const struct iovec *to,
                              uint32_t count);

void pms_client_close(struct pms_client *c);

#endif
