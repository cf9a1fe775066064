/* lookahead.c - reads experts of the next layer before its router has chosen them, in time that drives would be idle.
 *
 * Owns the guess and its price. While the reads of a MoE layer are under way its shared expert is known already; the
 * residual stream with that added, normed for the next MoE layer and sent through the next router, says which experts
 * will probably be wanted there. Absent ones are read with the lowest priority: a drive takes them up only when it has
 * nothing else to do, and the store gives them no place of a record that is worth more. When the layer's turn comes, a
 * right guess is found in memory or under way, and its read is then urgent. A guess never changes a result: what is not
 * there is read as ever.
 *
 * Refuses to run where it does not pay: with AUTO, decode steps with and without it are compared (trial.h), its own
 * arithmetic included; where all experts of the next layer are in memory it does nothing.
 */
#include "clock.h"
#include "model.h"
#include <string.h>

#define LEAST_FLYING 2 /* reads asked for at once: one under way, one to follow it */
#define STALL_RATE 0.1 /* how fast the average stall follows that of the last step */

/* An expert that the next MoE layer will probably want. */
typedef struct cl_guess {
    uint32_t expert;
    uint32_t loaded; /* its read was started here */
    float score;     /* sum of its weights over the rows */
    cl_slot *slot;
    uint64_t asked_us;
} cl_guess;

static void show_position(cl_model *m) {
    const cl_lookahead *la = &m->lookahead;
    int by_trial = la->mode == CL_SWITCH_AUTO;
    atomic_store(&m->counters.lookahead_active, la->mode == CL_SWITCH_ON || (by_trial && la->trial.verdict));
    atomic_store(&m->counters.lookahead_trying, by_trial && !la->trial.resting);
}

void cl_lookahead_place(cl_model *m, cl_carve *c) {
    cl_lookahead *la = &m->lookahead;
    uint64_t rows = m->max_rows, pairs = rows * m->most_top_k;
    la->x = cl_carve_take(c, rows * m->spec.hidden_size, sizeof *la->x, 64);
    la->ids = cl_carve_take(c, pairs, sizeof *la->ids, 64);
    la->weights = cl_carve_take(c, pairs, sizeof *la->weights, 64);
    la->bad = cl_carve_take(c, rows, sizeof *la->bad, 64);
    la->scores = cl_carve_take(c, m->most_experts, sizeof *la->scores, 64);
    la->guesses = cl_carve_take(c, m->most_experts, sizeof(cl_guess), 64);
    la->layer = -1;
    show_position(m);
}

static uint64_t record_bytes(const cl_model *m, uint32_t layer) {
    return m->store.layers[m->layers[layer].store_layer].record_bytes;
}

/* The MoE layer after `layer`, if it has experts that are not in memory; else -1. */
static int32_t layer_to_guess(const cl_model *m, uint32_t layer) {
    do layer++;
    while (layer < m->spec.n_layers && m->layers[layer].spec.ffn != CL_FFN_MOE);
    if (layer == m->spec.n_layers) return -1;
    const cl_store_layer *experts = &m->store.layers[m->layers[layer].store_layer];
    for (uint32_t e = 0; e < experts->experts; e++)
        if (experts->slot_of[e] < 0) return (int32_t)layer;
    return -1;
}

/* ---- the guess ---- */

/* ids and weights of the next layer for the state as it is known. */
static void route(cl_model *m, uint32_t layer, uint32_t next, const float *h, uint64_t n) {
    cl_lookahead *la = &m->lookahead;
    uint64_t hidden = m->spec.hidden_size;
    memcpy(la->x, h, n * hidden * sizeof *h);
    if (m->layers[layer].spec.shared_intermediate_size)
        for (uint64_t i = 0; i < n; i++)
            m->kernels->axpy(m->spec.residual_scale * m->work.output_gate[i], m->work.shared + i * hidden, hidden,
                             la->x + i * hidden);
    cl_norm_rows(m, &m->layers[next].weights[CL_ROLE_FFN_NORM], la->x, n, la->x);
    cl_inputs_begin(&la->input, la->x, hidden, n, hidden);
    cl_experts_route(m, next, &la->input, n, la->ids, la->weights, la->bad);
}

/* Distinct experts, those that most is expected of first. */
static void list_guesses(cl_model *m, uint32_t next, uint64_t n, const uint8_t *dead) {
    cl_lookahead *la = &m->lookahead;
    const cl_layer_spec *s = &m->layers[next].spec;
    memset(la->scores, 0, s->experts * sizeof *la->scores);
    for (uint64_t i = 0; i < n; i++)
        for (uint64_t j = 0; j < s->top_k && !dead[i] && !la->bad[i]; j++)
            la->scores[la->ids[i * s->top_k + j]] += la->weights[i * s->top_k + j];
    for (uint32_t e = 0; e < s->experts; e++) {
        if (!(la->scores[e] > 0)) continue;
        uint32_t at = la->n_guesses++;
        for (; at > 0 && la->guesses[at - 1].score < la->scores[e]; at--) la->guesses[at] = la->guesses[at - 1];
        la->guesses[at] = (cl_guess){e, 0, la->scores[e], NULL, 0};
    }
}

