/* test_kernels.c - the kernels of this machine against the generic ones, bit by bit, over odd sizes, with every buffer
 * exactly as large as the interface asks, so that a sanitizer sees the first byte read or written too far; and the
 * generic ones against sums in double. */
#include "check.h"
#include "error.h"
#include "fpmode.h"
#include "kernels.h"
#include "numbers.h"

static const cl_kernels *best;

static int same_bits(const float *a, const float *b, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        if (cl_float_bits(a[i]) != cl_float_bits(b[i]) && !(a[i] != a[i] && b[i] != b[i])) return 0;
    return 1;
}

static float *copy_of(const float *x, uint64_t n) {
    float *y = malloc(n * sizeof *y);
    memcpy(y, x, n * sizeof *y);
    return y;
}

/* ---- matrix products --------------------------------------------------------------------------------------------- */

/* A matrix of random codes with every bit pattern that a file may hold, and scales that are finite. */
static cl_matrix random_matrix(const cl_format *f, uint64_t rows, uint64_t cols) {
    cl_matrix m;
    CHECK(cl_matrix_init(&m, f, rows, cols, NULL, NULL) == CL_OK);
    uint64_t bytes = m.tile_bytes * m.n_tiles;
    uint8_t *tiles = malloc(bytes);
    for (uint64_t i = 0; i < bytes; i++) tiles[i] = (uint8_t)test_random();
    uint64_t size = f->codes == CL_CODES_F32 ? 4 : 2; /* f32 and bf16: below 2 in magnitude */
    for (uint64_t i = size - 1; !cl_is_grouped(f) && i < bytes; i += size) tiles[i] = 0x3f | (tiles[i] & 0x80);
    if (cl_is_grouped(f))
        for (uint64_t t = 0; t < m.n_tiles; t++)
            for (uint64_t g = 0; g < cl_groups(f, cols); g++)
                for (uint64_t i = 1; i < cl_group_header(f); i += 2)
                    tiles[t * m.tile_bytes + g * cl_group_stride(f) + i] &= 0xb7; /* magnitudes below 2 */
    m.tiles = tiles;
    return m;
}

typedef struct acts_pair {
    cl_acts of[2]; /* generic, best */
    void *memory[2];
} acts_pair;

static acts_pair quantized(const float *x, uint64_t n, uint64_t cols, int32_t format, uint32_t group) {
    acts_pair a;
    const cl_kernels *kernels[2] = {&cl_kernels_generic, best};
    for (int i = 0; i < 2; i++) {
        uint64_t bytes = cl_acts_bytes(format, n, cols, group);
        a.memory[i] = bytes ? aligned_alloc(64, bytes) : NULL;
        if (bytes) memset(a.memory[i], 0xee, bytes);
        cl_acts_place(&a.of[i], a.memory[i], format, n, cols, group);
        kernels[i]->quantize(&a.of[i], x, cols, 0, n / 2);
        kernels[i]->quantize(&a.of[i], x, cols, n / 2, n - n / 2);
    }
    if (format != CL_ACTIVATION_F32) {
        CHECK(same_bits(a.of[0].scale, a.of[1].scale, n * a.of[0].groups));
        CHECK(same_bits(a.of[0].scale_sum, a.of[1].scale_sum, n * a.of[0].groups));
        CHECK(memcmp(a.of[0].sum, a.of[1].sum, n * a.of[0].groups * 4) == 0);
    }
    return a;
}

