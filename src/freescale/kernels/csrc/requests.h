/* requests/reference.py, rows/reference.py and embedding/collision.py: deduplicates, divides and sums
   the rows of requests. */

#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

static int count_bits(uint64_t number) {
    int bits = 0;
    while (bits < 64 && number >> bits) bits++;
    return bits;
}

/* Sorts numbers [n] stably by their bits from `shift` up to `end`. Returns the buffer that holds the
   result: `numbers`, or `other` [n]. */
static uint64_t *sort_by_bits(int64_t n, uint64_t *numbers, uint64_t *other, int shift, int end) {
    for (; shift < end; shift += DIGIT_BITS) {
        int64_t places[DIGITS] = {0}, place = 0;
        for (int64_t i = 0; i < n; i++) places[numbers[i] >> shift & (DIGITS - 1)]++;
        for (int digit = 0; digit < DIGITS; digit++) {
            int64_t count = places[digit];
            places[digit] = place;
            place += count;
        }
        for (int64_t i = 0; i < n; i++)
            other[places[numbers[i] >> shift & (DIGITS - 1)]++] = numbers[i];
        uint64_t *sorted = other;
        other = numbers, numbers = sorted;
    }
    return numbers;
}

/* keys [n], not negative -> unique: the distinct keys, sorted, at the front of [n]; inverse [n];
   counts [edge_count]: distinct keys below each of the ascending edges and not below the previous
   one. scratch [2, n]. Returns the number of distinct keys; -1 if a key and its place do not fit
   into 64 bits. */
int64_t deduplicate_keys(int64_t n, const int64_t *keys, int64_t edge_count, const int64_t *edges,
                         uint64_t *scratch, int64_t *unique, int64_t *inverse, int64_t *counts) {
    uint64_t all = 0;
    for (int64_t i = 0; i < n; i++) all |= (uint64_t)keys[i];
    int place_bits = count_bits((uint64_t)n), key_bits = count_bits(all);
    if (place_bits + key_bits > 64) return -1;
    for (int64_t i = 0; i < n; i++)
        scratch[i] = (uint64_t)keys[i] << place_bits | (uint64_t)i;
    uint64_t *sorted = sort_by_bits(n, scratch, scratch + n, place_bits, place_bits + key_bits);
    uint64_t place_mask = ((uint64_t)1 << place_bits) - 1;
    int64_t count = 0, edge = 0;
    for (int64_t i = 0; i < edge_count; i++) counts[i] = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t key = (int64_t)(sorted[i] >> place_bits);
        if (!count || key != unique[count - 1]) {
            unique[count++] = key;
            while (edge < edge_count && key >= edges[edge]) edge++;
            if (edge < edge_count) counts[edge]++;
        }
        inverse[sorted[i] & place_mask] = count - 1;
    }
    return count;
}

static uint64_t find_largest(int64_t n, const int64_t *rows) {
    uint64_t largest = 0; /* a negative row is larger than all others */
    for (int64_t i = 0; i < n; i++)
        if ((uint64_t)rows[i] > largest) largest = (uint64_t)rows[i];
    return largest;
}

static void mark_bits(int64_t n, const int64_t *rows, uint64_t *bits) {
    for (int64_t i = 0; i < n; i++) bits[rows[i] >> 6] |= (uint64_t)1 << (rows[i] & 63);
}

static void read_bits(int64_t n, const int64_t *rows, const uint64_t *bits, uint8_t *marks) {
    for (int64_t i = 0; i < n; i++) marks[i] = bits[rows[i] >> 6] >> (rows[i] & 63) & 1;
}

/* rows of two batches -> marks of the rows in both, with a bit for each row up to the largest.
   Returns 0, and does nothing, if the bits would take more memory than the rows. */
int32_t mark_shared_rows(int64_t current_count, const int64_t *current, int64_t following_count,
                         const int64_t *following, uint8_t *current_marks,
                         uint8_t *following_marks) {
    uint64_t largest = find_largest(current_count, current);
    uint64_t other = find_largest(following_count, following);
    uint64_t words = (other > largest ? other : largest) / 64 + 1;
    if (words > (uint64_t)(current_count + following_count) / 2 + 1024) return 0;
    uint64_t *bits = calloc(2 * words, sizeof *bits);
    if (!bits) return 0;
    mark_bits(current_count, current, bits);
    mark_bits(following_count, following, bits + words);
    read_bits(current_count, current, bits + words, current_marks);
    read_bits(following_count, following, bits, following_marks);
    free(bits);
    return 1;
}

/* rows [sum of sizes [ranks]], rank by rank -> positions of the marked ones, then of the others by
   piece, each of these rank by rank. counts [(1 + pieces) * ranks]; `pieces` is a power of two. */
void divide_marked_rows(int64_t ranks, const int64_t *sizes, const uint8_t *marks,
                        const int64_t *rows, int64_t pieces, int64_t *scratch, int32_t *positions,
                        int64_t *counts) {
    int64_t bins = (1 + pieces) * ranks;
    memset(counts, 0, (size_t)bins * sizeof *counts);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t rank = 0, i = 0; rank < ranks; rank++) {
            for (int64_t end = i + sizes[rank]; i < end; i++) {
                int64_t piece = marks[i] ? 0 : 1 + (rows[i] & (pieces - 1));
                int64_t bin = piece * ranks + rank;
                if (pass) positions[scratch[bin]++] = (int32_t)i;
                else counts[bin]++;
            }
        }
        for (int64_t bin = 0, place = 0; bin < bins && !pass; bin++) {
            scratch[bin] = place;
            place += counts[bin];
        }
    }
}

/* values [n, width] -> sums [count, width] of values with the same place [n], in order, starting from
   negative zero, which changes no bit. */
void sum_by_place(int64_t n, int64_t width, const int64_t *places, const float *values,
                  int64_t count, float *sums) {
    for (int64_t i = 0; i < count * width; i++) sums[i] = -0.0f;
    for (int64_t i = 0; i < n; i++) {
        const float *from = values + i * width;
        float *into = sums + places[i] * width;
        for (int64_t c = 0; c < width; c++) into[c] += from[c];
    }
}

/* Copies rows [n] of `bytes` each to their places [n]. */
void put_rows(int64_t n, int64_t bytes, const int32_t *places, const char *rows, char *into) {
    for (int64_t i = 0; i < n; i++)
        memcpy(into + (int64_t)places[i] * bytes, rows + i * bytes, (size_t)bytes);
}
