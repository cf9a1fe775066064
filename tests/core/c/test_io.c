/* test_io.c - the I/O engine with both back ends: short, interrupted and failing reads, wrong bytes, mirrors, order.
 *
 * Faults are put between a back end and the engine: whatever the kernel has answered goes through the function
 * cl_requests_advance, and the linker puts the __wrap_ function below in front of it.
 * link: io_rig.c -Wl,--wrap=cl_requests_advance
 */
#define _GNU_SOURCE
#include "check.h"
#include "io_drive.h"
#include "io_rig.h"
#include "uring.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- faults ---- */

typedef enum kind { NOTHING, SHORT, ODD, INTERRUPT, AGAIN_FOREVER, ERROR, FLIP } kind;

/* What happens to the answers for one extent (expert on stripe), for this many of them. */
#define ALWAYS (1 << 30)
static struct fault {
    _Atomic kind kind;
    _Atomic uint32_t expert, stripe, mirror_too;
    _Atomic int left;
    _Atomic int errno_value;
} fault;
static _Atomic uint32_t gate_closed; /* answers wait */
static _Atomic uint32_t order[64], n_order;

static void set_fault(kind what, uint32_t expert, uint32_t stripe, int times) {
    atomic_store(&fault.expert, expert);
    atomic_store(&fault.stripe, stripe);
    atomic_store(&fault.mirror_too, 0);
    atomic_store(&fault.errno_value, EIO);
    atomic_store(&fault.left, times);
    atomic_store(&fault.kind, what);
}

static int hits(const cl_request *r) {
    const cl_task *task = r->task;
    if (task->read->expert != atomic_load(&fault.expert)) return 0;
    if (task->extent->stripe != atomic_load(&fault.stripe)) return 0;
    if (task->attempt == CL_TRY_MIRROR && !atomic_load(&fault.mirror_too)) return 0;
    return atomic_fetch_sub(&fault.left, 1) > 0;
}

static int64_t spoil(cl_request *r, int64_t result) {
    kind what = atomic_load(&fault.kind);
    if (what == SHORT && result > 4096) return 4096; /* says less than it has read */
    if (what == ODD && result > 7) return 7;
    if (what == INTERRUPT && r->interruptions < 5) return r->interruptions % 2 ? -EINTR : -EAGAIN;
    if (what < AGAIN_FOREVER || !hits(r)) return result;
    if (what == AGAIN_FOREVER) return -EAGAIN;
    if (what == ERROR) return -atomic_load(&fault.errno_value);
    r->data[r->done + 100] ^= 0x10;
    return result;
}

int __real_cl_requests_advance(cl_request *r, int64_t result);
int __wrap_cl_requests_advance(cl_request *r, int64_t result) {
    uint32_t at = atomic_fetch_add(&n_order, 1);
    if (at < 64) atomic_store(&order[at], r->task->read->expert);
    while (atomic_load(&gate_closed)) usleep(500);
    return __real_cl_requests_advance(r, spoil(r, result));
}

/* ---- what comes back ---- */

static void test_all_that_is_asked_for_comes(io_rig *rig, int32_t backend) {
    for (uint32_t depth = 1; depth <= 7; depth += 3) {
        rig->options.threads = rig->options.depth = depth;
        rig->options.direct = depth == 4 ? CL_DIRECT_OFF : CL_DIRECT_AUTO;
        rig_open(rig, backend);
        for (uint32_t r = 0; r < RIG_RECORDS; r++) rig_submit(rig, r, (cl_priority)(r % CL_PRIORITIES));
        for (uint32_t r = 0; r < RIG_RECORDS; r++) CHECK(rig_wait(rig, r) == CL_OK);
        cl_drive_stats s = rig_stats(rig, 0);
        CHECK(s.backend == backend && s.depth == depth && !s.degraded && s.errors + s.retries == 0);
        CHECK(s.read_bytes == (uint64_t)RIG_RECORDS * RIG_FIRST_EXTENT);
        CHECK(s.reads >= RIG_RECORDS * 2 && s.busy_us > 0 && s.cpu_us > 0);
        CHECK(s.latency_p50_us <= s.latency_p99_us && s.latency_p99_us > 0);
        CHECK(rig_stats(rig, 1).reads == RIG_RECORDS);
        CHECK(atomic_load(&rig->counters.expert_bytes) == (uint64_t)RIG_RECORDS * RIG_RECORD_BYTES);
        rig_close(rig);
    }
    rig->options.direct = CL_DIRECT_AUTO;
    rig->options.threads = rig->options.depth = 0;
}

