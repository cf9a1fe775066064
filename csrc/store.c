/* store.c - the one way to get an expert: resident, else read.
 *
 * Owns the slots (cache and read ring, in the arena) and knows which record lies in which. A slot is pinned while
 * anybody uses it and is never evicted then. Refuses to wait: acquire starts a read and returns; who needs the record
 * asks for its state and sleeps in cl_io_wait. All functions run on the step's thread; the I/O threads only see the
 * cl_read inside a slot, from submit until its pending count is 0.
 */
#include "store.h"
#include "format.h"
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
        placed.heat = cl_carve_take(carve, from->experts, sizeof *placed.heat, 64);
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
        layer->layer = from->layer;
        layer->experts = from->experts;
        layer->extents_per_record = from->extents_per_record;
        layer->record_bytes = from->record_bytes;
        memcpy(layer->extents, from->extents,
               (uint64_t)from->experts * from->extents_per_record * sizeof *layer->extents);
        for (uint32_t e = 0; e < layer->experts; e++) layer->slot_of[e] = -1;
    }
    for (uint64_t i = 0; i < store->cache_slots + store->ring_slots; i++) store->slots[i].layer = -1;
    store->cache_empty = store->cache_slots;
    store->heat_unit = 1;
}

static int in_cache(const cl_store *store, const cl_slot *slot) {
    return (uint64_t)(slot - store->slots) < store->cache_slots;
}

cl_slot_state cl_store_state(cl_slot *slot) {
    if (slot->loading) {
        if (atomic_load(&slot->read.pending)) return CL_SLOT_LOADING;
        slot->loading = 0;
    }
    return atomic_load(&slot->read.failed) ? CL_SLOT_FAILED : CL_SLOT_READY;
}

static void forget(cl_store *store, cl_slot *slot) {
    if (slot->layer < 0) return;
    store->layers[slot->layer].slot_of[slot->expert] = -1;
    slot->layer = -1;
    if (in_cache(store, slot)) store->cache_empty++;
}

static cl_slot *find(cl_store *store, uint32_t layer, uint32_t expert) {
    int32_t at = store->layers[layer].slot_of[expert];
    if (at < 0) return NULL;
    cl_slot *slot = &store->slots[at];
    if (slot->pins == 0 && cl_store_state(slot) == CL_SLOT_FAILED) { /* failed while nobody waited any more */
        forget(store, slot);
        return NULL;
    }
    return slot;
}

int cl_store_resident(cl_store *store, uint32_t layer, uint32_t expert) { return find(store, layer, expert) != NULL; }

static cl_slot *free_ring_slot(cl_store *store) {
    cl_slot *oldest = NULL;
    for (uint64_t i = store->cache_slots; i < store->cache_slots + store->ring_slots; i++) {
        cl_slot *slot = &store->slots[i];
        if (slot->layer < 0) return slot;
        if (slot->pins || cl_store_state(slot) == CL_SLOT_LOADING) continue;
        if (!oldest || slot->last_use < oldest->last_use) oldest = slot;
    }
    return oldest;
}

static cl_slot *choose(cl_store *store, cl_purpose purpose) {
    cl_slot *slot;
    if (purpose == CL_FOR_DECODE) {
        slot = cl_cache_victim(store);
        return slot ? slot : free_ring_slot(store);
    }
    if (store->cache_empty && store->cache_pinned + 2 <= store->cache_slots) return cl_cache_victim(store);
    slot = free_ring_slot(store);
    return slot || purpose == CL_FOR_PREFILL ? slot : cl_cache_victim(store);
}

static void pin(cl_store *store, cl_slot *slot) {
    if (slot->pins++ == 0 && in_cache(store, slot)) store->cache_pinned++;
    slot->last_use = ++store->clock;
}

static void start_read(cl_store *store, cl_slot *slot, uint32_t layer, uint32_t expert, cl_priority priority) {
    cl_store_layer *from = &store->layers[layer];
    if (slot->layer >= 0 && in_cache(store, slot)) cl_count(&store->counters->expert_evictions, 1);
    forget(store, slot);
    if (in_cache(store, slot)) store->cache_empty--;
    slot->layer = (int32_t)layer;
    slot->expert = expert;
    slot->loading = 1;
    from->slot_of[expert] = (int32_t)(slot - store->slots);
    slot->read.data = slot->data;
    slot->read.verified = from->verified + (uint64_t)expert * from->extents_per_record;
    slot->read.layer = from->layer;
    slot->read.expert = expert;
    cl_io_submit(store->io, &slot->read, from->extents + (uint64_t)expert * from->extents_per_record,
                 from->extents_per_record, priority);
}

cl_slot *cl_store_acquire(cl_store *store, uint32_t layer, uint32_t expert, cl_purpose purpose, int *loaded) {
    *loaded = 0;
    cl_slot *slot = find(store, layer, expert);
    if (!slot) {
        slot = choose(store, purpose);
        if (!slot) return NULL;
        start_read(store, slot, layer, expert, purpose == CL_FOR_PREFILL ? CL_READ_AHEAD : CL_READ_URGENT);
        *loaded = 1;
    }
    pin(store, slot);
    return slot;
}

void cl_store_release(cl_store *store, cl_slot *slot) {
    if (--slot->pins) return;
    if (in_cache(store, slot)) store->cache_pinned--;
    if (!slot->loading && cl_store_state(slot) == CL_SLOT_FAILED) forget(store, slot);
}
