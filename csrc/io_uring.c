/* io_uring.c - the back end for kernels that allow io_uring: per drive one ring and one thread.
 *
 * Owns the ring, the requests in it and the thread that sleeps in the kernel until one is complete or somebody writes
 * to an event counter which is read through the same ring. Descriptors and the records' memory are registered, so a
 * read pins no pages and looks nothing up. The thread first gives the drive its next requests and then checks what has
 * arrived. One thread per drive, because a submission may block inside a file system and must hold up no other drive,
 * and because one core's checksums are worth two fast drives at most.
 */
#include "error.h"
#include "io_drive.h"
#include "uring.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#define MOST_BUFFERS 16384             /* and as many of them */
#define WAKE UINT64_MAX                /* user data of the read of the event counter; else the number of a slot */

typedef struct ring_state {
    cl_ring ring;
    int wake_fd;
    uint64_t wake_count; /* what is read from it */
    uint32_t wake_armed; /* that read is on its way */
    uint32_t woken;      /* somebody has written, and the thread has not looked yet; guarded by the drive's mutex */
    uint32_t files_registered;
    uint8_t *memory; /* what is registered, in buffers of CL_RING_BUFFER_BYTES */
    uint64_t memory_bytes;
    cl_request *slots;   /* [depth] in the ring, or free */
    uint32_t *free;      /* [n_free] numbers of free slots */
    uint32_t n_free;
    cl_request *arrived; /* [2 * depth] complete and not yet checked: n_arrived from first_arrived on, round the end */
    uint32_t first_arrived, n_arrived;
    uint32_t n_new; /* the last of them, of which the drive does not know yet */
} ring_state;

static void list_fds(const cl_drive *d, int fds[CL_DRIVE_FILES]) {
    for (int i = 0; i < CL_DRIVE_FILES; i++) fds[i] = cl_files_fd(d, i);
}

/* ---- into the ring ---- */

/* The registered buffer in which a whole read lies, or -1: beside the memory, or across two buffers. */
static int buffer_of(const ring_state *s, const uint8_t *data, uint64_t bytes) {
    if (data < s->memory || data >= s->memory + s->memory_bytes) return -1;
    return cl_ring_buffer_of(s->memory_bytes, (uint64_t)(data - s->memory), bytes);
}

/* Prepares the read of what is left of a slot's request. There is room: the ring has an entry per slot and one more. */
static void prepare_read(cl_drive *d, uint32_t slot) {
    ring_state *s = d->state;
    const cl_request *r = &s->slots[slot];
    struct io_uring_sqe *sqe = cl_ring_prepare(&s->ring);
    int file = cl_files_choose(d, r), buffer = buffer_of(s, r->data + r->done, r->bytes - r->done);
    sqe->opcode = buffer >= 0 ? IORING_OP_READ_FIXED : IORING_OP_READ;
    sqe->buf_index = (uint16_t)(buffer >= 0 ? buffer : 0);
    sqe->flags = s->files_registered ? IOSQE_FIXED_FILE : 0;
    sqe->fd = s->files_registered ? file : cl_files_fd(d, file);
    sqe->addr = (uintptr_t)(r->data + r->done);
    sqe->len = (uint32_t)(r->bytes - r->done);
    sqe->off = r->offset + r->done;
    sqe->user_data = slot;
}

static void arm_wake(ring_state *s) {
    if (s->wake_armed) return;
    struct io_uring_sqe *sqe = cl_ring_prepare(&s->ring);
    sqe->opcode = IORING_OP_READ;
    sqe->fd = s->wake_fd;
    sqe->addr = (uintptr_t)&s->wake_count;
    sqe->len = sizeof s->wake_count;
    sqe->user_data = WAKE;
    s->wake_armed = 1;
}

/* ---- out of the ring ---- */

static void collect(cl_drive *d) {
    ring_state *s = d->state;
    uint64_t slot;
    int32_t result;
    while (cl_ring_next(&s->ring, &slot, &result)) {
        if (slot == WAKE) {
            s->wake_armed = 0;
        } else if (!cl_requests_advance(&s->slots[slot], result)) {
            prepare_read(d, (uint32_t)slot);
        } else {
            s->arrived[(s->first_arrived + s->n_arrived++) % (2 * d->depth)] = s->slots[slot];
            s->n_new++;
            s->free[s->n_free++] = (uint32_t)slot;
        }
    }
}

/* Accounts for what has arrived and prepares what comes next; 0 if the drive is to stop and nothing is in flight. */
static int take_work(cl_drive *d) {
    ring_state *s = d->state;
    pthread_mutex_lock(&d->mutex);
    s->woken = 0;
    for (; s->n_new; s->n_new--)
        cl_requests_arrived(d, &s->arrived[(s->first_arrived + s->n_arrived - s->n_new) % (2 * d->depth)]);
    /* Whatever is in the ring must find room where it arrives. */
    while (s->n_free && s->n_arrived + (d->depth - s->n_free) < 2 * d->depth &&
           cl_requests_next(d, &s->slots[s->free[s->n_free - 1]]))
        prepare_read(d, s->free[--s->n_free]);
    int go_on = !d->stop || d->in_flight;
    pthread_mutex_unlock(&d->mutex);
    return go_on;
}

/* One at a time: before the next is checked, the drive gets new work for what has arrived meanwhile. */
static void settle_one(cl_drive *d) {
    ring_state *s = d->state;
    if (!s->n_arrived) return;
    cl_requests_settle(d, &s->arrived[s->first_arrived]);
    s->first_arrived = (s->first_arrived + 1) % (2 * d->depth);
    s->n_arrived--;
}