static void test_short_and_interrupted_reads_do_not_show(io_rig *rig, int32_t backend) {
    static const kind kinds[] = {SHORT, ODD, INTERRUPT};
    for (int i = 0; i < 3; i++) {
        rig_open(rig, backend);
        set_fault(kinds[i], 0, 0, ALWAYS);
        /* In steps of 7 bytes only the small extent: its read takes more than two thousand calls. */
        cl_read *small = &rig->reads[1];
        if (kinds[i] == ODD) {
            cl_extent piece = rig->extents[1][1];
            memset(small->data, 0, RIG_RECORD_BYTES);
            cl_io_submit(rig->io, small, &piece, 1, CL_READ_URGENT);
            while (atomic_load(&small->pending)) usleep(100);
            CHECK(!atomic_load(&small->failed));
            CHECK(memcmp(small->data + piece.record_offset,
                         rig->content + RIG_RECORD_BYTES + piece.record_offset, piece.bytes) == 0);
        } else {
            for (uint32_t r = 0; r < 3; r++) CHECK(rig_read(rig, r) == CL_OK);
        }
        CHECK(rig_stats(rig, 0).errors == 0 && rig_stats(rig, 0).retries == 0);
        set_fault(NOTHING, 0, 0, 0);
        rig_close(rig);
    }
}

static void test_a_read_that_never_comes_to_an_end_is_given_up(io_rig *rig, int32_t backend) {
    rig_open(rig, backend);
    set_fault(AGAIN_FOREVER, 2, 1, ALWAYS);
    CHECK(rig_read(rig, 2) == CL_IO);
    CHECK(strstr(rig->reads[2].error.text, "Resource temporarily unavailable") != NULL);
    set_fault(NOTHING, 0, 0, 0);
    CHECK(rig_read(rig, 2) == CL_OK);
    rig_close(rig);
}

/* ---- failures ---- */

static void test_eio_is_tried_once_more(io_rig *rig, int32_t backend) {
    rig_open(rig, backend);
    set_fault(ERROR, 4, 0, 1);
    CHECK(rig_read(rig, 4) == CL_OK);
    cl_drive_stats s = rig_stats(rig, 0);
    CHECK(s.retries == 1 && s.errors == 1 && !s.degraded && s.last_error[0] == '\0');
    CHECK(atomic_load(&rig->counters.read_errors) == 0);
    rig_close(rig);
}

static void test_eio_twice_fails_this_record_alone(io_rig *rig, int32_t backend) {
    rig_open(rig, backend);
    set_fault(ERROR, 4, 1, ALWAYS);
    for (uint32_t r = 0; r < RIG_RECORDS; r++) rig_submit(rig, r, CL_READ_URGENT);
    for (uint32_t r = 0; r < RIG_RECORDS; r++) CHECK(rig_wait(rig, r) == (r == 4 ? CL_IO : CL_OK));
    const char *text = rig->reads[4].error.text;
    char where[160];
    snprintf(where, sizeof where, "layer 3 expert 4: reading stripe 1 (%s) at offset %llu failed", rig->paths[1],
             (unsigned long long)rig->extents[4][1].file_offset);
    CHECK(strstr(text, where) == text && strstr(text, "(errno 5)") != NULL);
    cl_drive_stats s = rig_stats(rig, 1);
    CHECK(s.retries == 1 && s.errors == 2 && s.degraded && strcmp(s.last_error, text) == 0);
    CHECK(!rig_stats(rig, 0).degraded && atomic_load(&rig->counters.read_errors) == 1);
    set_fault(NOTHING, 0, 0, 0);
    CHECK(rig_read(rig, 4) == CL_OK); /* the next use tries again; the drive stays marked until it is reopened */
    CHECK(rig_stats(rig, 1).degraded);
    CHECK(cl_io_reopen(rig->io, NULL) == CL_OK && !rig_stats(rig, 1).degraded);
    CHECK(rig_stats(rig, 1).last_error[0] == '\0' && rig_read(rig, 4) == CL_OK);
    rig_close(rig);
}

