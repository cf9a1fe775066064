/* io_requests.c - the life of an extent on its way: queued, cut into requests, checked, tried again, complete.
 *
 * Owns the order in which a drive is asked for what, and all consequences of what it answers: EIO and a wrong checksum
 * are read once more, whatever is still wrong then is read from the mirror, and what that does not heal fails this
 * record alone, with an error that names stripe, file, offset, layer and expert. Knows nothing of how bytes are moved.
 *
 * A request is checked while its bytes are still in the cache of the core that checks; checksums are linear, so those
 * of the requests add up to the extent's in any order.
 */
#include "clock.h"
#include "crc32c.h"
#include "error.h"
#include "io_drive.h"
#include <errno.h>
#include <stdio.h>
#include <string.h>

/* ---- queues ---- */

static void push(cl_drive *d, cl_task *task, int front) {
    cl_queue *q = &d->queues[task->priority];
    task->queued = 1;
    task->previous = front ? NULL : q->tail;
    task->next = front ? q->head : NULL;
    *(task->previous ? &task->previous->next : &q->head) = task;
    *(task->next ? &task->next->previous : &q->tail) = task;
}

static void take_out(cl_drive *d, cl_task *task) {
    cl_queue *q = &d->queues[task->priority];
    *(task->previous ? &task->previous->next : &q->head) = task->next;
    *(task->next ? &task->next->previous : &q->tail) = task->previous;
    task->queued = 0;
}

static int must_check(const cl_drive *d, const cl_task *task) {
    if (d->io->verify != CL_VERIFY_FIRST) return d->io->verify == CL_VERIFY_ALWAYS;
    return task->attempt != CL_TRY_FIRST || !task->verified || !*task->verified;
}

static void begin_attempt(cl_drive *d, cl_task *task, cl_attempt attempt) {
    task->attempt = attempt;
    task->issued = 0;
    task->in_flight = 0;
    task->crc = 0;
    task->failed = 0;
    task->replacements = d->replacements;
    task->check = must_check(d, task);
    push(d, task, attempt != CL_TRY_FIRST);
}

/* As many pieces as the drive takes at once, so that one expert alone keeps it busy; pieces have a price, too. */
static uint64_t request_bytes(const cl_drive *d, const cl_task *task) {
    uint64_t bytes = task->extent->bytes / d->depth;
    uint64_t most = task->priority == CL_READ_IDLE ? CL_MOST_IDLE_REQUEST : CL_MOST_REQUEST;
    if (bytes < CL_LEAST_REQUEST) bytes = CL_LEAST_REQUEST;
    if (bytes > most) bytes = most;
    return (bytes + CL_ALIGN - 1) & ~(uint64_t)(CL_ALIGN - 1);
}

void cl_requests_queue(cl_drive *d, cl_task *task) {
    task->request_bytes = request_bytes(d, task);
    begin_attempt(d, task, CL_TRY_FIRST);
}

uint32_t cl_requests_of(const cl_task *task) {
    return (uint32_t)((task->extent->bytes + task->request_bytes - 1) / task->request_bytes);
}

void cl_requests_promote(cl_drive *d, cl_task *task) {
    int queued = (int)task->queued;
    if (queued) take_out(d, task);
    task->priority = CL_READ_URGENT;
    if (queued) push(d, task, 0);
}

/* ---- from tasks to requests ---- */

/* Reads that nobody needs yet leave half of the drive free, for who comes while they run. */
static int may_read_idle(const cl_drive *d) {
    uint32_t most = d->depth / 2 ? d->depth / 2 : 1;
    return d->in_flight == d->idle_in_flight && d->in_flight < most;
}

static cl_task *first_task(cl_drive *d) {
    if (d->queues[CL_READ_URGENT].head) return d->queues[CL_READ_URGENT].head;
    if (d->queues[CL_READ_AHEAD].head) return d->queues[CL_READ_AHEAD].head;
    return may_read_idle(d) ? d->queues[CL_READ_IDLE].head : NULL;
}

