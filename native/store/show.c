#include "store/show.h"

#include <errno.h>

#include "base/pages.h"
#include "store/recover.h"

int pms_show_choose(struct pms_pool *pool, const struct pms_files *files, bool keep,
                    struct pms_error *error)
{
    struct pms_sight *v = &pool->sight;
    *v = (struct pms_sight){.fd = pool->opened.fd, .session = pool->session};
    if (pool->session.state == PMS_SESSION_CLEAN || !pms_files_written(files)) {
        v->of = PMS_SIGHT_OF_FILE;
        return PMS_OK;
    }
    int status = pms_sight_connect(v, pool->opened.fd, &pool->session, error);
    return status == PMS_OK ? pms_sight_pin(v, keep, &pool->super, error) : status;
}

static int load(struct pms_pool *pool, const struct pms_part *range, uint64_t count,
                struct pms_error *error)
{
    return pms_sight_load(&pool->sight, &pool->undo, &pool->map, range, count, error);
}

static int recover(struct pms_pool *pool, struct pms_error *error)
{
    errno = pms_map_unprotect(&pool->map, 0, pool->map.bytes);
    if (errno)
        return pms_fail_errno(error, "preparing a private view of the store");
    int status = pms_recover_view(pool, error);
    pms_map_protect(&pool->map, 0, pool->map.bytes);
    return status;
}

int pms_show_begin(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_part range[1 + PMS_MAX_SEGMENTS] = {{PMS_OFF_ROOT, PMS_PAGE}};
    const struct pms_superblock *super = &pool->super;
    bool beside = pool->sight.of == PMS_SIGHT_OF_WRITER;
    pool->opened.info.clean = beside || pool->session.state == PMS_SESSION_CLEAN;
    int status = beside ? PMS_OK : recover(pool, error);
    if (status != PMS_OK || pool->sight.of == PMS_SIGHT_NONE)
        return status;
    for (uint32_t i = 0; i < super->segment_count; i++)
        range[1 + i] = (struct pms_part){super->segment[i].table_off,
                                         super->segment[i].log_off - super->segment[i].table_off};
    status = pms_sight_begin(&pool->sight, &pool->map, error);
    return status == PMS_OK ? load(pool, range, 1 + super->segment_count, error) : status;
}

#define TOGETHER 512u

int pms_show_names(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_part range[TOGETHER];
    struct pms_block extent = {0};
    int status = PMS_OK;
    bool more = pool->sight.of != PMS_SIGHT_NONE;
    for (uint64_t n = 0; more && status == PMS_OK;) {
        more = pms_heap_next_used(pool->heap, (extent.off + extent.bytes) / PMS_PAGE, &extent);
        if (more && (extent.kind == PMS_KIND_META_LARGE || extent.kind == PMS_KIND_META_SLAB))
            range[n++] = (struct pms_part){extent.off, extent.bytes};
        if (n == TOGETHER || !more) {
            status = load(pool, range, n, error);
            n = 0;
        }
    }
    return status;
}
