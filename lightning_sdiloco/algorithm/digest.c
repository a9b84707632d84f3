// The digest of float32 values on a CPU: what digest.py does with operations of torch, in one pass over the values.
//
// Compiled on the machine where it runs; see native.py. Everything is whole numbers modulo 2**64, in any order.

#include <stdint.h>

// Two forms in one library, of which the loader takes the one that suits the processor: so the library runs anywhere.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

// A position within so many words has few bits, and a product of it with a word is one instruction.
enum { STRETCH = 1 << 16 };

// total: the sum of all words, each times twice its position plus 1, where the first one is at position start.
FOR_EVERY_PROCESSOR
void digest_words(const int32_t *words, int64_t numel, int64_t start, uint64_t *total) {
    uint64_t sum = 0;
    for (int64_t first = 0; first < numel; first += STRETCH) {
        const int32_t *stretch = words + first;
        int32_t length = numel - first < STRETCH ? (int32_t)(numel - first) : STRETCH;
        uint64_t plain = 0, weighed = 0;
        for (int32_t i = 0; i < length; i++) {
            plain += (uint64_t)stretch[i];
            weighed += (uint64_t)((int64_t)stretch[i] * i);
        }
        sum += plain * (2 * (uint64_t)(start + first) + 1) + 2 * weighed;
    }
    *total = sum;
}
