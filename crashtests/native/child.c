#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

static _Noreturn void give_up(const char *what)
{
    perror(what);
    exit(2);
}

void *shared_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        give_up("mmap");
    return p;
}

unsigned char *file_read(const char *path, uint64_t *bytes)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0)
        give_up(path);
    unsigned char *p = malloc((size_t)st.st_size);
    *bytes = (uint64_t)st.st_size;
    if (!p || pread(fd, p, *bytes, 0) != st.st_size)
        give_up(path);
    close(fd);
    return p;
}

void file_write(const char *path, const unsigned char *from, uint64_t bytes)
{
    static const unsigned char zeros[PMS_PAGE];
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0;
    for (uint64_t at = 0; ok && at < bytes; at += PMS_PAGE) {
        uint64_t n = bytes - at < PMS_PAGE ? bytes - at : PMS_PAGE;
        if (memcmp(from + at, zeros, n) != 0)
            ok = pwrite(fd, from + at, n, (off_t)at) == (ssize_t)n;
    }
    if (!ok)
        give_up(path);
    close(fd);
}

bool child_here(pid_t *child)
{
    fflush(stdout);
    *child = fork();
    if (*child < 0)
        give_up("fork");
    if (*child > 0)
        return false;
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    return true;
}

int child_wait(pid_t child)
{
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}
