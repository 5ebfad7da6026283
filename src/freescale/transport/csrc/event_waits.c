/* Polls an event of a GPU without Python's lock. */

#include <time.h>

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */

static double read_clock(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Asks `query`, which is cuEventQuery, until the event has happened, but for `seconds` at most.
   Returns its last answer. */
int poll_event(int (*query)(void *), void *event, double seconds) {
    double end = read_clock() + seconds;
    int answer;
    while ((answer = query(event)) == NOT_READY && read_clock() < end)
        ;
    return answer;
}
