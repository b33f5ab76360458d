/* Growing a store by a segment, and blocks that may need it.
 *
 *   1  drain    domain file: images in the journal go home, but for what is held
 *   2  reserve  room for a footer behind the new end; the footer in force is no more: copies are
 *               refused
 *   3  format   page table and data of the segment, behind what the superblock counts; of the logs,
 *               as much is backed as its page table takes
 *   4  map      the views reach over it, at the addresses set aside by open
 *   5  publish  the superblock, then its twin
 *   6  footer   begins at the new end
 *   7  learn    log, journal and heap know the segment
 *
 * What the disk gave for 2 and 3 is given back where it has no room for all.
 *
 * Crash in 1 => nothing has changed: what is home is in the journal too. In 2 to 4 => the file is
 * longer than its superblock says, and the next growth formats that part again. In 5 => one copy of
 * the superblock knows the segment and the other does not; the newer one holds if it is whole, and
 * either is true. In 6 and 7 => the segment is there, and empty. */
#include "store/grow.h"

#include <errno.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "log/charge.h"
#include "seam/footer.h"

struct part {        /* that is added */
    uint64_t bytes;  /* of data, at least */
    uint64_t log;    /* bytes of entries that the block takes for which it is made */
    bool for_halves; /* it has what all logs lack to be cut in halves */
};

/* The log has room for the new page table too, and for the block: else the store would have grown
 * in vain. */
static int back_log(struct pms_pool *pool, const struct pms_superblock *super, uint32_t first,
                    uint64_t log, struct pms_error *error)
{
    struct pms_heap_stats stats;
    pms_heap_stats(pool->heap, &stats);
    uint64_t need = stats.log_need - stats.slot_need +
                    pms_heap_table_cost(super->segment[first].data_pages) + log;
    pms_undo_lock(&pool->undo);
    pms_backing_learn(&pool->undo.charge.backing, super, false);
    int err = pms_charge_ordinary_locked(&pool->undo, need);
    pms_undo_unlock(&pool->undo);
    errno = err;
    return err ? pms_fail_errno(error, "allocating log space on the disk") : PMS_OK;
}

static int grow_file(struct pms_pool *pool, struct pms_superblock *super, uint32_t first,
                     uint64_t log, struct pms_error *error)
{
    int status = pms_super_format_segments(pool->opened.fd, &pool->persist, super, first, error);
    if (status == PMS_OK)
        status = back_log(pool, super, first, log, error);
    if (status == PMS_OK)
        status = pms_map_grow(&pool->map, super->file_bytes, error);
    if (status == PMS_OK)
        /* on an error the superblock in force does not know the new part */
        status = pms_super_write_both(pool->opened.fd, &pool->persist, super, error);
    return status;
}

/* The new part begins where the footer is. */
static int grow_beyond_footer(struct pms_pool *pool, struct pms_superblock *super, uint32_t first,
                              uint64_t log, struct pms_error *error)
{
    if (!pool->map.footer)
        return grow_file(pool, super, first, log, error);
    int status = pms_footer_reserve(pool->opened.fd, super->file_bytes, error);
    if (status != PMS_OK)
        return status;
    pms_undo_lock(&pool->undo);
    pms_backing_tell(&pool->undo.charge.backing, NULL);
    pms_footer_end(&pool->map);
    pms_undo_unlock(&pool->undo);
    status = grow_file(pool, super, first, log, error);
    pms_undo_lock(&pool->undo);
    bool in_memory = pool->undo.log.in_memory;
    pms_footer_begin(&pool->map, in_memory ? pms_pool_home(pool) : pool->undo.tag,
                     in_memory ? PMS_FOOTER_ALL : pms_undo_entries(&pool->undo));
    pms_backing_tell(&pool->undo.charge.backing, pms_footer_told(&pool->map));
    pms_undo_unlock(&pool->undo);
    return status;
}

static uint64_t file_end(const struct pms_pool *pool)
{
    off_t end = lseek(pool->opened.fd, 0, SEEK_END);
    return end < 0 ? UINT64_MAX : (uint64_t)end;
}

/* The disk's last bytes: whatever was got of the new part before there was no more. Not once it is
 * mapped: the superblock may name it. */
static void give_back(struct pms_pool *pool, uint64_t end)
{
    if (pool->map.bytes == pool->super.file_bytes && file_end(pool) > end)
        (void)pms_persist_truncate(&pool->persist, pool->opened.fd, end);
}

/* A sync failed meanwhile in another thread, which was told. */
static int unknown(struct pms_error *error)
{
    return pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable");
}

