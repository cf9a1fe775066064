/* io.c - reads expert records from the stripe files.
 *
 * Owns the stripes' file descriptors and, per stripe, a queue and the threads that empty it with pread. A record
 * counts as read when every extent's CRC-32C has been compared, which the reading thread does itself. Refuses to
 * interpret what it reads. An error names stripe, file, offset, layer and expert, and belongs to that record alone.
 *
 * A stripe has two descriptors. The direct one (O_DIRECT) is for what is aligned, which is everything until a short
 * read leaves an odd remainder; the buffered one finishes such remainders, and does it all where O_DIRECT is off.
 */
#define _GNU_SOURCE /* O_DIRECT, statx */
#include "io.h"
#include "clock.h"
#include "error.h"
#include "format.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_THREADS 2
#define MOST_BYTES_PER_CALL (1u << 30) /* Linux transfers at most 2 GiB - 4 KiB per call */

typedef struct queue {
    cl_task *head, **tail;
} queue;

typedef struct drive {
    cl_io *io;
    char *path;
    uint32_t stripe;
    int direct_fd; /* -1: not used */
    int buffered_fd;
    pthread_mutex_t mutex;
    pthread_cond_t work;
    queue queues[CL_PRIORITIES];
    uint32_t busy; /* threads that read */
} drive;

struct cl_io {
    drive *drives;
    uint32_t n_drives;
    pthread_t *threads;
    uint32_t n_threads;
    uint32_t direct_active;
    _Atomic uint32_t stop;
    _Atomic uint32_t events;
    cl_counters *counters;
};

/* ---- one read ---- */

/* Returns bytes read, 0 at the end of the file, -1 with errno. */
static ssize_t pread_once(int fd, uint8_t *data, uint64_t bytes, uint64_t offset) {
    if (bytes > MOST_BYTES_PER_CALL) bytes = MOST_BYTES_PER_CALL;
    ssize_t got;
    do got = pread(fd, data, bytes, (off_t)offset);
    while (got < 0 && errno == EINTR);
    return got;
}

static int is_aligned(const uint8_t *data, uint64_t bytes, uint64_t offset) {
    return (((uintptr_t)data | bytes | offset) & (CL_ALIGN - 1)) == 0;
}

/* direct_fd may be -1. */
static int read_all(int direct_fd, int buffered_fd, uint8_t *data, uint64_t bytes, uint64_t offset, uint64_t *done) {
    int retried = 0;
    *done = 0;
    while (*done < bytes) {
        uint8_t *at = data + *done;
        uint64_t left = bytes - *done, from = offset + *done;
        int fd = direct_fd >= 0 && is_aligned(at, left, from) ? direct_fd : buffered_fd;
        ssize_t got = pread_once(fd, at, left, from);
        if (got == 0) return ENODATA;
        if (got < 0) {
            if (errno != EIO || retried) return errno;
            retried = 1;
            continue;
        }
        *done += (uint64_t)got;
    }
    return 0;
}

int cl_pread_all(int fd, void *data, uint64_t bytes, uint64_t offset, uint64_t *done) {
    return read_all(-1, fd, data, bytes, offset, done);
}

/* ---- opening a stripe ---- */

static int header_error(const drive *d, cl_error *err, const char *what) {
    return cl_fail(err, CL_CORRUPT, "stripe %u (%s): %s", d->stripe, d->path, what);
}

static int check_header(const drive *d, const cl_stripe_header *h, const cl_stripe_header *first, uint32_t stripes,
                        uint64_t file_bytes, cl_error *err) {
    if (memcmp(h->magic, CL_STRIPE_MAGIC, sizeof h->magic) != 0)
        return header_error(d, err, "not a stripe file: magic bytes are missing at offset 0");
    if (cl_crc32c(0, h, offsetof(cl_stripe_header, header_crc32c)) != h->header_crc32c)
        return header_error(d, err, "the header at offset 0 fails its checksum");
    if (h->version != CL_FORMAT_VERSION)
        return cl_fail(err, CL_UNSUPPORTED, "stripe %u (%s): format version %u, this build reads %d", d->stripe,
                       d->path, h->version, CL_FORMAT_VERSION);
    if (h->stripe != d->stripe || h->stripes != stripes)
        return cl_fail(err, CL_CORRUPT, "stripe %u (%s): the file is stripe %u of %u, expected %u of %u", d->stripe,
                       d->path, h->stripe, h->stripes, d->stripe, stripes);
    if (memcmp(h->uuid, first->uuid, sizeof h->uuid) != 0)
        return header_error(d, err, "belongs to another pack than stripe 0 (UUIDs differ)");
    if (h->file_bytes > file_bytes)
        return cl_fail(err, CL_CORRUPT, "stripe %u (%s): the file has %llu bytes, its header says %llu", d->stripe,
                       d->path, (unsigned long long)file_bytes, (unsigned long long)h->file_bytes);
    return CL_OK;
}

