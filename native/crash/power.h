/* What a power failure would leave of one store's file: for crash tests of programs. */
#ifndef PMS_CRASH_POWER_H
#define PMS_CRASH_POWER_H

#include <stdbool.h>
#include <stdint.h>

#include "seam/persist.h"

/* From now on what is durable of the file is known; all that it holds now is. ERRORS: false: no
 * memory. */
bool pms_power_start(int fd, uint64_t seed);

/* Before each primitive. Async-signal-safe. */
void pms_power_note(enum pms_primitive primitive, uintptr_t addr, size_t bytes);

/* Puts what is durable into the file, and of everything else a part drawn from the seed. The
 * caller dies at once. */
void pms_power_fail(void);

#endif
