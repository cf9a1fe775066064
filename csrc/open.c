/* open.c - from options to a model in memory: checks, the memory plan, the arena, files, and the way back.
 *
 * Owns the layout of the arena. Every region is carved by the same code twice, first only to count, so the plan that
 * cl_model_plan reports and the memory that cl_model_open takes cannot differ. Refuses options that contradict their
 * tensors before anything is allocated; after that no step allocates.
 */
#include "error.h"
#include "format.h"
#include "model.h"
#include "numbers.h"
#include "trace.h"
#include <stdlib.h>
#include <string.h>

typedef enum region { DENSE, KV, SLOTS, RING, PREFILL, BUFFERS, REGIONS } region;

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* ---- what the sizes follow from ---- */

static int add_group_size(cl_model *m, const cl_format *format, cl_error *err) {
    if (format->group_size == 0) return CL_OK;
    for (uint32_t i = 0; i < m->n_group_sizes; i++)
        if (m->group_sizes[i] == format->group_size) return CL_OK;
    if (m->n_group_sizes == CL_MOST_GROUPS)
        return cl_fail(err, CL_UNSUPPORTED, "the weights have more than %d different group sizes", CL_MOST_GROUPS);
    m->group_sizes[m->n_group_sizes++] = format->group_size;
    return CL_OK;
}

static int find_group_sizes(cl_model *m, const cl_model_options *o, cl_error *err) {
    int code = CL_OK;
    for (uint64_t i = 0; i < o->n_dense && !code; i++) code = add_group_size(m, &o->dense[i].format, err);
    for (uint32_t l = 0; l < o->n_expert_layers; l++)
        for (uint32_t p = 0; p < CL_PARTS && !code; p++)
            code = add_group_size(m, &o->expert_layers[l].parts[p].format, err);
    return code;
}

static void find_widths(cl_model *m) {
    m->most_top_k = m->most_experts = 1;
    for (uint32_t i = 0; i < m->spec.n_layers; i++) {
        const cl_layer_spec *l = &m->spec.layers[i];
        m->widest_attention = larger(m->widest_attention, (uint64_t)l->heads * l->head_dim);
        m->widest_kv = larger(m->widest_kv, (uint64_t)l->kv_heads * l->head_dim);
        uint64_t group = l->heads / l->kv_heads;
        m->work.attend_floats = larger(m->work.attend_floats, (2 * group * (2 + (uint64_t)l->head_dim) + 15) & ~15ull);
        if (l->ffn == CL_FFN_DENSE) {
            m->widest_ffn = larger(m->widest_ffn, l->intermediate_size);
            continue;
        }
        m->widest_ffn = larger(m->widest_ffn, l->shared_intermediate_size);
        m->widest_expert = larger(m->widest_expert, l->expert_intermediate_size);
        m->most_experts = (uint32_t)larger(m->most_experts, l->experts);
        m->most_top_k = (uint32_t)larger(m->most_top_k, l->top_k);
    }
}

/* The fields that are plain copies; `spec` still points to the caller's arrays. */
static int describe(cl_model *m, const cl_model_options *o, cl_error *err) {
    m->spec = *o->spec;
    m->activation = o->activation;
    m->direct = o->direct;
    m->heat_half_life = o->heat_half_life;
    m->lookahead.mode = o->lookahead;
    m->lookahead.stripes = o->n_stripes;
    m->max_rows = o->max_rows;
    m->max_prefills = o->max_prefills;
    m->pass_tokens = o->pass_tokens;
    m->max_context = o->max_context;
    m->threads = o->threads ? o->threads : cl_pool_default_threads();
    m->kv.counters = m->store.counters = &m->counters;
    find_widths(m);
    m->work.tokens = larger(o->max_rows, CL_TILE_TOKENS);
    m->work.pairs = larger(m->work.tokens, (uint64_t)o->max_rows * m->most_top_k);
    return find_group_sizes(m, o, err);
}

/* ---- places ---- */

static void place_spec(cl_model *m, cl_carve *c, const cl_model_options *o) {
    const cl_spec *from = o->spec;
    cl_layer_spec *layers = cl_carve_take(c, from->n_layers, sizeof *layers, 64);
    cl_rope_spec *ropes = cl_carve_take(c, from->n_ropes, sizeof *ropes, 64);
    m->layers = cl_carve_take(c, from->n_layers, sizeof *m->layers, 64);
    m->banned = cl_carve_take(c, from->vocab_size / 8 + 1, 1, 64);
    for (uint32_t r = 0; r < from->n_ropes; r++) {
        float *inv_freq = cl_carve_take(c, from->ropes[r].dims / 2, sizeof *inv_freq, 64);
        if (!inv_freq) continue;
        ropes[r] = from->ropes[r];
        memcpy(inv_freq, from->ropes[r].inv_freq, from->ropes[r].dims / 2 * sizeof *inv_freq);
        ropes[r].inv_freq = inv_freq;
    }
    if (!layers) return;
    memcpy(layers, from->layers, from->n_layers * sizeof *layers);
    m->spec.layers = layers;
    m->spec.ropes = ropes;
}

