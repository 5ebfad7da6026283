/* softmax/reference.py with negatives for each token. Rows occur many times: they are normalised
   once, and read in place instead of gathered. */

#pragma once
#include "softmax.h"

/* x [tokens, width] and units [rows, width] of unit length, or as they are; index [tokens, negatives]
   and targets into the rows -> loss of each token. `products`: room for a list. With grad_x, writes
   the gradient of what x was made of, and adds to that of the units. */
void compare_at_positions(int64_t tokens, int64_t negatives, int64_t width, const float *x,
                          const float *x_inverse, const float *units, const int64_t *targets,
                          const int64_t *index, const float *weights, const float *targets_log_q,
                          const float *log_q, float temperature, int32_t normalize, float *products,
                          float *loss, float *grad_x, float *grad_units) {
    for (int64_t t = 0; t < tokens; t++) {
        const float *own = x + t * width, *target = units + targets[t] * width;
        const int64_t *list = index + t * negatives;
        float slope;
        for (int64_t k = 0; k < negatives; k++)
            products[k] = dot(own, units + list[k] * width, width);
        compare_with_negatives(1, negatives, width, products, own, target, targets + t, list,
                               weights ? weights + t : NULL,
                               targets_log_q ? targets_log_q + t : NULL,
                               log_q ? log_q + t * negatives : NULL, temperature, loss + t, &slope);
        if (!grad_x) continue;
        float *into = grad_x + t * width;
        memset(into, 0, width * sizeof(float));
        for (int64_t k = 0; k < negatives; k++) {
            add_scaled(into, units + list[k] * width, products[k], width);
            add_scaled(grad_units + list[k] * width, own, products[k], width);
        }
        add_scaled(into, target, slope, width);
        add_scaled(grad_units + targets[t] * width, own, slope, width);
        pass_norm(into, own, x_inverse[t], normalize, width);
    }
}

/* Turns the gradients of units [rows, width] into those of the rows. */
void pass_norms(int64_t rows, int64_t width, const float *units, const float *inverse,
                int32_t normalize, float *grads) {
    for (int64_t i = 0; i < rows; i++)
        pass_norm(grads + i * width, units + i * width, inverse[i], normalize, width);
}
