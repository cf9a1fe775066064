/* decode.c - one token of each of several sequences through the whole model.
 *
 * Owns the walk over the layers and the union of what the rows want: an expert is read at most once per layer, however
 * many rows want it. A layer begins with its reads: what is in memory is pinned, then all that is absent is asked for
 * in ascending id, before any arithmetic, so that which records are evicted depends on what was asked for and never on
 * the order in which drives answer. While reads are under way the shared expert is computed, then the experts in
 * memory, then the others as they arrive, each into its own place; the sums are made in ascending id. A row that fails
 * (read error, NaN, cancelled, no KV page) fails alone: from then on it wants no experts, and what is computed for it
 * is thrown away. Refuses to leave traces of it: its sequence keeps its length.
 */
#include "clock.h"
#include "error.h"
#include "grouping.h"
#include "model.h"
#include <string.h>

/* Weights x tokens of the experts that are computed together: far more than a fork-join costs, and little enough that
 * arrivals, cancels and free slots are noticed soon. */
#define ROUND_BYTES (4u << 20)

/* An expert of the layer at hand that at least one row wants. */
typedef struct cl_use {
    uint32_t expert;
    uint32_t first, n; /* its pairs in work.order */
    cl_slot *slot;
    uint32_t done;
} cl_use;

typedef struct decode {
    cl_model *m;
    cl_row **rows; /* [n], those that could start */
    uint64_t n;
    uint8_t *dead; /* [n] */
    cl_batch batch;
    uint32_t n_uses;
} decode;

uint64_t cl_decode_use_bytes(void) { return sizeof(cl_use); }

static void kill_row(decode *d, uint64_t i) { d->dead[i] = 1; }

static void poll_cancel(decode *d) {
    for (uint64_t i = 0; i < d->n; i++) {
        if (d->dead[i] || !cl_seq_take_cancel(d->rows[i]->seq)) continue;
        cl_fail(&d->rows[i]->error, CL_CANCELLED, "cancelled at position %llu",
                (unsigned long long)d->batch.positions[i]);
        kill_row(d, i);
    }
}

static int anyone_alive(const decode *d) {
    for (uint64_t i = 0; i < d->n; i++)
        if (!d->dead[i]) return 1;
    return 0;
}

/* ---- one MoE layer ---- */

static uint64_t token_of(const decode *d, uint32_t layer, uint32_t place) {
    return d->m->work.order[place] / d->m->layers[layer].spec.top_k;
}

static int use_is_wanted(const decode *d, uint32_t layer, const cl_use *use) {
    for (uint32_t i = 0; i < use->n; i++)
        if (!d->dead[token_of(d, layer, use->first + i)]) return 1;
    return 0;
}

static void list_uses(decode *d, uint32_t layer) {
    cl_work *work = &d->m->work;
    d->n_uses = 0;
    for (uint32_t e = 0; e < d->m->layers[layer].spec.experts; e++) {
        uint32_t n = work->first[e + 1] - work->first[e];
        if (n) work->uses[d->n_uses++] = (cl_use){e, work->first[e], n, NULL, 0};
    }
}

/* The first row that wants an expert is charged with its read; for the others it was in memory. */
static void count_use(decode *d, uint32_t layer, const cl_use *use, int loaded) {
    cl_model *m = d->m;
    const cl_store_layer *store_layer = &m->store.layers[m->layers[layer].store_layer];
    for (uint32_t i = 0; i < use->n; i++) {
        cl_counts *counts = &d->rows[token_of(d, layer, use->first + i)]->counts;
        if (i == 0 && loaded) {
            counts->expert_loads++;
            counts->expert_bytes += store_layer->record_bytes;
        } else {
            counts->expert_hits++;
        }
    }
    cl_count(&m->counters.expert_loads, (uint64_t)loaded);
    cl_count(&m->counters.expert_hits, use->n - (uint64_t)loaded);
    cl_cache_touch(&m->store, (uint32_t)m->layers[layer].store_layer, use->expert, use->n);
}

/* 1 if the use has its slot. */
static int acquire_use(decode *d, uint32_t layer, cl_use *use, cl_purpose purpose) {
    int loaded;
    use->slot =
        cl_store_acquire(&d->m->store, (uint32_t)d->m->layers[layer].store_layer, use->expert, purpose, &loaded);
    if (use->slot) count_use(d, layer, use, loaded);
    return use->slot != NULL;
}

static void finish_use(decode *d, cl_use *use) {
    if (use->slot) cl_store_release(&d->m->store, use->slot);
    use->slot = NULL;
    use->done = 1;
}

