/* What an open that fails and a close both end with. */
#ifndef PMS_STORE_CLOSE_H
#define PMS_STORE_CLOSE_H

#include "commit/pool_state.h"

/* Heap, log, and memory of commits; what was not opened is passed over. */
void pms_close_engine(struct pms_pool *pool);

#endif
