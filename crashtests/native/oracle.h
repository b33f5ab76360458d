/* The oracle: what a crash may leave. It runs in a child of its own, because an image may kill
 * who opens it. */
#ifndef CRASH_ORACLE_H
#define CRASH_ORACLE_H

#include <stdbool.h>
#include <stdint.h>

struct verdict {
    bool ok;
    uint32_t digest; /* of the recovered state */
    char message[400];
};

struct question {
    char path[256];
    int domain;
    uint32_t allowed[3]; /* digests */
    uint32_t allowed_count;
    bool hostile; /* damaged on purpose: any answer but a crash, a hang or a corrupted walk */
    /* opened after a restart of the machine, which the domain does not survive: refused, or
     * whole */
    bool restarted;
    bool thorough; /* mode r too, and the commit after recovery is read back */
};

extern bool machine_restarted; /* wraps.c: the engine is told another boot id than the machine's */

extern bool oracle_allows_leaks;  /* of the workload: set before the first question */
extern bool oracle_knows_history; /* written by a workload, not by another program; likewise */

struct oracle;
struct oracle *oracle_new(void);
/* Recovers the file at q->path, which changes it. A death or a hang of the child is a verdict
 * too. */
struct verdict oracle_ask(struct oracle *o, const struct question *q);
void oracle_free(struct oracle *o);

#endif
