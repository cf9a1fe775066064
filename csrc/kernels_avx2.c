/* kernels_avx2.c - the kernels for x86-64 with AVX2, FMA and F16C: matrix products. The rest is in kernels_avx2_ops.c.
 *
 * Same bits as kernels_generic.c: a vector lane is an output row, so no sum is ever reordered. A block is nt tiles
 * times nb tokens in one pass over the columns. With few tokens the tiles of a block lie a quarter of the range apart:
 * four streams keep the memory busy where one does not. Places of a block that nobody needs repeat the last tile or
 * token.
 *
 * Activation codes: i8 at their own column. i16 in runs of 8 columns in the order 0 2 4 6 1 3 5 7, so that each 32-bit
 * word holds the two columns that meet in one 32-bit word of weight codes.
 */
#if defined(__x86_64__)
#include "kernels_avx2.h"

#include <assert.h>

#define TILES_MAX 4
#define TOKENS_MAX 4

/* What one pass multiplies. x, scale, sum and scale_sum start at the token's first column or group. */
typedef struct block {
    const uint8_t *tile[TILES_MAX];
    const uint8_t *x[TOKENS_MAX]; /* codes, or f32 for weights without scales */
    const float *scale[TOKENS_MAX], *scale_sum[TOKENS_MAX];
    const int32_t *sum[TOKENS_MAX];
} block;

INLINE __m256i broadcast_word(const uint8_t *at) {
    int32_t word;
    memcpy(&word, at, sizeof word);
    return _mm256_set1_epi32(word);
}

INLINE __m256i load_codes(const uint8_t *at) { return _mm256_loadu_si256((const __m256i *)(const void *)at); }

/* ---- sums of code products of one group: sum[tile * nb + token], 8 rows each ------------------------------------- */

/* sum += pairs of u8 weight codes times i8 activations, in 16 bits; one broadcast serves all tiles. */
INLINE void add_u8_i8(const __m256i *w, const uint8_t *const *x, uint64_t at, const int nt, const int nb,
                      __m256i *sum) {
    UNROLL for (int i = 0; i < nb; i++) {
        __m256i a = broadcast_word(x[i] + at);
        UNROLL for (int t = 0; t < nt; t++)
            sum[t * nb + i] = _mm256_add_epi16(sum[t * nb + i], _mm256_maddubs_epi16(w[t], a));
    }
}

/* sum += pairs of i16 weight codes times i16 activations, in 32 bits */
INLINE void add_i16(const __m256i *w, const uint8_t *const *x, uint64_t at, const int nt, const int nb, __m256i *sum) {
    UNROLL for (int i = 0; i < nb; i++) {
        __m256i a = broadcast_word(x[i] + at);
        UNROLL for (int t = 0; t < nt; t++)
            sum[t * nb + i] = _mm256_add_epi32(sum[t * nb + i], _mm256_madd_epi16(w[t], a));
    }
}

/* 15 * 127 * 16 products of a lane stay below 2^15, so 32 columns may be summed in 16 bits. */
INLINE void sums_int4_i8(const uint8_t *const *codes, const uint8_t *const *x, uint64_t columns, const int nt,
                         const int nb, __m256i *sum) {
    const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
    for (uint64_t k = 0; k < columns; k += 32) {
        uint64_t end = cl_min_u64(k + 32, columns);
        __m256i part[TILES_MAX * TOKENS_MAX], w[TILES_MAX];
        UNROLL for (int i = 0; i < nt * nb; i++) part[i] = _mm256_setzero_si256();
        UNROLL_RUNS for (uint64_t at = k; at < end; at += 8) {
            UNROLL for (int t = 0; t < nt; t++) w[t] = _mm256_and_si256(load_codes(codes[t] + 4 * at), low);
            add_u8_i8(w, x, at, nt, nb, part);
            UNROLL for (int t = 0; t < nt; t++)
                w[t] = _mm256_and_si256(_mm256_srli_epi16(load_codes(codes[t] + 4 * at), 4), low);
            add_u8_i8(w, x, at + 4, nt, nb, part);
        }
        UNROLL for (int i = 0; i < nt * nb; i++)
            sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(part[i], one));
    }
}

