/* Decides, for the ids of one batch, which row each of them has: admission, insertion, eviction.
   One function for a batch, in the order of shards, within a shard in the order of ids. */

#include "shards.h"

/* What an entry was before a batch changed it. `table`: 0 rows, 1 counters. */
typedef struct {
    int64_t table, entry, id;
    int32_t last, count;
} Change;

typedef struct {
    int64_t first_shard; /* of this owner */
    int64_t batch;
    int64_t admit;    /* batches that an id has to occur in */
    int64_t evict;    /* one of Evict */
    int64_t after;    /* of AFTER: a row goes if its last use was before batch - after */
    int64_t swept;    /* of AFTER: the shard, counted from first_shard, or -1 */
    int64_t pinned;   /* a row stays for this many batches from its last use on */
    int64_t halved;   /* of LFU: counts of rows are halved every so many batches; 0: never */
} Rules;

enum Evict { LRU, LFU, AFTER };

enum Figure { INSERTED, EVICTED, SWEPT, TURNED_AWAY, WAITING, FORGOTTEN, CHANGES, FIGURES };

typedef struct {
    Shards *rows, *counters; /* counters: NULL if every id is admitted */
    const Rules *rules;
    Change *changes;     /* [3 * n + rows of a shard] */
    int64_t *inserted;   /* [n] places, among the keys, of ids that got a row */
    int64_t *removed;    /* [rows of a shard] entries that were swept */
    int64_t *figures;    /* [FIGURES] */
    /* [rows of a shard] for each table: those of LFU are in use while counters look for theirs */
    Candidate *room, *counter_room;
} Plan;

static void note(Plan *plan, Shards *t, int64_t entry) {
    plan->changes[plan->figures[CHANGES]++] = (Change){
        t == plan->counters, entry, t->ids[entry], t->last[entry], t->count[entry]};
}

static inline int32_t add_one(int32_t count) { return count == INT32_MAX ? count : count + 1; }

/* What is left of the count of a row that was used last in batch `last`: one bit less for each
   halving since. */
static inline int32_t decay(const Rules *rules, int32_t count, int32_t last) {
    if (!rules->halved) return count;
    int64_t times = rules->batch / rules->halved - last / rules->halved;
    return times > 31 ? 0 : (int32_t)((int64_t)count >> times);
}

/* An entry that holds an id no more. */
static void clear_entry(Plan *plan, Shards *t, int64_t shard, int64_t entry) {
    note(plan, t, entry);
    take_out(t, shard, entry);
    t->last[entry] = EMPTY;
    t->count[entry] = 0;
    t->ids[entry] = 0;
    int32_t row = (int32_t)(entry - shard * t->rows);
    if (row < t->low[shard]) t->low[shard] = row;
}

/* An entry for a new id: an empty one, or that of `victim`. */
static void fill_entry(
    Plan *plan, Shards *t, int64_t shard, int64_t entry, int64_t id, uint64_t hash, int32_t count) {
    note(plan, t, entry);
    if (t->last[entry] != EMPTY) take_out(t, shard, entry);
    t->ids[entry] = id;
    t->last[entry] = (int32_t)plan->rules->batch;
    t->count[entry] = count;
    put(t, shard, entry, hash);
}

/* Counts a batch for an id that has no row; returns in how many it has occurred. */
static int32_t count_batch(Plan *plan, int64_t shard, int64_t id, uint64_t hash) {
    Shards *t = plan->counters;
    int32_t batch = (int32_t)plan->rules->batch;
    int64_t entry = find(t, shard, id, hash);
    if (entry >= 0) {
        note(plan, t, entry);
        t->last[entry] = batch;
        return t->count[entry] = add_one(t->count[entry]);
    }
    if (t->used[shard] < t->rows) {
        entry = find_empty(t, shard);
    } else {
        entry = find_oldest(t, shard, batch, plan->counter_room);
        if (entry < 0) return 1; /* all counters are of this batch: this one is not kept */
        plan->figures[FORGOTTEN]++;
    }
    fill_entry(plan, t, shard, entry, id, hash, 1);
    return 1;
}

enum Counted { NEGATIVE, COUNTED, AT_ONCE }; /* AT_ONCE: needs no admission, and goes first */

typedef struct {
    int64_t id, at; /* at: place among the keys */
    int at_once;
} Missing;

static int compare_ids(const void *a, const void *b) {
    const Missing *x = a, *y = b;
    if (x->at_once != y->at_once) return y->at_once - x->at_once;
    return (x->id > y->id) - (x->id < y->id);
}