static void test_another_errno_is_not_tried_again(io_rig *rig, int32_t backend) {
    rig_open(rig, backend);
    set_fault(ERROR, 4, 0, 1);
    atomic_store(&fault.errno_value, ENXIO);
    CHECK(rig_read(rig, 4) == CL_IO && rig_stats(rig, 0).retries == 0 && rig_stats(rig, 0).degraded);
    rig_close(rig);
}

static void test_wrong_bytes_are_read_once_more(io_rig *rig, int32_t backend) {
    rig_open(rig, backend);
    set_fault(FLIP, 5, 0, 1);
    CHECK(rig_read(rig, 5) == CL_OK);
    cl_drive_stats s = rig_stats(rig, 0);
    CHECK(s.retries == 1 && s.checksum_errors == 1 && s.errors == 0 && !s.degraded);
    set_fault(FLIP, 5, 0, ALWAYS);
    CHECK(rig_read(rig, 5) == CL_CORRUPT);
    const char *text = rig->reads[5].error.text;
    CHECK(strstr(text, "layer 3 expert 5") && strstr(text, "fail their checksum"));
    s = rig_stats(rig, 0);
    CHECK(s.retries == 2 && s.checksum_errors == 3 && s.degraded);
    CHECK(atomic_load(&rig->counters.checksum_errors) == 1);
    set_fault(NOTHING, 0, 0, 0);
    rig_close(rig);
}

static void test_a_file_that_is_cut_off_is_named(io_rig *rig, int32_t backend) {
    rig_open(rig, backend);
    uint64_t end = rig->extents[7][0].file_offset + (512u << 10);
    CHECK(truncate(rig->paths[0], (off_t)end) == 0);
    CHECK(rig_read(rig, 6) == CL_OK && rig_read(rig, 7) == CL_CORRUPT);
    char words[64];
    snprintf(words, sizeof words, "ends at offset %llu", (unsigned long long)end);
    CHECK(strstr(rig->reads[7].error.text, words) != NULL && rig_stats(rig, 0).retries == 0);
    rig_close(rig);
    rig_write_stripe(rig, rig->paths[0], 0, 0, 7);
}

/* ---- mirrors ---- */

static void test_the_mirror_stands_in(io_rig *rig, int32_t backend) {
    rig_write_mirrors(rig);
    rig_open(rig, backend);
    CHECK(rig_stats(rig, 0).mirror && rig_stats(rig, 1).mirror && rig_stats(rig, 0).note[0] == '\0');
    static const kind kinds[] = {ERROR, FLIP};
    for (uint32_t i = 0; i < 2; i++) {
        set_fault(kinds[i], i, 0, ALWAYS);
        CHECK(rig_read(rig, i) == CL_OK);
        cl_drive_stats s = rig_stats(rig, 0);
        CHECK(s.mirror_reads == i + 1 && s.retries == i + 1 && s.degraded && s.last_error[0]);
    }
    set_fault(NOTHING, 0, 0, 0);
    CHECK(truncate(rig->paths[1], 8192) == 0);
    CHECK(rig_read(rig, 8) == CL_OK && rig_stats(rig, 1).mirror_reads == 1 && rig_stats(rig, 1).retries == 0);
    rig_close(rig);
    rig_write_stripe(rig, rig->paths[1], 1, 0, 7);
}

static void test_when_the_mirror_fails_both_are_named(io_rig *rig, int32_t backend) {
    rig_write_mirrors(rig);
    rig_open(rig, backend);
    set_fault(ERROR, 3, 0, ALWAYS);
    atomic_store(&fault.mirror_too, 1);
    CHECK(rig_read(rig, 3) == CL_IO);
    const char *text = rig->reads[3].error.text;
    CHECK(strstr(text, rig->paths[0]) && strstr(text, rig->mirror_paths[0]) && strstr(text, "its mirror"));
    CHECK(rig_stats(rig, 0).mirror_reads == 0);
    set_fault(NOTHING, 0, 0, 0);
    rig_close(rig);
}

