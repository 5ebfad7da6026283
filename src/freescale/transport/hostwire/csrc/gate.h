/* Urgent overtakes bulk: between two pieces, bulk gives way as long as urgent traffic moves.

   A gate never holds bulk back for good: an urgent transfer may itself wait for a rank that waits
   for this bulk. */

#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "engine.h"

/* Owned by Python (EngineGate), which outlives the channels that use it. Threads of all channels of
   a rank read and write it at once, without a lock. */
struct Gate {
    atomic_int urgent;        /* urgent transfers under way, and threads that wait for one */
    _Atomic int64_t moved_ns; /* when one of their pieces moved last */
    int64_t patience_ns;      /* never changes */
};

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t to_ns(double seconds) {
    return seconds < 1e9 ? (int64_t)(1e9 * seconds) : (int64_t)1e18;
}

Gate *gate_new(double patience) {
    Gate *gate = calloc(1, sizeof(Gate));
    if (gate) gate->patience_ns = to_ns(patience);
    return gate;
}

void gate_free(Gate *gate) {
    free(gate);
}

static void gate_note_movement(Gate *gate) {
    atomic_store_explicit(&gate->moved_ns, now_ns(), memory_order_relaxed);
}

static void gate_begin_urgent(Gate *gate) {
    gate_note_movement(gate); /* whoever sees the count sees this time, or a later one */
    atomic_fetch_add_explicit(&gate->urgent, 1, memory_order_acq_rel);
}

static void gate_end_urgent(Gate *gate) {
    atomic_fetch_sub_explicit(&gate->urgent, 1, memory_order_acq_rel);
}

static bool gate_is_open_for_bulk(Gate *gate) {
    if (!atomic_load_explicit(&gate->urgent, memory_order_acquire)) return true;
    int64_t moved = atomic_load_explicit(&gate->moved_ns, memory_order_relaxed);
    return moved + gate->patience_ns <= now_ns();
}
