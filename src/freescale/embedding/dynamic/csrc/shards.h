/* Ids in virtual shards. A shard is a small table of its own: `rows` entries, each an id with the
   batch that used it last and the number of batches that did, and an open-addressing map from id to
   entry. Nothing that happens in a shard depends on another one. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { EMPTY = -1 }; /* `last` of an entry that holds no id */

typedef struct {
    int64_t shards;  /* of this owner */
    int64_t rows;    /* of a shard */
    int64_t buckets; /* of a shard's map */
    int64_t ahead;   /* of a shard's queue */
    int64_t bits;    /* of a hash, below its shard */
    int64_t *ids;    /* [shards * rows] */
    int32_t *last;   /* [shards * rows] */
    int32_t *count;  /* [shards * rows] */
    int32_t *map;    /* [shards * buckets] entry of the shard, plus 1; 0: none */
    int32_t *used;   /* [shards] entries that hold an id */
    int32_t *low;    /* [shards] no entry below it is empty */
    /* [shards * ahead] the oldest entries when the shard was last looked through, oldest first. An
       entry that was used since, or holds another id, is newer than `bound`. */
    int32_t *queue;
    int32_t *queue_at, *queue_end, *bound; /* [shards] */
} Shards;

/* splitmix64's finalizer, as `freescale.random.mix`. A bijection, so that a key is an id. */
static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static inline uint64_t unmix(uint64_t x) {
    x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642B2D24D8EC3u;
    x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96DE1B173F119089u;
    return x ^ (x >> 30) ^ (x >> 60);
}

/* The upper bits of a hash, up to 12, are the shard; 32 bits below these choose the bucket. */
static inline int64_t home_bucket(const Shards *t, uint64_t hash) {
    return (int64_t)(((hash << 12 >> 32) * (uint64_t)t->buckets) >> 32);
}

static inline int64_t next_bucket(const Shards *t, int64_t bucket) {
    return bucket + 1 == t->buckets ? 0 : bucket + 1;
}

/* The entry of an id among all of the owner's, or -1. */
static inline int64_t find(const Shards *t, int64_t shard, int64_t id, uint64_t hash) {
    const int32_t *map = t->map + shard * t->buckets;
    int64_t first = shard * t->rows;
    for (int64_t b = home_bucket(t, hash); map[b]; b = next_bucket(t, b)) {
        int64_t entry = first + map[b] - 1;
        if (t->ids[entry] == id) return entry;
    }
    return -1;
}

static void put(Shards *t, int64_t shard, int64_t entry, uint64_t hash) {
    int32_t *map = t->map + shard * t->buckets;
    int64_t b = home_bucket(t, hash);
    while (map[b]) b = next_bucket(t, b);
    map[b] = (int32_t)(entry - shard * t->rows) + 1;
    t->used[shard]++;
}

/* Closes the gap, so that searches need no marks of what was removed. */
static void take_out(Shards *t, int64_t shard, int64_t entry) {
    int32_t *map = t->map + shard * t->buckets;
    int64_t first = shard * t->rows, gap = home_bucket(t, mix((uint64_t)t->ids[entry]));
    while (map[gap] != entry - first + 1) gap = next_bucket(t, gap);
    for (int64_t b = next_bucket(t, gap); map[b]; b = next_bucket(t, b)) {
        int64_t home = home_bucket(t, mix((uint64_t)t->ids[first + map[b] - 1]));
        /* It may move to the gap unless its home lies behind the gap and not behind b. */
        int stays = gap < b ? (gap < home && home <= b) : (gap < home || home <= b);
        if (stays) continue;
        map[gap] = map[b];
        gap = b;
    }
    map[gap] = 0;
    t->used[shard]--;
}

/* The lowest empty entry of a shard that has one. */
static int64_t find_empty(Shards *t, int64_t shard) {
    int64_t first = shard * t->rows, at = t->low[shard];
    while (t->last[first + at] != EMPTY) at++;
    t->low[shard] = (int32_t)at;
    return first + at;
}

static void forget_queue(Shards *t, int64_t shard) { t->queue_at[shard] = t->queue_end[shard] = 0; }

/* ---- what may go, in its order */

typedef struct {
    int64_t id;
    int32_t last, count;
    int32_t row; /* of the shard */
} Candidate;

static inline int is_before(const Candidate *a, const Candidate *b, int by_count) {
    if (by_count && a->count != b->count) return a->count < b->count;
    return a->last != b->last ? a->last < b->last : a->id < b->id;
}

/* Puts the `need` first of n candidates in front, in their order. */
static void sort_first(Candidate *c, int64_t n, int64_t need, int by_count) {
    while (n > 12) {
        Candidate pivot = c[n / 2];
        int64_t i = -1, j = n;
        for (;;) {
            do i++; while (is_before(&c[i], &pivot, by_count));
            do j--; while (is_before(&pivot, &c[j], by_count));
            if (i >= j) break;
            Candidate moved = c[i];
            c[i] = c[j], c[j] = moved;
        }
        sort_first(c, j + 1, need < j + 1 ? need : j + 1, by_count);
        if (need <= j + 1) return;
        c += j + 1, n -= j + 1, need -= j + 1;
    }
    for (int64_t i = 1; i < n; i++) {
        Candidate moved = c[i];
        int64_t j = i;
        for (; j && is_before(&moved, &c[j - 1], by_count); j--) c[j] = c[j - 1];
        c[j] = moved;
    }
}

/* All entries of a shard whose last use was before `limit`; how many. */
static int64_t list_candidates(const Shards *t, int64_t shard, int64_t limit, Candidate *room) {
    int64_t n = 0, first = shard * t->rows;
    for (int64_t row = 0; row < t->rows; row++) {
        int32_t last = t->last[first + row];
        if (last == EMPTY || last >= limit) continue;
        room[n++] = (Candidate){t->ids[first + row], last, t->count[first + row], (int32_t)row};
    }
    return n;
}

/* The entry that was used longest ago, if before `limit`; else -1. Looks through the shard once for
   many of them: entries outside the queue are newer than those in it, and stay so. */
static int64_t find_oldest(Shards *t, int64_t shard, int64_t limit, Candidate *room) {
    int64_t first = shard * t->rows;
    for (int refilled = 0;; refilled = 1) {
        int32_t *queue = t->queue + shard * t->ahead;
        while (t->queue_at[shard] < t->queue_end[shard]) {
            int64_t entry = first + queue[t->queue_at[shard]++];
            if (t->last[entry] != EMPTY && t->last[entry] <= t->bound[shard]) return entry;
        }
        if (refilled) return -1;
        int64_t n = list_candidates(t, shard, limit, room);
        int64_t kept = n < t->ahead ? n : t->ahead;
        if (!kept) return -1;
        sort_first(room, n, kept, 0);
        for (int64_t i = 0; i < kept; i++) queue[i] = room[i].row;
        t->queue_at[shard] = 0;
        t->queue_end[shard] = (int32_t)kept;
        t->bound[shard] = room[kept - 1].last;
    }
}
