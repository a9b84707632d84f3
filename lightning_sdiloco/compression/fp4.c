// FP4 for a CPU, in one pass over the values, bit-identical to the torch operations of fp4.py.
//
// Compiled by hatch_build.py when the package is built. Products are rounded separately (-ffp-contract=off).

#include <stdint.h>
#include <string.h>

// Two versions in one library: the loader takes the one that suits the processor, so the library runs anywhere.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EVERY_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EVERY_PROCESSOR
#endif

enum { BLOCK = 128, PAIRS = BLOCK / 2, LEAST_TOP = 0x0400, GREATEST_TOP = 0x7F7F };

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t to_bits(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint16_t encode_block(const uint32_t *restrict bits, uint8_t *restrict packed) {
    int32_t largest = 0;
    for (int i = 0; i < BLOCK; i++) {
        int32_t magnitude = (int32_t)(bits[i] & 0x7FFFFFFF);
        largest = magnitude > largest ? magnitude : largest;
    }
    int32_t top = largest >> 16;
    top = top < LEAST_TOP ? LEAST_TOP : top > GREATEST_TOP ? GREATEST_TOP : top;
    // One subtraction compares with all seven thresholds, which share a mantissa.
    int32_t threshold = to_bits(from_bits((uint32_t)top << 16) * 0.75f) - (7 << 23);
    uint8_t codes[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        int32_t passed = ((int32_t)(bits[i] & 0x7FFFFFFF) - threshold) >> 23;
        codes[i] = (uint8_t)((passed > 0 ? passed : 0) | (int32_t)(bits[i] >> 31 << 3));
    }
    uint16_t pairs[PAIRS];
    memcpy(pairs, codes, sizeof pairs);
    for (int i = 0; i < PAIRS; i++) packed[i] = (uint8_t)(pairs[i] | pairs[i] >> 4);
    return (uint16_t)top;
}

static inline void decode_block(const uint64_t *restrict levels, const uint8_t *restrict packed, uint16_t top,
                                float *restrict out) {
    uint64_t pairs[PAIRS];
    for (int i = 0; i < PAIRS; i++) pairs[i] = levels[packed[i]];
    float found[BLOCK];
    memcpy(found, pairs, sizeof found);
    float scale = from_bits((uint32_t)top << 16);
    for (int i = 0; i < BLOCK; i++) out[i] = found[i] * scale;
}

// values: the bits of float32 values. The payload: a top for each block, then two codes per byte. It may start at any address.
FOR_EVERY_PROCESSOR
void fp4_encode(const uint32_t *values, int64_t numel, uint8_t *payload) {
    int64_t blocks = (numel + BLOCK - 1) / BLOCK;
    uint8_t *packed = payload + 2 * blocks;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t left = numel - block * BLOCK;
        uint16_t top;
        if (left >= BLOCK) {
            top = encode_block(values + block * BLOCK, packed + block * PAIRS);
        } else {
            uint32_t padded[BLOCK] = {0};
            uint8_t whole[PAIRS];
            memcpy(padded, values + block * BLOCK, left * sizeof *values);
            top = encode_block(padded, whole);
            memcpy(packed + block * PAIRS, whole, (left + 1) / 2);
        }
        memcpy(payload + 2 * block, &top, sizeof top);
    }
}

// levels: for each byte, the two float32 values that it represents with a top of 1.
FOR_EVERY_PROCESSOR
void fp4_decode(const uint8_t *payload, int64_t numel, const uint64_t *levels, float *out) {
    int64_t blocks = (numel + BLOCK - 1) / BLOCK;
    const uint8_t *packed = payload + 2 * blocks;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t left = numel - block * BLOCK;
        uint16_t top;
        memcpy(&top, payload + 2 * block, sizeof top);
        if (left >= BLOCK) {
            decode_block(levels, packed + block * PAIRS, top, out + block * BLOCK);
        } else {
            uint8_t padded[PAIRS] = {0};
            float whole[BLOCK];
            memcpy(padded, packed + block * PAIRS, (left + 1) / 2);
            decode_block(levels, padded, top, whole);
            memcpy(out + block * BLOCK, whole, left * sizeof *out);
        }
    }
}

// The mean of the groups' decoded payloads, each multiplied by its factor, summed in order.
FOR_EVERY_PROCESSOR
void fp4_mean(const uint8_t *const *payloads, const float *factors, int64_t groups, int64_t numel,
              const uint64_t *levels, float *out) {
    int64_t blocks = (numel + BLOCK - 1) / BLOCK;
    float count = (float)groups;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t left = numel - block * BLOCK;
        int64_t length = left < BLOCK ? left : BLOCK;
        float total[BLOCK] = {0};
        for (int64_t group = 0; group < groups; group++) {
            const uint8_t *payload = payloads[group];
            uint8_t padded[PAIRS] = {0};
            const uint8_t *packed = payload + 2 * blocks + block * PAIRS;
            if (length < BLOCK) packed = memcpy(padded, packed, (length + 1) / 2);
            uint16_t top;
            memcpy(&top, payload + 2 * block, sizeof top);
            float values[BLOCK], factor = factors[group];
            decode_block(levels, packed, top, values);
            for (int i = 0; i < BLOCK; i++) total[i] += values[i] * factor;
        }
        for (int i = 0; i < BLOCK; i++) total[i] /= count;
        memcpy(out + block * BLOCK, total, length * sizeof *out);
    }
}
