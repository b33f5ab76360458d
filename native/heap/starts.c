#include "heap/starts.h"

#include "base/pages.h"
#include "base/status.h"

int pms_starts_open(struct pms_starts *s, uint64_t pages)
{
    *s = (struct pms_starts){.pages = pages};
    uint64_t words[PMS_STARTS_LEVELS], sum = 0, n = pages;
    do {
        n = (n + 63) / 64;
        words[s->levels++] = n;
        sum += n;
    } while (n > 1 && s->levels < PMS_STARTS_LEVELS);
    PMS_ASSERT(n <= 1);
    s->memory_bytes = (size_t)sum * sizeof(uint64_t);
    s->memory = pms_reserve(s->memory_bytes);
    if (!s->memory)
        return -1;
    _Atomic uint64_t *at = s->memory;
    for (unsigned l = 0; l < s->levels; at += words[l++])
        s->level[l] = at;
    return 0;
}

void pms_starts_close(struct pms_starts *s)
{
    pms_unreserve(s->memory, s->memory_bytes);
    *s = (struct pms_starts){0};
}

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

void pms_starts_set(struct pms_starts *s, uint64_t page)
{
    PMS_ASSERT(page < s->pages);
    uint64_t i = page;
    for (unsigned l = 0; l < s->levels; l++, i /= 64) {
        uint64_t old = load(&s->level[l][i / 64]), now = old | 1ull << (i % 64);
        if (old == now)
            return; /* then the levels above know */
        atomic_store_explicit(&s->level[l][i / 64], now, memory_order_release);
    }
}

static void starts_clear_one(struct pms_starts *s, uint64_t page)
{
    uint64_t i = page;
    for (unsigned l = 0; l < s->levels; l++, i /= 64) {
        uint64_t now = load(&s->level[l][i / 64]) & ~(1ull << (i % 64));
        atomic_store_explicit(&s->level[l][i / 64], now, memory_order_release);
        if (now)
            return;
    }
}

void pms_starts_clear(struct pms_starts *s, uint64_t from, uint64_t to)
{
    if (from >= to)
        return;
    for (uint64_t p = pms_starts_after(s, from); p < to; p = pms_starts_after(s, p))
        starts_clear_one(s, p);
}

bool pms_starts_has(const struct pms_starts *s, uint64_t page)
{
    return page < s->pages && load(&s->level[0][page / 64]) >> (page % 64) & 1;
}

uint64_t pms_starts_before(const struct pms_starts *s, uint64_t page)
{
    if (page >= s->pages)
        return PMS_NO_PAGE;
    uint64_t i = page, word = load(&s->level[0][i / 64]) & (~0ull >> (63 - i % 64));
    unsigned l = 0;
    while (!word) { /* up: words wholly before this one */
        if (++l == s->levels)
            return PMS_NO_PAGE;
        i /= 64;
        word = load(&s->level[l][i / 64]) & ((1ull << (i % 64)) - 1);
    }
    for (;;) { /* down: the last bit of each */
        i = (i & ~63ull) | (63u - (unsigned)__builtin_clzll(word));
        if (l == 0)
            return i;
        word = load(&s->level[--l][i]);
        if (!word)
            return PMS_NO_PAGE; /* raced with a change of free space: nothing live is there */
        i *= 64;
    }
}

uint64_t pms_starts_after(const struct pms_starts *s, uint64_t page)
{
    if (page >= s->pages)
        return PMS_NO_PAGE;
    uint64_t i = page, word = load(&s->level[0][i / 64]) & (~0ull << (i % 64));
    unsigned l = 0;
    while (!word) { /* up: words wholly after this one */
        if (++l == s->levels)
            return PMS_NO_PAGE;
        i /= 64;
        word = i % 64 == 63 ? 0 : load(&s->level[l][i / 64]) & (~0ull << (i % 64 + 1));
    }
    for (;;) { /* down: the first bit of each */
        i = (i & ~63ull) | (unsigned)__builtin_ctzll(word);
        if (l == 0)
            return i;
        word = load(&s->level[--l][i]);
        PMS_ASSERT(word); /* called by the writer alone */
        i *= 64;
    }
}
