/* Where threads change: between the linker's wrapper of the engine's lock (wraps.c) and the
 * workload that uses it (threads.c). */
#ifndef CRASH_THREADS_H
#define CRASH_THREADS_H

#include "base/lock.h"

/* Called, if set, by the thread that has just released the lock. */
extern void (*threads_released)(const struct pms_lock *lock);

#endif
