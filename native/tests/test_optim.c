/* The optimizers' loops against a plain reference: for every instruction set, option and length,
 * from and to any alignment. The reference computes in double, once rounding to float where
 * torch's fused kernels do (what is left is at most 1 ulp), once not rounding at all. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "optim/optim.h"
#include "seam/persist.h"
#include "test.h"

#define MOST (2u * 65536 + 77) /* elements: pieces of several cores, and a rest */
#define GUARD 64u              /* bytes behind every output that nobody may touch */
/* of the largest operand: what a handful of roundings may add up to */
#define EXACT_ULPS 4

enum { PARAM, FIRST, SECOND, ARRAYS };

/* a parameter's elements and its state */
struct version {
    unsigned char *at[ARRAYS];
    float step;
};

static unsigned char *memory[2][ARRAYS], *grad_memory, *from_portable[ARRAYS];
static double expected[ARRAYS][MOST], scale[ARRAYS][MOST];

static const uint64_t lengths[] = {1, 3, 15, 16, 17, 31, 127, 128, 129, 1000, MOST};

static const struct pms_optim_hyper options[] = {
    {.kind = PMS_OPTIM_ADAM, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
    {.kind = PMS_OPTIM_ADAM,
     .lr = 1e-2,
     .beta1 = 0.3,
     .beta2 = 0.9,
     .eps = 1e-3,
     .weight_decay = 0.1,
     .maximize = 1},
    {.kind = PMS_OPTIM_ADAMW,
     .lr = 1e-3,
     .beta1 = 0.9,
     .beta2 = 0.999,
     .eps = 1e-8,
     .weight_decay = 1e-2},
    {.kind = PMS_OPTIM_ADAMW,
     .lr = 0.1,
     .beta1 = 0.0,
     .beta2 = 0.5,
     .eps = 1e-6,
     .weight_decay = 0.0,
     .maximize = 1},
    {.kind = PMS_OPTIM_SGD, .lr = 0.1},
    {.kind = PMS_OPTIM_SGD, .lr = 0.1, .weight_decay = 0.1, .maximize = 1},
    {.kind = PMS_OPTIM_SGD, .lr = 0.1, .momentum = 0.9},
    {.kind = PMS_OPTIM_SGD, .lr = 0.1, .momentum = 0.9, .dampening = 0.25, .weight_decay = 0.01},
    {.kind = PMS_OPTIM_SGD, .lr = 0.1, .momentum = 0.9, .nesterov = 1, .maximize = 1},
};
#define OPTIONS (sizeof options / sizeof options[0])

/* ---- the reference ---- */

static bool rounding;
static double r(double x) { return rounding ? (double)(float)x : x; }

static double lerp(double from, double to, double weight)
{
    return weight < 0.5 ? r(weight * r(to - from) + from) : r((weight - 1) * r(to - from) + to);
}

struct element {
    double value[ARRAYS], scale[ARRAYS];
};

static struct element adam(const struct pms_optim_hyper *h, double step, double p, double g,
                           double m, double v)
{
    double start = p, decay = (float)h->weight_decay;
    double correction = (float)sqrt(1 - pow(h->beta2, step)),
           size = (float)-(h->lr / (1 - pow(h->beta1, step)));
    g = h->maximize ? -g : g;
    if (h->kind == PMS_OPTIM_ADAMW)
        p = r(p * (float)(1 - h->lr * h->weight_decay));
    else if (decay != 0)
        g = r(p * decay + g);
    double next_m = lerp(m, g, (float)(1 - h->beta1));
    double next_v = r(r((float)(1 - h->beta2) * g) * g + r(v * (float)h->beta2));
    double change = r(r(size * next_m) / r(r(r(sqrt(next_v)) / correction) + (float)h->eps));
    return (struct element){
        {r(p + change), next_m, next_v},
        {fmax(fmax(fabs(start), fabs(p)), fabs(change)), fmax(fabs(m), fabs(g)), next_v}};
}

static struct element sgd(const struct pms_optim_hyper *h, double step, double p, double g,
                          double buffer)
{
    double momentum = (float)h->momentum, largest = fmax(fabs(p), fabs(g));
    g = h->maximize ? -g : g;
    g = h->weight_decay != 0 ? r(p * (float)h->weight_decay + g) : g;
    if (h->momentum != 0) {
        double before = r(buffer * momentum);
        largest = fmax(largest, fabs(before));
        buffer = step <= 1 ? g : r((float)(1 - h->dampening) * g + before);
        g = h->nesterov ? r(buffer * momentum + g) : buffer;
    }
    return (struct element){{r((float)-h->lr * g + p), buffer, 0},
                            {fmax(largest, fabs(g)), largest, 0}};
}

/* ---- one case ---- */

struct layout {
    bool bfloat16, in_place, shifted, stream;
};

static float widen(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* of numbers: to nearest, ties to even, by the distance to both neighbours */
static uint16_t narrow(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t low = (uint16_t)(bits >> 16), high = (uint16_t)(low + 1);
    double below = fabs((double)value - (double)widen(low)),
           above = fabs((double)widen(high) - (double)value);
    return below < above || (below == above && low % 2 == 0) ? low : high;
}

static double get(const unsigned char *at, uint64_t i, bool bfloat16)
{
    float value;
    uint16_t half;
    if (bfloat16) {
        memcpy(&half, at + 2 * i, sizeof half);
        return (double)widen(half);
    }
    memcpy(&value, at + 4 * i, sizeof value);
    return (double)value;
}

static void put(unsigned char *at, uint64_t i, bool bfloat16, float value)
{
    uint16_t half = narrow(value);
    memcpy(at + (bfloat16 ? 2 : 4) * i, bfloat16 ? (void *)&half : (void *)&value,
           bfloat16 ? sizeof half : sizeof value);
}

/* both signs, magnitudes of 2^low to 2^high */
static float drawn(uint64_t *seed, int low, int high)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    double part = 1 + (double)(*seed >> 40) / (1 << 24);
    int power = low + (int)(*seed >> 20 & 0xffff) % (high - low);
    return (float)ldexp(*seed >> 10 & 1 ? part : -part, power);
}

static void fill(struct version *old, unsigned char *grad, uint64_t count, bool bfloat16,
                 uint64_t seed)
{
    for (uint64_t i = 0; i < count; i++) {
        put(old->at[PARAM], i, bfloat16, drawn(&seed, -8, 2));
        put(grad, i, bfloat16, drawn(&seed, -12, 4));
        put(old->at[FIRST], i, false, drawn(&seed, -10, 2));
        put(old->at[SECOND], i, false, fabsf(drawn(&seed, -16, 2)));
    }
}

static void expect(const struct pms_optim_hyper *h, const struct version *old,
                   const unsigned char *grad, uint64_t count, bool bfloat16)
{
    for (uint64_t i = 0; i < count; i++) {
        double p = get(old->at[PARAM], i, bfloat16), g = get(grad, i, bfloat16),
               first = get(old->at[FIRST], i, false);
        struct element e = h->kind == PMS_OPTIM_SGD ? sgd(h, (double)old->step + 1, p, g, first)
                                                    : adam(h, (double)old->step + 1, p, g, first,
                                                           get(old->at[SECOND], i, false));
        for (int a = 0; a < ARRAYS; a++) {
            expected[a][i] = e.value[a];
            scale[a][i] = e.scale[a];
        }
    }
}

static uint64_t bytes_of(int array, uint64_t count, bool bfloat16)
{
    return count * (array == PARAM && bfloat16 ? 2 : 4);
}

static bool close_enough(double value, double wanted, double largest, bool bfloat16)
{
    /* half an ulp of bfloat16, which is at most 2^-8 of the value, beside that of what was
     * rounded to it */
    if (bfloat16)
        return fabs(value - wanted) <=
               fabs(wanted) / 256 * (1 + FLT_EPSILON) + EXACT_ULPS * largest * FLT_EPSILON;
    double ulp = rounding
                     ? fabs((double)nextafterf((float)wanted, INFINITY) - (double)(float)wanted)
                     : largest * FLT_EPSILON;
    return fabs(value - wanted) <= (rounding ? 1 : EXACT_ULPS) * fmax(ulp, (double)FLT_TRUE_MIN);
}

static int states_of(const struct pms_optim_hyper *h)
{
    return h->kind != PMS_OPTIM_SGD ? 2 : h->momentum != 0 ? 1 : 0;
}

/* Takes one step and holds it against the reference. keep: the results are those that other
 * instruction sets have to give. */
static bool one(struct pms_optim_hyper h, struct layout y, uint64_t count, float step, int set,
                bool keep)
{
    uint64_t shift = y.shifted ? (y.bfloat16 ? 2 : 4) : 0;
    struct version old = {.step = step}, next = {.step = -1};
    static unsigned char before[ARRAYS][MOST * 4];
    for (int a = 0; a < ARRAYS; a++) {
        old.at[a] = memory[0][a] + (a == PARAM ? shift : y.shifted ? 4 : 0);
        next.at[a] = y.in_place ? old.at[a] : memory[1][a] + (old.at[a] - memory[0][a]);
        memset(memory[1][a], 0xa5, MOST * 4 + 2 * GUARD);
        memset(memory[0][a], 0xa5, MOST * 4 + 2 * GUARD);
    }
    unsigned char *grad = grad_memory + shift;
    fill(&old, grad, count, y.bfloat16, count * 31 + (uint64_t)h.kind);
    for (int a = 0; a < ARRAYS; a++)
        memcpy(before[a], old.at[a], bytes_of(a, count, y.bfloat16));
    struct pms_optim_tensor t = {.param = old.at[PARAM],
                                 .param_out = next.at[PARAM],
                                 .grad = grad,
                                 .count = count,
                                 .step = &old.step,
                                 .step_out = y.in_place ? &old.step : &next.step,
                                 .bfloat16 = y.bfloat16};
    for (int s = 0; s < states_of(&h); s++) {
        t.state[s] = (const float *)(const void *)old.at[FIRST + s];
        t.state_out[s] = (float *)(void *)next.at[FIRST + s];
    }
    h.stream = y.stream;
    bool good = true;
    expect(&h, &old, grad, count, y.bfloat16); /* before the step, which may be in place */
    pms_optim_limit(set);
    pms_optim_step(&t, 1, &h);
    good &= *t.step_out == step + 1;
    for (int a = 0; a <= states_of(&h); a++) {
        bool half = a == PARAM && y.bfloat16;
        uint64_t bytes = bytes_of(a, count, y.bfloat16);
        for (uint64_t i = 0; i < count; i++)
            good &= close_enough(get(next.at[a], i, half), expected[a][i], scale[a][i], half);
        for (uint64_t i = 0; i < GUARD; i++)
            good &= next.at[a][bytes + i] == 0xa5;
        good &= y.in_place || memcmp(old.at[a], before[a], bytes) == 0;
        if (keep)
            memcpy(from_portable[a], next.at[a], bytes);
        else
            good &= memcmp(from_portable[a], next.at[a], bytes) == 0;
    }
    if (!good)
        printf("  kind %d, %llu elements, set %d, %s%s%s%s\n", h.kind, (unsigned long long)count,
               set, y.bfloat16 ? "bfloat16 " : "", y.in_place ? "in place " : "",
               y.shifted ? "shifted " : "", y.stream ? "stream" : "");
    return good;
}

static void all_cases(int most) /* sets: those after the first have to give its bits */
{
    for (size_t o = 0; o < OPTIONS; o++)
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
            for (int bfloat16 = 0; bfloat16 < 2; bfloat16++)
                /* the first step, and the tenth */
                for (int later = lengths[l] == MOST; later < 2; later++) {
                    struct layout plain = {.bfloat16 = bfloat16};
                    float step = later ? 9 : 0;
                    CHECK(one(options[o], plain, lengths[l], step, PMS_OPTIM_PORTABLE, true));
                    for (int set = PMS_OPTIM_PORTABLE; set <= most; set++)
                        for (int how = 0; how < 8; how++) {
                            struct layout y = {bfloat16, how & 1, how & 2, how & 4};
                            /* the long one: not in every way */
                            if (lengths[l] < MOST || how == 0 || how == 4)
                                CHECK(one(options[o], y, lengths[l], step, set, false));
                        }
                }
    pms_optim_limit(PMS_OPTIM_AVX512);
}

static void within_one_ulp_of_torchs_arithmetic(void)
{
    rounding = true;
    all_cases(PMS_OPTIM_AVX512);
}

static void near_exact_arithmetic(void)
{
    rounding = false;
    all_cases(PMS_OPTIM_PORTABLE - 1);
}

/* Several tensors in one call: pieces that cross their borders; one without a gradient is
 * copied, and its step does not count. */
static void many_tensors(void)
{
    enum { TENSORS = 40 };
    struct pms_optim_tensor t[TENSORS];
    struct pms_optim_hyper h = options[2];
    float step[TENSORS], step_out[TENSORS];
    uint64_t at = 0;
    struct version all = {{memory[0][PARAM], memory[0][FIRST], memory[0][SECOND]}, 4};
    fill(&all, grad_memory, MOST, false, 7);
    rounding = true;
    expect(&h, &all, grad_memory, MOST, false);
    for (int i = 0; i < TENSORS; i++) {
        uint64_t count = i == 5 ? 0 : i == 20 ? 70000 : 301 + 51 * (uint64_t)i, off = 4 * at;
        step[i] = 4;
        t[i] = (struct pms_optim_tensor){.param = memory[0][PARAM] + off,
                                         .param_out = memory[1][PARAM] + off,
                                         .grad = i % 7 == 3 ? NULL : grad_memory + off,
                                         .count = count,
                                         .step = &step[i],
                                         .step_out = &step_out[i]};
        for (int s = 0; s < 2; s++) {
            t[i].state[s] = (const float *)(const void *)(memory[0][FIRST + s] + off);
            t[i].state_out[s] = (float *)(void *)(memory[1][FIRST + s] + off);
        }
        at += count;
    }
    CHECK(at <= MOST);
    for (int set = PMS_OPTIM_PORTABLE; set <= PMS_OPTIM_AVX512; set++)
        for (h.stream = 0; h.stream < 2; h.stream++) {
            for (int a = 0; a < ARRAYS; a++)
                memset(memory[1][a], 0xa5, MOST * 4);
            pms_optim_limit(set);
            pms_optim_step(t, TENSORS, &h);
            for (uint64_t i = 0, from = 0; i < TENSORS; from += t[i++].count) {
                CHECK(step_out[i] == (t[i].grad ? 5 : 4));
                for (int a = 0; a < ARRAYS; a++) {
                    bool good = t[i].grad || memcmp(memory[0][a] + 4 * from,
                                                    memory[1][a] + 4 * from, 4 * t[i].count) == 0;
                    for (uint64_t k = from; t[i].grad && k < from + t[i].count; k++)
                        good &= close_enough(get(memory[1][a], k, false), expected[a][k],
                                             scale[a][k], false);
                    CHECK(good);
                }
            }
        }
    pms_optim_limit(PMS_OPTIM_AVX512);
}

/* A gradient that is no number makes its own elements no numbers, and no others. */
static void no_numbers(void)
{
    const uint64_t count = 300, bad[] = {0, 17, 130, 299};
    const float what[] = {NAN, INFINITY, -INFINITY, NAN};
    for (int bfloat16 = 0; bfloat16 < 2; bfloat16++)
        for (int set = PMS_OPTIM_PORTABLE; set <= PMS_OPTIM_AVX512; set++) {
            struct version old = {{memory[0][PARAM], memory[0][FIRST], memory[0][SECOND]}, 0};
            float step_out;
            struct pms_optim_hyper h = options[0];
            fill(&old, grad_memory, count, bfloat16, 3);
            for (int i = 0; i < 4; i++) {
                uint32_t bits;
                memcpy(&bits, &what[i], sizeof bits);
                uint16_t half = (uint16_t)(bits >> 16);
                memcpy(grad_memory + (bfloat16 ? 2 : 4) * bad[i],
                       bfloat16 ? (const void *)&half : (const void *)&bits, bfloat16 ? 2 : 4);
            }
            struct pms_optim_tensor t = {.param = memory[0][PARAM],
                                         .param_out = memory[1][PARAM],
                                         .grad = grad_memory,
                                         .count = count,
                                         .step = &old.step,
                                         .step_out = &step_out,
                                         .bfloat16 = bfloat16};
            for (int s = 0; s < 2; s++) {
                t.state[s] = (const float *)(const void *)memory[0][FIRST + s];
                t.state_out[s] = (float *)(void *)memory[1][FIRST + s];
            }
            pms_optim_limit(set);
            pms_optim_step(&t, 1, &h);
            for (uint64_t i = 0; i < count; i++) {
                bool hit = i == bad[0] || i == bad[1] || i == bad[2] || i == bad[3];
                CHECK(isnan(get(memory[1][PARAM], i, bfloat16)) == hit);
            }
        }
    pms_optim_limit(PMS_OPTIM_AVX512);
}

int main(void)
{
    for (int a = 0; a < ARRAYS; a++) {
        for (int i = 0; i < 2; i++)
            memory[i][a] = aligned_alloc(64, (MOST * 4 + 2 * GUARD + 63) / 64 * 64);
        from_portable[a] = malloc(MOST * 4);
    }
    grad_memory = aligned_alloc(64, (MOST * 4 + 2 * GUARD + 63) / 64 * 64);
    pms_parallel_start();
    TEST(within_one_ulp_of_torchs_arithmetic);
    TEST(near_exact_arithmetic);
    TEST(many_tensors);
    TEST(no_numbers);
    for (int a = 0; a < ARRAYS; a++) {
        free(memory[0][a]);
        free(memory[1][a]);
        free(from_portable[a]);
    }
    free(grad_memory);
    return test_summary();
}