static void test_a_mirror_that_is_missing_or_no_mirror_is_a_note(io_rig *rig, int32_t backend) {
    rig_write_mirrors(rig);
    CHECK(unlink(rig->mirror_paths[0]) == 0);
    rig_write_stripe(rig, rig->mirror_paths[1], 1, 0, 7); /* not marked as a mirror */
    rig_open(rig, backend);
    cl_drive_stats s = rig_stats(rig, 0);
    CHECK(!s.mirror && strstr(s.note, rig->mirror_paths[0]) && strstr(s.note, "No such file"));
    CHECK(strstr(rig_stats(rig, 1).note, "a stripe, not a mirror"));
    CHECK(rig_read(rig, 0) == CL_OK);
    CHECK(cl_io_reopen(rig->io, NULL) == CL_OK && !rig_stats(rig, 0).mirror && rig_stats(rig, 0).note[0]);
    rig_write_mirrors(rig);
    CHECK(cl_io_reopen(rig->io, NULL) == CL_OK);
    CHECK(rig_stats(rig, 0).mirror && rig_stats(rig, 0).note[0] == '\0' && rig_stats(rig, 1).mirror);
    set_fault(ERROR, 3, 0, ALWAYS);
    CHECK(rig_read(rig, 3) == CL_OK && rig_stats(rig, 0).mirror_reads == 1);
    set_fault(NOTHING, 0, 0, 0);
    rig_close(rig);
}

/* ---- verify ---- */

static void test_first_checks_each_extent_until_it_was_right_once(io_rig *rig, int32_t backend) {
    rig->options.verify = CL_VERIFY_FIRST;
    rig_open(rig, backend);
    set_fault(FLIP, 1, 0, 1);
    CHECK(rig_read(rig, 1) == CL_OK && rig_stats(rig, 0).checksum_errors == 1);
    CHECK(rig->verified[1][0] == 1 && rig->verified[1][1] == 1 && rig->verified[2][0] == 0);
    set_fault(FLIP, 1, 0, 1);
    rig_submit(rig, 1, CL_READ_URGENT);
    while (atomic_load(&rig->reads[1].pending)) usleep(100);
    CHECK(!atomic_load(&rig->reads[1].failed) && rig_stats(rig, 0).checksum_errors == 1);
    CHECK(memcmp(rig->reads[1].data, rig->content + RIG_RECORD_BYTES, RIG_RECORD_BYTES) != 0);
    rig_close(rig);
    rig->options.verify = CL_VERIFY_NEVER;
    rig_open(rig, backend);
    set_fault(FLIP, 2, 1, 1);
    rig_submit(rig, 2, CL_READ_URGENT);
    while (atomic_load(&rig->reads[2].pending)) usleep(100);
    CHECK(!atomic_load(&rig->reads[2].failed) && rig->verified[2][1] == 0);
    set_fault(NOTHING, 0, 0, 0);
    rig_close(rig);
    rig->options.verify = CL_VERIFY_ALWAYS;
}

/* ---- order ---- */

static void wait_for_answers(uint32_t n) {
    while (atomic_load(&n_order) < n) usleep(200);
}

/* A record that lies on stripe 1 alone: one request. */
static void submit_small(io_rig *rig, uint32_t record, cl_priority priority) {
    cl_io_submit(rig->io, &rig->reads[record], &rig->extents[record][1], 1, priority);
}

static void test_urgent_reads_go_first_and_queued_ones_can_be_promoted(io_rig *rig, int32_t backend) {
    static const uint32_t expected[] = {0, 4, 2, 1, 3};
    rig->options.threads = rig->options.depth = 1;
    rig_open(rig, backend);
    atomic_store(&n_order, 0);
    atomic_store(&gate_closed, 1);
    submit_small(rig, 0, CL_READ_IDLE);
    wait_for_answers(1);
    submit_small(rig, 3, CL_READ_IDLE);
    submit_small(rig, 1, CL_READ_AHEAD);
    submit_small(rig, 2, CL_READ_AHEAD);
    submit_small(rig, 4, CL_READ_URGENT);
    cl_io_promote(rig->io, &rig->reads[2]);
    cl_io_promote(rig->io, &rig->reads[0]); /* on its way already: nothing to move */
    atomic_store(&gate_closed, 0);
    for (uint32_t r = 0; r < 5; r++)
        while (atomic_load(&rig->reads[r].pending)) usleep(100);
    for (uint32_t i = 0; i < 5; i++) CHECK(atomic_load(&order[i]) == expected[i]);
    cl_io_promote(rig->io, &rig->reads[1]); /* complete */
    rig_close(rig);
    rig->options.threads = rig->options.depth = 0;
}

