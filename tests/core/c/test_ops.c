/* test_ops.c - accuracy of exp, log, sin, cos against the C library in double; rope, attention merge and the router
 * against their definitions written out in another way. Built with sanitizers by run.sh. */
#include "check.h"
#include "kernels.h"
#include "numbers.h"

/* Distance of `got` from `exact` in units of the last place of f32 at `exact`. */
static double ulps(float got, double exact) {
    float nearest = (float)exact;
    double step = (double)nextafterf(fabsf(nearest), INFINITY) - (double)fabsf(nearest);
    return fabs((double)got - exact) / step;
}

static void test_expf(void) {
    double worst = 0;
    for (double x = -103.9; x < 88.7; x += 0.000713) {
        double u = ulps(cl_expf((float)x), exp((double)(float)x));
        if (u > worst) worst = u;
    }
    printf("expf: worst %.3f ulp\n", worst);
    CHECK(worst < 1.1);
    CHECK(cl_expf(0.0f) == 1.0f);
    CHECK(cl_expf(-0.0f) == 1.0f);
    CHECK(cl_expf(-INFINITY) == 0.0f);
    CHECK(cl_expf(-1000.0f) == 0.0f);
    CHECK(cl_expf(INFINITY) == INFINITY);
    CHECK(cl_expf(89.0f) == INFINITY);
    CHECK(isnan(cl_expf(NAN)));
    CHECK(cl_sigmoidf(0.0f) == 0.5f);
    CHECK(cl_sigmoidf(-200.0f) == 0.0f);
    CHECK(cl_sigmoidf(200.0f) == 1.0f);
}

static void test_log(void) {
    double worst = 0;
    for (int i = 0; i < 200000; i++) {
        double x = exp((test_uniform() - 0.5) * 1400.0);
        double exact = log(x), error = fabs(cl_log(x) - exact) / (fabs(exact) + 1e-300);
        if (error > worst) worst = error;
    }
    printf("log: worst relative error %.3g\n", worst);
    CHECK(worst < 4e-16);
    CHECK(cl_log(1.0) == 0.0);
    CHECK(fabs(cl_log(0x1p-1074) - log(0x1p-1074)) < 1e-12);
    CHECK(cl_log(0.0) == -INFINITY);
    CHECK(cl_log(INFINITY) == INFINITY);
    CHECK(isnan(cl_log(-1.0)));
    CHECK(isnan(cl_log(NAN)));
}

static void test_sincos(void) {
    uint64_t wrong = 0, n = 0;
    for (int i = 0; i < 400000; i++) {
        float angle = (float)(test_uniform() * (i % 2 ? 2e6 : 30.0) - (i % 4 ? 0 : 15.0)), s, c;
        cl_sincosf(angle, &s, &c);
        wrong += (s != (float)sin((double)angle)) + (c != (float)cos((double)angle));
        n += 2;
        CHECK(ulps(s, sin((double)angle)) < 0.5001);
        CHECK(ulps(c, cos((double)angle)) < 0.5001);
    }
    printf("sincos: %llu of %llu differ from the rounded libm result\n", (unsigned long long)wrong,
           (unsigned long long)n);
    CHECK(wrong * 100000 < n);
    float s, c;
    cl_sincosf(0.0f, &s, &c);
    CHECK(s == 0.0f && c == 1.0f);
    cl_sincosf(9.9e7f, &s, &c);
    CHECK(s == (float)sin(9.9e7) && c == (float)cos(9.9e7));
    cl_sincosf(1.1e8f, &s, &c); /* beyond the reduction: loud */
    CHECK(isnan(s) && isnan(c));
    cl_sincosf(NAN, &s, &c);
    CHECK(isnan(s) && isnan(c));
}

