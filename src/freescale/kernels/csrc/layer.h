/* An HSTU layer without its matrix products: the norm before the projection, and everything between
   the two projections (SiLU, attention over listed pairs, gated norm, dropout). */

#pragma once
#include "numbers.h"

/* The common values of the layers of a step; pairs [pairs] are sorted by query. */
typedef struct {
    int64_t tokens, width, heads, d_qk, d_v, pairs;
    int64_t distances, buckets; /* entries of the biases */
    const int64_t *query, *key, *distance;
    const int32_t *bucket;
    const int64_t *token_keys; /* NULL: nothing is dropped */
    int32_t threshold;         /* 16-bit draws below it are kept */
    float keep_scale;          /* the factor of kept values */
    float alpha, scale, eps;   /* scale: 1 / the length that divides attention */
} Shape;

static inline void measure_row(const float *x, int64_t n, float eps, float *mean, float *rstd) {
    float sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += x[i];
    float middle = sum / (float)n;
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < n; i++) square += (x[i] - middle) * (x[i] - middle);
    *mean = middle;
    *rstd = 1.0f / sqrtf(square / (float)n + eps);
}

/* The dropout factors [n] of a token's gate. */
static inline void draw_gate(const Shape *s, int64_t token, int64_t stream, int64_t n,
                             float *kept) {
    const int64_t *key = s->token_keys ? s->token_keys + token : NULL;
    draw_kept(key, stream, n, s->threshold, s->keep_scale, kept);
}

/* y = norm(x) * weight + bias; stats [tokens, 2]. */
static void norm_rows(const Shape *s, const float *x, const float *weight, const float *bias,
                      float *y, float *stats) {
    int64_t n = s->width;
    for (int64_t t = 0; t < s->tokens; t++) {
        const float *from = x + t * n;
        float *to = y + t * n, mean, rstd;
        measure_row(from, n, s->eps, &mean, &rstd);
        for (int64_t i = 0; i < n; i++) to[i] = (from[i] - mean) * rstd * weight[i] + bias[i];
        stats[2 * t] = mean, stats[2 * t + 1] = rstd;
    }
}

/* Backward of norm_rows: adds to grad_x, writes the gradients of weight and bias. */
static void differentiate_norm(const Shape *s, const float *grad, const float *x,
                               const float *stats, const float *weight, float *grad_x,
                               float *grad_weight, float *grad_bias) {
    int64_t n = s->width;
    memset(grad_weight, 0, n * sizeof(float));
    memset(grad_bias, 0, n * sizeof(float));
    for (int64_t t = 0; t < s->tokens; t++) {
        const float *g = grad + t * n, *from = x + t * n;
        float *to = grad_x + t * n, mean = stats[2 * t], rstd = stats[2 * t + 1], a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
        for (int64_t i = 0; i < n; i++) {
            float unit = (from[i] - mean) * rstd, slope = g[i] * weight[i];
            a += slope;
            b += slope * unit;
            grad_weight[i] += g[i] * unit;
            grad_bias[i] += g[i];
        }
        a /= (float)n, b /= (float)n;
        for (int64_t i = 0; i < n; i++)
            to[i] += rstd * (g[i] * weight[i] - a - (from[i] - mean) * rstd * b);
    }
}

/* projected [tokens, 2 heads (d_v + d_qk)] -> out [tokens, heads d_v]. Keeps sigmoid(projected) in
   `shares`, activated, which is SiLU(projected), scores [pairs, heads] and their sigmoid in
   score_shares, attended [tokens, heads d_v], stats [tokens, 2] and the factors of dropout [tokens,
   heads d_v]. Columns of a row: gate, v, q, k. */
static void attend_and_gate(const Shape *s, int64_t stream, const float *projected,
                            const float *position_bias, const float *time_bias, const float *weight,
                            const float *bias, float *shares, float *activated, float *scores,
                            float *score_shares, float *attended, float *stats, float *factors,
                            float *out) {
    int64_t wide = s->heads * s->d_v, qk = s->heads * s->d_qk, columns = 2 * (wide + qk);
#pragma omp simd simdlen(16)
    for (int64_t i = 0; i < s->tokens * columns; i++) {
        shares[i] = sigmoid(projected[i]);
        activated[i] = projected[i] * shares[i];
    }
    for (int64_t p = 0; p < s->pairs; p++) {
        const float *q = activated + s->query[p] * columns + 2 * wide;
        const float *k = activated + s->key[p] * columns + 2 * wide + qk;
        float extra = (position_bias ? position_bias[s->distance[p]] : 0.0f) +
                      (time_bias ? time_bias[s->bucket[p]] : 0.0f);
        for (int64_t h = 0; h < s->heads; h++)
            scores[p * s->heads + h] =
                s->alpha * dot(q + h * s->d_qk, k + h * s->d_qk, s->d_qk) + extra;
    }
#pragma omp simd simdlen(16)
    for (int64_t i = 0; i < s->pairs * s->heads; i++) score_shares[i] = sigmoid(scores[i]);
    memset(attended, 0, s->tokens * wide * sizeof(float));
    for (int64_t p = 0; p < s->pairs; p++) {
        const float *v = activated + s->key[p] * columns + wide;
        float *to = attended + s->query[p] * wide;
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t at = p * s->heads + h;
            add_scaled(to + h * s->d_v, v + h * s->d_v, scores[at] * score_shares[at] * s->scale,
                       s->d_v);
        }
    }
    for (int64_t t = 0; t < s->tokens; t++) {
        const float *from = attended + t * wide, *gate = activated + t * columns;
        float *to = out + t * wide, *kept = factors + t * wide, mean, rstd;
        measure_row(from, wide, s->eps, &mean, &rstd);
        draw_gate(s, t, stream, wide, kept);
        for (int64_t i = 0; i < wide; i++)
            to[i] = ((from[i] - mean) * rstd * weight[i] + bias[i]) * gate[i] * kept[i];
        stats[2 * t] = mean, stats[2 * t + 1] = rstd;
    }
}

