/* Carries transfers in the thread that waits for them and without Python's lock.

   Between ranks of one machine: copies to the slots of a shared ring, tells the peers, copies from theirs. What Carried and Halves
   (channel.py, halves.py) do over a SharedWire, with the same messages: a rank that could not compile this talks to one that could.

       out   tensor -> slot of the ring -> message "these bytes" (16 bytes, Unix socket)
       in    message -> peer's slot -> tensor -> message "read" (1 byte)

   Between machines: streams (TCP), on which every part is 16 bytes of header and then its bytes. Slots only for tensors on a GPU.

       out   tensor -> slot of the ring -> stream
       in    stream -> slot of the inbox -> tensor

   Nothing here blocks but `channel_until`, which looks around for `awake` seconds after something has moved and then sleeps until a socket
   has something, in short naps where what it waits for has no socket. On CPU tensors copies are memcpy's; on a GPU the copy engine's,
   and events (of the driver) say when they are over. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CLOSED = 1, LATE = 2, SIZES = 3, DEVICE = 4, OUTSIDE = 5 };
enum { STAGED = 4, LANDING = 32, JOBS = 64, NOT_READY = 600, HEADER = 16 };
enum { LOW_WATER = 128 << 10 }; /* bytes of a stream that wake who waits: not every packet may interrupt the compute */

typedef struct { /* of libcuda; all zero where there is no GPU */
    int (*copy)(uint64_t to, uint64_t from, size_t bytes, void *stream);
    int (*record)(void *event, void *stream);
    int (*query)(void *event);
    int (*create)(void **event, unsigned flags);
    int (*destroy)(void *event);
    int (*use)(void *context);
    void *context;
} Driver;

typedef struct { /* urgent overtakes bulk: shared by the channels of a rank */
    int urgent;
    double moved, patience;
} Gate;

typedef struct {
    char *at;
    int64_t size, done; /* bytes; of them, those that were cut into pieces */
} Part;

typedef struct {
    Part *out, *in; /* by peer */
    int64_t largest;
    void *begun; /* event; what is sent is there, and what is received into is free */
    int urgent, host, ready, gated;
} Job;

typedef struct {
    int peer;
    char *at;
    int64_t size, sent; /* sent: from -HEADER, where a part begins on a stream */
    uint64_t header[2]; /* number of the transfer, bytes of the part */
} Piece;

typedef struct {
    void *event;
    int slot, pieces;
    Piece *piece;
} Filled;

typedef struct {
    void *event;
    int peer, host, slot; /* slot: of the inbox, or -1 */
    int64_t job;
} Landing;

typedef struct { /* what comes from streams before it is copied to a GPU; a piece of each peer at a time */
    char *memory, *taken; /* taken: by slot */
    int slots, *slot;     /* slot: by peer, or -1 */
    int64_t bytes, *have; /* bytes of a slot; have: by peer */
} Inbox;

typedef struct {
    int world, rank, slots;
    int64_t slot_bytes, together; /* pieces share a slot up to so many bytes */
    char *ring;
    int *out, *in; /* sockets, by peer */
    char **rings; /* as large as this rank's; NULL: a stream */
    int *stuck, *low; /* by peer: its stream takes no more now; bytes that wake */
    Inbox inbox;
    uint64_t *sent, *read, *goal; /* pieces, by peer; goal [slots, world]: as many must be read before the slot is free */
    char (*header)[HEADER];
    int *have; /* bytes of the next message of each peer */
    int64_t filled;
    int room; /* pieces of a slot */
    Filled staged[STAGED];
    int first_staged, staged_count;
    Landing landing[LANDING];
    int first_landing, landing_count;
    Job jobs[JOBS];
    int64_t submitted, sending, receiving; /* jobs, ever */
    int64_t hurried; /* jobs, ever, up to the last urgent one: those before it are in its way, and do not give way to it */
    int stopped;
    Gate *gate;
    Driver driver;
    void *streams[2];
    double awake;
    int error, peer;
    int64_t cause;
    struct pollfd *waiting;
} Channel;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static int fail(Channel *c, int error, int peer, int64_t cause) {
    if (!c->error) c->error = error, c->peer = peer, c->cause = cause;
    return 0;
}

