/* The one record outside transactions: what a roll back must not take back (history of failures).
 */
#ifndef PMS_STORE_HISTORY_H
#define PMS_STORE_HISTORY_H

#include "commit/pool.h"

/* out: PMS_HISTORY_BYTES; zeros until something was written. */
int pms_history_read(struct pms_pool *pool, void *out, struct pms_error *error);

/* Replaces the record, inside or outside a transaction block; no commit, and no roll back touches
 * it. Durable on return as far as the domain reaches: synced in dax and file; in process and
 * emulated it survives the process, and a machine crash may bring back an older one.
 * ERRORS: PMS_E_INVALID: longer than PMS_HISTORY_BYTES; PMS_E_READONLY; PMS_E_OS: not written.
 * CRASH: the old or the new record holds. */
int pms_history_write(struct pms_pool *pool, const void *data, uint32_t bytes,
                      struct pms_error *error);

#endif
