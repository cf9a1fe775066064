/* replay.c - runs store.c and cache.c over a recorded trace, without a model and without drives.
 *
 * Owns a store whose reads are complete at once. cl_trace_replay repeats every event as it was, from the state that the
 * recording began with, and hits and loads come out as they were. cl_replay_ours is what the comparison with other
 * policies (policies.c) asks: the uses of decoding alone, from an empty cache that has learned nothing, with cache and
 * ring together no larger than what the others get. Refuses to trust a trace: an event that does not fit what the store
 * holds is passed over.
 */
#include "error.h"
#include "replay.h"
#include <stdlib.h>
#include <string.h>

typedef struct replay {
    const cl_trace *trace;
    cl_store store;
    cl_counters counters;
    void *memory;
    cl_replay *out;
    uint32_t turn[CL_TURN_MOST]; /* experts that decoding holds */
    uint32_t n_turn;
    int32_t layer; /* of the turn */
} replay;

/* ---- the store ---- */

static int make_store(replay *r, uint64_t slots, uint64_t ring, cl_error *err) {
    const cl_trace *t = r->trace;
    uint32_t n = t->header.n_layers;
    cl_expert_layer *layers = calloc(n, sizeof *layers);
    cl_model_options options = {.expert_layers = layers,
                                .n_expert_layers = n,
                                .expert_slots = slots,
                                .ring_slots = (uint32_t)ring,
                                .heat_half_life = t->header.heat_half_life};
    for (uint32_t l = 0; layers && l < n; l++)
        layers[l] = (cl_expert_layer){.layer = t->layers[l].layer,
                                      .experts = t->layers[l].experts,
                                      .record_bytes = t->layers[l].record_bytes};
    cl_carve carve = {0};
    if (layers) cl_store_place(&r->store, &carve, &options);
    if (layers && !carve.overflow) r->memory = calloc(1, carve.used + 64);
    if (r->memory) {
        carve = (cl_carve){(uint8_t *)(((uintptr_t)r->memory + 63) & ~(uintptr_t)63), 0, 0};
        r->store.counters = &r->counters;
        cl_store_place(&r->store, &carve, &options);
        cl_store_init(&r->store, &options);
    }
    free(layers);
    if (!r->memory)
        return cl_fail(err, CL_NOMEM, "no memory to replay with %llu slots", (unsigned long long)(slots + ring));
    return CL_OK;
}

/* ---- events ---- */

static cl_slot *held_slot(replay *r, uint32_t layer, uint32_t expert) {
    int32_t at = r->store.layers[layer].slot_of[expert];
    return at >= 0 && r->store.slots[at].pins ? &r->store.slots[at] : NULL;
}