static void enter(cl_drive *d) {
    ring_state *s = d->state;
    cl_ring_mode mode = s->n_arrived == 0 ? CL_RING_WAIT : s->n_arrived == 1 ? CL_RING_SUBMIT : CL_RING_LOOK;
    int failed = cl_ring_enter(&s->ring, mode);
    if (!failed || failed == EINTR) return;
    /* The kernel is out of something for the moment; what is prepared stays so. */
    if (failed != EAGAIN && failed != EBUSY) {
        pthread_mutex_lock(&d->mutex);
        cl_drive_note(d, CL_NOTE_BACKEND, "io_uring_enter fails: %s (errno %d)", strerror(failed), failed);
        pthread_mutex_unlock(&d->mutex);
    }
    nanosleep(&(struct timespec){0, 1000000}, NULL);
}

static void *ring_thread(void *argument) {
    cl_drive *d = argument;
    for (;;) {
        collect(d);
        int go_on = take_work(d);
        if (go_on) {
            arm_wake(d->state);
            enter(d);
        }
        settle_one(d);
        if (!go_on && ((ring_state *)d->state)->n_arrived == 0) return NULL;
    }
}

/* ---- the back end ---- */

static void wake(cl_drive *d, uint32_t requests) {
    ring_state *s = d->state;
    uint64_t one = 1;
    (void)requests;
    if (s->woken || (!d->stop && d->in_flight >= d->depth)) return; /* it will look by itself */
    s->woken = 1;
    while (write(s->wake_fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

static void close_state(cl_drive *d) {
    ring_state *s = d->state;
    if (s->ring.fd >= 0) cl_ring_close(&s->ring);
    if (s->wake_fd >= 0) close(s->wake_fd);
    free(s->slots);
    free(s->free);
    free(s->arrived);
    free(s);
    d->state = NULL;
}

static ring_state *new_state(uint32_t depth) {
    ring_state *s = calloc(1, sizeof *s);
    if (!s) return NULL;
    s->ring.fd = s->wake_fd = -1;
    s->slots = calloc(depth, sizeof *s->slots);
    s->free = calloc(depth, sizeof *s->free);
    s->arrived = calloc((size_t)2 * depth, sizeof *s->arrived);
    while (s->free && s->n_free < depth) {
        s->free[s->n_free] = depth - 1 - s->n_free;
        s->n_free++;
    }
    return s;
}

static int open_ring(cl_drive *d, cl_error *err) {
    uint32_t depth = d->io->depth ? d->io->depth : CL_DEFAULT_DEPTH;
    int fds[CL_DRIVE_FILES];
    ring_state *s = new_state(depth);
    d->state = s;
    if (!s || !s->slots || !s->free || !s->arrived) {
        if (s) close_state(d);
        return cl_fail(err, CL_NOMEM, "no memory for the ring of stripe %u", d->stripe);
    }
    int failed = cl_ring_open(&s->ring, depth + 1);
    if (!failed) s->wake_fd = eventfd(0, EFD_CLOEXEC);
    if (!failed && s->wake_fd < 0) failed = errno;
    if (failed) {
        close_state(d);
        return cl_fail(err, CL_UNSUPPORTED, "io_uring is refused: %s (errno %d)", strerror(failed), failed);
    }
    list_fds(d, fds);
    s->files_registered = cl_ring_register_files(&s->ring, fds, CL_DRIVE_FILES) == 0;
    d->depth = depth;
    return CL_OK;
}

static void register_memory(cl_drive *d, uint8_t *memory, uint64_t bytes) {
    ring_state *s = d->state;
    uint64_t n = (bytes + CL_RING_BUFFER_BYTES - 1) / CL_RING_BUFFER_BYTES;
    struct iovec *buffers = n && n <= MOST_BUFFERS ? calloc(n, sizeof *buffers) : NULL;
    int failed = ENOMEM;
    for (uint64_t i = 0; buffers && i < n; i++) {
        uint64_t at = i * CL_RING_BUFFER_BYTES, left = bytes - at;
        buffers[i] = (struct iovec){memory + at, left < CL_RING_BUFFER_BYTES ? left : CL_RING_BUFFER_BYTES};
    }
    if (buffers) failed = cl_ring_register_buffers(&s->ring, buffers, (uint32_t)n);
    free(buffers);
    if (failed) {
        cl_drive_note(d, CL_NOTE_MEMORY, "registered buffers are refused: %s (errno %d)%s", strerror(failed), failed,
                      failed == ENOMEM ? ", RLIMIT_MEMLOCK may be too low" : "");
        return;
    }
    s->memory = memory;
    s->memory_bytes = bytes;
}

static int start(cl_drive *d, uint8_t *memory, uint64_t bytes, cl_error *err) {
    if (bytes) register_memory(d, memory, bytes);
    return cl_drive_spawn(d, ring_thread, err);
}

static void files_changed(cl_drive *d) {
    ring_state *s = d->state;
    int fds[CL_DRIVE_FILES];
    list_fds(d, fds);
    if (s->files_registered) s->files_registered = cl_ring_update_files(&s->ring, fds, CL_DRIVE_FILES) == 0;
}

const cl_backend cl_backend_uring = {CL_IO_URING, open_ring, start, wake, close_state, files_changed};