INLINE void sums_int4_i16(const uint8_t *const *codes, const uint8_t *const *x, uint64_t columns, const int nt,
                          const int nb, __m256i *sum) {
    const __m256i low = _mm256_set1_epi16(15);
    for (uint64_t k = 0; k < columns; k += 8) {
        UNROLL for (int nibble = 0; nibble < 4; nibble++) {
            __m256i w[TILES_MAX];
            UNROLL for (int t = 0; t < nt; t++) {
                w[t] = _mm256_srli_epi16(load_codes(codes[t] + 4 * k), 4 * nibble);
                if (nibble < 3) w[t] = _mm256_and_si256(w[t], low);
            }
            add_i16(w, x, 2 * k + 4 * (uint64_t)nibble, nt, nb, sum);
        }
    }
}

/* |w| * (x with the sign of w): at most 128 * 127 * 2 per 16-bit lane, which does not saturate. */
INLINE void sums_int8_i8(const uint8_t *const *codes, const uint8_t *const *x, uint64_t columns, const int nt,
                         const int nb, __m256i *sum) {
    const __m256i one = _mm256_set1_epi16(1);
    for (uint64_t k = 0; k < columns; k += 4) {
        __m256i v[TILES_MAX];
        UNROLL for (int t = 0; t < nt; t++) v[t] = load_codes(codes[t] + 8 * k);
        UNROLL for (int i = 0; i < nb; i++) {
            __m256i a = broadcast_word(x[i] + k);
            UNROLL for (int t = 0; t < nt; t++) {
                __m256i p = _mm256_maddubs_epi16(_mm256_abs_epi8(v[t]), _mm256_sign_epi8(a, v[t]));
                sum[t * nb + i] = _mm256_add_epi32(sum[t * nb + i], _mm256_madd_epi16(p, one));
            }
        }
    }
}

INLINE void sums_int8_i16(const uint8_t *const *codes, const uint8_t *const *x, uint64_t columns, const int nt,
                          const int nb, __m256i *sum) {
    for (uint64_t k = 0; k < columns; k += 4) {
        uint64_t at = k / 8 * 16 + (k & 4); /* the run's first even pair of this half; its odd pair is 8 bytes on */
        __m256i w[TILES_MAX];
        UNROLL for (int t = 0; t < nt; t++)
            w[t] = _mm256_srai_epi16(_mm256_slli_epi16(load_codes(codes[t] + 8 * k), 8), 8);
        add_i16(w, x, at, nt, nb, sum);
        UNROLL for (int t = 0; t < nt; t++) w[t] = _mm256_srai_epi16(load_codes(codes[t] + 8 * k), 8);
        add_i16(w, x, at + 8, nt, nb, sum);
    }
}

/* ---- one block --------------------------------------------------------------------------------------------------- */

/* Group g into the accumulators. `columns` is a constant where the caller can make it one. */
INLINE void group_step(const block *b, const cl_format *f, uint64_t g, uint64_t offset, uint64_t columns, const int nt,
                       const int nb, const int int4, const int i8, __m256 *acc) {
    __m256i sum[TILES_MAX * TOKENS_MAX];
    const uint8_t *codes[TILES_MAX], *x[TOKENS_MAX];
    uint64_t header = cl_group_header(f), first = g * f->group_size * (i8 ? 1 : 2);
    UNROLL for (int t = 0; t < nt; t++) codes[t] = b->tile[t] + offset + header;
    UNROLL for (int i = 0; i < nb; i++) x[i] = b->x[i] + first;
    UNROLL for (int i = 0; i < nt * nb; i++) sum[i] = _mm256_setzero_si256();
    if (int4 && i8) sums_int4_i8(codes, x, columns, nt, nb, sum);
    if (int4 && !i8) sums_int4_i16(codes, x, columns, nt, nb, sum);
    if (!int4 && i8) sums_int8_i8(codes, x, columns, nt, nb, sum);
    if (!int4 && !i8) sums_int8_i16(codes, x, columns, nt, nb, sum);
    UNROLL for (int t = 0; t < nt; t++) {
        __m256 d = load_f16(b->tile[t] + offset);
        UNROLL for (int i = 0; i < nb; i++) {
            __m256i s = sum[t * nb + i];
            if (int4 && !f->asymmetric) s = _mm256_sub_epi32(s, _mm256_set1_epi32(8 * b->sum[i][g]));
            __m256 scale = _mm256_mul_ps(_mm256_broadcast_ss(&b->scale[i][g]), d);
            acc[t * nb + i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s), scale, acc[t * nb + i]);
        }
        if (!int4 || !f->asymmetric) continue;
        __m256 m = load_f16(b->tile[t] + offset + 16);
        UNROLL for (int i = 0; i < nb; i++)
            acc[t * nb + i] = _mm256_fmadd_ps(_mm256_broadcast_ss(&b->scale_sum[i][g]), m, acc[t * nb + i]);
    }
}

