/* reference/marks.py: a byte for each row, 1 where it is marked. */

#pragma once
#include <stdint.h>
#include <string.h>

#define MARKS_AHEAD 24 /* that memory is asked for before they are set */

/* Rows [count] in each of `consumers` marks [size]; a negative row counts from their end. */
void mark_rows(int64_t count, const int64_t *rows, int64_t size, int64_t consumers,
               uint8_t *const *marks) {
    for (int64_t c = 0; c < consumers; c++)
        for (int64_t i = 0; i < count; i++) {
            if (i + MARKS_AHEAD < count) {
                int64_t ahead = rows[i + MARKS_AHEAD];
                __builtin_prefetch(marks[c] + (ahead < 0 ? ahead + size : ahead), 1);
            }
            marks[c][rows[i] < 0 ? rows[i] + size : rows[i]] = 1;
        }
}

int64_t count_marks(int64_t size, const uint8_t *marks) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i++) count += marks[i];
    return count;
}

/* Which of marks [size] are set, ascending: eight at a time, of which most are not. */
void find_marks(int64_t size, const uint8_t *marks, int64_t *rows) {
    for (int64_t begin = 0; begin < size; begin += 8) {
        uint64_t set = 0; /* a bit of each byte, the first row's lowest */
        memcpy(&set, marks + begin, size - begin < 8 ? size - begin : 8);
        for (; set; set &= set - 1) *rows++ = begin + __builtin_ctzll(set) / 8;
    }
}