static int read_header(const drive *d, int fd, cl_stripe_header *header, cl_error *err) {
    uint8_t block[2 * CL_ALIGN];
    uint8_t *aligned = (uint8_t *)(((uintptr_t)block + CL_ALIGN - 1) & ~(uintptr_t)(CL_ALIGN - 1));
    uint64_t done;
    int failed = read_all(fd, fd, aligned, CL_ALIGN, 0, &done);
    if (failed == ENODATA)
        return cl_fail(err, CL_CORRUPT, "stripe %u (%s): the file ends at offset %llu, inside its header", d->stripe,
                       d->path, (unsigned long long)done);
    if (failed)
        return cl_fail(err, CL_IO, "stripe %u (%s): reading the header at offset 0 failed: %s (errno %d)", d->stripe,
                       d->path, strerror(failed), failed);
    memcpy(header, aligned, sizeof *header);
    return CL_OK;
}

/* Why O_DIRECT reads at multiples of CL_ALIGN cannot work on this file, or NULL. On success *fd is open. */
static const char *open_direct(const drive *d, int *fd) {
    *fd = open(d->path, O_RDONLY | O_CLOEXEC | O_DIRECT);
    if (*fd < 0) return strerror(errno);
    const char *why = NULL;
#ifdef STATX_DIOALIGN
    struct statx s;
    if (statx(*fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) == 0 && (s.stx_mask & STATX_DIOALIGN)) {
        if (s.stx_dio_offset_align == 0) why = "the file system does not support it for this file";
        else if (s.stx_dio_offset_align > CL_ALIGN || s.stx_dio_mem_align > CL_ALIGN)
            why = "the file system asks for an alignment above 4096 bytes";
    }
#endif
    cl_stripe_header header;
    cl_error probe = {0};
    if (!why && read_header(d, *fd, &header, &probe) == CL_IO) why = "a first read was refused";
    if (why) {
        close(*fd);
        *fd = -1;
    }
    return why;
}

static int open_drive(drive *d, const cl_stripe *stripe, uint32_t n, int32_t direct, cl_stripe_header *first,
                      cl_error *err) {
    d->path = strdup(stripe->path);
    if (!d->path) return cl_fail(err, CL_NOMEM, "no memory for the path of stripe %u", d->stripe);
    d->buffered_fd = open(d->path, O_RDONLY | O_CLOEXEC);
    if (d->buffered_fd < 0)
        return cl_fail(err, CL_IO, "stripe %u (%s): open failed: %s (errno %d)", d->stripe, d->path, strerror(errno),
                       errno);
    struct stat s;
    if (fstat(d->buffered_fd, &s) != 0 || !S_ISREG(s.st_mode))
        return cl_fail(err, CL_IO, "stripe %u (%s): not a regular file", d->stripe, d->path);
    if ((uint64_t)s.st_size < stripe->bytes)
        return cl_fail(err, CL_CORRUPT, "stripe %u (%s): the file has %llu bytes, the container needs %llu", d->stripe,
                       d->path, (unsigned long long)s.st_size, (unsigned long long)stripe->bytes);
    cl_stripe_header header;
    int code = read_header(d, d->buffered_fd, &header, err);
    if (code) return code;
    if (d->stripe == 0) *first = header;
    code = check_header(d, &header, first, n, (uint64_t)s.st_size, err);
    if (code || direct == CL_DIRECT_OFF) return code;
    const char *why = open_direct(d, &d->direct_fd);
    if (why && direct == CL_DIRECT_ON)
        return cl_fail(err, CL_UNSUPPORTED, "stripe %u (%s): O_DIRECT was asked for and does not work: %s", d->stripe,
                       d->path, why);
    return CL_OK;
}

/* ---- the reading threads ---- */

static void push(queue *q, cl_task *task) {
    task->next = NULL;
    *q->tail = task;
    q->tail = &task->next;
}

static cl_task *pop(queue *q) {
    cl_task *task = q->head;
    if (!task) return NULL;
    q->head = task->next;
    if (!q->head) q->tail = &q->head;
    return task;
}