static void test_idle_reads_leave_half_of_the_drive_free(io_rig *rig, int32_t backend) {
    rig->options.threads = rig->options.depth = 4;
    rig_open(rig, backend);
    atomic_store(&n_order, 0);
    atomic_store(&gate_closed, 1);
    for (uint32_t r = 0; r < 4; r++) submit_small(rig, r, CL_READ_IDLE);
    usleep(20000);
    /* A ring's thread waits at the gate with its first answer, reading threads wait with theirs. */
    CHECK(atomic_load(&n_order) <= 2);
    atomic_store(&gate_closed, 0);
    for (uint32_t r = 0; r < 4; r++)
        while (atomic_load(&rig->reads[r].pending)) usleep(100);
    rig_close(rig);
    rig->options.threads = rig->options.depth = 0;
}

static void test_closing_drops_what_has_not_begun(io_rig *rig, int32_t backend) {
    for (int i = 0; i < 20; i++) {
        rig_open(rig, backend);
        for (uint32_t r = 0; r < RIG_RECORDS; r++) rig_submit(rig, r, (cl_priority)(r % CL_PRIORITIES));
        if (i % 2) usleep((useconds_t)i * 100);
        rig_close(rig);
    }
    /* Opened and never started. */
    cl_error err;
    CHECK(cl_io_open(&rig->io, &rig->options, &rig->counters, &err) == CL_OK);
    rig_close(rig);
}

/* ---- reopening ---- */

static void test_a_file_that_was_put_in_the_place_of_a_stripe_is_used_after_reopening(io_rig *rig, int32_t backend) {
    char fresh[160];
    cl_error err;
    rig_open(rig, backend);
    CHECK(truncate(rig->paths[0], 4096) == 0 && rig_read(rig, 0) == CL_CORRUPT);
    snprintf(fresh, sizeof fresh, "%s.partial", rig->paths[0]);
    rig_write_stripe(rig, fresh, 0, 0, 9); /* of another pack */
    CHECK(rename(fresh, rig->paths[0]) == 0);
    CHECK(cl_io_reopen(rig->io, &err) == CL_CORRUPT && strstr(err.text, "another pack") && rig_stats(rig, 0).degraded);
    rig_write_stripe(rig, fresh, 0, 0, 7);
    CHECK(rename(fresh, rig->paths[0]) == 0);
    for (uint32_t r = 1; r < RIG_RECORDS; r++) rig_submit(rig, r, CL_READ_IDLE);
    CHECK(cl_io_reopen(rig->io, &err) == CL_OK && !rig_stats(rig, 0).degraded);
    for (uint32_t r = 1; r < RIG_RECORDS; r++) rig_wait(rig, r);
    for (uint32_t r = 0; r < RIG_RECORDS; r++) CHECK(rig_read(rig, r) == CL_OK);
    CHECK(unlink(rig->paths[1]) == 0); /* the old file can still be read, and the loss is told */
    CHECK(cl_io_reopen(rig->io, &err) == CL_IO && strstr(err.text, rig->paths[1]) && rig_read(rig, 2) == CL_OK);
    rig_close(rig);
    rig_write_stripe(rig, rig->paths[1], 1, 0, 7);
}

/* Lets the read through that is in flight, once the drive waits for it to replace its file. */
static void *open_gate_when_paused(void *argument) {
    cl_drive *d = argument;
    for (uint32_t paused = 0; !paused; usleep(500)) {
        pthread_mutex_lock(&d->mutex);
        paused = d->paused;
        pthread_mutex_unlock(&d->mutex);
    }
    atomic_store(&gate_closed, 0);
    return NULL;
}

static void flip_in(const char *path, uint64_t offset) {
    uint8_t byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= 0x10;
    CHECK(pwrite(fd, &byte, 1, (off_t)offset) == 1 && close(fd) == 0);
}

/* Under way when the file is replaced: one read of which a part has come from the old file, two that have not begun.
 * All were checked before, in the old file; of the new one that says nothing. */
