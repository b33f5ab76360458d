#include "log/stores.h"

#include "log/entries.h"
#include "log/marks.h"

#define PAGE_GRANULES (PMS_PAGE / PMS_GRANULE)

static bool granule_get(uint64_t (*bits)[2], uint64_t g)
{
    return bits[g / PAGE_GRANULES][g % PAGE_GRANULES / 64] >> (g % 64) & 1;
}

static void granule_set(uint64_t (*bits)[2], uint64_t g)
{
    bits[g / PAGE_GRANULES][g % PAGE_GRANULES / 64] |= 1ull << (g % 64);
}

static bool granule_prepared(const struct pms_undo *u, uint64_t g)
{
    return granule_get(u->granules.captured, g) || pms_undo_page_prepared(u, g / PAGE_GRANULES);
}

void pms_undo_prepare_locked(struct pms_undo *u, uint64_t off, uint64_t len)
{
    uint64_t g = off / PMS_GRANULE, end = (off + len + PMS_GRANULE - 1) / PMS_GRANULE;
    while (g < end) {
        if (granule_prepared(u, g)) {
            g++;
            continue;
        }
        uint64_t first = g;
        for (; g < end && !granule_prepared(u, g); g++)
            granule_set(u->granules.captured, g);
        pms_undo_append(u, first * PMS_GRANULE, (g - first) * PMS_GRANULE);
        pms_dirty_note(&u->dirty, PMS_DIRTY_ENGINE, first * PMS_GRANULE, (g - first) * PMS_GRANULE);
    }
}

/* In private views engine and user share their pages: those the engine stores to stay writable
 * once they are. */
void pms_undo_make_writable(struct pms_undo *u, uint64_t off, uint64_t len)
{
    uint64_t first = off / PMS_PAGE, end = (off + len + PMS_PAGE - 1) / PMS_PAGE;
    if (!u->map->shared)
        pms_map_unprotect_surely(u->map, first * PMS_PAGE, (end - first) * PMS_PAGE);
}

static bool any_born(const struct pms_undo *u, uint64_t off, uint64_t len)
{
    for (uint64_t g = off / PMS_GRANULE; g * PMS_GRANULE < off + len; g++)
        if (granule_get(u->granules.born, g))
            return true;
    return false;
}

static void store_locked(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    u->stored = true;
    pms_undo_make_writable(u, off, len);
    pms_persist_store(u->persist, pms_map_at(u->map, off), src, len);
    if (any_born(u, off, len)) /* what was captured is written back at commit */
        pms_persist_flush(u->persist, pms_map_at(u->map, off), len);
}

void pms_undo_write_locked(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    PMS_ASSERT(!u->log.unfenced); /* I2 */
    for (uint64_t g = off / PMS_GRANULE; g * PMS_GRANULE < off + len; g++)
        PMS_ASSERT(granule_prepared(u, g)); /* I3 */
    store_locked(u, off, src, len);
}

void pms_undo_store_all(struct pms_undo *u, const struct pms_store *s, uint32_t count)
{
    pms_undo_lock(u);
    for (uint32_t i = 0; i < count; i++)
        pms_undo_prepare_locked(u, s[i].off, s[i].len);
    /* F1: the entries of all ranges, before the first store to one (I2) */
    pms_undo_fence_locked(u);
    for (uint32_t i = 0; i < count; i++)
        store_locked(u, s[i].off, s[i].src, s[i].len);
    pms_undo_unlock(u);
}

void pms_undo_store(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    pms_undo_store_all(u, &(struct pms_store){off, src, len}, 1);
}

/* Marks the granules of a range that needs no pre-image. false: all of them were marked before. */
static bool mark_born(struct pms_undo *u, uint64_t off, uint64_t len)
{
    bool any = false;
    for (uint64_t g = off / PMS_GRANULE, end = (off + len + PMS_GRANULE - 1) / PMS_GRANULE;
         g < end;) {
        uint64_t *word = u->granules.born[g / PAGE_GRANULES],
                 *prepared = u->granules.captured[g / PAGE_GRANULES];
        if (g % PAGE_GRANULES == 0 && end - g >= PAGE_GRANULES) { /* whole pages at once */
            any |= (word[0] & word[1]) != ~0ull;
            word[0] = word[1] = prepared[0] = prepared[1] = ~0ull;
            g += PAGE_GRANULES;
        } else {
            any |= !granule_get(u->granules.born, g);
            granule_set(u->granules.captured, g);
            granule_set(u->granules.born, g++);
        }
    }
    return any;
}

void pms_undo_note_born(struct pms_undo *u, uint64_t off, uint64_t len)
{
    pms_undo_lock(u);
    pms_undo_keep(u, off, len); /* I6 */
    u->stored = true;
    pms_undo_set_changed(u, off, len);
    /* else it is on the list: a block that comes and goes must not make it longer for ever */
    if (mark_born(u, off, len))
        pms_dirty_note(&u->dirty, PMS_DIRTY_BORN, off, len);
    pms_undo_make_writable(u, off, len);
    pms_undo_unlock(u);
}

void pms_undo_store_fresh(struct pms_undo *u, uint64_t off, const void *src, uint64_t len)
{
    if (!len)
        return;
    pms_undo_note_born(u, off, len);
    /* Not under the lock: a large copy would keep faulting threads waiting, and nobody else
     * knows this block yet. */
    struct pms_persist own = {.flush = u->persist->flush};
    if (src)
        pms_persist_copy(&own, pms_map_at(u->map, off), src, len);
    else
        pms_persist_zero(&own, pms_map_at(u->map, off), len);
    pms_undo_count(u, &own);
}

void pms_undo_count(struct pms_undo *u, const struct pms_persist *own)
{
    pms_undo_lock(u); /* the fault handler counts too */
    pms_persist_add(u->persist, own);
    pms_undo_unlock(u);
}

static bool all_listed(const struct pms_undo *u, uint64_t off, uint64_t len)
{
    for (uint64_t p = off / PMS_PAGE, end = (off + len) / PMS_PAGE; p < end; p++)
        if (pms_undo_page_tag(u, p) != u->tag)
            return false;
    return true;
}

void pms_undo_mark_fresh(struct pms_undo *u, uint64_t off, uint64_t len)
{
    pms_undo_lock(u);
    pms_undo_keep(u, off, len); /* I6 */
    u->stored = true;
    pms_undo_set_changed(u, off, len);
    if (!all_listed(u, off, len)) { /* else the list has these pages already */
        pms_undo_set_prepared(u, off, len);
        pms_dirty_note(&u->dirty, PMS_DIRTY_FRESH, off, len);
    }
    pms_undo_unlock(u);
}
