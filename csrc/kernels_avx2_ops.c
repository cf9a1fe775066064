/* kernels_avx2_ops.c - the AVX2 kernels besides the matrix product: activation quantisation, norms, attention.
 *
 * Same bits as kernels_generic.c. "Lane sums" are one vector accumulator by definition; columns beyond a multiple of 8
 * are done one by one, in their lane.
 */
#if defined(__x86_64__)
#include "expf.h"
#include "isa.h"
#include "kernels_avx2.h"

#include <assert.h>
#include <math.h>

/* ---- activations ------------------------------------------------------------------------------------------------- */

/* Lanes k..k+7 of a row of n: all ones where the column exists. */
INLINE __m256i lanes_left(uint64_t n, uint64_t k) {
    int32_t left = (int32_t)cl_min_u64(8, n - k);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Largest |x| as bits, so that NaN is the largest of all. */
INLINE uint32_t peak_bits(const float *x, uint64_t n) {
    __m256i peak = _mm256_setzero_si256(), magnitude = _mm256_set1_epi32(0x7fffffff);
    for (uint64_t k = 0; k < n; k += 8) {
        __m256i bits = _mm256_castps_si256(_mm256_maskload_ps(x + k, lanes_left(n, k)));
        peak = _mm256_max_epi32(peak, _mm256_and_si256(bits, magnitude));
    }
    __m128i p = _mm_max_epi32(_mm256_castsi256_si128(peak), _mm256_extracti128_si256(peak, 1));
    p = _mm_max_epi32(p, _mm_shuffle_epi32(p, 0x4e));
    p = _mm_max_epi32(p, _mm_shuffle_epi32(p, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(p);
}

INLINE int32_t total_epi32(__m256i v) {
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1));
    return _mm_cvtsi128_si32(t);
}

/* Codes of n columns, in the order that kernels_avx2.c reads; returns their sum. Columns up to a run of 8 become 0. */
INLINE int32_t store_codes(const float *x, uint64_t n, float steps, const int i8, uint8_t *out) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m256i sum = _mm256_setzero_si256();
    for (uint64_t k = 0; k < n; k += 8) {
        __m256 v = _mm256_mul_ps(_mm256_maskload_ps(x + k, lanes_left(n, k)), _mm256_set1_ps(steps));
        __m256i code = _mm256_cvtps_epi32(v);
        sum = _mm256_add_epi32(sum, code);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
        if (i8)
            _mm_storel_epi64((__m128i *)(void *)(out + k), _mm_packs_epi16(words, words));
        else
            _mm_storeu_si128((__m128i *)(void *)(out + 2 * k), _mm_shuffle_epi8(words, order));
    }
    return total_epi32(sum);
}

AVX2 static void quantize_group(cl_acts *acts, const float *x, uint64_t token, uint64_t group, uint64_t n) {
    int i8 = acts->format == CL_ACTIVATION_I8;
    uint64_t width = i8 ? 1 : 2, at = token * acts->groups + group;
    uint8_t *out = acts->codes + token * acts->code_stride + group * acts->group * width;
    uint32_t peak = peak_bits(x, n);
    float largest = cl_float_from_bits(peak), limit = i8 ? 127.0f : 32767.0f, scale;
    int32_t sum = 0;
    if (peak < 0x7f800000u && largest >= 1e-30f) {
        scale = largest / limit;
        sum = i8 ? store_codes(x, n, limit / largest, 1, out) : store_codes(x, n, limit / largest, 0, out);
    } else {
        scale = peak < 0x7f800000u ? 0.0f : NAN;
        memset(out, 0, (n + 7) / 8 * 8 * width);
    }
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
    for (uint64_t token = first; token < first + count; token++)
        for (uint64_t g = 0; g < acts->groups; g++)
            quantize_group(acts, x + token * x_stride + g * acts->group, token, g,
                           cl_min_u64(acts->group, acts->cols - g * acts->group));
}

/* ---- exp --------------------------------------------------------------------------------------------------------- */

