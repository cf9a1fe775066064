/* kernels_generic.c - every kernel in portable C: the definition that the vector variants must equal bit by bit.
 *
 * Written for clarity first; 8-lane inner loops are left to the compiler. docs/numerics.md fixes the order of each sum.
 */
#include "kernels.h"
#include "numbers.h"

#include <assert.h>
#include <math.h>

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Codes at their own column: i8 [cols] or i16 [cols], zero up to a multiple of 8. */
static void store_code(const cl_acts *acts, uint64_t token, uint64_t column, int32_t code) {
    uint8_t *row = acts->codes + token * acts->code_stride;
    if (acts->format == CL_ACTIVATION_I8)
        ((int8_t *)row)[column] = (int8_t)code;
    else
        ((int16_t *)(void *)row)[column] = (int16_t)code;
}

static void quantize_group(cl_acts *acts, const float *x, uint64_t token, uint64_t group, uint64_t columns) {
    uint32_t peak = 0; /* as bits, so that NaN is the largest of all */
    for (uint64_t k = 0; k < columns; k++) {
        uint32_t bits = cl_float_bits(x[k]) & 0x7fffffffu;
        if (bits > peak) peak = bits;
    }
    float largest = cl_float_from_bits(peak), limit = acts->format == CL_ACTIVATION_I8 ? 127.0f : 32767.0f;
    int usable = peak < 0x7f800000u && largest >= 1e-30f;
    float scale = usable ? largest / limit : peak < 0x7f800000u ? 0.0f : NAN;
    float steps = usable ? limit / largest : 0.0f;
    int32_t sum = 0;
    for (uint64_t k = 0; k < columns; k++) {
        int32_t code = usable ? cl_round(x[k] * steps) : 0;
        store_code(acts, token, group * acts->group + k, code);
        sum += code;
    }
    uint64_t at = token * acts->groups + group;
    acts->scale[at] = scale;
    acts->sum[at] = sum;
    acts->scale_sum[at] = scale * (float)sum;
}

static void quantize(cl_acts *acts, const float *x, uint64_t x_stride, uint64_t first, uint64_t count) {
    if (acts->format == CL_ACTIVATION_F32) {
        acts->f32 = x;
        acts->f32_stride = x_stride;
        return;
    }
    for (uint64_t token = first; token < first + count; token++) {
        for (uint64_t g = 0; g < acts->groups; g++)
            quantize_group(acts, x + token * x_stride + g * acts->group, token, g,
                           cl_min_u64(acts->group, acts->cols - g * acts->group));
        for (uint64_t k = acts->cols; k % 8 != 0; k++) store_code(acts, token, k, 0);
    }
}

/* ---- matrix product ---------------------------------------------------------------------------------------------- */

static void load_scales(const uint8_t *at, float out[8]) {
    for (unsigned lane = 0; lane < 8; lane++) {
        uint16_t h;
        memcpy(&h, at + 2 * lane, 2);
        out[lane] = cl_f16_to_f32(h);
    }
}

/* sum of q_w * q_x of one group for each of 8 rows; `codes` after the header. The compiler makes one copy per type. */
#define DEFINE_GROUP_SUM(name, type)                                                                                   \
    static void name##_int8(const uint8_t *codes, const type *x, uint64_t columns, int32_t sum[8]) {                   \
        for (uint64_t k = 0; k < columns; k += 4, codes += 32, x += 4)                                                 \
            for (unsigned lane = 0; lane < 8; lane++)                                                                  \
                for (unsigned i = 0; i < 4; i++) sum[lane] += (int32_t)(int8_t)codes[lane * 4 + i] * x[i];             \
    }                                                                                                                  \
    static void name##_int4(const uint8_t *codes, const type *x, uint64_t columns, int32_t sum[8]) {                   \
        for (uint64_t k = 0; k < columns; k += 8, codes += 32, x += 8)                                                 \
            for (unsigned lane = 0; lane < 8; lane++)                                                                  \
                for (unsigned i = 0; i < 4; i++)                                                                       \
                    sum[lane] += (codes[lane * 4 + i] & 15) * x[i] + (codes[lane * 4 + i] >> 4) * x[4 + i];            \
    }
DEFINE_GROUP_SUM(sum_i8, int8_t)
DEFINE_GROUP_SUM(sum_i16, int16_t)

static void group_sum(const cl_matrix *w, const uint8_t *codes, const cl_acts *acts, uint64_t token, uint64_t column,
                      uint64_t columns, int32_t sum[8]) {
    const uint8_t *row = acts->codes + token * acts->code_stride;
    int int8 = w->format.codes == CL_CODES_INT8;
    if (acts->format == CL_ACTIVATION_I8) {
        const int8_t *x = (const int8_t *)row + column;
        (int8 ? sum_i8_int8 : sum_i8_int4)(codes, x, columns, sum);
    } else {
        const int16_t *x = (const int16_t *)(const void *)row + column;
        (int8 ? sum_i16_int8 : sum_i16_int4)(codes, x, columns, sum);
    }
}

static void tile_grouped(const cl_matrix *w, const uint8_t *tile, const cl_acts *acts, uint64_t token, float acc[8]) {
    const cl_format *f = &w->format;
    int centred = f->codes == CL_CODES_INT4 && !f->asymmetric;
    for (uint64_t g = 0; g < acts->groups; g++, tile += cl_group_stride(f)) {
        float scale[8], min[8];
        int32_t sum[8] = {0};
        uint64_t at = token * acts->groups + g;
        load_scales(tile, scale);
        group_sum(w, tile + cl_group_header(f), acts, token, g * f->group_size, cl_group_columns(f, w->cols, g), sum);
        for (unsigned lane = 0; lane < 8; lane++) {
            int32_t s = centred ? sum[lane] - 8 * acts->sum[at] : sum[lane];
            acc[lane] = fmaf((float)s, acts->scale[at] * scale[lane], acc[lane]);
        }
        if (!f->asymmetric) continue;
        load_scales(tile + 16, min);
        for (unsigned lane = 0; lane < 8; lane++) acc[lane] = fmaf(acts->scale_sum[at], min[lane], acc[lane]);
    }
}

