/* A visitor: a reader in another process, as the writer knows it. Answers to its questions are
 * made here, of the store's memory alone: nothing is sent, and nothing waits for another process.
 */
#ifndef PMS_LIVE_VISITOR_H
#define PMS_LIVE_VISITOR_H

#include "live/server.h"

struct pms_visitor;

struct pms_visitors { /* of one store */
    struct pms_visitor *first;
    uint32_t count;
};

/* Where a question came from. */
struct pms_sender {
    struct sockaddr_un address;
    socklen_t bytes;
};

/* The answer to a datagram of n bytes, which begins with the store's secret, goes to `out`, which
 * has room for a head and a whole answer. Returns its bytes; 0: there is none, for it is no
 * question. */
size_t pms_visitors_answer(struct pms_visitors *v, const struct pms_served *s,
                           const struct pms_question *q, size_t n, const struct pms_sender *from,
                           unsigned char *out);

/* Gives back what is kept for those that said nothing for long, and those that `is_gone` forgets.
 * May be called often: looks once a second. */
void pms_visitors_look(struct pms_visitors *v, bool (*is_gone)(const struct pms_sender *));

void pms_visitors_close(struct pms_visitors *v);

#endif
