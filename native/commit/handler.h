/* The SIGSEGV handler of the process: finds the store that an address belongs to, chains the
 * rest. */
#ifndef PMS_COMMIT_HANDLER_H
#define PMS_COMMIT_HANDLER_H

#include <stdbool.h>

struct pms_capture;

#define PMS_MAX_STORES 64u /* open at once in one process */

bool pms_handler_register(struct pms_capture *c);   /* false: too many */
void pms_handler_unregister(struct pms_capture *c); /* no handler is inside c afterwards */

/* Puts the handler first again, chained to the one it finds, if another library took the signal. */
void pms_handler_install(void);

/* Around a fork, in the parent: calls fn for every open store; none is taken from the list in
 * between, and after it the same ones come. */
void pms_handler_before_fork(void (*fn)(struct pms_capture *c));
void pms_handler_after_fork(void (*fn)(struct pms_capture *c));
/* In a fork child: calls fn for every open store. prepared: it was one of those before the fork. */
void pms_handler_after_fork_in_child(void (*fn)(struct pms_capture *c, bool prepared));

#endif
