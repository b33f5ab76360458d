/* What lies where in a store file: the one answer for capture, undo log, journal, recovery and
 * snapshots. */
#ifndef PMS_BASE_REGION_H
#define PMS_BASE_REGION_H

#include "base/layout.h"

enum pms_region_kind {
    PMS_REGION_NONE, /* no transaction changes it: the fixed pages, the logs, what lies beyond */
    PMS_REGION_ROOT,
    PMS_REGION_TABLE, /* the entries of a segment's pages, in whole granules */
    PMS_REGION_DATA,
};

struct pms_region {
    enum pms_region_kind kind;
    uint64_t end; /* behind its last byte */
};

static inline uint64_t pms_region_table_end(const struct pms_segment *s)
{
    uint64_t bytes = s->data_pages * sizeof(struct pms_pte);
    return s->table_off + (bytes + PMS_GRANULE - 1) / PMS_GRANULE * PMS_GRANULE;
}

/* The region of the byte at an offset. */
static inline struct pms_region pms_region_of(const struct pms_superblock *super, uint64_t off)
{
    for (uint32_t i = 0; i < super->segment_count; i++) {
        const struct pms_segment *s = &super->segment[i];
        uint64_t data_end = s->data_off + s->data_pages * PMS_PAGE;
        if (off >= s->data_off && off < data_end)
            return (struct pms_region){PMS_REGION_DATA, data_end};
        if (off >= s->table_off && off < pms_region_table_end(s))
            return (struct pms_region){PMS_REGION_TABLE, pms_region_table_end(s)};
    }
    if (off >= PMS_OFF_ROOT && off < PMS_OFF_ROOT + PMS_PAGE)
        return (struct pms_region){PMS_REGION_ROOT, PMS_OFF_ROOT + PMS_PAGE};
    return (struct pms_region){PMS_REGION_NONE, off};
}

/* How many of the pages [page, ...) lie in one region that transactions change; 0: none. */
static inline uint64_t pms_region_pages(const struct pms_superblock *super, uint64_t page,
                                        enum pms_region_kind *kind)
{
    struct pms_region region = pms_region_of(super, page * PMS_PAGE);
    *kind = region.kind;
    return (region.end + PMS_PAGE - 1) / PMS_PAGE - page;
}

#endif
