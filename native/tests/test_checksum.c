/* Checksums and hashes. */
#include "random_bytes.h"

/* ---- checksums ---- */

static void check_vector(const void *data, size_t n, uint32_t expected)
{
    CHECK(pms_crc32c(0, data, n) == expected);
    CHECK(pms_crc32c_portable(0, data, n) == expected);
}

static void test_crc_vectors(void) /* RFC 3720, B.4 */
{
    unsigned char v[32];
    check_vector("123456789", 9, 0xe3069283u);
    check_vector("", 0, 0);
    check_vector(memset(v, 0, sizeof v), sizeof v, 0x8a9136aau);
    check_vector(memset(v, 0xff, sizeof v), sizeof v, 0x62a8ab43u);
    for (unsigned i = 0; i < sizeof v; i++)
        v[i] = (unsigned char)i;
    check_vector(v, sizeof v, 0x46dd794eu);
}

static void test_crc_of_every_size(void)
{
    unsigned char *data = random_bytes(8192);
    for (size_t n = 0; n < 4200; n++) {
        size_t at = random_below(LINE);
        CHECK(pms_crc32c(0, data + at, n) == pms_crc32c_portable(0, data + at, n));
    }
    free(data);
}

static void test_crc_of_random_ranges_and_splits(void)
{
    const size_t room = MIB;
    unsigned char *data = random_bytes(room);
    for (unsigned i = 0; i < 20000 / SLOWER; i++) {
        size_t most = i % 100 == 0 ? room : i % 2 ? 16384 : 1024;
        size_t n = random_below(most), at = random_below(room - n),
               split = n ? random_below(n + 1) : 0;
        uint32_t start = (uint32_t)random64(), whole = pms_crc32c(start, data + at, n);
        CHECK(whole == pms_crc32c_portable(start, data + at, n));
        CHECK(whole ==
              pms_crc32c(pms_crc32c(start, data + at, split), data + at + split, n - split));
        CHECK(whole == pms_crc32c_join(pms_crc32c(start, data + at, split),
                                       pms_crc32c(0, data + at + split, n - split), n - split));
    }
    free(data);
}

/* the pages around are not there: an excess byte is a SIGSEGV */
static void test_crc_reads_nothing_outside(void)
{
    unsigned char *map = mmap(NULL, 3 * 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0),
                  *page = map + 4096;
    CHECK(map != MAP_FAILED && mprotect(page, 4096, PROT_READ | PROT_WRITE) == 0);
    memset(page, 0x5a, 4096);
    for (size_t n = 0; n <= 4096; n++) {
        uint32_t crc = pms_crc32c(0, page, n);
        CHECK(crc == pms_crc32c(0, page + 4096 - n, n)); /* all bytes are equal */
    }
    munmap(map, 3 * 4096);
}

static void test_hash_spreads(void)
{
    unsigned char zeros[65] = {0}, text[] = "layers.11.attention.weight";
    uint64_t of_length[65], changed = 0;
    for (size_t n = 0; n <= 64; n++) {
        of_length[n] = pms_hash(1, zeros, n);
        CHECK(of_length[n] != 0 && of_length[n] != pms_hash(2, zeros, n) &&
              of_length[n] == pms_hash(1, zeros, n));
        for (size_t m = 0; m < n; m++)
            CHECK(of_length[m] != of_length[n]);
    }
    uint64_t h = pms_hash(3, text, sizeof text - 1);
    size_t bits = 8 * (sizeof text - 1);
    for (size_t bit = 0; bit < bits; bit++) {
        text[bit / 8] ^= (unsigned char)(1u << bit % 8);
        changed += (uint64_t)__builtin_popcountll(h ^ pms_hash(3, text, sizeof text - 1));
        text[bit / 8] ^= (unsigned char)(1u << bit % 8);
    }
    CHECK(changed > 30 * bits && changed < 34 * bits); /* half of 64 bits */
}

static void test_check16_is_tied_to_word_and_place(void)
{
    unsigned same_salt = 0, same_word = 0;
    const unsigned rounds = 100000;
    for (unsigned i = 0; i < rounds; i++) {
        uint64_t word = random64() >> 16, salt = random64();
        uint16_t bits = pms_check16(salt, word);
        same_salt += bits == pms_check16(salt, word ^ 1ull << random_below(48));
        same_word += bits == pms_check16(salt + 1, word);
    }
    CHECK(same_salt < 10 && same_word < 10); /* expected: 1.5 of 100,000 */
}

int main(void)
{
    TEST(test_crc_vectors);
    TEST(test_crc_of_every_size);
    TEST(test_crc_of_random_ranges_and_splits);
    TEST(test_crc_reads_nothing_outside);
    TEST(test_hash_spreads);
    TEST(test_check16_is_tied_to_word_and_place);
    return test_summary();
}
