
#include "store/room.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "commit/pool_state.h"

#define RESERVE_MIN (4ull << 30)
#define RESERVE_MAX (16ull << 40)
#define RESERVE_SHARE                                                                            \
    16u                  /* of a limit: two views, the log in memory, and the tables beside them \
                          */
#define BLOCK_BYTES 512u /* of st_blocks */

uint64_t pms_room_address_space(const struct pms_pool *pool)
{
    static const int limits[] = {RLIMIT_AS, RLIMIT_DATA};
    struct statvfs fs;
    uint64_t bytes = pool->super.max_bytes;
    if (!bytes && fstatvfs(pool->opened.fd, &fs) == 0)
        bytes = (uint64_t)fs.f_blocks * fs.f_frsize;
    if (bytes < RESERVE_MIN)
        bytes = RESERVE_MIN;
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        struct rlimit limit;
        if (getrlimit(limits[i], &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
            bytes > limit.rlim_cur / RESERVE_SHARE)
            bytes = limit.rlim_cur / RESERVE_SHARE;
    }
    return bytes < RESERVE_MAX ? bytes : RESERVE_MAX;
}

/* A private page that is made writable counts against the limit, and a capture that is refused
 * one has no way out: so the whole view is asked for now, while there is a caller to tell. */
int pms_room_check_memory(const struct pms_pool *pool, struct pms_error *error)
{
    const struct pms_map *map = &pool->map;
    struct rlimit limit;
    if (map->shared || getrlimit(RLIMIT_DATA, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return PMS_OK;
    int err = mprotect(map->user, map->bytes, PROT_READ | PROT_WRITE) ? errno : 0;
    if (mprotect(map->user, map->bytes, PROT_READ) != 0) /* stores would not be seen */
        return pms_fail_errno(error, "protecting the store's pages");
    errno = err;
    return err ? pms_fail_errno(
                     error,
                     "the store, written all over, takes more memory than RLIMIT_DATA (ulimit -d) allows")
               : PMS_OK;
}

int pms_room_fill_holes(struct pms_pool *pool, struct pms_error *error)
{
    struct stat st;
    uint64_t bytes = pool->super.file_bytes;
    if (fstat(pool->opened.fd, &st) != 0)
        return pms_fail_errno(error, "looking at the store's file");
    uint64_t has = (uint64_t)st.st_blocks * BLOCK_BYTES;
    if (has >= bytes)
        return PMS_OK;
    errno = pms_persist_allocate(&pool->persist, pool->opened.fd, 0, bytes);
    if (errno != ENOSPC && errno != EDQUOT)
        return errno ? pms_fail_errno(error, "filling holes in the store's file") : PMS_OK;
    int status = pms_fail(
        error, PMS_E_FULL,
        "the file has holes, as a sparse copy has, and the disk has no room to fill them");
    if (error) {
        error->needed = bytes - has;
        error->available = 0;
    }
    return status;
}
