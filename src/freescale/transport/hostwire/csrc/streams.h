/* Between machines: TCP streams, on which every block is 16 bytes of header and then its bytes.

       out   tensor -> slot of the ring -> stream
       in    stream -> slot of the inbox -> tensor

   CPU tensors take no slots: the stream reads and writes the tensor. */

#pragma once

#include <sys/uio.h>

#include "channel.h"

/* bytes that wake a sleeping receiver: not every packet should interrupt the compute */
enum { LOW_WATER = 128 << 10 };

/* Writes what the stream takes of the piece, its header first. Whether anything was written. */
static bool write_piece(Channel *c, Piece *piece) {
    Peer *to = &c->peers[piece->peer];
    bool any = false;
    while (piece->sent < piece->size) {
        bool in_header = piece->sent < 0;
        int64_t header_from = in_header ? HEADER_BYTES + piece->sent : 0;
        int64_t data_from = in_header ? 0 : piece->sent;
        struct iovec parts[2] = {
            {(char *)piece->header + header_from, (size_t)(HEADER_BYTES - header_from)},
            {piece->data + data_from, (size_t)(piece->size - data_from)},
        };
        struct msghdr message = {
            .msg_iov = in_header ? parts : parts + 1,
            .msg_iovlen = in_header ? 2 : 1,
        };
        ssize_t count = sendmsg(to->send_socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count > 0) {
            piece->sent += count;
            any = true;
        } else if (count < 0 && errno == EINTR) {
            continue;
        } else if (count < 0 && would_block()) {
            to->blocked = true;
            return any;
        } else {
            return fail(c, ERROR_CLOSED, piece->peer, count ? errno : 0);
        }
    }
    return true;
}

/* Reads the header of a block. Whether it is complete and names what this rank expects. */
static bool receive_block_header(Channel *c, int peer, const Block *block) {
    uint64_t header[2];
    if (!receive_header(c, peer, header)) return false;
    if ((int64_t)header[0] == c->receiving && (int64_t)header[1] == block->size) return true;
    return fail(c, ERROR_SIZE_MISMATCH, peer, (int64_t)header[1]);
}

/* Reads into a tensor of the host. Whether anything came. */
static bool read_to_host(Channel *c, const Transfer *transfer, int peer) {
    Block *block = &transfer->receive[peer];
    if (!receive_block_header(c, peer, block)) return false;
    int64_t count = receive_some(c, peer, c->peers[peer].receive_socket, block->data + block->done,
                                 block->size - block->done);
    block->done += count;
    if (is_finished(block)) c->peers[peer].header_have = 0;
    if (count) note_movement(c, transfer);
    return count > 0;
}

/* The inbox slot of a peer; it gets a free one if it has none. -1 if all are taken. */
static int take_inbox_slot(Channel *c, int peer) {
    Peer *from = &c->peers[peer];
    for (int slot = 0; slot < c->inbox.slots && from->inbox_slot < 0; slot++) {
        if (c->inbox.taken[slot]) continue;
        c->inbox.taken[slot] = true;
        from->inbox_slot = slot;
        from->inbox_received = 0;
    }
    return from->inbox_slot;
}

/* Makes poll report a stream only once so many bytes are there. */
static void set_low_water(Channel *c, int peer, int64_t bytes) {
    Peer *from = &c->peers[peer];
    int low = (int)smaller(bytes, LOW_WATER);
    if (from->low_water == low) return;
    if (!setsockopt(from->receive_socket, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low))
        from->low_water = low;
}
