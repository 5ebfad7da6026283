/* The state of a channel, and the small functions that both directions use.

   All of it belongs to the thread that is inside the channel, except `stopped` and the gate. */

#pragma once

#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>

#include "engine.h"
#include "gate.h"

enum {
    MAX_TRANSFERS = 64,  /* under way */
    MAX_STAGED = 4,      /* slots being filled, or not yet handed over */
    MAX_LANDINGS = 32,   /* copies to their destination that may be under way */
    HEADER_BYTES = 16,   /* of a message about a piece in a ring, and of a block on a stream */
    SLOT_ALIGNMENT = 16, /* of a piece in a slot: enough for every dtype */
    PAGE_BYTES = 4096,
    MIN_END_PIECE = 1 << 20,   /* bytes of the first and last piece of a block that has as many */
    CUDA_ERROR_NOT_READY = 600 /* result of the driver: an event has not happened yet */
};

typedef enum { SENDING = 0, RECEIVING = 1 } Direction;

/* The bytes of a transfer for one peer, or from it. The memory is the tensor's. */
typedef struct {
    char *data;
    int64_t size;
    int64_t done; /* bytes that have been cut into pieces */
} Block;

/* One exchange with all peers. Lives in the channel's array and is reused; Python keeps the tensors
   and the event. */
typedef struct {
    Block *send;           /* by peer */
    Block *receive;        /* by peer */
    Block own;             /* where this rank's own part goes; empty for tensors on a GPU */
    const char *own_from;
    int64_t largest_piece; /* bytes */
    void *inputs_ready; /* event: what is sent is complete, the output is free; or NULL */
    bool urgent;
    bool on_host;    /* CPU tensors: copies are memcpy's, and over when they return */
    bool ready;      /* inputs_ready has happened */
    bool holds_gate; /* bulk is giving way to it */
} Transfer;

/* Bytes in a slot, or of a tensor of the host, on their way to one peer. */
typedef struct {
    int peer;
    char *data;
    int64_t size;
    /* by a ring: -1 until the peer is notified, then `size`; by a stream: bytes, of the first piece
       of a block from -HEADER_BYTES on */
    int64_t sent;
    uint64_t header[2]; /* number of the transfer, bytes of the block */
} Piece;

/* A slot of the ring that was copied to, until all its pieces are handed over. Owns `event` and
   `pieces`. */
typedef struct {
    void *event; /* the copies to the slot are over */
    int slot;
    int count;
    Piece *pieces;
} StagedSlot;

/* A copy from a peer's ring, or from the inbox, to the tensor. Owns `event`. */
typedef struct {
    void *event; /* the copy is over */
    int peer;
    bool on_host;
    int inbox_slot; /* to give back; -1: a slot of the peer's ring, to acknowledge */
    int64_t transfer;
} Landing;

/* Pinned memory of Python's that streams fill before it is copied to a GPU: at most one piece of
   each peer at a time. Owns the array. */
typedef struct {
    char *memory;
    int slots;
    int64_t slot_bytes;
    bool *taken; /* by slot */
} Inbox;

/* Another rank. The sockets and the ring are Python's. */
typedef struct {
    int send_socket;
    int receive_socket;        /* of a stream the same as send_socket */
    char *ring;                /* NULL: it is reached by a stream */
    uint64_t pieces_sent;      /* it has been notified of, ever */
    uint64_t pieces_read;      /* of them, those that it has acknowledged */
    bool blocked;              /* its socket takes no more now */
    char header[HEADER_BYTES]; /* of what comes next */
    int header_have;           /* bytes of it that are there */
    int low_water;             /* SO_RCVLOWAT of its stream; 0: as it was */
    int inbox_slot;            /* -1: none */
    int64_t inbox_received;    /* bytes that are in its slot */
} Peer;

/* Owned by Python (EngineChannel). Owns its arrays and events; rings and streams are Python's. */
struct Channel {
    int world;
    int rank;
    Peer *peers; /* by rank; this one's is unused */

    char *ring; /* what this rank sends from */
    int slots;
    int64_t slot_bytes;
    int64_t together;     /* pieces share a slot up to so many bytes */
    int max_pieces;       /* of a slot */
    int64_t slots_filled; /* ever */
    uint64_t *slot_goal;  /* [slots, world]: the slot is free once so many pieces are read */
    Inbox inbox;

    StagedSlot staged[MAX_STAGED]; /* a queue */
    int first_staged;
    int staged_count;
    Landing landings[MAX_LANDINGS]; /* a queue */
    int first_landing;
    int landing_count;

    Transfer transfers[MAX_TRANSFERS]; /* by number, modulo MAX_TRANSFERS */
    int64_t submitted;                 /* transfers, ever */
    int64_t sending;                   /* the first that is not sent */
    int64_t receiving;                 /* the first that is not received */
    /* transfers before this number are urgent or hold up an urgent one: they do not give way */
    int64_t urgent_before;

