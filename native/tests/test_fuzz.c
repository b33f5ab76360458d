/* What fuzz_open.c tries, with seeded inputs: bounded, the same in every run, and without clang.
 * PMS_FUZZ_INPUTS=N tries N. */
#include "fuzz_open.c"

#include "test.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define DEFAULT_INPUTS 300
#else
#define DEFAULT_INPUTS 2000
#endif

static uint64_t rnd(uint64_t below)
{
    static uint64_t x = 88172645463325252ull;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return x % below;
}

/* Words that hurt: small numbers, places in the file, powers of two less one, noise. */
static uint64_t word(void)
{
    switch (rnd(4)) {
    case 0: return rnd(20);
    case 1: return rnd(SIZE / 8) * 8;
    case 2: return (1ull << rnd(64)) - rnd(2);
    default: return rnd(UINT64_MAX);
    }
}

static void seeded_inputs(void)
{
    const char *asked = getenv("PMS_FUZZ_INPUTS");
    uint64_t inputs = asked ? strtoull(asked, NULL, 10) : DEFAULT_INPUTS;
    LLVMFuzzerInitialize(NULL, NULL);
    for (uint64_t i = 0; i < inputs; i++) {
        unsigned char input[64];
        size_t bytes = 1;
        input[0] = (unsigned char)(rnd(8) ? rnd(0x80) : rnd(256));
        for (uint64_t patch = rnd(4); patch + 1 > 0 && bytes + 13 <= sizeof input; patch--) {
            uint32_t place = (uint32_t)rnd(1u << 31) & ~3u;
            uint64_t value = word();
            memcpy(input + bytes, &place, 4);
            input[bytes + 4] = rnd(2) ? 8 : (unsigned char)(1 + rnd(4));
            memcpy(input + bytes + 5, &value, 8);
            bytes += 5u + input[bytes + 4];
        }
        alarm(60);
        LLVMFuzzerTestOneInput(input, bytes);
    }
    printf("  %llu stores opened, %llu refused\n", (unsigned long long)opened,
           (unsigned long long)refused);
    CHECK(opened > inputs / 2 && refused > inputs / 100); /* the inputs go both ways */
}

int main(void)
{
    TEST(seeded_inputs);
    return test_summary();
}
