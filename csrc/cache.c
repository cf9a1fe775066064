/* cache.c - which experts stay in memory: those that are most likely to be wanted when their layer's turn comes again.
 *
 * Owns the value of every expert, an estimate of that probability. A token sweeps the layers in order, so the least
 * recently used record is exactly the one whose turn comes next, and LRU finds nothing at small budgets; plain counts
 * forget too slowly when the text changes. Here every expert has averages of its past, over half-lives from one turn to
 * hundreds, and a linear fit, renewed as decoding goes on, says how much each of them foretells in this model
 * and this text. As the router's choice is known for absent experts too, the fit learns from all of them.
 *
 * The victim is the record with the least value minus price x time until its turn, where price is the value that
 * evicted records had of late: of two equally likely records the one whose turn is near is worth more, because its slot
 * is free again sooner. A missed record that would be worth less than the victim is read into the ring beside the
 * cache, in the place of what is worth least there; so between prompts, which need the ring, cache and ring together
 * hold the best of all.
 *
 * Only decoding counts: a prompt touches everything once and says little about what comes next. Refuses to look at
 * clocks or at the order in which drives answer: the same uses give the same evictions, so that a recorded trace can be
 * replayed exactly. Placement only ever decides speed, never a result. docs/caching.md has the evidence.
 */
#include "cache_fit.h"
#include "store.h"
#include "trace.h"
#include <math.h>
#include <string.h>

#define ENOUGH_READS 8  /* of records, that keep the drives busy while another one waits for its turn */
#define PRICE_RATE 0.01 /* how fast the price follows the values of the evicted */

void cl_cache_place(cl_store_layer *layer, cl_carve *carve, uint32_t experts) {
    layer->heats = cl_carve_take(carve, experts, sizeof *layer->heats, 64);
    layer->value = cl_carve_take(carve, experts, sizeof *layer->value, 64);
    layer->wanted = cl_carve_take(carve, experts, sizeof *layer->wanted, 64);
}

void cl_cache_init(cl_store *store, double heat_half_life) {
    const double half_lives[CL_HEATS] = CL_HALF_LIVES;
    cl_cache *cache = &store->cache;
    uint64_t records = 0;
    for (uint32_t i = 0; i < CL_HEATS; i++) cache->decay[i] = exp2(-1 / half_lives[i]);
    if (heat_half_life > 0) cache->decay[CL_LONG_HEAT] = cache->decay[CL_LEARNED_HEAT] = exp2(-1 / heat_half_life);
    for (uint32_t l = 0; l < store->n_layers; l++) records += store->layers[l].experts;
    cl_fit_init(cache, records);
    cache->open_layer = cache->layer_at = -1;
    for (uint32_t l = 0; l < store->n_layers; l++) {
        store->layers[l].coldest = -1;
        store->layers[l].is_stale = 1;
    }
}

/* ---- values ---- */

static double value_of(const cl_cache *cache, const float *heats) {
    double value = cache->weights[CL_HEATS];
    for (uint32_t i = 0; i < CL_HEATS; i++) value += cache->weights[i] * heats[i];
    return value;
}

/* What being wanted once adds to the value. */
static double bonus(const cl_cache *cache) {
    double sum = 0;
    for (uint32_t i = 0; i <= CL_LONG_HEAT; i++) sum += cache->weights[i] * (1 - cache->decay[i]);
    return sum;
}

/* The part of a sweep that passes before the layer's turn comes again: just above 0 for the next, 1 for this one. */
static double time_left(const cl_store *store, uint32_t layer) {
    int64_t ahead = (int64_t)layer - store->cache.layer_at;
    return (double)(ahead > 0 ? ahead : ahead + store->n_layers) / store->n_layers;
}

static double worth(const cl_store *store, uint32_t layer, double value) {
    return value - store->cache.price * time_left(store, layer);
}

/* A record of this value makes room for another. */
static void pay(cl_cache *cache, double value) {
    cache->price += PRICE_RATE * ((value > 0 ? value : 0) - cache->price);
}

static float *value_at(const cl_store *store, const cl_slot *slot) {
    return &store->layers[slot->layer].value[slot->expert];
}

static double worth_in(const cl_store *store, const cl_slot *slot) {
    return worth(store, (uint32_t)slot->layer, *value_at(store, slot));
}

/* ---- the turn of a layer ---- */

