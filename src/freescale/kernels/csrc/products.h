/* Matrix products with torch's own BLAS: the same bits, without an operation of torch for each. And
   memory for matrices. */

#pragma once
#include <stdint.h>
#include <stddef.h>

/* Sizes have 64 bits; a BLAS with 32-bit sizes reads the lower half. */
typedef void (*Sgemm)(const char *, const char *, const int64_t *, const int64_t *,
                      const int64_t *, const float *, const float *, const int64_t *,
                      const float *, const int64_t *, const float *, float *, const int64_t *);
static Sgemm sgemm;

/* to [m, n] = a b + beta * to, with row-major a [m, k] and b [k, n]. turn_a, turn_b: the matrix is
   transposed in memory. To BLAS, which is column-major, all matrices are transposed. */
static void multiply(int64_t m, int64_t n, int64_t k, const float *a, int turn_a, const float *b,
                     int turn_b, float beta, float *to) {
    float one = 1.0f;
    sgemm(turn_b ? "T" : "N", turn_a ? "T" : "N", &n, &m, &k, &one, b, turn_b ? &k : &n, a,
          turn_a ? &m : &k, &beta, to, &n);
}

/* The next matrix in `room`; matrices are aligned to cache lines. */
static inline float *take(float **room, int64_t count) {
    float *taken = *room;
    *room += (count + 15) / 16 * 16;
    return taken;
}

/* Sets the function; returns whether its products are right. */
int32_t adopt_sgemm(Sgemm function) {
    float a[6] = {1, 2, 3, 4, 5, 6}, b[3] = {1, 10, 100}, to[2] = {7, 8};
    sgemm = function;
    multiply(2, 1, 3, a, 0, b, 0, 1.0f, to); /* [[1, 2, 3], [4, 5, 6]] b */
    int32_t right = to[0] == 328.0f && to[1] == 662.0f;
    multiply(2, 1, 3, a, 1, b, 1, 0.0f, to); /* [[1, 3, 5], [2, 4, 6]] b */
    return right && to[0] == 531.0f && to[1] == 642.0f;
}
