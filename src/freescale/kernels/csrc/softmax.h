/* softmax/reference.py: products with BLAS for one list of negatives. For a list of each sample the
   products are too small for a library: loops. */

#pragma once
#include "numbers.h"
#include "products.h"

/* units = rows[index] / their norms, inverse [count] = 1 / norm; without `normalize`, the rows
   themselves and 1. Without an index, all rows in order. */
void gather_units(int64_t count, int64_t width, const float *rows, const int64_t *index,
                  int32_t normalize, float *units, float *inverse) {
    for (int64_t i = 0; i < count; i++) {
        const float *from = rows + (index ? index[i] : i) * width;
        float norm = normalize ? sqrtf(dot(from, from, width)) : 1.0f;
        float factor = 1.0f / (norm > 1e-12f ? norm : norm == norm ? 1e-12f : norm);
        inverse[i] = factor;
        for (int64_t c = 0; c < width; c++) units[i * width + c] = from[c] * factor;
    }
}

/* products [tokens, negatives] of x and the negatives, y: the units of the targets -> loss of each
   token, and its slopes by the products (in place) and by x.y [tokens]. */
static void compare_with_negatives(int64_t tokens, int64_t negatives, int64_t width,
                                   float *products, const float *x, const float *y,
                                   const int64_t *targets, const int64_t *index,
                                   const float *weights, const float *targets_log_q,
                                   const float *log_q, float temperature, float *loss,
                                   float *slope) {
    for (int64_t t = 0; t < tokens; t++) {
        float *row = products + t * negatives, top = -INFINITY, rest = 0, scale = 1 / temperature;
        float own = dot(x + t * width, y + t * width, width) * scale;
        if (targets_log_q) own -= targets_log_q[t];
        int64_t target = targets[t];
#pragma omp simd reduction(max : top)
        for (int64_t k = 0; k < negatives; k++) {
            float score = row[k] * scale - (log_q ? log_q[k] : 0.0f);
            row[k] = index[k] == target ? -INFINITY : score;
            top = row[k] > top ? row[k] : top;
        }
        top = own > top ? own : top;
#pragma omp simd simdlen(16)
        for (int64_t k = 0; k < negatives; k++)
            row[k] = row[k] == -INFINITY ? 0.0f : exponential(row[k] - top);
#pragma omp simd reduction(+ : rest)
        for (int64_t k = 0; k < negatives; k++) rest += row[k];
        float total = exponential(own - top) + rest, weight = weights ? weights[t] : 1.0f;
        float factor = weight * scale / total;
        loss[t] = weight * (logf(total) + top - own);
        slope[t] = -rest * factor;
#pragma omp simd simdlen(16)
        for (int64_t k = 0; k < negatives; k++) row[k] *= factor;
    }
}

/* The same with a list of negatives for each sample: others and index are [samples, negatives], and
   tokens are in order of samples. `products`: room for the longest sample. With grad_x, writes the
   products' part of the gradients of x [tokens, width] and of the negatives. */
static void compare_in_samples(int64_t samples, int64_t negatives, int64_t width,
                               const int64_t *lengths, const float *x, const float *y,
                               const float *others, const int64_t *targets, const int64_t *index,
                               const float *weights, const float *targets_log_q, const float *log_q,
                               float temperature, float *products, float *loss, float *slope,
                               float *grad_x, float *grad_others) {
    for (int64_t s = 0, first = 0; s < samples; first += lengths[s], s++) {
        const float *own = x + first * width, *list = others + s * negatives * width;
        for (int64_t t = 0; t < lengths[s]; t++)
            for (int64_t k = 0; k < negatives; k++)
                products[t * negatives + k] = dot(own + t * width, list + k * width, width);
        compare_with_negatives(lengths[s], negatives, width, products, own, y + first * width,
                               targets + first, index + s * negatives,
                               weights ? weights + first : NULL,
                               targets_log_q ? targets_log_q + first : NULL,
                               log_q ? log_q + s * negatives : NULL, temperature, loss + first,
                               slope + first);
        if (!grad_x) continue;
        float *into = grad_x + first * width, *grads = grad_others + s * negatives * width;
        memset(into, 0, lengths[s] * width * sizeof(float));
        memset(grads, 0, negatives * width * sizeof(float));
        for (int64_t k = 0; k < negatives; k++)
            for (int64_t t = 0; t < lengths[s]; t++) {
                float share = products[t * negatives + k];
                add_scaled(into + t * width, list + k * width, share, width);
                add_scaled(grads + k * width, own + t * width, share, width);
            }
    }
}

/* Backward through the norm: removes the part of the gradient along the row. */
static inline void pass_norm(float *grad, const float *unit, float inverse, int32_t normalize,
                             int64_t width) {
    if (!normalize) return;
    float along = dot(grad, unit, width);
    for (int64_t c = 0; c < width; c++) grad[c] = (grad[c] - along * unit[c]) * inverse;
}

