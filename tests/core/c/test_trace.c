/* test_trace.c - a recording while its drive is slow, late or full: no step waits for it, what is in the file is exact,
 * and a file that does not hold everything says so.
 *
 * Every write passes the gate below, which can hold it up or fail it. Should a step wait for the gate, the alarm ends
 * the test.
 * link: -Wl,--wrap=write
 */
#include "check.h"
#include "store.h"
#include "trace.h"
#include "trace_writer.h"
#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define LAYERS 3
#define EXPERTS 24
#define SLOTS 7
#define RING 3
#define TURN 5
#define PROMPT_USES 300 /* between two turns: they fill blocks quickly, a step of decoding alone takes a few bytes */
#define MANY_STEPS 100000
#define SOME_STEPS 250 /* several blocks, far fewer than there is room for */
#define PATIENCE_SECONDS 240

/* ---- the gate ---- */

static pthread_mutex_t gate_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_opened = PTHREAD_COND_INITIALIZER;
static int gate_is_closed, writes_until_full = -1, writes_when_full;

ssize_t __real_write(int fd, const void *data, size_t bytes);
ssize_t __wrap_write(int fd, const void *data, size_t bytes);

ssize_t __wrap_write(int fd, const void *data, size_t bytes) {
    pthread_mutex_lock(&gate_mutex);
    while (gate_is_closed) pthread_cond_wait(&gate_opened, &gate_mutex);
    int is_full = writes_until_full == 0;
    if (writes_until_full > 0) writes_until_full--;
    writes_when_full += is_full;
    /* As a file system does: what there is room for, and then no more. */
    if (is_full && writes_when_full == 1) bytes /= 2;
    pthread_mutex_unlock(&gate_mutex);
    if (is_full && writes_when_full > 1) {
        errno = ENOSPC;
        return -1;
    }
    return __real_write(fd, data, bytes);
}

static void set_gate(int is_closed, int until_full) {
    pthread_mutex_lock(&gate_mutex);
    gate_is_closed = is_closed;
    writes_until_full = until_full;
    writes_when_full = 0;
    pthread_cond_broadcast(&gate_opened);
    pthread_mutex_unlock(&gate_mutex);
}

/* ---- a store that is recorded ---- */

typedef struct fixture {
    cl_store store;
    cl_counters counters;
    cl_expert_layer layers[LAYERS];
    void *memory;
    char path[64];
    uint64_t accesses; /* that decoding has made */
} fixture;

static void make(fixture *f) {
    memset(f, 0, sizeof *f);
    for (uint32_t l = 0; l < LAYERS; l++) f->layers[l] = (cl_expert_layer){.layer = l, .experts = EXPERTS};
    cl_model_options options = {
        .expert_layers = f->layers, .n_expert_layers = LAYERS, .expert_slots = SLOTS, .ring_slots = RING};
    cl_carve carve = {0};
    cl_store_place(&f->store, &carve, &options);
    f->memory = aligned_alloc(64, (carve.used + 127) & ~63ull);
    memset(f->memory, 0, (carve.used + 127) & ~63ull);
    carve = (cl_carve){f->memory, 0, 0};
    f->store.counters = &f->counters;
    cl_store_place(&f->store, &carve, &options);
    cl_store_init(&f->store, &options);
    (void)snprintf(f->path, sizeof f->path, "/tmp/colibri-trace-%ld", (long)getpid());
    cl_error err = {0};
    CHECK(cl_recorder_open(&f->store.recorder, &f->store, 0, f->path, &err) == CL_OK);
}

static void turn(fixture *f, uint32_t layer) {
    uint32_t first = (uint32_t)(test_random() % (EXPERTS - TURN));
    for (uint32_t e = first; e < first + TURN; e++) {
        int loaded;
        cl_slot *slot = cl_store_acquire(&f->store, layer, e, CL_FOR_DECODE, &loaded);
        CHECK(slot);
        if (!slot) return;
        cl_cache_touch(&f->store, layer, e, 1);
        for (uint32_t i = 0; i < PROMPT_USES / TURN; i++) cl_record_prefill_use(&f->store, slot, 0);
        cl_store_release(&f->store, slot);
        f->accesses++;
    }
}

static int has_stopped(const fixture *f, cl_error *err) { return cl_recorder_state(f->store.recorder, err) != CL_OK; }

static uint64_t file_bytes(const fixture *f) {
    struct stat status;
    return stat(f->path, &status) ? 0 : (uint64_t)status.st_size;
}

