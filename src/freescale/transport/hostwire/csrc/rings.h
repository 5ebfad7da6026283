/* Between ranks of one machine: a slot of the sender's ring is memory that the receiver maps.

       out   tensor -> slot of the ring -> message "these bytes" (16 bytes, Unix socket)
       in    message -> peer's slot -> tensor -> message "read" (1 byte) */

#pragma once

#include "channel.h"

/* Whether the peers have read all that left from the slot. */
static bool slot_is_free(Channel *c, int slot) {
    bool is_free = true;
    for (int peer = 0; peer < c->world; peer++) {
        Peer *to = &c->peers[peer];
        while (to->pieces_read < *slot_goal(c, slot, peer)) {
            char answers[256];
            /* no more than pieces were sent, whatever the peer claims */
            int64_t unread = (int64_t)(to->pieces_sent - to->pieces_read);
            int64_t count = receive_some(c, peer, to->send_socket, answers,
                                         smaller((int64_t)sizeof answers, unread));
            if (c->error) return false;
            if (!count) {
                is_free = false;
                break;
            }
            to->pieces_read += (uint64_t)count;
        }
    }
    return is_free;
}

/* Notifies the peer of the piece. Whether it could. */
static bool notify_of_piece(Channel *c, const StagedSlot *staged, Piece *piece) {
    uint64_t message[2] = {(uint64_t)(piece->data - c->ring), (uint64_t)piece->size};
    Peer *to = &c->peers[piece->peer];
    ssize_t count;
    do {
        count = send(to->send_socket, message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
    if (count < 0 && would_block()) { /* a hostile peer: the slots bound what is unread */
        to->blocked = true;
        return false;
    }
    if (count != sizeof message) return fail(c, ERROR_CLOSED, piece->peer, count < 0 ? errno : 0);
    *slot_goal(c, staged->slot, piece->peer) = ++to->pieces_sent;
    piece->sent = piece->size;
    return true;
}

/* Returns the address of a peer's next piece in its ring; NULL if it has not arrived, or if the
   peer named something else. */
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
    c->peers[peer].header_have = 0;
    return c->peers[peer].ring + offset;
}

/* Notifies a peer that a piece was read. False if its socket takes no more now; a peer that has
   closed does not wait for it. */
static bool acknowledge(Channel *c, int peer) {
    ssize_t count;
    do {
        count = send(c->peers[peer].receive_socket, ".", 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (count < 0 && errno == EINTR);
    return count >= 0 || !would_block();
}