    Gate *gate;
    Driver driver;
    void *streams[2]; /* CUDA streams, by Direction */
    int64_t spin_ns;
    struct pollfd *polled;
    atomic_bool stopped; /* set by any thread */

    ErrorCode error; /* the first one */
    int error_peer;
    int64_t error_cause;
};

static bool fail(Channel *c, ErrorCode error, int peer, int64_t cause) {
    if (c->error == ERROR_NONE) {
        c->error = error;
        c->error_peer = peer;
        c->error_cause = cause;
    }
    return false;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static bool would_block(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

static Transfer *transfer_at(Channel *c, int64_t number) {
    return &c->transfers[number % MAX_TRANSFERS];
}

static StagedSlot *staged_at(Channel *c, int index) {
    return &c->staged[(c->first_staged + index) % MAX_STAGED];
}

static uint64_t *slot_goal(Channel *c, int slot, int peer) {
    return &c->slot_goal[(int64_t)slot * c->world + peer];
}

static bool is_streamed(const Channel *c, int peer) {
    return !c->peers[peer].ring;
}

static bool is_finished(const Block *block) {
    return block->done == block->size;
}

static bool is_handed_over(const Piece *piece) {
    return piece->sent == piece->size;
}

/* Bytes of the block's next piece; both sides cut alike. The first and last quarter are pieces, so
   the stages start and end soon after each other. The middle is cut less often: every copy costs
   some microseconds on top of its bytes. */
static int64_t next_piece(const Block *block, int64_t largest) {
    int64_t quarter = (block->size + 3) / 4;
    int64_t end = (quarter + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    end = smaller(largest, end < MIN_END_PIECE ? MIN_END_PIECE : end);
    int64_t left = block->size - block->done;
    if (!block->done || left <= end) return smaller(left, end);
    return smaller(left - end, smaller(largest, 2 * end));
}

/* Whether a transfer may move now: urgent ones, and those in the way of one, always. */
static bool may_proceed(const Channel *c, const Transfer *transfer, int64_t number) {
    return number < c->urgent_before || transfer->urgent || gate_is_open_for_bulk(c->gate);
}

static void note_movement(Channel *c, const Transfer *transfer) {
    if (transfer->urgent) gate_note_movement(c->gate);
}

static void leave_gate(Channel *c, Transfer *transfer) {
    if (transfer->holds_gate) gate_end_urgent(c->gate);
    transfer->holds_gate = false;
}

/* ---- the GPU */

static void use_device(Channel *c) {
    if (c->driver.use) c->driver.use(c->driver.context);
}

static bool has_happened(Channel *c, void *event) {
    if (!event) return true;
    int result = c->driver.query(event);
    if (result && result != CUDA_ERROR_NOT_READY) fail(c, ERROR_DEVICE, c->rank, result);
    return !result;
}

/* Whether the inputs are there. From then on bulk gives way to an urgent transfer, not while the
   device still computes its inputs. */
static bool is_ready(Channel *c, Transfer *transfer) {
    if (transfer->ready) return true;
    if (!has_happened(c, transfer->inputs_ready)) return false;
    transfer->ready = true;
    if (transfer->urgent) {
        transfer->holds_gate = true;
        gate_begin_urgent(c->gate);
    }
    return true;
}

static void copy(Channel *c, const Transfer *transfer, Direction direction, char *to,
                 const char *from, int64_t size) {
    if (transfer->on_host) {
        memcpy(to, from, (size_t)size);
        return;
    }
    int result =
        c->driver.copy((uintptr_t)to, (uintptr_t)from, (size_t)size, c->streams[direction]);
    if (result) fail(c, ERROR_DEVICE, c->rank, result);
}

static void record(Channel *c, const Transfer *transfer, Direction direction, void *event) {
    if (transfer->on_host) return;
    int result = c->driver.record(event, c->streams[direction]);
    if (result) fail(c, ERROR_DEVICE, c->rank, result);
}

/* ---- sockets */

/* Reads what has arrived, up to `size` bytes. 0 if there is nothing, or if it failed. */
static int64_t receive_some(Channel *c, int peer, int socket, char *to, int64_t size) {
    for (;;) {
        ssize_t count = recv(socket, to, (size_t)size, MSG_DONTWAIT);
        if (count > 0) return count;
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && would_block()) return 0;
        return fail(c, ERROR_CLOSED, peer, count ? errno : 0);
    }
}

/* Reads the next message of a peer, or the header of its next block. Whether it is complete; it
   stays until header_have is reset. */
static bool receive_header(Channel *c, int peer, uint64_t header[2]) {
    Peer *from = &c->peers[peer];
    while (from->header_have < HEADER_BYTES) {
        int64_t count =
            receive_some(c, peer, from->receive_socket, from->header + from->header_have,
                         HEADER_BYTES - from->header_have);
        if (!count) return false;
        from->header_have += (int)count;
    }
    memcpy(header, from->header, HEADER_BYTES);
    return true;
}
