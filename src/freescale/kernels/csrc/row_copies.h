/* Copies rows of a table by their numbers, in several threads: one core does not saturate the
   memory. */

#pragma once
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif
#include "work_pool.h"

#define COPIES_AHEAD 4      /* prefetch distance, in rows */
#define LEAST_COPY (1 << 18) /* bytes worth a thread */
#define PIECE (1 << 17)      /* bytes */
#define LEAST_STREAM (8 << 20) /* bytes: larger copies leave the caches before they are read */

typedef struct {
    int64_t begin, end, bytes; /* of a row */
    char *to;
    const int64_t *to_rows;
    const char *from;
    const int64_t *from_rows;
    int streams;   /* whether to bypass the caches */
    int64_t piece; /* rows of a piece of work */
} RowCopy;

static inline int64_t copied_row(const int64_t *rows, int64_t i) { return rows ? rows[i] : i; }

/* Whether rows can be written with streaming stores. Plain stores read each cache line before they
   write it, which is a third of a copy's traffic. */
static int can_stream(const char *to, int64_t bytes) {
#ifdef __AVX__
    return ((uintptr_t)to | (uintptr_t)bytes) % 32 == 0;
#else
    (void)to, (void)bytes;
    return 0;
#endif
}

#ifdef __AVX__
static void stream_rows(const RowCopy *copy) {
    for (int64_t i = copy->begin; i < copy->end; i++) {
        if (i + COPIES_AHEAD < copy->end)
            __builtin_prefetch(copy->from + copied_row(copy->from_rows, i + COPIES_AHEAD) * copy->bytes);
        char *to = copy->to + copied_row(copy->to_rows, i) * copy->bytes;
        const char *from = copy->from + copied_row(copy->from_rows, i) * copy->bytes;
        for (int64_t at = 0; at < copy->bytes; at += 32)
            _mm256_stream_si256((__m256i *)(to + at), _mm256_loadu_si256((const __m256i *)(from + at)));
    }
    _mm_sfence(); /* before the copy is reported as done */
}
#endif

static void copy_some_rows(const RowCopy *copy) {
#ifdef __AVX__
    if (copy->streams) {
        stream_rows(copy);
        return;
    }
#endif
    for (int64_t i = copy->begin; i < copy->end; i++) {
        if (i + COPIES_AHEAD < copy->end) {
            int64_t ahead = i + COPIES_AHEAD;
            __builtin_prefetch(copy->from + copied_row(copy->from_rows, ahead) * copy->bytes);
            __builtin_prefetch(copy->to + copied_row(copy->to_rows, ahead) * copy->bytes, 1);
        }
        memcpy(copy->to + copied_row(copy->to_rows, i) * copy->bytes,
               copy->from + copied_row(copy->from_rows, i) * copy->bytes, (size_t)copy->bytes);
    }
}

static void copy_piece(void *whole, int64_t piece) {
    RowCopy part = *(const RowCopy *)whole;
    int64_t begin = piece * part.piece, left = part.end - begin;
    part.begin = begin, part.end = begin + (left < part.piece ? left : part.piece);
    copy_some_rows(&part);
}

/* to[to_rows[i]] = from[from_rows[i]] for i in [0, count), rows of `bytes`; NULL stands for the
   numbers 0, 1, ... The rows of `to` are distinct. */
void copy_rows(int64_t count, int64_t bytes, char *to, const int64_t *to_rows, const char *from,
               const int64_t *from_rows, int64_t threads) {
    int64_t worth = count * bytes / LEAST_COPY + 1;
    int streams = count * bytes >= LEAST_STREAM && can_stream(to, bytes);
    int64_t piece = PIECE / (bytes ? bytes : 1) + 1;
    RowCopy whole = {0, count, bytes, to, to_rows, from, from_rows, streams, piece};
    share_work(copy_piece, &whole, (count + piece - 1) / piece, threads < worth ? threads : worth);
}
