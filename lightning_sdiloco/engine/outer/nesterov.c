// An outer step of SGD with Nesterov momentum on a CPU: what torch.optim.SGD does, bit for bit, in one pass.
//
// Compiled on the machine where it runs; see native.py. torch adds a multiple of a vector with one rounding where the
// processor has an instruction for that, and so does this, where it is written: products and sums elsewhere round one
// after the other (-ffp-contract=off).

#include <math.h>
#include <stdint.h>

// Two forms in one library, of which the loader takes the one that suits the processor: so the library runs anywhere.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("fma", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

// before: the momentum before the step, which becomes after. gradient: it becomes the new values.
FOR_EVERY_PROCESSOR
void nesterov_step(const float *restrict values, const float *restrict before, float *restrict gradient,
                   float *restrict after, int64_t numel, float momentum, float negative_lr) {
    for (int64_t i = 0; i < numel; i++) {
        float kept = before[i] * momentum + gradient[i];
        after[i] = kept;
        gradient[i] = fmaf(fmaf(kept, momentum, gradient[i]), negative_lr, values[i]);
    }
}
