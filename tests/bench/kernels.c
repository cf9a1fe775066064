/* kernels.c - how fast the matrix product runs beside what the memory could deliver. Built and read by kernels.py.
 *
 * One thread, timed by its own CPU clock: what others take of the core is not counted. Weights lie in one arena of huge
 * pages far larger than the caches; every measurement alternates with a plain read of that arena by four streams, so
 * that both see the same neighbours; medians. Prints one line per shape: name, rows, cols, tokens, GB/s of weights,
 * GB/s of the plain read, 1e9 multiply-adds per second. */
#include "kernels.h"
#include "numbers.h"

#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define ARENA (768ull << 20)
#define ROUNDS 24

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, by_value);
    return x[n / 2];
}

/* Reads `bytes` bytes as four streams; the sum keeps the loads alive. */
__attribute__((target("avx2"))) static uint64_t read_streams(const uint8_t *at, uint64_t bytes) {
    __m256i sum[4] = {0};
    uint64_t quarter = bytes / 4 / 128 * 128;
    for (uint64_t i = 0; i < quarter; i += 128)
        for (int s = 0; s < 4; s++)
            for (uint64_t j = 0; j < 128; j += 32) {
                const uint8_t *from = at + (uint64_t)s * quarter + i + j;
                sum[s] = _mm256_add_epi64(sum[s], _mm256_load_si256((const __m256i *)(const void *)from));
            }
    __m256i all = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    return (uint64_t)_mm256_extract_epi64(all, 0) + (uint64_t)_mm256_extract_epi64(all, 2);
}

/* Random codes with scales and minima below 2 in magnitude: the speed does not depend on them, NaN would. */
static void fill(uint8_t *arena) {
    uint64_t s = 88172645463325252ull;
    for (uint64_t i = 0; i < ARENA; i += 8) {
        s ^= s << 13, s ^= s >> 7, s ^= s << 17;
        uint64_t word = s & 0xbfbfbfbfbfbfbfbfull;
        memcpy(arena + i, &word, 8);
    }
}

typedef struct test {
    const char *name;
    cl_format format;
    int32_t activation;
    uint64_t rows, cols, n;
} test;

static uint64_t measure(const test *t, const cl_kernels *kernels, uint8_t *arena) {
    cl_matrix w;
    if (cl_matrix_init(&w, &t->format, t->rows, t->cols, arena, NULL) != CL_OK) return 0;
    uint64_t bytes = w.tile_bytes * w.n_tiles, count = ARENA / bytes, sink = 0;
    int32_t kind = t->format.group_size ? t->activation : CL_ACTIVATION_F32;
    float *x = malloc(t->n * t->cols * sizeof *x), *y = malloc(t->n * t->rows * sizeof *y);
    for (uint64_t i = 0; i < t->n * t->cols; i++) x[i] = (float)((int)(i * 7919 % 255) - 127) * 0.01f;
    void *memory = aligned_alloc(64, cl_acts_bytes(kind, t->n, t->cols, t->format.group_size) + 64);
    cl_acts acts;
    cl_acts_place(&acts, memory, kind, t->n, t->cols, t->format.group_size);
    kernels->quantize(&acts, x, t->cols, 0, t->n);
    double product[ROUNDS], plain[ROUNDS];
    uint64_t piece = bytes < (16ull << 20) ? (16ull << 20) / bytes : 1, at = 0;
    if (t->n > 8) piece = 1;
    for (int round = 0; round < ROUNDS; round++) {
        double start = now();
        for (uint64_t i = 0; i < piece; i++, at = (at + 1) % count) {
            w.tiles = arena + at * bytes / 64 * 64;
            kernels->matmul(&w, 0, w.n_tiles, &acts, NULL, t->n, y, t->rows);
        }
        product[round] = (now() - start) / (double)piece;
        uint64_t offset = (uint64_t)round * 7919 % 40 * (16ull << 20);
        start = now();
        sink += read_streams(arena + offset, 16ull << 20);
        plain[round] = now() - start;
    }
    double seconds = median(product, ROUNDS);
    printf("%s %llu %llu %llu %.3f %.3f %.2f\n", t->name, (unsigned long long)t->rows, (unsigned long long)t->cols,
           (unsigned long long)t->n, (double)bytes / seconds * 1e-9, 16.777216e-3 / median(plain, ROUNDS),
           (double)(t->rows * t->cols * t->n) / seconds * 1e-9);
    fflush(stdout);
    free(x), free(y), free(memory);
    return sink;
}

int main(int argc, char **argv) {
    const cl_kernels *kernels = cl_kernels_find(argc > 1 ? argv[1] : "auto");
    uint8_t *arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (kernels == NULL || arena == MAP_FAILED) return 1;
    (void)madvise(arena, ARENA, MADV_HUGEPAGE);
    fill(arena);
    static const cl_format int4 = {4, 1, 1, 1, 64}, symmetric = {4, 1, 1, 0, 64}, int8 = {3, 1, 1, 0, 64};
    static const cl_format f32 = {1, 0, 0, 0, 0}, bf16 = {2, 0, 0, 0, 0};
    const test tests[] = {
        {"int4a/i8", int4, 1, 2048, 7168, 1},    {"int4a/i16", int4, 2, 2048, 7168, 1},
        {"int4a/i8", int4, 1, 7168, 2048, 1},    {"int4a/i16", int4, 2, 7168, 2048, 1},
        {"int4s/i8", symmetric, 1, 2048, 7168, 1}, {"int8/i8", int8, 1, 2048, 7168, 1},
        {"int8/i16", int8, 2, 2048, 7168, 1},    {"f32", f32, 0, 2048, 2048, 1},
        {"bf16", bf16, 0, 2048, 2048, 1},        {"int4a/i8", int4, 1, 2048, 7168, 2},
        {"int4a/i8", int4, 1, 2048, 7168, 4},    {"int4a/i8", int4, 1, 2048, 7168, 16},
        {"int4a/i8", int4, 1, 2048, 7168, 64},   {"int4a/i16", int4, 2, 2048, 7168, 2},
        {"int4a/i16", int4, 2, 2048, 7168, 4},   {"int4a/i16", int4, 2, 2048, 7168, 64},
        {"int8/i8", int8, 1, 2048, 7168, 64},    {"int8/i16", int8, 2, 2048, 7168, 64},
        {"f32", f32, 0, 2048, 2048, 64},
    };
    uint64_t sink = 0;
    for (uint64_t i = 0; i < sizeof tests / sizeof *tests; i++) sink += measure(&tests[i], kernels, arena);
    return sink == 42 ? 2 : 0;
}
