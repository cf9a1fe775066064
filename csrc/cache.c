/* cache.c - which experts stay in memory: how often they were used of late.
 *
 * Owns the value of every expert (heat). A token sweeps the layers in order, so least-recently-used finds nothing at
 * small budgets: by the time a layer comes round again, everything of it has been pushed out. Counted uses that fade
 * with a half-life do not suffer from that. Only decoding counts: a prompt touches everything once, reads through the
 * ring, and says little about what comes next. Placement only ever decides speed, never a result.
 */
#include "store.h"

#define FADE_PER_STEP 1.005 /* a use loses half its weight in 139 steps */
#define RESCALE_ABOVE 1e100

void cl_cache_touch(cl_store *store, uint32_t layer, uint32_t expert, uint32_t uses) {
    store->layers[layer].heat[expert] += store->heat_unit * uses;
}

/* Instead of shrinking every value each step, what a new use adds grows; only comparisons matter. */
void cl_cache_tick(cl_store *store) {
    store->heat_unit *= FADE_PER_STEP;
    if (store->heat_unit < RESCALE_ABOVE) return;
    for (uint32_t l = 0; l < store->n_layers; l++)
        for (uint32_t e = 0; e < store->layers[l].experts; e++) store->layers[l].heat[e] /= store->heat_unit;
    store->heat_unit = 1;
}

static int worth_less(const cl_store *store, const cl_slot *a, const cl_slot *b) {
    double heat_a = store->layers[a->layer].heat[a->expert], heat_b = store->layers[b->layer].heat[b->expert];
    return heat_a != heat_b ? heat_a < heat_b : a->last_use < b->last_use;
}

cl_slot *cl_cache_victim(cl_store *store) {
    cl_slot *victim = NULL;
    for (uint64_t i = 0; i < store->cache_slots; i++) {
        cl_slot *slot = &store->slots[i];
        if (slot->layer < 0) return slot;
        if (slot->pins || (slot->loading && cl_store_state(slot) == CL_SLOT_LOADING)) continue;
        if (!victim || worth_less(store, slot, victim)) victim = slot;
    }
    return victim;
}
