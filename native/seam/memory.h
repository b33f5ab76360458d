/* How much memory the stores of this process may take for pages of their own (domain file).
 *
 * A page that was stored to is the process's: the system cannot write it back to the file, as it
 * can with pages that were only read. Half of the memory that there is, is for these, and in a
 * transaction an eighth more, its log counted; what is beyond lies on the disk (spill.h). There is
 * as much as the machine has, or the least limit of the control groups that the process is in, or
 * PMSTORE_MEMORY says so (bytes, or with K, M, G or T behind). */
#ifndef PMS_SEAM_MEMORY_H
#define PMS_SEAM_MEMORY_H

#include <stdint.h>

void pms_memory_read_limit(void); /* now: at each open, and now and then */

/* Bytes of pages of their own that all stores may have; UINT64_MAX: nobody knows. */
uint64_t pms_memory_share(void);

/* By all stores of the process, as each counted them last. */
void pms_memory_add(int64_t bytes);
uint64_t pms_memory_own(void);

/* for tests: instead of the system's; 0: the system's again */
void pms_memory_set_limit(uint64_t bytes);

#endif
