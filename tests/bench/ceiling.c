/* ceiling.c - what this machine can do, measured without any of the product's code: the yardstick of every benchmark.
 *
 * ram:  each of n threads sums its share of a buffer of huge pages through four concurrent sequential streams (one
 *       stream per core does not saturate memory). disk: an O_DIRECT reader with a fixed number of reads in flight.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define STREAMS 4
#define HUGE_PAGE (2u << 20)
#define MAX_THREADS 64

typedef uint64_t vec __attribute__((vector_size(32)));

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A touched buffer of huge pages, to be freed with free(); or NULL. */
void *ceiling_buffer(uint64_t bytes) {
    uint64_t rounded = (bytes + HUGE_PAGE - 1) & ~(uint64_t)(HUGE_PAGE - 1);
    uint8_t *buffer = aligned_alloc(HUGE_PAGE, rounded);
    if (!buffer) return NULL;
    madvise(buffer, rounded, MADV_HUGEPAGE);
    memset(buffer, 1, rounded);
    return buffer;
}

struct ram_job {
    const uint8_t *data;
    uint64_t bytes;
    uint64_t sum;
};

__attribute__((target("avx2"), noinline)) static uint64_t sum_avx2(const uint8_t *data, uint64_t bytes) {
    uint64_t quarter = bytes / STREAMS & ~(uint64_t)127;
    vec acc[STREAMS] = {0};
    for (uint64_t at = 0; at < quarter; at += 64)
        for (int s = 0; s < STREAMS; s++) {
            const vec *p = (const vec *)(data + at + quarter * (uint64_t)s);
            acc[s] += p[0] + p[1];
        }
    vec all = acc[0] + acc[1] + acc[2] + acc[3];
    return all[0] + all[1] + all[2] + all[3];
}

static void *ram_thread(void *argument) {
    struct ram_job *job = argument;
    job->sum = sum_avx2(job->data, job->bytes);
    return NULL;
}

/* Bytes per second of one pass over data; < 0 if a thread could not be started. */
double ceiling_ram(const void *data, uint64_t bytes, int threads) {
    struct ram_job jobs[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    if (threads < 1 || threads > MAX_THREADS || !__builtin_cpu_supports("avx2")) return -1;
    uint64_t share = bytes / (uint64_t)threads & ~(uint64_t)4095;
    double start = now();
    for (int i = 0; i < threads; i++) {
        jobs[i] = (struct ram_job){.data = (const uint8_t *)data + share * (uint64_t)i, .bytes = share};
        if (i && pthread_create(&handles[i], NULL, ram_thread, &jobs[i])) return -1;
    }
    ram_thread(&jobs[0]);
    for (int i = 1; i < threads; i++) pthread_join(handles[i], NULL);
    double seconds = now() - start;
    volatile uint64_t keep = 0;
    for (int i = 0; i < threads; i++) keep += jobs[i].sum;
    (void)keep;
    return (double)(share * (uint64_t)threads) / seconds;
}

struct disk_job {
    int fd;
    uint8_t *buffer;
    uint64_t first, stride, block, end;
    int failed;
};

static void *disk_thread(void *argument) {
    struct disk_job *job = argument;
    for (uint64_t at = job->first; at + job->block <= job->end; at += job->stride) {
        uint64_t done = 0;
        while (done < job->block) {
            ssize_t got = pread(job->fd, job->buffer + done, job->block - done, (off_t)(at + done));
            if (got <= 0) {
                job->failed = 1;
                return NULL;
            }
            done += (uint64_t)got;
        }
    }
    return NULL;
}

/* Bytes per second of reading the first `bytes` of a file in blocks, `depth` reads in flight, O_DIRECT into huge
 * pages; < 0 if the file system refuses. */
double ceiling_disk(const char *path, uint64_t bytes, uint64_t block, int depth) {
    struct disk_job jobs[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    if (fd < 0 || depth < 1 || depth > MAX_THREADS) return -1;
    uint8_t *buffer = ceiling_buffer(block * (uint64_t)depth);
    double rate = -1;
    int started = 0, failed = buffer == NULL;
    double start = now();
    for (; !failed && started < depth; started++) {
        jobs[started] = (struct disk_job){.fd = fd, .buffer = buffer + block * (uint64_t)started,
                                          .first = block * (uint64_t)started, .stride = block * (uint64_t)depth,
                                          .block = block, .end = bytes};
        if (pthread_create(&handles[started], NULL, disk_thread, &jobs[started])) {
            failed = 1;
            break;
        }
    }
    for (int i = 0; i < started; i++) {
        pthread_join(handles[i], NULL);
        failed |= jobs[i].failed;
    }
    double seconds = now() - start;
    if (!failed) rate = (double)(bytes / block * block) / seconds;
    free(buffer);
    close(fd);
    return rate;
}

struct compute_job {
    int wide; /* 0: int8 activations, maddubs + paddw; 1: int16, maddwd + paddd */
    uint64_t rounds;
};

#define FOUR_PAIRS(multiply, add)                                                                                      \
    multiply " %%ymm14,%%ymm15,%%ymm0\n" add " %%ymm0,%%ymm1,%%ymm1\n"                                                 \
    multiply " %%ymm14,%%ymm15,%%ymm2\n" add " %%ymm2,%%ymm3,%%ymm3\n"                                                 \
    multiply " %%ymm14,%%ymm15,%%ymm4\n" add " %%ymm4,%%ymm5,%%ymm5\n"                                                 \
    multiply " %%ymm14,%%ymm15,%%ymm6\n" add " %%ymm6,%%ymm7,%%ymm7\n"
#define CLOBBERED "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7"

static void *compute_thread(void *argument) {
    const struct compute_job *job = argument;
    for (uint64_t i = 0; i < job->rounds; i++) {
        if (job->wide)
            __asm__ volatile(FOUR_PAIRS("vpmaddwd", "vpaddd")::: CLOBBERED);
        else
            __asm__ volatile(FOUR_PAIRS("vpmaddubsw", "vpaddw")::: CLOBBERED);
    }
    return NULL;
}

/* Multiply-adds per second of the integer product that the kernels are made of, in registers; < 0 without AVX2. */
double ceiling_compute(int wide, uint64_t rounds, int threads) {
    struct compute_job job = {.wide = wide, .rounds = rounds};
    pthread_t handles[MAX_THREADS];
    if (threads < 1 || threads > MAX_THREADS || !__builtin_cpu_supports("avx2")) return -1;
    double start = now();
    for (int i = 1; i < threads; i++)
        if (pthread_create(&handles[i], NULL, compute_thread, &job)) return -1;
    compute_thread(&job);
    for (int i = 1; i < threads; i++) pthread_join(handles[i], NULL);
    return (double)rounds * threads * 4 * (wide ? 16 : 32) / (now() - start);
}
