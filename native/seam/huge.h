/* Huge pages of a file in memory (tmpfs). A page of 4 KiB costs more to allocate and to map than to
 * zero. */
#ifndef PMS_SEAM_HUGE_H
#define PMS_SEAM_HUGE_H

#include <stdbool.h>
#include <stdint.h>

bool pms_huge_in_memory(int fd); /* on tmpfs */

/* false: the file has no holes of so many bytes, or its file system no memory for them, and what
 * is made before it ends would stay. Async-signal-safe. */
bool pms_huge_fits(int fd, uint64_t bytes);

/* Makes memory for whole huge pages of a writable mapping. false: not all of them have it: the
 * system has none, or does not know how. Async-signal-safe. */
bool pms_huge_make(void *at, uint64_t bytes);

#endif