static void test_matmul_once(const cl_format *f, int32_t activation, uint64_t rows, uint64_t cols, uint64_t n) {
    cl_matrix w = random_matrix(f, rows, cols);
    float *x = test_floats(n * cols), *y0 = test_floats(n * rows), *y1 = copy_of(y0, n * rows);
    acts_pair a = quantized(x, n, cols, cl_is_grouped(f) ? activation : CL_ACTIVATION_F32, f->group_size);
    cl_kernels_generic.matmul(&w, 0, w.n_tiles, &a.of[0], NULL, n, y0, rows);
    best->matmul(&w, 0, w.n_tiles, &a.of[1], NULL, n, y1, rows);
    CHECK(same_bits(y0, y1, n * rows));

    /* A part of the tiles, tokens chosen by an index, and nothing else written. */
    uint64_t begin = w.n_tiles / 3, end = w.n_tiles - w.n_tiles / 4, m = n / 2 + 1;
    uint32_t *index = malloc(m * sizeof *index);
    float *z = malloc(m * rows * sizeof *z);
    for (uint64_t i = 0; i < m; i++) index[i] = (uint32_t)(test_random() % n);
    for (uint64_t i = 0; i < m * rows; i++) z[i] = 777.0f;
    best->matmul(&w, begin, end, &a.of[1], index, m, z, rows);
    for (uint64_t i = 0; i < m; i++)
        for (uint64_t r = 0; r < rows; r++) {
            int inside = r / 8 >= begin && r / 8 < end;
            CHECK(z[i * rows + r] == (inside ? y0[index[i] * rows + r] : 777.0f));
        }
    free((void *)(uintptr_t)w.tiles), free(x), free(y0), free(y1), free(index), free(z);
    free(a.memory[0]), free(a.memory[1]);
}

