/* checksums/native.py: sums of blocks of words, each word multiplied by an odd factor of its place
   in the block. Rows are replaced and the sums kept right in one pass: memory bounds it. */

#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_WORDS 4096
#define BLOCK_BYTES (8 * BLOCK_WORDS)
#define FILE_BLOCKS 8 /* blocks read at a time */
#define ROWS_AHEAD 8 /* prefetch distance */

static uint64_t sum_words(const uint64_t *words, const uint64_t *factors, int64_t count) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < count; i++) sum += words[i] * factors[i];
    return sum;
}

/* The word at byte `at` of data, padded with zeros behind its end. */
static uint64_t read_word(const char *data, int64_t at, int64_t bytes) {
    uint64_t word = 0;
    memcpy(&word, data + at, bytes - at < 8 ? bytes - at : 8);
    return word;
}

/* Sums of the blocks of data; the last one may be partial. Also copies data to `into` if that is
   given. */
void sum_blocks(int64_t bytes, const char *data, char *into, const uint64_t *factors,
                uint64_t *sums) {
    for (int64_t at = 0; at < bytes; at += BLOCK_BYTES) {
        int64_t size = bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;
        const char *block = into ? memcpy(into + at, data + at, size) : data + at;
        uint64_t sum = sum_words((const uint64_t *)block, factors, size / 8);
        if (size % 8) sum += read_word(block, size / 8 * 8, size) * factors[size / 8];
        sums[at / BLOCK_BYTES] = sum;
    }
}

/* The same for bytes [place, place + bytes) of a file, summed while they are in a core's cache.
   Returns how many were read: fewer if the file ends, or cannot be read. */
int64_t sum_file(int32_t file, int64_t place, int64_t bytes, const uint64_t *factors,
                 uint64_t *sums) {
    char *room = malloc(FILE_BLOCKS * BLOCK_BYTES);
    int64_t at = 0;
    while (room && at < bytes) {
        int64_t size = bytes - at < FILE_BLOCKS * BLOCK_BYTES ? bytes - at : FILE_BLOCKS * BLOCK_BYTES;
        int64_t there = 0, count = 1;
        for (; there < size && count > 0; there += count)
            count = pread(file, room + there, size - there, place + at + there);
        if (there < size) break;
        sum_blocks(size, room, NULL, factors, sums + at / BLOCK_BYTES);
        at += size;
    }
    free(room);
    return at;
}

/* Adds the words of bytes [from, to) of data to the sums, or subtracts them; partial words count
   whole. */
static void count_words(const char *data, int64_t from, int64_t to, int64_t bytes, int add,
                        const uint64_t *factors, uint64_t *sums) {
    for (int64_t w = from / 8; w < (to + 7) / 8; w++) {
        uint64_t product = read_word(data, 8 * w, bytes) * factors[w % BLOCK_WORDS];
        sums[w / BLOCK_WORDS] += add ? product : -product;
    }
}

static void fetch_row(const char *row, int64_t size) {
    for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(row + at);
}

/* into[rows[i]] = source[rows[i]], or source[i] if it is `packed`, for `count` rows of `size` bytes.
   `into` has `bytes` bytes; updates its sums. */
void replace_rows(int64_t count, int64_t size, const int64_t *rows, const char *source,
                  int32_t packed, char *into, int64_t bytes, const uint64_t *factors,
                  uint64_t *sums) {
    int64_t width = size / 8;
    int aligned = size % 8 == 0 && (uintptr_t)source % 8 == 0 && (uintptr_t)into % 8 == 0;
    for (int64_t i = 0; i < count; i++) {
        if (i + ROWS_AHEAD < count) {
            int64_t ahead = rows[i + ROWS_AHEAD];
            fetch_row(into + ahead * size, size);
            if (!packed) fetch_row(source + ahead * size, size);
        }
        int64_t at = rows[i] * size, place = at / 8 % BLOCK_WORDS;
        const char *row = source + (packed ? i : rows[i]) * size;
        if (aligned && place + width <= BLOCK_WORDS) {
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
            count_words(into, at, at + size, bytes, 0, factors, sums);
            memcpy(into + at, row, size);
            count_words(into, at, at + size, bytes, 1, factors, sums);
        }
    }
}
