/* drives.c - a model's drives seen from outside, and what a drive is worth to the engine.
 *
 * Owns the public functions around the I/O engine that are not the step's: statistics, reopening, and the probe, which
 * reads any file in the engine's own way (same queues, requests and back end, no checksums) and says how fast that was.
 */
#include "clock.h"
#include "error.h"
#include "format.h"
#include "io_drive.h"
#include "model.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

uint32_t cl_model_drive_stats(const cl_model *model, cl_drive_stats *out, uint32_t capacity) {
    return cl_io_stats(model->io, out, capacity);
}

/* What was checked in the old files says nothing about new ones. */
int cl_model_reopen_stripes(cl_model *model, cl_error *err) {
    int code = cl_io_reopen(model->io, err);
    for (uint32_t l = 0; l < model->store.n_layers; l++) {
        cl_store_layer *layer = &model->store.layers[l];
        cl_io_forget_verified(model->io, layer->verified, (uint64_t)layer->experts * layer->extents_per_record);
    }
    return code;
}

/* ---- the probe ---- */

#define MOST_PROBE_READS (2 * CL_MOST_IO_DEPTH)
#define MOST_PROBE_REQUEST (1ull << 28)

typedef struct probe {
    cl_io *io;
    cl_counters counters;
    uint64_t request_bytes, places; /* how many requests the file has room for */
    uint64_t reads;                 /* wanted */
    uint64_t submitted;
    uint32_t n_slots; /* reads on their way at once */
    uint8_t *memory;
    uint64_t memory_bytes;
    cl_read slots[MOST_PROBE_READS];
    cl_task tasks[MOST_PROBE_READS];
    cl_extent extents[MOST_PROBE_READS];
    uint32_t running[MOST_PROBE_READS];
} probe;

/* Scattered, and each place once before any comes again: an odd multiple of the golden section, modulo the smallest
 * power of two that holds all places, is a permutation; what lies outside is skipped. */
static uint64_t place_of(uint64_t *step, uint64_t places) {
    uint64_t size = 1;
    while (size < places) size *= 2;
    for (;;) {
        uint64_t place = (*step)++ * 0x9e3779b97f4a7c15ull & (size - 1);
        if (place < places) return place;
    }
}

static void submit_one(probe *p, uint32_t slot, uint64_t *step) {
    cl_extent *e = &p->extents[slot];
    *e = (cl_extent){.file_offset = place_of(step, p->places) * p->request_bytes, .bytes = p->request_bytes};
    p->running[slot] = 1;
    p->submitted++;
    cl_io_submit(p->io, &p->slots[slot], e, 1, CL_READ_URGENT);
}

/* Keeps all slots busy until everything is read. */
static int run_probe(probe *p, cl_error *err) {
    uint64_t step = 0, done = 0;
    while (done < p->reads) {
        uint32_t seen = cl_io_events(p->io), moved = 0;
        for (uint32_t i = 0; i < p->n_slots; i++) {
            cl_read *r = &p->slots[i];
            if (p->running[i] && atomic_load(&r->pending) == 0) {
                p->running[i] = 0;
                done++;
                moved = 1;
                if (atomic_load(&r->failed)) return cl_fail(err, r->error.code, "%s", r->error.text);
            }
            if (!p->running[i] && p->submitted < p->reads) submit_one(p, i, &step);
        }
        if (!moved) cl_io_wait(p->io, seen, 20000);
    }
    return CL_OK;
}

static int map_slots(probe *p, cl_error *err) {
    p->memory_bytes = p->n_slots * p->request_bytes;
    void *memory = NULL;
    if (posix_memalign(&memory, CL_HUGE_PAGE, p->memory_bytes) != 0)
        return cl_fail(err, CL_NOMEM, "no %llu bytes of memory to probe a drive",
                       (unsigned long long)p->memory_bytes);
    p->memory = memory;
    madvise(p->memory, p->memory_bytes, MADV_HUGEPAGE); /* as in arena.c; only slower where it is refused */
    memset(p->memory, 0, p->memory_bytes);
    for (uint32_t i = 0; i < p->n_slots; i++) {
        p->slots[i].data = p->memory + i * p->request_bytes;
        p->slots[i].tasks = &p->tasks[i];
    }
    return CL_OK;
}

static int check_arguments(const char *path, uint64_t request_bytes, uint32_t depth, uint64_t bytes, int32_t backend,
                           cl_error *err) {
    if (request_bytes == 0 || request_bytes % CL_ALIGN || request_bytes > MOST_PROBE_REQUEST)
        return cl_fail(err, CL_INVALID, "probe of %s: request_bytes is %llu, must be a multiple of %d up to %llu", path,
                       (unsigned long long)request_bytes, CL_ALIGN, MOST_PROBE_REQUEST);
    if (depth > CL_MOST_IO_DEPTH)
        return cl_fail(err, CL_INVALID, "probe of %s: depth is %u, must be 0..%d", path, depth, CL_MOST_IO_DEPTH);
    if (bytes < request_bytes)
        return cl_fail(err, CL_INVALID, "probe of %s: bytes is %llu, less than a request", path,
                       (unsigned long long)bytes);
    if (backend < CL_IO_AUTO || backend > CL_IO_THREADS)
        return cl_fail(err, CL_INVALID, "probe of %s: backend %d is not known", path, backend);
    return CL_OK;
}

/* Twice what is in flight, so that the drive's queue never runs dry while a read is replaced. */
static uint32_t slots_for(cl_io *io, uint64_t request_bytes) {
    cl_drive_stats drive;
    cl_io_stats(io, &drive, 1);
    uint64_t wanted = 2 * (uint64_t)drive.depth, enough = 2 + wanted * CL_MOST_REQUEST / request_bytes;
    return (uint32_t)(wanted < enough ? wanted : enough);
}

static int measure(probe *p, double *bytes_per_second, cl_error *err) {
    int code = map_slots(p, err);
    if (!code) code = cl_io_start(p->io, p->memory, p->memory_bytes, err);
    if (code) return code;
    uint64_t start = cl_now_us();
    code = run_probe(p, err);
    uint64_t took = cl_now_us() - start;
    if (!code) *bytes_per_second = (double)(p->reads * p->request_bytes) * 1e6 / (double)(took ? took : 1);
    return code;
}

int cl_drive_probe(const char *path, uint64_t request_bytes, uint32_t depth, uint64_t bytes, int32_t backend,
                   double *bytes_per_second, cl_error *err) {
    *bytes_per_second = 0;
    cl_ok(err);
    int code = check_arguments(path, request_bytes, depth, bytes, backend, err);
    if (code) return code;
    struct stat s;
    cl_stripe stripe = {path, request_bytes, NULL};
    cl_io_options options = {.stripes = &stripe,
                             .n_stripes = 1,
                             .backend = backend,
                             .threads = depth,
                             .depth = depth,
                             .verify = CL_VERIFY_NEVER,
                             .bare = 1};
    probe *p = calloc(1, sizeof *p);
    if (!p) return cl_fail(err, CL_NOMEM, "no memory to probe a drive");
    code = cl_io_open(&p->io, &options, &p->counters, err);
    if (!code && stat(path, &s) != 0)
        code = cl_fail(err, CL_IO, "probe of %s: %s (errno %d)", path, strerror(errno), errno);
    if (!code) {
        p->request_bytes = request_bytes;
        p->places = (uint64_t)s.st_size / request_bytes;
        p->reads = bytes / request_bytes;
        p->n_slots = slots_for(p->io, request_bytes);
        code = measure(p, bytes_per_second, err);
    }
    cl_io_close(p->io);
    free(p->memory);
    free(p);
    return code;
}
