/* Carries transfers in the thread that waits for them, without Python's lock.

   The only file that is compiled; it includes the others:

       engine.h     the interface
       gate.h       urgent overtakes bulk
       channel.h    the state of a channel; events, copies and sockets
       rings.h      pieces in memory that ranks of one machine share
       streams.h    blocks on TCP streams
       send.h       the sending direction
       receive.h    the receiving direction
       wait.h       how to sleep when nothing moves

   Only channel_wait blocks: it polls for `spin_ns` after something has moved, and then sleeps. CPU
   tensors are copied by memcpy; a GPU's by its copy engines, and events of the driver show when a
   copy is over. */

#define _GNU_SOURCE
#include "engine.h"
#include "gate.h"
#include "channel.h"
#include "rings.h"
#include "streams.h"
#include "send.h"
#include "receive.h"
#include "wait.h"

/* ---- a channel's life */

static void *allocate(int64_t count, size_t size) {
    return calloc((size_t)count, size);
}

static bool allocate_arrays(Channel *c) {
    int world = c->world;
    c->peers = allocate(world, sizeof *c->peers);
    c->slot_goal = allocate((int64_t)c->slots * world, sizeof *c->slot_goal);
    c->polled = allocate(2 * (int64_t)world, sizeof *c->polled); /* each way */
    c->inbox.taken = allocate(c->inbox.slots + 1, sizeof *c->inbox.taken);
    bool complete = c->peers && c->slot_goal && c->polled && c->inbox.taken;
    for (int i = 0; i < MAX_STAGED; i++) {
        c->staged[i].pieces = allocate(c->max_pieces, sizeof(Piece));
        complete = complete && c->staged[i].pieces;
    }
    for (int i = 0; i < MAX_TRANSFERS; i++) {
        c->transfers[i].send = allocate(world, sizeof(Block));
        c->transfers[i].receive = allocate(world, sizeof(Block));
        complete = complete && c->transfers[i].send && c->transfers[i].receive;
    }
    for (int peer = 0; peer < world && complete; peer++) {
        c->peers[peer].inbox_slot = -1;
    }
    return complete;
}

static bool create_events(Channel *c) {
    enum { CU_EVENT_DISABLE_TIMING = 2 };
    if (!c->driver.copy) return true;
    use_device(c);
    for (int i = 0; i < MAX_STAGED; i++) {
        if (c->driver.create(&c->staged[i].event, CU_EVENT_DISABLE_TIMING)) return false;
    }
    for (int i = 0; i < MAX_LANDINGS; i++) {
        if (c->driver.create(&c->landings[i].event, CU_EVENT_DISABLE_TIMING)) return false;
    }
    return true;
}

Channel *channel_new(int world, int rank, char *ring, int slots, int64_t slot_bytes,
                     int64_t together, char *inbox, int inbox_slots, int64_t inbox_bytes,
                     Gate *gate, double spin_seconds, const Driver *driver, void *send_stream,
                     void *receive_stream) {
    Channel *c = calloc(1, sizeof(Channel));
    if (!c) return NULL;
    c->world = world;
    c->rank = rank;
    c->ring = ring;
    c->slots = slots;
    c->slot_bytes = slot_bytes;
    c->together = together;
    c->max_pieces = world + (int)(together / PAGE_BYTES) + 8;
    c->inbox.memory = inbox;
    c->inbox.slots = inbox_slots;
    c->inbox.slot_bytes = inbox_bytes;
    c->gate = gate;
    c->spin_ns = to_ns(spin_seconds);
    c->streams[SENDING] = send_stream;
    c->streams[RECEIVING] = receive_stream;
    if (driver) c->driver = *driver;
    if (!allocate_arrays(c) || !create_events(c)) {
        channel_free(c);
        return NULL;
    }
    return c;
}

void channel_free(Channel *c) {
    if (!c) return;
    use_device(c);
    for (int i = 0; i < MAX_STAGED; i++) {
        if (c->staged[i].event) c->driver.destroy(c->staged[i].event);
        free(c->staged[i].pieces);
    }
    for (int i = 0; i < MAX_LANDINGS; i++) {
        if (c->landings[i].event) c->driver.destroy(c->landings[i].event);
    }
    for (int i = 0; i < MAX_TRANSFERS; i++) {
        leave_gate(c, &c->transfers[i]);
        free(c->transfers[i].send);
        free(c->transfers[i].receive);
    }
    free(c->peers);
    free(c->slot_goal);
    free(c->polled);
    free(c->inbox.taken);
    free(c);
}

