/* Optimizer steps: from one version of parameters and state to the next, in place or into
 * another slot. Apart from the engine: nothing here knows a store. What is computed is what
 * torch's fused CPU kernels compute, operation by operation; moments are float32. */
#ifndef PMS_OPTIM_OPTIM_H
#define PMS_OPTIM_OPTIM_H

#include <stdint.h>

enum pms_optim_kind { PMS_OPTIM_ADAM = 1, PMS_OPTIM_ADAMW = 2, PMS_OPTIM_SGD = 3 };

/* one parameter. Each _out is its source, or memory that overlaps none of the sources. */
struct pms_optim_tensor {
    const void *param;
    void *param_out;
    /* of the parameter's dtype; NULL: the step leaves this parameter alone, and it is copied */
    const void *grad;
    /* Adam: exp_avg, exp_avg_sq. SGD: momentum_buffer. NULL: there is none */
    const float *state[2];
    float *state_out[2];
    const float *step; /* number of steps before this one */
    float *step_out;
    uint64_t count;   /* elements */
    int32_t bfloat16; /* dtype of parameter and gradient: bfloat16, else float32 */
    int32_t reserved;
};

struct pms_optim_hyper {
    double lr, beta1, beta2, eps, weight_decay, momentum, dampening;
    int32_t kind; /* enum pms_optim_kind */
    int32_t nesterov, maximize;
    /* store past the caches: for outputs much larger than these, which are not read soon */
    int32_t stream;
};

/* One step of every tensor, by all cores. REQUIRES: arrays as long as they say; 64-byte aligned
 * outputs for streaming (others are stored plainly). Outputs are complete in every core's view
 * on return; to be made durable by whoever owns them. */
void pms_optim_step(const struct pms_optim_tensor *tensor, uint64_t count,
                    const struct pms_optim_hyper *hyper);

/* For tests: the widest instruction set that steps use from now on, where the processor has it.
 * All give the same bits. */
enum pms_optim_set { PMS_OPTIM_PORTABLE, PMS_OPTIM_AVX2, PMS_OPTIM_AVX512 };
void pms_optim_limit(int set);

#endif