/* Completes grad_x [tokens, width], which holds the products' part, in place. Adds the gradients of
   targets and negatives (grad_others [negatives, width], overwritten) to those of the rows. `room`:
   a row. */
static void spread_slopes(int64_t tokens, int64_t negatives, int64_t width, const int64_t *targets,
                          const int64_t *index, const float *slope, const float *x,
                          const float *x_inverse, const float *y, const float *y_inverse,
                          const float *others, const float *others_inverse, int32_t normalize,
                          float *room, float *grad_x, float *grad_others, float *grad_rows) {
    for (int64_t t = 0; t < tokens; t++) {
        const float *own = x + t * width;
        add_scaled(grad_x + t * width, y + t * width, slope[t], width);
        pass_norm(grad_x + t * width, own, x_inverse[t], normalize, width);
        for (int64_t c = 0; c < width; c++) room[c] = own[c] * slope[t];
        pass_norm(room, y + t * width, y_inverse[t], normalize, width);
        add_scaled(grad_rows + targets[t] * width, room, 1.0f, width);
    }
    for (int64_t k = 0; k < negatives; k++) {
        float *grad = grad_others + k * width;
        pass_norm(grad, others + k * width, others_inverse[k], normalize, width);
        add_scaled(grad_rows + index[k] * width, grad, 1.0f, width);
    }
}

/* Intermediate results. */
typedef struct {
    float *x, *y, *others;                            /* units of the tokens, targets, negatives */
    float *x_inverse, *y_inverse, *others_inverse;    /* 1 / norm */
    float *products, *slope, *grad_others, *row;
} Between;

/* `longest`: tokens compared at a time; `count`: all negatives. */
static Between take_between(int64_t tokens, int64_t longest, int64_t count, int64_t negatives,
                            int64_t width, float **room) {
    Between own;
    own.x = take(room, tokens * width), own.y = take(room, tokens * width);
    own.others = take(room, count * width);
    own.x_inverse = take(room, tokens), own.y_inverse = take(room, tokens);
    own.others_inverse = take(room, count);
    own.products = take(room, longest * negatives);
    own.slope = take(room, tokens);
    own.grad_others = take(room, count * width);
    own.row = take(room, width);
    return own;
}

static int64_t find_longest(int64_t tokens, int64_t samples, const int64_t *lengths) {
    int64_t longest = lengths ? 0 : tokens;
    for (int64_t s = 0; lengths && s < samples; s++)
        longest = lengths[s] > longest ? lengths[s] : longest;
    return longest;
}

/* The size of the room for sampled_softmax, in floats. */
int64_t count_softmax_room(int64_t tokens, int64_t samples, int64_t negatives, int64_t width,
                           const int64_t *lengths) {
    float *end = NULL;
    int64_t longest = find_longest(tokens, samples, lengths);
    take_between(tokens, longest, samples * negatives, negatives, width, &end);
    return (uintptr_t)end / sizeof(float);
}

/* outputs [tokens, width], rows [size, width], targets [tokens] and index [samples, negatives] into
   rows -> the loss of each token; with grad_x, the gradients of outputs and rows. Without lengths
   [samples] all tokens share one list of negatives. */
void sampled_softmax(int64_t tokens, int64_t samples, int64_t negatives, int64_t width,
                     int64_t size, const int64_t *lengths, const float *outputs, const float *rows,
                     const int64_t *targets, const int64_t *index, const float *weights,
                     const float *targets_log_q, const float *log_q, float temperature,
                     int32_t normalize, float *room, float *loss, float *grad_x,
                     float *grad_rows) {
    int64_t count = samples * negatives, longest = find_longest(tokens, samples, lengths);
    Between own = take_between(tokens, longest, count, negatives, width, &room);
    gather_units(tokens, width, outputs, NULL, normalize, own.x, own.x_inverse);
    gather_units(tokens, width, rows, targets, normalize, own.y, own.y_inverse);
    gather_units(count, width, rows, index, normalize, own.others, own.others_inverse);
    if (lengths) {
        compare_in_samples(samples, negatives, width, lengths, own.x, own.y, own.others, targets,
                           index, weights, targets_log_q, log_q, temperature, own.products, loss,
                           own.slope, grad_x, own.grad_others);
    } else {
        multiply(tokens, negatives, width, own.x, 0, own.others, 1, 0.0f, own.products);
        compare_with_negatives(tokens, negatives, width, own.products, own.x, own.y, targets,
                               index, weights, targets_log_q, log_q, temperature, loss, own.slope);
    }
    if (!grad_x) return;
    if (!lengths) {
        multiply(tokens, width, negatives, own.products, 0, own.others, 0, 0.0f, grad_x);
        multiply(negatives, width, tokens, own.products, 1, own.x, 0, 0.0f, own.grad_others);
    }
    memset(grad_rows, 0, size * width * sizeof(float));
    spread_slopes(tokens, count, width, targets, index, own.slope, own.x, own.x_inverse, own.y,
                  own.y_inverse, own.others, own.others_inverse, normalize, own.row, grad_x,
                  own.grad_others, grad_rows);
}