static void tile_plain(const cl_matrix *w, const uint8_t *tile, const float *x, float acc[8]) {
    int f32 = w->format.codes == CL_CODES_F32;
    for (uint64_t run = 0; run < w->cols; run += 64) {
        float part[8] = {0};
        for (uint64_t k = run; k < cl_min_u64(run + 64, w->cols); k++)
            for (unsigned lane = 0; lane < 8; lane++) {
                float value;
                uint16_t h;
                if (f32) {
                    memcpy(&value, tile + k * 32 + lane * 4, 4);
                } else {
                    memcpy(&h, tile + k * 16 + lane * 2, 2);
                    value = cl_bf16_to_f32(h);
                }
                part[lane] = fmaf(value, x[k], part[lane]);
            }
        for (unsigned lane = 0; lane < 8; lane++) acc[lane] = acc[lane] + part[lane];
    }
}

static void matmul(const cl_matrix *w, uint64_t tile_begin, uint64_t tile_end, const cl_acts *acts,
                   const uint32_t *index, uint64_t n, float *y, uint64_t y_stride) {
    assert(tile_end <= w->n_tiles && acts->cols == w->cols && acts->group == w->format.group_size);
    for (uint64_t t = tile_begin; t < tile_end; t++) {
        const uint8_t *tile = w->tiles + t * w->tile_bytes;
        uint64_t rows = cl_min_u64(CL_TILE_ROWS, w->rows - t * CL_TILE_ROWS);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t token = index != NULL ? index[i] : i;
            float acc[8] = {0};
            if (cl_is_grouped(&w->format))
                tile_grouped(w, tile, acts, token, acc);
            else
                tile_plain(w, tile, acts->f32 + token * acts->f32_stride, acc);
            memcpy(y + i * y_stride + t * CL_TILE_ROWS, acc, rows * sizeof(float));
        }
    }
}

/* ---- element by element ------------------------------------------------------------------------------------------ */

static float lanes_total(const float l[8]) { return ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7])); }

static void rmsnorm(const float *x, const float *weight, float offset, float eps, uint64_t n, float *out) {
    float lanes[8] = {0};
    for (uint64_t i = 0; i < n; i++) lanes[i % 8] = fmaf(x[i], x[i], lanes[i % 8]);
    float r = 1.0f / sqrtf(lanes_total(lanes) / (float)n + eps);
    if (offset == 0.0f)
        for (uint64_t i = 0; i < n; i++) out[i] = (x[i] * r) * weight[i];
    else
        for (uint64_t i = 0; i < n; i++) out[i] = (x[i] * r) * (weight[i] + offset);
}

static void silu_mul(const float *gate, const float *up, uint64_t n, float *out) {
    for (uint64_t i = 0; i < n; i++) out[i] = (gate[i] * cl_sigmoidf(gate[i])) * up[i];
}

static void axpy(float a, const float *x, uint64_t n, float *y) {
    for (uint64_t i = 0; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

static void to_f16(const float *x, uint64_t n, uint16_t *out) {
    for (uint64_t i = 0; i < n; i++) out[i] = cl_f32_to_f16(x[i]);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

static float kv_load(const void *kv, int32_t dtype, uint64_t i) {
    return dtype == CL_KV_F16 ? cl_f16_to_f32(((const uint16_t *)kv)[i]) : ((const float *)kv)[i];
}

static void attend_head(const float *q, uint64_t head_dim, const void *k, const void *v, int32_t dtype,
                        uint64_t positions, float scale, float *max, float *sum, float *acc) {
    float score[CL_KV_PAGE_POSITIONS];
    *max = -INFINITY;
    for (uint64_t p = 0; p < positions; p++) {
        float lanes[8] = {0};
        for (uint64_t d = 0; d < head_dim; d++)
            lanes[d % 8] = fmaf(q[d], kv_load(k, dtype, p * head_dim + d), lanes[d % 8]);
        score[p] = lanes_total(lanes) * scale;
        *max = *max > score[p] ? *max : score[p];
    }
    *sum = 0.0f;
    for (uint64_t d = 0; d < head_dim; d++) acc[d] = 0.0f;
    for (uint64_t p = 0; p < positions; p++) {
        float weight = cl_expf(score[p] - *max);
        *sum += weight;
        for (uint64_t d = 0; d < head_dim; d++) acc[d] = fmaf(weight, kv_load(v, dtype, p * head_dim + d), acc[d]);
    }
}

static void attend_block(const float *q, uint64_t q_stride, uint64_t heads, uint64_t head_dim, const void *k,
                         const void *v, int32_t kv_dtype, uint64_t positions, float scale, float *max, float *sum,
                         float *acc, uint64_t acc_stride) {
    assert(positions >= 1 && positions <= CL_KV_PAGE_POSITIONS);
    for (uint64_t h = 0; h < heads; h++)
        attend_head(q + h * q_stride, head_dim, k, v, kv_dtype, positions, scale, &max[h], &sum[h],
                    acc + h * acc_stride);
}

const cl_kernels cl_kernels_generic = {
    .name = "generic",
    .quantize = quantize,
    .matmul = matmul,
    .rmsnorm = rmsnorm,
    .silu_mul = silu_mul,
    .axpy = axpy,
    .attend_block = attend_block,
    .to_f16 = to_f16,
};
