/* Who has the store open, and who had: the session record in the life of a pool. */
#ifndef PMS_SESSION_H
#define PMS_SESSION_H

#include "pool_state.h"

/* A store that was left open may be torn where its bytes may be of several moments: after a restart of the machine, if its domain survives the
 * death of its process only, and in a copy, which may have been made while the writer ran.
 * ERRORS: PMS_E_UNCLEAN, PMS_E_COPIED; not with o->force. */
int pms_session_check(const struct pms_pool *pool, const struct pms_options *o, struct pms_error *error);

/* What this session's record will say, in memory alone: the logs start from its seed, and an open that fails leaves the file's record as it
 * was. ERRORS: PMS_E_OS. */
int pms_session_plan(struct pms_pool *pool, struct pms_error *error);

/* From here on a crash leaves the dirty mark: durable on return, before the first store. The last step of an open that may fail.
 * ERRORS: PMS_E_OS. */
int pms_session_begin(struct pms_pool *pool, struct pms_error *error);

#endif
