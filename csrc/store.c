/* store.c - the one way to get an expert: resident, else read.
 *
 * Owns the slots (cache and read ring, in the arena) and knows which record lies in which. A slot is pinned while
 * anybody uses it and is never evicted then; one that was released before its read was complete is abandoned, and not
 * evicted until the read has ended. Refuses to wait: acquire starts a read and returns; who needs the record asks for
 * its state and sleeps in cl_io_wait. All functions run on the step's thread; the I/O threads only see the cl_read
 * inside a slot, from submit until its pending count is 0. Whatever decides where a record goes can be recorded
 * (trace.h), and is then the same in a replay.
 */
#include "store.h"
#include "format.h"
#include "trace.h"
#include <string.h>

uint64_t cl_store_slot_bytes(const cl_model_options *options) {
    uint64_t most = 0;
    for (uint32_t l = 0; l < options->n_expert_layers; l++)
        if (options->expert_layers[l].record_bytes > most) most = options->expert_layers[l].record_bytes;
    return most;
}

/* The tables: small, but carved too, so that nothing is left out of the plan. */
void cl_store_place(cl_store *store, cl_carve *carve, const cl_model_options *options) {
    uint32_t most_extents = 1;
    store->n_layers = options->n_expert_layers;
    /* A model without experts needs no slots. */
    store->cache_slots = store->n_layers ? options->expert_slots : 0;
    store->ring_slots = store->n_layers ? options->ring_slots : 0;
    store->layers = cl_carve_take(carve, store->n_layers, sizeof *store->layers, 64);
    for (uint32_t l = 0; l < store->n_layers; l++) {
        const cl_expert_layer *from = &options->expert_layers[l];
        cl_store_layer placed = {0};
        placed.extents =
            cl_carve_take(carve, (uint64_t)from->experts * from->extents_per_record, sizeof *placed.extents, 64);
        placed.verified = cl_carve_take(carve, from->experts, from->extents_per_record, 64);
        placed.slot_of = cl_carve_take(carve, from->experts, sizeof *placed.slot_of, 64);
        cl_cache_place(&placed, carve, from->experts);
        if (store->layers) store->layers[l] = placed;
        if (from->extents_per_record > most_extents) most_extents = from->extents_per_record;
    }
    uint64_t slots = store->cache_slots + store->ring_slots;
    store->slots = cl_carve_take(carve, slots, sizeof *store->slots, 64);
    cl_task *tasks = cl_carve_take(carve, slots, most_extents * sizeof *tasks, 64);
    if (tasks)
        for (uint64_t i = 0; i < slots; i++) store->slots[i].read.tasks = tasks + i * most_extents;
}

void cl_store_init(cl_store *store, const cl_model_options *options) {
    for (uint32_t l = 0; l < store->n_layers; l++) {
        const cl_expert_layer *from = &options->expert_layers[l];
        cl_store_layer *layer = &store->layers[l];
        uint64_t extents = (uint64_t)from->experts * from->extents_per_record;
        layer->layer = from->layer;
        layer->experts = from->experts;
        layer->extents_per_record = from->extents_per_record;
        layer->record_bytes = from->record_bytes;
        if (extents) memcpy(layer->extents, from->extents, extents * sizeof *layer->extents);
        for (uint32_t e = 0; e < layer->experts; e++) layer->slot_of[e] = -1;
    }
    for (uint64_t i = 0; i < store->cache_slots + store->ring_slots; i++) store->slots[i].layer = -1;
    store->cache_empty = store->cache_slots;
    store->abandoned = -1;
    cl_cache_init(store, options->heat_half_life);
}

int cl_store_in_cache(const cl_store *store, const cl_slot *slot) {
    return (uint64_t)(slot - store->slots) < store->cache_slots;
}

cl_slot_state cl_store_state(cl_slot *slot) {
    if (slot->loading) {
        if (atomic_load(&slot->read.pending)) return CL_SLOT_LOADING;
        slot->loading = 0;
    }
    return atomic_load(&slot->read.failed) ? CL_SLOT_FAILED : CL_SLOT_READY;
}

