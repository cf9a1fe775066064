/* replay.c - runs store.c and cache.c over a recorded trace, without a model and without drives.
 *
 * Owns a store whose reads are complete at once. With the recording's own number of slots every event is repeated as it
 * was, from the state that it began with, and hits and loads come out as they were. With another number it cannot be:
 * what was in memory then is not now. Then a layer's turn is asked for as decode.c would, resident experts first,
 * beginning with an empty cache that knows the recorded heat. Refuses to trust a trace: an event that does not fit what
 * the store holds is passed over.
 */
#include "error.h"
#include "replay.h"
#include <stdlib.h>
#include <string.h>

typedef struct wish {
    uint32_t expert, uses;
} wish;

typedef struct replay {
    const cl_trace *trace;
    cl_store store;
    cl_counters counters;
    void *memory;
    cl_replay *out;
    uint64_t count_from; /* decode accesses before this one are not counted in `counted_` */
    uint32_t is_exact;
    uint32_t turn[CL_TURN_MOST]; /* exact: experts that decoding holds */
    uint32_t n_turn;
    int32_t layer; /* of the turn */
    wish *wishes; /* else: what the turn wants, not yet asked for */
    uint32_t n_wishes;
} replay;

/* ---- the store ---- */

static int make_store(replay *r, uint64_t slots, cl_error *err) {
    const cl_trace *t = r->trace;
    uint32_t n = t->header.n_layers, most = 1;
    cl_expert_layer *layers = calloc(n, sizeof *layers);
    cl_model_options options = {.expert_layers = layers,
                                .n_expert_layers = n,
                                .expert_slots = slots,
                                .ring_slots = (uint32_t)t->header.ring_slots,
                                .heat_half_life = t->header.heat_half_life};
    for (uint32_t l = 0; layers && l < n; l++) {
        layers[l] = (cl_expert_layer){.layer = t->layers[l].layer,
                                      .experts = t->layers[l].experts,
                                      .record_bytes = t->layers[l].record_bytes};
        if (layers[l].experts > most) most = layers[l].experts;
    }
    r->wishes = calloc(most, sizeof *r->wishes);
    cl_carve carve = {0};
    if (layers) cl_store_place(&r->store, &carve, &options);
    if (layers && !carve.overflow) r->memory = calloc(1, carve.used + 64);
    if (r->memory && r->wishes) {
        carve = (cl_carve){(uint8_t *)(((uintptr_t)r->memory + 63) & ~(uintptr_t)63), 0, 0};
        r->store.counters = &r->counters;
        cl_store_place(&r->store, &carve, &options);
        cl_store_init(&r->store, &options);
    }
    free(layers);
    if (!r->memory || !r->wishes)
        return cl_fail(err, CL_NOMEM, "no memory to replay with %llu slots", (unsigned long long)slots);
    return CL_OK;
}

/* Slots of another number start empty, and know only the heat. */
static int take_state(replay *r, cl_error *err) {
    const cl_trace *t = r->trace;
    if (!t->header.has_state) return CL_OK;
    if (r->is_exact) return cl_state_read(&r->store, t->state, t->state_bytes, err);
    replay as_it_was = {.trace = t};
    int code = make_store(&as_it_was, t->header.cache_slots, err);
    if (!code) code = cl_state_read(&as_it_was.store, t->state, t->state_bytes, err);
    if (!code) {
        r->store.cache = as_it_was.store.cache;
        for (uint32_t l = 0; l < t->header.n_layers; l++) {
            cl_store_layer *to = &r->store.layers[l];
            const cl_store_layer *from = &as_it_was.store.layers[l];
            to->turns = from->turns;
            memcpy(to->heats, from->heats, to->experts * sizeof *to->heats);
            memcpy(to->value, from->value, to->experts * sizeof *to->value);
        }
    }
    free(as_it_was.memory);
    free(as_it_was.wishes);
    return code;
}

