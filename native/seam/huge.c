#include "seam/huge.h"

#include <stddef.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include "base/layout.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define TMPFS_TYPE 0x01021994

bool pms_huge_in_memory(int fd)
{
    struct statfs s;
    return fstatfs(fd, &s) == 0 && (uint64_t)s.f_type == TMPFS_TYPE;
}

/* One page of each huge page, then all of them at once: the kernel makes huge pages of what is
 * partly there, whatever it does at faults. */
bool pms_huge_make(void *at, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes; done += PMS_HUGE)
        (void)madvise((unsigned char *)at + done, PMS_PAGE, MADV_POPULATE_WRITE);
    return madvise(at, bytes, MADV_COLLAPSE) == 0;
}
