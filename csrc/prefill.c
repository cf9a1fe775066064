/* prefill.c - a pass of a prompt through the layers, one layer after the other, one work item after the other.
 *
 * Owns the cursor: n x hidden floats and its place (layer, phase, expert, token), so that it can be suspended after
 * any work item and go on in a later step. A layer's experts are walked in ascending id, each read at most once for
 * the whole pass, because its slot stays pinned until all its tokens are done; prefill_ring.c has the reads ahead.
 * Refuses to change its sequence before the end: keys and values are written beyond the sequence's
 * length, which grows when the last item is done.
 */
#include "prefill.h"
#include "clock.h"
#include "error.h"
#include "grouping.h"
#include <string.h>

#define PATIENCE_US 2000      /* a call that has nothing else to do waits at least this long for a drive */
#define ATTENTION_WORK 524288 /* tokens x context of one attention item: 64 tokens at 8192 positions */
#define LEAST_ATTENTION_TILE 4

#define OUT_OF_TIME 1 /* not an error: the item waits for a drive and the budget is used up */

static const cl_layer *layer_of(const cl_prefill *p) { return &p->model->layers[p->layer]; }

static uint32_t tile_at(const cl_prefill *p, uint32_t most) {
    uint32_t left = p->n - p->at;
    return left < most ? left : most;
}

/* ---- creation ---- */

void cl_prefill_place(cl_model *m, cl_carve *carve, const cl_model_options *options) {
    uint64_t n = options->pass_tokens, hidden = m->spec.hidden_size, pairs = n * m->most_top_k;
    m->prefills = cl_carve_take(carve, options->max_prefills, sizeof *m->prefills, 64);
    for (uint32_t i = 0; i < options->max_prefills; i++) {
        cl_prefill p = {.model = m};
        p.tokens = cl_carve_take(carve, n, sizeof *p.tokens, 64);
        p.h = cl_carve_take(carve, n * hidden, sizeof *p.h, 64);
        p.sum = cl_carve_take(carve, n * hidden, sizeof *p.sum, 64);
        p.ids = cl_carve_take(carve, pairs, sizeof *p.ids, 64);
        p.weights = cl_carve_take(carve, pairs, sizeof *p.weights, 64);
        p.bad = cl_carve_take(carve, n, sizeof *p.bad, 64);
        p.first = cl_carve_take(carve, (uint64_t)m->most_experts + 1, sizeof *p.first, 64);
        p.order = cl_carve_take(carve, pairs, sizeof *p.order, 64);
        p.held = cl_carve_take(carve, options->ring_slots, sizeof *p.held, 64);
        if (m->prefills) m->prefills[i] = p;
    }
}

static cl_prefill *free_workspace(cl_model *m) {
    for (uint32_t i = 0; i < m->max_prefills; i++)
        if (!m->prefills[i].taken) return &m->prefills[i];
    return NULL;
}

static int check(const cl_model *m, const cl_seq *seq, const int32_t *tokens, uint32_t n, cl_error *err) {
    if (m->loaded != 1) return cl_fail(err, CL_INVALID, "the model is not loaded");
    if (seq->in_use) return cl_fail(err, CL_INVALID, "the sequence is already used by a prefill");
    if (n < 1 || n > m->pass_tokens)
        return cl_fail(err, CL_INVALID, "n is %u, a pass has 1..%u tokens", n, m->pass_tokens);
    for (uint32_t i = 0; i < n; i++)
        if (tokens[i] < 0 || (uint32_t)tokens[i] >= m->spec.vocab_size)
            return cl_fail(err, CL_INVALID, "token %u is %d, not in 0..%u", i, tokens[i], m->spec.vocab_size - 1);
    return CL_OK;
}

