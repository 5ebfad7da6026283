/* Persistent threads that help a caller with work in pieces. The caller works on pieces, too, and
   returns when all are done. A thread that wakes up late, because the cores are busy, finds nothing
   left, and nobody waits for it. */

#pragma once
#include <pthread.h>
#include <signal.h>
#include <stdint.h>

#define MOST_HELPERS 63

typedef struct Job {
    void (*work)(void *, int64_t);
    void *about;
    int64_t pieces, next; /* the next free piece */
    int64_t helpers;      /* helpers that may still join */
    int64_t working;      /* helpers at work */
    struct Job *after;
} Job;

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, ended;
    Job *first;
    int64_t threads;
    int follows_forks;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .begun = PTHREAD_COND_INITIALIZER,
          .ended = PTHREAD_COND_INITIALIZER};

static void take_pieces(Job *job) {
    int64_t piece;
    while ((piece = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->pieces)
        job->work(job->about, piece);
}

static void *help_others(void *nothing) {
    sigset_t all; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, 0);
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        Job *job = pool.first;
        while (job && !job->helpers)
            job = job->after;
        if (!job) {
            pthread_cond_wait(&pool.begun, &pool.lock);
            continue;
        }
        job->helpers--, job->working++;
        pthread_mutex_unlock(&pool.lock);
        take_pieces(job);
        pthread_mutex_lock(&pool.lock);
        if (!--job->working)
            pthread_cond_broadcast(&pool.ended);
    }
    return nothing;
}

/* A forked process has neither the threads nor their jobs. */
static void lock_pool(void) { pthread_mutex_lock(&pool.lock); }
static void unlock_pool(void) { pthread_mutex_unlock(&pool.lock); }
static void forget_pool(void) {
    pthread_mutex_init(&pool.lock, 0);
    pthread_cond_init(&pool.begun, 0);
    pthread_cond_init(&pool.ended, 0);
    pool.first = 0, pool.threads = 0;
}

/* Starts threads up to `wanted`, if possible. The caller holds the lock. */
static void start_helpers(int64_t wanted) {
    if (!pool.follows_forks)
        pool.follows_forks = !pthread_atfork(lock_pool, unlock_pool, forget_pool);
    while (pool.follows_forks && pool.threads < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, 0, help_others, 0))
            return;
        pthread_detach(thread);
        pool.threads++;
    }
}

/* Calls work(about, piece) for all pieces, in up to `threads` threads including the caller's. */
static void share_work(void (*work)(void *, int64_t), void *about, int64_t pieces,
                       int64_t threads) {
    int64_t helpers = (threads < pieces ? threads : pieces) - 1;
    helpers = helpers < MOST_HELPERS ? helpers : MOST_HELPERS;
    Job job = {.work = work, .about = about, .pieces = pieces, .helpers = helpers};
    if (helpers > 0) {
        pthread_mutex_lock(&pool.lock);
        start_helpers(helpers);
        job.after = pool.first, pool.first = &job;
        for (int64_t i = 0; i < helpers; i++)
            pthread_cond_signal(&pool.begun);
        pthread_mutex_unlock(&pool.lock);
    }
    take_pieces(&job);
    if (helpers > 0) {
        pthread_mutex_lock(&pool.lock);
        Job **place = &pool.first;
        while (*place != &job)
            place = &(*place)->after;
        *place = job.after;
        while (job.working)
            pthread_cond_wait(&pool.ended, &pool.lock);
        pthread_mutex_unlock(&pool.lock);
    }
}
