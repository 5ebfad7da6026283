/* row_updates/reference.py: each row of a table is read and written once; and torch.optim.AdamW.
   Each element is computed on its own: the bits do not depend on the number of threads. */

#pragma once
#include "numbers.h"
#include "work_pool.h"

#define UPDATE_PIECE (1 << 15) /* elements of a piece: worth a thread */

typedef struct {
    int64_t count, width;
    const int64_t *rows; /* NULL: 0, 1, ... */
    const float *gradients;
    float *weight, *first, *second;
    float gain, decay_square, gain_square, root, eps, rate, keep;
    int64_t piece; /* rows */
} Update;

/* The range of rows of a piece. */
static inline int64_t begin_of(const Update *update, int64_t piece) { return piece * update->piece; }
static inline int64_t end_of(const Update *update, int64_t piece) {
    int64_t end = (piece + 1) * update->piece;
    return end < update->count ? end : update->count;
}

static void share_update(void (*work)(void *, int64_t), Update *update, int64_t threads) {
    update->piece = UPDATE_PIECE / (update->width ? update->width : 1) + 1;
    share_work(work, update, (update->count + update->piece - 1) / update->piece, threads);
}

static void adam_piece(void *about, int64_t piece) {
    const Update u = *(const Update *)about;
    for (int64_t i = begin_of(&u, piece), end = end_of(&u, piece); i < end; i++) {
        const float *g = u.gradients + i * u.width;
        float *w = u.weight + u.rows[i] * u.width;
        float *m = u.first + u.rows[i] * u.width, *v = u.second + u.rows[i] * u.width;
#pragma omp simd
        for (int64_t c = 0; c < u.width; c++) {
            float mean = m[c] + u.gain * (g[c] - m[c]);
            float square = v[c] * u.decay_square + u.gain_square * g[c] * g[c];
            m[c] = mean, v[c] = square;
            w[c] -= u.rate * mean / (sqrtf(square) / u.root + u.eps);
        }
    }
}

/* Updates rows [count] of weight and both moments [any, width] with gradients [count, width].
   `gain`, `gain_square`: 1 - the decay of each moment; `root`: the square root of the second moment's
   bias correction; `rate`: the learning rate over the first moment's bias correction. */
void adam_rows(int64_t count, int64_t width, const int64_t *rows, const float *gradients,
               float *weight, float *first, float *second, float gain, float decay_square,
               float gain_square, float root, float eps, float rate, int64_t threads) {
    Update update = {count, width, rows, gradients, weight, first, second, gain, decay_square,
                     gain_square, root, eps, rate, 1.0f, 0};
    share_update(adam_piece, &update, threads);
}

static void adam_tensor_piece(void *about, int64_t piece) {
    const Update u = *(const Update *)about;
    int64_t begin = begin_of(&u, piece), end = end_of(&u, piece);
    const float *g = u.gradients;
    float *w = u.weight, *m = u.first, *v = u.second;
    if (u.keep != 1.0f)
        for (int64_t i = begin; i < end; i++) w[i] *= u.keep;
#pragma omp simd
    for (int64_t i = begin; i < end; i++) {
        float mean = fmaf(u.gain, g[i] - m[i], m[i]);
        float square = fmaf(u.gain_square * g[i], g[i], v[i] * u.decay_square);
        m[i] = mean, v[i] = square;
        w[i] -= u.rate * mean / (sqrtf(square) / u.root + u.eps);
    }
}

/* torch.optim.AdamW of whole tensors of these sizes, with torch's rounding; `keep`: the factor of
   weight decay. Sets the step count of each tensor to `step`. Returns 0, and does nothing, if a
   tensor has not made all previous steps. */
int32_t adam_tensors(int64_t count, const int64_t *sizes, const float *const *gradients,
                     float *const *weight, float *const *first, float *const *second,
                     float *const *steps, float step, float keep, float gain, float decay_square,
                     float gain_square, float root, float eps, float rate, int64_t threads) {
    for (int64_t t = 0; t < count; t++)
        if (*steps[t] + 1 != step) return 0;
    for (int64_t t = 0; t < count; t++) {
        Update update = {sizes[t], 1, 0, gradients[t], weight[t], first[t], second[t], gain,
                         decay_square, gain_square, root, eps, rate, keep, 0};
        share_update(adam_tensor_piece, &update, threads);
        *steps[t] = step;
    }
    return 1;
}

static void adagrad_piece(void *about, int64_t piece) {
    const Update u = *(const Update *)about;
    for (int64_t i = begin_of(&u, piece), end = end_of(&u, piece); i < end; i++) {
        const float *g = u.gradients + i * u.width;
        float *w = u.weight + u.rows[i] * u.width;
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t c = 0; c < u.width; c++) squares += g[c] * g[c];
        float sum = u.first[u.rows[i]] + squares / u.width;
        u.first[u.rows[i]] = sum;
        float scale = u.rate / (sqrtf(sum) + u.eps);
#pragma omp simd
        for (int64_t c = 0; c < u.width; c++) w[c] -= scale * g[c];
    }
}

/* Updates rows [count] of weight [any, width] with gradients [count, width]; total [any]: the running
   sum of each row's mean squared gradient. The order of summation is the same for every row. */
void rowwise_adagrad_rows(int64_t count, int64_t width, const int64_t *rows,
                          const float *gradients, float *weight, float *total, float eps,
                          float rate, int64_t threads) {
    Update update = {.count = count, .width = width, .rows = rows, .gradients = gradients,
                     .weight = weight, .first = total, .eps = eps, .rate = rate};
    share_update(adagrad_piece, &update, threads);
}