int cl_requests_next(cl_drive *d, cl_request *r) {
    cl_task *task = d->paused || d->stop || d->in_flight >= d->depth ? NULL : first_task(d);
    if (!task) return 0;
    const cl_extent *e = task->extent;
    uint64_t bytes = e->bytes - task->issued;
    if (bytes > task->request_bytes) bytes = task->request_bytes;
    *r = (cl_request){
        .task = task,
        .data = task->read->data + e->record_offset + task->issued,
        .offset = e->file_offset + task->issued,
        .bytes = bytes,
        .started_us = cl_now_us(),
        .idle = task->priority == CL_READ_IDLE,
    };
    task->issued += bytes;
    task->in_flight++;
    if (task->issued == e->bytes) take_out(d, task);
    if (d->in_flight++ == 0) d->busy_since_us = r->started_us;
    d->idle_in_flight += r->idle;
    return 1;
}

int cl_requests_advance(cl_request *r, int64_t result) {
    if (result == -EINTR || result == -EAGAIN) {
        if (++r->interruptions <= CL_MOST_INTERRUPTIONS) return 0;
        r->failed = (int32_t)-result;
    } else if (result < 0) {
        r->failed = (int32_t)-result;
    } else if (result == 0) {
        r->failed = ENODATA;
    } else {
        r->done += (uint64_t)result;
    }
    return r->failed || r->done == r->bytes;
}

void cl_requests_arrived(cl_drive *d, const cl_request *r) {
    uint64_t now = cl_now_us();
    d->idle_in_flight -= r->idle;
    if (--d->in_flight == 0) {
        cl_count(&d->counters.busy_us, now - d->busy_since_us);
        pthread_cond_broadcast(&d->idle);
    }
    cl_count(&d->counters.read_bytes, r->done);
    cl_count(&d->counters.reads, !r->failed);
    if (!r->failed) cl_latency_add(&d->counters.latencies, now - r->started_us);
}

/* ---- the end of an attempt ---- */

static int describe(const cl_drive *d, const cl_task *task, cl_error *err) {
    const cl_read *r = task->read;
    const cl_extent *e = task->extent;
    unsigned long long at = task->failed_at, offset = e->file_offset, bytes = e->bytes;
    if (task->failed == ENODATA)
        return cl_fail(err, CL_CORRUPT,
                       "layer %u expert %u: stripe %u (%s) ends at offset %llu, inside an extent of %llu bytes at %llu",
                       r->layer, r->expert, d->stripe, d->file.path, at, bytes, offset);
    if (task->failed != CL_BAD_CHECKSUM)
        return cl_fail(err, CL_IO, "layer %u expert %u: reading stripe %u (%s) at offset %llu failed: %s (errno %d)",
                       r->layer, r->expert, d->stripe, d->file.path, at, strerror(task->failed), task->failed);
    return cl_fail(err, CL_CORRUPT,
                   "layer %u expert %u: %llu bytes at offset %llu of stripe %u (%s) fail their checksum", r->layer,
                   r->expert, bytes, offset, d->stripe, d->file.path);
}

/* What the stripe's failure is called; where the mirror has failed as well, that is added. */
static void fail_read(const cl_drive *d, cl_task *task) {
    cl_read *r = task->read;
    if (atomic_exchange(&r->failed, 1)) return;
    int32_t mirror_failed = task->failed;
    uint64_t mirror_at = task->failed_at;
    if (task->attempt == CL_TRY_MIRROR) {
        task->failed = task->stripe_failed;
        task->failed_at = task->stripe_failed_at;
    }
    describe(d, task, &r->error);
    if (task->attempt != CL_TRY_MIRROR) return;
    uint64_t used = strlen(r->error.text);
    const char *why = mirror_failed == CL_BAD_CHECKSUM ? "wrong checksum"
                      : mirror_failed == ENODATA       ? "the file ends there"
                                                       : strerror(mirror_failed);
    (void)snprintf(r->error.text + used, sizeof r->error.text - used, "; its mirror (%s) fails at offset %llu, too: %s",
                   d->mirror.path, (unsigned long long)mirror_at, why);
}