int cl_prefill_create(cl_prefill **out, cl_seq *seq, const int32_t *tokens, uint32_t n, const cl_sampling *sampling,
                      float *all_logits, cl_error *err) {
    *out = NULL;
    cl_ok(err);
    cl_model *m = seq->model;
    int code = check(m, seq, tokens, n, err);
    if (!code) code = cl_sampling_check(sampling, err);
    if (code) return code;
    cl_prefill *p = free_workspace(m);
    if (!p) return cl_fail(err, CL_FULL, "all %u prefill workspaces are taken", m->max_prefills);
    code = cl_seq_reserve(seq, seq->length + n, err);
    if (code) return code;
    p->taken = 1;
    p->seq = seq;
    p->n = n;
    memcpy(p->tokens, tokens, n * sizeof *tokens);
    p->sampling = *sampling;
    p->all_logits = all_logits;
    p->layer = p->at = p->expert = 0;
    cl_prefill_ring_begin(p);
    p->phase = CL_PHASE_ATTENTION;
    p->next_token = -1;
    p->counts = (cl_counts){0, 0, 0};
    cl_ok(&p->error);
    seq->in_use = 1;
    atomic_fetch_sub(&m->counters.prefills_free, 1);
    *out = p;
    return CL_OK;
}

/* The sequence is the caller's again. */
static void let_go(cl_prefill *p) {
    if (!p->seq) return;
    cl_prefill_ring_end(p);
    cl_seq_trim(p->seq);
    p->seq->in_use = 0;
    p->seq = NULL;
}

void cl_prefill_free(cl_prefill *p) {
    if (!p || !p->taken) return;
    let_go(p);
    p->taken = 0;
    atomic_fetch_add(&p->model->counters.prefills_free, 1);
}

/* ---- phases without experts ---- */

static void enter(cl_prefill *p, cl_phase phase) {
    p->phase = phase;
    p->at = 0;
}

static void next_layer(cl_prefill *p) {
    p->layer++;
    enter(p, p->layer < p->model->spec.n_layers ? CL_PHASE_ATTENTION : CL_PHASE_HEAD);
    if (p->phase == CL_PHASE_HEAD && !p->all_logits) p->at = p->n - 1;
}

/* A long context makes tiles smaller, so that an item stays short. */
static uint32_t attention_tile(const cl_prefill *p) {
    uint64_t context = p->seq->length + p->at + 1, most = ATTENTION_WORK / context;
    if (most > CL_TILE_TOKENS) most = CL_TILE_TOKENS;
    return tile_at(p, most < LEAST_ATTENTION_TILE ? LEAST_ATTENTION_TILE : (uint32_t)most);
}

static int attention_item(cl_prefill *p) {
    cl_model *m = p->model;
    uint32_t n = attention_tile(p);
    for (uint32_t i = 0; i < n; i++) {
        m->work.seqs[i] = p->seq;
        m->work.positions[i] = p->seq->length + p->at + i;
    }
    cl_batch batch = {n, p->h + (uint64_t)p->at * m->spec.hidden_size, m->work.seqs, m->work.positions};
    if (p->layer == 0) cl_embed(m, p->tokens + p->at, n, batch.h);
    cl_attention(m, p->layer, &batch);
    p->at += n;
    if (p->at == p->n) enter(p, layer_of(p)->spec.ffn == CL_FFN_MOE ? CL_PHASE_ROUTE : CL_PHASE_DENSE);
    return CL_OK;
}

static int dense_item(cl_prefill *p) {
    cl_model *m = p->model;
    uint32_t n = tile_at(p, CL_TILE_TOKENS);
    float *h = p->h + (uint64_t)p->at * m->spec.hidden_size;
    cl_ffn_begin(m, p->layer, h, n);
    cl_ffn_dense(m, p->layer, h, n);
    p->at += n;
    if (p->at == p->n) next_layer(p);
    return CL_OK;
}