/* The caller, a thread of the drive, holds its mutex. */
static cl_task *pop_first(drive *d) {
    cl_task *task = pop(&d->queues[CL_READ_URGENT]);
    if (!task) task = pop(&d->queues[CL_READ_AHEAD]);
    if (!task && d->busy == 0) task = pop(&d->queues[CL_READ_IDLE]);
    return task;
}

static cl_task *next_task(drive *d, int was_busy) {
    pthread_mutex_lock(&d->mutex);
    cl_task *task = NULL;
    if (was_busy) d->busy--;
    while (!atomic_load(&d->io->stop)) {
        task = pop_first(d);
        if (task) break;
        pthread_cond_wait(&d->work, &d->mutex);
    }
    d->busy += task != NULL;
    pthread_mutex_unlock(&d->mutex);
    return task;
}

static int remove_from(queue *q, cl_task *task) {
    for (cl_task **at = &q->head; *at; at = &(*at)->next) {
        if (*at != task) continue;
        *at = task->next;
        if (!*at) q->tail = at;
        return 1;
    }
    return 0;
}

static void fail_read(const drive *d, cl_task *task, int failed, uint64_t done) {
    cl_read *r = task->read;
    const cl_extent *e = task->extent;
    if (atomic_exchange(&r->failed, 1)) return;
    uint64_t at = e->file_offset + done;
    if (failed == ENODATA)
        cl_fail(&r->error, CL_CORRUPT,
                "layer %u expert %u: stripe %u (%s) ends at offset %llu, inside an extent of %llu "
                "bytes at %llu",
                r->layer, r->expert, d->stripe, d->path, (unsigned long long)at, (unsigned long long)e->bytes,
                (unsigned long long)e->file_offset);
    else if (failed > 0)
        cl_fail(&r->error, CL_IO, "layer %u expert %u: reading stripe %u (%s) at offset %llu failed: %s (errno %d)",
                r->layer, r->expert, d->stripe, d->path, (unsigned long long)at, strerror(failed), failed);
    else
        cl_fail(&r->error, CL_CORRUPT,
                "layer %u expert %u: %llu bytes at offset %llu of stripe %u (%s) fail their "
                "checksum",
                r->layer, r->expert, (unsigned long long)e->bytes, (unsigned long long)e->file_offset, d->stripe,
                d->path);
}

static void do_task(drive *d, cl_task *task) {
    cl_counters *c = d->io->counters;
    const cl_extent *e = task->extent;
    uint8_t *data = task->read->data + e->record_offset;
    uint64_t done;
    int failed = read_all(d->direct_fd, d->buffered_fd, data, e->bytes, e->file_offset, &done);
    cl_count(&c->expert_bytes, done);
    if (failed) {
        cl_count(&c->read_errors, 1);
        fail_read(d, task, failed, done);
    } else if (cl_crc32c(0, data, e->bytes) != e->crc32c) {
        cl_count(&c->checksum_errors, 1);
        fail_read(d, task, 0, done);
    }
    cl_count(&c->heartbeat, 1);
}

static void *reader(void *argument) {
    drive *d = argument;
    int was_busy = 0;
    for (cl_task *task; (task = next_task(d, was_busy));) {
        was_busy = 1;
        do_task(d, task);
        /* After the last decrement the record belongs to the store again: do not touch it. */
        if (atomic_fetch_sub(&task->read->pending, 1) == 1) {
            atomic_fetch_add(&d->io->events, 1);
            cl_futex_wake_all(&d->io->events);
        }
    }
    return NULL;
}

void cl_io_submit(cl_io *io, cl_read *read, const cl_extent *extents, uint32_t n, cl_priority priority) {
    read->n_tasks = n;
    read->priority = priority;
    atomic_store(&read->failed, 0);
    atomic_store(&read->pending, n);
    for (uint32_t i = 0; i < n; i++) {
        drive *d = &io->drives[extents[i].stripe];
        read->tasks[i] = (cl_task){NULL, read, &extents[i]};
        pthread_mutex_lock(&d->mutex);
        push(&d->queues[priority], &read->tasks[i]);
        pthread_cond_signal(&d->work);
        pthread_mutex_unlock(&d->mutex);
    }
}

