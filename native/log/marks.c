#include "log/marks.h"

#define FILL_MIN 64u /* words */

/* Thousands of pages are marked at once where a large block changes: as fast as the memory takes
 * it. Each word is whole at any time. */
static void fill(_Atomic uint64_t *word, uint64_t count, uint64_t value)
{
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
    if (count >= FILL_MIN) {
        /* what follows it is seen after it */
        __asm__ volatile("rep stosq" : "+D"(word), "+c"(count) : "a"(value) : "memory");
        return;
    }
#endif
    for (uint64_t i = 0; i < count; i++)
        atomic_store_explicit(&word[i], value, memory_order_release);
}

/* The pages leave the marks of their blocks, where those have one. */
static void set_pages(struct pms_marks *m, uint64_t off, uint64_t len, uint64_t value)
{
    uint64_t first = off / PMS_PAGE, last = (off + len - 1) / PMS_PAGE;
    for (uint64_t p = first; p <= last; p++) {
        uint64_t old = atomic_load_explicit(&m->page[p], memory_order_relaxed);
        if (!(old & PMS_MARK_WHOLE))
            continue;
        uint64_t block = old & ~PMS_MARK_WHOLE;
        m->whole[block].all = false;
        p = block + m->whole[block].pages - 1; /* the range may reach into the next block */
    }
    fill(&m->page[first], last - first + 1, value);
}

void pms_undo_set_changed(struct pms_undo *u, uint64_t off, uint64_t len)
{
    set_pages(&u->changed, off, len, u->tag);
}

void pms_undo_set_prepared(struct pms_undo *u, uint64_t off, uint64_t len)
{
    PMS_ASSERT(off % PMS_PAGE == 0 && len % PMS_PAGE == 0);
    set_pages(&u->prepared, off, len, u->tag);
}

static void set_block(struct pms_marks *m, uint64_t off, uint64_t len, uint64_t value)
{
    uint64_t first = off / PMS_PAGE, pages = len / PMS_PAGE;
    struct pms_whole *w = &m->whole[first];
    PMS_ASSERT(off % PMS_PAGE == 0 && len % PMS_PAGE == 0 && len > 0 &&
               (w->pages == 0 || w->pages == pages));
    atomic_store_explicit(&w->value, value, memory_order_release);
    if (!w->all)
        fill(&m->page[first], pages, PMS_MARK_WHOLE | first);
    w->pages = pages;
    w->all = true;
}

void pms_undo_tag_block(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t tag)
{
    set_block(&u->prepared, off, len, tag);
}

void pms_undo_change_block(struct pms_undo *u, uint64_t off, uint64_t len)
{
    set_block(&u->changed, off, len, u->tag);
}

uint64_t pms_undo_block_tag(const struct pms_undo *u, uint64_t off)
{
    const struct pms_whole *w = &u->prepared.whole[off / PMS_PAGE];
    return w->pages ? atomic_load_explicit(&w->value, memory_order_relaxed) : 0;
}

uint64_t pms_undo_block_end(const struct pms_undo *u, uint64_t end)
{
    const struct pms_marks *m = &u->prepared;
    uint64_t mark = atomic_load_explicit(&m->page[end / PMS_PAGE - 1], memory_order_relaxed),
             first = mark & ~PMS_MARK_WHOLE;
    return mark & PMS_MARK_WHOLE ? (first + m->whole[first].pages) * PMS_PAGE : end;
}

static void part(struct pms_marks *m, uint64_t first)
{
    struct pms_whole *w = &m->whole[first];
    uint64_t value = atomic_load_explicit(&w->value, memory_order_relaxed);
    for (uint64_t p = first; p < first + w->pages; p++)
        if (atomic_load_explicit(&m->page[p], memory_order_relaxed) & PMS_MARK_WHOLE)
            atomic_store_explicit(&m->page[p], value, memory_order_release);
    w->pages = 0;
    w->all = false;
}

void pms_undo_part_block(struct pms_undo *u, uint64_t off)
{
    uint64_t first = off / PMS_PAGE;
    pms_undo_lock(u); /* the fault handler marks pages too */
    uint64_t tag = pms_undo_block_tag(u, off);
    PMS_ASSERT(tag != PMS_TAG_IDLE);
    /* published just now: without the mark nobody knows that all of it is to be protected */
    if (tag == u->tag)
        pms_dirty_note(&u->dirty, PMS_DIRTY_FRESH, off, u->prepared.whole[first].pages * PMS_PAGE);
    part(&u->prepared, first);
    part(&u->changed, first);
    pms_undo_unlock(u);
}
