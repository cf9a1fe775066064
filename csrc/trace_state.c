/* trace_state.c - what a store knows and holds when a recording begins, as bytes and back.
 *
 * Owns the layout of the state: the cache's numbers, then per layer turns, heats and values, then every slot. Without
 * it a replay could not follow a model that has been running for a while. What is read comes from a file: refuses every
 * number that the store could not have had.
 */
#include "error.h"
#include "trace.h"
#include <math.h>
#include <string.h>

typedef struct state_slot {
    int32_t layer;
    uint32_t expert, pins, fresh, is_abandoned, is_expected;
    uint64_t last_use;
} state_slot;
_Static_assert(sizeof(state_slot) == CL_STATE_SLOT_BYTES, "the format of traces");

typedef struct state_cache {
    double weights[CL_FEATURES], gram[CL_FEATURES][CL_FEATURES], moment[CL_FEATURES], price;
    uint64_t step, clock;
    int32_t layer_at;
    uint32_t zero;
} state_cache;

/* Bytes on their way in one direction. */
typedef struct stream {
    const uint8_t *in;
    uint8_t *out;
} stream;

static void get(stream *s, void *data, uint64_t bytes) {
    if (bytes) memcpy(data, s->in, bytes);
    s->in += bytes;
}

static void put(stream *s, const void *data, uint64_t bytes) {
    if (bytes) memcpy(s->out, data, bytes);
    s->out += bytes;
}

uint64_t cl_state_bytes(const cl_store *store) {
    uint64_t bytes = sizeof(state_cache);
    for (uint32_t l = 0; l < store->n_layers; l++)
        bytes += sizeof(uint64_t) + store->layers[l].experts * (uint64_t)(CL_FEATURES * sizeof(float));
    return bytes + (store->cache_slots + store->ring_slots) * sizeof(state_slot);
}

void cl_state_write(const cl_store *store, uint8_t *out) {
    const cl_cache *cache = &store->cache;
    stream s = {NULL, out};
    state_cache c = {.price = cache->price, .step = cache->step, .clock = store->clock, .layer_at = cache->layer_at};
    memcpy(c.weights, cache->weights, sizeof c.weights);
    memcpy(c.gram, cache->gram, sizeof c.gram);
    memcpy(c.moment, cache->moment, sizeof c.moment);
    put(&s, &c, sizeof c);
    for (uint32_t l = 0; l < store->n_layers; l++) {
        const cl_store_layer *layer = &store->layers[l];
        put(&s, &layer->turns, sizeof layer->turns);
        put(&s, layer->heats, layer->experts * sizeof *layer->heats);
        put(&s, layer->value, layer->experts * sizeof *layer->value);
    }
    for (uint64_t i = 0; i < store->cache_slots + store->ring_slots; i++) {
        const cl_slot *slot = &store->slots[i];
        state_slot of = {slot->layer, slot->expert, slot->pins, slot->fresh, slot->pins == 0 && slot->loading,
                         slot->is_expected, slot->last_use};
        put(&s, &of, sizeof of);
    }
}

/* ---- back ---- */

static int all_finite(const void *data, uint64_t n, uint32_t size) {
    for (uint64_t i = 0; i < n; i++)
        if (!(size == 8 ? isfinite(((const double *)data)[i]) : isfinite(((const float *)data)[i]))) return 0;
    return 1;
}

static int read_cache(cl_store *store, stream *s, cl_error *err) {
    state_cache c;
    get(s, &c, sizeof c);
    if (!all_finite(&c, offsetof(state_cache, step) / sizeof(double), sizeof(double)) || c.layer_at < -1 ||
        c.layer_at >= (int64_t)store->n_layers)
        return cl_fail(err, CL_CORRUPT, "the trace's state of the cache is not one that a model can have");
    memcpy(store->cache.weights, c.weights, sizeof c.weights);
    memcpy(store->cache.gram, c.gram, sizeof c.gram);
    memcpy(store->cache.moment, c.moment, sizeof c.moment);
    store->cache.price = c.price;
    store->cache.step = c.step;
    store->cache.layer_at = c.layer_at;
    store->clock = c.clock;
    return CL_OK;
}

static int read_layer(cl_store_layer *layer, stream *s, cl_error *err) {
    get(s, &layer->turns, sizeof layer->turns);
    get(s, layer->heats, layer->experts * sizeof *layer->heats);
    get(s, layer->value, layer->experts * sizeof *layer->value);
    if (!all_finite(layer->heats, layer->experts * (uint64_t)CL_HEATS, sizeof(float)) ||
        !all_finite(layer->value, layer->experts, sizeof(float)))
        return cl_fail(err, CL_CORRUPT, "the trace's heats of layer %u are not all finite", layer->layer);
    return CL_OK;
}

static int read_slot(cl_store *store, uint64_t at, stream *s, cl_error *err) {
    state_slot of;
    cl_slot *slot = &store->slots[at];
    get(s, &of, sizeof of);
    if (of.layer < 0 && of.pins == 0) return CL_OK;
    if (of.layer < 0 || of.layer >= (int64_t)store->n_layers || of.expert >= store->layers[of.layer].experts ||
        store->layers[of.layer].slot_of[of.expert] >= 0 || of.pins > 1u << 20)
        return cl_fail(err, CL_CORRUPT, "the trace's slot %llu does not hold a record of its own",
                       (unsigned long long)at);
    cl_store_put(store, slot, (uint32_t)of.layer, of.expert);
    slot->pins = of.pins;
    slot->fresh = of.fresh != 0;
    slot->is_expected = of.is_expected != 0;
    slot->loading = of.pins == 0 && of.is_abandoned != 0;
    slot->last_use = of.last_use;
    if (of.pins && cl_store_in_cache(store, slot)) store->cache_pinned++;
    return CL_OK;
}

int cl_state_read(cl_store *store, const uint8_t *in, uint64_t bytes, cl_error *err) {
    stream s = {in, NULL};
    if (bytes != cl_state_bytes(store))
        return cl_fail(err, CL_CORRUPT, "the trace's state has %llu bytes, %llu were expected",
                       (unsigned long long)bytes, (unsigned long long)cl_state_bytes(store));
    int code = read_cache(store, &s, err);
    for (uint32_t l = 0; l < store->n_layers && !code; l++) code = read_layer(&store->layers[l], &s, err);
    for (uint64_t i = 0; i < store->cache_slots + store->ring_slots && !code; i++)
        code = read_slot(store, i, &s, err);
    return code;
}
