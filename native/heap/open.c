#include <errno.h>
#include <stdlib.h>

#include "base/sort.h"
#include "heap/state.h"
#include "log/charge.h"

#define LOG_SLACK (2u * PMS_PAGE) /* root record, and the descriptors' rounding to granules */

/* ---- segments ---- */

static bool segment_sound(const struct pms_heap *h, const struct pms_segment *s, uint64_t after)
{
    uint64_t bytes = h->map->bytes;
    if (s->table_off % PMS_PAGE || s->data_off % PMS_PAGE || s->data_off > bytes ||
        s->table_off > bytes)
        return false;
    if (s->data_pages < 1 || s->data_pages > PMS_EXTENT_PAGES_MAX ||
        s->data_pages > (bytes - s->data_off) / PMS_PAGE)
        return false;
    if (s->table_off < PMS_OFF_SEGMENTS || s->table_off < after || s->data_off < s->table_off)
        return false;
    return s->data_pages <= (s->data_off - s->table_off) / sizeof(struct pms_pte);
}

static int add_table(struct pms_heap *h, struct pms_error *error)
{
    uint32_t i = pms_heap_table_count(h);
    const struct pms_segment *s = &h->super->segment[i];
    uint64_t after = i ? (h->table[i - 1].first + h->table[i - 1].pages) * PMS_PAGE : 0;
    if (!segment_sound(h, s, after))
        return pms_fail(error, PMS_E_CORRUPT, "superblock: place of segment %u", i);
    h->table[i] = (struct pms_table){s->data_off / PMS_PAGE, s->data_pages, s->table_off};
    atomic_store_explicit(&h->table_count, i + 1, memory_order_release);
    return PMS_OK;
}

/* ---- building the index ---- */

static struct pms_extent *index_slab(struct pms_heap *h, const struct pms_table *t,
                                     const struct pms_descriptor *x)
{
    uint64_t *bits = pms_slab_bits_new(x->cls);
    if (!bits)
        return NULL;
    struct pms_extent *e = pms_index_append(&h->index, x->page, x->pages, PMS_EXTENT_SLAB);
    e->bits = bits;
    e->cls = (uint8_t)x->cls;
    e->owner = (uint8_t)pms_kind_owner(x->kind);
    for (uint32_t w = 0; w < pms_slab_words(x->cls); w++) {
        uint64_t live = pms_table_load(h->map, pms_table_bitmap(t, x->page, w));
        bits[w] |= live;
        e->used += (uint32_t)__builtin_popcountll(live);
    }
    h->live_blocks += e->used;
    h->live_bytes += (uint64_t)e->used * pms_class_bytes(x->cls);
    h->slot_room += (uint64_t)(pms_class_slots(x->cls) - e->used) * pms_class_bytes(x->cls);
    return e;
}

static int index_extent(void *ctx, const struct pms_table *t, const struct pms_descriptor *x,
                        struct pms_error *error)
{
    struct pms_heap *h = ctx;
    if (pms_index_reserve(&h->index))
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    if (x->slot && !(h->super->features_incompat & PMS_FEATURE_THIN))
        return pms_fail(error, PMS_E_CORRUPT, "page table: kind of an extent");
    pms_starts_set(&h->starts, x->page);
    pms_starts_clear(&h->starts, x->page + 1, x->page + x->pages);
    if (x->kind == PMS_KIND_FREE) {
        pms_index_append(&h->index, x->page, x->pages, PMS_EXTENT_FREE);
        return PMS_OK;
    }
    if (pms_kind_is_slab(x->kind)) {
        struct pms_extent *e = index_slab(h, t, x);
        if (!e)
            return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
        pms_heap_charge(h, e);
        pms_slab_list(&h->index, e);
        return PMS_OK;
    }
    struct pms_extent *e = pms_index_append(&h->index, x->page, x->pages, PMS_EXTENT_LARGE);
    e->owner = (uint8_t)pms_kind_owner(x->kind);
    e->slot = x->slot;
    pms_heap_charge(h, e);
    h->live_blocks++;
    h->live_bytes += x->pages * PMS_PAGE;
    return PMS_OK;
}

static int index_table(struct pms_heap *h, const struct pms_table *t, struct pms_error *error)
{
    h->data_pages += t->pages;
    h->log_need += pms_heap_table_cost(t->pages);
    return pms_table_each(h->map, t, index_extent, h, error);
}

struct by_page { /* to be sorted */
    uint64_t page;
    const struct pms_pin *pin;
};

/* A pin found again: in a live extent, or in pages that the roll back made free, which stay out
 * of the bins (I6). range: the first extent that ends behind the pin's first page. */