static void place_inputs(cl_model *m, cl_carve *c, cl_inputs *in, uint64_t n, uint64_t cols, uint64_t n2,
                         uint64_t cols2, uint64_t n3, uint64_t cols3) {
    for (uint32_t i = 0; i < m->n_group_sizes; i++) {
        uint32_t group = m->group_sizes[i];
        uint64_t bytes = cl_acts_bytes(m->activation, n, cols, group);
        bytes = larger(bytes, cl_acts_bytes(m->activation, n2, cols2, group));
        bytes = larger(bytes, cl_acts_bytes(m->activation, n3, cols3, group));
        in->workspace[i] = cl_carve_take(c, bytes, 1, 64);
    }
}

static uint64_t most_rope_pairs(const cl_spec *s) {
    uint64_t pairs = 0;
    for (uint32_t r = 0; r < s->n_ropes; r++) pairs = larger(pairs, s->ropes[r].dims / 2);
    return pairs;
}

static void place_floats(cl_model *m, cl_carve *c) {
    cl_work *w = &m->work;
    uint64_t hidden = m->spec.hidden_size, n = w->tokens, rope = most_rope_pairs(&m->spec);
    uint64_t inner = larger(n * m->widest_ffn, w->pairs * m->widest_expert);
    struct {
        float **at;
        uint64_t rows, cols;
    } const arrays[] = {
        {&w->h, m->max_rows, hidden},
        {&w->x, n, hidden},
        {&w->q, n, m->widest_attention},
        {&w->k, n, m->widest_kv},
        {&w->v, n, m->widest_kv},
        {&w->attended, n, m->widest_attention},
        {&w->out, n, hidden},
        {&w->gate, 1, inner},
        {&w->up, 1, inner},
        {&w->pair_out, w->pairs, hidden},
        {&w->router_logits, n, m->most_experts},
        {&w->route_scratch, n, 2 * (uint64_t)m->most_experts},
        {&w->weights, m->max_rows, m->most_top_k},
        {&w->shared, n, hidden},
        {&w->output_gate, n, 1},
        {&w->cosine, n, rope},
        {&w->sine, n, rope},
        {&w->attend, m->threads, w->attend_floats},
        {&w->logits, m->max_rows, m->spec.vocab_size},
    };
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        *arrays[i].at = cl_carve_take(c, arrays[i].rows * arrays[i].cols, sizeof(float), 64);
}

static void place_work(cl_model *m, cl_carve *c) {
    cl_work *w = &m->work;
    uint64_t n = w->tokens, pairs = w->pairs;
    place_floats(m, c);
    place_inputs(m, c, &w->input, n, m->spec.hidden_size, 0, 1, 0, 1);
    place_inputs(m, c, &w->inner, n, m->widest_attention, n, m->widest_ffn, pairs, m->widest_expert);
    w->seqs = cl_carve_take(c, n, sizeof *w->seqs, 64);
    w->positions = cl_carve_take(c, n, sizeof *w->positions, 64);
    w->bad = cl_carve_take(c, n, sizeof *w->bad, 64);
    w->rows = cl_carve_take(c, m->max_rows, sizeof *w->rows, 64);
    w->dead = cl_carve_take(c, m->max_rows, sizeof *w->dead, 64);
    w->ids = cl_carve_take(c, (uint64_t)m->max_rows * m->most_top_k, sizeof *w->ids, 64);
    w->first = cl_carve_take(c, (uint64_t)m->most_experts + 1, sizeof *w->first, 64);
    w->order = cl_carve_take(c, pairs, sizeof *w->order, 64);
    w->tokens_of = cl_carve_take(c, pairs, sizeof *w->tokens_of, 64);
    w->place_of = cl_carve_take(c, pairs, sizeof *w->place_of, 64);
    w->wave = cl_carve_take(c, pairs, sizeof *w->wave, 64);
    w->iota = cl_carve_take(c, pairs, sizeof *w->iota, 64);
    w->uses = cl_carve_take(c, pairs, cl_decode_use_bytes(), 64);
    w->jobs = cl_carve_take(c, pairs, sizeof *w->jobs, 64);
    w->matrices = cl_carve_take(c, pairs * CL_PARTS, sizeof *w->matrices, 64);
    w->products = cl_carve_take(c, 2 * pairs, sizeof *w->products, 64);
    w->sample_scratch = cl_carve_take(c, cl_sample_scratch_bytes(m->spec.vocab_size), 1, 64);
}