INLINE void block_grouped(const block *b, const cl_format *f, uint64_t cols, const int nt, const int nb, const int int4,
                          const int i8, float (*out)[8]) {
    __m256 acc[TILES_MAX * TOKENS_MAX];
    uint64_t stride = cl_group_stride(f), g = 0, offset = 0, full = cols / f->group_size;
    UNROLL for (int i = 0; i < nt * nb; i++) acc[i] = _mm256_setzero_ps();
    if (f->group_size == 64)
        for (; g < full; g++, offset += stride) group_step(b, f, g, offset, 64, nt, nb, int4, i8, acc);
    for (; g * f->group_size < cols; g++, offset += stride)
        group_step(b, f, g, offset, cl_group_columns(f, cols, g), nt, nb, int4, i8, acc);
    UNROLL for (int i = 0; i < nt * nb; i++) _mm256_storeu_ps(out[i], acc[i]);
}

INLINE void block_plain(const block *b, uint64_t cols, const int nt, const int nb, const int f32, float (*out)[8]) {
    __m256 acc[TILES_MAX * TOKENS_MAX];
    UNROLL for (int i = 0; i < nt * nb; i++) acc[i] = _mm256_setzero_ps();
    for (uint64_t run = 0; run < cols; run += 64) {
        __m256 part[TILES_MAX * TOKENS_MAX];
        UNROLL for (int i = 0; i < nt * nb; i++) part[i] = _mm256_setzero_ps();
        for (uint64_t k = run; k < cl_min_u64(run + 64, cols); k++) {
            UNROLL for (int t = 0; t < nt; t++) {
                __m256 w = f32 ? load_f32(b->tile[t] + 32 * k) : load_bf16(b->tile[t] + 16 * k);
                UNROLL for (int i = 0; i < nb; i++) {
                    __m256 x = _mm256_broadcast_ss((const float *)(const void *)b->x[i] + k);
                    part[t * nb + i] = _mm256_fmadd_ps(w, x, part[t * nb + i]);
                }
            }
        }
        UNROLL for (int i = 0; i < nt * nb; i++) acc[i] = _mm256_add_ps(acc[i], part[i]);
    }
    UNROLL for (int i = 0; i < nt * nb; i++) _mm256_storeu_ps(out[i], acc[i]);
}

/* The shapes that exist: 4 tiles for one or two tokens, 2 tiles for four. */
#define DEFINE_BLOCKS(nt, nb)                                                                                          \
    AVX2 static void int4_i8_##nt##x##nb(const block *b, const cl_format *f, uint64_t cols, float (*out)[8]) {         \
        block_grouped(b, f, cols, nt, nb, 1, 1, out);                                                                  \
    }                                                                                                                  \
    AVX2 static void int4_i16_##nt##x##nb(const block *b, const cl_format *f, uint64_t cols, float (*out)[8]) {        \
        block_grouped(b, f, cols, nt, nb, 1, 0, out);                                                                  \
    }                                                                                                                  \
    AVX2 static void int8_i8_##nt##x##nb(const block *b, const cl_format *f, uint64_t cols, float (*out)[8]) {         \
        block_grouped(b, f, cols, nt, nb, 0, 1, out);                                                                  \
    }                                                                                                                  \
    AVX2 static void int8_i16_##nt##x##nb(const block *b, const cl_format *f, uint64_t cols, float (*out)[8]) {        \
        block_grouped(b, f, cols, nt, nb, 0, 0, out);                                                                  \
    }                                                                                                                  \
    AVX2 static void f32_##nt##x##nb(const block *b, const cl_format *f, uint64_t cols, float (*out)[8]) {             \
        (void)f;                                                                                                       \
        block_plain(b, cols, nt, nb, 1, out);                                                                          \
    }                                                                                                                  \
    AVX2 static void bf16_##nt##x##nb(const block *b, const cl_format *f, uint64_t cols, float (*out)[8]) {            \
        (void)f;                                                                                                       \
        block_plain(b, cols, nt, nb, 0, out);                                                                          \
    }
DEFINE_BLOCKS(4, 1)
DEFINE_BLOCKS(4, 2)
DEFINE_BLOCKS(2, 4)

typedef struct shape {
    int tiles, tokens;
    void (*run)(const block *b, const cl_format *f, uint64_t cols, float (*out)[8]);
} shape;

