/* test_sample.c - the sampler against its definition by brute force, its distribution, and its random numbers against
 * the published vectors of Philox4x32-10 (checked through what they make the sampler choose). */
#include "check.h"
#include "kernels.h"

static int32_t sample(const float *logits, uint32_t n, cl_sampling s, uint64_t position, const uint8_t *banned) {
    void *scratch = malloc(cl_sample_scratch_bytes(n));
    int32_t id = cl_sample(logits, n, &s, position, banned, scratch);
    free(scratch);
    return id;
}

/* Reference Philox4x32-10, one round per line of its paper. */
static double reference_uniform(uint64_t seed, uint64_t position) {
    uint32_t x0 = (uint32_t)position, x1 = (uint32_t)(position >> 32), x2 = 0, x3 = 0;
    for (uint32_t r = 0; r < 10; r++) {
        uint32_t k0 = (uint32_t)seed + r * 0x9E3779B9u, k1 = (uint32_t)(seed >> 32) + r * 0xBB67AE85u;
        uint64_t p0 = 0xD2511F53ull * x0, p1 = 0xCD9E8D57ull * x2;
        uint32_t y0 = (uint32_t)(p1 >> 32) ^ x1 ^ k0, y2 = (uint32_t)(p0 >> 32) ^ x3 ^ k1;
        x1 = (uint32_t)p1, x3 = (uint32_t)p0, x0 = y0, x2 = y2;
    }
    if (seed == 0 && position == 0) CHECK(x0 == 0x6627e8d5 && x1 == 0xe169c58d && x2 == 0xbc57ac4c && x3 == 0x9b00dbd8);
    return (double)(((uint64_t)x1 << 32 | x0) >> 11) * 0x1p-53;
}

static int is_banned(const uint8_t *banned, uint32_t id) { return banned && (banned[id / 8] >> id % 8 & 1); }

/* Selection sort, exp of the C library, sums in long double. Returns -2 where u lies too near an edge to say. */
static int32_t brute_force(const float *logits, uint32_t n, cl_sampling s, double u, const uint8_t *banned) {
    uint32_t *order = malloc(n * sizeof *order), count = 0;
    for (uint32_t id = 0; id < n; id++)
        if (!is_banned(banned, id)) order[count++] = id;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = i + 1; j < count; j++) {
            uint32_t a = order[i], b = order[j];
            if (logits[b] > logits[a] || (logits[b] == logits[a] && b < a)) order[i] = b, order[j] = a;
        }
    if (s.top_k && s.top_k < count) count = s.top_k;
    long double total = 0, sum = 0, *p = malloc(n * sizeof *p);
    for (uint32_t i = 0; i < count; i++)
        total += p[i] = expl(((long double)logits[order[i]] - logits[order[0]]) / (long double)s.temperature);
    int32_t answer = -2;
    uint32_t kept = count;
    if (s.top_p < 1) {
        for (kept = 0; kept < count && (kept == 0 || sum < (long double)s.top_p * total); kept++) sum += p[kept];
        if (fabsl(sum - (long double)s.top_p * total) < 1e-12L * total) kept = 0;
        total = sum, sum = 0;
    }
    for (uint32_t i = 0; i < kept && answer == -2; i++) {
        sum += p[i];
        if (fabsl(sum - (long double)u * total) < 1e-12L * total) break;
        if (sum > (long double)u * total) answer = (int32_t)order[i];
    }
    free(order), free(p);
    return answer;
}

