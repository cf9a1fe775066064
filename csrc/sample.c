/* sample.c - the next token from a row of logits (docs/numerics.md, "Sampling").
 *
 * Owns the order of candidates, the probabilities and the random number of a position; refuses rows without a usable
 * logit. Allocates nothing, remembers nothing: the same arguments give the same token on every machine.
 */
#include "kernels.h"
#include "numbers.h"

/* Ids whose (logit - max) / temperature lies below this have probability 0; the sum would not feel them (e^-40 is less
 * than half an ulp of 1, which the best id alone contributes). */
#define LOWEST_EXPONENT -40.0

/* A candidate: `key` grows as the logit falls. */
typedef struct candidate {
    uint32_t key, id;
} candidate;
static_assert(sizeof(candidate) == sizeof(double), "a candidate's place can hold its weight");

static int is_banned(const uint8_t *bitmap, uint32_t id) { return bitmap != NULL && (bitmap[id / 8] >> id % 8 & 1); }

static int is_finite(float x) { return (cl_float_bits(x) & 0x7f800000u) != 0x7f800000u; }

/* Maps floats to integers that fall as they rise; -0 and +0 are one value. */
static uint32_t descending_key(float x) {
    uint32_t bits = cl_float_bits(x + 0.0f);
    return bits >> 31 ? bits : ~(bits | 0x80000000u);
}

/* The largest logit that is not banned, ties to the lower id; -1 if there is none or one of them is not finite. */
static int32_t greedy(const float *logits, uint32_t vocab_size, const uint8_t *banned) {
    int64_t best = -1;
    for (uint32_t id = 0; id < vocab_size; id++) {
        if (is_banned(banned, id)) continue;
        if (!is_finite(logits[id])) return -1;
        if (best < 0 || logits[id] > logits[best]) best = id;
    }
    return (int32_t)best;
}

/* ---- exp in double ----------------------------------------------------------------------------------------------- */

/* exp(x) for x in -40..0: x = n ln 2 + r, Taylor to r^13, every product and sum rounded once, no fused operations. */
static double exp_double(double x) {
    double shifted = x * 0x1.71547652b82fep0 + 0x1.8p52, whole = shifted - 0x1.8p52;
    double r = (x - whole * 0x1.62e42fefap-1) - whole * 0x1.cf79abc9e3b3ap-40;
    double p = 1.0 / 6227020800.0;
    static const double inverse_factorial[13] = {1.0,         1.0,          1.0 / 2,       1.0 / 6,       1.0 / 24,
                                                 1.0 / 120,   1.0 / 720,    1.0 / 5040,    1.0 / 40320,   1.0 / 362880,
                                                 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600};
    for (int i = 12; i >= 0; i--) p = p * r + inverse_factorial[i];
    uint64_t power_bits = (uint64_t)(1023 + (int64_t)whole) << 52;
    double power;
    memcpy(&power, &power_bits, sizeof power);
    return p * power;
}

/* ---- the random number of a position ----------------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., SC 2011): key = seed, counter = position; u from the first two words. */
static double uniform(uint64_t seed, uint64_t position) {
    uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), 0, 0};
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
        memcpy(c, next, sizeof c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (double)(((uint64_t)c[1] << 32 | c[0]) >> 11) * 0x1p-53;
}

/* ---- candidates in order ----------------------------------------------------------------------------------------- */

#define RADIX_BITS 11
#define RADIX (1u << RADIX_BITS)

/* Scratch: two candidate arrays, then the histogram. */
uint64_t cl_sample_scratch_bytes(uint32_t vocab_size) {
    return 2 * (uint64_t)vocab_size * sizeof(candidate) + RADIX * sizeof(uint32_t);
}

/* Sorts by key, stable, so that ids that came in ascending stay ascending among equals. Returns where the result is. */
static candidate *sort_candidates(candidate *from, candidate *to, uint32_t n, uint32_t *histogram) {
    for (unsigned shift = 0; shift < 32; shift += RADIX_BITS) {
        memset(histogram, 0, RADIX * sizeof *histogram);
        for (uint32_t i = 0; i < n; i++) histogram[from[i].key >> shift & (RADIX - 1)]++;
        uint32_t start = 0;
        for (uint32_t digit = 0; digit < RADIX; digit++) {
            uint32_t count = histogram[digit];
            histogram[digit] = start;
            start += count;
        }
        for (uint32_t i = 0; i < n; i++) to[histogram[from[i].key >> shift & (RADIX - 1)]++] = from[i];
        candidate *swap = from;
        from = to;
        to = swap;
    }
    return from;
}

static double exponent(const float *logits, uint32_t id, float max, float temperature) {
    return ((double)logits[id] - (double)max) / (double)temperature;
}

/* The first id, in order, whose cumulative weight exceeds u times the weight of the smallest prefix reaching top_p. */
static int32_t draw(const candidate *order, const double *weight, uint32_t n, double top_p, double u) {
    double total = 0.0;
    for (uint32_t i = 0; i < n; i++) total += weight[i];
    uint32_t kept = n;
    if (top_p < 1.0) {
        double wanted = top_p * total;
        total = 0.0;
        for (kept = 0; kept < n && (kept == 0 || total < wanted); kept++) total += weight[kept];
    }
    double target = u * total, cumulative = 0.0;
    for (uint32_t i = 0; i < kept; i++) {
        cumulative += weight[i];
        if (cumulative > target) return (int32_t)order[i].id;
    }
    return (int32_t)order[kept - 1].id; /* u * total was rounded up to the total itself */
}

int32_t cl_sample(const float *logits, uint32_t vocab_size, const cl_sampling *sampling, uint64_t position,
                  const uint8_t *banned_bitmap, void *scratch) {
    int32_t best = greedy(logits, vocab_size, banned_bitmap);
    if (best < 0 || sampling->temperature == 0.0f) return best;
    if (!(sampling->temperature > 0.0f)) return -1;
    float max = logits[best];
    candidate *first = scratch, *second = first + vocab_size;
    uint32_t n = 0;
    for (uint32_t id = 0; id < vocab_size; id++) {
        if (is_banned(banned_bitmap, id)) continue;
        if (!(exponent(logits, id, max, sampling->temperature) >= LOWEST_EXPONENT)) continue;
        first[n++] = (candidate){descending_key(logits[id]), id};
    }
    candidate *order = sort_candidates(first, second, n, (uint32_t *)(void *)(second + vocab_size));
    if (sampling->top_k != 0 && sampling->top_k < n) n = sampling->top_k;
    double *weight = (double *)(void *)(order == first ? second : first); /* the array that is free again */
    for (uint32_t i = 0; i < n; i++) weight[i] = exp_double(exponent(logits, order[i].id, max, sampling->temperature));
    return draw(order, weight, n, (double)sampling->top_p, uniform(sampling->seed, position));
}