/* cl_expf, operation by operation. min and max return their second operand where one is NaN. */
INLINE __m256 exp_ps(__m256 x) {
    const __m256 rounder = _mm256_set1_ps(CL_ROUNDER);
    x = _mm256_max_ps(_mm256_set1_ps(CL_EXP_LOW), x);
    x = _mm256_min_ps(_mm256_set1_ps(CL_EXP_HIGH), x);
    __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(CL_EXP_LOG2E), rounder);
    __m256 whole = _mm256_sub_ps(shifted, rounder);
    __m256i n = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(rounder));
    __m256 r = _mm256_fmadd_ps(whole, _mm256_set1_ps(-CL_EXP_LN2_HIGH), x);
    r = _mm256_fmadd_ps(whole, _mm256_set1_ps(-CL_EXP_LN2_LOW), r);
    __m256 p = _mm256_set1_ps(CL_EXP_C7);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CL_EXP_C6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CL_EXP_C5));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CL_EXP_C4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CL_EXP_C3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(CL_EXP_C2));
    p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r);
    p = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    __m256i half = _mm256_srai_epi32(n, 1), rest = _mm256_sub_epi32(n, half), bias = _mm256_set1_epi32(127);
    __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 second = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    return _mm256_mul_ps(_mm256_mul_ps(p, first), second);
}

/* ---- element by element ------------------------------------------------------------------------------------------ */

/* ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7)) */
INLINE float lanes_total(__m256 lanes) {
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Lane i += a[i] * b[i] for the last columns (fewer than 8); other lanes keep their bits. */
INLINE __m256 fma_tail(__m256 lanes, const float *a, const float *b, uint64_t columns) {
    __m256i left = lanes_left(columns, 0);
    __m256 sum = _mm256_fmadd_ps(_mm256_maskload_ps(a, left), _mm256_maskload_ps(b, left), lanes);
    return _mm256_blendv_ps(lanes, sum, _mm256_castsi256_ps(left));
}

AVX2 static void rmsnorm(const float *x, const float *weight, float offset, float eps, uint64_t n, float *out) {
    __m256 lanes = _mm256_setzero_ps();
    uint64_t whole = n / 8 * 8, i = 0;
    for (; i < whole; i += 8) {
        __m256 v = load_f32(x + i);
        lanes = _mm256_fmadd_ps(v, v, lanes);
    }
    if (whole < n) lanes = fma_tail(lanes, x + whole, x + whole, n - whole);
    float r = 1.0f / sqrtf(lanes_total(lanes) / (float)n + eps);
    /* Adding an offset of 0 would turn a weight of -0 into +0. */
    for (i = 0; i < whole; i += 8) {
        __m256 w = load_f32(weight + i);
        if (offset != 0.0f) w = _mm256_add_ps(w, _mm256_set1_ps(offset));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(load_f32(x + i), _mm256_set1_ps(r)), w));
    }
    for (; i < n; i++) out[i] = (x[i] * r) * (offset != 0.0f ? weight[i] + offset : weight[i]);
}

AVX2 static void silu_mul(const float *gate, const float *up, uint64_t n, float *out) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 g = load_f32(gate + i);
        __m256 sigmoid = _mm256_div_ps(one, _mm256_add_ps(one, exp_ps(_mm256_xor_ps(g, sign))));
        _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(g, sigmoid), load_f32(up + i)));
    }
    for (; i < n; i++) out[i] = (gate[i] * cl_sigmoidf(gate[i])) * up[i];
}

AVX2 static void axpy(float a, const float *x, uint64_t n, float *y) {
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(_mm256_set1_ps(a), load_f32(x + i), load_f32(y + i)));
    for (; i < n; i++) y[i] = fmaf(a, x[i], y[i]);
}

