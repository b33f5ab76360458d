/* NH of UMAC (J. Black et al., "UMAC: fast and secure message authentication", 1999), with words
 * of 64 bits: the sum, modulo 2^128, of (a + k) * (b + l) over all pairs of words. Two different
 * blocks have the same sum under one in 2^64 keys at most. Two sums, the second with the key moved
 * on by a pair (Toeplitz), make it one in 2^128. The sums of up to 128 blocks are a block of the
 * next level, which has a key of its own; each level is one more chance. */
#include "base/fingerprint.h"

#include <assert.h>
#include <string.h>

#include "base/layout.h"
#include "base/status.h"

#define LEVELS 4u  /* of blocks: 4 KiB * 128^3 is enough */
#define BLOCK 512u /* words: a page */
#define KEY (BLOCK + 2u)
#define SUM PMS_FINGERPRINT_WORDS

static_assert(LEVELS * KEY == PMS_FINGERPRINT_KEY && BLOCK * sizeof(uint64_t) == PMS_PAGE, "");
static_assert(PMS_FINGERPRINT_MOST <= (uint64_t)PMS_PAGE << (7 * (LEVELS - 1)), "");

struct sums { /* by level: those of the level below; at the top one */
    uint64_t word[LEVELS + 1][BLOCK];
    uint64_t count[LEVELS + 1];
};

static uint64_t load(const unsigned char *p)
{
    uint64_t w;
    memcpy(&w, p, sizeof w);
    return w;
}

static void sum_block(const uint64_t *k, const void *block, uint64_t words, uint64_t *sum)
{
    unsigned __int128 first = 0, second = 0;
    const unsigned char *p = block;
    for (uint64_t i = 0; i < words; i += 2, p += 16) {
        uint64_t a = load(p), b = load(p + 8);
        first += (unsigned __int128)(a + k[i]) * (b + k[i + 1]);
        second += (unsigned __int128)(a + k[i + 2]) * (b + k[i + 3]);
    }
    sum[0] = (uint64_t)first;
    sum[1] = (uint64_t)(first >> 64);
    sum[2] = (uint64_t)second;
    sum[3] = (uint64_t)(second >> 64);
}

/* The sums of a level become one of the next. */
static void close_block(struct sums *s, const uint64_t *key, uint32_t level)
{
    uint64_t *above = &s->word[level + 1][s->count[level + 1]];
    sum_block(key + level * KEY, s->word[level], s->count[level], above);
    s->count[level] = 0;
    s->count[level + 1] += SUM;
}

void pms_fingerprint(const uint64_t *key, const void *data, uint64_t bytes, uint64_t *out)
{
    struct sums s;
    PMS_ASSERT(bytes && bytes % PMS_PAGE == 0 && bytes <= PMS_FINGERPRINT_MOST);
    memset(s.count, 0, sizeof s.count);
    for (uint64_t at = 0; at < bytes; at += PMS_PAGE) {
        sum_block(key, (const unsigned char *)data + at, BLOCK, &s.word[1][s.count[1]]);
        s.count[1] += SUM;
        for (uint32_t level = 1; level < LEVELS && s.count[level] == BLOCK; level++)
            close_block(&s, key, level);
    }
    for (uint32_t level = 1; level < LEVELS; level++)
        if (s.count[level])
            close_block(&s, key, level);
    memcpy(out, s.word[LEVELS], SUM * sizeof *out);
}