/* ---- events ---- */

static cl_slot *held_slot(replay *r, uint32_t layer, uint32_t expert) {
    int32_t at = r->store.layers[layer].slot_of[expert];
    return at >= 0 && r->store.slots[at].pins ? &r->store.slots[at] : NULL;
}

static void count_decode(replay *r, uint32_t layer, int loaded, uint32_t uses) {
    cl_replay *out = r->out;
    uint64_t bytes = loaded ? r->trace->layers[layer].record_bytes : 0;
    if (out->accesses++ >= r->count_from) {
        out->counted_accesses++;
        out->counted_loads += (uint64_t)loaded;
        out->counted_bytes += bytes;
    }
    out->loads += (uint64_t)loaded;
    out->hits += uses - (uint64_t)loaded;
    out->decode_loads += (uint64_t)loaded;
}

static void decode_use(replay *r, uint32_t layer, uint32_t expert, uint32_t uses) {
    int loaded;
    cl_slot *slot = cl_store_acquire(&r->store, layer, expert, CL_FOR_DECODE, &loaded);
    count_decode(r, layer, slot ? loaded : 1, uses);
    cl_cache_touch(&r->store, layer, expert, uses);
}

static int by_expert(const void *a, const void *b) {
    uint32_t x = ((const wish *)a)->expert, y = ((const wish *)b)->expert;
    return x < y ? -1 : x > y;
}

static void ask_for_wishes(replay *r) {
    uint32_t layer = (uint32_t)r->layer;
    qsort(r->wishes, r->n_wishes, sizeof *r->wishes, by_expert);
    for (int resident = 1; resident >= 0; resident--)
        for (uint32_t i = 0; i < r->n_wishes; i++)
            if (r->wishes[i].uses && cl_store_resident(&r->store, layer, r->wishes[i].expert) == resident) {
                decode_use(r, layer, r->wishes[i].expert, r->wishes[i].uses);
                r->wishes[i].uses = 0;
            }
    r->n_wishes = 0;
}

static void release(replay *r, uint32_t layer, uint32_t expert, cl_event_kind kind) {
    cl_slot *slot = held_slot(r, layer, expert);
    if (!slot) return;
    cl_store_release(&r->store, slot);
    if (!r->is_exact || slot->pins) return;
    if (kind == CL_EVENT_RELEASE_FAILED) cl_store_forget(&r->store, slot);
    if (kind == CL_EVENT_ABANDON) slot->loading = 1;
}

static void drop_from_turn(replay *r, const cl_event *e) {
    if ((int32_t)e->layer != r->layer) return;
    for (uint32_t i = 0; i < r->n_turn; i++)
        if (r->turn[i] == e->expert) {
            r->turn[i] = r->turn[--r->n_turn];
            return;
        }
}

static void release_turn(replay *r) {
    for (uint32_t i = 0; i < r->n_turn; i++) release(r, (uint32_t)r->layer, r->turn[i], CL_EVENT_RELEASE);
    r->n_turn = 0;
}

static void acquire_other(replay *r, const cl_event *e) {
    int loaded;
    cl_purpose purpose = (cl_purpose)(e->number / 2);
    cl_slot *slot = cl_store_acquire(&r->store, e->layer, e->expert, purpose, &loaded);
    int is_early = purpose == CL_FOR_LOOKAHEAD || purpose == CL_FOR_WARM;
    r->out->early_loads += is_early && slot && loaded;
    r->out->differences += r->is_exact && (!slot || loaded != (int)(e->number % 2));
}

static void prefill_use(replay *r, const cl_event *e) {
    cl_slot *slot = held_slot(r, e->layer, e->expert);
    int loaded = r->is_exact ? e->kind == CL_EVENT_PREFILL_LOAD : slot ? (int)slot->fresh : 1;
    r->out->prefill_uses++;
    r->out->prefill_loads += (uint64_t)loaded;
    r->out->loads += (uint64_t)loaded;
    r->out->hits += !loaded;
    if (slot) cl_store_prefill_use(&r->store, slot, loaded);
}

