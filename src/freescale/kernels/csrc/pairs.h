/* attention/pairs.py, and the buckets of attention/plan.py */

#pragma once
#include "numbers.h"

/* found: tokens, pairs, the longest history, the longest distance between two positions. Returns 0
   if a length is negative or a sample has more candidates than tokens. */
int32_t measure_samples(int64_t samples, const int64_t *lengths, const int64_t *candidates,
                        int64_t first, int64_t last, int64_t *found) {
    int64_t tokens = 0, pairs = 0, longest = 0, apart = 0;
    for (int64_t s = 0; s < samples; s++) {
        int64_t count = candidates ? candidates[s] : 0, history = lengths[s] - count;
        if (count < 0 || history < 0) return 0;
        int64_t positions = history + (count > 0); /* candidates share one */
        tokens += lengths[s];
        int64_t most = last ? first + last : history + 1; /* that a token sees */
        int64_t some = history < most ? history : most;
        pairs += some * (some + 1) / 2 + (history - some) * most;
        pairs += count * (history + 1 < most ? history + 1 : most);
        longest = history > longest ? history : longest;
        apart = positions - 1 > apart ? positions - 1 : apart;
    }
    found[0] = tokens, found[1] = pairs, found[2] = longest, found[3] = apart;
    return 1;
}

/* Lists pairs of a query and a key, by query and then by key. A token sees the history before it and
   itself; unless `last` is 0, only the first events and the last ones. With timestamps [tokens], also lists the buckets of the pairs' time differences. */
void list_pairs(int64_t samples, const int64_t *lengths, const int64_t *candidates, int64_t first,
                int64_t last, const int64_t *timestamps, double bucket_width, int32_t buckets, int64_t *query,
                int64_t *key, int64_t *distance, int32_t *bucket) {
    int64_t start = 0, pair = 0;
    for (int64_t s = 0; s < samples; start += lengths[s], s++) {
        int64_t history = lengths[s] - (candidates ? candidates[s] : 0);
        for (int64_t slot = 0; slot < lengths[s]; slot++) {
            int64_t position = slot < history ? slot : history; /* candidates share one */
            for (int64_t before = 0; before <= position; before++, pair++) {
                if (last && before == first && before <= position - last)
                    before = position - last + 1;
                query[pair] = start + slot;
                key[pair] = start + (before < position ? before : slot);
                distance[pair] = position - before;
            }
        }
    }
    for (int64_t p = 0; timestamps && p < pair; p++) {
        int64_t elapsed = timestamps[query[p]] - timestamps[key[p]];
        double place = log((double)(elapsed > 1 ? elapsed : 1)) / bucket_width;
        bucket[p] = place < buckets ? (int32_t)place : buckets;
    }
}
