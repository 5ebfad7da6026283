/* reference/marks.py: a byte for each row, 1 where it is marked. */

#pragma once
#include <stdint.h>
#include <string.h>

/* Rows [count] in each of `consumers` marks [size]; a negative row counts from their end. */
void mark_rows(int64_t count, const int64_t *rows, int64_t size, int64_t consumers,
               uint8_t *const *marks) {
    for (int64_t c = 0; c < consumers; c++)
        for (int64_t i = 0; i < count; i++) marks[c][rows[i] < 0 ? rows[i] + size : rows[i]] = 1;
}

int64_t count_marks(int64_t size, const uint8_t *marks) {
    int64_t count = 0;
    for (int64_t i = 0; i < size; i++) count += marks[i];
    return count;
}

/* Which of marks [size] are set, ascending. Few are: eight at a time are passed over. */
void find_marks(int64_t size, const uint8_t *marks, int64_t *rows) {
    for (int64_t begin = 0; begin < size; begin += 8) {
        int64_t end = begin + 8 < size ? begin + 8 : size;
        uint64_t any = 0;
        memcpy(&any, marks + begin, end - begin);
        if (any)
            for (int64_t i = begin; i < end; i++)
                if (marks[i]) *rows++ = i;
    }
}