Gate *gate_new(double patience) {
    Gate *gate = calloc(1, sizeof(Gate));
    if (gate) gate->patience = patience;
    return gate;
}

void gate_free(Gate *gate) { free(gate); }

static void gate_begin(Gate *gate) {
    gate->moved = now();
    __atomic_add_fetch(&gate->urgent, 1, __ATOMIC_ACQ_REL);
}

static void gate_end(Gate *gate) { __atomic_sub_fetch(&gate->urgent, 1, __ATOMIC_ACQ_REL); }

static int open_gate(Gate *gate, int urgent) {
    return urgent || !__atomic_load_n(&gate->urgent, __ATOMIC_ACQUIRE) || gate->moved + gate->patience <= now();
}

static int may_go(const Channel *c, const Job *job, int64_t number) {
    return number < c->hurried || open_gate(c->gate, job->urgent);
}

static void ended(Channel *c, Job *job) {
    if (job->gated) gate_end(c->gate);
    job->gated = 0;
}

/* ---- a channel */

void channel_free(Channel *c) {
    if (!c) return;
    if (c->driver.use) c->driver.use(c->driver.context);
    for (int i = 0; i < JOBS; i++) ended(c, &c->jobs[i]);
    for (int i = 0; i < STAGED; i++) {
        if (c->staged[i].event) c->driver.destroy(c->staged[i].event);
        free(c->staged[i].piece);
    }
    for (int i = 0; i < LANDING; i++)
        if (c->landing[i].event) c->driver.destroy(c->landing[i].event);
    for (int i = 0; i < JOBS; i++) free(c->jobs[i].out), free(c->jobs[i].in);
    free(c->out), free(c->in), free(c->rings), free(c->sent), free(c->read), free(c->goal), free(c->header), free(c->have), free(c->waiting);
    free(c->stuck), free(c->low), free(c->inbox.taken), free(c->inbox.slot), free(c->inbox.have);
    free(c);
}

Channel *channel_new(int world, int rank, char *ring, int slots, int64_t slot_bytes, int64_t together, char *inbox, int inbox_slots,
                     int64_t inbox_bytes, Gate *gate, double awake, const Driver *driver, void *out_stream, void *in_stream) {
    Channel *c = calloc(1, sizeof(Channel));
    if (!c) return NULL;
    c->world = world, c->rank = rank, c->ring = ring, c->slots = slots, c->slot_bytes = slot_bytes, c->together = together;
    c->gate = gate, c->awake = awake, c->streams[0] = out_stream, c->streams[1] = in_stream;
    if (driver) c->driver = *driver;
    c->out = calloc(world, sizeof(int)), c->in = calloc(world, sizeof(int)), c->rings = calloc(world, sizeof(char *));
    c->sent = calloc(world, 8), c->read = calloc(world, 8), c->goal = calloc((size_t)slots * world, 8);
    c->header = calloc(world, HEADER), c->have = calloc(world, sizeof(int)), c->waiting = calloc(2 * world, sizeof(struct pollfd));
    c->stuck = calloc(world, sizeof(int)), c->low = calloc(world, sizeof(int));
    c->inbox = (Inbox){inbox, calloc(inbox_slots + 1, 1), inbox_slots, calloc(world, sizeof(int)), inbox_bytes, calloc(world, 8)};
    int well = c->out && c->in && c->rings && c->sent && c->read && c->goal && c->header && c->have && c->waiting && c->stuck && c->low;
    well = well && c->inbox.taken && c->inbox.slot && c->inbox.have;
    for (int i = 0; i < world && well; i++) c->inbox.slot[i] = -1;
    c->room = world + together / 4096 + 8;
    for (int i = 0; i < STAGED && well; i++) well = (c->staged[i].piece = calloc(c->room, sizeof(Piece))) != NULL;
    for (int i = 0; i < JOBS && well; i++) {
        c->jobs[i].out = calloc(world, sizeof(Part)), c->jobs[i].in = calloc(world, sizeof(Part));
        well = c->jobs[i].out && c->jobs[i].in;
    }
    if (well && c->driver.copy) {
        enum { NO_TIMES = 2 };
        c->driver.use(c->driver.context);
        for (int i = 0; i < STAGED && well; i++) well = !c->driver.create(&c->staged[i].event, NO_TIMES);
        for (int i = 0; i < LANDING && well; i++) well = !c->driver.create(&c->landing[i].event, NO_TIMES);
    }
    if (!well) return channel_free(c), NULL;
    return c;
}

