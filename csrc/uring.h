/* uring.h - an io_uring of the kernel, through its system calls. See uring.c. */
#ifndef COLIBRI_URING_H
#define COLIBRI_URING_H
#include <linux/io_uring.h>
#include <stdint.h>
#include <sys/uio.h>

typedef struct cl_ring {
    int fd;
    void *submission, *completion, *entries; /* what is mapped */
    uint64_t submission_bytes, completion_bytes, entries_bytes;
    uint32_t *sq_head, *sq_tail, *sq_array, sq_mask, sq_entries;
    uint32_t *cq_head, *cq_tail, cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
    uint32_t prepared; /* the tail that the kernel sees at the next cl_ring_enter */
} cl_ring;

/* All but cl_ring_next return 0 or an errno. Opening needs Linux 5.6 (IORING_OP_READ); ENOSYS, EPERM where the kernel,
 * a sysctl or a seccomp filter refuses. */
int cl_ring_open(cl_ring *ring, uint32_t entries);
void cl_ring_close(cl_ring *ring);
int cl_ring_register_files(cl_ring *ring, const int *fds, uint32_t n); /* -1: left empty */
int cl_ring_update_files(cl_ring *ring, const int *fds, uint32_t n);
int cl_ring_register_buffers(cl_ring *ring, const struct iovec *buffers, uint32_t n);

/* What the kernel takes as one registered buffer. */
#define CL_RING_BUFFER_BYTES (1ull << 30)
/* Memory registered in buffers of that size: the number of the one that holds [at, at + bytes), or -1. */
int cl_ring_buffer_of(uint64_t memory_bytes, uint64_t at, uint64_t bytes);

/* A cleared entry to fill, NULL if the ring is full. It goes to the kernel with the next cl_ring_enter. */
struct io_uring_sqe *cl_ring_prepare(cl_ring *ring);
typedef enum cl_ring_mode {
    CL_RING_SUBMIT, /* hand over what is prepared */
    CL_RING_LOOK,   /* and let the kernel post what is complete: it need not do so while this thread computes */
    CL_RING_WAIT    /* and sleep until something is complete */
} cl_ring_mode;

/* EINTR, EAGAIN and EBUSY are the caller's: what was not handed over is still prepared. */
int cl_ring_enter(cl_ring *ring, cl_ring_mode mode);
/* The next completion: 1, or 0 if there is none now. */
int cl_ring_next(cl_ring *ring, uint64_t *user_data, int32_t *result);

#endif