static void test_rope(void) {
    float x[2 * 10], y[2 * 10], cosine[3], sine[3], inv_freq[3] = {1.0f, 0.1f, 0.01f};
    for (int i = 0; i < 20; i++) x[i] = y[i] = (float)test_uniform() - 0.5f;
    cl_rope_table(inv_freq, 3, 1.5f, 77, cosine, sine);
    for (int i = 0; i < 3; i++) {
        CHECK(cosine[i] == (float)cos((double)(77.0f * inv_freq[i])) * 1.5f);
        CHECK(sine[i] == (float)sin((double)(77.0f * inv_freq[i])) * 1.5f);
    }
    cl_rope_half(y, 2, 10, 6, cosine, sine);
    for (int h = 0; h < 2; h++) {
        for (int i = 0; i < 3; i++) {
            float a = x[h * 10 + i], b = x[h * 10 + i + 3];
            CHECK(y[h * 10 + i] == fmaf(a, cosine[i], -(b * sine[i])));
            CHECK(y[h * 10 + i + 3] == fmaf(b, cosine[i], a * sine[i]));
        }
        for (int i = 6; i < 10; i++) CHECK(y[h * 10 + i] == x[h * 10 + i]);
    }
}

/* Attention over any cut into blocks of 64 equals the softmax in double. */
static void test_attention(void) {
    enum { dim = 12, positions = 64 * 3 + 5 };
    float *k = test_floats(positions * dim), *v = test_floats(positions * dim), *q = test_floats(dim);
    for (int i = 0; i < positions * dim; i++) k[i] *= 4.0f;
    double weight[positions], total = 0, exact[dim] = {0}, top = -1e300;
    for (int p = 0; p < positions; p++) {
        weight[p] = 0;
        for (int d = 0; d < dim; d++) weight[p] += (double)q[d] * (double)k[p * dim + d];
        weight[p] *= 0.3;
        if (weight[p] > top) top = weight[p];
    }
    for (int p = 0; p < positions; p++) total += exp(weight[p] - top);
    for (int p = 0; p < positions; p++)
        for (int d = 0; d < dim; d++) exact[d] += exp(weight[p] - top) / total * (double)v[p * dim + d];
    float max = -INFINITY, sum = 0, acc[dim] = {0}, out[dim];
    for (int first = 0; first < positions; first += 64) {
        float b_max, b_sum, b_acc[dim];
        uint64_t n = (uint64_t)(positions - first < 64 ? positions - first : 64);
        cl_kernels_generic.attend_block(q, dim, 1, dim, k + first * dim, v + first * dim, CL_KV_F32, n, 0.3f, &b_max,
                                        &b_sum, b_acc, dim);
        cl_attend_merge(&max, &sum, acc, dim, b_max, b_sum, b_acc);
    }
    cl_attend_finish(acc, sum, dim, out);
    for (int d = 0; d < dim; d++) CHECK(fabs((double)out[d] - exact[d]) < 2e-6);
    free(k), free(v), free(q);
}

/* ---- router: the same choice by sorting all (value, id) pairs ---------------------------------------------------- */

typedef struct ranked {
    double value;
    uint32_t id;
} ranked;

