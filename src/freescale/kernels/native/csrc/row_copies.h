/* Rows of a table that are copied by their numbers, by several threads: a core alone does not keep
   the memory busy. */

#pragma once
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define COPIES_AHEAD 4      /* rows that memory is asked for before they are copied */
#define MOST_COPIERS 64     /* threads */
#define LEAST_COPY (1 << 18) /* bytes that are worth a thread */

typedef struct {
    int64_t begin, end, bytes; /* of a row */
    char *to;
    const int64_t *to_rows;
    const char *from;
    const int64_t *from_rows;
} RowCopy;

static inline int64_t copied_row(const int64_t *rows, int64_t i) { return rows ? rows[i] : i; }

static void *copy_some_rows(void *work) {
    const RowCopy *copy = work;
    for (int64_t i = copy->begin; i < copy->end; i++) {
        if (i + COPIES_AHEAD < copy->end) {
            int64_t ahead = i + COPIES_AHEAD;
            __builtin_prefetch(copy->from + copied_row(copy->from_rows, ahead) * copy->bytes);
            __builtin_prefetch(copy->to + copied_row(copy->to_rows, ahead) * copy->bytes, 1);
        }
        memcpy(copy->to + copied_row(copy->to_rows, i) * copy->bytes,
               copy->from + copied_row(copy->from_rows, i) * copy->bytes, (size_t)copy->bytes);
    }
    return 0;
}

/* to[to_rows[i]] = from[from_rows[i]] for i in [0, count), rows of `bytes`; numbers that are not
   there (NULL) are 0, 1, ... No row of `to` comes twice. */
void copy_rows(int64_t count, int64_t bytes, char *to, const int64_t *to_rows, const char *from,
               const int64_t *from_rows, int64_t threads) {
    int64_t worth = count * bytes / LEAST_COPY + 1;
    if (threads > worth) threads = worth;
    if (threads > MOST_COPIERS) threads = MOST_COPIERS;
    RowCopy parts[MOST_COPIERS];
    pthread_t others[MOST_COPIERS];
    int begun[MOST_COPIERS] = {0};
    for (int64_t t = 0; t < threads; t++)
        parts[t] = (RowCopy){count * t / threads, count * (t + 1) / threads, bytes, to, to_rows, from, from_rows};
    for (int64_t t = 1; t < threads; t++)
        begun[t] = !pthread_create(&others[t], 0, copy_some_rows, &parts[t]);
    copy_some_rows(&parts[0]);
    for (int64_t t = 1; t < threads; t++) {
        if (begun[t])
            pthread_join(others[t], 0);
        else /* no thread could be had */
            copy_some_rows(&parts[t]);
    }
}
