/* io_drive.h - inside the I/O engine: drives, requests, and what a back end has to do.
 *
 * A drive is a stripe file with its mirror, three queues of extents (tasks) and one back end that reads. A back end
 * takes requests from the drive, reads them, and gives them back: io_requests.c decides what is read, checks what came
 * and what follows from a failure; io_threads.c and io_uring.c only move bytes.
 */
#ifndef COLIBRI_IO_DRIVE_H
#define COLIBRI_IO_DRIVE_H
#include "io.h"
#include "format.h"
#include <pthread.h>
#include <sys/types.h>

#define CL_DEFAULT_THREADS 4
#define CL_DEFAULT_DEPTH 4
#define CL_LEAST_REQUEST (256u << 10) /* extents are cut into requests, as many as the drive takes at once, but */
#define CL_MOST_REQUEST (2u << 20)    /* neither smaller nor larger than this */
#define CL_MOST_IDLE_REQUEST (512u << 10) /* of reads that others may have to wait for */
#define CL_BAD_CHECKSUM (-1)        /* beside errno values */
#define CL_MOST_INTERRUPTIONS 1000  /* of one request, EINTR and EAGAIN, before they count as a failure */

/* A file with two descriptors. The direct one (O_DIRECT) is for what is aligned, which is everything until a short
 * read leaves an odd remainder; the buffered one finishes such remainders, and does it all where O_DIRECT is off. */
typedef struct cl_file {
    char *path; /* NULL: there is none */
    int direct_fd, buffered_fd; /* -1: not open */
    dev_t device;
    ino_t inode;
} cl_file;

/* Descriptors of a drive, as back ends number them. */
enum { CL_STRIPE_DIRECT, CL_STRIPE_BUFFERED, CL_MIRROR_DIRECT, CL_MIRROR_BUFFERED, CL_DRIVE_FILES };

/* A piece of an extent on its way. */
typedef struct cl_request {
    cl_task *task;
    uint8_t *data;
    uint64_t offset, bytes; /* in the file */
    uint64_t done;          /* bytes that are there */
    uint64_t started_us;
    uint32_t idle; /* of priority CL_READ_IDLE when it was handed out */
    uint32_t interruptions;
    int32_t failed; /* errno; ENODATA: the file ends here */
} cl_request;

/* Latencies in buckets of 1/8 of an octave. */
#define CL_LATENCY_BUCKETS 320
typedef struct cl_latencies {
    _Atomic uint64_t count[CL_LATENCY_BUCKETS];
} cl_latencies;

typedef struct cl_drive_counters {
    _Atomic uint64_t reads, read_bytes, busy_us;
    _Atomic uint64_t retries, errors, checksum_errors, mirror_reads;
    cl_latencies latencies;
} cl_drive_counters;

typedef struct cl_queue {
    cl_task *head, *tail;
} cl_queue;

struct cl_drive;

typedef struct cl_backend {
    int32_t kind; /* CL_IO_* */
    /* Takes what it needs from the kernel and sets d->depth, d->state. CL_UNSUPPORTED if the kernel refuses. */
    int (*open)(struct cl_drive *d, cl_error *err);
    /* Starts the threads with cl_drive_spawn; the reads will go to this memory. */
    int (*start)(struct cl_drive *d, uint8_t *memory, uint64_t bytes, cl_error *err);
    /* There is more to do, or to stop. The caller holds the drive's mutex. */
    void (*wake)(struct cl_drive *d, uint32_t requests);
    /* The threads have ended: gives back d->state. */
    void (*close)(struct cl_drive *d);
    /* The descriptors have changed; nothing is in flight. The caller holds the drive's mutex. */
    void (*files_changed)(struct cl_drive *d);
} cl_backend;

extern const cl_backend cl_backend_threads, cl_backend_uring;

typedef enum cl_note { CL_NOTE_BACKEND, CL_NOTE_MEMORY, CL_NOTE_MIRROR, CL_NOTES } cl_note;
#define CL_NOTE_TEXT 200

typedef struct cl_drive {
    cl_io *io;
    uint32_t stripe;
    uint64_t least_bytes; /* the files must be at least this long */
    cl_file file, mirror;
    const cl_backend *backend;
    void *state; /* the back end's */
    uint32_t depth; /* requests in flight at most */
    pthread_t *threads; /* [n_threads] */
    uint32_t n_threads;
    cl_drive_counters counters;

    pthread_mutex_t mutex; /* guards what follows, and the tasks in the queues */
    pthread_cond_t idle;   /* in_flight has become 0 */
    cl_queue queues[CL_PRIORITIES];
    uint32_t in_flight; /* requests handed out and not arrived */
    uint32_t idle_in_flight; /* of those, how many of priority CL_READ_IDLE */
    uint32_t paused;    /* hand out nothing: the files are being changed */
    uint32_t replacements; /* how often they have been */
    uint32_t stop;
    uint64_t busy_since_us; /* while in_flight */
    uint32_t degraded;
    char last_error[CL_DRIVE_TEXT];
    char notes[CL_NOTES][CL_NOTE_TEXT]; /* what the drive goes without */
} cl_drive;

struct cl_io {
    cl_drive *drives;
    uint32_t n_drives;
    uint32_t threads, depth;
    int32_t direct, verify, bare;
    cl_stripe_header first; /* of stripe 0: what all others must agree with */
    _Atomic uint32_t events;
    cl_counters *counters;
};

/* ---- io.c ---- */

/* Starts `body(d)`, which must end once d->stop is set, as one more thread of the drive. */
int cl_drive_spawn(cl_drive *d, void *(*body)(void *), cl_error *err);

/* ---- io_files.c ---- */

/* Opens a drive's files and checks their headers; a mirror's failure becomes a note. */
int cl_files_open(cl_drive *d, const cl_stripe *stripe, cl_error *err);
/* Opens again what is degraded, missing or another file by now; the old descriptors stay where that fails. */
int cl_files_reopen(cl_drive *d, cl_error *err);
void cl_files_close(cl_drive *d);
/* The number and the descriptor for (the rest of) a request. */
int cl_files_choose(const cl_drive *d, const cl_request *r);
int cl_files_fd(const cl_drive *d, int number);

/* ---- io_requests.c ---- */

/* Puts a task at the end of its priority's queue; the mutex is held. */
void cl_requests_queue(cl_drive *d, cl_task *task);
/* How many requests a queued task makes. */
uint32_t cl_requests_of(const cl_task *task);
void cl_requests_promote(cl_drive *d, cl_task *task);
/* The next request, 0 if there is none now; the mutex is held. */
int cl_requests_next(cl_drive *d, cl_request *r);
/* A call's result (bytes or -errno) for the rest of a request. 1: it has come to its end, in r->failed and r->done. */
int cl_requests_advance(cl_request *r, int64_t result);
/* The drive is done with a request; the mutex is held. */
void cl_requests_arrived(cl_drive *d, const cl_request *r);
/* Checks the bytes and settles what follows; the mutex is not held. The request's task may be gone afterwards. */
void cl_requests_settle(cl_drive *d, const cl_request *r);

/* ---- io_stats.c ---- */

void cl_latency_add(cl_latencies *l, uint64_t us);
/* The upper end of the bucket in which `share` (0..1) of the latencies have ended; 0 if there are none. */
uint64_t cl_latency_quantile(const cl_latencies *l, double share);
void cl_drive_stats_of(cl_drive *d, cl_drive_stats *out);
/* Replaces one of the drive's notes; an empty one says that nothing is amiss. */
void cl_drive_note(cl_drive *d, cl_note which, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
