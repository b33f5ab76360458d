/* From a file as a crash left it to one that is whole, and from one kind of log to the other. */
#ifndef PMS_STORE_RECOVER_H
#define PMS_STORE_RECOVER_H

#include "commit/pool_state.h"

/* Which domain AUTO means for this file here. */
enum pms_domain pms_domain_choose(int fd, enum pms_domain asked, enum pms_domain made_with);

/* How stores of a domain reach its medium. */
static inline enum pms_flush pms_domain_flush(enum pms_domain d)
{
    return d == PMS_DOMAIN_DAX || d == PMS_DOMAIN_EMULATED ? pms_persist_best_flush()
                                                           : PMS_FLUSH_NONE;
}

/* Finishes or undoes what the log that was in force (pool->session.domain) holds, and makes the
 * log of pool->opened.domain ready. Sets pool->tx.last and the recovery fields of
 * pool->opened.info. Writes the file; on return it is whole and durable under either log. ERRORS:
 * PMS_E_CORRUPT, PMS_E_OS.  CRASH: repeats at the next open. */
int pms_recover_file(struct pms_pool *pool, struct pms_error *error);

/* Mode r: the same into private pages; no byte of the file changes. REQUIRES: pool->map open and
 * writable throughout. ERRORS: also PMS_E_STATE: the version before was asked for, and is not held.
 */
int pms_recover_view(struct pms_pool *pool, struct pms_error *error);

#endif