void channel_set_peer(Channel *c, int peer, int send_socket, int receive_socket, char *ring) {
    c->peers[peer].send_socket = send_socket;
    c->peers[peer].receive_socket = receive_socket;
    c->peers[peer].ring = ring;
}

/* ---- transfers */

int64_t channel_submit(Channel *c, int urgent, int on_host, void *inputs_ready,
                       int64_t largest_piece, const uint64_t *send, const int64_t *send_sizes,
                       const uint64_t *receive, const int64_t *receive_sizes) {
    if (c->submitted - smaller(c->sending, c->receiving) == MAX_TRANSFERS) return -1;
    Transfer *transfer = transfer_at(c, c->submitted);
    for (int peer = 0; peer < c->world; peer++) {
        bool travels = peer != c->rank;
        transfer->send[peer] = (Block){(char *)send[peer], travels ? send_sizes[peer] : 0, 0};
        transfer->receive[peer] =
            (Block){(char *)receive[peer], travels ? receive_sizes[peer] : 0, 0};
    }
    transfer->own = (Block){(char *)receive[c->rank], on_host ? receive_sizes[c->rank] : 0, 0};
    transfer->own_from = (const char *)send[c->rank];
    transfer->largest_piece = largest_piece;
    transfer->inputs_ready = inputs_ready;
    transfer->urgent = urgent;
    transfer->on_host = on_host;
    transfer->ready = false;
    transfer->holds_gate = false;
    int64_t number = c->submitted++;
    if (urgent) c->urgent_before = c->submitted;
    use_device(c);
    /* only the beginning of a large one: Python waits */
    for (int i = 0; i < MAX_STAGED; i++) {
        if (!advance_sending(c)) break;
    }
    return number;
}

/* All slots are acknowledged as well: a peer that still sends to others may wait for one while this
   rank turns to something else. */
int channel_is_done(const Channel *c, int64_t number) {
    bool landed = !c->landing_count || c->landings[c->first_landing].transfer > number;
    return c->sending > number && c->receiving > number && landed;
}

void channel_stop(Channel *c) {
    atomic_store_explicit(&c->stopped, true, memory_order_release);
}

int channel_wait(Channel *c, int64_t number, double seconds) {
    be_prompt();
    use_device(c);
    int64_t limit_ns = to_ns(seconds);
    bool urgent = transfer_at(c, number)->urgent && !channel_is_done(c, number);
    if (urgent) gate_begin_urgent(c->gate); /* a thread waits for it */
    int64_t last_ns = now_ns();
    while (!channel_is_done(c, number) && !c->error) {
        bool sent = advance_sending(c);
        bool received = advance_receiving(c);
        if (sent || received) {
            last_ns = now_ns();
            continue;
        }
        if (atomic_load_explicit(&c->stopped, memory_order_acquire)) {
            fail(c, ERROR_CLOSED, c->rank, 0);
        }
        int64_t idle_ns = now_ns() - last_ns;
        if (idle_ns > limit_ns) {
            fail(c, ERROR_TIMED_OUT, find_lagging_peer(c), 0);
        } else if (idle_ns > c->spin_ns) {
            int64_t left_ns = limit_ns - idle_ns + 1000000; /* slightly past the limit */
            sleep_until_readable(c, idle_ns, smaller(left_ns, LONGEST_SLEEP_NS));
        }
    }
    if (urgent) gate_end_urgent(c->gate);
    for (int i = 0; i < MAX_TRANSFERS && c->error; i++) {
        leave_gate(c, &c->transfers[i]); /* other channels share it */
    }
    return (int)c->error;
}

/* ---- what went wrong */

int64_t channel_bytes_left(const Channel *c) {
    const Transfer *sending = &c->transfers[c->sending % MAX_TRANSFERS];
    const Transfer *receiving = &c->transfers[c->receiving % MAX_TRANSFERS];
    int64_t left = 0;
    for (int peer = 0; peer < c->world; peer++) {
        const Block *out = &sending->send[peer];
        const Block *in = &receiving->receive[peer];
        if (c->sending < c->submitted) left += out->size - out->done;
        if (c->receiving < c->submitted) left += in->size - in->done;
    }
    for (int i = 0; i < c->staged_count; i++) {
        const StagedSlot *staged = &c->staged[(c->first_staged + i) % MAX_STAGED];
        for (int j = 0; j < staged->count; j++) {
            const Piece *piece = &staged->pieces[j];
            left += piece->size - (piece->sent > 0 ? piece->sent : 0);
        }
    }
    return left;
}

int channel_error(const Channel *c, int *peer, int64_t *cause) {
    *peer = c->error_peer;
    *cause = c->error_cause;
    return (int)c->error;
}
