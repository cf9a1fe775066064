/* pool.c - the compute threads and how work is handed to them.
 *
 * Owns the worker threads. A job is cut into pieces that threads take from one atomic counter, so that a thread that
 * loses its core costs one piece and not half the job. Between jobs a worker spins for a bounded moment (the next job
 * of a step follows within microseconds) and then sleeps on a futex. Refuses to spin while anybody waits for a drive.
 *
 * A worker that wakes late is not waited for: it enters a job only through the gate, which the caller closes as soon
 * as all pieces are taken; then only the workers inside are waited for.
 */
#define _GNU_SOURCE /* affinity mask */
#include "pool.h"
#include "clock.h"
#include "error.h"
#include "kernels.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define SPIN_US 60u
#define GATE_OPEN 0x80000000u

struct cl_pool {
    uint32_t threads;
    uint32_t started;
    pthread_t *handles;

    _Atomic uint32_t generation; /* bumped per job; idle workers sleep on it */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t gate; /* GATE_OPEN | workers inside the job; the caller sleeps on it */
    _Atomic uint32_t resting;
    _Atomic uint32_t stop;

    _Atomic uint64_t next; /* first piece that nobody took */
    uint64_t n, piece;
    cl_pool_work work;
    void *context;
};

typedef struct worker_start {
    cl_pool *pool;
    uint32_t thread;
} worker_start;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spins until *word != value or the moment is over; 1 if it changed. */
static int spin_while(cl_pool *pool, _Atomic uint32_t *word, uint32_t value) {
    uint64_t end = cl_now_us() + SPIN_US;
    do {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != value) return 1;
            relax();
        }
    } while (!atomic_load_explicit(&pool->resting, memory_order_relaxed) && cl_now_us() < end);
    return 0;
}

static void take_pieces(cl_pool *pool, uint32_t thread) {
    uint64_t n = pool->n, piece = pool->piece;
    for (;;) {
        uint64_t begin = atomic_fetch_add_explicit(&pool->next, piece, memory_order_relaxed);
        if (begin >= n) return;
        pool->work(pool->context, begin, n - begin < piece ? n : begin + piece, thread);
    }
}

static void join_job(cl_pool *pool, uint32_t thread) {
    uint32_t gate = atomic_load(&pool->gate);
    while (gate & GATE_OPEN) {
        if (!atomic_compare_exchange_weak(&pool->gate, &gate, gate + 1)) continue;
        take_pieces(pool, thread);
        if (atomic_fetch_sub(&pool->gate, 1) == 1) cl_futex_wake_all(&pool->gate);
        return;
    }
}

static void *worker(void *argument) {
    worker_start start = *(worker_start *)argument;
    free(argument);
    cl_pool *pool = start.pool;
    cl_kernels_thread_init();
    uint32_t seen = 0;
    while (!atomic_load(&pool->stop)) {
        if (!spin_while(pool, &pool->generation, seen)) {
            atomic_fetch_add(&pool->sleepers, 1);
            while (atomic_load(&pool->generation) == seen) cl_futex_wait(&pool->generation, seen, 3600000000u);
            atomic_fetch_sub(&pool->sleepers, 1);
        }
        seen = atomic_load(&pool->generation);
        join_job(pool, start.thread);
    }
    return NULL;
}

static void wake_workers(cl_pool *pool) {
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleepers)) cl_futex_wake_all(&pool->generation);
}

void cl_pool_run(cl_pool *pool, uint64_t n, uint64_t piece, cl_pool_work work, void *context) {
    if (n == 0) return;
    if (piece == 0) piece = 1;
    if (pool->threads == 1 || n <= piece) {
        work(context, 0, n, 0);
        return;
    }
    pool->n = n;
    pool->piece = piece;
    pool->work = work;
    pool->context = context;
    atomic_store(&pool->next, 0);
    atomic_store(&pool->resting, 0);
    atomic_store(&pool->gate, GATE_OPEN);
    wake_workers(pool);
    take_pieces(pool, 0);
    uint32_t inside = atomic_fetch_and(&pool->gate, ~GATE_OPEN) & ~GATE_OPEN;
    while (inside) {
        if (!spin_while(pool, &pool->gate, inside)) cl_futex_wait(&pool->gate, inside, 1000000u);
        inside = atomic_load(&pool->gate);
    }
}

void cl_pool_rest(cl_pool *pool) { atomic_store(&pool->resting, 1); }

uint32_t cl_pool_threads(const cl_pool *pool) { return pool->threads; }

uint32_t cl_pool_default_threads(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return (uint32_t)CPU_COUNT(&set);
    long cores = sysconf(_SC_NPROCESSORS_ONLN); /* more cores than cpu_set_t has bits */
    return cores > 0 ? (uint32_t)cores : 1;
}

static int start_worker(cl_pool *pool, uint32_t thread) {
    worker_start *start = malloc(sizeof *start);
    if (!start) return -1;
    *start = (worker_start){pool, thread};
    if (pthread_create(&pool->handles[thread - 1], NULL, worker, start) != 0) {
        free(start);
        return -1;
    }
    pool->started++;
    return 0;
}

int cl_pool_create(cl_pool **out, uint32_t threads, cl_error *err) {
    *out = NULL;
    cl_pool *pool = calloc(1, sizeof *pool);
    if (pool) pool->handles = calloc(threads, sizeof *pool->handles);
    if (!pool || !pool->handles) {
        free(pool);
        return cl_fail(err, CL_NOMEM, "no memory for %u compute threads", threads);
    }
    pool->threads = threads;
    /* Signals belong to the process's own threads; ours would only have their system calls interrupted. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = 0;
    for (uint32_t t = 1; t < threads && !failed; t++) failed = start_worker(pool, t);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed) {
        uint32_t started = pool->started;
        cl_pool_free(pool);
        return cl_fail(err, CL_NOMEM, "could not start compute thread %u of %u", started + 2, threads);
    }
    *out = pool;
    return CL_OK;
}

void cl_pool_free(cl_pool *pool) {
    if (!pool) return;
    atomic_store(&pool->stop, 1);
    atomic_fetch_add(&pool->generation, 1);
    cl_futex_wake_all(&pool->generation);
    for (uint32_t t = 0; t < pool->started; t++) pthread_join(pool->handles[t], NULL);
    free(pool->handles);
    free(pool);
}
