/* How many mappings the stores of this process have made.
 *
 * A page that becomes writable in the middle of a read-only view parts it into three mappings,
 * and a process may have vm.max_map_count of them (65,530): without any left no thread starts
 * and no library is loaded. So stores go without the last quarter. From half of the limit on, a
 * capture takes in what lies around it (reach), so that mappings join; at three quarters a store
 * whose share is used up protects all its pages, which makes one mapping of them, and pages that
 * were writable fault again (map.c).
 *
 * The count is kept by changes of protection, which is what makes mappings; numbers alone are
 * read in the fault handler. */
#ifndef PMS_SEAM_MAPPINGS_H
#define PMS_SEAM_MAPPINGS_H

#include <stdbool.h>
#include <stdint.h>

void pms_mappings_read_limit(void); /* vm.max_map_count, now: at each open */

/* Async-signal-safe, all of these. */
void pms_mappings_add(int64_t count);
int64_t pms_mappings_used(void); /* by all stores of the process */

/* Bytes on either side that a capture is worth to be extended by: 0 while there are enough
 * mappings. */
uint64_t pms_mappings_reach(void);

/* What a store has that has made `own` of them is to be given up. */
bool pms_mappings_spent(int64_t own);

/* for tests: instead of the system's; 0: the system's again */
void pms_mappings_set_limit(uint64_t limit);

#endif
