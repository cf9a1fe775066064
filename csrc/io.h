/* io.h - reads of expert records from the stripe files. See io.c. */
#ifndef COLIBRI_IO_H
#define COLIBRI_IO_H
#include "colibri.h"
#include "counters.h"

typedef struct cl_io cl_io;
struct cl_read;

/* URGENT: somebody waits for it. AHEAD: it will be wanted. IDLE: read only while the drive has nothing else to do. */
typedef enum cl_priority { CL_READ_URGENT, CL_READ_AHEAD, CL_READ_IDLE, CL_PRIORITIES } cl_priority;

/* One extent of a record on its way. */
typedef struct cl_task {
    struct cl_task *next;
    struct cl_read *read;
    const cl_extent *extent;
} cl_task;

/* One record on its way. Owned by its slot; the I/O threads touch it from cl_io_submit until `pending` is 0. */
typedef struct cl_read {
    uint8_t *data;
    uint32_t layer, expert;   /* for the error text */
    cl_task *tasks;           /* [most extents per record] */
    uint32_t n_tasks;         /* set by cl_io_submit */
    cl_priority priority;     /* set by cl_io_submit and cl_io_promote; of the step's thread */
    _Atomic uint32_t pending; /* extents not yet read and verified */
    _Atomic uint32_t failed;
    cl_error error; /* of the extent that failed first */
} cl_read;

/* Opens the stripes, checks their headers and lengths, starts `threads` reading threads for each. */
int cl_io_open(cl_io **out, const cl_stripe *stripes, uint32_t n, uint32_t threads, int32_t direct,
               cl_counters *counters, cl_error *err);
/* Finishes the reads that have begun, drops those that have not. NULL is fine. */
void cl_io_close(cl_io *io);
uint32_t cl_io_direct_active(const cl_io *io);
uint64_t cl_io_buffered_stripes(const cl_io *io); /* as in cl_model_stats */

/* Queues a record whose `data`, `layer`, `expert` and `tasks` are set. */
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
