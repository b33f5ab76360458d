/* One bit for each page of a view. Set under a lock of the caller's, or by whole words; read by
 * anyone. */
#ifndef PMS_SEAM_BITS_H
#define PMS_SEAM_BITS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/layout.h"

/* What the bits of a view of so many bytes take. Of PMS_HUGE: a word. */
static inline size_t pms_bits_room(uint64_t bytes) { return (size_t)(bytes / PMS_PAGE / 8); }

/* Of a word, the bits of [first, last]. */
static inline uint64_t pms_bits_mask(uint64_t first, uint64_t last, uint64_t word)
{
    uint64_t lo = word == first / 64 ? first % 64 : 0;
    uint64_t hi = word == last / 64 ? last % 64 : 63;
    return (~0ull << lo) & (~0ull >> (63 - hi));
}

static inline void pms_bits_set(_Atomic uint64_t *bits, uint64_t off, uint64_t bytes, bool on)
{
    uint64_t first = off / PMS_PAGE, last = (off + bytes - 1) / PMS_PAGE;
    for (uint64_t w = first / 64; w <= last / 64; w++) {
        uint64_t mask = pms_bits_mask(first, last, w);
        if (mask == ~0ull)
            atomic_store_explicit(&bits[w], on ? mask : 0, memory_order_release);
        else if (on)
            atomic_fetch_or_explicit(&bits[w], mask, memory_order_release);
        else
            atomic_fetch_and_explicit(&bits[w], ~mask, memory_order_release);
    }
}

static inline bool pms_bits_has(const _Atomic uint64_t *bits, uint64_t page)
{
    return atomic_load_explicit(&bits[page / 64], memory_order_relaxed) >> (page % 64) & 1;
}

/* The first page from `page` on, below `end`, whose bit is as asked; `end` if there is none. */
static inline uint64_t pms_bits_next(const _Atomic uint64_t *bits, uint64_t page, uint64_t end,
                                     bool on)
{
    while (page < end) {
        uint64_t word = atomic_load_explicit(&bits[page / 64], memory_order_acquire);
        word = (on ? word : ~word) >> (page % 64);
        if (word) {
            page += (uint64_t)__builtin_ctzll(word);
            return page < end ? page : end;
        }
        page = (page / 64 + 1) * 64;
    }
    return end;
}

/* The number of edges that a range gets as all of its bits become `on`: then none lies inside.
 * limit: of the pages. */
static inline int64_t pms_bits_edges(const _Atomic uint64_t *bits, uint64_t limit, uint64_t off,
                                     uint64_t bytes, bool on)
{
    uint64_t first = off / PMS_PAGE, last = (off + bytes - 1) / PMS_PAGE;
    bool left = first > 0 && pms_bits_has(bits, first - 1),
         right = last + 1 < limit && pms_bits_has(bits, last + 1), before = left;
    int64_t edges = (left != on) + (right != on) - (right != pms_bits_has(bits, last));
    for (uint64_t w = first / 64; w <= last / 64; w++) {
        uint64_t word = atomic_load_explicit(&bits[w], memory_order_relaxed);
        edges -= __builtin_popcountll((word ^ (word << 1 | before)) &
                                      pms_bits_mask(first, last, w));
        before = word >> 63;
    }
    return edges;
}

#endif
