/* How a thread that waits for a transfer sleeps when nothing can move. */

#pragma once

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "channel.h"
#include "streams.h"

enum {
    SHORT_NAP_NS = 30000,
    LONG_NAP_NS = 200000,
    SHORT_NAPS_NS = 2000000, /* idle for so long, naps are long */
    LONGEST_SLEEP_NS = 100000000,
    SLICE_NS = 100000 /* of the scheduler */
};

static void watch(Channel *c, nfds_t *count, int socket, short events) {
    c->polled[(*count)++] = (struct pollfd){socket, events, 0};
}

static bool inbox_has_room(const Inbox *inbox) {
    for (int slot = 0; slot < inbox->slots; slot++) {
        if (!inbox->taken[slot]) return true;
    }
    return false;
}

/* Bytes that the next reads from a stream can take, the header included. */
static int64_t readable_bytes(const Channel *c, const Transfer *transfer, int peer) {
    const Block *block = &transfer->receive[peer];
    int64_t bytes = block->size - block->done;
    if (!transfer->on_host) {
        int64_t received = c->peers[peer].inbox_slot < 0 ? 0 : c->peers[peer].inbox_received;
        bytes = smaller(bytes, c->inbox.slot_bytes) - received;
    }
    return bytes + HEADER_BYTES - c->peers[peer].header_have;
}

/* Whether a piece waits only for its copy. No event is queried again here: a copy that finished
   since `hand_over` looked would count as handed over, and this rank would sleep while the peer
   waits for the piece. */
static bool has_pieces_to_hand_over(Channel *c) {
    for (int i = 0; i < c->staged_count; i++) {
        const StagedSlot *staged = staged_at(c, i);
        for (int j = 0; j < staged->count; j++) {
            const Piece *piece = &staged->pieces[j];
            if (!is_handed_over(piece) && !c->peers[piece->peer].blocked) return true;
        }
    }
    return false;
}

/* Adds the sockets that the receiving direction waits for. Whether it also waits for something
   without a socket: an event of the GPU, or the gate. */
static bool watch_receiving(Channel *c, nfds_t *count) {
    if (c->receiving == c->submitted) return false;
    const Transfer *transfer = transfer_at(c, c->receiving);
    if (!transfer->ready || !may_proceed(c, transfer, c->receiving)) return true;
    if (c->landing_count == MAX_LANDINGS) return false;
    bool has_room = inbox_has_room(&c->inbox);
    for (int peer = 0; peer < c->world; peer++) {
        if (is_finished(&transfer->receive[peer])) continue;
        if (is_streamed(c, peer)) {
            bool needs_slot = !transfer->on_host && c->peers[peer].inbox_slot < 0;
            if (needs_slot && !has_room) continue; /* it may not be read now */
            set_low_water(c, peer, readable_bytes(c, transfer, peer));
        }
        watch(c, count, c->peers[peer].receive_socket, POLLIN);
    }
    return false;
}

/* The same for the sending direction. */
static bool watch_sending(Channel *c, nfds_t *count) {
    if (c->sending == c->submitted) return false;
    const Transfer *transfer = transfer_at(c, c->sending);
    bool open = transfer->ready && may_proceed(c, transfer, c->sending);
    bool wants_slot = !all_cut(c, transfer) && c->staged_count < MAX_STAGED;
    bool awaits_answers = false;
    int slot = (int)(c->slots_filled % c->slots);
    for (int peer = 0; peer < c->world && open; peer++) {
        if (is_streamed(c, peer)) {
            if (c->peers[peer].blocked) watch(c, count, c->peers[peer].send_socket, POLLOUT);
        } else if (wants_slot && c->peers[peer].pieces_read < *slot_goal(c, slot, peer)) {
            awaits_answers = true;
            watch(c, count, c->peers[peer].send_socket, POLLIN);
        }
    }
    /* a free slot: the gate has opened, or the event has happened, since the last look */
    return !open || (wants_slot && !awaits_answers) || has_pieces_to_hand_over(c);
}

/* Sleeps until a socket has something for the first transfer of either direction, at most
   `longest_ns`; only briefly if it also waits for something without a socket. */
static void sleep_until_readable(Channel *c, int64_t idle_ns, int64_t longest_ns) {
    nfds_t count = 0;
    bool naps = c->landing_count > 0;
    naps |= watch_receiving(c, &count);
    naps |= watch_sending(c, &count);
    if (naps) longest_ns = idle_ns < SHORT_NAPS_NS ? SHORT_NAP_NS : LONG_NAP_NS;
    struct timespec limit = {longest_ns / 1000000000, longest_ns % 1000000000};
    ppoll(c->polled, count, &limit, NULL);
}

/* Keeps naps of this thread at 30 us instead of 80, and runs it soon after a wakeup even on a busy
   core. Its share of the core stays the same. */
static void be_prompt(void) {
    static _Thread_local bool is_prompt;
    struct {
        uint32_t size;
        uint32_t policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t slice;
        uint64_t deadline;
        uint64_t period;
    } own; /* struct sched_attr of the kernel */
    if (is_prompt) return;
    is_prompt = true;
    prctl(PR_SET_TIMERSLACK, 1L);
    if (syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) || own.policy) return;
    own.slice = SLICE_NS; /* from Linux 6.12 on; ignored before */
    syscall(SYS_sched_setattr, 0, &own, 0);
}

/* A rank that the stalled transfer waits for. */
static int find_lagging_peer(Channel *c) {
    if (c->receiving < c->submitted) {
        const Transfer *transfer = transfer_at(c, c->receiving);
        for (int peer = 0; peer < c->world; peer++) {
            if (!is_finished(&transfer->receive[peer])) return peer;
        }
    }
    for (int i = 0; i < c->staged_count; i++) {
        const StagedSlot *staged = staged_at(c, i);
        for (int j = 0; j < staged->count; j++) {
            if (!is_handed_over(&staged->pieces[j])) return staged->pieces[j].peer;
        }
    }
    if (c->sending < c->submitted) {
        const Transfer *transfer = transfer_at(c, c->sending);
        for (int peer = 0; peer < c->world; peer++) {
            if (!is_finished(&transfer->send[peer])) return peer;
        }
    }
    return c->landing_count ? c->landings[c->first_landing].peer : c->rank;
}
