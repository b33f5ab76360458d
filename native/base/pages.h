/* Pages: the bounds of those that a range touches, and memory of this process that takes room only
 * where it is touched. */
#ifndef PMS_BASE_PAGES_H
#define PMS_BASE_PAGES_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include "base/layout.h"

static inline uint64_t pms_page_down(uint64_t n) { return n & ~(uint64_t)(PMS_PAGE - 1); }
static inline uint64_t pms_page_up(uint64_t n) { return pms_page_down(n + PMS_PAGE - 1); }
static inline uint64_t pms_huge_down(uint64_t n) { return n & ~(uint64_t)(PMS_HUGE - 1); }
static inline uint64_t pms_huge_up(uint64_t n) { return pms_huge_down(n + PMS_HUGE - 1); }

#define PMS_RESERVED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE) /* flags of mmap */

/* Zeros, never moved. NULL with errno: there is none. */
static inline void *pms_reserve(uint64_t bytes)
{
    void *p = mmap(NULL, bytes ? (size_t)bytes : 1, PROT_READ | PROT_WRITE, PMS_RESERVED, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* as many bytes as were reserved; nothing happens to NULL */
static inline void pms_unreserve(void *p, uint64_t bytes)
{
    if (p)
        munmap(p, bytes ? (size_t)bytes : 1);
}

#endif
