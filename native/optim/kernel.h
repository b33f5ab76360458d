/* The inner loops, inlined once for each instruction set (see optim.c). Whole blocks of elements
 * go through arrays in the first-level cache, so that loads, arithmetic and stores can each be
 * what suits them: bfloat16 or float32, in place or past the caches. */
#ifndef PMS_OPTIM_KERNEL_H
#define PMS_OPTIM_KERNEL_H

#include <math.h>
#include <string.h>

#include "optim/optim.h"

/* small: the sources' streams stay close together, which the prefetchers like */
#define PMS_OPTIM_BLOCK 64u
#define INLINE static inline __attribute__((always_inline))

struct pms_optim_block { /* of one tensor, as float32 */
    float param[PMS_OPTIM_BLOCK], grad[PMS_OPTIM_BLOCK], state[2][PMS_OPTIM_BLOCK];
} __attribute__((aligned(64)));

/* what all elements of a tensor share, rounded once as torch rounds it */
struct pms_optim_numbers {
    float sign, decay, keep, lerp, lerp_base, beta2, grad_sq, correction, eps, step_size;
    float momentum, damped;
    bool first; /* SGD: the buffer begins with the gradient */
};

INLINE struct pms_optim_numbers pms_optim_prepare(const struct pms_optim_hyper *h, double step)
{
    struct pms_optim_numbers n = {.sign = h->maximize ? -1.0f : 1.0f};
    if (h->kind == PMS_OPTIM_SGD) {
        n.decay = (float)h->weight_decay;
        n.step_size = (float)-h->lr;
        n.momentum = (float)h->momentum;
        n.damped = (float)(1 - h->dampening);
        n.first = step <= 1;
        return n;
    }
    n.decay = (float)h->weight_decay;
    n.keep = (float)(1 - h->lr * h->weight_decay);
    n.lerp = (float)(1 - h->beta1);
    n.beta2 = (float)h->beta2;
    n.grad_sq = (float)(1 - h->beta2);
    n.correction = (float)sqrt(1 - pow(h->beta2, step));
    n.eps = (float)h->eps;
    n.step_size = (float)-(h->lr / (1 - pow(h->beta1, step)));
    return n;
}

INLINE float pms_optim_lerp(float from, float to, float weight) /* as torch: from the nearer end */
{
    return weight < 0.5f ? fmaf(weight, to - from, from) : fmaf(weight - 1, to - from, to);
}

INLINE void pms_optim_adam(struct pms_optim_block *restrict b, uint64_t count,
                           const struct pms_optim_numbers n, bool decoupled)
{
    for (uint64_t i = 0; i < count; i++) {
        float param = b->param[i], grad = b->grad[i] * n.sign;
        if (decoupled)
            param *= n.keep;
        else
            grad = n.decay != 0 ? fmaf(param, n.decay, grad) : grad;
        float m = pms_optim_lerp(b->state[0][i], grad, n.lerp);
        float v = fmaf(n.grad_sq * grad, grad, b->state[1][i] * n.beta2);
        b->state[0][i] = m;
        b->state[1][i] = v;
        b->param[i] = param + n.step_size * m / (sqrtf(v) / n.correction + n.eps);
    }
}

INLINE void pms_optim_sgd(struct pms_optim_block *restrict b, uint64_t count,
                          const struct pms_optim_numbers n, bool momentum, bool nesterov)
{
    for (uint64_t i = 0; i < count; i++) {
        float grad = b->grad[i] * n.sign;
        grad = n.decay != 0 ? fmaf(b->param[i], n.decay, grad) : grad;
        if (momentum) {
            float buffer = n.first ? grad : fmaf(n.damped, grad, b->state[0][i] * n.momentum);
            b->state[0][i] = buffer;
            grad = nesterov ? fmaf(buffer, n.momentum, grad) : buffer;
        }
        b->param[i] = fmaf(n.step_size, grad, b->param[i]);
    }
}

INLINE void pms_optim_widen(float *restrict out, const uint16_t *restrict in, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits = (uint32_t)in[i] << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}

/* to nearest, ties to even */
INLINE void pms_optim_narrow(uint16_t *restrict out, const float *restrict in, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &in[i], sizeof bits);
        uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
}

INLINE void pms_optim_load(float *restrict out, const void *in, uint64_t at, uint64_t count,
                           bool bfloat16)
{
    if (bfloat16)
        pms_optim_widen(out, (const uint16_t *)in + at, count);
    else
        memcpy(out, (const float *)in + at, count * sizeof *out);
}

typedef void pms_optim_store(void *out, const void *in, uint64_t bytes);

/* Up to a block of elements from `at`. */
INLINE void pms_optim_one(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                          const struct pms_optim_numbers n, uint64_t at, uint64_t count,
                          pms_optim_store *store)
{
    struct pms_optim_block b;
    uint16_t narrow[PMS_OPTIM_BLOCK] __attribute__((aligned(64)));
    pms_optim_load(b.param, t->param, at, count, t->bfloat16);
    if (t->grad)
        pms_optim_load(b.grad, t->grad, at, count, t->bfloat16);
    for (int s = 0; s < 2 && t->state[s]; s++)
        memcpy(b.state[s], t->state[s] + at, count * sizeof(float));
    if (t->grad && h->kind == PMS_OPTIM_SGD && h->momentum != 0)
        pms_optim_sgd(&b, count, n, true, h->nesterov);
    else if (t->grad && h->kind == PMS_OPTIM_SGD)
        pms_optim_sgd(&b, count, n, false, false);
    else if (t->grad)
        pms_optim_adam(&b, count, n, h->kind == PMS_OPTIM_ADAMW);
    if (t->bfloat16) {
        pms_optim_narrow(narrow, b.param, count);
        store((uint16_t *)t->param_out + at, narrow, count * sizeof *narrow);
    } else {
        store((float *)t->param_out + at, b.param, count * sizeof(float));
    }
    for (int s = 0; s < 2 && t->state[s]; s++)
        store(t->state_out[s] + at, b.state[s], count * sizeof(float));
}

/* Elements [at, at + count) of one tensor. */
INLINE void pms_optim_range(const struct pms_optim_tensor *t, const struct pms_optim_hyper *h,
                            uint64_t at, uint64_t count, pms_optim_store *store)
{
    const struct pms_optim_numbers n = pms_optim_prepare(h, (double)*t->step + 1);
    uint64_t end = at + count;
    for (; at + PMS_OPTIM_BLOCK <= end; at += PMS_OPTIM_BLOCK)
        /* a constant number: loops without a rest */
        pms_optim_one(t, h, n, at, PMS_OPTIM_BLOCK, store);
    if (at < end)
        pms_optim_one(t, h, n, at, end - at, store);
}

#endif
