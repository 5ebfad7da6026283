/* reference/positions.py */

#pragma once
#include "numbers.h"

/* out = x + position[place of each token]; keys of the tokens from those of the samples, if any.
   Candidates stand right after the history. */
void add_positions(int64_t samples, int64_t width, const int64_t *lengths, const int64_t *candidates,
                   const float *x, const float *position, const int64_t *keys, float *out,
                   int64_t *token_keys, int64_t *places) {
    int64_t token = 0;
    for (int64_t s = 0; s < samples; s++) {
        int64_t history = lengths[s] - (candidates ? candidates[s] : 0);
        for (int64_t slot = 0; slot < lengths[s]; slot++, token++) {
            int64_t place = slot < history ? slot : candidates ? history : slot;
            const float *from = x + token * width, *row = position + place * width;
            float *to = out + token * width;
            for (int64_t i = 0; i < width; i++) to[i] = from[i] + row[i];
            places[token] = place;
            if (keys) token_keys[token] = derive(keys[s], slot);
        }
    }
}

/* into[places[t]] += grad[t]. */
void sum_positions(int64_t tokens, int64_t width, const int64_t *places, const float *grad,
                   float *into) {
    for (int64_t t = 0; t < tokens; t++)
        add_scaled(into + places[t] * width, grad + t * width, 1.0f, width);
}