void cl_lookahead_guess(cl_model *m, uint32_t layer, const float *h, uint64_t n, const uint8_t *dead) {
    cl_lookahead *la = &m->lookahead;
    if (!la->on) return;
    int32_t next = layer_to_guess(m, layer);
    if (next < 0) return;
    uint64_t start = cl_now_us();
    la->layer = next;
    la->n_guesses = la->next = 0;
    route(m, layer, (uint32_t)next, h, n);
    list_guesses(m, (uint32_t)next, n, dead);
    cl_count(&m->counters.lookahead_us, cl_now_us() - start);
}

/* ---- its reads ---- */

/* Looks at the read itself: noticing its end is the store's. */
static int is_flying(const cl_model *m, uint32_t layer, const cl_guess *guess) {
    const cl_slot *slot = guess->slot;
    return guess->loaded && slot->layer == m->layers[layer].store_layer && slot->expert == guess->expert &&
           atomic_load(&((cl_slot *)slot)->read.pending);
}

static uint32_t count_flying(const cl_model *m) {
    const cl_lookahead *la = &m->lookahead;
    uint32_t flying = 0;
    for (uint32_t i = 0; i < la->next; i++) flying += (uint32_t)is_flying(m, (uint32_t)la->layer, &la->guesses[i]);
    return flying;
}

void cl_lookahead_read(cl_model *m) {
    cl_lookahead *la = &m->lookahead;
    if (la->layer < 0 || la->next == la->n_guesses) return;
    uint32_t layer = (uint32_t)m->layers[la->layer].store_layer;
    uint32_t most = m->store.layers[layer].extents_per_record > 1 ? LEAST_FLYING : LEAST_FLYING * la->stripes;
    for (uint32_t flying = count_flying(m); la->next < la->n_guesses && flying < most; la->next++) {
        cl_guess *guess = &la->guesses[la->next];
        int loaded;
        if (cl_store_resident(&m->store, layer, guess->expert)) continue;
        cl_slot *slot = cl_store_acquire(&m->store, layer, guess->expert, CL_FOR_LOOKAHEAD, &loaded);
        if (!slot) continue; /* nothing is worth less */
        *guess = (cl_guess){guess->expert, (uint32_t)loaded, guess->score, slot, cl_now_us()};
        cl_store_release(&m->store, slot);
        flying += guess->loaded;
        cl_count(&m->counters.lookahead_loads, guess->loaded);
        cl_count(&m->counters.lookahead_bytes, guess->loaded * record_bytes(m, (uint32_t)la->layer));
    }
}

/* ---- what came of it ---- */

static void judge(cl_model *m, const cl_guess *guess, int is_right) {
    cl_lookahead *la = &m->lookahead;
    cl_counters *c = &m->counters;
    cl_count(&c->lookahead_predicted, 1);
    cl_count(&c->lookahead_right, (uint64_t)is_right);
    if (!guess->loaded) return;
    if (!is_right) {
        cl_count(&c->lookahead_wasted_bytes, record_bytes(m, (uint32_t)la->layer));
        return;
    }
    la->reads_saved++;
    uint64_t ahead = cl_now_us() - guess->asked_us, stall = (uint64_t)la->stall_us;
    cl_count(&c->lookahead_late, (uint64_t)is_flying(m, (uint32_t)la->layer, guess));
    cl_count(&c->lookahead_saved_us, ahead < stall ? ahead : stall);
}

/* first: NULL if the layer's turn did not come. */
static void judge_all(cl_model *m, const uint32_t *first) {
    cl_lookahead *la = &m->lookahead;
    for (uint32_t i = 0; la->layer >= 0 && i < la->n_guesses; i++) {
        uint32_t e = la->guesses[i].expert;
        judge(m, &la->guesses[i], first && first[e + 1] > first[e]);
    }
    la->layer = -1;
    la->n_guesses = la->next = 0;
}

void cl_lookahead_routed(cl_model *m, uint32_t layer, const uint32_t *first) {
    if (m->lookahead.layer == (int32_t)layer) judge_all(m, first);
}

/* ---- the step ---- */

void cl_lookahead_begin(cl_model *m) {
    cl_lookahead *la = &m->lookahead;
    la->on = la->mode == CL_SWITCH_ON || (la->mode == CL_SWITCH_AUTO && cl_trial_position(&la->trial));
    la->reads_saved = 0;
    la->start_us = cl_now_us();
    la->start_wait_us = atomic_load(&m->counters.wait_us);
    la->start_loads = atomic_load(&m->counters.expert_loads);
}

void cl_lookahead_end(cl_model *m, uint64_t rows) {
    cl_lookahead *la = &m->lookahead;
    judge_all(m, NULL);
    uint64_t loads = atomic_load(&m->counters.expert_loads) - la->start_loads;
    uint64_t wait = atomic_load(&m->counters.wait_us) - la->start_wait_us;
    if (loads) la->stall_us += STALL_RATE * ((double)wait / (double)loads - la->stall_us);
    if (la->mode == CL_SWITCH_AUTO && loads + la->reads_saved && rows)
        cl_trial_add(&la->trial, (double)(cl_now_us() - la->start_us) / (double)rows);
    show_position(m);
}
