/* kernels/marks.py: a byte for each row, with the bits of its marks. */

#pragma once
#include <stdint.h>
#include <string.h>

#define MARKS_AHEAD 24 /* prefetch distance */
#define EVERY_BYTE 0x0101010101010101u

/* Marks rows [count] in marks [size]; a negative row counts from the end. */
void mark_rows(int64_t count, const int64_t *rows, int64_t size, uint8_t *marks) {
    for (int64_t i = 0; i < count; i++) {
        if (i + MARKS_AHEAD < count) {
            int64_t ahead = rows[i + MARKS_AHEAD];
            __builtin_prefetch(marks + (ahead < 0 ? ahead + size : ahead), 1);
        }
        marks[rows[i] < 0 ? rows[i] + size : rows[i]] = 255;
    }
}

int64_t count_marks(int64_t size, const uint8_t *marks, int64_t bit) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i++) count += (marks[i] & (uint8_t)bit) != 0;
    return count;
}

/* The marks [size] with a bit set, ascending. Tests eight at a time: most have none. */
void find_marks(int64_t size, const uint8_t *marks, int64_t bit, int64_t *rows) {
    for (int64_t begin = 0; begin < size; begin += 8) {
        uint64_t set = 0; /* a bit of each byte, the first row's lowest */
        memcpy(&set, marks + begin, size - begin < 8 ? size - begin : 8);
        for (set &= EVERY_BYTE * (uint64_t)bit; set; set &= set - 1)
            *rows++ = begin + __builtin_ctzll(set) / 8;
    }
}