/* The heats fade; whoever is wanted gets the missing part when it is touched and when the turn ends. */
static void fade(const cl_cache *cache, cl_store_layer *layer) {
    for (uint32_t e = 0; e < layer->experts; e++) {
        for (uint32_t i = 0; i < CL_HEATS; i++) layer->heats[e][i] *= (float)cache->decay[i];
        layer->value[e] = (float)value_of(cache, layer->heats[e]);
    }
    memset(layer->wanted, 0, layer->experts);
}

static void note_place(cl_store *store, const cl_slot *slot) {
    if (slot->layer < 0) return;
    store->layers[slot->layer].slot_of[slot->expert] = (int32_t)(slot - store->slots);
    store->layers[slot->layer].is_stale = 1;
}

/* The slots exchange their records, without a copy: nobody holds them and nothing is being read into them. */
static void exchange(cl_store *store, cl_slot *a, cl_slot *b) {
    cl_slot was = *a;
    a->data = b->data;
    a->layer = b->layer;
    a->expert = b->expert;
    a->is_expected = b->is_expected;
    a->last_use = b->last_use;
    b->data = was.data;
    b->layer = was.layer;
    b->expert = was.expert;
    b->is_expected = was.is_expected;
    b->last_use = was.last_use;
    note_place(store, a);
    note_place(store, b);
}

/* A record in the ring that was wanted and is now worth more than the least valued of the cache takes its place, and
 * that one stays in the ring until something better is read there. Done when the turn ends, when nobody holds a slot of
 * the layer any more, so that it does not depend on the order in which reads were completed. */
static void move_up(cl_store *store, cl_slot *slot) {
    cl_slot *to = cl_store_empty_slot(store);
    if (to) {
        store->cache_empty--;
    } else {
        to = cl_cache_victim(store);
        if (!to || worth_in(store, to) >= worth_in(store, slot)) return;
        pay(&store->cache, *value_at(store, to));
        cl_count(&store->counters->expert_evictions, 1); /* from the cache; while the ring keeps it, a use is a hit */
    }
    exchange(store, to, slot);
}

static void close_layer(cl_store *store) {
    cl_cache *cache = &store->cache;
    if (cache->open_layer < 0) return;
    cl_store_layer *layer = &store->layers[cache->open_layer];
    if ((cache->step + (uint64_t)cache->open_layer) % cache->learn_every == 0) cl_fit_learn(cache, layer);
    for (uint32_t e = 0; e < layer->experts; e++)
        if (layer->wanted[e])
            for (uint32_t i = 0; i <= CL_LONG_HEAT; i++) layer->heats[e][i] += (float)(1 - cache->decay[i]);
    layer->turns++;
    layer->is_stale = 1;
    for (uint64_t i = store->cache_slots; i < store->cache_slots + store->ring_slots; i++) {
        cl_slot *slot = &store->slots[i];
        slot->for_decode = 0;
        if (slot->layer == cache->open_layer) slot->is_expected = 0;
        if (slot->layer == cache->open_layer && layer->wanted[slot->expert] && slot->pins == 0 && !slot->loading)
            move_up(store, slot);
    }
    cache->open_layer = -1;
}

void cl_cache_open_layer(cl_store *store, uint32_t layer) {
    cl_cache *cache = &store->cache;
    if (cache->open_layer == (int32_t)layer) return;
    close_layer(store);
    cache->open_layer = cache->layer_at = (int32_t)layer;
    fade(cache, &store->layers[layer]);
    store->layers[layer].is_stale = 1;
}

void cl_cache_touch(cl_store *store, uint32_t layer, uint32_t expert, uint32_t uses) {
    cl_store_layer *at = &store->layers[layer];
    cl_cache_open_layer(store, layer);
    cl_record_uses(store, uses);
    if (at->wanted[expert]) return;
    at->wanted[expert] = 1;
    at->value[expert] += (float)bonus(&store->cache);
}

void cl_cache_tick(cl_store *store) {
    close_layer(store);
    cl_record_tick(store);
    store->cache.step++;
    cl_fit_solve(&store->cache);
}

/* ---- victims ---- */

static int is_worth_less(const cl_store *store, const cl_slot *a, const cl_slot *b) {
    float value_a = *value_at(store, a), value_b = *value_at(store, b);
    return value_a != value_b ? value_a < value_b : a->last_use < b->last_use;
}

static void find_coldest(cl_store *store, cl_store_layer *layer) {
    cl_slot *coldest = NULL;
    layer->is_stale = 0;
    for (uint32_t e = 0; e < layer->experts; e++) {
        int32_t at = layer->slot_of[e];
        if (at < 0 || (uint64_t)at >= store->cache_slots) continue;
        cl_slot *slot = &store->slots[at];
        if (slot->pins == 0 && !slot->loading && (!coldest || is_worth_less(store, slot, coldest))) coldest = slot;
    }
    layer->coldest = coldest ? (int32_t)(coldest - store->slots) : -1;
}