static int route_item(cl_prefill *p) {
    cl_model *m = p->model;
    const cl_layer_spec *s = &layer_of(p)->spec;
    uint64_t hidden = m->spec.hidden_size, at = p->at;
    uint32_t n = tile_at(p, CL_TILE_TOKENS);
    cl_ffn_begin(m, p->layer, p->h + at * hidden, n);
    cl_experts_route(m, p->layer, &m->work.input, n, p->ids + at * s->top_k, p->weights + at * s->top_k, p->bad + at);
    for (uint32_t i = 0; i < n; i++)
        if (p->bad[at + i])
            return cl_fail(&p->error, CL_NONFINITE,
                           "layer %u: the router's logits at position %llu are not all finite", p->layer,
                           (unsigned long long)(p->seq->length + at + i));
    memset(p->sum + at * hidden, 0, n * hidden * sizeof *p->sum);
    p->at += n;
    if (p->at == p->n) {
        cl_group_by_expert(p->ids, p->n, s->top_k, s->experts, p->bad, p->first, p->order);
        enter(p, CL_PHASE_EXPERTS);
        p->expert = 0;
        cl_prefill_routed(p);
    }
    return CL_OK;
}

static int combine_item(cl_prefill *p) {
    cl_model *m = p->model;
    uint32_t n = tile_at(p, CL_TILE_TOKENS);
    uint64_t offset = (uint64_t)p->at * m->spec.hidden_size;
    if (layer_of(p)->spec.shared_intermediate_size) cl_ffn_begin(m, p->layer, p->h + offset, n);
    cl_ffn_shared(m, p->layer, n);
    cl_ffn_combine(m, p->layer, p->h + offset, p->sum + offset, n);
    p->at += n;
    if (p->at == p->n) next_layer(p);
    return CL_OK;
}

static int head_item(cl_prefill *p) {
    cl_model *m = p->model;
    uint64_t vocab = m->spec.vocab_size, position = p->seq->length + p->at;
    uint32_t n = tile_at(p, CL_TILE_TOKENS);
    float *logits = p->all_logits ? p->all_logits + p->at * vocab : m->work.logits;
    cl_head(m, p->h + (uint64_t)p->at * m->spec.hidden_size, n, logits);
    for (uint32_t i = 0; i < n; i++)
        if (!cl_all_finite(logits + i * vocab, vocab))
            return cl_fail(&p->error, CL_NONFINITE, "the logits after position %llu are not all finite",
                           (unsigned long long)(position + i));
    p->at += n;
    if (p->at < p->n) return CL_OK;
    int code = cl_choose(m, logits + (n - 1) * vocab, &p->sampling, position + n, &p->next_token, &p->error);
    if (code) return code;
    p->seq->length += p->n;
    cl_count(&m->counters.prefill_tokens, p->n);
    p->phase = CL_PHASE_DONE;
    let_go(p);
    return CL_OK;
}

/* ---- experts ---- */

static uint32_t wanted_by(const cl_prefill *p, uint32_t expert) { return p->first[expert + 1] - p->first[expert]; }

static int is_cancelled(cl_prefill *p) {
    if (!cl_seq_take_cancel(p->seq)) return 0;
    cl_fail(&p->error, CL_CANCELLED, "cancelled in layer %u of a prefill of %u tokens", p->layer, p->n);
    return 1;
}

/* CL_OK once p->slot is ready; OUT_OF_TIME, with whatever reads are under way still held, or an error. */
static int wait_for_expert(cl_prefill *p, uint64_t deadline_us) {
    for (;;) {
        uint32_t seen = cl_io_events(p->model->io);
        cl_slot_state state = cl_prefill_take_slot(p) ? cl_store_state(p->slot) : CL_SLOT_LOADING;
        if (state == CL_SLOT_READY) return CL_OK;
        if (state == CL_SLOT_FAILED) p->error = p->slot->read.error;
        if (p->error.code || is_cancelled(p)) return p->error.code;
        int may_pause = cl_prefill_may_pause(p);
        if (may_pause && cl_now_us() >= deadline_us) return OUT_OF_TIME;
        cl_wait_for_drive(p->model, seen, may_pause ? deadline_us : UINT64_MAX);
    }
}

/* Up to a tile of the tokens that want the expert: norm, expert, sum. The norm is done again for every expert: 0.2 to
 * 0.6 % of the expert's time (hidden sizes 6144 and 2048, 16 tokens), and it saves a copy of the whole pass. */
