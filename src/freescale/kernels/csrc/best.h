/* kernels/best_items.py: the best items of each query, over tiles of scores. */

#pragma once
#include <stdint.h>

#include "work_pool.h"

#define STRIDE 64 /* scores that are compared at a time */

typedef struct {
    int64_t items, first, kept;
    const float *scores;
    float *best;
    int64_t *places;
} Tile;

/* Replaces the worst of a heap, which is its first entry, and restores the order: each entry is
   worse than the two below it, that is lower, or as high and later in the catalogue. */
static void replace_worst(int64_t kept, float *best, int64_t *places, float score, int64_t place) {
    int64_t at = 0;
    for (int64_t below; (below = 2 * at + 1) < kept; at = below) {
        int64_t other = below + 1;
        if (other < kept && (best[other] < best[below] ||
                             (best[other] == best[below] && places[other] > places[below])))
            below = other;
        if (score < best[below] || (score == best[below] && place > places[below]))
            break;
        best[at] = best[below], places[at] = places[below];
    }
    best[at] = score, places[at] = place;
}

static void keep_of_query(void *about, int64_t query) {
    const Tile *tile = about;
    const float *scores = tile->scores + query * tile->items;
    float *best = tile->best + query * tile->kept;
    int64_t *places = tile->places + query * tile->kept, begin = 0;
    /* An item comes after those with equal scores, so only a higher one counts; NaN never. */
    for (; begin + STRIDE <= tile->items; begin += STRIDE) {
        const float *part = scores + begin, worst = best[0];
        int32_t any = 0;
        for (int64_t i = 0; i < STRIDE; i++) any |= part[i] > worst;
        for (int64_t i = 0; any && i < STRIDE; i++)
            if (part[i] > best[0])
                replace_worst(tile->kept, best, places, part[i], tile->first + begin + i);
    }
    for (; begin < tile->items; begin++)
        if (scores[begin] > best[0])
            replace_worst(tile->kept, best, places, scores[begin], tile->first + begin);
}

/* Updates best and places [queries, kept], a heap of each query, by scores [queries, items] of items
   from place `first` on. Tiles come in the order of the catalogue; best begins as -inf. */
void keep_best(int64_t queries, int64_t items, int64_t first, int64_t kept, const float *scores,
               float *best, int64_t *places, int64_t threads) {
    Tile tile = {items, first, kept, scores, best, places};
    share_work(keep_of_query, &tile, queries, threads);
}
