/* What a held version needs of the heap, found in the log of the transaction after it: the blocks
 * that this one freed. Each had its page table entry, or its bit in a slab's bitmap, captured. */
#include <stdlib.h>

#include "heap/state.h"
#include "log/entries.h"

struct old { /* an entry of the page table as the version has it */
    uint64_t page;
    struct pms_pte pte;
};

struct gather {
    struct pms_heap *heap;
    struct old *old;
    uint64_t count, room;
};

static int add(struct gather *g, uint64_t page, struct pms_pte pte)
{
    if (g->count == g->room) {
        uint64_t room = g->room ? 2 * g->room : 256;
        struct old *more = realloc(g->old, room * sizeof *more);
        if (!more)
            return -1;
        g->old = more;
        g->room = room;
    }
    g->old[g->count++] = (struct old){page, pte};
    return 0;
}

static int gather(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct gather *g = ctx;
    const struct pms_pte *pte = image;
    for (uint32_t i = 0; i < pms_heap_table_count(g->heap); i++) {
        const struct pms_table *t = &g->heap->table[i];
        if (entry->target < t->off || entry->target - t->off >= t->pages * sizeof *pte)
            continue;
        uint64_t first = (entry->target - t->off) / sizeof *pte, count = entry->len / sizeof *pte;
        for (uint64_t k = 0; k < count && first + k < t->pages; k++)
            if (add(g, t->first + first + k, pte[k]))
                return -1;
        return 0;
    }
    return 0;
}

/* The version's block, or slab, lies in pages that are free now. */
static int hold_pages(struct pms_heap *h, struct pms_extent *e, const struct old *old)
{
    struct pms_descriptor x;
    const struct pms_table *t = pms_heap_table_of(h, old->page);
    if (pms_table_decode_pte(t, old->page, &old->pte, &x) || x.kind == PMS_KIND_FREE ||
        x.pages > e->page + e->pages - old->page)
        return 0; /* no block began there: a bitmap's words, or of no meaning */
    if (e->state == PMS_EXTENT_FREE) {
        if (pms_index_reserve(&h->index))
            return -1;
        e = pms_index_carve(&h->index, e, x.page, x.pages);
        e->owner = (uint8_t)pms_kind_owner(x.kind);
        e->slot = x.slot;
        pms_heap_charge(h, e);
    }
    pms_index_hold(&h->index, e); /* else it is DEAD already: a view has it pinned */
    return 0;
}

static void hold_slots(struct pms_heap *h, struct pms_extent *e, uint32_t word, uint64_t old)
{
    uint64_t at = pms_table_bitmap(pms_heap_table_of(h, e->page), e->page, word);
    if (word >= pms_slab_words(e->cls))
        return;
    for (uint64_t gone = old & ~pms_table_load(h->map, at); gone; gone &= gone - 1) {
        uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(gone);
        if (slot >= pms_class_slots(e->cls))
            return;
        pms_bit_set(pms_slab_held(e), slot);
        pms_index_hold(&h->index, e);
        if (pms_bit(pms_slab_busy(e), slot))
            continue; /* pinned */
        pms_bit_set(pms_slab_busy(e), slot);
        e->used++;
        h->slot_room -= pms_class_bytes(e->cls);
        pms_slab_list(&h->index, e);
    }
}

/* Both in order of address. */
static int hold_all(struct pms_heap *h, const struct old *old, uint64_t count)
{
    uint64_t made =
        PMS_NO_PAGE; /* slab that the transaction made: no slot of it is the version's */
    struct pms_extent *e = h->index.first;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t page = old[i].page;
        while (e && e->page + e->pages <= page)
            e = e->next;
        if (!e || page < e->page)
            continue;
        if (e->state == PMS_EXTENT_SLAB && page == e->page) {
            struct pms_pte now = {
                pms_table_load(h->map, pms_table_entry(pms_heap_table_of(h, page), page)), 0};
            made = now.word == old[i].pte.word ? PMS_NO_PAGE : page;
        } else if (e->state == PMS_EXTENT_SLAB && e->page != made) {
            uint32_t word = (uint32_t)(page - e->page - 1) * 2;
            hold_slots(h, e, word, old[i].pte.word);
            hold_slots(h, e, word + 1, old[i].pte.aux);
        } else if (e->state == PMS_EXTENT_FREE ||
                   (e->state == PMS_EXTENT_DEAD && page == e->page)) {
            if (hold_pages(h, e, &old[i]))
                return -1;
        }
    }
    return 0;
}

int pms_heap_hold(struct pms_heap *h, uint64_t tag, struct pms_error *error)
{
    struct gather g = {.heap = h};
    int failed = pms_undo_scan(h->undo, tag, gather, &g);
    if (!failed) {
        pms_sort(g.old, g.count, sizeof *g.old);
        failed = hold_all(h, g.old, g.count);
    }
    free(g.old);
    return failed ? pms_fail(error, PMS_E_OS, "no memory for the heap's index") : PMS_OK;
}
