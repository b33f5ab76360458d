#include "seen.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct key {
    _Atomic uint64_t a, b;
};
static struct key *seen;
static uint64_t seen_room;
#define SEEN_ALONE (1ll << 30) /* bytes of a table that nobody gave */

void seen_open(const char *path)
{
    struct stat st = {.st_size = SEEN_ALONE};
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (path && (fd < 0 || fstat(fd, &st) != 0)) {
        perror(path);
        exit(2);
    }
    seen_room = (uint64_t)st.st_size / sizeof *seen;
    seen = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE,
                MAP_SHARED | (path ? 0 : MAP_ANONYMOUS | MAP_NORESERVE), fd, 0);
    if (path)
        close(fd);
}

bool seen_first(uint64_t a, uint64_t b)
{
    if (!a)
        a = 1;
    if (!b)
        b = 1;
    for (uint64_t i = a % seen_room, tries = 0; tries < seen_room;
         i = (i + 1) % seen_room, tries++) {
        uint64_t empty = 0;
        if (atomic_compare_exchange_strong(&seen[i].a, &empty, a)) {
            atomic_store(&seen[i].b, b);
            return true;
        }
        if (empty != a)
            continue;
        uint64_t other;
        while (!(other = atomic_load(&seen[i].b)))
            ;
        if (other == b)
            return false;
    }
    fprintf(stderr, "the table of images is full\n");
    exit(2);
}
