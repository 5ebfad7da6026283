/* Functions of numbers, written for compilers to vectorise the loops around them. Loops use
   simdlen(16), the widest vector of any processor, if no sum depends on the vector length. */

#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float exponential(float x) {
    float low = x < -87.3f ? -87.3f : x, y = low > 88.0f ? 88.0f : low;
    float n = rintf(y * 1.44269504f);
    float r = fmaf(n, 2.12194440e-4f, fmaf(n, -0.693359375f, y)); /* ln 2 in two parts */
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p * r, r, r) + 1.0f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return p * power.value;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* The derivative of x * sigmoid(x), from both. */
static inline float silu_slope(float x, float s) { return s * (1.0f + x * (1.0f - s)); }

static inline float dot(const float *a, const float *b, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static inline void add_scaled(float *into, const float *from, float factor, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) into[i] += factor * from[i];
}

/* `random.derive`: the key derived from a key and a counter. */
static inline int64_t derive(int64_t key, int64_t counter) {
    uint64_t x = (uint64_t)key * 0x9E3779B97F4A7C15u + (uint64_t)counter + 1;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (int64_t)(x ^ (x >> 31));
}

/* `random.draw_keep_mask`, with four draws of 16 bits from each hash: factors [n] of a token's
   values, 0 for dropped ones. Without a key nothing is dropped. */
static inline void draw_kept(const int64_t *token_key, int64_t stream, int64_t n, int32_t threshold,
                             float keep_scale, float *kept) {
    if (!token_key) {
        for (int64_t i = 0; i < n; i++) kept[i] = 1.0f;
        return;
    }
    int64_t key = derive(*token_key, stream);
    for (int64_t i = 0; i < n; i += 4) {
        uint64_t draws = (uint64_t)derive(key, i / 4);
        for (int64_t j = 0; j < 4 && i + j < n; j++)
            kept[i + j] = (int16_t)(draws >> (16 * j)) < threshold ? keep_scale : 0.0f;
    }
}
