/* search.h - the search for the scales of one group of 8 rows at once, on 8-lane vectors. Private to quantize.c.
 *
 * Each lane is one row, so every sum runs over the columns in ascending order and no lane knows of another. All of it
 * is inlined: quantize.c compiles it once per instruction set, and since nothing here is fused or reordered the results
 * are the same bits. docs/numerics.md, "Quantisation", is its definition in words.
 */
#ifndef COLIBRI_SEARCH_H
#define COLIBRI_SEARCH_H
#include <stdint.h>

typedef float v8f __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
#define CL_INLINE static inline __attribute__((always_inline))

/* The best scale and minimum so far, in units of u, and how much of sum(u^2) they explain. */
typedef struct cl_fit {
    v8f scale, min, score;
} cl_fit;

/* Lane by lane: a where the mask is -1, b where it is 0. A macro, because vectors passed by value change the ABI. */
#define V8_SELECT(mask, a, b)                                                                                          \
    __extension__({                                                                                                    \
        v8i mask_ = (mask);                                                                                            \
        (v8f)(((v8i)(a) & mask_) | ((v8i)(b) & ~mask_));                                                               \
    })

/* x := nearest integer, ties to even, of x limited to [low, high] */
CL_INLINE void v8_code(v8f *x, float low, float high) {
    v8f lows = low - (v8f){0}, highs = high - (v8f){0};
    *x = V8_SELECT(*x > lows, *x, lows);
    *x = V8_SELECT(*x < highs, *x, highs);
    *x = (*x + 12582912.0f) - 12582912.0f;
}

/* ---- asymmetric: u = (w - lo) / range in 0..1, u ~ scale * q + min, q in 0..15 ----------------------------------- */

/* Codes for (u - start) * steps, then the least-squares scale and minimum for those codes; kept where better. */
CL_INLINE void fit_asymmetric(const v8f *u, uint64_t n, const v8f *sum_u, const v8f *start, const v8f *steps,
                              cl_fit *best) {
    v8f sum_q = {0}, sum_qq = {0}, sum_qu = {0};
    for (uint64_t k = 0; k < n; k++) {
        v8f q = (u[k] - *start) * *steps;
        v8_code(&q, 0.0f, 15.0f);
        sum_q += q;
        sum_qq += q * q;
        sum_qu += q * u[k];
    }
    float count = (float)n;
    v8f det = count * sum_qq - sum_q * sum_q;
    v8f scale = (count * sum_qu - sum_q * *sum_u) / det;
    v8f min = (*sum_u - scale * sum_q) / count;
    v8f score = min * *sum_u + scale * sum_qu;
    v8i better = (det > 0.0f) & (score > best->score);
    best->scale = V8_SELECT(better, scale, best->scale);
    best->min = V8_SELECT(better, min, best->min);
    best->score = V8_SELECT(better, score, best->score);
}

CL_INLINE void search_asymmetric(const v8f *u, uint64_t n, cl_fit *best) {
    static const float cut[4] = {0.0f, 0.03f, 0.06f, 0.09f};
    v8f sum_u = {0};
    for (uint64_t k = 0; k < n; k++) sum_u += u[k];
    best->scale = (v8f){0};
    best->min = (v8f){0};
    best->score = -1.0f - (v8f){0};
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            v8f start = cut[i] - (v8f){0}, steps = 15.0f / (1.0f - cut[i] - cut[j]) - (v8f){0};
            fit_asymmetric(u, n, &sum_u, &start, &steps, best);
        }
    for (int i = 0; i < 2; i++) {
        v8f start = best->min, steps = 1.0f / best->scale;
        fit_asymmetric(u, n, &sum_u, &start, &steps, best);
    }
}

/* ---- symmetric: u = w / peak in -1..1, u ~ scale * q, q in low..high --------------------------------------------- */

CL_INLINE void fit_symmetric(const v8f *u, uint64_t n, const v8f *steps, float low, float high, cl_fit *best) {
    v8f sum_qq = {0}, sum_qu = {0};
    for (uint64_t k = 0; k < n; k++) {
        v8f q = u[k] * *steps;
        v8_code(&q, low, high);
        sum_qq += q * q;
        sum_qu += q * u[k];
    }
    v8f scale = sum_qu / sum_qq;
    v8f score = scale * sum_qu;
    v8i better = (sum_qq > 0.0f) & (score > best->score);
    best->scale = V8_SELECT(better, scale, best->scale);
    best->score = V8_SELECT(better, score, best->score);
}

CL_INLINE void search_symmetric(const v8f *u, uint64_t n, int int8, cl_fit *best) {
    best->scale = (v8f){0};
    best->min = (v8f){0};
    best->score = -1.0f - (v8f){0};
    float low = int8 ? -127.0f : -8.0f, high = int8 ? 127.0f : 7.0f;
    int candidates = int8 ? 4 : 11, refinements = int8 ? 1 : 2;
    for (int i = 0; i < candidates; i++) {
        v8f steps = (int8 ? (float)(127 + i) : (float)(35 + i) / -5.0f) - (v8f){0};
        fit_symmetric(u, n, &steps, low, high, best);
    }
    for (int i = 0; i < refinements; i++) {
        v8f steps = 1.0f / best->scale;
        fit_symmetric(u, n, &steps, low, high, best);
    }
}

#endif
