/* kernels.h - the arithmetic that has one implementation per instruction set, one signature each, chosen once at open.
 *
 * Every implementation gives the same bits (docs/numerics.md fixes the order of every sum). What needs no vectors to be
 * fast (router choice, sampling, rope tables, softmax merges) is plain C in ops.c, compiled once for all.
 */
#ifndef COLIBRI_KERNELS_H
#define COLIBRI_KERNELS_H
#include "colibri.h"
#include "format.h"

/* A matrix in R8 tiles, ready to multiply. */
typedef struct cl_matrix {
    cl_format format;
    uint64_t rows, cols;
    uint64_t tile_bytes; /* of one tile */
    uint64_t n_tiles;    /* ceil(rows / 8) */
    const uint8_t *tiles;
} cl_matrix;

/* Activations of n tokens, quantised per group of `group` columns for weights with that group size. The layout of
 * `codes` belongs to the kernels that made them; made and consumed by the same cl_kernels. */
typedef struct cl_acts {
    int32_t format;      /* CL_ACTIVATION_*; F32: only `f32` is used */
    uint32_t group;      /* 0 for F32 */
    uint64_t cols, groups;
    uint64_t code_stride; /* bytes between tokens in codes */
    const float *f32;     /* F32: borrowed [n, f32_stride] */
    uint64_t f32_stride;
    uint8_t *codes;
    float *scale;     /* [n, groups] */
    float *scale_sum; /* [n, groups]: scale * (sum of codes) */
    int32_t *sum;     /* [n, groups]: sum of codes */
} cl_acts;

/* Fills a cl_acts inside `workspace` of cl_acts_bytes(...) bytes, 64-byte aligned. */
uint64_t cl_acts_bytes(int32_t format, uint64_t n, uint64_t cols, uint32_t group);
void cl_acts_place(cl_acts *acts, void *workspace, int32_t format, uint64_t n, uint64_t cols, uint32_t group);

typedef struct cl_kernels {
    const char *name;

    /* Quantises tokens first..first+count-1 of x [*, x_stride] into acts. F32: remembers the pointer. */
    void (*quantize)(cl_acts *acts, const float *x, uint64_t x_stride, uint64_t first, uint64_t count);

    /* y[i][row] for i in 0..n-1 and the rows of tiles tile_begin..tile_end-1, of token index[i] (i itself where index
     * is NULL). y rows beyond w->rows are not written. A token's result does not depend on n or its neighbours. */
    void (*matmul)(const cl_matrix *w, uint64_t tile_begin, uint64_t tile_end, const cl_acts *acts,
                   const uint32_t *index, uint64_t n, float *y, uint64_t y_stride);

    /* out = x * rsqrt(mean(x^2) + eps) * (weight + offset); out may be x. */
    void (*rmsnorm)(const float *x, const float *weight, float offset, float eps, uint64_t n, float *out);

    /* out = silu(gate) * up, element by element; out may be gate. */
    void (*silu_mul)(const float *gate, const float *up, uint64_t n, float *out);

    /* y = fma(a, x, y) */
    void (*axpy)(float a, const float *x, uint64_t n, float *y);

    /* One KV block against `heads` query heads that share a KV head: q [heads, q_stride], k and v
     * [positions, head_dim] of kv_dtype. Per head: max, sum and accumulator [head_dim] relative to that maximum. */
    void (*attend_block)(const float *q, uint64_t q_stride, uint64_t heads, uint64_t head_dim, const void *k,
                         const void *v, int32_t kv_dtype, uint64_t positions, float scale, float *max, float *sum,
                         float *acc, uint64_t acc_stride);

    /* f32 to KV dtype f16, round to nearest even, and values beyond its range to infinity. */
    void (*to_f16)(const float *x, uint64_t n, uint16_t *out);
} cl_kernels;

extern const cl_kernels cl_kernels_generic;
/* "auto", "generic", "avx2"; NULL if this CPU or build lacks it. */
const cl_kernels *cl_kernels_find(const char *isa);

/* Sets rounding to nearest and denormals on (no FTZ/DAZ) for the calling thread; every compute thread calls it. */
void cl_kernels_thread_init(void);

/* matrix helpers (tiles.c) */
int cl_matrix_init(cl_matrix *m, const cl_format *format, uint64_t rows, uint64_t cols, const uint8_t *tiles,
                   cl_error *err);
/* One row of a tiled matrix as f32 [cols] (embedding look-up). */
void cl_matrix_row(const cl_matrix *m, uint64_t row, float *out);

/* ---- ops.c: plain C, one compilation for all instruction sets ---------------------------------------------------- */

float cl_expf(float x);           /* our own polynomial; exact definition in docs/numerics.md */
float cl_sigmoidf(float x);       /* 1 / (1 + exp(-x)) through cl_expf */
double cl_log(double x);
void cl_sincosf(float angle, float *sine, float *cosine); /* range reduction and polynomial in double */

/* Rotates the first dims of each of `heads` heads in place, half-split pairs, position `position`. */
void cl_rope_half(float *x, uint64_t heads, uint64_t head_dim, uint64_t dims, const float *cosine, const float *sine);
/* cos and sin [dims / 2] of a position, times attention_factor. */
void cl_rope_table(const float *inv_freq, uint64_t pairs, float attention_factor, uint64_t position, float *cosine,
                   float *sine);

/* Merges block states in ascending position order: (max, sum, acc) += (b_max, b_sum, b_acc). Start: max = -inf. */
void cl_attend_merge(float *max, float *sum, float *acc, uint64_t head_dim, float b_max, float b_sum,
                     const float *b_acc);
/* acc / sum */
void cl_attend_finish(const float *acc, float sum, uint64_t head_dim, float *out);

/* Router: logits [experts] -> top_k expert ids ascending, with their weights. Ties to the lower id. scratch: 2 *
 * experts floats. select_bias may be NULL. */
void cl_route(const cl_layer_spec *layer, const float *logits, const float *select_bias, uint32_t *ids, float *weights,
              float *scratch);

/* sample.c: the next token. Banned ids are never chosen. scratch as cl_sample_scratch_bytes. */
uint64_t cl_sample_scratch_bytes(uint32_t vocab_size);
int32_t cl_sample(const float *logits, uint32_t vocab_size, const cl_sampling *sampling, uint64_t position,
                  const uint8_t *banned_bitmap, void *scratch);

#endif