static void note_degraded(cl_drive *d, const cl_task *task) {
    cl_error err = {0};
    describe(d, task, &err);
    d->degraded = 1;
    memcpy(d->last_error, err.text, sizeof d->last_error);
    cl_count(task->failed == CL_BAD_CHECKSUM ? &d->io->counters->checksum_errors : &d->io->counters->read_errors, 1);
}

/* After a failed attempt: 1 if the task has come to its end, 0 if it is queued again. */
static int try_again(cl_drive *d, cl_task *task) {
    int bad_bytes = task->failed == CL_BAD_CHECKSUM;
    cl_count(bad_bytes ? &d->counters.checksum_errors : &d->counters.errors, 1);
    if (task->attempt == CL_TRY_FIRST && (bad_bytes || task->failed == EIO)) {
        cl_count(&d->counters.retries, 1);
        begin_attempt(d, task, CL_TRY_AGAIN);
        return 0;
    }
    if (task->attempt != CL_TRY_MIRROR) {
        note_degraded(d, task);
        if (d->mirror.path && d->mirror.buffered_fd >= 0) {
            task->stripe_failed = task->failed;
            task->stripe_failed_at = task->failed_at;
            begin_attempt(d, task, CL_TRY_MIRROR);
            return 0;
        }
    }
    fail_read(d, task);
    return 1;
}

/* Not checked because the extent once was right, in a file that has been replaced since: that says nothing about the
 * new one, from which some of the bytes may be. */
static int trusts_another_file(const cl_drive *d, const cl_task *task) {
    return !task->check && d->io->verify == CL_VERIFY_FIRST && task->replacements != d->replacements;
}

static int end_attempt(cl_drive *d, cl_task *task) {
    if (!task->failed && task->check && task->crc != task->extent->crc32c) {
        task->failed = CL_BAD_CHECKSUM;
        task->failed_at = task->extent->file_offset;
    }
    if (task->failed) return try_again(d, task);
    if (trusts_another_file(d, task)) {
        *task->verified = 0;
        begin_attempt(d, task, CL_TRY_FIRST);
        return 0;
    }
    if (task->attempt == CL_TRY_MIRROR) cl_count(&d->counters.mirror_reads, 1);
    else if (task->check && task->verified && task->replacements == d->replacements) *task->verified = 1;
    return 1;
}

static int settle_locked(cl_drive *d, const cl_request *r, uint32_t crc) {
    cl_task *task = r->task;
    task->crc ^= crc;
    task->in_flight--;
    uint64_t at = r->offset + r->done;
    if (r->failed && (!task->failed || at < task->failed_at)) { /* what is told is the failure nearest to the start */
        task->failed = r->failed;
        task->failed_at = at;
        if (task->queued) take_out(d, task); /* the rest of this attempt is of no use */
    }
    if (task->in_flight || task->queued) return 0;
    int over = end_attempt(d, task);
    if (!over) d->backend->wake(d, cl_requests_of(task));
    return over;
}

void cl_requests_settle(cl_drive *d, const cl_request *r) {
    cl_io *io = d->io;
    cl_task *task = r->task;
    cl_read *read = task->read;
    const cl_extent *e = task->extent;
    uint32_t crc = 0;
    if (task->check && !r->failed)
        crc = cl_crc32c_shift(cl_crc32c(0, r->data, r->bytes), e->file_offset + e->bytes - (r->offset + r->bytes));
    cl_count(&io->counters->expert_bytes, r->done);
    pthread_mutex_lock(&d->mutex);
    int over = settle_locked(d, r, crc);
    pthread_mutex_unlock(&d->mutex);
    cl_count(&io->counters->heartbeat, 1);
    /* After the last decrement the record belongs to the store again: do not touch it. */
    if (!over || atomic_fetch_sub(&read->pending, 1) != 1) return;
    atomic_fetch_add(&io->events, 1);
    cl_futex_wake_all(&io->events);
}