static void test_what_is_under_way_while_a_file_is_replaced_is_checked_again(io_rig *rig, int32_t backend) {
    char fresh[160];
    pthread_t opener;
    const cl_extent *begun = rig->extents[1], *queued = rig->extents[2];
    rig->options.threads = rig->options.depth = 1;
    rig->options.verify = CL_VERIFY_FIRST;
    rig_open(rig, backend);
    for (uint32_t r = 1; r <= 3; r++) CHECK(rig_read(rig, r) == CL_OK);
    snprintf(fresh, sizeof fresh, "%s.partial", rig->paths[0]);
    rig_write_stripe(rig, fresh, 0, 0, 7);
    flip_in(fresh, begun->file_offset + begun->bytes - 1);
    flip_in(fresh, queued->file_offset);
    CHECK(rename(fresh, rig->paths[0]) == 0);
    atomic_store(&n_order, 0);
    atomic_store(&gate_closed, 1);
    for (uint32_t r = 1; r <= 3; r++) rig_submit(rig, r, CL_READ_URGENT);
    wait_for_answers(RIG_STRIPES); /* one read of each stripe is at the gate */
    CHECK(pthread_create(&opener, NULL, open_gate_when_paused, &rig->io->drives[0]) == 0);
    CHECK(cl_io_reopen(rig->io, NULL) == CL_OK);
    cl_io_forget_verified(rig->io, rig->verified[0], sizeof rig->verified);
    CHECK(pthread_join(opener, NULL) == 0);
    CHECK(rig_wait(rig, 1) == CL_CORRUPT && rig_wait(rig, 2) == CL_CORRUPT && rig_wait(rig, 3) == CL_OK);
    CHECK(!rig->verified[1][0] && !rig->verified[2][0]);
    rig_close(rig);
    rig_write_stripe(rig, rig->paths[0], 0, 0, 7);
    rig->options.threads = rig->options.depth = 0;
    rig->options.verify = CL_VERIFY_ALWAYS;
}

/* ---- what the kernel refuses ---- */

