/* Sorts what a transaction touched, under the log lock: in place, without memory, and in n log n
 * steps whatever the order is. A program makes the order by where it stores, so none may be bad.
 *
 * First by insertion, as what comes is mostly in order or nearly so; that ends after a few steps an
 * item, and the rest is a heap sort. Items begin with their key, a uint64_t. */
#ifndef PMS_BASE_SORT_H
#define PMS_BASE_SORT_H

#include <stdint.h>
#include <string.h>

#include "base/status.h"

#define PMS_SORT_ITEM_MAX 64u
#define PMS_SORT_PATIENCE 4u /* steps an item that insertion may take */

static inline uint64_t pms_sort_key(const unsigned char *item)
{
    uint64_t key;
    memcpy(&key, item, sizeof key);
    return key;
}

/* false: it took more steps than it may. What is there is there in either case. */
static inline bool pms_sort_insert(unsigned char *items, uint64_t n, size_t size, uint64_t *steps)
{
    unsigned char moved[PMS_SORT_ITEM_MAX];
    uint64_t most = PMS_SORT_PATIENCE * n;
    for (uint64_t i = 1; i < n; i++) {
        uint64_t key = pms_sort_key(items + i * size), to = i;
        while (to > 0 && ++*steps <= most && pms_sort_key(items + (to - 1) * size) > key)
            to--;
        if (to < i) {
            memcpy(moved, items + i * size, size);
            memmove(items + (to + 1) * size, items + to * size, (i - to) * size);
            memcpy(items + to * size, moved, size);
        }
        if (*steps > most)
            return false;
    }
    return true;
}

/* The item at the root sinks: below it, up to n, each parent's key is at least its children's. */
static inline void pms_sort_sink(unsigned char *items, uint64_t root, uint64_t n, size_t size,
                                 uint64_t *steps)
{
    unsigned char sinking[PMS_SORT_ITEM_MAX];
    memcpy(sinking, items + root * size, size);
    uint64_t key = pms_sort_key(sinking);
    for (uint64_t child; (child = 2 * root + 1) < n; root = child) {
        *steps += 2;
        const unsigned char *larger = items + child * size;
        if (child + 1 < n && pms_sort_key(larger + size) > pms_sort_key(larger)) {
            child++;
            larger += size;
        }
        if (pms_sort_key(larger) <= key)
            break;
        memcpy(items + root * size, larger, size);
    }
    memcpy(items + root * size, sinking, size);
}

/* Ascending; items of equal keys in any order. Returns how many comparisons it took.
 * REQUIRES: size is a constant: the code is inlined for it. */
static inline uint64_t pms_sort(void *array, uint64_t n, size_t size)
{
    unsigned char *items = array, last[PMS_SORT_ITEM_MAX];
    uint64_t steps = 0;
    PMS_ASSERT(size >= sizeof(uint64_t) && size <= PMS_SORT_ITEM_MAX);
    if (pms_sort_insert(items, n, size, &steps))
        return steps;
    for (uint64_t root = n / 2; root-- > 0;)
        pms_sort_sink(items, root, n, size, &steps);
    for (uint64_t left = n - 1; left > 0; left--) { /* the largest goes to the end */
        memcpy(last, items + left * size, size);
        memcpy(items + left * size, items, size);
        memcpy(items, last, size);
        pms_sort_sink(items, 0, left, size, &steps);
    }
    return steps;
}

#endif
