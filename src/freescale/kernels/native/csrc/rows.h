/* reference/row_updates.py: rows of a table are read and written once. */

#pragma once
#include "numbers.h"

/* Rows [count] of weight and of both moments [any, width], by gradients [count, width]. `gain` and
   `gain_square`: 1 - the decay of the moments; `root`: of the second moment's bias correction;
   `rate`: the learning rate over the first one's. */
void adam_rows(int64_t count, int64_t width, const int64_t *rows, const float *gradients,
               float *weight, float *first, float *second, float gain, float decay_square,
               float gain_square, float root, float eps, float rate) {
    for (int64_t i = 0; i < count; i++) {
        const float *g = gradients + i * width;
        float *w = weight + rows[i] * width;
        float *m = first + rows[i] * width, *v = second + rows[i] * width;
#pragma omp simd
        for (int64_t c = 0; c < width; c++) {
            float mean = m[c] + gain * (g[c] - m[c]);
            float square = v[c] * decay_square + gain_square * g[c] * g[c];
            m[c] = mean, v[c] = square;
            w[c] -= rate * mean / (sqrtf(square) / root + eps);
        }
    }
}

/* Rows [count] of weight [any, width], by gradients [count, width]; total [any]: the running sum of
   a row's mean squared gradient. The order of the sum is the same for every row. */
void rowwise_adagrad_rows(int64_t count, int64_t width, const int64_t *rows,
                          const float *gradients, float *weight, float *total, float eps,
                          float rate) {
    for (int64_t i = 0; i < count; i++) {
        const float *g = gradients + i * width;
        float *w = weight + rows[i] * width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < width; c++) squares += g[c] * g[c];
        float sum = total[rows[i]] + squares / width;
        total[rows[i]] = sum;
        float scale = rate / (sqrtf(sum) + eps);
#pragma omp simd
        for (int64_t c = 0; c < width; c++) w[c] -= scale * g[c];
    }
}
