/* The receiving direction: takes pieces from rings and streams, and copies them to their place. */

#pragma once

#include "channel.h"
#include "rings.h"
#include "streams.h"

/* Copies a piece to its place. `inbox_slot`: where it is now, or -1. */
static void land(Channel *c, const Transfer *transfer, int peer, int inbox_slot, const char *from,
                 int64_t size) {
    Block *block = &transfer->receive[peer];
    Landing *landing = &c->landings[(c->first_landing + c->landing_count) % MAX_LANDINGS];
    landing->peer = peer;
    landing->on_host = transfer->on_host;
    landing->inbox_slot = inbox_slot;
    landing->transfer = c->receiving;
    copy(c, transfer, RECEIVING, block->data + block->done, from, size);
    record(c, transfer, RECEIVING, landing->event);
    c->landing_count++;
    block->done += size;
    note_movement(c, transfer);
}

/* Takes the next piece from the ring of a rank of this machine. Whether there was one. */
static bool take_from_ring(Channel *c, const Transfer *transfer, int peer) {
    int64_t size = next_piece(&transfer->receive[peer], transfer->largest_piece);
    const char *from = find_piece(c, peer, size);
    if (!from) return false;
    land(c, transfer, peer, -1, from, size);
    return true;
}

/* Reads from a stream to the peer's slot of the inbox, which lands when it is full. Whether
   anything came. */
static bool read_to_inbox(Channel *c, const Transfer *transfer, int peer) {
    Block *block = &transfer->receive[peer];
    if (!receive_block_header(c, peer, block)) return false;
    int slot = take_inbox_slot(c, peer);
    if (slot < 0) return false;
    Peer *from = &c->peers[peer];
    char *memory = c->inbox.memory + slot * c->inbox.slot_bytes;
    int64_t whole = smaller(block->size - block->done, c->inbox.slot_bytes);
    int64_t count = receive_some(c, peer, from->receive_socket, memory + from->inbox_received,
                                 whole - from->inbox_received);
    from->inbox_received += count;
    if (from->inbox_received < whole) return count > 0;
    land(c, transfer, peer, slot, memory, whole);
    from->inbox_slot = -1;
    if (is_finished(block)) from->header_have = 0;
    return true;
}

static bool take_next(Channel *c, const Transfer *transfer, int peer) {
    if (!is_streamed(c, peer)) return take_from_ring(c, transfer, peer);
    if (transfer->on_host) return read_to_host(c, transfer, peer);
    return read_to_inbox(c, transfer, peer);
}

/* Gives back the slots that finished copies came from. Whether there were any. */
static bool finish_landings(Channel *c) {
    bool any = false;
    while (c->landing_count) {
        Landing *landing = &c->landings[c->first_landing];
        if (!landing->on_host && !has_happened(c, landing->event)) break;
        if (landing->inbox_slot >= 0) {
            c->inbox.taken[landing->inbox_slot] = false;
        } else if (!acknowledge(c, landing->peer)) {
            break;
        }
        c->first_landing = (c->first_landing + 1) % MAX_LANDINGS;
        c->landing_count--;
        any = true;
    }
    return any;
}

/* Not when the transfer is submitted: Python waits there. */
static void copy_own(Transfer *transfer) {
    Block *own = &transfer->own;
    if (is_finished(own)) return;
    memcpy(own->data, transfer->own_from, (size_t)own->size);
    own->done = own->size;
}

/* Goes on with the first transfer that is not received. Whether anything moved. */
static bool advance_receiving(Channel *c) {
    bool any = finish_landings(c);
    if (c->receiving == c->submitted || c->error) return any;
    Transfer *transfer = transfer_at(c, c->receiving);
    if (!is_ready(c, transfer)) return any;
    copy_own(transfer);
    bool left = false;
    for (int distance = 1; distance < c->world; distance++) {
        int peer = (c->rank - distance + c->world) % c->world;
        const Block *block = &transfer->receive[peer];
        while (!is_finished(block) && c->landing_count < MAX_LANDINGS &&
               may_proceed(c, transfer, c->receiving)) {
            if (!take_next(c, transfer, peer)) break;
            any = true;
        }
        left |= !is_finished(block);
    }
    if (c->error) return false;
    if (transfer->on_host) any |= finish_landings(c);
    if (left) return any;
    c->receiving++;
    return true;
}