void channel_peer(Channel *c, int peer, int out, int in, char *ring) { c->out[peer] = out, c->in[peer] = in, c->rings[peer] = ring; }

/* ---- parts of both ways */

static int reached(Channel *c, void *event) {
    if (!event) return 1;
    int found = c->driver.query(event);
    if (found && found != NOT_READY) fail(c, DEVICE, c->rank, found);
    return !found;
}

static int begun(Channel *c, Job *job) {
    if (job->ready) return 1;
    if (!reached(c, job->begun)) return 0;
    job->ready = 1;
    if (job->urgent) { /* not while the device still computes it */
        job->gated = 1;
        gate_begin(c->gate);
    }
    return 1;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t next_piece(const Part *part, int64_t largest) { /* as `cut` in transfer.py: both sides cut alike */
    int64_t end = ((part->size + 3) / 4 + 4095) / 4096 * 4096, left = part->size - part->done;
    end = least(largest, end < 1 << 20 ? 1 << 20 : end);
    if (!part->done || left <= end) return least(left, end);
    return least(left - end, least(largest, 2 * end));
}

static void copy(Channel *c, Job *job, int way, char *to, const char *from, int64_t size) {
    if (job->host) {
        memcpy(to, from, size);
        return;
    }
    int found = c->driver.copy((uint64_t)to, (uint64_t)from, size, c->streams[way]);
    if (found) fail(c, DEVICE, c->rank, found);
}

static void record(Channel *c, Job *job, int way, void *event) {
    int found = job->host ? 0 : c->driver.record(event, c->streams[way]);
    if (found) fail(c, DEVICE, c->rank, found);
}

static void moved(Channel *c, const Job *job) {
    if (job->urgent) c->gate->moved = now();
}

/* ---- out */

static int slot_is_free(Channel *c, int slot) {
    int is = 1;
    for (int peer = 0; peer < c->world; peer++) {
        uint64_t goal = c->goal[(size_t)slot * c->world + peer];
        while (c->read[peer] < goal) {
            char answers[256]; /* no more than pieces were sent, whatever the peer says */
            ssize_t count = recv(c->out[peer], answers, least(sizeof answers, c->sent[peer] - c->read[peer]), MSG_DONTWAIT);
            if (count > 0) c->read[peer] += count;
            else if (count < 0 && errno == EINTR) continue;
            else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                is = 0;
                break;
            } else return fail(c, CLOSED, peer, count ? errno : 0);
        }
    }
    return is;
}

static int tell(Channel *c, Filled *filled, Piece *piece) {
    uint64_t message[2] = {(uint64_t)(piece->at - c->ring), (uint64_t)piece->size};
    ssize_t count;
    do count = send(c->out[piece->peer], message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (count < 0 && errno == EINTR);
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) { /* what is unread is bounded by the slots: only of a peer that lies */
        c->stuck[piece->peer] = 1;
        return 0;
    }
    if (count != sizeof message) return fail(c, CLOSED, piece->peer, count < 0 ? errno : 0);
    c->goal[(size_t)filled->slot * c->world + piece->peer] = ++c->sent[piece->peer];
    piece->sent = piece->size;
    return 1;
}

static int stream(Channel *c, Piece *piece) {
    int any = 0;
    while (piece->sent < piece->size) {
        int head = piece->sent < 0;
        struct iovec parts[2] = {{(char *)piece->header + HEADER + piece->sent, head ? -piece->sent : 0},
                                 {piece->at + (head ? 0 : piece->sent), piece->size - (head ? 0 : piece->sent)}};
        struct msghdr message = {.msg_iov = parts + !head, .msg_iovlen = 1 + head};
        ssize_t count = sendmsg(c->out[piece->peer], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count > 0) piece->sent += count, any = 1;
        else if (count < 0 && errno == EINTR) continue;
        else if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            c->stuck[piece->peer] = 1;
            return any;
        } else return fail(c, CLOSED, piece->peer, count ? errno : 0);
    }
    return 1;
}