/* Within a layer the order of the records only changes in its turn, so each layer remembers its coldest. */
cl_slot *cl_cache_victim(cl_store *store) {
    cl_slot *victim = NULL;
    double least = 0;
    for (uint32_t l = 0; l < store->n_layers; l++) {
        cl_store_layer *layer = &store->layers[l];
        if (layer->is_stale) find_coldest(store, layer);
        if (layer->coldest < 0) continue;
        cl_slot *slot = &store->slots[layer->coldest];
        double its = worth(store, l, layer->value[slot->expert]);
        if (!victim || its < least || (its == least && slot->last_use < victim->last_use)) {
            victim = slot;
            least = its;
        }
    }
    return victim;
}

static uint32_t held_by_decode(const cl_store *store) {
    uint32_t n = 0;
    for (uint64_t i = store->cache_slots; i < store->cache_slots + store->ring_slots; i++)
        n += store->slots[i].for_decode;
    return n;
}

/* Expected ones last: their turn is yet to come. Then by worth, so that what the ring keeps is the best of it. */
static int goes_before(const cl_store *store, const cl_slot *a, const cl_slot *b) {
    if (a->is_expected != b->is_expected) return b->is_expected;
    double x = worth_in(store, a), y = worth_in(store, b);
    return x != y ? x < y : a->last_use < b->last_use;
}

cl_slot *cl_cache_ring_slot(cl_store *store) {
    cl_slot *least = NULL;
    for (uint64_t i = store->cache_slots; i < store->cache_slots + store->ring_slots; i++) {
        cl_slot *slot = &store->slots[i];
        if (slot->layer < 0) return slot;
        if (slot->pins == 0 && !slot->loading && (!least || goes_before(store, slot, least))) least = slot;
    }
    return least;
}

cl_slot *cl_cache_choose(cl_store *store, uint32_t layer, uint32_t expert, int may_wait) {
    cl_cache *cache = &store->cache;
    const cl_store_layer *at = &store->layers[layer];
    cl_slot *victim = cl_cache_victim(store), *beside = cl_cache_ring_slot(store);
    if (!victim || (beside && beside->layer < 0)) return beside;
    double least = worth_in(store, victim);
    double mine = worth(store, layer, at->value[expert] + (at->wanted[expert] ? 0 : bonus(cache)));
    if (beside && (mine < least || (!beside->is_expected && worth_in(store, beside) < least))) return beside;
    uint32_t enough = store->ring_slots < ENOUGH_READS ? (uint32_t)store->ring_slots : ENOUGH_READS;
    if (may_wait && mine < least && enough && held_by_decode(store) >= enough) return NULL;
    pay(cache, *value_at(store, victim));
    return victim;
}

int cl_cache_is_colder(const cl_store *store, const cl_slot *slot, uint32_t layer, uint32_t expert) {
    return worth(store, (uint32_t)slot->layer, *value_at(store, slot)) <
           worth(store, layer, store->layers[layer].value[expert]);
}

/* ---- heat that outlives the process ---- */

/* Turns so long ago that the averages are no longer short of what preceded them. */
#define MANY_TURNS (1ull << 40)

void cl_cache_set_heats(cl_store *store, const float *heat) {
    close_layer(store);
    for (uint32_t l = 0; l < store->n_layers; l++) {
        cl_store_layer *layer = &store->layers[l];
        for (uint32_t e = 0; e < layer->experts; e++, heat++) {
            memset(layer->heats[e], 0, sizeof layer->heats[e]);
            layer->heats[e][CL_LEARNED_HEAT] = *heat;
            layer->value[e] = (float)value_of(&store->cache, layer->heats[e]);
        }
        layer->turns = MANY_TURNS;
        layer->is_stale = 1;
    }
}

/* The averages began at 0; what they lack after few turns is made up for. */
void cl_cache_get_heats(const cl_store *store, float *heat) {
    for (uint32_t l = 0; l < store->n_layers; l++) {
        const cl_store_layer *layer = &store->layers[l];
        double seen = 1 - pow(store->cache.decay[CL_LONG_HEAT], (double)layer->turns);
        for (uint32_t e = 0; e < layer->experts; e++, heat++) {
            double sum = (double)layer->heats[e][CL_LONG_HEAT] + layer->heats[e][CL_LEARNED_HEAT];
            double full = layer->turns ? sum / seen : 0;
            *heat = (float)(full < 1 ? full : 1);
        }
    }
}