static void test_against_brute_force(void) {
    int undecided = 0;
    for (uint32_t round = 0; round < 4000; round++) {
        uint32_t n = 1 + (uint32_t)(test_random() % 97);
        float *logits = test_floats(n);
        uint8_t *banned = calloc(n / 8 + 1, 1);
        for (uint32_t i = 0; i < n; i++) {
            logits[i] *= round % 2 ? 4.0f : 60.0f;
            if (round % 3 == 0) logits[i] = rintf(logits[i]);
            if (i > 0 && test_random() % 5 == 0) banned[i / 8] |= (uint8_t)(1 << i % 8);
        }
        static const float temperatures[] = {1.0f, 0.3f, 2.5f, 1e-3f, 20.0f}, top_ps[] = {1.0f, 0.9f, 0.5f, 1e-6f};
        cl_sampling s = {temperatures[round % 5], (uint32_t)(round % 7), top_ps[round % 4], test_random()};
        uint64_t position = round % 2 ? test_random() : round;
        int32_t want = brute_force(logits, n, s, reference_uniform(s.seed, position), round % 4 ? banned : NULL);
        int32_t got = sample(logits, n, s, position, round % 4 ? banned : NULL);
        CHECK(want == -2 || got == want);
        undecided += want == -2;
        free(logits), free(banned);
    }
    CHECK(undecided < 40);
}

static void test_greedy(void) {
    float logits[6] = {1.0f, 5.0f, -0.0f, 5.0f, 4.0f, 0.0f};
    cl_sampling s = {.temperature = 0.0f, .top_p = 1.0f};
    CHECK(sample(logits, 6, s, 0, NULL) == 1);
    uint8_t banned = 1 << 1, all = 63;
    CHECK(sample(logits, 6, s, 0, &banned) == 3);
    CHECK(sample(logits, 6, s, 0, &all) == -1);
    s.temperature = 1.0f, s.top_k = 1;
    CHECK(sample(logits, 6, s, 9, NULL) == 1);
    s.temperature = 0.0f;
    logits[4] = NAN;
    CHECK(sample(logits, 6, s, 0, NULL) == -1);
    uint8_t fourth = 1 << 4; /* a banned id is not looked at */
    CHECK(sample(logits, 6, s, 0, &fourth) == 1);
    logits[4] = INFINITY;
    CHECK(sample(logits, 6, s, 0, NULL) == -1);
    logits[4] = 0.0f;
    static const float bad[] = {-1.0f, NAN};
    for (int i = 0; i < 2; i++) {
        s.temperature = bad[i];
        CHECK(sample(logits, 6, s, 0, NULL) == -1);
    }
}

/* Frequencies over positions follow the softmax: chi-squared with 5 degrees of freedom, far in its tail. */
static void test_distribution(void) {
    enum { n = 6, draws = 60000 };
    float logits[n] = {0.0f, 1.0f, -1.0f, 0.5f, 2.0f, -3.0f};
    int seen[n] = {0};
    double total = 0, chi = 0;
    for (int i = 0; i < n; i++) total += exp((double)logits[i] / 1.3);
    for (uint64_t position = 0; position < draws; position++)
        seen[sample(logits, n, (cl_sampling){1.3f, 0, 1.0f, 42}, position, NULL)]++;
    for (int i = 0; i < n; i++) {
        double want = draws * exp((double)logits[i] / 1.3) / total;
        chi += (seen[i] - want) * (seen[i] - want) / want;
    }
    printf("chi squared %.2f\n", chi);
    CHECK(chi < 25.0);
}

static void test_depends_on_seed_and_position_only(void) {
    float *logits = test_floats(5000);
    int differs_by_seed = 0, differs_by_position = 0;
    for (uint64_t i = 0; i < 200; i++) {
        cl_sampling s = {1.0f, 0, 1.0f, i};
        int32_t first = sample(logits, 5000, s, 7, NULL);
        CHECK(sample(logits, 5000, s, 7, NULL) == first);
        differs_by_position += sample(logits, 5000, s, 8, NULL) != first;
        s.seed += 1ull << 32;
        differs_by_seed += sample(logits, 5000, s, 7, NULL) != first;
    }
    CHECK(differs_by_seed > 190 && differs_by_position > 190);
    free(logits);
}

int main(void) {
    test_greedy();
    test_against_brute_force();
    test_distribution();
    test_depends_on_seed_and_position_only();
    return test_result();
}
