#include "log/idle.h"

#include "log/marks.h"

bool pms_idle_is(const struct pms_undo *u, uint64_t off)
{
    /* of the block: a page of it may have been captured alone */
    return pms_undo_block_tag(u, off) == PMS_TAG_IDLE;
}

void pms_idle_leave(struct pms_undo *u, uint64_t off) { u->left[off / PMS_PAGE] = u->tag; }

uint64_t pms_idle_left_by(const struct pms_undo *u, uint64_t off)
{
    return u->left[off / PMS_PAGE];
}

bool pms_idle_is_left(const struct pms_undo *u, uint64_t off)
{
    return u->left[off / PMS_PAGE] == u->tag;
}

void pms_idle_open(struct pms_undo *u, uint64_t off, uint64_t len)
{
    PMS_ASSERT(!pms_idle_is_left(u, off));
    if (pms_idle_is(u, off) && pms_map_all_writable(u->map, off, len))
        return;
    if (!u->prepared.whole[off / PMS_PAGE].pages) /* the first time */
        pms_map_set_apart(u->map, off, len);
    pms_undo_lock(u);
    pms_undo_keep(u, off, len); /* I6 */
    pms_undo_tag_block(u, off, len, PMS_TAG_IDLE);
    pms_map_unprotect_surely(u->map, off, len);
    pms_undo_unlock(u);
}

void pms_idle_publish_locked(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t used)
{
    PMS_ASSERT(used > 0 && used <= len && used % PMS_PAGE == 0 && !pms_idle_is_left(u, off));
    u->stored = true;
    pms_undo_change_block(u, off, len);
    pms_undo_tag_block(u, off, len, u->tag);
    pms_dirty_note(&u->dirty, PMS_DIRTY_FRESH, off, used);
}

void pms_idle_publish(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t used)
{
    pms_undo_lock(u);
    /* never opened: it is the version before, which open snapshots may need, and is stored to
     * from now on (I6) */
    if (!pms_idle_is(u, off))
        pms_undo_keep(u, off, len);
    pms_idle_publish_locked(u, off, len, used);
    pms_undo_unlock(u);
}

void pms_idle_close(struct pms_undo *u, uint64_t off, uint64_t len)
{
    if (!pms_idle_is(u, off))
        return;
    pms_undo_lock(u);
    int err = pms_map_protect(u->map, off, len);
    if (err)
        err = pms_map_protect(u->map, 0, u->map->bytes); /* one mapping of all: can not run out */
    PMS_ASSERT(err == 0);
    /* after the protection: a page that needs a pre-image is never writable */
    pms_undo_tag_block(u, off, len, 0);
    pms_map_set_astray(u->map, off, len, true);
    pms_undo_unlock(u);
}
