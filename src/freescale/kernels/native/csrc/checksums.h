/* reference/checksums.py: sums of blocks of words, each word multiplied by an odd factor of its place
   in the block. Rows are replaced and the sums kept right in one pass: memory bounds it. */

#pragma once
#include <stdint.h>
#include <string.h>

#define BLOCK_WORDS 4096
#define BLOCK_BYTES (8 * BLOCK_WORDS)
#define ROWS_AHEAD 8 /* that memory is asked for before they are needed */

static uint64_t sum_words(const uint64_t *words, const uint64_t *factors, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += words[i] * factors[i];
    return sum;
}

/* Sums [blocks] of data; where `into` is given, data is copied there on the way. */
void sum_blocks(int64_t blocks, const char *data, char *into, const uint64_t *factors,
                uint64_t *sums) {
    for (int64_t b = 0; b < blocks; b++) {
        const char *block = data + b * BLOCK_BYTES;
        if (into) block = memcpy(into + b * BLOCK_BYTES, block, BLOCK_BYTES);
        sums[b] = sum_words((const uint64_t *)block, factors, BLOCK_WORDS);
    }
}

/* Adds the words of bytes [from, to), or takes them away; words of which a part lies outside count
   whole. `words`: how many have a sum; of those behind them there is none. */
static void count_words(const char *data, int64_t from, int64_t to, int64_t words, int add,
                        const uint64_t *factors, uint64_t *sums) {
    int64_t end = (to + 7) / 8 < words ? (to + 7) / 8 : words;
    for (int64_t w = from / 8; w < end; w++) {
        uint64_t word, times = factors[w % BLOCK_WORDS];
        memcpy(&word, data + 8 * w, 8);
        sums[w / BLOCK_WORDS] += add ? word * times : -(word * times);
    }
}

static void fetch_row(const char *row, int64_t size) {
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(row + at);
}

/* into[rows[i]] = source[rows[i]], or source[i] where it is `packed`: rows of `size` bytes, count of
   them. `sums` are those of `into`, of its first `blocks` blocks. */
void replace_rows(int64_t count, int64_t size, const int64_t *rows, const char *source,
                  int32_t packed, char *into, int64_t blocks, const uint64_t *factors,
                  uint64_t *sums) {
    int64_t words = blocks * BLOCK_WORDS, width = size / 8;
    int aligned = size % 8 == 0 && (uintptr_t)source % 8 == 0 && (uintptr_t)into % 8 == 0;
    for (int64_t i = 0; i < count; i++) {
        if (i + ROWS_AHEAD < count) {
            int64_t ahead = rows[i + ROWS_AHEAD];
            fetch_row(into + ahead * size, size);
            if (!packed) fetch_row(source + ahead * size, size);
        }
        int64_t at = rows[i] * size, place = at / 8 % BLOCK_WORDS;
        const char *row = source + (packed ? i : rows[i]) * size;
        if (aligned && place + width <= BLOCK_WORDS && at / 8 + width <= words) {
            const uint64_t *new = (const uint64_t *)row, *times = factors + place;
            uint64_t *old = (uint64_t *)(into + at), change = 0;
#pragma omp simd reduction(+ : change)
            for (int64_t w = 0; w < width; w++) {
                uint64_t word = new[w];
                change += (word - old[w]) * times[w];
                old[w] = word;
            }
            sums[at / BLOCK_BYTES] += change;
        } else {
            count_words(into, at, at + size, words, 0, factors, sums);
            memcpy(into + at, row, size);
            count_words(into, at, at + size, words, 1, factors, sums);
        }
    }
}
