/* io.c - the I/O engine's face: reads expert records from the stripe files.
 *
 * Owns the drives, one per stripe, and the choice of the back end that moves the bytes. A record is cut where its
 * extents lie, each extent goes to the queue of its drive, and the record is complete when all have been read and
 * their CRC-32C compared, which the I/O threads do. Refuses to interpret what it reads. An error names stripe, file,
 * offset, layer and expert, and belongs to that record alone. Who waits sleeps on a count of completed records.
 */
#include "io.h"
#include "clock.h"
#include "error.h"
#include "io_drive.h"
#include <signal.h>
#include <stdlib.h>
#include <string.h>

/* ---- reads ---- */

void cl_io_submit(cl_io *io, cl_read *read, const cl_extent *extents, uint32_t n, cl_priority priority) {
    read->n_tasks = n;
    read->priority = priority;
    atomic_store(&read->failed, 0);
    atomic_store(&read->pending, n);
    for (uint32_t i = 0; i < n; i++) {
        cl_drive *d = &io->drives[extents[i].stripe];
        cl_task *task = &read->tasks[i];
        uint8_t *verified = read->verified ? read->verified + i : NULL;
        pthread_mutex_lock(&d->mutex);
        *task = (cl_task){.read = read, .extent = &extents[i], .verified = verified, .priority = priority};
        cl_requests_queue(d, task);
        d->backend->wake(d, cl_requests_of(task));
        pthread_mutex_unlock(&d->mutex);
    }
}

void cl_io_promote(cl_io *io, cl_read *read) {
    if (read->priority == CL_READ_URGENT || atomic_load(&read->pending) == 0) return;
    read->priority = CL_READ_URGENT;
    for (uint32_t i = 0; i < read->n_tasks; i++) {
        cl_task *task = &read->tasks[i];
        cl_drive *d = &io->drives[task->extent->stripe];
        pthread_mutex_lock(&d->mutex);
        cl_requests_promote(d, task);
        if (task->queued) d->backend->wake(d, cl_requests_of(task));
        pthread_mutex_unlock(&d->mutex);
    }
}

uint32_t cl_io_events(const cl_io *io) { return atomic_load(&((cl_io *)io)->events); }

void cl_io_wait(cl_io *io, uint32_t seen, uint64_t timeout_us) { cl_futex_wait(&io->events, seen, timeout_us); }

/* ---- what it tells ---- */

static int is_direct(cl_drive *d) {
    pthread_mutex_lock(&d->mutex);
    int direct = d->file.direct_fd >= 0;
    pthread_mutex_unlock(&d->mutex);
    return direct;
}

uint32_t cl_io_direct_active(const cl_io *io) {
    uint32_t active = io->n_drives > 0;
    for (uint32_t i = 0; i < io->n_drives; i++) active &= (uint32_t)is_direct(&io->drives[i]);
    return active;
}

uint64_t cl_io_buffered_stripes(const cl_io *io) {
    uint64_t mask = 0;
    for (uint32_t i = 0; i < io->n_drives && i < 64; i++)
        if (!is_direct(&io->drives[i])) mask |= (uint64_t)1 << i;
    return mask;
}

uint32_t cl_io_stats(cl_io *io, cl_drive_stats *out, uint32_t capacity) {
    for (uint32_t i = 0; i < io->n_drives && i < capacity; i++) cl_drive_stats_of(&io->drives[i], &out[i]);
    return io->n_drives;
}

/* ---- opening, reopening and closing ---- */

int cl_drive_spawn(cl_drive *d, void *(*body)(void *), cl_error *err) {
    sigset_t all, old;
    pthread_t *threads = realloc(d->threads, (d->n_threads + 1) * sizeof *threads);
    if (!threads) return cl_fail(err, CL_NOMEM, "no memory for an I/O thread of stripe %u", d->stripe);
    d->threads = threads;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&threads[d->n_threads], NULL, body, d);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (failed)
        return cl_fail(err, CL_NOMEM, "could not start I/O thread %u of stripe %u: %s", d->n_threads, d->stripe,
                       strerror(failed));
    d->n_threads++;
    return CL_OK;
}

