/* cache_fit.c - what the past uses of an expert say about the next: a linear least-squares fit, renewed every step.
 *
 * Owns the weights of the heats. Each turn of a layer gives one equation per expert: its heats before the turn on one
 * side, wanted or not (1 or 0) on the other. An equation counts 1 / (predicted probability + SOFTENING), about one over
 * its variance: what decides evictions are the many improbable experts, not the few that are always wanted. Refuses to
 * stray far on little evidence: PRIOR equations hold the first weights in place. All in a fixed order of additions, so
 * that a replay finds the same weights.
 */
#include "cache_fit.h"
#include <math.h>
#include <string.h>

#define MEMORY_STEPS 256   /* after these a turn counts half in the fit */
#define SOFTENING 0.01
#define PRIOR 10.0
#define LEARN_RECORDS 8192u /* equations per step, about; more layers take turns */

static const double prior[CL_FEATURES] = {0.1, 0.2, 0.3, 0.2, 0.2, 0.5, 0};

void cl_fit_init(cl_cache *cache, uint64_t records) {
    memcpy(cache->weights, prior, sizeof prior);
    cache->learn_every = (uint32_t)(records / LEARN_RECORDS + 1);
}

void cl_fit_learn(cl_cache *cache, const cl_store_layer *layer) {
    for (uint32_t e = 0; e < layer->experts; e++) {
        double x[CL_FEATURES], predicted = cache->weights[CL_HEATS];
        for (uint32_t i = 0; i < CL_HEATS; i++) { /* they have faded by one turn already */
            x[i] = layer->heats[e][i] / cache->decay[i];
            predicted += cache->weights[i] * x[i];
        }
        x[CL_HEATS] = 1;
        predicted = predicted < 0 ? 0 : predicted > 1 ? 1 : predicted;
        double counts = 1 / (predicted + SOFTENING);
        for (uint32_t i = 0; i < CL_FEATURES; i++) {
            for (uint32_t j = i; j < CL_FEATURES; j++) cache->gram[i][j] += counts * x[i] * x[j];
            if (layer->wanted[e]) cache->moment[i] += counts * x[i];
        }
    }
}

/* Cholesky: gram + PRIOR I is symmetric and positive definite. */
void cl_fit_solve(cl_cache *cache) {
    double l[CL_FEATURES][CL_FEATURES], y[CL_FEATURES];
    for (uint32_t i = 0; i < CL_FEATURES; i++) {
        for (uint32_t j = 0; j <= i; j++) {
            double sum = cache->gram[j][i] + (i == j ? PRIOR : 0);
            for (uint32_t k = 0; k < j; k++) sum -= l[i][k] * l[j][k];
            l[i][j] = i == j ? sqrt(sum) : sum / l[j][j];
        }
        y[i] = cache->moment[i] + PRIOR * prior[i];
        for (uint32_t k = 0; k < i; k++) y[i] -= l[i][k] * y[k];
        y[i] /= l[i][i];
    }
    for (uint32_t i = CL_FEATURES; i-- > 0;) {
        for (uint32_t k = i + 1; k < CL_FEATURES; k++) y[i] -= l[k][i] * y[k];
        y[i] /= l[i][i];
    }
    for (uint32_t i = 0; i < CL_FEATURES; i++)
        if (!isfinite(y[i])) return; /* the last weights stay */
    memcpy(cache->weights, y, sizeof y);
    double keep = exp2(-1.0 / MEMORY_STEPS);
    for (uint32_t i = 0; i < CL_FEATURES; i++) {
        for (uint32_t j = i; j < CL_FEATURES; j++) cache->gram[i][j] *= keep;
        cache->moment[i] *= keep;
    }
}
