#include "base/checksum.h"

#include "base/quiet.h"

#include <stdbool.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

#define POLY 0x82f63b78u /* Castagnoli, reflected */
#define LONG 1024u       /* bytes of each of three streams: hides the instruction's latency */
#define SHORT 128u

static uint32_t table[8][256];      /* slicing by 8 */
static uint32_t shift_long[4][256]; /* crc of a message -> crc of the message and LONG zeros */
static uint32_t shift_short[4][256];
static uint32_t shift_bytes[64]; /* x^(8 * 2^k) mod P: a message and 2^k bytes more */
static bool instruction;

/* ---- tables, made before main: callable from a signal handler ever after ---- */

static uint32_t zeros_after(uint32_t crc, uint32_t n)
{
    while (n--)
        crc = crc >> 8 ^ table[0][crc & 0xff];
    return crc;
}

static void make_shift(uint32_t shift[4][256], uint32_t n)
{
    for (uint32_t byte = 0; byte < 4; byte++)
        for (uint32_t v = 0; v < 256; v++)
            shift[byte][v] = zeros_after(v << (8 * byte), n);
}

/* a(x) b(x) mod P, reflected: the highest bit is 1 */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (; a; a <<= 1, b = b >> 1 ^ (b & 1 ? POLY : 0))
        product ^= a >> 31 ? b : 0;
    return product;
}

static bool has_instruction(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2");
#elif defined(__aarch64__)
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
    return false;
#endif
}

__attribute__((constructor)) static void make_tables(void)
{
    for (uint32_t v = 0; v < 256; v++) {
        uint32_t crc = v;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLY : 0);
        table[0][v] = crc;
    }
    for (uint32_t k = 1; k < 8; k++)
        for (uint32_t v = 0; v < 256; v++)
            table[k][v] = table[k - 1][v] >> 8 ^ table[0][table[k - 1][v] & 0xff];
    make_shift(shift_long, LONG);
    make_shift(shift_short, SHORT);
    shift_bytes[0] = 1u << 23;
    for (uint32_t k = 1; k < 64; k++)
        shift_bytes[k] = multiply(shift_bytes[k - 1], shift_bytes[k - 1]);
    instruction = has_instruction();
}

PMS_NO_TSAN static inline uint64_t load8(const unsigned char *p)
{
    uint64_t w;
    __builtin_memcpy(&w, p, sizeof w);
    return w;
}

/* ---- portable ---- */

PMS_NO_TSAN uint32_t pms_crc32c_portable(uint32_t crc, const void *data, size_t n)
{
    const unsigned char *p = data;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t w = load8(p) ^ crc;
        crc = table[7][w & 0xff] ^ table[6][w >> 8 & 0xff] ^ table[5][w >> 16 & 0xff] ^
              table[4][w >> 24 & 0xff] ^ table[3][w >> 32 & 0xff] ^ table[2][w >> 40 & 0xff] ^
              table[1][w >> 48 & 0xff] ^ table[0][w >> 56];
    }
    while (n--)
        crc = crc >> 8 ^ table[0][(crc ^ *p++) & 0xff];
    return ~crc;
}

/* ---- by instruction ---- */

#if defined(__x86_64__)
#if defined(__clang__)
#define CRC_TARGET __attribute__((target("crc32"))) /* gcc before 12 does not know it */
#else
#define CRC_TARGET __attribute__((target("sse4.2")))
#endif
CRC_TARGET static inline uint64_t step8(uint64_t crc, uint64_t w)
{
    return __builtin_ia32_crc32di(crc, w);
}
CRC_TARGET static inline uint32_t step1(uint32_t crc, unsigned char b)
{
    return __builtin_ia32_crc32qi(crc, b);
}
#elif defined(__aarch64__)
#define CRC_TARGET __attribute__((target("+crc")))
CRC_TARGET static inline uint64_t step8(uint64_t crc, uint64_t w)
{
    return __crc32cd((uint32_t)crc, w);
}
CRC_TARGET static inline uint32_t step1(uint32_t crc, unsigned char b) { return __crc32cb(crc, b); }
#endif

#ifdef CRC_TARGET
static inline uint32_t shift(const uint32_t zeros[4][256], uint32_t crc)
{
    return zeros[0][crc & 0xff] ^ zeros[1][crc >> 8 & 0xff] ^ zeros[2][crc >> 16 & 0xff] ^
           zeros[3][crc >> 24];
}

/* Three streams side by side, joined by the crc of zeros (M. Adler, crc32c.c, 2013). */
CRC_TARGET PMS_NO_TSAN static inline uint32_t three(uint32_t crc, const unsigned char *p,
                                                    size_t stream, const uint32_t zeros[4][256])
{
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < stream; i += 8) {
        a = step8(a, load8(p + i));
        b = step8(b, load8(p + stream + i));
        c = step8(c, load8(p + 2 * stream + i));
    }
    uint32_t joined = shift(zeros, (uint32_t)a) ^ (uint32_t)b;
    return shift(zeros, joined) ^ (uint32_t)c;
}

CRC_TARGET PMS_NO_TSAN static uint32_t crc_by_instruction(uint32_t crc, const unsigned char *p,
                                                          size_t n)
{
    crc = ~crc;
    for (; n >= 3 * LONG; n -= 3 * LONG, p += 3 * LONG)
        crc = three(crc, p, LONG, shift_long);
    for (; n >= 3 * SHORT; n -= 3 * SHORT, p += 3 * SHORT)
        crc = three(crc, p, SHORT, shift_short);
    uint64_t wide = crc;
    for (; n >= 8; n -= 8, p += 8)
        wide = step8(wide, load8(p));
    crc = (uint32_t)wide;
    while (n--)
        crc = step1(crc, *p++);
    return ~crc;
}
#endif

