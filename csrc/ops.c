/* ops.c - the operations that need no vectors to be fast, compiled once for all instruction sets.
 *
 * Owns our own exp, log, sin and cos (the C library's differ by CPU and version), rope, the merge of attention blocks
 * and the router's choice. docs/numerics.md defines each to the bit; vector kernels repeat cl_expf step by step.
 */
#include "expf.h"
#include "kernels.h"
#include "numbers.h"

#include <assert.h>
#include <math.h>

/* ---- exp, log, sin, cos ------------------------------------------------------------------------------------------ */

float cl_expf(float x) {
    if (x != x) return x;
    x = x < CL_EXP_LOW ? CL_EXP_LOW : x;
    x = x > CL_EXP_HIGH ? CL_EXP_HIGH : x;
    float shifted = fmaf(x, CL_EXP_LOG2E, CL_ROUNDER);
    float whole = shifted - CL_ROUNDER;
    int32_t n = (int32_t)(cl_float_bits(shifted) - cl_float_bits(CL_ROUNDER));
    float r = fmaf(whole, -CL_EXP_LN2_HIGH, x);
    r = fmaf(whole, -CL_EXP_LN2_LOW, r);
    float p = CL_EXP_C7;
    p = fmaf(p, r, CL_EXP_C6);
    p = fmaf(p, r, CL_EXP_C5);
    p = fmaf(p, r, CL_EXP_C4);
    p = fmaf(p, r, CL_EXP_C3);
    p = fmaf(p, r, CL_EXP_C2);
    p = fmaf(p, r * r, r);
    p = p + 1.0f;
    /* Two factors, because 2^n alone may be infinite or subnormal where the result is not. */
    int32_t half = n >> 1, rest = n - half;
    float first = cl_float_from_bits((uint32_t)(half + 127) << 23);
    float second = cl_float_from_bits((uint32_t)(rest + 127) << 23);
    return (p * first) * second;
}

float cl_sigmoidf(float x) { return 1.0f / (1.0f + cl_expf(-x)); }

/* x = 2^n * m with m in sqrt(1/2)..sqrt(2); log m = 2 atanh((m - 1) / (m + 1)). */
double cl_log(double x) {
    if (!(x > 0.0)) return x == 0.0 ? -INFINITY : NAN;
    if (x > 0x1.fffffffffffffp1023) return x;
    int64_t n = 0;
    if (x < 0x1p-1022) {
        x *= 0x1p54;
        n = -54;
    }
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    n += (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffull) | 0x3ff0000000000000ull;
    memcpy(&x, &bits, sizeof bits);
    if (x > 0x1.6a09e667f3bcdp0) {
        x *= 0.5;
        n++;
    }
    double s = (x - 1.0) / (x + 1.0), z = s * s, series = 0.0;
    for (int i = 21; i >= 3; i -= 2) series = series * z + 1.0 / i;
    double tail = s * z * series;
    double k = (double)n;
    return k * 0x1.62e42fefap-1 + (2.0 * s + (2.0 * tail + k * 0x1.cf79abc9e3b3ap-40));
}

/* sin and cos of r in -pi/4..pi/4 by their Taylor series; the first omitted terms are below 1e-18. */
static void sincos_reduced(double r, double *sine, double *cosine) {
    static const double s[8] = {-1.0 / 6,        1.0 / 120,         -1.0 / 5040,         1.0 / 362880,
                                -1.0 / 39916800, 1.0 / 6227020800., -1.0 / 1307674368e3, 1.0 / 355687428096e3};
    static const double c[9] = {-1.0 / 2,         1.0 / 24,          -1.0 / 720,          1.0 / 40320, -1.0 / 3628800,
                                1.0 / 479001600., -1.0 / 87178291200., 1.0 / 20922789888e3, -1.0 / 6402373705728e3};
    double z = r * r, a = s[7], b = c[8];
    for (int i = 6; i >= 0; i--) a = a * z + s[i];
    for (int i = 7; i >= 0; i--) b = b * z + c[i];
    *sine = r + r * z * a;
    *cosine = 1.0 + z * b;
}

void cl_sincosf(float angle, float *sine, float *cosine) {
    double x = (double)angle;
    if (!(x <= CL_ANGLE_MAX && x >= -CL_ANGLE_MAX)) {
        *sine = *cosine = NAN;
        return;
    }
    /* pi/2 in three pieces of 26, 26 and 53 bits: the first two products are exact. */
    double shifted = x * 0x1.45f306dc9c883p-1 + 0x1.8p52;
    double n = shifted - 0x1.8p52;
    double r = ((x - n * 0x1.921fb5p0) - n * 0x1.110b460p-26) - n * 0x1.1a62633145c07p-54;
    double s, c;
    sincos_reduced(r, &s, &c);
    switch ((int64_t)n & 3) {
    case 0: *sine = (float)s, *cosine = (float)c; break;
    case 1: *sine = (float)c, *cosine = (float)-s; break;
    case 2: *sine = (float)-s, *cosine = (float)-c; break;
    default: *sine = (float)-c, *cosine = (float)s; break;
    }
}

/* ---- rope -------------------------------------------------------------------------------------------------------- */

void cl_rope_table(const float *inv_freq, uint64_t pairs, float attention_factor, uint64_t position, float *cosine,
                   float *sine) {
    for (uint64_t i = 0; i < pairs; i++) {
        float s, c;
        cl_sincosf((float)position * inv_freq[i], &s, &c);
        cosine[i] = c * attention_factor;
        sine[i] = s * attention_factor;
    }
}

