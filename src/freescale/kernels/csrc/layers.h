/* All layers of HSTU, forward and backward. */

#pragma once
#include "layer.h"
#include "products.h"

/* Parameters of a layer, or their gradients; biases may be NULL. */
typedef struct {
    float *input_weight, *input_bias, *projection, *projection_bias, *gate_weight, *gate_bias,
        *output, *output_bias, *position_bias, *time_bias;
} Layer;

/* Values that the backward of a layer reads. */
typedef struct {
    float *normed, *input_stats, *projected, *shares, *activated, *scores, *score_shares, *attended,
        *gate_stats, *factors, *gated, *out;
} Kept;

/* Scratch memory for the backward of a layer. */
typedef struct {
    float *slope, *of_gated, *of_attended, *of_projected, *of_normed;
} Spent;

static inline int64_t count_columns(const Shape *s) { return 2 * s->heads * (s->d_v + s->d_qk); }

static Kept take_kept(const Shape *s, float **room) {
    int64_t tokens = s->tokens, wide = s->heads * s->d_v, columns = count_columns(s);
    Kept kept;
    kept.normed = take(room, tokens * s->width);
    kept.input_stats = take(room, tokens * 2);
    kept.projected = take(room, tokens * columns);
    kept.shares = take(room, tokens * columns);
    kept.activated = take(room, tokens * columns);
    kept.scores = take(room, s->pairs * s->heads);
    kept.score_shares = take(room, s->pairs * s->heads);
    kept.attended = take(room, tokens * wide);
    kept.gate_stats = take(room, tokens * 2);
    kept.factors = take(room, tokens * wide);
    kept.gated = take(room, tokens * wide);
    kept.out = take(room, tokens * s->width);
    return kept;
}

static Spent take_spent(const Shape *s, float **room) {
    int64_t tokens = s->tokens, wide = s->heads * s->d_v;
    Spent spent;
    spent.slope = take(room, wide);
    spent.of_gated = take(room, tokens * wide);
    spent.of_attended = take(room, tokens * wide);
    spent.of_projected = take(room, tokens * count_columns(s));
    spent.of_normed = take(room, tokens * s->width);
    return spent;
}

/* The sizes of the room for run_layers and for its backward, in floats. */
void count_room(const Shape *s, int64_t layers, int64_t *forward, int64_t *backward) {
    float *end = NULL;
    for (int64_t number = 0; number < layers; number++) take_kept(s, &end);
    *forward = (uintptr_t)end / sizeof(float);
    end = NULL;
    take_spent(s, &end);
    *backward = (uintptr_t)end / sizeof(float);
}

/* to [m, n] = a [m, k] weight^T + bias, of a linear layer's weight [n, k]. */
static void project(int64_t m, int64_t n, int64_t k, const float *a, const float *weight,
                    const float *bias, float *to) {
    for (int64_t i = 0; i < m; i++) memcpy(to + i * n, bias, n * sizeof(float));
    multiply(m, n, k, a, 0, weight, 1, 1.0f, to);
}

/* x [tokens, width] -> out. `room`: for the values that layers keep. The number of a layer is the
   stream of its dropout. */
void run_layers(const Shape *s, int64_t layers, const Layer *layer, const float *x, float *room,
                float *out) {
    int64_t tokens = s->tokens, width = s->width, wide = s->heads * s->d_v;
    for (int64_t number = 0; number < layers; number++, layer++) {
        Kept kept = take_kept(s, &room);
        float *to = number + 1 < layers ? kept.out : out;
        norm_rows(s, x, layer->input_weight, layer->input_bias, kept.normed, kept.input_stats);
        project(tokens, count_columns(s), width, kept.normed, layer->projection,
                layer->projection_bias, kept.projected);
        attend_and_gate(s, number, kept.projected, layer->position_bias, layer->time_bias,
                        layer->gate_weight, layer->gate_bias, kept.shares, kept.activated,
                        kept.scores, kept.score_shares, kept.attended, kept.gate_stats,
                        kept.factors, kept.gated);
        project(tokens, width, wide, kept.gated, layer->output, layer->output_bias, to);
        for (int64_t i = 0; i < tokens * width; i++) to[i] += x[i];
        x = to;
    }
}

/* Backward of run_layers: of_x [tokens, width], which holds the gradients of the outputs first, and
   the gradients of the parameters. `kept`: the room of run_layers. */
void differentiate_layers(const Shape *s, int64_t layers, const Layer *layer, const float *x,
                          float *kept, float *room, float *of_x, const Layer *grads) {
    int64_t tokens = s->tokens, width = s->width, wide = s->heads * s->d_v;
    int64_t columns = count_columns(s);
    Spent spent = take_spent(s, &room);
    Kept each[layers];
    for (int64_t number = 0; number < layers; number++) each[number] = take_kept(s, &kept);
    for (int64_t number = layers - 1; number >= 0; number--) {
        const Kept *own = each + number;
        const Layer *of = layer + number, *to = grads + number;
        const float *inputs = number ? each[number - 1].out : x;
        if (to->position_bias) memset(to->position_bias, 0, s->distances * sizeof(float));
        if (to->time_bias) memset(to->time_bias, 0, s->buckets * sizeof(float));
        multiply(tokens, wide, width, of_x, 0, of->output, 0, 0.0f, spent.of_gated);
        differentiate_attention(s, spent.of_gated, own->projected, own->shares, own->activated,
                                own->scores, own->score_shares, own->attended, own->gate_stats,
                                own->factors, of->gate_weight, of->gate_bias, spent.slope,
                                spent.of_attended, spent.of_projected, to->projection_bias,
                                to->gate_weight, to->gate_bias, to->position_bias, to->time_bias);
        multiply(width, wide, tokens, of_x, 1, own->gated, 0, 0.0f, to->output);
        sum_rows(tokens, width, of_x, to->output_bias);
        multiply(columns, width, tokens, spent.of_projected, 1, own->normed, 0, 0.0f,
                 to->projection);
        multiply(tokens, width, columns, spent.of_projected, 0, of->projection, 0, 0.0f,
                 spent.of_normed);
        differentiate_norm(s, spent.of_normed, inputs, own->input_stats, of->input_weight, of_x,
                           to->input_weight, to->input_bias);
    }
}
