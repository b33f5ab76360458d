#include "heap/state.h"

static struct pms_extent *extent_at(const struct pms_heap *h, uint64_t page)
{
    uint64_t start = pms_starts_before(&h->starts, page);
    struct pms_extent *e = start == PMS_NO_PAGE ? NULL : pms_index_at(&h->index, start);
    return e && page - e->page < e->pages ? e : NULL;
}

struct pms_extent *pms_heap_live_block(const struct pms_heap *h, uint64_t off)
{
    struct pms_extent *e = extent_at(h, off / PMS_PAGE);
    if (!e)
        return NULL;
    if (e->state == PMS_EXTENT_LARGE)
        return off == e->page * PMS_PAGE ? e : NULL;
    if (e->state != PMS_EXTENT_SLAB || (off - e->page * PMS_PAGE) % pms_class_bytes(e->cls))
        return NULL;
    uint32_t slot = pms_heap_slot_at(e, off);
    return slot < pms_class_slots(e->cls) && pms_heap_slot_live(h, e, slot) ? e : NULL;
}

bool pms_heap_find(const struct pms_heap *h, uint64_t off, struct pms_block *block)
{
    struct pms_descriptor x;
    uint64_t page = off / PMS_PAGE;
    const struct pms_table *t = pms_heap_table_of(h, page);
    uint64_t start = t ? pms_starts_before(&h->starts, page) : PMS_NO_PAGE;
    if (start == PMS_NO_PAGE || start < t->first || pms_table_decode(h->map, t, start, &x) ||
        page - start >= x.pages)
        return false;
    *block = (struct pms_block){.off = start * PMS_PAGE,
                                .bytes = x.pages * PMS_PAGE,
                                .extent_off = start * PMS_PAGE,
                                .extent_bytes = x.pages * PMS_PAGE,
                                .kind = x.kind,
                                .live = pms_kind_is_large(x.kind),
                                .slot = x.slot};
    if (!pms_kind_is_slab(x.kind))
        return block->live;
    uint32_t slot = (uint32_t)(off - block->off) / pms_class_bytes(x.cls);
    if (slot >= pms_class_slots(x.cls))
        return false;
    block->bytes = pms_class_bytes(x.cls);
    block->off += slot * block->bytes;
    block->live = pms_table_slot(h->map, t, start, slot);
    return true;
}

bool pms_heap_next_used(const struct pms_heap *h, uint64_t page, struct pms_block *extent)
{
    static const enum pms_kind kinds[2][2] = {{PMS_KIND_LARGE, PMS_KIND_SLAB},
                                              {PMS_KIND_META_LARGE, PMS_KIND_META_SLAB}};
    for (uint64_t start = page; (start = pms_starts_after(&h->starts, start)) != PMS_NO_PAGE;
         start++) {
        const struct pms_extent *e = pms_index_at(&h->index, start);
        if (!e || (e->state != PMS_EXTENT_LARGE && e->state != PMS_EXTENT_SLAB))
            continue;
        *extent = (struct pms_block){
            .off = e->page * PMS_PAGE,
            .bytes = e->pages * PMS_PAGE,
            .live = true,
            .extent_off = e->page * PMS_PAGE,
            .extent_bytes = e->pages * PMS_PAGE,
            .kind = kinds[e->owner == PMS_OWNER_ENGINE][e->state == PMS_EXTENT_SLAB]};
        return true;
    }
    return false;
}

bool pms_heap_is_fresh(const struct pms_heap *h, uint64_t off)
{
    const struct pms_extent *e = extent_at(h, off / PMS_PAGE);
    if (!e || e->state != PMS_EXTENT_SLAB)
        return e && pms_heap_born_now(h, e);
    uint32_t slot = pms_heap_slot_at(e, off);
    return e->bits_round == h->round && slot < pms_class_slots(e->cls) &&
           pms_bit(pms_slab_born(e), slot);
}

void pms_heap_stats(const struct pms_heap *h, struct pms_heap_stats *st)
{
    *st = (struct pms_heap_stats){.data_bytes = h->data_pages * PMS_PAGE,
                                  .used_bytes = h->live_bytes,
                                  .free_bytes = h->index.free_pages * PMS_PAGE + h->slot_room,
                                  .largest_free = pms_index_largest(&h->index) * PMS_PAGE,
                                  .blocks = h->live_blocks,
                                  .log_need = h->log_need,
                                  .slot_need = h->slot_need};
    for (uint64_t i = 0; i < h->index.pin_room; i++) {
        const struct pms_pin *pin = &h->index.pin[i];
        if (pin->off && !pms_heap_live_block(h, pin->off))
            st->pinned_bytes += pin->bytes;
    }
}

struct walk {
    const struct pms_heap *heap;
    int (*fn)(void *ctx, const struct pms_block *block);
    void *ctx;
};

static int walk_extent(void *ctx, const struct pms_table *t, const struct pms_descriptor *x,
                       struct pms_error *error)
{
    (void)error;
    const struct walk *w = ctx;
    struct pms_block b = {.off = x->page * PMS_PAGE,
                          .bytes = x->pages * PMS_PAGE,
                          .extent_off = x->page * PMS_PAGE,
                          .extent_bytes = x->pages * PMS_PAGE,
                          .kind = x->kind,
                          .live = true};
    if (!pms_kind_is_slab(x->kind))
        return pms_kind_is_large(x->kind) ? w->fn(w->ctx, &b) : 0;
    b.bytes = pms_class_bytes(x->cls);
    for (uint32_t i = 0; i < pms_slab_words(x->cls); i++)
        for (uint64_t live = pms_table_load(w->heap->map, pms_table_bitmap(t, x->page, i)); live;
             live &= live - 1) {
            b.off = b.extent_off + (i * 64 + (uint64_t)__builtin_ctzll(live)) * b.bytes;
            int stop = w->fn(w->ctx, &b);
            if (stop)
                return stop;
        }
    return 0;
}

int pms_heap_walk(const struct pms_heap *h, int (*fn)(void *ctx, const struct pms_block *block),
                  void *ctx, struct pms_error *error)
{
    struct walk w = {h, fn, ctx};
    for (uint32_t i = 0; i < pms_heap_table_count(h); i++) {
        int stop = pms_table_each(h->map, &h->table[i], walk_extent, &w, error);
        if (stop)
            return stop;
    }
    return PMS_OK;
}
