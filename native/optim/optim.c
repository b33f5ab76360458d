/* Loops over elements are vectorised by the compiler, once for each instruction set; which one
 * runs is decided at run time. That takes -fno-math-errno -fno-trapping-math on the command line
 * (a pragma does not reach sqrtf): without them the loops are scalar, four times slower; and
 * -ffp-contract=off: where torch fuses a product and a sum is written out with fmaf. */
#pragma GCC optimize("O3")
#include "optim/optim.h"

#include <stdbool.h>

#include "optim/kernel.h"
#include "seam/persist.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define PIECE (64u << 10) /* elements that one core takes at a time: a multiple of a block */

typedef void range_fn(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                      uint64_t at, uint64_t count);

/* ---- one function for each instruction set, in place and past the caches ---- */

INLINE void store_plain(void *out, const void *in, uint64_t bytes) { memcpy(out, in, bytes); }

static void range_portable(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                           uint64_t at, uint64_t count)
{
    pms_optim_range(t, h, at, count, store_plain); /* on aarch64: NEON */
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2,fma")))
/* knows no prefer-vector-width in an attribute, and then ignores all of it */
#if defined(__clang__)
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl")))
#else
#define AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")))
#endif

AVX2 INLINE void store_stream_avx2(void *out, const void *in, uint64_t bytes)
{
    char *o = out;
    const char *i = in;
    if ((uintptr_t)out % 32 == 0)
        for (; bytes >= 32; bytes -= 32, o += 32, i += 32)
            _mm256_stream_si256((__m256i *)o, _mm256_load_si256((const __m256i *)i));
    memcpy(o, i, bytes);
}

AVX512 INLINE void store_stream_avx512(void *out, const void *in, uint64_t bytes)
{
    char *o = out;
    const char *i = in;
    if ((uintptr_t)out % 64 == 0)
        for (; bytes >= 64; bytes -= 64, o += 64, i += 64)
            _mm512_stream_si512((__m512i *)o, _mm512_load_si512((const __m512i *)i));
    memcpy(o, i, bytes);
}

AVX2 static void range_avx2(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                            uint64_t at, uint64_t count)
{
    pms_optim_range(t, h, at, count, store_plain);
}

AVX2 static void stream_avx2(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                             uint64_t at, uint64_t count)
{
    pms_optim_range(t, h, at, count, store_stream_avx2);
}

AVX512 static void range_avx512(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                                uint64_t at, uint64_t count)
{
    pms_optim_range(t, h, at, count, store_plain);
}

AVX512 static void stream_avx512(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                                 uint64_t at, uint64_t count)
{
    pms_optim_range(t, h, at, count, store_stream_avx512);
}
#endif

static _Atomic int most = PMS_OPTIM_AVX512;

void pms_optim_limit(int set) { most = set; }

static range_fn *choose(bool stream)
{
#if defined(__x86_64__)
    if (most >= PMS_OPTIM_AVX512 && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return stream ? stream_avx512 : range_avx512;
    if (most >= PMS_OPTIM_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return stream ? stream_avx2 : range_avx2;
#endif
    (void)stream;
    return range_portable;
}

/* ---- sharing the work out ---- */

struct job {
    const struct pms_optim_tensor *tensor;
    const struct pms_optim_hyper *hyper;
    uint64_t count, elements;
    range_fn *range;
};

static void run_piece(void *ctx, size_t piece)
{
    const struct job *job = ctx;
    /* streamed: its fence is a real one in any domain */
    struct pms_persist counters = {.flush = pms_persist_best_flush()};
    uint64_t from = (uint64_t)piece * PIECE, left = PIECE;
    for (uint64_t i = 0; i < job->count && left; i++) {
        const struct pms_optim_tensor *t = &job->tensor[i];
        if (from >= t->count) {
            from -= t->count;
            continue;
        }
        uint64_t n = t->count - from < left ? t->count - from : left;
        job->range(t, job->hyper, from, n);
        left -= n;
        from = 0;
    }
    if (job->hyper->stream)
        /* this core's streamed elements, before the caller reads, flips or writes them back */
        pms_persist_fence(&counters);
}

void pms_optim_step(const struct pms_optim_tensor *tensor, uint64_t count,
                    const struct pms_optim_hyper *hyper)
{
    struct job job = {tensor, hyper, count, 0, choose(hyper->stream)};
    for (uint64_t i = 0; i < count; i++)
        job.elements += tensor[i].count;
    pms_parallel_for(run_piece, &job, (size_t)((job.elements + PIECE - 1) / PIECE));
    for (uint64_t i = 0; i < count; i++) /* last: every piece has read the number of steps */
        *tensor[i].step_out = *tensor[i].step + (tensor[i].grad ? 1.0f : 0.0f);
}
