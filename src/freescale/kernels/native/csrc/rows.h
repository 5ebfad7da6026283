/* reference/row_updates.py: rows of a table are read and written once; and torch.optim.AdamW. */

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

/* torch.optim.AdamW of whole tensors of these sizes, rounded as torch does; `keep`: what weight decay
   leaves of a weight. Of each, its number of steps becomes `step`; returns 0, with nothing done,
   where one has not made all steps before. */
int32_t adam_tensors(int64_t count, const int64_t *sizes, const float *const *gradients,
                     float *const *weight, float *const *first, float *const *second,
                     float *const *steps, float step, float keep, float gain, float decay_square,
                     float gain_square, float root, float eps, float rate) {
    for (int64_t t = 0; t < count; t++)
        if (*steps[t] + 1 != step) return 0;
    for (int64_t t = 0; t < count; t++) {
        const float *g = gradients[t];
        float *w = weight[t], *m = first[t], *v = second[t];
        int64_t size = sizes[t];
        if (keep != 1.0f)
            for (int64_t i = 0; i < size; i++) w[i] *= keep;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) {
            float mean = fmaf(gain, g[i] - m[i], m[i]);
            float square = fmaf(gain_square * g[i], g[i], v[i] * decay_square);
            m[i] = mean, v[i] = square;
            w[i] -= rate * mean / (sqrtf(square) / root + eps);
        }
        *steps[t] = step;
    }
    return 1;
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