/* Hands over what was copied, in order for each peer: one that takes no more does not hold up the others. Whether anything moved. */
static int post(Channel *c, Job *job) {
    int any = 0;
    memset(c->stuck, 0, c->world * sizeof(int));
    for (int i = 0; i < c->staged_count && !c->error; i++) {
        Filled *filled = &c->staged[(c->first_staged + i) % STAGED];
        if (!job->host && !reached(c, filled->event)) break;
        for (int j = 0; j < filled->pieces && !c->error; j++) {
            Piece *piece = &filled->piece[j];
            if (piece->sent == piece->size || c->stuck[piece->peer]) continue;
            if (c->rings[piece->peer]) any |= tell(c, filled, piece);
            else if (may_go(c, job, c->sending)) any |= stream(c, piece);
            else c->stuck[piece->peer] = 1;
        }
    }
    if (any) moved(c, job);
    return any;
}

static int is_posted(const Filled *filled) {
    for (int i = 0; i < filled->pieces; i++)
        if (filled->piece[i].sent < filled->piece[i].size) return 0;
    return 1;
}

/* Copies what fits to the next slot. Parts in the order of the ranks after this one, so that not all write to one. */
static int fill(Channel *c, Job *job) {
    int slot = c->filled % c->slots, any = 0;
    for (int i = 0; i < c->world; i++) any |= job->out[i].done < job->out[i].size;
    if (!any || c->staged_count == STAGED || !may_go(c, job, c->sending) || !slot_is_free(c, slot)) return 0;
    Filled *filled = &c->staged[(c->first_staged + c->staged_count) % STAGED];
    filled->slot = slot, filled->pieces = 0;
    int64_t used = 0;
    for (int distance = 1, full = 0; distance < c->world && !full; distance++) {
        int peer = (c->rank + distance) % c->world;
        Part *part = &job->out[peer];
        int streamed = !c->rings[peer];
        while (part->done < part->size) {
            int64_t size = next_piece(part, job->largest);
            if ((used && used + size > c->together) || filled->pieces == c->room) {
                full = 1;
                break;
            }
            char *at = c->ring + slot * c->slot_bytes + used;
            if (streamed && job->host) at = part->at + part->done; /* a stream takes any memory of the host */
            else copy(c, job, 0, at, part->at + part->done, size);
            int64_t before = streamed ? (part->done ? 0 : -HEADER) : -1;
            filled->piece[filled->pieces++] = (Piece){peer, at, size, before, {c->sending, part->size}};
            part->done += size;
            used += (size + 15) / 16 * 16; /* aligned for every dtype */
        }
    }
    record(c, job, 0, filled->event);
    c->staged_count++, c->filled++;
    return 1;
}

static int go_out(Channel *c) {
    if (c->sending == c->submitted || c->error) return 0;
    Job *job = &c->jobs[c->sending % JOBS];
    if (!begun(c, job)) return 0;
    int any = post(c, job);
    while (c->staged_count && is_posted(&c->staged[c->first_staged])) c->first_staged = (c->first_staged + 1) % STAGED, c->staged_count--;
    any |= fill(c, job);
    for (int peer = 0; peer < c->world; peer++)
        if (job->out[peer].done < job->out[peer].size) return any && !c->error;
    if (c->staged_count || c->error) return any && !c->error;
    ended(c, job);
    c->sending++;
    return 1;
}

/* ---- in */

/* Bytes that were there; 0 if none, or if it failed. */
static int64_t some(Channel *c, int peer, char *to, int64_t size) {
    for (;;) {
        ssize_t count = recv(c->in[peer], to, size, MSG_DONTWAIT);
        if (count > 0) return count;
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
        return fail(c, CLOSED, peer, count ? errno : 0);
    }
}

/* The next message, or the header of the next part. Whether it is there whole. */
static int header(Channel *c, int peer, uint64_t *message) {
    while (c->have[peer] < HEADER) {
        int64_t count = some(c, peer, c->header[peer] + c->have[peer], HEADER - c->have[peer]);
        if (!count) return 0;
        c->have[peer] += count;
    }
    memcpy(message, c->header[peer], HEADER);
    return 1;
}