/* Steps until the recording has stopped, `most` at most. */
static void run(fixture *f, uint32_t most) {
    for (uint32_t i = 0; i < most && !has_stopped(f, NULL); i++) {
        for (uint32_t l = 0; l < LAYERS; l++) turn(f, l);
        cl_cache_tick(&f->store);
    }
}

static int end(fixture *f, cl_error *err) {
    cl_recorder *recorder = f->store.recorder;
    f->store.recorder = NULL;
    return cl_recorder_close(recorder, &f->store, err);
}

/* What is in the file is repeated without a difference; its accesses. */
static uint64_t check_file(fixture *f, uint32_t is_complete) {
    cl_trace *trace;
    cl_trace_info info;
    cl_replay replay;
    cl_error err = {0};
    CHECK(cl_trace_open(&trace, f->path, &err) == CL_OK);
    cl_trace_get_info(trace, &info);
    CHECK(info.is_complete == is_complete);
    CHECK(cl_trace_replay(trace, &replay, &err) == CL_OK);
    CHECK(replay.differences == 0 && replay.accesses == info.accesses);
    cl_trace_close(trace);
    unlink(f->path);
    free(f->memory);
    return info.accesses;
}

/* ---- tests ---- */

static void test_a_drive_that_is_late_costs_nothing(void) {
    fixture f;
    cl_error err = {0};
    make(&f);
    uint64_t at_first = file_bytes(&f);
    set_gate(1, -1);
    run(&f, SOME_STEPS);
    CHECK(!has_stopped(&f, &err) && file_bytes(&f) == at_first);
    set_gate(0, -1);
    run(&f, SOME_STEPS);
    CHECK(end(&f, &err) == CL_OK);
    CHECK(check_file(&f, 1) == f.accesses);
}

static void test_a_drive_that_is_too_slow_ends_the_recording_and_leaves_an_exact_beginning(void) {
    fixture f;
    cl_error err = {0};
    make(&f);
    set_gate(1, -1);
    run(&f, MANY_STEPS);
    CHECK(has_stopped(&f, &err) && err.code == CL_IO);
    CHECK(strstr(err.text, f.path) && strstr(err.text, "cannot be written as fast as the model runs"));
    uint64_t accesses = f.accesses;
    set_gate(0, -1);
    /* A drive that is quick again brings nothing back. */
    for (uint32_t i = 0; i < SOME_STEPS; i++) turn(&f, i % LAYERS);
    cl_error at_end = {0};
    CHECK(end(&f, &at_end) == CL_IO && strcmp(at_end.text, err.text) == 0);
    CHECK(file_bytes(&f) > (CL_WRITER_BLOCKS - 2) * (uint64_t)(CL_BLOCK_BYTES - 1024));
    uint64_t kept = check_file(&f, 0);
    CHECK(kept > accesses / 2 && kept < accesses);
}

static void test_a_full_drive_ends_the_recording_and_nothing_is_written_behind_the_failure(void) {
    fixture f;
    cl_error err = {0};
    make(&f);
    set_gate(1, 3);
    run(&f, SOME_STEPS); /* several blocks wait behind the one that fails */
    CHECK(!has_stopped(&f, &err));
    set_gate(0, 3);
    CHECK(end(&f, &err) == CL_IO);
    CHECK(strstr(err.text, "cannot be written: No space left on device; recording has stopped"));
    CHECK(writes_when_full == 2); /* the half that had room, and the failure */
    set_gate(0, -1);
    uint64_t kept = check_file(&f, 0);
    CHECK(kept > 0 && kept < f.accesses / 2);
}

static void test_a_header_that_cannot_be_written_leaves_no_file(void) {
    fixture f;
    cl_error err = {0};
    make(&f);
    CHECK(end(&f, &err) == CL_OK);
    CHECK(check_file(&f, 1) == 0);
    make(&f);
    CHECK(end(&f, &err) == CL_OK);
    unlink(f.path);
    set_gate(0, 0);
    CHECK(cl_recorder_open(&f.store.recorder, &f.store, 0, f.path, &err) == CL_IO);
    CHECK(strstr(err.text, "No space left") && !f.store.recorder && access(f.path, F_OK) != 0);
    set_gate(0, -1);
    free(f.memory);
}

int main(void) {
    alarm(PATIENCE_SECONDS);
    test_a_drive_that_is_late_costs_nothing();
    test_a_drive_that_is_too_slow_ends_the_recording_and_leaves_an_exact_beginning();
    test_a_full_drive_ends_the_recording_and_nothing_is_written_behind_the_failure();
    test_a_header_that_cannot_be_written_leaves_no_file();
    return test_result();
}
