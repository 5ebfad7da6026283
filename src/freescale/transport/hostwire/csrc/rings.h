/* Between ranks of one machine: a slot of the sender's ring is memory that the receiver maps.

       out   tensor -> slot of the ring -> message "these bytes" (16 bytes, Unix socket)
       in    message -> peer's slot -> tensor -> message "read" (1 byte)

   The same messages as SharedWire in wires/shared.py: a rank without the engine talks to one that
   has it. */

#ifndef FREESCALE_RINGS_H
#define FREESCALE_RINGS_H

#include "channel.h"

/* Whether the peers have read all that left from the slot. */
static bool slot_is_free(Channel *c, int slot) {
    bool is_free = true;
    for (int peer = 0; peer < c->world; peer++) {
        while (c->pieces_acked[peer] < *slot_goal(c, slot, peer)) {
            char answers[256];
            /* no more than pieces were sent, whatever the peer says */
            int64_t unread = (int64_t)(c->pieces_told[peer] - c->pieces_acked[peer]);
            int64_t count = receive_some(c, peer, c->send_socket[peer], answers,
                                         smaller((int64_t)sizeof answers, unread));
            if (c->error) return false;
            if (!count) {
                is_free = false;
                break;
            }
            c->pieces_acked[peer] += (uint64_t)count;
        }
    }
    return is_free;
}

/* Tells the peer where the piece is. Whether it could. */
static bool tell_piece(Channel *c, const StagedSlot *staged, Piece *piece) {
    uint64_t message[2] = {(uint64_t)(piece->data - c->ring), (uint64_t)piece->size};
    ssize_t count;
    do {
        count =
            send(c->send_socket[piece->peer], message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
    if (count < 0 && would_block()) { /* a peer that lies: the slots bound what is unread */
        c->blocked[piece->peer] = true;
        return false;
    }
    if (count != sizeof message) return fail(c, ERROR_CLOSED, piece->peer, count < 0 ? errno : 0);
    *slot_goal(c, staged->slot, piece->peer) = ++c->pieces_told[piece->peer];
    piece->sent = piece->size;
    return true;
}

/* Finds the next piece of a peer in its ring. Its address; NULL if it has not come, or if the peer
   named something else. */
static const char *find_piece(Channel *c, int peer, int64_t size) {
    uint64_t message[2];
    if (!receive_header(c, peer, message)) return NULL;
    uint64_t offset = message[0];
    int64_t ring_bytes = c->slots * c->slot_bytes;
    if ((int64_t)message[1] != size) {
        fail(c, ERROR_SIZE_MISMATCH, peer, (int64_t)message[1]);
        return NULL;
    }
    if (size > ring_bytes || offset > (uint64_t)(ring_bytes - size)) {
        fail(c, ERROR_OUTSIDE_RING, peer, (int64_t)offset);
        return NULL;
    }
    c->header_have[peer] = 0;
    return c->peer_ring[peer] + offset;
}

/* Tells a peer that a piece was read. False if its socket takes no more now; one that has closed
   does not wait for it. */
static bool acknowledge(Channel *c, int peer) {
    ssize_t count;
    do {
        count = send(c->receive_socket[peer], ".", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
    return count >= 0 || !would_block();
}

#endif
