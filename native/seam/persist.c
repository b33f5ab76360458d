/* The seam's memory half: stores, write-back, fences. Files are in persist_file.c, the worker
 * threads in parallel.c. */
#include "seam/persist.h"

#include <string.h>

#include "base/checksum.h"
#include "base/quiet.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#define LINE 64u
/* With write-back, whole lines are better off as non-temporal stores: no read for ownership of a
 * line that was flushed before. */
#define NT_MIN_FLUSH LINE
/* Without write-back a copy that fits the caches is better off in them. */
#define NT_MIN_PLAIN (256u << 10)

pms_persist_hook_fn *_Atomic pms_persist_hook;

static inline void hook(enum pms_primitive primitive, const void *addr, size_t bytes)
{
    pms_persist_hook_fn *call = atomic_load_explicit(&pms_persist_hook, memory_order_relaxed);
    if (__builtin_expect(call != NULL, 0))
        call(primitive, (uintptr_t)addr, bytes);
}

/* ---- what this CPU has ---- */

#if defined(__x86_64__)
static bool has_clwb, has_clflushopt, has_avx512;

__attribute__((constructor)) static void look_at_cpu(void)
{
    unsigned a, b, c, d;
    __builtin_cpu_init();
    has_avx512 = __builtin_cpu_supports("avx512f");
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        has_clflushopt = (b >> 23 & 1) != 0;
        has_clwb = (b >> 24 & 1) != 0;
    }
}
#endif

enum pms_flush pms_persist_best_flush(void)
{
#if defined(__x86_64__)
    return has_clwb ? PMS_FLUSH_CLWB : has_clflushopt ? PMS_FLUSH_CLFLUSHOPT : PMS_FLUSH_CLFLUSH;
#elif defined(__aarch64__)
    /* as the kernel chooses for itself */
    return getauxval(AT_HWCAP) & HWCAP_DCPOP ? PMS_FLUSH_CVAP : PMS_FLUSH_CVAC;
#else
    return PMS_FLUSH_NONE;
#endif
}

static inline void flush_line(enum pms_flush flush, const void *line)
{
#if defined(__x86_64__)
    /* By their bytes: the assembler takes them whatever it is told about the target. */
    if (flush == PMS_FLUSH_CLWB)
        __asm__ volatile(".byte 0x66; xsaveopt %0" : "+m"(*(volatile char *)(uintptr_t)line));
    else if (flush == PMS_FLUSH_CLFLUSHOPT)
        __asm__ volatile(".byte 0x66; clflush %0" : "+m"(*(volatile char *)(uintptr_t)line));
    else
        _mm_clflush(line);
#elif defined(__aarch64__)
    if (flush == PMS_FLUSH_CVAP)
        /* dc cvap: older assemblers do not know the name */
        __asm__ volatile("sys #3, C7, C12, #1, %0" : : "r"(line) : "memory");
    else
        __asm__ volatile("dc cvac, %0" : : "r"(line) : "memory");
#else
    (void)flush, (void)line;
#endif
}

/* ---- primitives ---- */

void pms_persist_store8(struct pms_persist *p, uint64_t *dst, uint64_t value)
{
    (void)p;
    hook(PMS_PRIM_STORE, dst, sizeof value);
    __atomic_store_n(dst, value, __ATOMIC_RELEASE);
}

void pms_persist_store(struct pms_persist *p, void *dst, const void *src, size_t n)
{
    (void)p;
    hook(PMS_PRIM_STORE, dst, n);
    memcpy(dst, src, n);
}

void pms_persist_flush(struct pms_persist *p, const void *addr, size_t n)
{
    if (p->flush == PMS_FLUSH_NONE || !n)
        return;
    hook(PMS_PRIM_FLUSH, addr, n);
    uintptr_t line = (uintptr_t)addr & ~(uintptr_t)(LINE - 1), end = (uintptr_t)addr + n;
    p->lines += (end - line + LINE - 1) / LINE;
    for (; line < end; line += LINE)
        flush_line(p->flush, (const void *)line);
}