static bool restore_pin(struct pms_heap *h, const struct pms_pin *pin, struct pms_extent *range)
{
    struct pms_extent *e = range;
    if (e->state == PMS_EXTENT_FREE) {
        if (pin->page < e->page || pin->pages > e->page + e->pages - pin->page)
            return false;
        e = pms_index_carve(&h->index, range, pin->page, pin->pages);
        e->slot = pin->slot;
        pms_heap_charge(h, e);
    }
    if (e->page != pin->page || e->pages != pin->pages)
        return false;
    e->pins++;
    if (e->state == PMS_EXTENT_SLAB && !pms_bit(pms_slab_busy(e), pms_heap_slot_at(e, pin->off))) {
        pms_bit_set(pms_slab_busy(e), pms_heap_slot_at(e, pin->off));
        e->used++;
        h->slot_room -= pms_class_bytes(e->cls);
        pms_slab_list(&h->index, e);
    }
    return true;
}

static int restore_pins(struct pms_heap *h, struct pms_error *error)
{
    struct pms_index *ix = &h->index;
    if (!ix->pin_used)
        return PMS_OK;
    struct by_page *pins = malloc(ix->pin_used * sizeof *pins);
    if (!pins)
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    uint64_t n = 0;
    for (uint64_t i = 0; i < ix->pin_room; i++)
        if (ix->pin[i].off)
            pins[n++] = (struct by_page){ix->pin[i].page, &ix->pin[i]};
    pms_sort(pins, n, sizeof *pins);
    int status = PMS_OK;
    struct pms_extent *e = ix->first;
    for (uint64_t i = 0; i < n && !status; i++) {
        while (e && e->page + e->pages <= pins[i].page)
            e = e->next;
        if (pms_index_reserve(ix))
            status = pms_fail(error, PMS_E_OS, "no memory for the heap's index");
        else if (!e || !restore_pin(h, pins[i].pin, e))
            status = pms_fail(error, PMS_E_CORRUPT,
                              "page table: the extent of a block in use has changed");
        else
            e = pms_index_at(ix, pins[i].page);
    }
    free(pins);
    return status;
}

/* The log that the blocks need. After a roll back it is there: they needed no less before. */
static int back_log(struct pms_heap *h, struct pms_error *error)
{
    errno = pms_charge_ordinary(h->undo, h->log_need - h->slot_need);
    return errno ? pms_fail_errno(error, "the disk has no room for the store's log, which takes "
                                         "what its arrays do; without it the store can be read "
                                         "(mode 'r')")
                 : PMS_OK;
}

int pms_heap_rebuild(struct pms_heap *h, struct pms_error *error)
{
    pms_index_reset(&h->index);
    h->round++;
    h->data_pages = h->live_bytes = h->live_blocks = h->slot_room = 0;
    h->log_need = LOG_SLACK;
    h->slot_need = 0;
    for (uint32_t i = 0; i < pms_heap_table_count(h); i++) {
        int status = index_table(h, &h->table[i], error);
        if (status)
            return status;
    }
    int status = restore_pins(h, error);
    return status ? status : back_log(h, error);
}

int pms_heap_add_segment(struct pms_heap *h, uint32_t i, struct pms_error *error)
{
    PMS_ASSERT(i == pms_heap_table_count(h) && i < h->super->segment_count);
    int status = add_table(h, error);
    return status ? status : index_table(h, &h->table[i], error);
}

/* What fits in the logs when they are not cut in halves, as they may have been when it was
 * allocated. */
static uint64_t whole_logs(const struct pms_superblock *super)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < super->segment_count; i++)
        sum += pms_log_room_of(super->segment[i].log_bytes);
    return sum;
}

static int fill(struct pms_heap *h, struct pms_error *error)
{
    uint64_t room = h->map->reserve > h->map->bytes ? h->map->reserve : h->map->bytes;
    if (pms_starts_open(&h->starts, room / PMS_PAGE))
        return pms_fail_errno(error, "reserving memory for the heap's index");
    if (h->super->segment_count < 1 || h->super->segment_count > PMS_MAX_SEGMENTS)
        return pms_fail(error, PMS_E_CORRUPT, "superblock: number of segments");
    while (pms_heap_table_count(h) < h->super->segment_count) {
        int status = add_table(h, error);
        if (status)
            return status;
    }
    int status = pms_heap_rebuild(h, error);
    if (status == PMS_OK && h->log_need > whole_logs(h->super))
        /* no store of ours: an allocation checks it (I5) */
        status = pms_fail(error, PMS_E_CORRUPT,
                          "page table: more is allocated than the log has room for");
    return status;
}

int pms_heap_open(struct pms_heap **heap, struct pms_undo *undo, const struct pms_superblock *super,
                  struct pms_error *error)
{
    PMS_ASSERT(pms_class_count() <= PMS_CLASSES);
    struct pms_heap *h = calloc(1, sizeof *h);
    *heap = NULL;
    if (!h)
        return pms_fail(error, PMS_E_OS, "no memory for the heap's index");
    h->undo = undo;
    h->map = undo->map;
    h->super = super;
    int status = fill(h, error);
    if (status) {
        pms_heap_close(h);
        return status;
    }
    *heap = h;
    return PMS_OK;
}

void pms_heap_close(struct pms_heap *h)
{
    if (!h)
        return;
    pms_starts_close(&h->starts);
    pms_index_close(&h->index);
    free(h);
}