static void lands(Channel *c, Job *job, int peer, int slot, const char *from, int64_t size) {
    Part *part = &job->in[peer];
    Landing *landing = &c->landing[(c->first_landing + c->landing_count) % LANDING];
    landing->peer = peer, landing->host = job->host, landing->slot = slot, landing->job = c->receiving;
    copy(c, job, 1, part->at + part->done, from, size);
    record(c, job, 1, landing->event);
    c->landing_count++;
    part->done += size;
    moved(c, job);
}

static int take(Channel *c, Job *job, int peer) { /* from a stream */
    Part *part = &job->in[peer];
    Inbox *inbox = &c->inbox;
    uint64_t message[2];
    if (!header(c, peer, message)) return 0;
    if ((int64_t)message[0] != c->receiving || (int64_t)message[1] != part->size) return fail(c, SIZES, peer, message[1]);
    int64_t left = part->size - part->done;
    if (job->host) {
        int64_t count = some(c, peer, part->at + part->done, left);
        part->done += count;
        if (part->done == part->size) c->have[peer] = 0;
        if (count) moved(c, job);
        return count > 0;
    }
    int slot = inbox->slot[peer];
    for (int i = 0; i < inbox->slots && slot < 0; i++)
        if (!inbox->taken[i]) slot = inbox->slot[peer] = i, inbox->taken[i] = 1, inbox->have[peer] = 0;
    if (slot < 0) return 0;
    int64_t whole = left < inbox->bytes ? left : inbox->bytes;
    int64_t count = some(c, peer, inbox->memory + slot * inbox->bytes + inbox->have[peer], whole - inbox->have[peer]);
    inbox->have[peer] += count;
    if (inbox->have[peer] < whole) return count > 0;
    lands(c, job, peer, slot, inbox->memory + slot * inbox->bytes, whole);
    inbox->slot[peer] = -1;
    if (part->done == part->size) c->have[peer] = 0;
    return 1;
}

static int land(Channel *c, Job *job, int peer) { /* from the ring of a rank of this machine */
    Part *part = &job->in[peer];
    uint64_t message[2];
    if (!header(c, peer, message)) return 0;
    int64_t size = next_piece(part, job->largest), end = c->slots * c->slot_bytes;
    if ((int64_t)message[1] != size) return fail(c, SIZES, peer, message[1]);
    if (size > end || message[0] > (uint64_t)(end - size)) return fail(c, OUTSIDE, peer, message[0]);
    c->have[peer] = 0;
    lands(c, job, peer, -1, c->rings[peer] + message[0], size);
    return 1;
}

static int settle(Channel *c) {
    int any = 0;
    while (c->landing_count) {
        Landing *landing = &c->landing[c->first_landing];
        if (!landing->host && !reached(c, landing->event)) break;
        ssize_t count = 0;
        if (landing->slot >= 0) c->inbox.taken[landing->slot] = 0;
        else do count = send(c->in[landing->peer], ".", 1, MSG_NOSIGNAL | MSG_DONTWAIT); /* a peer that has closed does not wait for it */
            while (count < 0 && errno == EINTR);
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break; /* it does not read what it is told */
        c->first_landing = (c->first_landing + 1) % LANDING, c->landing_count--;
        any = 1;
    }
    return any;
}

static int go_in(Channel *c) {
    int any = settle(c);
    if (c->receiving == c->submitted || c->error) return any;
    Job *job = &c->jobs[c->receiving % JOBS];
    if (!begun(c, job)) return any;
    int left = 0;
    for (int distance = 1; distance < c->world; distance++) {
        int peer = (c->rank - distance + c->world) % c->world;
        Part *part = &job->in[peer];
        while (part->done < part->size && c->landing_count < LANDING && may_go(c, job, c->receiving)) {
            if (!(c->rings[peer] ? land : take)(c, job, peer)) break;
            any = 1;
        }
        left |= part->done < part->size;
    }
    if (c->error) return 0;
    if (job->host) any |= settle(c);
    if (left) return any;
    c->receiving++;
    return 1;
}