static int by_rank(const void *a, const void *b) {
    const ranked *x = a, *y = b;
    if (x->value != y->value) return x->value > y->value ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static void brute_force(const cl_layer_spec *l, const float *logits, const float *bias, uint32_t *ids,
                        double *weights) {
    uint32_t e = l->experts, groups = l->groups > 1 ? l->groups : 1, size = e / groups;
    ranked *all = malloc(e * sizeof *all), *best = malloc(groups * sizeof *best);
    ranked *member = malloc(size * sizeof *member);
    float *score = malloc(e * sizeof *score);
    float max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < e; i++) max = fmaxf(max, logits[i]);
    for (uint32_t i = 0; i < e; i++) sum += cl_expf(logits[i] - max);
    for (uint32_t i = 0; i < e; i++) {
        score[i] = l->score == CL_SCORE_SOFTMAX ? cl_expf(logits[i] - max) / sum : cl_sigmoidf(logits[i]);
        all[i] = (ranked){bias ? score[i] + bias[i] : score[i], i};
    }
    for (uint32_t g = 0; g < groups; g++) {
        memcpy(member, all + g * size, size * sizeof *member);
        qsort(member, size, sizeof *member, by_rank);
        double s = member[0].value;
        if (l->score == CL_SCORE_SIGMOID && size > 1) s = (float)member[0].value + (float)member[1].value;
        best[g] = (ranked){s, g};
    }
    if (l->groups > 1) {
        qsort(best, groups, sizeof *best, by_rank);
        for (uint32_t g = l->top_groups; g < groups; g++)
            for (uint32_t i = 0; i < size; i++) all[best[g].id * size + i].value = -INFINITY;
    }
    qsort(all, e, sizeof *all, by_rank);
    double total = 0;
    for (uint32_t i = 0; i < l->top_k; i++) all[i].value = all[i].id; /* now ascending by id */
    qsort(all, l->top_k, sizeof *all, by_rank);
    for (uint32_t i = 0; i < l->top_k; i++) {
        ids[i] = all[l->top_k - 1 - i].id;
        weights[i] = score[ids[i]];
        total += weights[i];
    }
    for (uint32_t i = 0; i < l->top_k; i++) {
        if (l->renormalize == CL_RENORMALIZE_SUM) weights[i] /= total;
        if (l->renormalize == CL_RENORMALIZE_SUM_EPSILON) weights[i] /= total + 1e-20;
        weights[i] *= l->routed_scale;
    }
    free(all), free(best), free(member), free(score);
}

static void test_route_once(uint32_t round) {
    static const uint32_t sizes[5][4] = {{8, 2, 1, 1}, {60, 4, 1, 1}, {96, 8, 8, 3}, {12, 3, 4, 2}, {5, 5, 5, 5}};
    const uint32_t *size = sizes[round % 5];
    cl_layer_spec l = {.experts = size[0], .top_k = size[1], .groups = size[2], .top_groups = size[3]};
    l.score = round / 5 % 2 ? CL_SCORE_SIGMOID : CL_SCORE_SOFTMAX;
    l.renormalize = (int32_t)(round / 10 % 3);
    l.routed_scale = round / 30 % 2 ? 2.5f : 1.0f;
    float *logits = test_floats(l.experts), *bias = test_floats(l.experts), *scratch = test_floats(2 * l.experts);
    for (uint32_t i = 0; i < l.experts; i++) {
        logits[i] *= 5.0f;
        bias[i] *= 0.3f;
        if (round % 3 == 0) logits[i] = rintf(logits[i]); /* ties */
    }
    int with_bias = round % 2 && round % 3;
    uint32_t *ids = malloc(l.top_k * sizeof *ids), *want = malloc(l.top_k * sizeof *want);
    float *weights = malloc(l.top_k * sizeof *weights);
    double *exact = malloc(l.top_k * sizeof *exact);
    cl_route(&l, logits, with_bias ? bias : NULL, ids, weights, scratch);
    brute_force(&l, logits, with_bias ? bias : NULL, want, exact);
    for (uint32_t i = 0; i < l.top_k; i++) {
        CHECK(ids[i] == want[i]);
        CHECK(fabs((double)weights[i] - exact[i]) <= 1e-6 * exact[i]);
        CHECK(i == 0 || ids[i] > ids[i - 1]);
    }
    /* A NaN logit must not lead outside the arrays, nor vanish. */
    logits[round % l.experts] = NAN;
    cl_route(&l, logits, NULL, ids, weights, scratch);
    for (uint32_t i = 0; i < l.top_k; i++) CHECK(ids[i] < l.experts);
    if (l.score == CL_SCORE_SOFTMAX) CHECK(isnan(weights[0]));
    free(logits), free(bias), free(scratch), free(ids), free(want), free(weights), free(exact);
}

int main(void) {
    test_expf();
    test_log();
    test_sincos();
    test_rope();
    test_attention();
    for (uint32_t round = 0; round < 3000; round++) test_route_once(round);
    return test_result();
}
