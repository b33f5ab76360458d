#include "live/wire.h"

#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

socklen_t pms_wire_address(struct sockaddr_un *a, uint64_t device, uint64_t inode,
                           int64_t opened_ns)
{
    memset(a, 0, sizeof *a);
    a->sun_family = AF_UNIX;
    int n = snprintf(a->sun_path + 1, sizeof a->sun_path - 1, "pmstore/%llx/%llx/%llx",
                     (unsigned long long)device, (unsigned long long)inode,
                     (unsigned long long)opened_ns);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n);
}

bool pms_wire_may_read(int fd, uint64_t device, uint64_t inode)
{
    struct stat st;
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && !(flags & O_PATH) && (flags & O_ACCMODE) != O_WRONLY &&
           fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_dev == device && st.st_ino == inode;
}
