#include "heap/table.h"

#include <stddef.h>

#include "base/checksum.h"

#define CLASS_SHIFT 36u
#define KIND_SHIFT 44u
#define CHECK_SHIFT 48u

struct pms_pte pms_table_encode(const struct pms_descriptor *x)
{
    PMS_ASSERT(x->pages >= 1 && x->pages <= PMS_EXTENT_PAGES_MAX && x->cls < 256);
    uint64_t kind = x->slot ? PMS_KIND_SLOT : x->kind;
    uint64_t word = x->pages | (uint64_t)x->cls << CLASS_SHIFT | kind << KIND_SHIFT;
    return (struct pms_pte){word | (uint64_t)pms_check16(x->page, word) << CHECK_SHIFT, x->aux};
}

static inline const char *decode(const struct pms_table *t, uint64_t page, struct pms_pte pte,
                                 struct pms_descriptor *x)
{
    uint64_t word = pte.word, bare = word & ((1ull << CHECK_SHIFT) - 1);
    *x = (struct pms_descriptor){.page = page,
                                 .pages = bare & PMS_EXTENT_PAGES_MAX,
                                 .aux = pte.aux,
                                 .kind = (enum pms_kind)(bare >> KIND_SHIFT),
                                 .cls = (unsigned)(bare >> CLASS_SHIFT & 0xff)};
    if (pms_check16(page, bare) != word >> CHECK_SHIFT)
        return "check bits of an extent's descriptor";
    x->slot = x->kind == PMS_KIND_SLOT;
    if (x->slot)
        x->kind = PMS_KIND_LARGE;
    if (x->kind < PMS_KIND_FREE || x->kind > PMS_KIND_META_SLAB)
        return "kind of an extent";
    if (x->pages < 1 || x->pages > t->first + t->pages - page)
        return "extents tile their segment";
    if (pms_kind_is_slab(x->kind)
            ? x->cls >= pms_class_count() || x->pages != pms_class_pages(x->cls)
            : x->cls != 0)
        return "size class of an extent";
    if (pms_kind_is_large(x->kind) ? x->aux < 1 || x->aux > x->pages * PMS_PAGE : x->aux != 0)
        return "bytes of an extent";
    return NULL;
}

const char *pms_table_decode(const struct pms_map *map, const struct pms_table *t, uint64_t page,
                             struct pms_descriptor *x)
{
    uint64_t off = pms_table_entry(t, page);
    struct pms_pte pte = {pms_table_load(map, off),
                          pms_table_load(map, off + offsetof(struct pms_pte, aux))};
    return decode(t, page, pte, x);
}

const char *pms_table_decode_pte(const struct pms_table *t, uint64_t page,
                                 const struct pms_pte *pte, struct pms_descriptor *x)
{
    return decode(t, page, *pte, x);
}

static const char *check_bitmap(const struct pms_map *map, const struct pms_table *t,
                                const struct pms_descriptor *x)
{
    uint32_t slots = pms_class_slots(x->cls), words = 2 * (uint32_t)(x->pages - 1);
    for (uint32_t w = slots / 64; w < words; w++) {
        uint64_t beyond = w == slots / 64 ? ~0ull << (slots % 64) : ~0ull;
        if (pms_table_load(map, pms_table_bitmap(t, x->page, w)) & beyond)
            return "bits past a slab's slots are zero";
    }
    return NULL;
}

int pms_table_each(const struct pms_map *map, const struct pms_table *t, pms_table_fn fn, void *ctx,
                   struct pms_error *error)
{
    struct pms_descriptor x;
    for (uint64_t page = t->first, end = t->first + t->pages; page < end; page += x.pages) {
        const char *rule = pms_table_decode(map, t, page, &x);
        if (!rule && pms_kind_is_slab(x.kind))
            rule = check_bitmap(map, t, &x);
        if (rule) {
            int status = pms_fail(error, PMS_E_CORRUPT, "page table: %s", rule);
            if (error)
                error->offset = pms_table_entry(t, page);
            return status;
        }
        int stop = fn(ctx, t, &x, error);
        if (stop)
            return stop;
    }
    return PMS_OK;
}