void cl_io_promote(cl_io *io, cl_read *read) {
    cl_priority from = read->priority;
    if (from == CL_READ_URGENT || atomic_load(&read->pending) == 0) return;
    read->priority = CL_READ_URGENT;
    for (uint32_t i = 0; i < read->n_tasks; i++) {
        cl_task *task = &read->tasks[i];
        drive *d = &io->drives[task->extent->stripe];
        pthread_mutex_lock(&d->mutex);
        if (remove_from(&d->queues[from], task)) {
            push(&d->queues[CL_READ_URGENT], task);
            pthread_cond_signal(&d->work);
        }
        pthread_mutex_unlock(&d->mutex);
    }
}

uint32_t cl_io_events(const cl_io *io) { return atomic_load(&((cl_io *)io)->events); }

void cl_io_wait(cl_io *io, uint32_t seen, uint64_t timeout_us) { cl_futex_wait(&io->events, seen, timeout_us); }

uint32_t cl_io_direct_active(const cl_io *io) { return io->direct_active; }

uint64_t cl_io_buffered_stripes(const cl_io *io) {
    uint64_t mask = 0;
    for (uint32_t i = 0; i < io->n_drives && i < 64; i++)
        if (io->drives[i].direct_fd < 0) mask |= (uint64_t)1 << i;
    return mask;
}

/* ---- opening and closing ---- */

static int start_readers(cl_io *io, uint32_t threads, cl_error *err) {
    io->threads = calloc((size_t)io->n_drives * threads, sizeof *io->threads);
    if (!io->threads) return cl_fail(err, CL_NOMEM, "no memory for the reading threads");
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int code = CL_OK;
    for (uint32_t i = 0; i < io->n_drives * threads && !code; i++) {
        if (pthread_create(&io->threads[i], NULL, reader, &io->drives[i / threads]) == 0) io->n_threads++;
        else code = cl_fail(err, CL_NOMEM, "could not start reading thread %u of stripe %u", i % threads, i / threads);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return code;
}

static int allocate(cl_io **out, uint32_t n, cl_counters *counters, cl_error *err) {
    cl_io *io = calloc(1, sizeof *io);
    if (io) io->drives = calloc(n ? n : 1, sizeof *io->drives);
    if (!io || !io->drives) {
        free(io);
        return cl_fail(err, CL_NOMEM, "no memory for %u stripes", n);
    }
    io->counters = counters;
    io->n_drives = n;
    for (uint32_t i = 0; i < n; i++) {
        drive *d = &io->drives[i];
        d->io = io;
        d->stripe = i;
        d->direct_fd = d->buffered_fd = -1;
        for (int p = 0; p < CL_PRIORITIES; p++) d->queues[p].tail = &d->queues[p].head;
        pthread_mutex_init(&d->mutex, NULL);
        pthread_cond_init(&d->work, NULL);
    }
    *out = io;
    return CL_OK;
}

int cl_io_open(cl_io **out, const cl_stripe *stripes, uint32_t n, uint32_t threads, int32_t direct,
               cl_counters *counters, cl_error *err) {
    *out = NULL;
    cl_io *io = NULL;
    int code = allocate(&io, n, counters, err);
    if (code) return code;
    cl_stripe_header first;
    memset(&first, 0, sizeof first);
    io->direct_active = n > 0;
    for (uint32_t i = 0; i < n && !code; i++) {
        code = open_drive(&io->drives[i], &stripes[i], n, direct, &first, err);
        if (io->drives[i].direct_fd < 0) io->direct_active = 0;
    }
    if (!code) code = start_readers(io, threads ? threads : DEFAULT_THREADS, err);
    if (code) cl_io_close(io);
    else *out = io;
    return code;
}

void cl_io_close(cl_io *io) {
    if (!io) return;
    atomic_store(&io->stop, 1);
    for (uint32_t i = 0; i < io->n_drives; i++) {
        pthread_mutex_lock(&io->drives[i].mutex);
        pthread_cond_broadcast(&io->drives[i].work);
        pthread_mutex_unlock(&io->drives[i].mutex);
    }
    for (uint32_t i = 0; i < io->n_threads; i++) pthread_join(io->threads[i], NULL);
    for (uint32_t i = 0; i < io->n_drives; i++) {
        drive *d = &io->drives[i];
        if (d->direct_fd >= 0) close(d->direct_fd);
        if (d->buffered_fd >= 0) close(d->buffered_fd);
        pthread_mutex_destroy(&d->mutex);
        pthread_cond_destroy(&d->work);
        free(d->path);
    }
    free(io->threads);
    free(io->drives);
    free(io);
}
