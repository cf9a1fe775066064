/* reads.c - the I/O engine alone: extents of one file, read in scattered order with a few on their way at once. Built
 * and called by reads.py, which alternates its runs with those of a reader that is not the product's. */
#define _GNU_SOURCE
#include "io_drive.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE (2u << 20)
#define ON_THEIR_WAY 4 /* records, as while a layer's experts are read */
#define CRC_BUFFERS 24
#define CRC_BYTES (19ull << 20)

typedef struct reading {
    double bytes_per_second, io_cpu_seconds, process_cpu_seconds, p50_us, p99_us;
    int32_t registered; /* 1: nothing is noted against it */
} reading;

static cl_extent *extents;
static uint64_t n_extents, extent_bytes;
static uint8_t *memory;

static double seconds(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint8_t *huge(uint64_t bytes) {
    uint8_t *p = aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) & ~(uint64_t)(HUGE_PAGE - 1));
    if (!p) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 1, bytes);
    return p;
}

/* Reads the file once for its extents' checksums; 0, or an errno. */
int bench_prepare(const char *path, uint64_t bytes, uint64_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC), failed = fd < 0 ? errno : 0;
    extent_bytes = size;
    n_extents = bytes / size;
    extents = calloc(n_extents, sizeof *extents);
    memory = huge(ON_THEIR_WAY * size);
    if (!failed && (!extents || !memory)) failed = ENOMEM;
    for (uint64_t i = 0; i < n_extents && !failed; i++) {
        uint64_t done;
        failed = cl_pread_all(fd, memory, size, i * size, &done);
        if (!failed) extents[i] = (cl_extent){0, cl_crc32c(0, memory, size), i * size, 0, size};
    }
    if (fd >= 0) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    return failed;
}

static int read_all(cl_io *io, uint64_t wanted, uint64_t seed) {
    static cl_read reads[ON_THEIR_WAY];
    static cl_task tasks[ON_THEIR_WAY];
    uint64_t submitted = 0, done = 0, at = seed;
    memset(reads, 0, sizeof reads);
    for (int i = 0; i < ON_THEIR_WAY; i++) {
        reads[i].data = memory + (uint64_t)i * extent_bytes;
        reads[i].tasks = &tasks[i];
    }
    while (done < wanted) {
        uint32_t seen = cl_io_events(io), moved = 0;
        for (int i = 0; i < ON_THEIR_WAY; i++) {
            int busy = reads[i].n_tasks && atomic_load(&reads[i].pending);
            if (reads[i].n_tasks && !busy) {
                if (atomic_load(&reads[i].failed)) return -1;
                reads[i].n_tasks = 0;
                done++;
                moved = 1;
            }
            if (busy || submitted == wanted) continue;
            at = at * 6364136223846793005ull + 1442695040888963407ull;
            cl_io_submit(io, &reads[i], &extents[(at >> 33) % n_extents], 1, CL_READ_URGENT);
            submitted++;
        }
        if (!moved) cl_io_wait(io, seen, 1000000);
    }
    return 0;
}

/* Reads `wanted` extents; 0, or a CL_* code with its text in `why` [CL_ERROR_TEXT]. */
int bench_read(const char *path, int32_t backend, int32_t verify, uint32_t depth, uint64_t wanted, uint64_t seed,
               reading *out, char *why) {
    cl_stripe stripe = {path, extent_bytes, NULL};
    cl_io_options options = {.stripes = &stripe, .n_stripes = 1, .backend = backend, .threads = depth, .depth = depth,
                             .direct = CL_DIRECT_ON, .verify = verify, .bare = 1};
    static cl_counters counters;
    cl_error err = {0};
    cl_drive_stats drive;
    cl_io *io;
    int code = cl_io_open(&io, &options, &counters, &err);
    if (!code) code = cl_io_start(io, memory, ON_THEIR_WAY * extent_bytes, &err);
    if (!code) {
        double wall = seconds(CLOCK_MONOTONIC), process = seconds(CLOCK_PROCESS_CPUTIME_ID);
        if (read_all(io, wanted, seed)) code = CL_IO;
        wall = seconds(CLOCK_MONOTONIC) - wall;
        process = seconds(CLOCK_PROCESS_CPUTIME_ID) - process;
        cl_io_stats(io, &drive, 1);
        double gb = (double)(wanted * extent_bytes) / 1e9;
        *out = (reading){gb * 1e9 / wall, (double)drive.cpu_us / 1e6 / gb, process / gb, (double)drive.latency_p50_us,
                         (double)drive.latency_p99_us, drive.note[0] == '\0'};
    }
    memcpy(why, err.text, sizeof err.text);
    cl_io_close(io);
    return code;
}

/* Bytes per second of one core's checksum over one of many 19 MB buffers, so that none is in a cache. */
double bench_checksum(uint32_t turn) {
    static uint8_t *buffers;
    if (!buffers) buffers = huge(CRC_BUFFERS * CRC_BYTES);
    if (!buffers) return -1;
    double start = seconds(CLOCK_THREAD_CPUTIME_ID);
    volatile uint32_t keep = cl_crc32c(0, buffers + turn % CRC_BUFFERS * CRC_BYTES, CRC_BYTES);
    (void)keep;
    return (double)CRC_BYTES / (seconds(CLOCK_THREAD_CPUTIME_ID) - start);
}