/* By kind of product, then: one token, two tokens, four tokens. */
#define SHAPES(name) {{4, 1, name##_4x1}, {4, 2, name##_4x2}, {2, 4, name##_2x4}}
static const shape shapes[6][3] = {SHAPES(f32),    SHAPES(bf16),    SHAPES(int8_i8),
                                   SHAPES(int8_i16), SHAPES(int4_i8), SHAPES(int4_i16)};

static const shape *shapes_for(const cl_matrix *w, const cl_acts *acts) {
    int i16 = acts->format == CL_ACTIVATION_I16;
    switch (w->format.codes) {
    case CL_CODES_F32: return shapes[0];
    case CL_CODES_BF16: return shapes[1];
    case CL_CODES_INT8: return shapes[2 + i16];
    default: return shapes[4 + i16];
    }
}

/* ---- the whole product ------------------------------------------------------------------------------------------- */

/* One call's constants. */
typedef struct product {
    const cl_matrix *w;
    const cl_acts *acts;
    const uint32_t *index;
    float *y;
    uint64_t y_stride;
} product;

static void place_token(const product *p, uint64_t i, block *b, int at) {
    const cl_acts *a = p->acts;
    uint64_t token = p->index != NULL ? p->index[i] : i;
    if (a->format == CL_ACTIVATION_F32) {
        b->x[at] = (const uint8_t *)(const void *)(a->f32 + token * a->f32_stride);
        return;
    }
    b->x[at] = a->codes + token * a->code_stride;
    b->scale[at] = a->scale + token * a->groups;
    b->scale_sum[at] = a->scale_sum + token * a->groups;
    b->sum[at] = a->sum + token * a->groups;
}

/* `tiles` tiles (numbers in `tile`) times `tokens` tokens from `first`, at most what the shape holds. */
static void run_block(const product *p, const shape *s, const uint64_t *tile, int tiles, uint64_t first, int tokens) {
    block b;
    float out[TILES_MAX * TOKENS_MAX][8];
    for (int t = 0; t < s->tiles; t++) b.tile[t] = p->w->tiles + tile[t < tiles ? t : tiles - 1] * p->w->tile_bytes;
    for (int i = 0; i < s->tokens; i++) place_token(p, first + (uint64_t)(i < tokens ? i : tokens - 1), &b, i);
    s->run(&b, &p->w->format, p->w->cols, out);
    for (int t = 0; t < tiles; t++) {
        uint64_t row = tile[t] * CL_TILE_ROWS, rows = cl_min_u64(CL_TILE_ROWS, p->w->rows - row);
        for (int i = 0; i < tokens; i++)
            memcpy(p->y + (first + (uint64_t)i) * p->y_stride + row, out[t * s->tokens + i], rows * sizeof(float));
    }
}

/* All n tokens for up to four tiles, which stay in the cache meanwhile. */
static void run_tiles(const product *p, const shape *s, const uint64_t *tile, int tiles, uint64_t n) {
    uint64_t first = 0;
    for (; n - first >= 3; first += cl_min_u64(4, n - first))
        for (int t = 0; t < tiles; t += 2)
            run_block(p, &s[2], tile + t, tiles - t < 2 ? 1 : 2, first, (int)cl_min_u64(4, n - first));
    if (n - first > 0) run_block(p, &s[n - first - 1], tile, tiles, first, (int)(n - first));
}

void cl_avx2_matmul(const cl_matrix *w, uint64_t tile_begin, uint64_t tile_end, const cl_acts *acts,
                    const uint32_t *index, uint64_t n, float *y, uint64_t y_stride) {
    assert(tile_end <= w->n_tiles && acts->cols == w->cols && acts->group == w->format.group_size);
    if (n == 0 || tile_begin >= tile_end) return;
    product p = {w, acts, index, y, y_stride};
    const shape *s = shapes_for(w, acts);
    uint64_t quarter = (tile_end - tile_begin) / 4;
    for (uint64_t t = tile_begin; t < tile_begin + quarter; t++) {
        uint64_t tile[4] = {t, t + quarter, t + 2 * quarter, t + 3 * quarter};
        run_tiles(&p, s, tile, 4, n);
    }
    uint64_t rest[4] = {0};
    int left = 0;
    for (uint64_t t = tile_begin + 4 * quarter; t < tile_end; t++) rest[left++] = t;
    if (left > 0) run_tiles(&p, s, rest, left, n);
}
#endif