/* A failure belongs to the record that was read, not to the slot: the next record may come into it without a read of
 * its own (cache.c, move_up). */
void cl_store_forget(cl_store *store, cl_slot *slot) {
    if (slot->layer < 0) return;
    cl_store_layer *layer = &store->layers[slot->layer];
    layer->slot_of[slot->expert] = -1;
    layer->is_stale = 1;
    slot->layer = -1;
    slot->fresh = slot->is_expected = 0;
    atomic_store(&slot->read.failed, 0);
    if (!cl_store_in_cache(store, slot)) return;
    store->cache_empty++;
    uint64_t at = (uint64_t)(slot - store->slots);
    if (at < store->first_empty) store->first_empty = at;
}

/* ---- reads that nobody waits for ---- */

static void abandon(cl_store *store, cl_slot *slot) {
    slot->next_abandoned = store->abandoned;
    store->abandoned = (int32_t)(slot - store->slots);
    slot->is_abandoned = 1;
}

/* Done before anything is decided, never in between. In a replay nothing ends by itself; the trace says when. */
void cl_store_settle(cl_store *store) {
    if (!store->io) return;
    for (int32_t *link = &store->abandoned; *link >= 0;) {
        cl_slot *slot = &store->slots[*link];
        int was_open = slot->pins == 0 && slot->loading; /* else somebody has taken it over meanwhile */
        if (was_open && cl_store_state(slot) == CL_SLOT_LOADING) {
            link = &slot->next_abandoned;
            continue;
        }
        *link = slot->next_abandoned;
        slot->is_abandoned = 0;
        if (was_open) cl_store_settled(store, slot, cl_store_state(slot) == CL_SLOT_FAILED);
    }
}

void cl_store_settled(cl_store *store, cl_slot *slot, int failed) {
    slot->loading = 0;
    cl_record_settled(store, slot, failed);
    if (failed) cl_store_forget(store, slot);
    else store->layers[slot->layer].is_stale = 1;
}

/* ---- who gets which slot ---- */

static cl_slot *find(cl_store *store, uint32_t layer, uint32_t expert) {
    int32_t at = store->layers[layer].slot_of[expert];
    return at < 0 ? NULL : &store->slots[at];
}

int cl_store_resident(cl_store *store, uint32_t layer, uint32_t expert) {
    cl_store_settle(store);
    return find(store, layer, expert) != NULL;
}

cl_slot *cl_store_empty_slot(cl_store *store) {
    if (!store->cache_empty) return NULL;
    while (store->slots[store->first_empty].layer >= 0) store->first_empty++;
    return &store->slots[store->first_empty];
}

/* Half of the ring, rounded up, stays for those who know what they need. */
static int ring_has_room(const cl_store *store) {
    uint64_t n = 0;
    for (uint64_t i = store->cache_slots; i < store->cache_slots + store->ring_slots; i++)
        n += !store->slots[i].pins && !store->slots[i].loading;
    return 2 * n > store->ring_slots;
}

/* An empty slot of the cache for one who may keep it for long: another slot must stay free to go. */
static cl_slot *spare_slot(cl_store *store) {
    return store->cache_pinned + 2 <= store->cache_slots ? cl_store_empty_slot(store) : NULL;
}

static int is_decode(cl_purpose purpose) { return purpose == CL_FOR_DECODE || purpose == CL_FOR_DECODE_NOW; }

static cl_slot *choose(cl_store *store, uint32_t layer, uint32_t expert, cl_purpose purpose) {
    cl_slot *slot;
    if (is_decode(purpose)) {
        slot = cl_store_empty_slot(store);
        return slot ? slot : cl_cache_choose(store, layer, expert, purpose == CL_FOR_DECODE);
    }
    slot = spare_slot(store);
    if (slot || purpose == CL_FOR_WARM) return slot;
    slot = purpose != CL_FOR_LOOKAHEAD || ring_has_room(store) ? cl_cache_ring_slot(store) : NULL;
    if (slot || purpose == CL_FOR_PREFILL) return slot;
    slot = purpose == CL_FOR_PREFILL_NOW ? cl_store_empty_slot(store) : NULL;
    if (!slot) slot = cl_cache_victim(store);
    if (purpose == CL_FOR_PREFILL_NOW || !slot) return slot;
    int may_go = store->cache_pinned + 2 <= store->cache_slots && cl_cache_is_colder(store, slot, layer, expert);
    return may_go ? slot : NULL;
}

