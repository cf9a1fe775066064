/* io_threads.c - the back end that runs everywhere: some threads per drive, each with one pread in flight.
 *
 * Owns these threads and the condition on which they sleep. Chosen where the kernel refuses io_uring, as in many
 * containers, or where it is asked for.
 */
#include "error.h"
#include "io_drive.h"
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct sleepers {
    pthread_cond_t work;
} sleepers;

static void read_request(cl_drive *d, cl_request *r) {
    int64_t result;
    do {
        ssize_t got = pread(cl_files_fd(d, cl_files_choose(d, r)), r->data + r->done, r->bytes - r->done,
                            (off_t)(r->offset + r->done));
        result = got < 0 ? -errno : got;
    } while (!cl_requests_advance(r, result));
}

static void *reader(void *argument) {
    cl_drive *d = argument;
    sleepers *s = d->state;
    cl_request r;
    pthread_mutex_lock(&d->mutex);
    while (!d->stop) {
        if (!cl_requests_next(d, &r)) {
            pthread_cond_wait(&s->work, &d->mutex);
            continue;
        }
        pthread_mutex_unlock(&d->mutex);
        read_request(d, &r);
        pthread_mutex_lock(&d->mutex);
        cl_requests_arrived(d, &r);
        pthread_mutex_unlock(&d->mutex);
        cl_requests_settle(d, &r);
        pthread_mutex_lock(&d->mutex);
    }
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

static void wake(cl_drive *d, uint32_t requests) {
    sleepers *s = d->state;
    if (requests == 1 && !d->stop) pthread_cond_signal(&s->work);
    else pthread_cond_broadcast(&s->work);
}

static int open_sleepers(cl_drive *d, cl_error *err) {
    sleepers *s = calloc(1, sizeof *s);
    if (!s) return cl_fail(err, CL_NOMEM, "no memory for the reading threads of stripe %u", d->stripe);
    pthread_cond_init(&s->work, NULL);
    d->state = s;
    d->depth = d->io->threads ? d->io->threads : CL_DEFAULT_THREADS;
    return CL_OK;
}

static int start(cl_drive *d, uint8_t *memory, uint64_t bytes, cl_error *err) {
    (void)memory;
    (void)bytes;
    int code = CL_OK;
    for (uint32_t i = 0; i < d->depth && !code; i++) code = cl_drive_spawn(d, reader, err);
    return code;
}

static void close_sleepers(cl_drive *d) {
    sleepers *s = d->state;
    pthread_cond_destroy(&s->work);
    free(s);
}

static void files_changed(cl_drive *d) { (void)d; }

const cl_backend cl_backend_threads = {CL_IO_THREADS, open_sleepers, start, wake, close_sleepers, files_changed};