static void settled(replay *r, const cl_event *e) {
    int32_t at = r->store.layers[e->layer].slot_of[e->expert];
    if (!r->is_exact || at < 0 || r->store.slots[at].pins || !r->store.slots[at].loading) return;
    cl_store_settled(&r->store, &r->store.slots[at], e->kind == CL_EVENT_SETTLED_FAILED);
}

static void decode_acquire(replay *r, const cl_event *e) {
    if (!r->is_exact) {
        if (r->n_wishes == r->trace->layers[e->layer].experts) ask_for_wishes(r);
        r->wishes[r->n_wishes++] = (wish){e->expert, 1};
    } else {
        decode_use(r, e->layer, e->expert, 1);
        if (r->n_turn < CL_TURN_MOST) r->turn[r->n_turn++] = e->expert;
    }
}

static void uses(replay *r, uint32_t number) {
    if (!r->is_exact && r->n_wishes) r->wishes[r->n_wishes - 1].uses = number;
    else if (number) r->out->hits += number - 1;
}

/* In a replay that is not exact a turn's slots are given back at its end, whatever the order was. */
static void end_turn(replay *r) {
    if (r->n_wishes) ask_for_wishes(r);
    if (r->is_exact || r->layer < 0) return;
    for (uint32_t e = 0; e < r->trace->layers[r->layer].experts; e++)
        if (r->store.layers[r->layer].wanted[e]) release(r, (uint32_t)r->layer, e, CL_EVENT_RELEASE);
}

static void apply(replay *r, const cl_event *e) {
    switch (e->kind) {
    case CL_EVENT_NEXT_LAYER:
    case CL_EVENT_LAYER:
        end_turn(r);
        r->layer = (int32_t)e->layer;
        r->n_turn = 0;
        break;
    case CL_EVENT_FAR: decode_acquire(r, e); break;
    case CL_EVENT_USES: uses(r, e->number); break;
    case CL_EVENT_RELEASE_TURN: release_turn(r); break;
    case CL_EVENT_TICK:
        end_turn(r);
        cl_cache_tick(&r->store);
        break;
    case CL_EVENT_ACQUIRE: acquire_other(r, e); break;
    case CL_EVENT_PREFILL_HIT:
    case CL_EVENT_PREFILL_LOAD: prefill_use(r, e); break;
    case CL_EVENT_SETTLED:
    case CL_EVENT_SETTLED_FAILED: settled(r, e); break;
    default:
        release(r, e->layer, e->expert, e->kind);
        drop_from_turn(r, e);
    }
}

int cl_trace_replay(const cl_trace *t, uint64_t slots, uint64_t count_from, cl_replay *out, cl_error *err) {
    cl_ok(err);
    memset(out, 0, sizeof *out);
    uint64_t records = t->first_record[t->header.n_layers];
    int is_exact = t->header.has_state && slots == t->header.cache_slots;
    if (slots < 1 || (slots > records && !is_exact))
        return cl_fail(err, CL_INVALID, "slots is %llu, must be 1..%llu", (unsigned long long)slots,
                       (unsigned long long)records);
    replay r = {.trace = t, .out = out, .count_from = count_from, .layer = -1};
    r.is_exact = out->is_exact = (uint32_t)is_exact;
    int code = make_store(&r, slots, err);
    if (!code) code = take_state(&r, err);
    cl_event_reader reader;
    cl_event event;
    cl_events_begin(&reader, t);
    while (!code && (code = cl_events_next(&reader, &event, err)) > 0) {
        apply(&r, &event);
        code = CL_OK;
    }
    if (!code) end_turn(&r);
    out->evictions = atomic_load(&r.counters.expert_evictions);
    free(r.memory);
    free(r.wishes);
    return code;
}
