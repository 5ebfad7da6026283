/* The interface of the engine: what bindings.py calls.

   A channel carries transfers in the order in which they are submitted, which is the same on every
   rank. One thread at a time may be inside a channel (engine.py holds a lock around every call);
   only channel_stop may be called at any time. A gate is shared by the channels of a rank and may
   be used by all their threads at once. */

#pragma once

#include <stddef.h>
#include <stdint.h>

/* Why a channel failed. `ErrorCode` in bindings.py has the same names and values. */
typedef enum {
    ERROR_NONE = 0,
    ERROR_CLOSED = 1,        /* the connection was closed; cause: errno, or 0 */
    ERROR_TIMED_OUT = 2,     /* nothing moved for too long */
    ERROR_SIZE_MISMATCH = 3, /* cause: the size that the peer named */
    ERROR_DEVICE = 4,        /* a call of the CUDA driver failed; cause: its CUresult */
    ERROR_OUTSIDE_RING = 5,  /* cause: the offset that the peer named */
} ErrorCode;

/* Entry points of libcuda and torch's context; all NULL without a GPU. Owned by the caller
   of channel_new, which copies it; `Driver` in bindings.py has the same fields. */
typedef struct {
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void *stream);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
    int (*create)(void **event, unsigned flags);
    int (*destroy)(void *event);
    int (*use)(void *context);
    void *context;
} Driver;

typedef struct Gate Gate;
typedef struct Channel Channel;

/* `patience`, in seconds: bulk traffic gives way to urgent traffic that moved less than so long
   ago. NULL if there is no memory. */
Gate *gate_new(double patience);

/* After the last channel that uses it. */
void gate_free(Gate *gate);

/* `ring`: `slots` slots of `slot_bytes` each, which peers of this machine can read. Pieces share a
   slot up to `together` bytes. `inbox`: what streams fill before it is copied to a GPU.
   `spin_seconds`: how long channel_wait polls before it sleeps. `driver`: NULL without a GPU. The
   memory stays the caller's. Returns NULL if memory or an event of the GPU cannot be allocated. */
Channel *channel_new(int world, int rank, char *ring, int slots, int64_t slot_bytes,
                     int64_t together, char *inbox, int inbox_slots, int64_t inbox_bytes,
                     Gate *gate, double spin_seconds, const Driver *driver, void *send_stream,
                     void *receive_stream);

void channel_free(Channel *c);

/* `ring`: the peer's, mapped here, of the same size as this rank's; NULL if the sockets are a TCP
   stream. The sockets stay the caller's. */
void channel_set_peer(Channel *c, int peer, int send_socket, int receive_socket, char *ring);

/* Submits a transfer and sends what can be sent at once. `send`, `receive`: addresses by peer, with
   their sizes in bytes; the memory stays valid until the transfer is done. For CPU tensors
   (`on_host`), this rank's own part is copied as well. `inputs_ready`: an event that precedes the
   transfer, or NULL. Returns the transfer's number; -1 if too many are under way. */
int64_t channel_submit(Channel *c, int urgent, int on_host, void *inputs_ready,
                       int64_t largest_piece, const uint64_t *send, const int64_t *send_sizes,
                       const uint64_t *receive, const int64_t *receive_sizes);

/* Drives transfers, in the calling thread, until this one is done; fails if nothing moves for
   `seconds`. Returns an ErrorCode. */
int channel_wait(Channel *c, int64_t number, double seconds);

/* Whether all of it was sent, and what arrived is in place and acknowledged. */
int channel_is_done(const Channel *c, int64_t number);

/* Makes a thread leave channel_wait. From any thread. */
void channel_stop(Channel *c);

/* Bytes that the first unfinished transfer still has to send and to receive. */
int64_t channel_bytes_left(const Channel *c);

/* The first error, the rank it concerns and its cause. */
int channel_error(const Channel *c, int *peer, int64_t *cause);