/* From now on io_uring_setup fails with EPERM in this process, as in many containers. */
static void refuse_io_uring(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

static void without_io_uring(io_rig *rig) {
    cl_error err;
    refuse_io_uring();
    rig->options.backend = CL_IO_URING;
    CHECK(cl_io_open(&rig->io, &rig->options, &rig->counters, &err) == CL_UNSUPPORTED && rig->io == NULL);
    CHECK(strstr(err.text, "io_uring is refused") && strstr(err.text, "(errno 1)"));
    rig_open(rig, CL_IO_AUTO);
    cl_drive_stats s = rig_stats(rig, 1);
    CHECK(s.backend == CL_IO_THREADS && strstr(s.note, "io_uring is refused") && strstr(s.note, "(errno 1)"));
    for (uint32_t r = 0; r < RIG_RECORDS; r++) CHECK(rig_read(rig, r) == CL_OK);
    rig_close(rig);
}

/* A user who may lock no memory: io_uring works, with ordinary buffers. */
static void without_locked_memory(io_rig *rig) {
    CHECK(setrlimit(RLIMIT_MEMLOCK, &(struct rlimit){0, 0}) == 0);
    CHECK(chmod(rig->folder, 0755) == 0);
    if (geteuid() == 0) CHECK(seteuid(65534) == 0);
    rig_open(rig, CL_IO_AUTO);
    cl_drive_stats s = rig_stats(rig, 0);
    if (s.backend == CL_IO_URING) CHECK(strstr(s.note, "registered buffers are refused"));
    for (uint32_t r = 0; r < RIG_RECORDS; r++) CHECK(rig_read(rig, r) == CL_OK);
    rig_close(rig);
}

/* In a process of its own, because there is no way back. */
static void test_in_a_child(io_rig *rig, void (*test)(io_rig *)) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        test(rig);
        _exit(test_result());
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

/* ---- numbers ---- */

static void test_quantiles_are_right_within_an_eighth(void) {
    static cl_latencies l;
    CHECK(cl_latency_quantile(&l, 0.5) == 0);
    for (uint64_t us = 1; us <= 1000; us++) cl_latency_add(&l, us);
    uint64_t half = cl_latency_quantile(&l, 0.5), most = cl_latency_quantile(&l, 0.99);
    CHECK(half >= 500 && half <= 563 && most >= 990 && most <= 1114);
    cl_latency_add(&l, UINT64_MAX);
    cl_latency_add(&l, 0);
    CHECK(cl_latency_quantile(&l, 1) > 1000000000ull && cl_latency_quantile(&l, 0) == 0);
}

static void test_a_read_lies_in_one_registered_buffer_or_in_none(void) {
    uint64_t gib = CL_RING_BUFFER_BYTES, memory = 2 * gib + 8192;
    CHECK(cl_ring_buffer_of(memory, 0, 4096) == 0 && cl_ring_buffer_of(memory, gib - 4096, 4096) == 0);
    CHECK(cl_ring_buffer_of(memory, gib, 4096) == 1 && cl_ring_buffer_of(memory, gib - 4096, 8192) == -1);
    CHECK(cl_ring_buffer_of(memory, 2 * gib + 4096, 4096) == 2 && cl_ring_buffer_of(memory, 2 * gib, 12288) == -1);
    CHECK(cl_ring_buffer_of(memory, memory, 4096) == -1 && cl_ring_buffer_of(0, 0, 4096) == -1);
}

static void test_the_probe_reads_any_file(const io_rig *rig, int32_t backend) {
    double rate;
    cl_error err;
    CHECK(cl_drive_probe(rig->paths[0], 65536, 3, 4 << 20, backend, &rate, &err) == CL_OK && rate > 0);
    CHECK(cl_drive_probe(rig->paths[1], 4096, 0, 1 << 20, backend, &rate, &err) == CL_OK && rate > 0);
    CHECK(cl_drive_probe(rig->paths[1], 1 << 20, 0, 4 << 20, backend, &rate, &err) == CL_CORRUPT && rate == 0);
    CHECK(cl_drive_probe(rig->paths[0], 5000, 0, 4 << 20, backend, &rate, &err) == CL_INVALID);
    CHECK(cl_drive_probe(rig->paths[0], 4096, 257, 4 << 20, backend, &rate, &err) == CL_INVALID);
    CHECK(cl_drive_probe(rig->paths[0], 4096, 0, 100, backend, &rate, &err) == CL_INVALID);
    CHECK(cl_drive_probe("/nonexistent", 4096, 0, 4096, backend, &rate, &err) == CL_IO);
    CHECK(cl_drive_probe(rig->folder, 4096, 0, 4096, backend, &rate, &err) == CL_IO);
}

int main(void) {
    io_rig rig;
    rig_make(&rig);
    cl_error err;
    int no_ring = cl_io_open(&rig.io, &(cl_io_options){.backend = CL_IO_URING, .stripes = rig.stripes,
                             .n_stripes = RIG_STRIPES}, &rig.counters, &err);
    if (no_ring) fprintf(stderr, "test_io: only threads are tested here: %s\n", err.text);
    rig_close(&rig);
    for (int32_t backend = no_ring ? CL_IO_THREADS : CL_IO_URING; backend <= CL_IO_THREADS; backend++) {
        test_all_that_is_asked_for_comes(&rig, backend);
        test_short_and_interrupted_reads_do_not_show(&rig, backend);
        test_a_read_that_never_comes_to_an_end_is_given_up(&rig, backend);
        test_eio_is_tried_once_more(&rig, backend);
        test_eio_twice_fails_this_record_alone(&rig, backend);
        test_another_errno_is_not_tried_again(&rig, backend);
        test_wrong_bytes_are_read_once_more(&rig, backend);
        test_a_file_that_is_cut_off_is_named(&rig, backend);
        test_first_checks_each_extent_until_it_was_right_once(&rig, backend);
        test_urgent_reads_go_first_and_queued_ones_can_be_promoted(&rig, backend);
        test_idle_reads_leave_half_of_the_drive_free(&rig, backend);
        test_closing_drops_what_has_not_begun(&rig, backend);
        test_a_file_that_was_put_in_the_place_of_a_stripe_is_used_after_reopening(&rig, backend);
        test_what_is_under_way_while_a_file_is_replaced_is_checked_again(&rig, backend);
        test_the_probe_reads_any_file(&rig, backend);
        test_the_mirror_stands_in(&rig, backend);
        test_when_the_mirror_fails_both_are_named(&rig, backend);
        test_a_mirror_that_is_missing_or_no_mirror_is_a_note(&rig, backend);
        rig.stripes[0].mirror_path = rig.stripes[1].mirror_path = NULL;
    }
    test_in_a_child(&rig, without_io_uring);
    test_in_a_child(&rig, without_locked_memory);
    test_quantiles_are_right_within_an_eighth();
    test_a_read_lies_in_one_registered_buffer_or_in_none();
    rig_remove(&rig);
    return test_result();
}