/* Backward of attend_and_gate, from grad [tokens, heads d_v]. `slope`: room for a row of heads d_v.
   Writes grad_projected, its sum over the tokens, and the gradients of weight and bias; adds to the
   gradients of the attention biases. */
static void differentiate_attention(const Shape *s, const float *grad, const float *projected,
                                    const float *shares, const float *activated,
                                    const float *scores, const float *score_shares,
                                    const float *attended, const float *stats,
                                    const float *factors, const float *weight, const float *bias,
                                    float *slope, float *grad_attended, float *grad_projected,
                                    float *grad_sum, float *grad_weight, float *grad_bias,
                                    float *grad_position, float *grad_time) {
    int64_t wide = s->heads * s->d_v, qk = s->heads * s->d_qk, columns = 2 * (wide + qk);
    memset(grad_weight, 0, wide * sizeof(float));
    memset(grad_bias, 0, wide * sizeof(float));
    memset(grad_projected, 0, s->tokens * columns * sizeof(float));
    for (int64_t t = 0; t < s->tokens; t++) {
        const float *g = grad + t * wide, *gate = activated + t * columns;
        const float *from = attended + t * wide, *kept = factors + t * wide;
        float *to = grad_attended + t * wide, *of_gate = grad_projected + t * columns;
        float mean = stats[2 * t], rstd = stats[2 * t + 1], a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
        for (int64_t i = 0; i < wide; i++) {
            float unit = (from[i] - mean) * rstd, passed = g[i] * kept[i];
            float of_norm = passed * gate[i];
            of_gate[i] = passed * (unit * weight[i] + bias[i]);
            grad_weight[i] += of_norm * unit;
            grad_bias[i] += of_norm;
            slope[i] = of_norm * weight[i];
            a += slope[i];
            b += slope[i] * unit;
        }
        a /= (float)wide, b /= (float)wide;
        for (int64_t i = 0; i < wide; i++)
            to[i] = rstd * (slope[i] - a - (from[i] - mean) * rstd * b);
    }
    for (int64_t p = 0; p < s->pairs; p++) {
        int64_t query = s->query[p] * columns, key = s->key[p] * columns;
        const float *out = grad_attended + s->query[p] * wide;
        float change = 0;
        for (int64_t h = 0; h < s->heads; h++) {
            int64_t v = key + wide + h * s->d_v;
            int64_t q = query + 2 * wide + h * s->d_qk, k = key + 2 * wide + qk + h * s->d_qk;
            float score = scores[p * s->heads + h], share = score_shares[p * s->heads + h];
            float one = dot(out + h * s->d_v, activated + v, s->d_v) * s->scale;
            one *= silu_slope(score, share);
            change += one;
            add_scaled(grad_projected + v, out + h * s->d_v, score * share * s->scale, s->d_v);
            add_scaled(grad_projected + q, activated + k, one * s->alpha, s->d_qk);
            add_scaled(grad_projected + k, activated + q, one * s->alpha, s->d_qk);
        }
        if (grad_position) grad_position[s->distance[p]] += change;
        if (grad_time) grad_time[s->bucket[p]] += change;
    }
    memset(grad_sum, 0, columns * sizeof(float));
    for (int64_t t = 0; t < s->tokens; t++) {
        const float *from = projected + t * columns, *share = shares + t * columns;
        float *to = grad_projected + t * columns;
#pragma omp simd simdlen(16)
        for (int64_t i = 0; i < columns; i++) {
            to[i] *= silu_slope(from[i], share[i]);
            grad_sum[i] += to[i];
        }
    }
}

/* sums [width] of rows [tokens, width]. */
static void sum_rows(int64_t tokens, int64_t width, const float *rows, float *sums) {
    memset(sums, 0, width * sizeof(float));
    for (int64_t t = 0; t < tokens; t++) add_scaled(sums, rows + t * width, 1.0f, width);
}