static void place(cl_model *m, cl_carve carves[REGIONS], const cl_model_options *o) {
    place_spec(m, &carves[BUFFERS], o);
    cl_dense_place(m, &carves[BUFFERS], &carves[DENSE], o);
    cl_store_place(&m->store, &carves[BUFFERS], o);
    cl_kv_place(&m->kv, &carves[BUFFERS], &carves[KV], o);
    cl_prefill_place(m, &carves[PREFILL], o);
    place_work(m, &carves[BUFFERS]);
    cl_lookahead_place(m, &carves[BUFFERS]);
    uint64_t slot = cl_store_slot_bytes(o);
    uint8_t *cache = cl_carve_take(&carves[SLOTS], m->store.cache_slots, slot, CL_ALIGN);
    uint8_t *ring = cl_carve_take(&carves[RING], m->store.ring_slots, slot, CL_ALIGN);
    for (uint64_t i = 0; cache && i < m->store.cache_slots; i++) m->store.slots[i].data = cache + i * slot;
    for (uint64_t i = 0; ring && i < m->store.ring_slots; i++)
        m->store.slots[m->store.cache_slots + i].data = ring + i * slot;
}

/* Checks, describes and counts: `m` zeroed, and of no use for anything else afterwards but for place. */
static int measure(cl_model *m, cl_carve carves[REGIONS], const cl_model_options *o, uint64_t *total, cl_error *err) {
    int code = cl_spec_check(o, err);
    if (!code) code = cl_expert_layers_check(o, err);
    if (!code) code = cl_dense_check(o, err);
    if (!code) code = describe(m, o, err);
    if (code) return code;
    memset(carves, 0, REGIONS * sizeof *carves);
    place(m, carves, o);
    *total = 0;
    for (int r = 0; r < REGIONS; r++) {
        uint64_t bytes;
        if (carves[r].overflow || __builtin_add_overflow(carves[r].used, CL_ALIGN - 1, &bytes) ||
            __builtin_add_overflow(*total, bytes & ~(uint64_t)(CL_ALIGN - 1), total))
            return cl_fail(err, CL_NOMEM, "the memory that these options ask for exceeds 64 bits");
        carves[r].used = bytes & ~(uint64_t)(CL_ALIGN - 1);
    }
    return CL_OK;
}

int cl_model_plan(const cl_model_options *options, cl_memory_plan *plan, cl_error *err) {
    cl_ok(err);
    memset(plan, 0, sizeof *plan);
    cl_model *m = calloc(1, sizeof *m);
    if (!m) return cl_fail(err, CL_NOMEM, "no memory to make a plan");
    cl_carve carves[REGIONS];
    uint64_t total;
    int code = measure(m, carves, options, &total, err);
    free(m);
    if (code) return code;
    *plan = (cl_memory_plan){carves[DENSE].used,
                             cl_kv_page_bytes(options) * options->kv_pages,
                             cl_kv_page_bytes(options),
                             cl_store_slot_bytes(options),
                             carves[SLOTS].used,
                             carves[RING].used,
                             carves[PREFILL].used,
                             carves[BUFFERS].used,
                             total};
    plan->kv_bytes = carves[KV].used;
    return CL_OK;
}

/* ---- opening ---- */

static void bind_layers(cl_model *m, const cl_model_options *o) {
    uint32_t at = 0;
    for (uint32_t l = 0; l < m->spec.n_layers; l++) {
        cl_layer *layer = &m->layers[l];
        layer->spec = m->spec.layers[l];
        layer->store_layer = -1;
        if (layer->spec.ffn != CL_FFN_MOE) continue;
        memcpy(layer->parts, o->expert_layers[at].parts, sizeof layer->parts);
        layer->store_layer = (int32_t)at++;
    }
}

static void initialise(cl_model *m, const cl_model_options *o) {
    bind_layers(m, o);
    cl_store_init(&m->store, o);
    cl_kv_init(&m->kv, o);
    for (uint64_t i = 0; i < m->work.pairs; i++) m->work.iota[i] = (uint32_t)i;
    for (uint32_t i = 0; i < o->n_banned_tokens; i++)
        m->banned[o->banned_tokens[i] / 8] |= (uint8_t)(1u << o->banned_tokens[i] % 8);
    atomic_store(&m->counters.prefills_free, m->max_prefills);
}