static int grow(struct pms_pool *pool, struct part part, struct pms_error *error)
{
    struct pms_superblock super = pool->super;
    uint32_t first = super.segment_count;
    uint64_t features = super.features_incompat, end = file_end(pool);
    if (part.for_halves)
        super.features_incompat |= PMS_FEATURE_HOLD;
    int status = pms_super_plan_growth(&super, part.bytes, error);
    super.features_incompat = features;
    if (status == PMS_OK && pool->journal)
        status = pms_journal_drain(pool->journal, error);
    if (status == PMS_OK)
        status = grow_beyond_footer(pool, &super, first, part.log, error);
    /* The file may name the new part or not, so nothing may be written there again: another growth
     * would overwrite its page table. */
    if (pms_pool_failed(pool))
        return status != PMS_OK ? status : unknown(error);
    if (status != PMS_OK) {
        give_back(pool, end);
        pms_undo_lock(&pool->undo);
        pms_backing_learn(&pool->undo.charge.backing, &pool->super, false);
        pms_undo_unlock(&pool->undo);
        return status;
    }
    pms_undo_lock(&pool->undo);
    pool->super = super;
    pms_undo_set_extents(&pool->undo, &pool->super);
    const struct pms_segment *added = &super.segment[first];
    /* formatted beside the log: the next flush has to write it */
    pms_undo_set_changed(&pool->undo, added->table_off, added->log_off - added->table_off);
    pms_undo_unlock(&pool->undo);
    if (pool->journal)
        pms_journal_set_super(pool->journal, &pool->super);
    return pms_heap_add_segment(pool->heap, first, error);
}

int pms_pool_grow(struct pms_pool *pool, uint64_t bytes, struct pms_error *error)
{
    return grow(pool, (struct part){.bytes = bytes}, error);
}

/* Halves take turns, so that the first bytes of the logs are not what is used first. */
static int back_all_logs(struct pms_pool *pool, struct pms_error *error)
{
    pms_undo_lock(&pool->undo);
    int err = pms_backing_reach_bytes(&pool->undo.charge.backing, UINT64_MAX);
    pms_undo_unlock(&pool->undo);
    errno = err;
    return err ? pms_fail_errno(error, "allocating the store's logs on the disk") : PMS_OK;
}

int pms_pool_grow_for_halves(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_heap_stats stats;
    pms_heap_stats(pool->heap, &stats);
    uint64_t room = pms_undo_capacity_of_half(&pool->undo);
    int status = PMS_OK;
    if (stats.log_need > room) {
        status = grow(pool, (struct part){.bytes = PMS_PAGE, .for_halves = true}, error);
        if (status == PMS_OK)
            PMS_ASSERT(stats.log_need <= pms_undo_capacity_of_half(&pool->undo)); /* I5 */
    }
    if (status == PMS_OK)
        status = back_all_logs(pool, error);
    if (status != PMS_E_FULL)
        return status;
    status = pms_fail(error, PMS_E_FULL,
                      "to hold the version before a commit takes log for two transactions");
    if (error) {
        error->needed = stats.log_need;
        error->available = room;
    }
    return status;
}

/* The bit is there before the first mark. Crash => it is there, or not: nothing is marked yet. */
static int publish_marks(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_superblock super = pool->super;
    if (super.features_incompat & PMS_FEATURE_THIN)
        return PMS_OK;
    super.features_incompat |= PMS_FEATURE_THIN;
    int status = pms_super_write_both(pool->opened.fd, &pool->persist, &super, error);
    if (status != PMS_OK)
        return status;
    pms_undo_lock(&pool->undo); /* readers are told of it; captures ask from now on */
    pool->super = super;
    pool->undo.charge.slots = true;
    pms_undo_unlock(&pool->undo);
    return PMS_OK;
}

static int allocate(struct pms_pool *pool, uint64_t bytes, enum pms_owner owner, bool slot,
                    uint64_t *off, struct pms_error *error)
{
    return slot ? pms_heap_alloc_slot(pool->heap, bytes, off, error)
                : pms_heap_alloc(pool->heap, bytes, owner, off, error);
}

static int allocate_or_grow(struct pms_pool *pool, uint64_t bytes, enum pms_owner owner, bool slot,
                            uint64_t *off, struct pms_error *error)
{
    int status = allocate(pool, bytes, owner, slot, off, error);
    if (status != PMS_E_FULL)
        return status;
    struct part part = {.bytes = bytes,
                        .log = slot ? 0 : pms_heap_log_cost(owner, (bytes - 1) / PMS_PAGE + 1)};
    status = grow(pool, part, error);
    return status == PMS_OK ? allocate(pool, bytes, owner, slot, off, error) : status;
}

int pms_pool_allocate(struct pms_pool *pool, uint64_t bytes, enum pms_owner owner, uint64_t *off,
                      struct pms_error *error)
{
    return allocate_or_grow(pool, bytes, owner, false, off, error);
}

int pms_pool_allocate_slot(struct pms_pool *pool, uint64_t bytes, uint64_t *off,
                           struct pms_error *error)
{
    int status = publish_marks(pool, error);
    return status == PMS_OK ? allocate_or_grow(pool, bytes, PMS_OWNER_USER, true, off, error)
                            : status;
}
