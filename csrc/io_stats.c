/* io_stats.c - what a drive tells about itself: counters, latencies, processor time, notes.
 *
 * Owns the histogram and the snapshot of cl_drive_stats. Refuses to judge: what is slow or degraded is for those who
 * read the numbers. Counters are read while they move; each is right by itself.
 */
#include "clock.h"
#include "io_drive.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define STEPS 8 /* buckets per octave */

/* 0..7 have a bucket each; from there on the three bits below the highest one choose within its octave. */
static uint32_t bucket_of(uint64_t us) {
    if (us < STEPS) return (uint32_t)us;
    uint32_t octave = 63 - (uint32_t)__builtin_clzll(us); /* >= 3 */
    uint32_t bucket = (octave - 2) * STEPS + (uint32_t)(us >> (octave - 3) & (STEPS - 1));
    return bucket < CL_LATENCY_BUCKETS ? bucket : CL_LATENCY_BUCKETS - 1;
}

static uint64_t end_of(uint32_t bucket) {
    if (bucket < STEPS) return bucket;
    uint32_t octave = bucket / STEPS + 2;
    return ((uint64_t)(STEPS + bucket % STEPS + 1) << (octave - 3)) - 1;
}

void cl_latency_add(cl_latencies *l, uint64_t us) { cl_count(&l->count[bucket_of(us)], 1); }

uint64_t cl_latency_quantile(const cl_latencies *l, double share) {
    cl_latencies *counts = (cl_latencies *)l; /* atomic loads want it without const */
    uint64_t total = 0, seen = 0;
    for (int i = 0; i < CL_LATENCY_BUCKETS; i++) total += atomic_load(&counts->count[i]);
    if (total == 0) return 0;
    for (uint32_t i = 0; i < CL_LATENCY_BUCKETS; i++) {
        seen += atomic_load(&counts->count[i]);
        if ((double)seen >= share * (double)total) return end_of(i);
    }
    return end_of(CL_LATENCY_BUCKETS - 1);
}

void cl_drive_note(cl_drive *d, cl_note which, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(d->notes[which], sizeof d->notes[which], format, arguments);
    va_end(arguments);
}

static uint64_t cpu_us(const cl_drive *d) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < d->n_threads; i++) {
        clockid_t clock;
        struct timespec t;
        if (pthread_getcpuclockid(d->threads[i], &clock) != 0 || clock_gettime(clock, &t) != 0) continue;
        sum += (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
    }
    return sum;
}

static void join_notes(const cl_drive *d, char *out, uint64_t bytes) {
    uint64_t used = 0;
    out[0] = '\0';
    for (int i = 0; i < CL_NOTES; i++) {
        if (!d->notes[i][0] || used >= bytes) continue;
        int n = snprintf(out + used, bytes - used, "%s%s", used ? "; " : "", d->notes[i]);
        if (n > 0) used += (uint64_t)n;
    }
}

void cl_drive_stats_of(cl_drive *d, cl_drive_stats *out) {
    cl_drive_counters *c = &d->counters;
    *out = (cl_drive_stats){
        .backend = d->backend->kind,
        .depth = d->depth,
        .reads = atomic_load(&c->reads),
        .read_bytes = atomic_load(&c->read_bytes),
        .busy_us = atomic_load(&c->busy_us),
        .cpu_us = cpu_us(d),
        .retries = atomic_load(&c->retries),
        .errors = atomic_load(&c->errors),
        .checksum_errors = atomic_load(&c->checksum_errors),
        .mirror_reads = atomic_load(&c->mirror_reads),
        .latency_p50_us = cl_latency_quantile(&c->latencies, 0.50),
        .latency_p99_us = cl_latency_quantile(&c->latencies, 0.99),
    };
    pthread_mutex_lock(&d->mutex);
    out->direct = d->file.direct_fd >= 0;
    out->mirror = d->mirror.path && d->mirror.buffered_fd >= 0;
    out->degraded = d->degraded;
    if (d->in_flight) out->busy_us += cl_now_us() - d->busy_since_us;
    memcpy(out->last_error, d->last_error, sizeof out->last_error);
    join_notes(d, out->note, sizeof out->note);
    pthread_mutex_unlock(&d->mutex);
}
