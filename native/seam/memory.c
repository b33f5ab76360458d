#include "seam/memory.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SHARE 2          /* one part in so many */
#define FILE_BYTES 4096u /* of what the system tells */
#define GROUPS "/sys/fs/cgroup"

static _Atomic uint64_t limit = UINT64_MAX;
static _Atomic int64_t own;
static _Atomic bool set_by_test;

static bool read_text(const char *path, char text[FILE_BYTES])
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, FILE_BYTES - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0;
}

static uint64_t less(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- control groups ---- */

/* "max", and the huge number that says the same, are no limit. */
static uint64_t limit_in(const char *path)
{
    char text[FILE_BYTES];
    if (!read_text(path, text) || text[0] < '0' || text[0] > '9')
        return UINT64_MAX;
    return strtoull(text, NULL, 10);
}

/* The least limit of a group and of those that it is in. A container may see its own group as the
 * root, and be told of a path that it does not see. */
static uint64_t least_limit(const char *root, const char *group, const char *file)
{
    char path[FILE_BYTES], at[FILE_BYTES];
    uint64_t least = UINT64_MAX;
    snprintf(at, sizeof at, "%s", group);
    for (char *end = at; end; *end = 0) {
        if (snprintf(path, sizeof path, "%s%s/%s", root, at, file) < (int)sizeof path)
            least = less(least, limit_in(path));
        end = strrchr(at, '/');
        if (!end)
            break;
    }
    return least;
}

/* A line of /proc/self/cgroup: NUMBER:CONTROLLERS:GROUP. Without a controller: version 2. */
static uint64_t limit_of_line(char *line)
{
    char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : 0;
    if (!group)
        return UINT64_MAX;
    *group++ = 0;
    controllers++;
    if (!*controllers)
        return less(least_limit(GROUPS, group, "memory.max"),
                    least_limit(GROUPS "/unified", group, "memory.max"));
    return strcmp(controllers, "memory") == 0
               ? least_limit(GROUPS "/memory", group, "memory.limit_in_bytes")
               : UINT64_MAX;
}

static uint64_t limit_of_groups(void)
{
    char text[FILE_BYTES], *rest = NULL;
    uint64_t least = UINT64_MAX;
    if (!read_text("/proc/self/cgroup", text))
        return least;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        least = less(least, limit_of_line(line));
    return least;
}

/* ---- all of it ---- */

static uint64_t limit_asked(void)
{
    const char *text = secure_getenv("PMSTORE_MEMORY"), *units = "KMGT", *unit;
    char *end;
    uint64_t n = text ? strtoull(text, &end, 10) : 0;
    if (!n)
        return UINT64_MAX;
    unit = *end ? strchr(units, *end) : NULL;
    return unit ? n << (10 * (unit - units + 1)) : n;
}

static uint64_t limit_of_machine(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), bytes = sysconf(_SC_PAGESIZE);
    return pages > 0 && bytes > 0 ? (uint64_t)pages * (uint64_t)bytes : UINT64_MAX;
}

void pms_memory_read_limit(void)
{
    if (!atomic_load(&set_by_test))
        atomic_store(&limit, less(limit_asked(), less(limit_of_groups(), limit_of_machine())));
}

void pms_memory_set_limit(uint64_t bytes)
{
    atomic_store(&set_by_test, bytes != 0);
    atomic_store(&limit, bytes);
    pms_memory_read_limit();
}

uint64_t pms_memory_share(void)
{
    uint64_t bytes = atomic_load_explicit(&limit, memory_order_relaxed);
    return bytes == UINT64_MAX ? bytes : bytes / SHARE;
}

void pms_memory_add(int64_t bytes) { atomic_fetch_add(&own, bytes); }

uint64_t pms_memory_own(void)
{
    int64_t bytes = atomic_load(&own);
    return bytes > 0 ? (uint64_t)bytes : 0;
}