static void test_matmul(void) {
    static const cl_format formats[] = {{1, 0, 0, 0, 0},  {2, 0, 0, 0, 0},  {3, 1, 1, 0, 64}, {4, 1, 1, 0, 64},
                                        {4, 1, 1, 1, 64}, {3, 1, 1, 0, 8},  {4, 1, 1, 1, 8},  {4, 1, 1, 0, 40},
                                        {3, 1, 1, 0, 512}, {4, 1, 1, 1, 512}, {4, 1, 1, 1, 32}, {3, 1, 1, 0, 24}};
    static const uint64_t sizes[][3] = {{1, 1, 1},    {8, 64, 1},  {9, 65, 2},   {37, 130, 3}, {64, 63, 4},
                                        {45, 200, 5},
                                        {100, 7, 6},  {33, 513, 7}, {129, 77, 9}, {24, 12, 1},  {80, 576, 2}};
    for (uint64_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (uint64_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (int32_t activation = CL_ACTIVATION_I8; activation <= CL_ACTIVATION_I16; activation++)
                test_matmul_once(&formats[f], activation, sizes[s][0], sizes[s][1], sizes[s][2]);
}

/* Codes and activations at their extremes: no product or sum may wrap or saturate. */
static void test_extremes(void) {
    static const cl_format formats[] = {{3, 1, 1, 0, 512}, {4, 1, 1, 0, 512}, {4, 1, 1, 1, 512}};
    for (int f = 0; f < 3; f++)
        for (int32_t activation = CL_ACTIVATION_I8; activation <= CL_ACTIVATION_I16; activation++)
            for (int byte = 0; byte < 3; byte++) {
                cl_matrix w = random_matrix(&formats[f], 40, 1024);
                uint8_t *tiles = (uint8_t *)(uintptr_t)w.tiles;
                static const uint8_t codes[3] = {0x80, 0x7f, 0xff};
                for (uint64_t i = 0; i < w.tile_bytes * w.n_tiles; i++)
                    if (i % cl_group_stride(&w.format) >= cl_group_header(&w.format)) tiles[i] = codes[byte];
                float *x = test_floats(2 * 1024), y[2][2 * 40];
                for (int i = 0; i < 2048; i++) x[i] = i < 1024 ? -1.0f : 1.0f;
                acts_pair a = quantized(x, 2, 1024, activation, 512);
                cl_kernels_generic.matmul(&w, 0, w.n_tiles, &a.of[0], NULL, 2, y[0], 40);
                best->matmul(&w, 0, w.n_tiles, &a.of[1], NULL, 2, y[1], 40);
                CHECK(same_bits(y[0], y[1], 80));
                float *row = malloc(1024 * sizeof *row);
                for (uint64_t r = 0; r < 40; r++) {
                    double exact = 0, size = 0;
                    cl_matrix_row(&w, r, row);
                    for (int k = 0; k < 1024; k++) exact += (double)row[k], size += fabs((double)row[k]);
                    CHECK(fabs((double)y[0][40 + r] - exact) <= 1e-5 * size + 1e-6);
                    CHECK(fabs((double)y[0][r] + exact) <= 1e-5 * size + 1e-6);
                }
                free(row), free(x), free(tiles), free(a.memory[0]), free(a.memory[1]);
            }
}

/* ---- everything else --------------------------------------------------------------------------------------------- */

static void spoil(float *x, uint64_t n, uint64_t round) {
    static const float odd[] = {0.0f,    -0.0f, 1e-40f,  -3e-39f,  1e30f,   100.0f,
                                -100.0f, 88.8f, -104.1f, 65519.9f, 65520.0f};
    for (uint64_t i = 0; i < n; i++)
        if (test_random() % 8 == 0) x[i] = odd[test_random() % (sizeof odd / sizeof *odd)];
    if (round % 5 == 0) x[test_random() % n] = NAN;
    if (round % 7 == 0) x[test_random() % n] = -INFINITY;
}

static void test_elements(uint64_t n, uint64_t round) {
    float *x = test_floats(n), *u = test_floats(n), *a = test_floats(n), *b = copy_of(a, n);
    float offset = round % 2 ? 1.0f : 0.0f;
    cl_kernels_generic.rmsnorm(x, u, offset, 1e-5f, n, a);
    best->rmsnorm(x, u, offset, 1e-5f, n, b);
    CHECK(same_bits(a, b, n));
    double squares = 0;
    for (uint64_t i = 0; i < n; i++) squares += (double)x[i] * (double)x[i];
    for (uint64_t i = 0; i < n; i++) {
        double exact = (double)x[i] / sqrt(squares / (double)n + 1e-5) * (double)(u[i] + offset);
        CHECK(fabs((double)a[i] - exact) <= 1e-6 * fabs(exact) + 1e-12);
    }
    cl_kernels_generic.axpy(0.37f, x, n, a);
    best->axpy(0.37f, x, n, b);
    CHECK(same_bits(a, b, n));
    spoil(x, n, round);
    cl_kernels_generic.silu_mul(x, u, n, a);
    best->silu_mul(x, u, n, b);
    CHECK(same_bits(a, b, n));
    for (uint64_t i = 0; i < n; i++) {
        double exact = (double)x[i] / (1 + exp(-(double)x[i])) * (double)u[i];
        if (fabs((double)x[i]) < 80) CHECK(fabs((double)a[i] - exact) <= 1e-6 * fabs(exact) + 1e-38);
    }
    uint16_t *h0 = malloc(2 * n), *h1 = malloc(2 * n);
    cl_kernels_generic.to_f16(x, n, h0);
    best->to_f16(x, n, h1);
    CHECK(memcmp(h0, h1, 2 * n) == 0);
    memcpy(b, x, n * sizeof *x); /* in place */
    best->rmsnorm(b, u, offset, 1e-5f, n, b);
    cl_kernels_generic.rmsnorm(x, u, offset, 1e-5f, n, a);
    CHECK(same_bits(a, b, n));
    for (int32_t format = CL_ACTIVATION_I8; format <= CL_ACTIVATION_I16; format++) {
        acts_pair acts = quantized(x, 1, n, format, 64); /* with NaN and infinity: the scale says so */
        for (uint64_t i = 0; i < n; i++) CHECK(x[i] - x[i] == 0 || isnan(acts.of[0].scale[i / 64]));
        free(acts.memory[0]), free(acts.memory[1]);
    }
    free(x), free(u), free(a), free(b), free(h0), free(h1);
}

static void test_attention(uint64_t heads, uint64_t dim, uint64_t positions) {
    uint64_t n = positions * dim;
    float *q = test_floats(heads * dim), *k = test_floats(n), *v = test_floats(n);
    uint16_t *k16 = malloc(2 * n), *v16 = malloc(2 * n);
    cl_kernels_generic.to_f16(k, n, k16);
    cl_kernels_generic.to_f16(v, n, v16);
    for (int32_t dtype = CL_KV_F16; dtype <= CL_KV_F32; dtype++) {
        float *out[2][3];
        for (int i = 0; i < 2; i++) {
            const cl_kernels *kernels = i ? best : &cl_kernels_generic;
            out[i][0] = malloc(4 * heads), out[i][1] = malloc(4 * heads), out[i][2] = malloc(4 * heads * dim);
            kernels->attend_block(q, dim, heads, dim, dtype == CL_KV_F16 ? (void *)k16 : k,
                                  dtype == CL_KV_F16 ? (void *)v16 : v, dtype, positions, 0.25f, out[i][0], out[i][1],
                                  out[i][2], dim);
        }
        CHECK(same_bits(out[0][0], out[1][0], heads));
        CHECK(same_bits(out[0][1], out[1][1], heads));
        CHECK(same_bits(out[0][2], out[1][2], heads * dim));
        for (int i = 0; i < 6; i++) free(out[i / 3][i % 3]);
    }
    free(q), free(k), free(v), free(k16), free(v16);
}

/* Every f16 to f32 and back, and the rounding of every f32 whose upper half has one of the interesting patterns. */
static void test_conversions(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        float f = cl_f16_to_f32((uint16_t)h);
        uint16_t back = cl_f32_to_f16(f), want = (h & 0x7fff) > 0x7c00 ? (uint16_t)(h | 0x200) : (uint16_t)h;
        CHECK(back == want);
        float b = cl_bf16_to_f32((uint16_t)h);
        CHECK(cl_f32_to_bf16(b) == ((h & 0x7fff) > 0x7f80 ? (uint16_t)(h | 0x40) : (uint16_t)h));
        if ((h & 0x7fff) >= 0x7bff) continue;
        float next = cl_f16_to_f32((uint16_t)(h + 1)), middle = 0.5f * (f + next); /* exact */
        CHECK(cl_f32_to_f16(middle) == (uint16_t)(h + (h & 1)));
        CHECK(cl_f32_to_f16(nextafterf(middle, f)) == h);
        CHECK(cl_f32_to_f16(nextafterf(middle, next)) == h + 1);
    }
    for (int i = -4000; i <= 4000; i++) CHECK(cl_round((float)i * 0.5f) == (int32_t)rint(i * 0.5));
}

int main(void) {
    best = cl_kernels_find("auto");
    printf("generic against %s\n", best->name);
    cl_kernels_thread_init();
    CHECK(cl_kernels_find("generic") == &cl_kernels_generic);
    CHECK(cl_kernels_find("altivec") == NULL && cl_kernels_find(NULL) == NULL);
    test_conversions();
    test_matmul();
    test_extremes();
    static const uint64_t lengths[] = {1, 2, 7, 8, 9, 15, 16, 63, 64, 65, 100, 576, 1001};
    for (uint64_t round = 0; round < 60; round++)
        for (uint64_t i = 0; i < sizeof lengths / sizeof *lengths; i++) test_elements(lengths[i], round);
    static const uint64_t dims[] = {1, 4, 8, 12, 24, 64, 80, 128, 130};
    static const uint64_t heads[] = {1, 2, 3, 4, 5, 8, 9};
    static const uint64_t positions[] = {1, 2, 3, 7, 33, 63, 64};
    for (uint64_t h = 0; h < 7; h++)
        for (uint64_t d = 0; d < 9; d++)
            for (uint64_t p = 0; p < 7; p++) test_attention(heads[h], dims[d], positions[p]);
    return test_result();
}
