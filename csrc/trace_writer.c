/* trace_writer.c - writes the blocks of a recording on a thread of its own.
 *
 * Owns the file, its thread, and a ring of blocks between the step that fills them and the drive. A step never waits for
 * the drive: where a drive is slower than the model records, the ring is full in the end, and the recording stops there.
 * Nothing is left out in the middle: what is in the file is all that was recorded up to some block, so that a replay of
 * it is exact, and without the last block's mark it says itself that it was cut off. A write that fails stops the
 * recording as well. The first reason is kept for who asks. Refuses to try again: there is one recording for a file.
 */
#include "trace_writer.h"
#include "error.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct block {
    uint64_t bytes;
    uint8_t data[CL_WHOLE_BLOCK_BYTES];
} block;

struct cl_trace_writer {
    int fd;
    char *path;
    pthread_t thread;
    pthread_mutex_t mutex; /* for all that follows but the contents of blocks, which have one owner at a time */
    pthread_cond_t handed_over;
    uint32_t first, waiting; /* of the blocks that were handed over; the one behind them is being filled */
    uint32_t is_ending;
    cl_error error; /* CL_OK, or the first reason why it has stopped */
    _Atomic int has_stopped;
    block blocks[CL_WRITER_BLOCKS];
};

/* ---- the file ---- */

static int write_all(const cl_trace_writer *w, const uint8_t *data, uint64_t bytes, cl_error *err) {
    for (uint64_t done = 0; done < bytes;) {
        ssize_t got = write(w->fd, data + done, bytes - done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            return cl_fail(err, CL_IO, "%s: the trace cannot be written: %s; recording has stopped", w->path,
                           strerror(got < 0 ? errno : EIO));
        done += (uint64_t)got;
    }
    return CL_OK;
}

/* The mutex is held. */
static void stop_for(cl_trace_writer *w, const cl_error *why) {
    if (!w->error.code) w->error = *why;
    atomic_store(&w->has_stopped, 1);
}

/* ---- its thread ---- */

/* Blocks that came before a full ring are written; behind a failed write nothing is. */
static void *write_blocks(void *argument) {
    cl_trace_writer *w = argument;
    cl_error error = {0};
    pthread_mutex_lock(&w->mutex);
    for (;;) {
        while (!w->waiting && !w->is_ending) pthread_cond_wait(&w->handed_over, &w->mutex);
        if (!w->waiting) break;
        const block *next = &w->blocks[w->first];
        pthread_mutex_unlock(&w->mutex);
        if (!error.code) write_all(w, next->data, next->bytes, &error);
        pthread_mutex_lock(&w->mutex);
        if (error.code) stop_for(w, &error);
        w->first = (w->first + 1) % CL_WRITER_BLOCKS;
        w->waiting--;
    }
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

static int start_thread(cl_trace_writer *w) {
    /* Signals belong to the process's own threads; SIGXFSZ, too: the write fails and says why. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int failed = pthread_create(&w->thread, NULL, write_blocks, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return failed;
}

/* ---- the step's side ---- */

static uint32_t at_hand(const cl_trace_writer *w) { return (w->first + w->waiting) % CL_WRITER_BLOCKS; }

uint8_t *cl_trace_writer_block(cl_trace_writer *w) {
    pthread_mutex_lock(&w->mutex);
    uint8_t *data = w->blocks[at_hand(w)].data;
    pthread_mutex_unlock(&w->mutex);
    return data;
}

void cl_trace_writer_put(cl_trace_writer *w, uint64_t bytes) {
    cl_error error = {0};
    pthread_mutex_lock(&w->mutex);
    if (!atomic_load(&w->has_stopped)) {
        if (w->waiting + 1 < CL_WRITER_BLOCKS) {
            w->blocks[at_hand(w)].bytes = bytes;
            w->waiting++;
            pthread_cond_signal(&w->handed_over);
        } else {
            cl_fail(&error, CL_IO,
                    "%s: the trace cannot be written as fast as the model runs: %u KiB wait for the drive; recording "
                    "has stopped",
                    w->path, (uint32_t)(w->waiting * CL_BLOCK_BYTES / 1024));
            stop_for(w, &error);
        }
    }
    pthread_mutex_unlock(&w->mutex);
}

int cl_trace_writer_has_stopped(const cl_trace_writer *w) {
    return atomic_load(&((cl_trace_writer *)w)->has_stopped); /* an atomic load wants it without const */
}

int cl_trace_writer_state(cl_trace_writer *w, cl_error *err) {
    pthread_mutex_lock(&w->mutex);
    int code = w->error.code;
    if (code && err) *err = w->error;
    pthread_mutex_unlock(&w->mutex);
    return code;
}

/* ---- its life ---- */

static void free_writer(cl_trace_writer *w) {
    if (w->fd >= 0) close(w->fd);
    pthread_cond_destroy(&w->handed_over);
    pthread_mutex_destroy(&w->mutex);
    free(w->path);
    free(w);
}

static int begin_file(cl_trace_writer *w, const char *path, const uint8_t *head, uint64_t bytes, cl_error *err) {
    w->path = strdup(path);
    if (!w->path) return cl_fail(err, CL_NOMEM, "no memory for a trace");
    w->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (w->fd < 0) return cl_fail(err, CL_IO, "%s: the trace cannot be created: %s", path, strerror(errno));
    int code = write_all(w, head, bytes, err);
    int failed = code ? 0 : start_thread(w);
    if (failed) code = cl_fail(err, CL_NOMEM, "%s: no thread to write the trace: %s", path, strerror(failed));
    if (code) unlink(path);
    return code;
}

int cl_trace_writer_open(cl_trace_writer **out, const char *path, const uint8_t *head, uint64_t bytes, cl_error *err) {
    *out = NULL;
    cl_trace_writer *w = calloc(1, sizeof *w);
    if (!w) return cl_fail(err, CL_NOMEM, "no memory for a trace");
    w->fd = -1;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->handed_over, NULL);
    int code = begin_file(w, path, head, bytes, err);
    if (code) free_writer(w);
    else *out = w;
    return code;
}

/* After the thread has ended. */
static void end_file(cl_trace_writer *w, uint64_t bytes) {
    if (write_all(w, w->blocks[at_hand(w)].data, bytes, &w->error)) return;
    int fd = w->fd, failed = fsync(fd);
    w->fd = -1;
    if (close(fd) || failed)
        cl_fail(&w->error, CL_IO, "%s: the trace may not be on the drive: %s", w->path, strerror(errno));
}

int cl_trace_writer_close(cl_trace_writer *w, uint64_t bytes, cl_error *err) {
    pthread_mutex_lock(&w->mutex);
    w->is_ending = 1;
    pthread_cond_signal(&w->handed_over);
    pthread_mutex_unlock(&w->mutex);
    pthread_join(w->thread, NULL);
    if (!w->error.code) end_file(w, bytes);
    int code = cl_trace_writer_state(w, err);
    free_writer(w);
    return code;
}
