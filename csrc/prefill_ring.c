/* prefill_ring.c - which experts a pass of a prompt has read, and holds, ahead of the one it computes.
 *
 * Owns the slots that a cursor keeps pinned, also while it is suspended: the one of the expert at hand, and a queue of
 * reads ahead in the order in which they will be wanted. Experts are read in ascending id; when the last of a layer
 * have been asked for, those of the next MoE layer follow, so that the drives work while combine, attention and router
 * run: that layer's router has not chosen yet, but a pass of many tokens wants nearly all of them. Refuses to evict
 * what decoding keeps (CL_FOR_PREFILL), and to leave another cursor without a slot of the ring: a cursor that cannot
 * get one could neither go on nor keep what it has read.
 */
#include "prefill.h"

/* A layer is read before its router has chosen if a pass of this many tokens is expected to want at least this part of
 * its experts: what is read in vain delays the first of the right ones by less than one read on average. */
#define LEAST_EXPECTED_SHARE 0.5

static const cl_layer *layer_at(const cl_prefill *p, uint32_t layer) { return &p->model->layers[layer]; }

static uint32_t next_moe(const cl_prefill *p, uint32_t layer) {
    while (layer < p->model->spec.n_layers && layer_at(p, layer)->spec.ffn != CL_FFN_MOE) layer++;
    return layer;
}

void cl_prefill_ring_begin(cl_prefill *p) {
    p->routed = -1;
    p->read_layer = next_moe(p, 0);
    p->next_read = p->held_first = p->n_held = 0;
    p->slot = NULL;
}

static cl_held *held_at(const cl_prefill *p, uint32_t i) {
    return &p->held[(p->held_first + i) % (uint32_t)p->model->store.ring_slots];
}

static uint32_t slots_of(const cl_prefill *p) { return p->n_held + (p->slot != NULL); }

/* Slots that the cursors hold, and how many of the ring must stay free for those that hold none, `p` and cursors that
 * may still come included. */
static uint64_t taken_or_promised(const cl_prefill *p) {
    const cl_model *m = p->model;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->max_prefills; i++) {
        const cl_prefill *q = &m->prefills[i];
        uint32_t slots = q->taken && q->seq ? slots_of(q) : 0;
        sum += q == p ? slots + (q->slot == NULL) : slots ? slots : 1;
    }
    return sum;
}

static uint64_t taken(const cl_model *m) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < m->max_prefills; i++)
        if (m->prefills[i].taken && m->prefills[i].seq) sum += slots_of(&m->prefills[i]);
    return sum;
}

/* ---- counting ---- */

static void count_use(cl_prefill *p, cl_slot *slot, int loaded) {
    cl_model *m = p->model;
    if (loaded) {
        p->counts.expert_loads++;
        p->counts.expert_bytes += m->store.layers[slot->layer].record_bytes;
    } else {
        p->counts.expert_hits++;
    }
    cl_count(loaded ? &m->counters.expert_loads : &m->counters.expert_hits, 1);
    cl_store_prefill_use(&m->store, slot, loaded);
}

/* Read, and then not wanted. */
static void count_waste(cl_prefill *p, const cl_held *held) {
    if (held->loaded && !held->counted)
        cl_count(&p->model->counters.prefill_wasted_bytes, p->model->store.layers[held->slot->layer].record_bytes);
}

/* ---- reading ahead ---- */

static uint32_t wanted_by(const cl_prefill *p, uint32_t expert) { return p->first[expert + 1] - p->first[expert]; }

/* Whether the layer that is next in the order of reading may be read: its router has chosen, or it is the next one and
 * the pass is long enough. */
static int is_worth_reading(const cl_prefill *p) {
    const cl_layer_spec *s = &layer_at(p, p->read_layer)->spec;
    if ((int64_t)p->read_layer == p->routed) return 1;
    if (p->model->lookahead.mode == CL_SWITCH_OFF || p->read_layer != next_moe(p, (uint32_t)(p->routed + 1))) return 0;
    double left_out = 1; /* the part of the experts that no token wants, if all are equally likely */
    for (uint32_t i = 0; i < p->n && left_out > 1 - LEAST_EXPECTED_SHARE; i++)
        left_out *= 1 - (double)s->top_k / s->experts;
    return left_out <= 1 - LEAST_EXPECTED_SHARE;
}

