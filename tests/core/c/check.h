/* check.h - what the C test programs share: a check that counts, a generator, exact-size heap arrays. */
#ifndef COLIBRI_CHECK_H
#define COLIBRI_CHECK_H
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int test_failures;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition) && test_failures++ < 20)                                                                      \
            fprintf(stderr, "%s:%d: %s: not true: %s\n", __FILE__, __LINE__, __func__, #condition);                    \
    } while (0)

static inline int test_result(void) {
    if (test_failures) fprintf(stderr, "%d checks failed\n", test_failures);
    return test_failures ? 1 : 0;
}

static uint64_t test_state = 88172645463325252ull;

static inline uint64_t test_random(void) { /* xorshift64 */
    test_state ^= test_state << 13;
    test_state ^= test_state >> 7;
    test_state ^= test_state << 17;
    return test_state;
}

static inline double test_uniform(void) { return (double)(test_random() >> 11) * 0x1p-53; }

/* n floats in -1..1, exactly n on the heap, so that ASan sees the first byte beyond. */
static inline float *test_floats(uint64_t n) {
    float *x = malloc(n * sizeof *x);
    for (uint64_t i = 0; i < n; i++) x[i] = (float)(2.0 * test_uniform() - 1.0);
    return x;
}

#endif
