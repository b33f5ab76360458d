/* A store, as the outside sees it: open, transactions, objects, close. All that
 * pmstore knows of it (pms.cdef).
 *
 * Threads: every function may be called from any thread; the operation lock makes them take
 * turns. Arrays are written by anybody, without a call. Forks: in a child every call answers
 * PMS_E_FORKED, and the child's memory is read-only. What it shows there: in domain file the
 * state of the fork, for as long as the owner has the store open (readers.h); else the owner's
 * memory, as it is written. */
#ifndef PMS_OBJECTS_PMS_H
#define PMS_OBJECTS_PMS_H

#include "commit/handler.h"
#include "commit/refs.h"
#include "commit/resolve.h"
#include "commit/tx.h"
#include "commit/txblock.h"
#include "commit/unlock.h"
#include "commit/write.h"
#include "store/check.h"
#include "store/close.h"
#include "store/history.h"
#include "store/job.h"
#include "objects/object.h"
#include "store/open.h"
#include "objects/sequence.h"
#include "objects/slot.h"
#include "objects/stats.h"
#include "objects/usage.h"

#endif
