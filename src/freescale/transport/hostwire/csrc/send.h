/* The sending direction: copies pieces to slots, and hands them to rings and streams. */

#pragma once

#include "channel.h"
#include "rings.h"
#include "streams.h"

/* Hands over what was copied, in order for each peer; a peer that takes no more does not delay the
   others. Whether anything moved. */
static bool hand_over(Channel *c, const Transfer *transfer) {
    bool any = false;
    for (int peer = 0; peer < c->world; peer++) {
        c->peers[peer].blocked = false;
    }
    for (int i = 0; i < c->staged_count && !c->error; i++) {
        StagedSlot *staged = staged_at(c, i);
        if (!transfer->on_host && !has_happened(c, staged->event)) break;
        for (int j = 0; j < staged->count && !c->error; j++) {
            Piece *piece = &staged->pieces[j];
            if (is_handed_over(piece) || c->peers[piece->peer].blocked) continue;
            if (!is_streamed(c, piece->peer)) {
                any |= notify_of_piece(c, staged, piece);
            } else if (may_proceed(c, transfer, c->sending)) {
                any |= write_piece(c, piece);
            } else {
                c->peers[piece->peer].blocked = true;
            }
        }
    }
    if (any) note_movement(c, transfer);
    return any;
}

static bool all_handed_over(const StagedSlot *staged) {
    for (int i = 0; i < staged->count; i++) {
        if (!is_handed_over(&staged->pieces[i])) return false;
    }
    return true;
}

static void drop_handed_over(Channel *c) {
    while (c->staged_count && all_handed_over(staged_at(c, 0))) {
        c->first_staged = (c->first_staged + 1) % MAX_STAGED;
        c->staged_count--;
    }
}

static bool all_cut(const Channel *c, const Transfer *transfer) {
    for (int peer = 0; peer < c->world; peer++) {
        if (!is_finished(&transfer->send[peer])) return false;
    }
    return true;
}

/* Fills a free slot with pieces, beginning with the next rank: not all ranks send to the same peer
   at a time. */
static void fill_slot(Channel *c, const Transfer *transfer, StagedSlot *staged) {
    char *slot = c->ring + staged->slot * c->slot_bytes;
    int64_t used = 0;
    for (int distance = 1; distance < c->world; distance++) {
        int peer = (c->rank + distance) % c->world;
        Block *block = &transfer->send[peer];
        while (!is_finished(block)) {
            int64_t size = next_piece(block, transfer->largest_piece);
            if ((used && used + size > c->together) || staged->count == c->max_pieces) return;
            char *from = block->data + block->done;
            Piece piece = {
                .peer = peer,
                .data = slot + used,
                .size = size,
                .sent = -1,
                .header = {(uint64_t)c->sending, (uint64_t)block->size},
            };
            if (is_streamed(c, peer)) piece.sent = block->done ? 0 : -HEADER_BYTES;
            if (is_streamed(c, peer) && transfer->on_host) {
                piece.data = from; /* a stream takes any memory of the host */
            } else {
                copy(c, transfer, SENDING, piece.data, from, size);
            }
            staged->pieces[staged->count++] = piece;
            block->done += size;
            used += (size + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
        }
    }
}

/* Fills the next slot, if there is anything to send and the slot is free. Whether it did. */
static bool stage(Channel *c, const Transfer *transfer) {
    int slot = (int)(c->slots_filled % c->slots);
    if (all_cut(c, transfer) || c->staged_count == MAX_STAGED) return false;
    if (!may_proceed(c, transfer, c->sending) || !slot_is_free(c, slot)) return false;
    StagedSlot *staged = staged_at(c, c->staged_count);
    staged->slot = slot;
    staged->count = 0;
    fill_slot(c, transfer, staged);
    record(c, transfer, SENDING, staged->event);
    c->staged_count++;
    c->slots_filled++;
    return true;
}

/* Goes on with the first transfer that is not sent. Whether anything moved. */
static bool advance_sending(Channel *c) {
    if (c->sending == c->submitted || c->error) return false;
    Transfer *transfer = transfer_at(c, c->sending);
    if (!is_ready(c, transfer)) return false;
    bool any = hand_over(c, transfer);
    drop_handed_over(c);
    any |= stage(c, transfer);
    if (c->error) return false;
    if (!all_cut(c, transfer) || c->staged_count) return any;
    leave_gate(c, transfer);
    c->sending++;
    return true;
}
