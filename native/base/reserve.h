/* Memory of this process that takes room only where it is touched: zeros, and never moved. */
#ifndef PMS_BASE_RESERVE_H
#define PMS_BASE_RESERVE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

/* NULL with errno: there is none. */
static inline void *pms_reserve(uint64_t bytes)
{
    void *p = mmap(NULL, bytes ? (size_t)bytes : 1, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

/* as many bytes as were reserved; nothing happens to NULL */
static inline void pms_unreserve(void *p, uint64_t bytes)
{
    if (p)
        munmap(p, bytes ? (size_t)bytes : 1);
}

#endif