static int open_drives(cl_model *m, const cl_model_options *o, cl_error *err) {
    cl_io_options options = {.stripes = o->stripes,
                             .n_stripes = o->n_stripes,
                             .backend = o->io_backend,
                             .threads = o->io_threads,
                             .depth = o->io_depth,
                             .direct = o->direct,
                             .verify = o->verify};
    return cl_io_open(&m->io, &options, &m->counters, err);
}

static int build(cl_model *m, const cl_model_options *o, cl_error *err) {
    cl_carve carves[REGIONS];
    uint64_t total;
    int code = measure(m, carves, o, &total, err);
    if (code) return code;
    m->kernels = cl_kernels_find(o->isa);
    if (!m->kernels) return cl_fail(err, CL_UNSUPPORTED, "option isa: \"%s\" is not available here", o->isa);
    m->dense_path = strdup(o->dense_path);
    if (!m->dense_path) return cl_fail(err, CL_NOMEM, "no memory for a path");
    code = open_drives(m, o, err);
    if (!code) code = cl_pool_create(&m->pool, m->threads, err);
    if (!code) code = cl_arena_map(&m->arena, total, err);
    if (code) return code;
    cl_arena_touch(&m->arena, m->pool);
    uint8_t *base = m->arena.base;
    /* The ring follows the slots, so all that is read into is one range. */
    uint8_t *slots = base + carves[DENSE].used + carves[KV].used;
    uint64_t slots_bytes = carves[SLOTS].used + carves[RING].used;
    for (int r = 0; r < REGIONS; r++) {
        uint64_t bytes = carves[r].used;
        carves[r] = (cl_carve){base, 0, 0};
        base += bytes;
    }
    place(m, carves, o);
    m->store.io = m->io;
    initialise(m, o);
    return cl_io_start(m->io, slots, slots_bytes, err);
}

int cl_model_open(cl_model **out, const cl_model_options *options, cl_error *err) {
    *out = NULL;
    cl_ok(err);
    cl_model *m = calloc(1, sizeof *m);
    if (!m) return cl_fail(err, CL_NOMEM, "no memory for a model");
    int code = build(m, options, err);
    if (code) cl_model_close(m);
    else *out = m;
    return code;
}

void cl_model_close(cl_model *m) {
    if (!m) return;
    cl_recorder_close(m->store.recorder, &m->store, NULL);
    cl_io_close(m->io); /* first: its threads write into the arena */
    cl_pool_free(m->pool);
    cl_arena_unmap(&m->arena);
    free(m->dense_path);
    free(m);
}

const char *cl_model_isa(const cl_model *m) { return m->kernels->name; }

void cl_model_get_stats(const cl_model *m, cl_model_stats *stats) {
    cl_counters *c = (cl_counters *)&m->counters; /* atomic loads want it without const */
    *stats = (cl_model_stats){
        .load_bytes_done = atomic_load(&c->load_bytes_done),
        .load_bytes_total = atomic_load(&c->load_bytes_total),
        .heartbeat = atomic_load(&c->heartbeat),
        .expert_hits = atomic_load(&c->expert_hits),
        .expert_loads = atomic_load(&c->expert_loads),
        .expert_evictions = atomic_load(&c->expert_evictions),
        .expert_bytes = atomic_load(&c->expert_bytes),
        .read_errors = atomic_load(&c->read_errors),
        .checksum_errors = atomic_load(&c->checksum_errors),
        .steps = atomic_load(&c->steps),
        .decode_tokens = atomic_load(&c->decode_tokens),
        .prefill_tokens = atomic_load(&c->prefill_tokens),
        .compute_us = atomic_load(&c->compute_us),
        .wait_us = atomic_load(&c->wait_us),
        .kv_pages_free = atomic_load(&c->kv_pages_free),
        .prefill_wasted_bytes = atomic_load(&c->prefill_wasted_bytes),
        .lookahead_predicted = atomic_load(&c->lookahead_predicted),
        .lookahead_right = atomic_load(&c->lookahead_right),
        .lookahead_loads = atomic_load(&c->lookahead_loads),
        .lookahead_bytes = atomic_load(&c->lookahead_bytes),
        .lookahead_wasted_bytes = atomic_load(&c->lookahead_wasted_bytes),
        .lookahead_late = atomic_load(&c->lookahead_late),
        .lookahead_saved_us = atomic_load(&c->lookahead_saved_us),
        .lookahead_us = atomic_load(&c->lookahead_us),
        .lookahead_active = (uint32_t)atomic_load(&c->lookahead_active),
        .lookahead_trying = (uint32_t)atomic_load(&c->lookahead_trying),
        .prefills_free = atomic_load(&c->prefills_free),
        .direct_active = cl_io_direct_active(m->io),
        .threads = m->threads,
        .buffered_stripes = cl_io_buffered_stripes(m->io),
    };
}
