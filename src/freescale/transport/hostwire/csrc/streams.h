/* Between machines: TCP streams, on which every block is 16 bytes of header and then its bytes.

       out   tensor -> slot of the ring -> stream
       in    stream -> slot of the inbox -> tensor

   CPU tensors take no slots: the stream reads and writes the tensor. */

#ifndef FREESCALE_STREAMS_H
#define FREESCALE_STREAMS_H

#include <sys/uio.h>

#include "channel.h"

/* bytes of a stream that wake a sleeping receiver: not every packet may interrupt the compute */
enum { LOW_WATER = 128 << 10 };

/* Writes what the stream takes of the piece, its header first. Whether anything was written. */
static bool write_piece(Channel *c, Piece *piece) {
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
        ssize_t count = sendmsg(c->send_socket[piece->peer], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count > 0) {
            piece->sent += count;
            any = true;
        } else if (count < 0 && errno == EINTR) {
            continue;
        } else if (count < 0 && would_block()) {
            c->blocked[piece->peer] = true;
            return any;
        } else {
            return fail(c, ERROR_CLOSED, piece->peer, count ? errno : 0);
        }
    }
    return true;
}

/* Reads the header of a block. Whether it is there, and announces what this rank expects. */
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
    int64_t count = receive_some(c, peer, c->receive_socket[peer], block->data + block->done,
                                 block->size - block->done);
    block->done += count;
    if (is_finished(block)) c->header_have[peer] = 0;
    if (count) note_movement(c, transfer);
    return count > 0;
}

/* The inbox slot of a peer, which gets one if any is free; -1 if none is. */
static int take_inbox_slot(Inbox *inbox, int peer) {
    for (int slot = 0; slot < inbox->slots && inbox->slot[peer] < 0; slot++) {
        if (inbox->taken[slot]) continue;
        inbox->taken[slot] = true;
        inbox->slot[peer] = slot;
        inbox->received[peer] = 0;
    }
    return inbox->slot[peer];
}

/* Makes poll report a stream only once so many bytes are there. */
static void set_low_water(Channel *c, int peer, int64_t bytes) {
    int low = (int)smaller(bytes, LOW_WATER);
    if (c->low_water[peer] == low) return;
    if (!setsockopt(c->receive_socket[peer], SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low))
        c->low_water[peer] = low;
}

#endif
