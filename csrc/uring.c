/* uring.c - an io_uring: the two queues shared with the kernel, and the three system calls.
 *
 * Owns the mappings and the memory ordering of heads and tails. Knows nothing of drives. It stands here and not in a
 * library's place because the core needs six operations of it, and a dependency less is one less to install. For one
 * thread at a time, but for the registrations, which may be made while that thread sleeps in cl_ring_enter.
 */
#include "uring.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef __NR_io_uring_setup /* the same number on every architecture */
#define __NR_io_uring_setup 425
#define __NR_io_uring_enter 426
#define __NR_io_uring_register 427
#endif

/* Since Linux 5.19: completions do not interrupt a thread that is busy. Older headers lack the name. */
#define SETUP_COOP_TASKRUN (1u << 8)

static int setup(uint32_t entries, struct io_uring_params *params) {
    memset(params, 0, sizeof *params);
    params->flags = SETUP_COOP_TASKRUN;
    int fd = (int)syscall(__NR_io_uring_setup, entries, params);
    if (fd >= 0 || errno != EINVAL) return fd;
    memset(params, 0, sizeof *params);
    return (int)syscall(__NR_io_uring_setup, entries, params);
}

static int register_call(cl_ring *ring, uint32_t what, const void *argument, uint32_t n) {
    return syscall(__NR_io_uring_register, ring->fd, what, argument, n) < 0 ? errno : 0;
}

static void *map(cl_ring *ring, uint64_t bytes, uint64_t offset) {
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->fd, (off_t)offset);
    if (p != MAP_FAILED) madvise(p, bytes, MADV_DONTFORK);
    return p;
}

/* Whether the kernel knows the operation that everything here is made of. */
static int check_operations(cl_ring *ring) {
    struct {
        struct io_uring_probe head;
        struct io_uring_probe_op ops[IORING_OP_READ + 1];
    } probe;
    memset(&probe, 0, sizeof probe);
    int failed = register_call(ring, IORING_REGISTER_PROBE, &probe, IORING_OP_READ + 1);
    if (failed) return failed == EINVAL ? ENOSYS : failed;
    return probe.head.last_op >= IORING_OP_READ && probe.ops[IORING_OP_READ].flags & IO_URING_OP_SUPPORTED ? 0
                                                                                                           : ENOSYS;
}

static int map_queues(cl_ring *ring, const struct io_uring_params *p) {
    ring->submission_bytes = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    ring->completion_bytes = p->cq_off.cqes + p->cq_entries * sizeof(struct io_uring_cqe);
    ring->entries_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    ring->submission = map(ring, ring->submission_bytes, IORING_OFF_SQ_RING);
    if (ring->submission == MAP_FAILED) return errno;
    ring->completion = map(ring, ring->completion_bytes, IORING_OFF_CQ_RING);
    if (ring->completion == MAP_FAILED) return errno;
    ring->entries = map(ring, ring->entries_bytes, IORING_OFF_SQES);
    if (ring->entries == MAP_FAILED) return errno;
    uint8_t *sq = ring->submission, *cq = ring->completion;
    ring->sq_head = (uint32_t *)(sq + p->sq_off.head);
    ring->sq_tail = (uint32_t *)(sq + p->sq_off.tail);
    ring->sq_array = (uint32_t *)(sq + p->sq_off.array);
    ring->sq_mask = *(uint32_t *)(sq + p->sq_off.ring_mask);
    ring->sq_entries = p->sq_entries;
    ring->cq_head = (uint32_t *)(cq + p->cq_off.head);
    ring->cq_tail = (uint32_t *)(cq + p->cq_off.tail);
    ring->cq_mask = *(uint32_t *)(cq + p->cq_off.ring_mask);
    ring->cqes = (struct io_uring_cqe *)(cq + p->cq_off.cqes);
    ring->sqes = ring->entries;
    ring->prepared = *ring->sq_tail;
    return 0;
}

int cl_ring_open(cl_ring *ring, uint32_t entries) {
    struct io_uring_params params;
    memset(ring, 0, sizeof *ring);
    ring->submission = ring->completion = ring->entries = MAP_FAILED;
    ring->fd = setup(entries, &params);
    if (ring->fd < 0) return errno;
    int failed = check_operations(ring);
    if (!failed) failed = map_queues(ring, &params);
    if (failed) cl_ring_close(ring);
    return failed;
}

void cl_ring_close(cl_ring *ring) {
    if (ring->entries != MAP_FAILED) munmap(ring->entries, ring->entries_bytes);
    if (ring->completion != MAP_FAILED) munmap(ring->completion, ring->completion_bytes);
    if (ring->submission != MAP_FAILED) munmap(ring->submission, ring->submission_bytes);
    close(ring->fd);
    ring->fd = -1;
}

int cl_ring_register_files(cl_ring *ring, const int *fds, uint32_t n) {
    return register_call(ring, IORING_REGISTER_FILES, fds, n);
}

int cl_ring_update_files(cl_ring *ring, const int *fds, uint32_t n) {
    struct io_uring_files_update update = {.fds = (uintptr_t)fds};
    long done = syscall(__NR_io_uring_register, ring->fd, IORING_REGISTER_FILES_UPDATE, &update, n);
    if (done < 0) return errno;
    return done == (long)n ? 0 : EIO;
}

int cl_ring_register_buffers(cl_ring *ring, const struct iovec *buffers, uint32_t n) {
    return register_call(ring, IORING_REGISTER_BUFFERS, buffers, n);
}

int cl_ring_buffer_of(uint64_t memory_bytes, uint64_t at, uint64_t bytes) {
    if (bytes == 0 || at >= memory_bytes || bytes > memory_bytes - at) return -1;
    uint64_t first = at / CL_RING_BUFFER_BYTES, last = (at + bytes - 1) / CL_RING_BUFFER_BYTES;
    return first == last ? (int)first : -1;
}

struct io_uring_sqe *cl_ring_prepare(cl_ring *ring) {
    if (ring->prepared - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE) == ring->sq_entries) return NULL;
    uint32_t at = ring->prepared++ & ring->sq_mask;
    ring->sq_array[at] = at;
    memset(&ring->sqes[at], 0, sizeof ring->sqes[at]);
    return &ring->sqes[at];
}

int cl_ring_enter(cl_ring *ring, cl_ring_mode mode) {
    __atomic_store_n(ring->sq_tail, ring->prepared, __ATOMIC_RELEASE);
    uint32_t submit = ring->prepared - __atomic_load_n(ring->sq_head, __ATOMIC_ACQUIRE);
    if (*ring->cq_head != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)) mode = CL_RING_SUBMIT;
    if (!submit && mode == CL_RING_SUBMIT) return 0;
    long done = syscall(__NR_io_uring_enter, ring->fd, submit, mode == CL_RING_WAIT,
                        mode == CL_RING_SUBMIT ? 0 : IORING_ENTER_GETEVENTS, NULL, 0);
    return done < 0 ? errno : 0;
}

int cl_ring_next(cl_ring *ring, uint64_t *user_data, int32_t *result) {
    uint32_t head = *ring->cq_head;
    if (head == __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE)) return 0;
    const struct io_uring_cqe *cqe = &ring->cqes[head & ring->cq_mask];
    *user_data = cqe->user_data;
    *result = cqe->res;
    __atomic_store_n(ring->cq_head, head + 1, __ATOMIC_RELEASE);
    return 1;
}
