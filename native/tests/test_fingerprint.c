/* Fingerprints: every bit counts, in every place; they are those of the formula, at each level. */
#include <stdint.h>

#include "base/fingerprint.h"
#include "base/layout.h"
#include "random_bytes.h"

#define PAGES_MOST 300u /* three levels */

static uint64_t key[PMS_FINGERPRINT_KEY];

static void draw_key(void)
{
    for (unsigned i = 0; i < PMS_FINGERPRINT_KEY; i++)
        key[i] = random64();
}

static bool same(const uint64_t *a, const uint64_t *b)
{
    return memcmp(a, b, PMS_FINGERPRINT_WORDS * sizeof *a) == 0;
}

/* the same by the formula: a level at a time, word by word, modulo 2^128 */
static void by_the_formula(const unsigned char *data, uint64_t bytes, uint64_t *out)
{
    uint64_t words = bytes / 8, *in = malloc(bytes), room = words / 512 * 4 + 8;
    memcpy(in, data, bytes);
    for (unsigned level = 0; level < 4; level++) {
        uint64_t blocks = (words + 511) / 512, *sums = calloc(room, 8);
        const uint64_t *k = key + level * 514;
        for (uint64_t b = 0; b < blocks; b++) {
            uint64_t n = words - b * 512 < 512 ? words - b * 512 : 512;
            for (uint64_t pass = 0; pass < 2; pass++) {
                unsigned __int128 sum = 0;
                for (uint64_t i = 0; i < n; i += 2) {
                    uint64_t x = in[b * 512 + i] + k[i + 2 * pass],
                             y = in[b * 512 + i + 1] + k[i + 1 + 2 * pass];
                    sum += (unsigned __int128)x * y;
                }
                sums[b * 4 + 2 * pass] = (uint64_t)sum;
                sums[b * 4 + 2 * pass + 1] = (uint64_t)(sum >> 64);
            }
        }
        free(in);
        in = sums;
        words = blocks * 4;
    }
    CHECK(words == 4);
    memcpy(out, in, 32);
    free(in);
}

static void test_formula(void)
{
    unsigned char *data = random_bytes(PAGES_MOST * PMS_PAGE);
    static const uint64_t pages[] = {1, 2, 63, 64, 127, 128, 129, 255, 256, 257, PAGES_MOST};
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        uint64_t got[4], want[4];
        draw_key();
        pms_fingerprint(key, data, pages[i] * PMS_PAGE, got);
        by_the_formula(data, pages[i] * PMS_PAGE, want);
        CHECK(same(got, want));
    }
    free(data);
}

static void test_every_bit_counts(void)
{
    uint64_t bytes = 260 * PMS_PAGE, before[4], after[4];
    unsigned char *data = random_bytes(bytes);
    draw_key();
    pms_fingerprint(key, data, bytes, before);
    for (unsigned i = 0; i < 4000 / SLOWER; i++) {
        size_t at = i < 64 ? i / 8 : random_below(bytes);
        unsigned char bit = (unsigned char)(1u << random_below(8));
        data[at] ^= bit;
        pms_fingerprint(key, data, bytes, after);
        CHECK(!same(before, after));
        data[at] ^= bit;
    }
    pms_fingerprint(key, data, bytes, after);
    CHECK(same(before, after));
    free(data);
}

/* What an enemy would try: the same pages in another order, words exchanged, differences that
 * make up for each other, zeros. */
static void test_structured_differences(void)
{
    uint64_t bytes = 64 * PMS_PAGE, before[4], after[4];
    unsigned char *data = random_bytes(bytes), *other = malloc(bytes);
    for (unsigned i = 0; i < 2000 / SLOWER; i++) {
        size_t a = random_below(bytes / 8) * 8, b = random_below(bytes / 8) * 8;
        uint64_t delta = 1ull << random_below(64), x, y;
        draw_key();
        memcpy(other, data, bytes);
        memcpy(&x, data + a, 8);
        memcpy(&y, data + b, 8);
        if (i % 3 == 0) {
            memcpy(other + a, &y, 8);
            memcpy(other + b, &x, 8);
        } else if (i % 3 == 1) {
            x += delta;
            y -= delta;
            memcpy(other + a, &x, 8);
            memcpy(other + b, &y, 8);
        } else {
            memcpy(other + a / PMS_PAGE * PMS_PAGE, data + b / PMS_PAGE * PMS_PAGE, PMS_PAGE);
            memcpy(other + b / PMS_PAGE * PMS_PAGE, data + a / PMS_PAGE * PMS_PAGE, PMS_PAGE);
        }
        pms_fingerprint(key, data, bytes, before);
        pms_fingerprint(key, other, bytes, after);
        CHECK(same(before, after) == (memcmp(data, other, bytes) == 0));
    }
    memset(data, 0, bytes);
    memset(other, 0, bytes);
    other[bytes - 1] = 0x80;
    pms_fingerprint(key, data, bytes, before);
    pms_fingerprint(key, other, bytes, after);
    CHECK(!same(before, after));
    free(data);
    free(other);
}

/* With a key of zeros a word changes nothing while its partner is zero: the key is what makes
 * that improbable, and it is used at each place. */
static void test_the_key_counts(void)
{
    uint64_t bytes = 129 * PMS_PAGE, before[4], after[4];
    unsigned char *data = random_bytes(bytes);
    draw_key();
    pms_fingerprint(key, data, bytes, before);
    for (unsigned i = 0; i < 514 + 514 + 8; i++) {
        key[i] ^= 1ull << random_below(64);
        pms_fingerprint(key, data, bytes, after);
        CHECK(!same(before, after));
        memcpy(before, after, sizeof before);
    }
    free(data);
}

int main(void)
{
    TEST(test_formula);
    TEST(test_every_bit_counts);
    TEST(test_structured_differences);
    TEST(test_the_key_counts);
    return test_summary();
}
