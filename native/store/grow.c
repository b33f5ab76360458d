/* Growing a store by a segment, and blocks that may need it.
 *
 *   1  drain    domain file: images in the journal go home
 *   2  reserve  room for a footer behind the new end; the footer in force is no more: copies are
 *               refused
 *   3  format   page table and log of the segment, behind what the superblock counts
 *   4  map      the views reach over it, at the addresses set aside by open
 *   5  publish  the superblock, then its twin
 *   6  footer   begins at the new end
 *   7  learn    log, journal and heap know the segment
 *
 * Crash in 1 => nothing has changed: what is home is in the journal too. In 2 to 4 => the file is
 * longer than its superblock says, and the next growth formats that part again. In 5 => one copy of
 * the superblock knows the segment and the other does not; the newer one holds if it is whole, and
 * either is true. In 6 and 7 => the segment is there, and empty. */
#include "store/grow.h"

#include "commit/pool_state.h"
#include "seam/footer.h"

static int grow_file(struct pms_pool *pool, struct pms_superblock *super, uint32_t first,
                     struct pms_error *error)
{
    int status = pms_super_format_segments(pool->opened.fd, &pool->persist, super, first, error);
    if (status == PMS_OK)
        status = pms_map_grow(&pool->map, super->file_bytes, error);
    if (status == PMS_OK)
        /* on an error the superblock in force does not know the new part */
        status = pms_super_write_both(pool->opened.fd, &pool->persist, super, error);
    return status;
}

/* The new part begins where the footer is. */
static int grow_beyond_footer(struct pms_pool *pool, struct pms_superblock *super, uint32_t first,
                              struct pms_error *error)
{
    if (!pool->map.footer)
        return grow_file(pool, super, first, error);
    int status = pms_footer_reserve(pool->opened.fd, super->file_bytes, error);
    if (status != PMS_OK)
        return status;
    pms_undo_lock(&pool->undo);
    pms_footer_end(&pool->map);
    pms_undo_unlock(&pool->undo);
    status = grow_file(pool, super, first, error);
    pms_undo_lock(&pool->undo);
    bool in_memory = pool->undo.log.in_memory;
    pms_footer_begin(&pool->map, in_memory ? pool->tx.last : pool->undo.tag,
                     in_memory ? PMS_FOOTER_ALL : pms_undo_entries(&pool->undo));
    pms_undo_unlock(&pool->undo);
    return status;
}

int pms_pool_grow(struct pms_pool *pool, uint64_t bytes, struct pms_error *error)
{
    struct pms_superblock super = pool->super;
    uint32_t first = super.segment_count;
    uint64_t failed_syncs = pool->persist.failed_syncs;
    int status = pms_super_plan_growth(&super, bytes, error);
    if (status == PMS_OK && pool->journal)
        status = pms_journal_drain(pool->journal, error);
    if (status == PMS_OK)
        status = grow_beyond_footer(pool, &super, first, error);
    if (pool->persist.failed_syncs > failed_syncs) {
        /* The file may name the new part or not, so nothing may be written there again: another
         * growth would overwrite its page table. */
        pool->failed = true;
        return PMS_E_OS;
    }
    if (status != PMS_OK)
        return status;
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

int pms_pool_allocate(struct pms_pool *pool, uint64_t bytes, enum pms_owner owner, uint64_t *off,
                      struct pms_error *error)
{
    int status = pms_heap_alloc(pool->heap, bytes, owner, off, error);
    if (status != PMS_E_FULL)
        return status;
    struct pms_error grown;
    if (pms_pool_grow(pool, bytes, &grown) != PMS_OK) {
        if (error)
            *error = grown;
        return grown.status;
    }
    return pms_heap_alloc(pool->heap, bytes, owner, off, error);
}