static void pin(cl_store *store, cl_slot *slot) {
    if (slot->pins++ == 0 && cl_store_in_cache(store, slot)) {
        store->cache_pinned++;
        if (store->layers[slot->layer].coldest == slot - store->slots) store->layers[slot->layer].is_stale = 1;
    }
    slot->last_use = ++store->clock;
}

static cl_priority priority_of(cl_purpose purpose) {
    switch (purpose) {
    case CL_FOR_PREFILL: return CL_READ_AHEAD;
    case CL_FOR_LOOKAHEAD:
    case CL_FOR_WARM: return CL_READ_IDLE;
    default: return CL_READ_URGENT;
    }
}

void cl_store_put(cl_store *store, cl_slot *slot, uint32_t layer, uint32_t expert) {
    if (slot->layer >= 0 && cl_store_in_cache(store, slot)) cl_count(&store->counters->expert_evictions, 1);
    cl_store_forget(store, slot);
    if (cl_store_in_cache(store, slot)) store->cache_empty--;
    slot->layer = (int32_t)layer;
    slot->expert = expert;
    store->layers[layer].slot_of[expert] = (int32_t)(slot - store->slots);
    store->layers[layer].is_stale = 1;
}

static void start_read(cl_store *store, cl_slot *slot, cl_priority priority) {
    const cl_store_layer *from = &store->layers[slot->layer];
    if (!store->io) return;
    slot->loading = 1;
    slot->read.data = slot->data;
    slot->read.verified = from->verified + (uint64_t)slot->expert * from->extents_per_record;
    slot->read.layer = from->layer;
    slot->read.expert = slot->expert;
    cl_io_submit(store->io, &slot->read, from->extents + (uint64_t)slot->expert * from->extents_per_record,
                 from->extents_per_record, priority);
}

cl_slot *cl_store_acquire(cl_store *store, uint32_t layer, uint32_t expert, cl_purpose purpose, int *loaded) {
    *loaded = 0;
    cl_store_settle(store);
    if (is_decode(purpose)) cl_cache_open_layer(store, layer);
    cl_slot *slot = find(store, layer, expert);
    if (!slot) {
        slot = choose(store, layer, expert, purpose);
        if (!slot) return NULL;
        cl_store_put(store, slot, layer, expert);
        start_read(store, slot, priority_of(purpose));
        slot->fresh = purpose == CL_FOR_PREFILL || purpose == CL_FOR_PREFILL_NOW;
        slot->is_expected = purpose == CL_FOR_LOOKAHEAD;
        *loaded = 1;
    } else if (slot->loading && store->io && (is_decode(purpose) || purpose == CL_FOR_PREFILL_NOW)) {
        cl_io_promote(store->io, &slot->read);
    }
    pin(store, slot);
    if (is_decode(purpose) && !cl_store_in_cache(store, slot)) slot->for_decode = 1;
    cl_record_acquire(store, slot, purpose, *loaded);
    return slot;
}

void cl_store_release(cl_store *store, cl_slot *slot) {
    cl_slot_state state = cl_store_state(slot);
    cl_record_release(store, slot, state);
    if (--slot->pins) return;
    slot->for_decode = 0;
    if (cl_store_in_cache(store, slot)) {
        store->cache_pinned--;
        store->layers[slot->layer].is_stale = 1;
    }
    if (state == CL_SLOT_FAILED) cl_store_forget(store, slot);
    else if (state == CL_SLOT_LOADING && !slot->is_abandoned) abandon(store, slot);
}

void cl_store_prefill_use(cl_store *store, cl_slot *slot, int loaded) {
    slot->fresh = 0;
    cl_record_prefill_use(store, slot, loaded);
}