static inline void order_stores(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#elif defined(__aarch64__)
    __asm__ volatile("dsb ish" : : : "memory");
#else
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

void pms_persist_fence(struct pms_persist *p)
{
    hook(PMS_PRIM_FENCE, NULL, 0);
    p->fences++;
    if (p->flush != PMS_FLUSH_NONE)
        order_stores();
    /* without write-back program order is enough: stores survive their process */
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

void pms_persist_hand_over(struct pms_persist *p)
{
    if (p->flush == PMS_FLUSH_NONE)
        return;
    hook(PMS_PRIM_FENCE, NULL, 0);
#if !defined(__x86_64__)
    p->fences++;
    order_stores();
#endif
}

/* ---- non-temporal copies: dst aligned to a line, n a multiple of it ---- */

#if defined(__x86_64__)
__attribute__((target("avx512f"))) PMS_NO_TSAN static void nt_copy_512(void *dst, const void *src,
                                                                       size_t n)
{
    for (size_t i = 0; i < n; i += LINE)
        _mm512_stream_si512((__m512i *)((char *)dst + i),
                            _mm512_loadu_si512((const char *)src + i));
}

PMS_NO_TSAN static void nt_copy_128(void *dst, const void *src, size_t n)
{
    for (size_t i = 0; i < n; i += 16)
        _mm_stream_si128((__m128i *)((char *)dst + i),
                         _mm_loadu_si128((const __m128i *)((const char *)src + i)));
}

static void nt_copy(void *dst, const void *src, size_t n)
{
    if (has_avx512)
        nt_copy_512(dst, src, n);
    else
        nt_copy_128(dst, src, n);
}

static void nt_zero(void *dst, size_t n)
{
    for (size_t i = 0; i < n; i += 16)
        _mm_stream_si128((__m128i *)((char *)dst + i), _mm_setzero_si128());
}
#define HAVE_NT 1
#else
static void nt_copy(void *dst, const void *src, size_t n) { memcpy(dst, src, n); }
static void nt_zero(void *dst, size_t n) { memset(dst, 0, n); }
#define HAVE_NT 0
#endif

/* Splits [dst, dst+n) into a head up to the first line, whole lines, and a tail. */
struct parts {
    size_t head, body, tail;
};

static struct parts split(const void *dst, size_t n)
{
    size_t head = (size_t)(-(uintptr_t)dst & (LINE - 1));
    if (head > n)
        head = n;
    size_t body = (n - head) & ~(size_t)(LINE - 1);
    return (struct parts){head, body, n - head - body};
}

static bool use_nt(const struct pms_persist *p, size_t n)
{
    return HAVE_NT && n >= (p->flush == PMS_FLUSH_NONE ? NT_MIN_PLAIN : NT_MIN_FLUSH);
}

PMS_NO_TSAN static void plain(struct pms_persist *p, void *dst, const void *src, size_t n)
{
    if (!n)
        return;
    pms_quiet_copy(dst, src, n);
    pms_persist_flush(p, dst, n);
}

/* Copies without a hook; the caller announced the whole. */
static void copy_nt(struct pms_persist *p, char *dst, const char *src, size_t n)
{
    struct parts s = split(dst, n);
    plain(p, dst, src, s.head);
    nt_copy(dst + s.head, src + s.head, s.body);
    plain(p, dst + s.head + s.body, src + s.head + s.body, s.tail);
    p->lines += s.body / LINE;
}

/* In domains without fences of their own, non-temporal stores must not stay behind later ones. */
static void after_nt(const struct pms_persist *p)
{
    if (p->flush == PMS_FLUSH_NONE)
        order_stores();
}

void pms_persist_copy(struct pms_persist *p, void *dst, const void *src, size_t n)
{
    if (!use_nt(p, n)) {
        hook(PMS_PRIM_STORE, dst, n);
        plain(p, dst, src, n);
        return;
    }
    hook(PMS_PRIM_COPY, dst, n);
    copy_nt(p, dst, src, n);
    after_nt(p);
}

uint32_t pms_persist_copy_crc(struct pms_persist *p, void *dst, const void *src, size_t n,
                              uint32_t crc, void *steady)
{
    bool nt = use_nt(p, n);
    hook(nt ? PMS_PRIM_COPY : PMS_PRIM_STORE, dst, n);
    for (size_t at = 0; at < n; at += PMS_CRC_BLOCK) {
        size_t block = n - at < PMS_CRC_BLOCK ? n - at : PMS_CRC_BLOCK;
        const char *from = (const char *)src + at;
        if (nt) {
            pms_quiet_copy(steady, from, block);
            crc = pms_crc32c(crc, steady, block);
            copy_nt(p, (char *)dst + at, steady, block);
        } else {
            pms_quiet_copy((char *)dst + at, from, block);
            crc = pms_crc32c(crc, (char *)dst + at, block);
            pms_persist_flush(p, (char *)dst + at, block);
        }
    }
    if (nt)
        after_nt(p);
    return crc;
}

void pms_persist_zero(struct pms_persist *p, void *dst, size_t n)
{
    if (!use_nt(p, n)) {
        hook(PMS_PRIM_STORE, dst, n);
        memset(dst, 0, n);
        pms_persist_flush(p, dst, n);
        return;
    }
    struct parts s = split(dst, n);
    char *d = dst;
    hook(PMS_PRIM_COPY, dst, n);
    memset(d, 0, s.head);
    nt_zero(d + s.head, s.body);
    memset(d + s.head + s.body, 0, s.tail);
    pms_persist_flush(p, d, s.head);
    pms_persist_flush(p, d + s.head + s.body, s.tail);
    p->lines += s.body / LINE;
    after_nt(p);
}
