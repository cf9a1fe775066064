/* io.h - reads of expert records from the stripe files. See io.c. */
#ifndef COLIBRI_IO_H
#define COLIBRI_IO_H
#include "colibri.h"
#include "counters.h"

#define CL_MOST_IO_DEPTH 256 /* requests in flight per drive */

typedef struct cl_io cl_io;
struct cl_read;

/* URGENT: somebody waits for it. AHEAD: it will be wanted. IDLE: read only while the drive has nothing else to do. */
typedef enum cl_priority { CL_READ_URGENT, CL_READ_AHEAD, CL_READ_IDLE, CL_PRIORITIES } cl_priority;

/* Where an extent is read from: first the stripe, then the stripe once more, then its mirror. */
typedef enum cl_attempt { CL_TRY_FIRST, CL_TRY_AGAIN, CL_TRY_MIRROR } cl_attempt;

/* One extent of a record on its way. From cl_io_submit until it is complete it belongs to its drive and is guarded by
 * the drive's mutex; it is handed out in requests, in order, and is complete when all have come back. */
typedef struct cl_task {
    struct cl_task *next, *previous; /* in its queue */
    struct cl_read *read;
    const cl_extent *extent;
    uint8_t *verified; /* set once the stripe's bytes have been checked; may be NULL */
    cl_priority priority;
    cl_attempt attempt;
    uint32_t queued;         /* not all of it has been handed out */
    uint32_t check;          /* compare checksums in this attempt */
    uint32_t replacements;   /* of the drive's files when this attempt began */
    uint32_t in_flight;      /* requests handed out and not back */
    uint64_t issued;         /* bytes handed out */
    uint64_t request_bytes;  /* how many at a time */
    uint32_t crc;            /* of the requests that are back, each moved to its place */
    int32_t failed;          /* of this attempt: errno of the failed request of lowest offset, or CL_BAD_CHECKSUM */
    uint64_t failed_at;      /* file offset of that */
    int32_t stripe_failed;   /* the same of the stripe, while the mirror is tried */
    uint64_t stripe_failed_at;
} cl_task;

/* One record on its way. Owned by its slot; the I/O threads touch it from cl_io_submit until `pending` is 0. */
typedef struct cl_read {
    uint8_t *data;            /* aligned to 4096 for O_DIRECT */
    uint32_t layer, expert;   /* for the error text */
    cl_task *tasks;           /* [most extents per record] */
    uint8_t *verified;        /* [extents], for CL_VERIFY_FIRST; zero at first, set by the I/O threads; may be NULL */
    uint32_t n_tasks;         /* set by cl_io_submit */
    cl_priority priority;     /* set by cl_io_submit and cl_io_promote; of the step's thread */
    _Atomic uint32_t pending; /* extents not yet read and verified */
    _Atomic uint32_t failed;
    cl_error error; /* of the extent that failed first */
} cl_read;

typedef struct cl_io_options {
    const cl_stripe *stripes;
    uint32_t n_stripes;
    int32_t backend;  /* CL_IO_* */
    uint32_t threads; /* per stripe, where threads read; 0: default */
    uint32_t depth;   /* requests in flight per stripe, where io_uring reads; 0: default */
    int32_t direct;   /* CL_DIRECT_* */
    int32_t verify;   /* CL_VERIFY_* */
    int32_t bare;     /* 1: any file, without a stripe's header */
} cl_io_options;

/* Opens the stripes and their mirrors, checks headers and lengths, chooses the back end. A mirror that cannot be opened
 * is reported by cl_io_stats; whatever else is wrong fails the call. CL_UNSUPPORTED where CL_IO_URING was asked for and
 * the kernel refuses io_uring. */
int cl_io_open(cl_io **out, const cl_io_options *options, cl_counters *counters, cl_error *err);
/* Starts the I/O threads; once, before the first submit. io_uring pins the records' memory here, once and for all,
 * instead of in every read; where the kernel refuses that, reads cost more processor time and cl_io_stats says so.
 * bytes 0: nothing is pinned. On failure only cl_io_close may follow. */
int cl_io_start(cl_io *io, uint8_t *memory, uint64_t bytes, cl_error *err);
/* Finishes the requests that have begun, drops those that have not. NULL is fine. */
void cl_io_close(cl_io *io);
uint32_t cl_io_direct_active(const cl_io *io);
uint64_t cl_io_buffered_stripes(const cl_io *io); /* as in cl_model_stats */
/* Per stripe, as cl_model_drive_stats. [any thread] */
uint32_t cl_io_stats(cl_io *io, cl_drive_stats *out, uint32_t capacity);
/* As cl_model_reopen_stripes. */
int cl_io_reopen(cl_io *io, cl_error *err);

/* Clears bytes that reads in flight may set (cl_read.verified). */
void cl_io_forget_verified(cl_io *io, uint8_t *verified, uint64_t n);

/* Queues a record whose `data`, `layer`, `expert`, `tasks` and `verified` are set. */
void cl_io_submit(cl_io *io, cl_read *read, const cl_extent *extents, uint32_t n, cl_priority priority);
/* Makes what is still queued of a submitted record urgent. Of a complete one: nothing. */
void cl_io_promote(cl_io *io, cl_read *read);

/* A number that changes whenever a record is complete, and the wait for its change. */
uint32_t cl_io_events(const cl_io *io);
void cl_io_wait(cl_io *io, uint32_t seen, uint64_t timeout_us);

/* pread that loops over short results and EINTR, and tries EIO once more. 0, or an errno; ENODATA at the file's end,
 * with the number of bytes that were there in *done. */
int cl_pread_all(int fd, void *data, uint64_t bytes, uint64_t offset, uint64_t *done);

#endif