/* ---- what Python calls */

/* Arrays by peer. Returns the job's number; -1 if there are too many under way. Sends what can be sent now. */
int64_t channel_submit(Channel *c, int urgent, int host, void *begun_event, int64_t largest, const uint64_t *out, const int64_t *out_size,
                       const uint64_t *in, const int64_t *in_size) {
    if (c->submitted - (c->sending < c->receiving ? c->sending : c->receiving) == JOBS) return -1;
    Job *job = &c->jobs[c->submitted % JOBS];
    Part *to = job->out, *from = job->in;
    for (int peer = 0; peer < c->world; peer++) {
        int other = peer != c->rank;
        to[peer] = (Part){(char *)out[peer], other ? out_size[peer] : 0, 0};
        from[peer] = (Part){(char *)in[peer], other ? in_size[peer] : 0, 0};
    }
    *job = (Job){to, from, largest, begun_event, urgent, host, 0, 0};
    int64_t number = c->submitted++;
    if (c->driver.use) c->driver.use(c->driver.context);
    if (urgent) c->hurried = c->submitted;
    for (int i = 0; i < STAGED && go_out(c); i++) {} /* not all of a large one: Python waits */
    return number;
}

/* All of it was sent, and what came is in its place and was acknowledged: a peer that still sends to others may wait for that slot,
   while this rank turns to something else. */
int channel_done(const Channel *c, int64_t number) {
    int copied = !c->landing_count || c->landing[c->first_landing].job > number;
    return c->sending > number && c->receiving > number && copied;
}

/* Of a transfer that does not move: a rank that it waits for. */
static int lagging(const Channel *c) {
    const Job *in = &c->jobs[c->receiving % JOBS], *out = &c->jobs[c->sending % JOBS];
    for (int i = 0; i < c->world && c->receiving < c->submitted; i++)
        if (in->in[i].done < in->in[i].size) return i;
    for (int i = 0; i < c->staged_count; i++) {
        const Filled *filled = &c->staged[(c->first_staged + i) % STAGED];
        for (int j = 0; j < filled->pieces; j++)
            if (filled->piece[j].sent < filled->piece[j].size) return filled->piece[j].peer;
    }
    for (int i = 0; i < c->world && c->sending < c->submitted; i++)
        if (out->out[i].done < out->out[i].size) return i;
    return c->landing_count ? c->landing[c->first_landing].peer : c->rank;
}

static void wake_at(Channel *c, int peer, int64_t left) {
    int low = left < LOW_WATER ? left : LOW_WATER;
    if (c->low[peer] != low && !setsockopt(c->in[peer], SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low)) c->low[peer] = low;
}

/* Sleeps until a socket has something for the first transfer of either way: at most `longest`, and only a nap where what comes next
   has no socket (an event of the GPU, the gate, a slot of the inbox). */
static void sleep_until(Channel *c, double idle, double longest) {
    int count = 0, nap = c->landing_count > 0;
    if (c->receiving < c->submitted) {
        Job *job = &c->jobs[c->receiving % JOBS];
        int open = job->ready && may_go(c, job, c->receiving), room_for_more = 0;
        for (int i = 0; i < c->inbox.slots; i++) room_for_more |= !c->inbox.taken[i];
        nap |= !open;
        for (int i = 0; i < c->world && open && c->landing_count < LANDING; i++) {
            Part *part = &job->in[i];
            if (part->done == part->size) continue;
            if (!c->rings[i] && !job->host && c->inbox.slot[i] < 0 && !room_for_more) continue; /* it may not be read now */
            int64_t left = part->size - part->done - (job->host || c->inbox.slot[i] < 0 ? 0 : c->inbox.have[i]);
            int64_t room = job->host || c->rings[i] ? left : c->inbox.bytes - (c->inbox.slot[i] < 0 ? 0 : c->inbox.have[i]);
            if (!c->rings[i]) wake_at(c, i, (left < room ? left : room) + HEADER - c->have[i]);
            c->waiting[count++] = (struct pollfd){c->in[i], POLLIN, 0};
        }
    }
    if (c->sending < c->submitted) {
        Job *job = &c->jobs[c->sending % JOBS];
        int open = job->ready && may_go(c, job, c->sending), left = 0, lacking = 0;
        for (int i = 0; i < c->world; i++) left |= job->out[i].done < job->out[i].size;
        left &= c->staged_count < STAGED;
        for (int i = 0; i < c->world && open; i++) {
            int answers = left && c->rings[i] && c->read[i] < c->goal[(size_t)(c->filled % c->slots) * c->world + i];
            lacking |= answers;
            if (answers) c->waiting[count++] = (struct pollfd){c->out[i], POLLIN, 0};
            else if (!c->rings[i] && c->stuck[i]) c->waiting[count++] = (struct pollfd){c->out[i], POLLOUT, 0};
        }
        nap |= !open || (left && !lacking); /* the gate has opened, or the event has come, since it was looked at */
        for (int i = 0; i < c->staged_count && !job->host; i++) nap |= !reached(c, c->staged[(c->first_staged + i) % STAGED].event);
    }
    double seconds = !nap ? longest : idle < 0.002 ? 30e-6 : 200e-6;
    struct timespec limit = {(time_t)seconds, (long)(1e9 * (seconds - (time_t)seconds))};
    ppoll(c->waiting, count, &limit, NULL);
}

