/* positions/reference.py */

#pragma once
#include "numbers.h"

/* out = (scale * x + position[place of each token]) * kept. Derives the keys of tokens from the keys
   of samples, if any, and from them kept [tokens, width], if it is not NULL. Candidates come right
   after the history. */
void add_positions(int64_t samples, int64_t width, int64_t stream, const int64_t *lengths,
                   const int64_t *candidates, const float *x, const float *position,
                   const int64_t *keys, float scale, int32_t threshold, float keep_scale,
                   float *out, int64_t *token_keys, int64_t *places, float *kept) {
    int64_t token = 0;
    for (int64_t s = 0; s < samples; s++) {
        int64_t history = lengths[s] - (candidates ? candidates[s] : 0);
        for (int64_t slot = 0; slot < lengths[s]; slot++, token++) {
            int64_t place = slot < history ? slot : history;
            const float *from = x + token * width, *row = position + place * width;
            float *to = out + token * width;
            for (int64_t i = 0; i < width; i++) to[i] = scale * from[i] + row[i];
            places[token] = place;
            if (keys) token_keys[token] = derive(keys[s], slot);
            if (!kept) continue;
            float *factors = kept + token * width;
            draw_kept(token_keys + token, stream, width, threshold, keep_scale, factors);
            for (int64_t i = 0; i < width; i++) to[i] *= factors[i];
        }
    }
}

/* into[places[t]] += grad[t] * kept[t], and the gradient of x. */
void differentiate_positions(int64_t tokens, int64_t width, const int64_t *places,
                             const float *kept, const float *grad, float scale, float *grad_x,
                             float *into) {
    for (int64_t t = 0; t < tokens; t++) {
        const float *g = grad + t * width;
        float *to = grad_x + t * width, *row = into + places[t] * width;
        for (int64_t i = 0; i < width; i++) {
            float passed = kept ? g[i] * kept[t * width + i] : g[i];
            row[i] += passed;
            to[i] = passed * scale;
        }
    }
}