/* What is in memory is pinned first, so that a read for one expert never evicts another that this layer wants. */
static void acquire_resident(decode *d, uint32_t layer) {
    for (uint32_t u = 0; u < d->n_uses; u++) {
        cl_use *use = &d->m->work.uses[u];
        if (cl_store_resident(&d->m->store, (uint32_t)d->m->layers[layer].store_layer, use->expert))
            acquire_use(d, layer, use, CL_FOR_DECODE);
    }
}

/* Whether a slot will come free as this layer's turn goes on. */
static int holds_slots(const decode *d) {
    for (uint32_t u = 0; u < d->n_uses; u++)
        if (d->m->work.uses[u].slot) return 1;
    return 0;
}

/* Starts the read of every use that has no slot yet, as far as there are slots; later calls go on from there. Only when
 * all have theirs may the lookahead take some. */
static void acquire_absent(decode *d, uint32_t layer) {
    for (uint32_t u = 0; u < d->n_uses; u++) {
        cl_use *use = &d->m->work.uses[u];
        if (use->done || use->slot || !use_is_wanted(d, layer, use) || acquire_use(d, layer, use, CL_FOR_DECODE))
            continue;
        if (holds_slots(d) || !acquire_use(d, layer, use, CL_FOR_DECODE_NOW)) return;
    }
    cl_lookahead_read(d->m);
}

static void fail_rows(decode *d, uint32_t layer, const cl_use *use) {
    for (uint32_t i = 0; i < use->n; i++) {
        uint64_t token = token_of(d, layer, use->first + i);
        if (d->dead[token]) continue;
        d->rows[token]->error = use->slot->read.error;
        kill_row(d, token);
    }
}

/* The end of a use that needs no arithmetic: nobody wants it any more, or its read failed. */
static int drop_use(decode *d, uint32_t layer, cl_use *use, cl_slot_state state) {
    if (state == CL_SLOT_FAILED) fail_rows(d, layer, use);
    else if (use_is_wanted(d, layer, use)) return 0;
    finish_use(d, use);
    return 1;
}

/* Computes a round of what has arrived; returns how many uses came to their end. */
static uint32_t run_round(decode *d, uint32_t layer) {
    cl_work *work = &d->m->work;
    uint64_t record_bytes = d->m->store.layers[d->m->layers[layer].store_layer].record_bytes, bytes = 0;
    uint32_t finished = 0, n_jobs = 0;
    for (uint32_t u = 0; u < d->n_uses && bytes < ROUND_BYTES; u++) {
        cl_use *use = &work->uses[u];
        if (use->done) continue;
        cl_slot_state state = use->slot ? cl_store_state(use->slot) : CL_SLOT_LOADING;
        if (drop_use(d, layer, use, state)) {
            finished++;
        } else if (state == CL_SLOT_READY) {
            work->jobs[n_jobs++] = (cl_expert_job){use->slot->data, work->tokens_of + use->first, use->n, use->first};
            use->done = 1; /* released below: the job still needs its slot */
            bytes += record_bytes * use->n;
        }
    }
    if (n_jobs) cl_experts_run(d->m, layer, work->jobs, n_jobs);
    for (uint32_t u = 0; u < d->n_uses; u++)
        if (work->uses[u].done && work->uses[u].slot) finish_use(d, &work->uses[u]);
    return finished + n_jobs;
}

static void run_uses(decode *d, uint32_t layer) {
    for (uint32_t left = d->n_uses; left;) {
        uint32_t seen = cl_io_events(d->m->io);
        poll_cancel(d);
        uint32_t finished = run_round(d, layer);
        left -= finished;
        acquire_absent(d, layer); /* slots may have come free */
        if (left && !finished) cl_wait_for_drive(d->m, seen, UINT64_MAX);
    }
}

/* out [n, hidden]: each row's experts in ascending id */
static void sum_experts(decode *d, uint32_t layer, uint64_t pairs) {
    cl_model *m = d->m;
    cl_work *work = &m->work;
    uint64_t hidden = m->spec.hidden_size, top_k = m->layers[layer].spec.top_k;
    for (uint64_t place = 0; place < pairs; place++) work->place_of[work->order[place]] = (uint32_t)place;
    memset(work->out, 0, d->n * hidden * sizeof *work->out);
    for (uint64_t i = 0; i < d->n; i++) {
        if (d->dead[i]) continue;
        for (uint64_t j = 0; j < top_k; j++)
            m->kernels->axpy(work->weights[i * top_k + j],
                             work->pair_out + (uint64_t)work->place_of[i * top_k + j] * hidden, hidden,
                             work->out + i * hidden);
    }
}