AVX2 static void to_f16(const float *x, uint64_t n, uint16_t *out) {
    uint64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(out + i),
                         _mm256_cvtps_ph(load_f32(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    for (; i < n; i++) out[i] = cl_f32_to_f16(x[i]);
}

/* ---- attention: HEADS query heads (4 or 1) against one block of one KV head -------------------------------------- */

#define HEADS_MAX 4
#define DOTS_MAX 4 /* positions whose products run side by side */

/* One block's constants. q and acc point at heads that may repeat the last one. */
typedef struct attention {
    const float *q[HEADS_MAX];
    float *acc[HEADS_MAX];
    uint64_t head_dim, positions;
    const uint8_t *k, *v;
    float scale;
} attention;

INLINE __m256 load_kv(const uint8_t *kv, const int f16, uint64_t i) {
    return f16 ? load_f16(kv + 2 * i) : load_f32(kv + 4 * i);
}

INLINE float load_kv_one(const uint8_t *kv, const int f16, uint64_t i) {
    return f16 ? cl_f16_to_f32(((const uint16_t *)(const void *)kv)[i]) : ((const float *)(const void *)kv)[i];
}

/* score[position][head] = (q . k) * scale */
INLINE void scores(const attention *a, const int f16, const int heads, const int dots, float *score) {
    uint64_t whole = a->head_dim / 8 * 8, tail = a->head_dim - whole;
    for (uint64_t first = 0; first < a->positions; first += (uint64_t)dots) {
        __m256 lanes[HEADS_MAX * DOTS_MAX];
        uint64_t row[DOTS_MAX];
        UNROLL for (int p = 0; p < dots; p++)
            row[p] = cl_min_u64(first + (uint64_t)p, a->positions - 1) * a->head_dim;
        UNROLL for (int i = 0; i < heads * dots; i++) lanes[i] = _mm256_setzero_ps();
        for (uint64_t d = 0; d < whole; d += 8) {
            UNROLL for (int p = 0; p < dots; p++) {
                __m256 k = load_kv(a->k, f16, row[p] + d);
                UNROLL for (int h = 0; h < heads; h++)
                    lanes[h * dots + p] = _mm256_fmadd_ps(load_f32(a->q[h] + d), k, lanes[h * dots + p]);
            }
        }
        UNROLL for (int p = 0; p < dots; p++) {
            float rest[8] = {0};
            for (uint64_t d = 0; d < tail; d++) rest[d] = load_kv_one(a->k, f16, row[p] + whole + d);
            UNROLL for (int h = 0; h < heads; h++) {
                __m256 l = lanes[h * dots + p];
                if (tail != 0) l = fma_tail(l, a->q[h] + whole, rest, tail);
                score[(first + (uint64_t)p) * (uint64_t)heads + (uint64_t)h] = lanes_total(l) * a->scale;
            }
        }
    }
}

/* weight[position][head] = exp(score - max) in place; max and sum in ascending position. */
INLINE void weights(const attention *a, const int heads, float *score, float *max, float *sum) {
    uint64_t count = a->positions * (uint64_t)heads;
    float tops[8];
    for (int h = 0; h < heads; h++) max[h] = -INFINITY, sum[h] = 0.0f;
    for (uint64_t i = 0; i < count; i += (uint64_t)heads)
        UNROLL for (int h = 0; h < heads; h++) max[h] = max[h] > score[i + (uint64_t)h] ? max[h]
                                                                                        : score[i + (uint64_t)h];
    for (int i = 0; i < 8; i++) tops[i] = max[i % heads];
    for (uint64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(score + i, exp_ps(_mm256_sub_ps(load_f32(score + i), load_f32(tops))));
    for (uint64_t i = 0; i < count; i += (uint64_t)heads)
        UNROLL for (int h = 0; h < heads; h++) sum[h] += score[i + (uint64_t)h];
}

/* acc[head][d..d+8*vectors-1] = sum over positions of weight * v */
INLINE void mix(const attention *a, const int f16, const int heads, const int vectors, uint64_t d,
                const float *weight) {
    __m256 acc[HEADS_MAX * 4];
    UNROLL for (int i = 0; i < heads * vectors; i++) acc[i] = _mm256_setzero_ps();
    for (uint64_t p = 0; p < a->positions; p++) {
        UNROLL for (int j = 0; j < vectors; j++) {
            __m256 v = load_kv(a->v, f16, p * a->head_dim + d + 8 * (uint64_t)j);
            UNROLL for (int h = 0; h < heads; h++)
                acc[h * vectors + j] =
                    _mm256_fmadd_ps(_mm256_broadcast_ss(weight + p * (uint64_t)heads + h), v, acc[h * vectors + j]);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int j = 0; j < vectors; j++)
            _mm256_storeu_ps(a->acc[h] + d + 8 * (uint64_t)j, acc[h * vectors + j]);
}

INLINE void attend(const attention *a, const int f16, const int heads, float *max, float *sum) {
    /* Rounded up to whole vectors and whole rounds of dots; what lies beyond the positions is never added. */
    float score[(CL_KV_PAGE_POSITIONS + DOTS_MAX) * HEADS_MAX + 8] = {0};
    uint64_t d = 0;
    scores(a, f16, heads, heads == 1 ? 4 : 2, score);
    weights(a, heads, score, max, sum);
    const int wide = heads == 1 ? 4 : 2;
    for (; d + 8 * wide <= a->head_dim; d += 8 * wide) mix(a, f16, heads, wide, d, score);
    for (; d + 8 <= a->head_dim; d += 8) mix(a, f16, heads, 1, d, score);
    for (; d < a->head_dim; d++) {
        for (int h = 0; h < heads; h++) {
            float acc = 0.0f;
            for (uint64_t p = 0; p < a->positions; p++)
                acc = fmaf(score[p * (uint64_t)heads + (uint64_t)h], load_kv_one(a->v, f16, p * a->head_dim + d), acc);
            a->acc[h][d] = acc;
        }
    }
}

AVX2 static void attend_f16_4(const attention *a, float *max, float *sum) { attend(a, 1, 4, max, sum); }
AVX2 static void attend_f16_1(const attention *a, float *max, float *sum) { attend(a, 1, 1, max, sum); }
AVX2 static void attend_f32_4(const attention *a, float *max, float *sum) { attend(a, 0, 4, max, sum); }
AVX2 static void attend_f32_1(const attention *a, float *max, float *sum) { attend(a, 0, 1, max, sum); }

static void attend_block(const float *q, uint64_t q_stride, uint64_t heads, uint64_t head_dim, const void *k,
                         const void *v, int32_t kv_dtype, uint64_t positions, float scale, float *max, float *sum,
                         float *acc, uint64_t acc_stride) {
    assert(positions >= 1 && positions <= CL_KV_PAGE_POSITIONS);
    int f16 = kv_dtype == CL_KV_F16;
    attention a = {.head_dim = head_dim, .positions = positions, .k = k, .v = v, .scale = scale};
    for (uint64_t first = 0; first < heads; first += HEADS_MAX) {
        uint64_t count = cl_min_u64(HEADS_MAX, heads - first);
        float tops[HEADS_MAX], sums[HEADS_MAX];
        for (uint64_t h = 0; h < HEADS_MAX; h++) {
            uint64_t head = first + cl_min_u64(h, count - 1);
            a.q[h] = q + head * q_stride;
            a.acc[h] = acc + head * acc_stride;
        }
        if (count == 1)
            (f16 ? attend_f16_1 : attend_f32_1)(&a, tops, sums);
        else
            (f16 ? attend_f16_4 : attend_f32_4)(&a, tops, sums);
        memcpy(max + first, tops, count * sizeof *max);
        memcpy(sum + first, sums, count * sizeof *sum);
    }
}

const cl_kernels cl_kernels_avx2 = {
    .name = "avx2",
    .quantize = quantize,
    .matmul = cl_avx2_matmul,
    .rmsnorm = rmsnorm,
    .silu_mul = silu_mul,
    .axpy = axpy,
    .attend_block = attend_block,
    .to_f16 = to_f16,
};
#endif