static void sweep(Plan *plan, int64_t shard) {
    Shards *t = plan->rows;
    int64_t limit = plan->rules->batch - plan->rules->after;
    for (int64_t entry = shard * t->rows; entry < (shard + 1) * t->rows; entry++) {
        if (t->last[entry] == EMPTY || t->last[entry] >= limit) continue;
        clear_entry(plan, t, shard, entry);
        plan->removed[plan->figures[SWEPT]++] = entry;
    }
}

/* Rows for ids of one shard that have none, ascending. */
static void insert_missing(Plan *plan, int64_t shard, Missing *missing, int64_t n, int64_t *found) {
    Shards *t = plan->rows;
    const Rules *rules = plan->rules;
    int64_t limit = rules->batch - rules->pinned + 1, candidates = -1, next = 0;
    int none_left = rules->evict == AFTER;
    for (int64_t i = 0; i < n; i++) {
        uint64_t hash = mix((uint64_t)missing[i].id);
        int32_t count = 1;
        if (plan->counters && !missing[i].at_once) {
            count = count_batch(plan, shard, missing[i].id, hash);
            if (count < rules->admit) {
                plan->figures[WAITING]++;
                continue;
            }
        }
        int64_t entry = -1;
        if (t->used[shard] < t->rows) {
            entry = find_empty(t, shard);
        } else if (!none_left && rules->evict == LRU) {
            entry = find_oldest(t, shard, limit, plan->room);
        } else if (!none_left) {
            /* A new row may be of less use than an old one: nothing is kept for later batches. */
            if (candidates < 0) {
                candidates = list_candidates(t, shard, limit, plan->room);
                for (int64_t c = 0; c < candidates; c++)
                    plan->room[c].count = decay(rules, plan->room[c].count, plan->room[c].last);
                int64_t need = n - i < candidates ? n - i : candidates;
                sort_first(plan->room, candidates, need, 1);
                candidates = need;
            }
            if (next < candidates) entry = shard * t->rows + plan->room[next++].row;
        }
        if (entry < 0) {
            none_left = 1;
            plan->figures[TURNED_AWAY]++;
            continue;
        }
        plan->figures[EVICTED] += t->last[entry] != EMPTY;
        fill_entry(plan, t, shard, entry, missing[i].id, hash, count);
        if (plan->counters) {
            int64_t counter = find(plan->counters, shard, missing[i].id, hash);
            if (counter >= 0) clear_entry(plan, plan->counters, shard, counter);
        }
        plan->inserted[plan->figures[INSERTED]++] = missing[i].at;
        found[missing[i].at] = entry;
    }
}

/* For a map that is elsewhere: counts the ids of a batch that have no row, wanted [shards] of each
   shard, ascending in it. Of those that are admitted now, the first room [shards] get a row: their
   ids, their counts, and how many of each shard. Returns 0, or -1 without memory. */
int count_missing(
    Shards *counters, const Rules *rules, const int32_t *wanted, const int32_t *room, const int64_t *ids,
    Change *changes, int64_t *admitted, int32_t *counts, int32_t *given, int64_t *figures) {
    Candidate *candidates = malloc((size_t)counters->rows * sizeof(Candidate));
    if (!candidates) return -1;
    memset(figures, 0, FIGURES * sizeof(int64_t));
    Plan plan = {NULL, counters, rules, changes, NULL, NULL, figures, NULL, candidates};
    for (int64_t shard = 0, at = 0; shard < counters->shards; shard++) {
        given[shard] = 0;
        for (int64_t end = at + wanted[shard]; at < end; at++) {
            uint64_t hash = mix((uint64_t)ids[at]);
            int32_t count = count_batch(&plan, shard, ids[at], hash);
            if (count < rules->admit) {
                figures[WAITING]++;
                continue;
            }
            if (given[shard] == room[shard]) {
                figures[TURNED_AWAY]++;
                continue;
            }
            given[shard]++;
            admitted[figures[INSERTED]] = ids[at];
            counts[figures[INSERTED]++] = count;
            int64_t counter = find(counters, shard, ids[at], hash);
            if (counter >= 0) clear_entry(&plan, counters, shard, counter);
        }
    }
    free(candidates);
    return 0;
}

static inline uint64_t hash_of(int64_t key) { return (uint64_t)key ^ 0x8000000000000000u; }

/* keys [n]: the ids of a batch, as DynamicLayout makes keys of them, ascending and unique.
   counted [n], of Counted: NEGATIVE for those that are negatives alone, which use a row that is
   there and change nothing else; NULL: all count. found [n]: the entry of each, -1 for those that have none. Returns 0, or -1 without memory. */
