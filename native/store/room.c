
#include "store/room.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#include "commit/pool_state.h"
#include "store/session.h"

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

static int no_room(uint64_t needed, struct pms_error *error)
{
    int status = pms_fail_errno(error, "filling holes in the store's file");
    if (status != PMS_E_FULL)
        return status;
    pms_fail(error, PMS_E_FULL,
             "the file has holes, as a sparse copy has, and the disk has no room to fill them");
    if (error) {
        error->needed = needed;
        error->available = 0;
    }
    return status;
}

/* What the file takes on the disk if all is there but so much of its logs. More, where that cannot
 * be told: behind the footer lies what a growth left that was cut off. */
static uint64_t bytes_without_holes(struct pms_pool *pool, uint64_t backed, uint64_t length)
{
    struct pms_backing b;
    uint64_t hole = 0;
    pms_backing_open(&b, pool->opened.fd, NULL, &pool->persist, false);
    pms_backing_learn(&b, &pool->super, false);
    pms_backing_trust(&b, backed);
    for (uint32_t i = 0; i < b.count; i++)
        hole += b.part[i].bytes - (b.part[i].backed > PMS_PAGE ? b.part[i].backed : PMS_PAGE);
    uint64_t behind = length - pool->super.file_bytes;
    return behind > PMS_PAGE ? UINT64_MAX : pool->super.file_bytes - hole + behind;
}

/* A file that another was copied over is still itself, and says what it said before; it may have
 * holes anywhere, and has less of the disk then. */
int pms_room_fill_holes(struct pms_pool *pool, struct pms_error *error)
{
    struct stat st;
    uint64_t bytes = pool->super.file_bytes, backed = pms_session_backed(pool);
    if (pool->opened.info.created)
        return PMS_OK;
    if (fstat(pool->opened.fd, &st) != 0)
        return pms_fail_errno(error, "looking at the store's file");
    uint64_t has = (uint64_t)st.st_blocks * BLOCK_BYTES;
    if (backed && has >= bytes_without_holes(pool, backed, (uint64_t)st.st_size))
        pool->opened.backed = backed;
    if (pool->opened.backed || has >= bytes)
        return PMS_OK;
    errno = pms_super_allocate(pool->opened.fd, &pool->persist, &pool->super, 0);
    return errno ? no_room(bytes - has, error) : PMS_OK;
}

int pms_room_back_logs(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_backing *b = &pool->undo.charge.backing;
    errno = pool->journal ? pms_backing_reach_bytes(b, pms_journal_window(pool->journal)) : 0;
    return errno ? no_room(pms_journal_window(pool->journal), error) : PMS_OK;
}