static int open_backends(cl_io *io, const cl_backend *backend, cl_error *err) {
    for (uint32_t i = 0; i < io->n_drives; i++) {
        cl_drive *d = &io->drives[i];
        d->backend = backend;
        int code = backend->open(d, err);
        if (!code) continue;
        d->backend = NULL;
        while (i-- > 0) {
            backend->close(&io->drives[i]);
            io->drives[i].backend = NULL;
        }
        return code;
    }
    return CL_OK;
}

static int choose_backend(cl_io *io, int32_t wanted, cl_error *err) {
    if (wanted == CL_IO_THREADS) return open_backends(io, &cl_backend_threads, err);
    cl_error refusal = {0};
    int code = open_backends(io, &cl_backend_uring, &refusal);
    if (!code) return CL_OK;
    if (wanted == CL_IO_URING) return cl_fail(err, code, "option io_backend: %s", refusal.text);
    code = open_backends(io, &cl_backend_threads, err);
    if (code) return code;
    for (uint32_t i = 0; i < io->n_drives; i++) cl_drive_note(&io->drives[i], CL_NOTE_BACKEND, "%s", refusal.text);
    return CL_OK;
}

static cl_io *allocate(const cl_io_options *o, cl_counters *counters) {
    cl_io *io = calloc(1, sizeof *io);
    if (io) io->drives = calloc(o->n_stripes ? o->n_stripes : 1, sizeof *io->drives);
    if (!io || !io->drives) {
        free(io);
        return NULL;
    }
    io->counters = counters;
    io->n_drives = o->n_stripes;
    io->threads = o->threads;
    io->depth = o->depth;
    io->direct = o->direct;
    io->verify = o->verify;
    io->bare = o->bare;
    for (uint32_t i = 0; i < o->n_stripes; i++) {
        cl_drive *d = &io->drives[i];
        d->io = io;
        d->stripe = i;
        d->file = d->mirror = (cl_file){.direct_fd = -1, .buffered_fd = -1};
        pthread_mutex_init(&d->mutex, NULL);
        pthread_cond_init(&d->idle, NULL);
    }
    return io;
}

int cl_io_open(cl_io **out, const cl_io_options *options, cl_counters *counters, cl_error *err) {
    *out = NULL;
    cl_io *io = allocate(options, counters);
    if (!io) return cl_fail(err, CL_NOMEM, "no memory for %u stripes", options->n_stripes);
    int code = CL_OK;
    for (uint32_t i = 0; i < io->n_drives && !code; i++)
        code = cl_files_open(&io->drives[i], &options->stripes[i], err);
    if (!code) code = choose_backend(io, options->backend, err);
    if (code) cl_io_close(io);
    else *out = io;
    return code;
}

int cl_io_start(cl_io *io, uint8_t *memory, uint64_t bytes, cl_error *err) {
    int code = CL_OK;
    for (uint32_t i = 0; i < io->n_drives && !code; i++)
        code = io->drives[i].backend->start(&io->drives[i], memory, bytes, err);
    return code;
}

int cl_io_reopen(cl_io *io, cl_error *err) {
    int code = cl_ok(err);
    for (uint32_t i = 0; i < io->n_drives; i++) {
        int failed = cl_files_reopen(&io->drives[i], code ? NULL : err);
        if (!code) code = failed;
    }
    return code;
}

void cl_io_forget_verified(cl_io *io, uint8_t *verified, uint64_t n) {
    for (uint32_t i = 0; i < io->n_drives; i++) pthread_mutex_lock(&io->drives[i].mutex);
    memset(verified, 0, n);
    for (uint32_t i = io->n_drives; i-- > 0;) pthread_mutex_unlock(&io->drives[i].mutex);
}

static void close_drive(cl_drive *d) {
    for (uint32_t i = 0; i < d->n_threads; i++) pthread_join(d->threads[i], NULL);
    if (d->backend) d->backend->close(d);
    cl_files_close(d);
    pthread_mutex_destroy(&d->mutex);
    pthread_cond_destroy(&d->idle);
    free(d->threads);
}

void cl_io_close(cl_io *io) {
    if (!io) return;
    for (uint32_t i = 0; i < io->n_drives; i++) {
        cl_drive *d = &io->drives[i];
        pthread_mutex_lock(&d->mutex);
        d->stop = 1;
        if (d->backend) d->backend->wake(d, d->depth);
        pthread_mutex_unlock(&d->mutex);
    }
    for (uint32_t i = 0; i < io->n_drives; i++) close_drive(&io->drives[i]);
    free(io->drives);
    free(io);
}
