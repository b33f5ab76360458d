#include "log/held.h"

#include <stddef.h>
#include <string.h>

#include "base/checksum.h"
#include "log/entries.h"

static uint32_t held_crc(const struct pms_undo *u, const struct pms_held *h)
{
    return pms_crc32c(u->persist->log_seed, h, offsetof(struct pms_held, crc));
}

void pms_held_write(struct pms_undo *u, uint64_t tag, uint64_t entries, enum pms_held_for held)
{
    PMS_ASSERT(u->log.halves);
    struct pms_held h = {.tag = tag, .entries = entries, .held = held};
    void *at = pms_map_at(u->map, PMS_OFF_HELD(tag));
    h.crc = held_crc(u, &h);
    pms_persist_store(u->persist, at, &h, sizeof h);
    pms_persist_flush(u->persist, at, sizeof h);
}

static int count(void *ctx, const struct pms_entry *entry, const void *image)
{
    (void)entry, (void)image;
    ++*(uint64_t *)ctx;
    return 0;
}

bool pms_held_find(const struct pms_undo *u, uint64_t last, struct pms_held *held)
{
    uint64_t entries = 0;
    if (!u->log.halves)
        return false;
    /* transactions that were undone since took the parity of the one that followed it */
    memcpy(held, pms_map_at(u->map, PMS_OFF_HELD(last)), sizeof *held);
    if (held->crc != held_crc(u, held) || held->tag > last || (held->tag & 1) != (last & 1) ||
        held->held == PMS_HELD_NOT)
        return false;
    pms_undo_scan(u, held->tag, count, &entries);
    return entries == held->entries;
}