static void moe_layer(decode *d, uint32_t layer) {
    cl_model *m = d->m;
    cl_work *work = &m->work;
    const cl_layer_spec *s = &m->layers[layer].spec;
    cl_ffn_begin(m, layer, d->batch.h, d->n);
    cl_experts_route(m, layer, &work->input, d->n, work->ids, work->weights, work->bad);
    for (uint64_t i = 0; i < d->n; i++) {
        if (d->dead[i] || !work->bad[i]) continue;
        cl_fail(&d->rows[i]->error, CL_NONFINITE, "layer %u: the router's logits at position %llu are not all finite",
                layer, (unsigned long long)d->batch.positions[i]);
        kill_row(d, i);
    }
    uint64_t pairs = cl_group_by_expert(work->ids, d->n, s->top_k, s->experts, d->dead, work->first, work->order);
    for (uint64_t place = 0; place < pairs; place++) work->tokens_of[place] = work->order[place] / s->top_k;
    list_uses(d, layer);
    cl_lookahead_routed(m, layer, work->first);
    acquire_resident(d, layer);
    acquire_absent(d, layer);
    cl_ffn_shared(m, layer, d->n);
    cl_lookahead_guess(m, layer, d->batch.h, d->n, d->dead);
    if (pairs) cl_experts_begin(m, layer, pairs);
    run_uses(d, layer);
    sum_experts(d, layer, pairs);
    cl_ffn_combine(m, layer, d->batch.h, work->out, d->n);
}

/* ---- the whole model ---- */

static int check_row(cl_model *m, cl_row *row) {
    if (row->token < 0 || (uint32_t)row->token >= m->spec.vocab_size)
        return cl_fail(&row->error, CL_INVALID, "token %d is not in 0..%u", row->token, m->spec.vocab_size - 1);
    int code = cl_sampling_check(&row->sampling, &row->error);
    return code ? code : cl_seq_reserve(row->seq, row->seq->length + 1, &row->error);
}

static void begin(decode *d, cl_row *rows, uint32_t n) {
    cl_work *work = &d->m->work;
    for (uint32_t i = 0; i < n; i++) {
        cl_ok(&rows[i].error);
        rows[i].next_token = -1;
        rows[i].counts = (cl_counts){0, 0, 0};
        if (check_row(d->m, &rows[i])) continue;
        work->rows[d->n] = &rows[i];
        work->seqs[d->n] = rows[i].seq;
        work->positions[d->n] = rows[i].seq->length;
        work->dead[d->n] = 0;
        cl_embed(d->m, &rows[i].token, 1, work->h + d->n * d->m->spec.hidden_size);
        d->n++;
    }
}

/* The sequences grow only here, after everything that can fail. */
static void finish(decode *d) {
    cl_model *m = d->m;
    uint64_t vocab = m->spec.vocab_size;
    if (anyone_alive(d)) cl_head(m, d->batch.h, d->n, m->work.logits);
    poll_cancel(d);
    for (uint64_t i = 0; i < d->n; i++) {
        cl_row *row = d->rows[i];
        const float *logits = m->work.logits + i * vocab;
        if (!d->dead[i] &&
            cl_choose(m, logits, &row->sampling, d->batch.positions[i] + 1, &row->next_token, &row->error))
            kill_row(d, i);
        if (d->dead[i]) {
            cl_seq_trim(row->seq);
            continue;
        }
        if (row->logits) memcpy(row->logits, logits, vocab * sizeof *logits);
        row->seq->length++;
        cl_count(&m->counters.decode_tokens, 1);
    }
}

void cl_decode(cl_model *m, cl_row *rows, uint32_t n) {
    decode d = {.m = m, .rows = m->work.rows, .dead = m->work.dead};
    begin(&d, rows, n);
    cl_lookahead_begin(m);
    d.batch = (cl_batch){d.n, m->work.h, m->work.seqs, m->work.positions};
    for (uint32_t layer = 0; layer < m->spec.n_layers; layer++) {
        poll_cancel(&d);
        if (!anyone_alive(&d)) break;
        cl_attention(m, layer, &d.batch);
        if (m->layers[layer].spec.ffn == CL_FFN_MOE) {
            moe_layer(&d, layer);
        } else {
            cl_ffn_begin(m, layer, d.batch.h, d.n);
            cl_ffn_dense(m, layer, d.batch.h, d.n);
        }
    }
    finish(&d);
    cl_lookahead_end(m, d.n);
    if (d.n) cl_cache_tick(&m->store);
}