/* Of this thread: a nap of 30 us is not one of 80, and on a core that computes it runs soon after it was woken. Its share of the core
   stays the same. */
static void be_prompt(void) {
    static __thread int is;
    struct { uint32_t size, policy; uint64_t flags; int32_t nice; uint32_t priority; uint64_t slice, deadline, period; } own;
    if (is) return;
    is = 1;
    prctl(PR_SET_TIMERSLACK, 1L);
    if (syscall(SYS_sched_getattr, 0, &own, sizeof own, 0) || own.policy) return;
    own.slice = 100000; /* ns; from Linux 6.12, before that ignored */
    syscall(SYS_sched_setattr, 0, &own, 0);
}

/* Whoever carries leaves, also one that waits for the GPU. */
void channel_stop(Channel *c) { __atomic_store_n(&c->stopped, 1, __ATOMIC_RELEASE); }

int channel_until(Channel *c, int64_t number, double seconds) {
    be_prompt();
    if (c->driver.use) c->driver.use(c->driver.context);
    int urgent = c->jobs[number % JOBS].urgent && !channel_done(c, number);
    if (urgent) gate_begin(c->gate); /* somebody waits for it */
    double last = now();
    while (!channel_done(c, number) && !c->error) {
        int out = go_out(c), in = go_in(c);
        if (out || in) {
            last = now();
            continue;
        }
        if (__atomic_load_n(&c->stopped, __ATOMIC_ACQUIRE)) fail(c, CLOSED, c->rank, 0);
        double idle = now() - last;
        if (idle > seconds) fail(c, LATE, lagging(c), 0);
        else if (idle > c->awake) sleep_until(c, idle, seconds - idle < 0.1 ? seconds - idle + 0.001 : 0.1);
    }
    if (urgent) gate_end(c->gate);
    for (int i = 0; i < JOBS && c->error; i++) ended(c, &c->jobs[i]); /* others share the gate */
    return c->error;
}

/* Bytes that the first unfinished transfer still has to send and to receive. */
int64_t channel_left(const Channel *c) {
    int64_t left = 0;
    for (int i = 0; i < c->world; i++) {
        if (c->sending < c->submitted) left += c->jobs[c->sending % JOBS].out[i].size - c->jobs[c->sending % JOBS].out[i].done;
        if (c->receiving < c->submitted) left += c->jobs[c->receiving % JOBS].in[i].size - c->jobs[c->receiving % JOBS].in[i].done;
    }
    for (int i = 0; i < c->staged_count; i++) {
        const Filled *filled = &c->staged[(c->first_staged + i) % STAGED];
        for (int j = 0; j < filled->pieces; j++) left += filled->piece[j].size - (filled->piece[j].sent > 0 ? filled->piece[j].sent : 0);
    }
    return left;
}

int channel_error(const Channel *c, int *peer, int64_t *cause) {
    *peer = c->peer, *cause = c->cause;
    return c->error;
}
