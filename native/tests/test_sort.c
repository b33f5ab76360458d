/* The one sort of the engine: whatever the order is, what comes out is sorted, complete, and took
 * n log n comparisons. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sort.h"
#include "test.h"

#define MOST (1u << 17)

struct small {
    uint64_t key, was;
};
struct large {
    uint64_t key, was, also[4];
};

static struct small small[MOST];
static struct large large[MOST];
static uint8_t seen[MOST];
static uint64_t seed;

static uint64_t random_number(void)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return seed >> 33;
}

typedef uint64_t key_fn(uint64_t i, uint64_t n);

static uint64_t ascending(uint64_t i, uint64_t n) { return (void)n, 64 * i; }
static uint64_t descending(uint64_t i, uint64_t n) { return 64 * (n - i); }
static uint64_t equal(uint64_t i, uint64_t n) { return (void)i, (void)n, 7; }
static uint64_t few_keys(uint64_t i, uint64_t n) { return (void)n, i % 5; }
static uint64_t any(uint64_t i, uint64_t n) { return (void)i, (void)n, random_number(); }
static uint64_t extreme(uint64_t i, uint64_t n) { return (void)n, i % 2 ? UINT64_MAX - i : i; }

/* Writers that go through the two halves of a store, or through 64 parts of it, in turn. */
static uint64_t halves(uint64_t i, uint64_t n) { return i / 2 + i % 2 * (n / 2); }
static uint64_t parts(uint64_t i, uint64_t n) { return i / 64 + i % 64 * (n / 64); }

/* In order but for a few: one in a thousand far from its place, neighbours exchanged, one moved. */
static uint64_t nearly(uint64_t i, uint64_t n) { return i % 1000 == 999 ? random_number() % n : i; }
static uint64_t exchanged(uint64_t i, uint64_t n) { return (void)n, i ^ 1; }
static uint64_t last_first(uint64_t i, uint64_t n) { return (i + 1) % n; }

static uint64_t log2_up(uint64_t n)
{
    uint64_t log = 0;
    while (1ull << log < n)
        log++;
    return log;
}

/* Sorts n items of either size by these keys. Returns how many comparisons it took. */
static uint64_t sorted(key_fn *key, uint64_t n)
{
    seed = n;
    for (uint64_t i = 0; i < n; i++) {
        small[i] = (struct small){key(i, n), i};
        large[i] = (struct large){small[i].key, i, {i + 1, i + 2, i + 3, ~i}};
    }
    uint64_t steps = pms_sort(small, n, sizeof small[0]);
    /* the size of an item is nothing to the order */
    CHECK(pms_sort(large, n, sizeof large[0]) == steps);
    memset(seen, 0, sizeof seen);
    for (uint64_t i = 0; i < n; i++) {
        CHECK(i == 0 || small[i - 1].key <= small[i].key);
        CHECK(small[i].was < n && !seen[small[i].was]);
        seen[small[i].was] = 1;
        const struct large *x = &large[i];
        CHECK(x->key == small[i].key && x->was == small[i].was);
        CHECK(x->also[0] == x->was + 1 && x->also[1] == x->was + 2 && x->also[2] == x->was + 3);
        CHECK(x->also[3] == ~x->was);
    }
    CHECK(steps <= PMS_SORT_PATIENCE * n + 1 + 2 * n + 2 * n * (log2_up(n) + 1));
    return steps;
}

int main(void)
{
    static key_fn *const order[] = {ascending, descending, equal,  few_keys,  any,       extreme,
                                    halves,    parts,      nearly, exchanged, last_first};
    static const uint64_t count[] = {0, 1, 2, 3, 4, 5, 7, 8, 9, 100, 127, 128, 1000, 130000, MOST};
    for (unsigned i = 0; i < sizeof order / sizeof *order; i++)
        for (unsigned k = 0; k < sizeof count / sizeof *count; k++)
            sorted(order[i], count[k]);
    for (uint64_t n = 2; n <= MOST; n *= 2) { /* what is mostly in order costs a walk over it */
        CHECK(sorted(ascending, n) == n - 1);
        CHECK(sorted(equal, n) == n - 1);
        CHECK(sorted(exchanged, n) <= 2 * n);
        CHECK(sorted(last_first, n) <= 2 * n);
    }
    puts("sort: ok");
    return 0;
}
