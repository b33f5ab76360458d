#include "seam/huge.h"

#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "base/layout.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define TMPFS_TYPE 0x01021994
#define BLOCK_BYTES 512u /* of st_blocks */

bool pms_huge_in_memory(int fd)
{
    struct statfs s;
    return fstatfs(fd, &s) == 0 && (uint64_t)s.f_type == TMPFS_TYPE;
}

bool pms_huge_fits(int fd, uint64_t bytes)
{
    struct stat st;
    struct statfs fs;
    if (fstat(fd, &st) != 0 || fstatfs(fd, &fs) != 0)
        return false;
    uint64_t needed = (uint64_t)st.st_blocks * BLOCK_BYTES + bytes;
    return needed <= (uint64_t)st.st_size &&
           (fs.f_blocks == 0 /* no limit */ ||
            (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize >= bytes);
}

/* One page of each huge page, then all of them at once: the kernel makes huge pages of what is
 * partly there, whatever it does at faults. */
bool pms_huge_make(void *at, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes; done += PMS_HUGE)
        (void)madvise((unsigned char *)at + done, PMS_PAGE, MADV_POPULATE_WRITE);
    return madvise(at, bytes, MADV_COLLAPSE) == 0;
}
