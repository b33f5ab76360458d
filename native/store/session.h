/* Who has the store open, and who had: the session record in the life of a pool. */
#ifndef PMS_STORE_SESSION_H
#define PMS_STORE_SESSION_H

#include <stdbool.h>
#include <stdint.h>

struct pms_error;
struct pms_options;
struct pms_pool;

/* A store that was left open may be torn after a restart of the machine, if its domain survives
 * the death of its process only.
 * ERRORS: PMS_E_UNCLEAN; not with o->force. */
int pms_session_check(const struct pms_pool *pool, const struct pms_options *o,
                      struct pms_error *error);

/* How far the file's logs are known to be backed (seam/backing.h). 0: not known; then it may be a
 * copy, which may have holes anywhere. REQUIRES: the session record as it was read. */
uint64_t pms_session_backed(const struct pms_pool *pool);

/* false: a copy, whose pages may be of a later moment than the logs that were copied with it: these
 * reach to transaction tx and so many entries of it. */
bool pms_session_is_before(const struct pms_pool *pool, uint64_t tx, uint64_t entries);

/* A copy may have been made while the writer ran. Its footer tells: tx and entries are how far
 * the logs reach that were copied with it (in place: the transaction that ran, and its valid
 * entries; domain file: the last record).
 * ERRORS: PMS_E_COPIED; not with o->force. */
int pms_session_check_copy(const struct pms_pool *pool, uint64_t tx, uint64_t entries,
                           struct pms_error *error);

/* What this session's record will say, in memory alone: the logs start from its seed, and an
 * open that fails leaves the file's record as it was. ERRORS: PMS_E_OS. */
int pms_session_plan(struct pms_pool *pool, struct pms_error *error);

/* From here on a crash leaves the dirty mark: durable on return, before the first store. The
 * last step of an open that may fail.
 * ERRORS: PMS_E_OS. */
int pms_session_begin(struct pms_pool *pool, struct pms_error *error);

#endif