/* ---- by carry-less multiplication of 512-bit registers ---- */

#if defined(__x86_64__)
#define FOLD_MIN 512u
#define FOLD_TARGET __attribute__((target("avx512f,avx512vl,vpclmulqdq,pclmul,sse4.2")))

/* V. Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ" (Intel, 2009):
 * a 128-bit lane moves t bits ahead by two multiplications, of its low half by x^(t+32) and of
 * its high half by x^(t-32), both mod P, bit-reflected. */
struct fold {
    uint64_t low, high;
};
static struct fold fold_2048, fold_1536, fold_1024, fold_512;
static bool folding;

/* x^n mod P, reflected, shifted by the one bit that reflection costs */
static uint64_t reflected_power(uint32_t n)
{
    uint32_t r = 0x80000000u; /* 1 */
    while (n--)
        r = r >> 1 ^ (r & 1 ? POLY : 0);
    return (uint64_t)r << 1;
}

static struct fold make_fold(uint32_t t)
{
    return (struct fold){reflected_power(t + 32), reflected_power(t - 32)};
}

__attribute__((constructor)) static void make_folds(void)
{
    fold_2048 = make_fold(2048);
    fold_1536 = make_fold(1536);
    fold_1024 = make_fold(1024);
    fold_512 = make_fold(512);
    __builtin_cpu_init();
    folding = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("sse4.2");
}

FOLD_TARGET PMS_NO_TSAN static inline __m512i ahead(__m512i x, __m512i k, __m512i onto)
{
    __m512i low = _mm512_clmulepi64_epi128(x, k, 0x00), high = _mm512_clmulepi64_epi128(x, k, 0x11);
    return _mm512_ternarylogic_epi64(low, high, onto, 0x96); /* xor of three */
}

FOLD_TARGET static inline __m512i constants(const struct fold *f)
{
    return _mm512_broadcast_i32x4(_mm_set_epi64x((long long)f->high, (long long)f->low));
}

/* n >= 256. What is left of all but the last n % 256 bytes is a message of 64 bytes with the
 * same crc. */
FOLD_TARGET PMS_NO_TSAN static uint32_t crc_by_folding(uint32_t crc, const unsigned char *p,
                                                       size_t n)
{
    __m512i x[4], k = constants(&fold_2048);
    for (int i = 0; i < 4; i++)
        x[i] = _mm512_loadu_si512(p + 64 * i);
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256)
        for (int i = 0; i < 4; i++)
            x[i] = ahead(x[i], k, _mm512_loadu_si512(p + 64 * i));
    __m512i last = ahead(x[0], constants(&fold_1536), x[3]);
    last = ahead(x[1], constants(&fold_1024), last);
    last = ahead(x[2], constants(&fold_512), last);
    unsigned char left[64];
    _mm512_storeu_si512(left, last);
    return crc_by_instruction(crc_by_instruction(~0u, left, sizeof left), p, n);
}
#endif

uint32_t pms_crc32c(uint32_t crc, const void *data, size_t n)
{
#if defined(__x86_64__)
    if (n >= FOLD_MIN && folding)
        return crc_by_folding(crc, data, n);
#endif
#ifdef CRC_TARGET
    if (__builtin_expect(instruction, 1))
        return crc_by_instruction(crc, data, n);
#endif
    return pms_crc32c_portable(crc, data, n);
}

uint32_t pms_crc32c_join(uint32_t first, uint32_t second, uint64_t n)
{
    for (uint32_t k = 0; n; n >>= 1, k++)
        if (n & 1)
            first = multiply(shift_bytes[k], first);
    return first ^ second;
}

/* ---- hashes: 64 x 64 -> 128 bit multiplications, folded (the construction of wyhash and
 * rapidhash) ---- */

static inline uint64_t fold(uint64_t a, uint64_t b)
{
    unsigned __int128 p = (unsigned __int128)a * b;
    return (uint64_t)p ^ (uint64_t)(p >> 64);
}

uint64_t pms_hash(uint64_t seed, const void *data, size_t n)
{
    const uint64_t k0 = 0xa0761d6478bd642full, k1 = 0xe7037ed1a0b428dbull,
                   k2 = 0x8ebc6af09c88c6e3ull;
    const unsigned char *p = data;
    uint64_t h = fold(seed ^ k0, (uint64_t)n ^ k1), tail[2] = {0, 0};
    size_t left = n;
    for (; left > 16; left -= 16, p += 16)
        h = fold(load8(p) ^ k1 ^ h, load8(p + 8) ^ k2);
    memcpy(tail, p, left);
    h = fold(tail[0] ^ k1 ^ h, tail[1] ^ k2 ^ seed);
    h = fold(h ^ k0, k2);
    return h ? h : 1;
}

uint16_t pms_check16(uint64_t salt, uint64_t word)
{
    uint64_t h = fold(word ^ 0x9e3779b97f4a7c15ull,
                      salt * 0xff51afd7ed558ccdull ^ 0xc4ceb9fe1a85ec53ull);
    h ^= h >> 32;
    return (uint16_t)(h ^ h >> 16);
}