static void release(replay *r, uint32_t layer, uint32_t expert, cl_event_kind kind) {
    cl_slot *slot = held_slot(r, layer, expert);
    if (!slot) return;
    cl_store_release(&r->store, slot);
    if (slot->pins) return;
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

static void decode_acquire(replay *r, const cl_event *e) {
    int loaded;
    if (!cl_store_acquire(&r->store, e->layer, e->expert, CL_FOR_DECODE, &loaded) &&
        !cl_store_acquire(&r->store, e->layer, e->expert, CL_FOR_DECODE_NOW, &loaded))
        loaded = 1;
    cl_cache_touch(&r->store, e->layer, e->expert, 1);
    r->out->accesses++;
    r->out->loads += (uint64_t)loaded;
    r->out->hits += !loaded;
    r->out->decode_loads += (uint64_t)loaded;
    if (r->n_turn < CL_TURN_MOST) r->turn[r->n_turn++] = e->expert;
}

static void acquire_other(replay *r, const cl_event *e) {
    int loaded;
    cl_purpose purpose = (cl_purpose)(e->number / 2);
    cl_slot *slot = cl_store_acquire(&r->store, e->layer, e->expert, purpose, &loaded);
    int is_early = purpose == CL_FOR_LOOKAHEAD || purpose == CL_FOR_WARM;
    r->out->early_loads += is_early && slot && loaded;
    r->out->differences += !slot || loaded != (int)(e->number % 2);
}

static void prefill_use(replay *r, const cl_event *e) {
    cl_slot *slot = held_slot(r, e->layer, e->expert);
    int loaded = e->kind == CL_EVENT_PREFILL_LOAD;
    r->out->prefill_uses++;
    r->out->prefill_loads += (uint64_t)loaded;
    r->out->loads += (uint64_t)loaded;
    r->out->hits += !loaded;
    if (slot) cl_store_prefill_use(&r->store, slot, loaded);
}

static void settled(replay *r, const cl_event *e) {
    int32_t at = r->store.layers[e->layer].slot_of[e->expert];
    if (at < 0 || r->store.slots[at].pins || !r->store.slots[at].loading) return;
    cl_store_settled(&r->store, &r->store.slots[at], e->kind == CL_EVENT_SETTLED_FAILED);
}

static void apply(replay *r, const cl_event *e) {
    switch (e->kind) {
    case CL_EVENT_NEXT_LAYER:
    case CL_EVENT_LAYER:
        r->layer = (int32_t)e->layer;
        r->n_turn = 0;
        break;
    case CL_EVENT_FAR: decode_acquire(r, e); break;
    case CL_EVENT_USES: r->out->hits += e->number ? e->number - 1 : 0; break;
    case CL_EVENT_RELEASE_TURN: release_turn(r); break;
    case CL_EVENT_TICK: cl_cache_tick(&r->store); break;
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

int cl_trace_replay(const cl_trace *t, cl_replay *out, cl_error *err) {
    cl_ok(err);
    memset(out, 0, sizeof *out);
    replay r = {.trace = t, .out = out, .layer = -1};
    int code = make_store(&r, t->header.cache_slots, t->header.ring_slots, err);
    if (!code && t->header.has_state) code = cl_state_read(&r.store, t->state, t->state_bytes, err);
    cl_event_reader reader;
    cl_event event;
    cl_events_begin(&reader, t);
    while (!code && (code = cl_events_next(&reader, &event, err)) > 0) {
        apply(&r, &event);
        code = CL_OK;
    }
    out->evictions = atomic_load(&r.counters.expert_evictions);
    free(r.memory);
    return code;
}

/* ---- the comparison ---- */

/* A turn's accesses, and the slots that it holds. */
typedef struct turn {
    const cl_access *accesses;
    cl_slot **slots; /* [n], NULL: not held, or not asked for yet */
    uint64_t n, next; /* held slots below `next` that were read have been given back for others */
} turn;

static uint32_t expert_of(const cl_trace *t, const cl_access *a) {
    return a->record - (uint32_t)t->first_record[a->layer];
}

/* As decode.c does where no slot is free: an expert that has been read is computed, and its slot is free again. */
static int give_one_back(cl_store *store, turn *turn) {
    for (; turn->next < turn->n; turn->next++) {
        cl_slot *slot = turn->slots[turn->next];
        if (!slot || cl_store_in_cache(store, slot)) continue;
        cl_store_release(store, slot);
        turn->slots[turn->next++] = NULL;
        return 1;
    }
    return 0;
}

/* Returns whether it had to be read. */
static int use(cl_store *store, const cl_trace *t, turn *turn, uint64_t i) {
    const cl_access *a = &turn->accesses[i];
    int loaded, is_free = 1;
    cl_slot *slot;
    while (!(slot = cl_store_acquire(store, a->layer, expert_of(t, a), CL_FOR_DECODE, &loaded)) && is_free)
        is_free = give_one_back(store, turn);
    turn->slots[i] = slot;
    cl_cache_touch(store, a->layer, expert_of(t, a), a->uses);
    return slot ? loaded : 1;
}

/* As decode.c asks: what is in memory first. */
static void run_turn(cl_store *store, const cl_trace *t, turn *turn, uint8_t *is_done, cl_policy_result *out) {
    memset(turn->slots, 0, turn->n * sizeof *turn->slots);
    turn->next = 0;
    for (uint64_t i = 0; i < turn->n; i++) {
        const cl_access *a = &turn->accesses[i];
        is_done[i] = (uint8_t)cl_store_resident(store, a->layer, expert_of(t, a));
        if (is_done[i]) use(store, t, turn, i);
    }
    for (uint64_t i = 0; i < turn->n; i++)
        if (!is_done[i] && use(store, t, turn, i) && out) cl_policy_load(out, t, &turn->accesses[i]);
    for (uint64_t i = 0; i < turn->n; i++)
        if (turn->slots[i]) cl_store_release(store, turn->slots[i]);
}

int cl_replay_ours(const cl_trace *t, const cl_access *accesses, uint64_t slots, uint64_t count_from,
                   cl_policy_result *out, cl_error *err) {
    uint64_t ring = slots / 4 < t->header.ring_slots ? slots / 4 : t->header.ring_slots;
    replay r = {.trace = t};
    cl_slot **held = calloc(t->accesses + 1, sizeof(cl_slot *));
    uint8_t *is_done = calloc(t->accesses + 1, 1);
    int code = make_store(&r, slots - ring, ring, err);
    if (!code && (!held || !is_done)) code = cl_fail(err, CL_NOMEM, "no memory to replay a trace");
    for (uint64_t first = 0, end; !code && first < t->accesses; first = end) {
        end = cl_trace_turn_end(t, accesses, first);
        turn turn = {.accesses = accesses + first, .slots = held, .n = end - first};
        if (first && accesses[first].step != accesses[first - 1].step) cl_cache_tick(&r.store);
        run_turn(&r.store, t, &turn, is_done, first >= count_from ? out : NULL);
    }
    free(r.memory);
    free(held);
    free(is_done);
    return code;
}
