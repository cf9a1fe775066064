/* residency.c - what may be asked of the cache between steps: its heat, reads ahead of need, a recording.
 *
 * Owns the filling of empty slots with what earlier runs have learned to be hot. Such a record has no right to its slot
 * beyond its value: it is evicted like any other, and one import of heat pays for at most one cacheful of reads. Their
 * priority is the lowest, so a step never waits for them. Refuses heat that is not a probability, and to change heat
 * under a recording.
 */
#include "clock.h"
#include "error.h"
#include "model.h"
#include "trace.h"
#include <math.h>

#define MOST_WARM_READS 4 /* under way at once */

uint64_t cl_model_heat_entries(const cl_model *m) {
    uint64_t n = 0;
    for (uint32_t l = 0; l < m->store.n_layers; l++) n += m->store.layers[l].experts;
    return n;
}

static int check_entries(const cl_model *m, uint64_t n, cl_error *err) {
    uint64_t expected = cl_model_heat_entries(m);
    if (n == expected) return CL_OK;
    return cl_fail(err, CL_INVALID, "heat of %llu experts, the model has %llu", (unsigned long long)n,
                   (unsigned long long)expected);
}

int cl_model_export_heat(const cl_model *m, float *out, uint64_t n, cl_error *err) {
    cl_ok(err);
    int code = check_entries(m, n, err);
    if (!code) cl_cache_get_heats(&m->store, out);
    return code;
}

int cl_model_import_heat(cl_model *m, const float *heat, uint64_t n, cl_error *err) {
    cl_ok(err);
    int code = check_entries(m, n, err);
    if (!code && m->store.recorder)
        code = cl_fail(err, CL_INVALID, "heat cannot be imported while a trace is recorded");
    for (uint64_t i = 0; i < n && !code; i++)
        if (!(heat[i] >= 0 && heat[i] <= 1))
            code = cl_fail(err, CL_INVALID, "heat %llu is %g, must be 0..1", (unsigned long long)i, (double)heat[i]);
    if (code) return code;
    cl_cache_set_heats(&m->store, heat);
    m->store.warm_left = m->store.cache_slots;
    return CL_OK;
}

/* ---- warm-up ---- */

static uint32_t reads_under_way(const cl_store *store) {
    uint32_t n = 0;
    for (int32_t at = store->abandoned; at >= 0; at = store->slots[at].next_abandoned) n += store->slots[at].loading;
    return n;
}

/* The most valued expert that is not in memory; 0 if none is worth anything. */
static int hottest_absent(const cl_store *store, uint32_t *layer, uint32_t *expert) {
    float most = 0;
    for (uint32_t l = 0; l < store->n_layers; l++) {
        const cl_store_layer *at = &store->layers[l];
        for (uint32_t e = 0; e < at->experts; e++) {
            if (at->slot_of[e] >= 0 || at->value[e] <= most) continue;
            most = at->value[e];
            *layer = l;
            *expert = e;
        }
    }
    return most > 0;
}

/* Starts one read; 0: there is nothing more to read, or no place for it. */
static int warm_one(cl_store *store) {
    uint32_t layer = 0, expert = 0;
    int loaded;
    if (!store->warm_left || !store->cache_empty || !hottest_absent(store, &layer, &expert)) return 0;
    cl_slot *slot = cl_store_acquire(store, layer, expert, CL_FOR_WARM, &loaded);
    if (!slot) return 0;
    store->warm_left--;
    cl_store_release(store, slot);
    return 1;
}

int cl_model_warm(cl_model *m, uint64_t budget_us, uint32_t *more, cl_error *err) {
    cl_store *store = &m->store;
    cl_ok(err);
    *more = 0;
    if (m->loaded != 1) return cl_fail(err, CL_INVALID, "the model is not loaded");
    for (uint64_t start = cl_now_us();;) {
        uint32_t seen = cl_io_events(m->io);
        cl_store_settle(store);
        while (reads_under_way(store) < MOST_WARM_READS && warm_one(store)) continue;
        *more = reads_under_way(store) > 0;
        uint64_t spent = cl_now_us() - start;
        if (!*more || spent >= budget_us) return CL_OK;
        cl_io_wait(m->io, seen, budget_us - spent);
    }
}

/* ---- recording ---- */

int cl_model_trace(cl_model *m, const char *path, cl_error *err) {
    cl_ok(err);
    if (!path) {
        cl_recorder *recorder = m->store.recorder;
        m->store.recorder = NULL;
        return cl_recorder_close(recorder, &m->store, err);
    }
    if (m->store.recorder) return cl_fail(err, CL_INVALID, "a trace is being recorded already");
    return cl_recorder_open(&m->store.recorder, &m->store, m->heat_half_life, path, err);
}

int cl_model_trace_state(const cl_model *m, cl_error *err) {
    cl_ok(err);
    return m->store.recorder ? cl_recorder_state(m->store.recorder, err) : CL_OK;
}
