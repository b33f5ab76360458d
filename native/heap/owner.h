/* Whose a block is: it decides how captures of it are logged. */
#ifndef PMS_HEAP_OWNER_H
#define PMS_HEAP_OWNER_H

#include "base/layout.h"

enum pms_owner { PMS_OWNER_USER, PMS_OWNER_ENGINE };

/* I5: what capture of every byte of an extent puts into the log: whole pages, or 32-byte
 * granules of one line each. */
static inline uint64_t pms_heap_log_cost(enum pms_owner owner, uint64_t pages)
{
    return owner == PMS_OWNER_ENGINE ? pages * 2 * PMS_PAGE : pages * (PMS_PAGE + PMS_LINE);
}

#endif