static void expert_tile(cl_prefill *p, uint32_t n) {
    cl_model *m = p->model;
    cl_work *work = &m->work;
    uint64_t hidden = m->spec.hidden_size, top_k = layer_of(p)->spec.top_k;
    const uint32_t *pairs = p->order + p->first[p->expert] + p->at;
    const cl_weight *norm = &layer_of(p)->weights[CL_ROLE_FFN_NORM];
    for (uint32_t i = 0; i < n; i++)
        memcpy(work->x + i * hidden, p->h + pairs[i] / top_k * hidden, hidden * sizeof *work->x);
    cl_norm_rows(m, norm, work->x, n, work->x);
    cl_inputs_begin(&work->input, work->x, hidden, n, hidden);
    cl_experts_begin(m, p->layer, n);
    cl_expert_job job = {p->slot->data, NULL, n, 0};
    cl_experts_run(m, p->layer, &job, 1);
    for (uint32_t i = 0; i < n; i++)
        m->kernels->axpy(p->weights[pairs[i]], work->pair_out + i * hidden, hidden,
                         p->sum + pairs[i] / top_k * hidden);
}

static void next_expert(cl_prefill *p) {
    p->at = 0;
    p->expert++;
    while (p->expert < layer_of(p)->spec.experts && !wanted_by(p, p->expert)) p->expert++;
    if (p->expert == layer_of(p)->spec.experts) enter(p, CL_PHASE_COMBINE);
}

/* One tile; more only where the cursor may not be suspended with the slot that it holds. */
static int expert_item(cl_prefill *p, uint64_t deadline_us) {
    uint32_t wanted = wanted_by(p, p->expert);
    int code = wanted ? wait_for_expert(p, deadline_us) : CL_OK; /* unwanted: only at the start of a layer */
    while (!code && p->at < wanted) {
        uint32_t left = wanted - p->at, n = left < CL_TILE_TOKENS ? left : CL_TILE_TOKENS;
        expert_tile(p, n);
        p->at += n;
        if (p->at == wanted) cl_prefill_drop_slot(p);
        else if (cl_prefill_may_pause(p)) return CL_OK;
        else if (is_cancelled(p)) code = p->error.code;
    }
    if (!code) next_expert(p);
    return code;
}

/* ---- the walk ---- */

static int item(cl_prefill *p, uint64_t deadline_us) {
    switch (p->phase) {
    case CL_PHASE_ATTENTION: return attention_item(p);
    case CL_PHASE_DENSE: return dense_item(p);
    case CL_PHASE_ROUTE: return route_item(p);
    case CL_PHASE_EXPERTS: return expert_item(p, deadline_us);
    case CL_PHASE_COMBINE: return combine_item(p);
    case CL_PHASE_HEAD: return head_item(p);
    case CL_PHASE_DONE: break;
    }
    return CL_OK;
}

void cl_prefill_report(cl_cursor *cursor) {
    const cl_prefill *p = cursor->prefill;
    cursor->done = p->phase == CL_PHASE_DONE;
    cursor->positions_done =
        cursor->done ? p->n : (uint32_t)((uint64_t)p->n * p->layer / (p->model->spec.n_layers + 1));
    cursor->next_token = p->next_token;
    cursor->counts = p->counts;
    cursor->error = p->error;
}

int cl_prefill_advance(cl_cursor *cursor, uint64_t deadline_us) {
    cl_prefill *p = cursor->prefill;
    int code = p->error.code, items = 0;
    while (!code && p->phase != CL_PHASE_DONE) {
        if (items && cl_now_us() >= deadline_us) break;
        if (is_cancelled(p)) {
            code = p->error.code;
            break;
        }
        cl_prefill_read_ahead(p);
        uint64_t patience = items ? 0 : cl_now_us() + PATIENCE_US;
        code = item(p, deadline_us > patience ? deadline_us : patience);
        items++;
    }
    if (code == OUT_OF_TIME) code = CL_OK;
    if (code) let_go(p);
    cl_prefill_report(cursor);
    return !cursor->done && !code;
}