void cl_rope_half(float *x, uint64_t heads, uint64_t head_dim, uint64_t dims, const float *cosine, const float *sine) {
    assert(dims % 2 == 0 && dims <= head_dim);
    uint64_t pairs = dims / 2;
    for (uint64_t h = 0; h < heads; h++, x += head_dim) {
        for (uint64_t i = 0; i < pairs; i++) {
            float a = x[i], b = x[i + pairs];
            x[i] = fmaf(a, cosine[i], -(b * sine[i]));
            x[i + pairs] = fmaf(b, cosine[i], a * sine[i]);
        }
    }
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

void cl_attend_merge(float *max, float *sum, float *acc, uint64_t head_dim, float b_max, float b_sum,
                     const float *b_acc) {
    float m = *max > b_max ? *max : b_max;
    float c = cl_expf(*max - m), b_c = cl_expf(b_max - m);
    *sum = fmaf(*sum, c, b_sum * b_c);
    for (uint64_t d = 0; d < head_dim; d++) acc[d] = fmaf(acc[d], c, b_acc[d] * b_c);
    *max = m;
}

void cl_attend_finish(const float *acc, float sum, uint64_t head_dim, float *out) {
    for (uint64_t d = 0; d < head_dim; d++) out[d] = acc[d] / sum;
}

/* ---- router ------------------------------------------------------------------------------------------------------ */

/* What turns a logit into a score: for softmax the maximum and the sum, for sigmoid nothing. */
typedef struct scorer {
    int32_t kind;
    float max, sum;
} scorer;

static scorer scorer_for(const cl_layer_spec *layer, const float *logits) {
    scorer s = {layer->score, -INFINITY, 0.0f};
    if (s.kind != CL_SCORE_SOFTMAX) return s;
    for (uint32_t e = 0; e < layer->experts; e++) s.max = s.max > logits[e] ? s.max : logits[e];
    for (uint32_t e = 0; e < layer->experts; e++) s.sum += cl_expf(logits[e] - s.max);
    return s;
}

static float score_of(const scorer *s, float logit) {
    return s->kind == CL_SCORE_SOFTMAX ? cl_expf(logit - s->max) / s->sum : cl_sigmoidf(logit);
}

/* The best of values[0..count-1] whose index is not yet in taken[0..n_taken-1]; ties to the lower index. */
static uint32_t best_untaken(const float *values, uint32_t count, const uint32_t *taken, uint32_t n_taken) {
    uint32_t best = count;
    for (uint32_t i = 0; i < count; i++) {
        if (best != count && !(values[i] > values[best])) continue;
        uint32_t seen = 0;
        while (seen < n_taken && taken[seen] != i) seen++;
        if (seen == n_taken) best = i;
    }
    return best;
}

static float group_score(int32_t kind, const float *choice, uint32_t size) {
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < size; i++) {
        if (choice[i] > first) {
            second = first;
            first = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return kind == CL_SCORE_SOFTMAX || size < 2 ? first : first + second;
}

/* Sets the choices of all but the top_groups best groups to -infinity. */
static void keep_best_groups(const cl_layer_spec *layer, float *choice, float *scores) {
    uint32_t groups = layer->groups, size = layer->experts / groups;
    for (uint32_t g = 0; g < groups; g++) scores[g] = group_score(layer->score, choice + g * size, size);
    for (uint32_t g = 0; g < groups; g++) {
        uint32_t better = 0; /* groups before this one in order of score, ties to the lower number */
        for (uint32_t h = 0; h < groups; h++) better += scores[h] > scores[g] || (scores[h] == scores[g] && h < g);
        if (better < layer->top_groups) continue;
        for (uint32_t i = 0; i < size; i++) choice[g * size + i] = -INFINITY;
    }
}

static void sort_ascending(uint32_t *ids, uint32_t n) {
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j > 0 && ids[j - 1] > ids[j]; j--) {
            uint32_t swap = ids[j];
            ids[j] = ids[j - 1];
            ids[j - 1] = swap;
        }
}

void cl_route(const cl_layer_spec *layer, const float *logits, const float *select_bias, uint32_t *ids, float *weights,
              float *scratch) {
    assert(layer->top_k >= 1 && layer->top_k <= layer->experts && layer->groups <= layer->experts);
    float *choice = scratch, *group_scores = scratch + layer->experts;
    scorer s = scorer_for(layer, logits);
    for (uint32_t e = 0; e < layer->experts; e++) {
        float score = score_of(&s, logits[e]);
        choice[e] = select_bias != NULL ? score + select_bias[e] : score;
    }
    if (layer->groups > 1) keep_best_groups(layer, choice, group_scores);
    for (uint32_t i = 0; i < layer->top_k; i++) ids[i] = best_untaken(choice, layer->experts, ids, i);
    sort_ascending(ids, layer->top_k);

    float sum = 0.0f;
    for (uint32_t i = 0; i < layer->top_k; i++) {
        weights[i] = score_of(&s, logits[ids[i]]);
        sum += weights[i];
    }
    if (layer->renormalize == CL_RENORMALIZE_SUM_EPSILON) sum += 1e-20f;
    for (uint32_t i = 0; i < layer->top_k; i++) {
        if (layer->renormalize != CL_RENORMALIZE_NONE) weights[i] = weights[i] / sum;
        weights[i] = weights[i] * layer->routed_scale;
    }
}