/* The next expert to be read, in p->read_layer and p->next_read; 0 if there is none yet. */
static int find_next_read(cl_prefill *p) {
    while (p->read_layer < p->model->spec.n_layers && is_worth_reading(p)) {
        const cl_layer *layer = layer_at(p, p->read_layer);
        int is_routed = (int64_t)p->read_layer == p->routed;
        if (is_routed && p->next_read < p->expert) p->next_read = p->expert;
        for (; p->next_read < layer->spec.experts; p->next_read++)
            if ((!is_routed || wanted_by(p, p->next_read)) &&
                !cl_store_resident(&p->model->store, (uint32_t)layer->store_layer, p->next_read))
                return 1;
        p->read_layer = next_moe(p, p->read_layer + 1);
        p->next_read = 0;
    }
    return 0;
}

void cl_prefill_read_ahead(cl_prefill *p) {
    cl_store *store = &p->model->store;
    while (taken_or_promised(p) < store->ring_slots && find_next_read(p)) {
        int loaded;
        uint32_t layer = (uint32_t)layer_at(p, p->read_layer)->store_layer;
        cl_slot *slot = cl_store_acquire(store, layer, p->next_read, CL_FOR_PREFILL, &loaded);
        if (!slot) return;
        int is_routed = (int64_t)p->read_layer == p->routed;
        if (is_routed) count_use(p, slot, loaded);
        *held_at(p, p->n_held++) = (cl_held){slot, (uint32_t)loaded, (uint32_t)is_routed};
        p->next_read++;
    }
}

void cl_prefill_routed(cl_prefill *p) {
    uint32_t kept = 0;
    p->routed = p->layer;
    for (uint32_t i = 0; i < p->n_held; i++) { /* all of this layer: the one before is done */
        cl_held held = *held_at(p, i);
        if (wanted_by(p, held.slot->expert)) {
            count_use(p, held.slot, (int)held.loaded);
            held.counted = 1;
            *held_at(p, kept++) = held;
        } else {
            count_waste(p, &held);
            cl_store_release(&p->model->store, held.slot);
        }
    }
    p->n_held = kept;
}

/* ---- the expert at hand ---- */

int cl_prefill_take_slot(cl_prefill *p) {
    cl_store *store = &p->model->store;
    int32_t layer = layer_at(p, p->layer)->store_layer;
    if (!p->slot) cl_prefill_read_ahead(p);
    if (!p->slot && p->n_held && held_at(p, 0)->slot->layer == layer && held_at(p, 0)->slot->expert == p->expert) {
        p->slot = held_at(p, 0)->slot;
        p->held_first = (p->held_first + 1) % (uint32_t)store->ring_slots;
        p->n_held--;
    } else if (!p->slot) {
        int loaded, is_there = cl_store_resident(store, (uint32_t)layer, p->expert); /* or idly on its way: hurry it */
        cl_purpose purpose =
            is_there || taken(p->model) >= store->ring_slots ? CL_FOR_PREFILL_NOW : CL_FOR_PREFILL;
        p->slot = cl_store_acquire(store, (uint32_t)layer, p->expert, purpose, &loaded);
        if (p->slot) count_use(p, p->slot, loaded);
    }
    cl_prefill_read_ahead(p);
    return p->slot != NULL;
}

int cl_prefill_may_pause(const cl_prefill *p) {
    const cl_store *store = &p->model->store;
    int in_ring = p->slot && (uint64_t)(p->slot - store->slots) >= store->cache_slots;
    return !p->slot || in_ring || store->cache_pinned < store->cache_slots;
}

void cl_prefill_drop_slot(cl_prefill *p) {
    if (p->slot) cl_store_release(&p->model->store, p->slot);
    p->slot = NULL;
}

void cl_prefill_ring_end(cl_prefill *p) {
    cl_prefill_drop_slot(p);
    for (; p->n_held; p->n_held--) {
        count_waste(p, held_at(p, 0));
        cl_store_release(&p->model->store, held_at(p, 0)->slot);
        p->held_first = (p->held_first + 1) % (uint32_t)p->model->store.ring_slots;
    }
}