int plan_batch(
    Shards *rows, Shards *counters, const Rules *rules, int64_t n, const int64_t *keys,
    const uint8_t *counted, int64_t *found, Change *changes, int64_t *inserted, int64_t *removed, int64_t *figures) {
    int64_t candidates = rows->rows + (counters ? counters->rows : 0);
    Missing *missing = malloc((size_t)(n + 1) * sizeof(Missing));
    Candidate *room = malloc((size_t)candidates * sizeof(Candidate));
    if (!missing || !room) {
        free(missing), free(room);
        return -1;
    }
    memset(figures, 0, FIGURES * sizeof(int64_t));
    Plan plan = {rows, counters, rules, changes, inserted, removed, figures,
                 room, room + rows->rows};
    int64_t to_sweep = rules->evict == AFTER ? rules->swept : -1;
    for (int64_t at = 0; at < n;) {
        uint64_t number = hash_of(keys[at]) >> rows->bits;
        int64_t shard = (int64_t)number - rules->first_shard, absent = 0;
        for (; at < n && hash_of(keys[at]) >> rows->bits == number; at++) {
            uint64_t hash = hash_of(keys[at]);
            int64_t id = (int64_t)unmix(hash), entry = find(rows, shard, id, hash);
            found[at] = entry;
            int mark = counted ? counted[at] : COUNTED, counts = mark != NEGATIVE;
            if (entry < 0) {
                if (counts) missing[absent++] = (Missing){id, at, mark == AT_ONCE};
                continue;
            }
            note(&plan, rows, entry);
            int32_t count = decay(rules, rows->count[entry], rows->last[entry]);
            rows->last[entry] = (int32_t)rules->batch;
            rows->count[entry] = counts ? add_one(count) : count;
        }
        if (shard == to_sweep) {
            sweep(&plan, shard);
            to_sweep = -1;
        }
        if (absent > 1) qsort(missing, (size_t)absent, sizeof(Missing), compare_ids);
        if (absent) insert_missing(&plan, shard, missing, absent, found);
    }
    if (to_sweep >= 0) sweep(&plan, to_sweep);
    free(missing), free(room);
    return 0;
}

/* keys [n], in any order -> found [n]: the entry of each, or -1. Changes nothing. */
void find_batch(
    const Shards *rows, int64_t first_shard, int64_t n, const int64_t *keys, int64_t *found) {
    for (int64_t at = 0; at < n; at++) {
        uint64_t hash = hash_of(keys[at]);
        int64_t shard = (int64_t)(hash >> rows->bits) - first_shard;
        found[at] = find(rows, shard, (int64_t)unmix(hash), hash);
    }
}

static void exchange_one(Shards *rows, Shards *counters, Change *change) {
    Shards *t = change->table ? counters : rows;
    int64_t entry = change->entry, shard = entry / t->rows;
    Change now = {change->table, entry, t->ids[entry], t->last[entry], t->count[entry]};
    int same = now.last != EMPTY && change->last != EMPTY && now.id == change->id;
    if (!same && now.last != EMPTY) take_out(t, shard, entry);
    t->ids[entry] = change->id;
    t->last[entry] = change->last;
    t->count[entry] = change->count;
    if (!same && change->last != EMPTY) put(t, shard, entry, mix((uint64_t)change->id));
    int32_t row = (int32_t)(entry - shard * t->rows);
    if (change->last == EMPTY && row < t->low[shard]) t->low[shard] = row;
    forget_queue(t, shard);
    *change = now;
}

/* Exchanges what a batch changed for what was there before it, and the other way round when it is
   called again with `back` 0. */
void exchange(Shards *rows, Shards *counters, int64_t n, Change *changes, int back) {
    for (int64_t i = 0; i < n; i++)
        exchange_one(rows, counters, &changes[back ? n - 1 - i : i]);
}

/* Makes everything that follows from ids and last uses. */
void rebuild(Shards *t) {
    memset(t->map, 0, (size_t)(t->shards * t->buckets) * sizeof(int32_t));
    for (int64_t shard = 0; shard < t->shards; shard++) {
        t->used[shard] = t->low[shard] = 0;
        forget_queue(t, shard);
        for (int64_t entry = shard * t->rows; entry < (shard + 1) * t->rows; entry++)
            if (t->last[entry] != EMPTY) put(t, shard, entry, mix((uint64_t)t->ids[entry]));
    }
}
