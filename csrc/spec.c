/* spec.c - refuses what the core cannot run, before anything is allocated or read.
 *
 * Owns the limits of every field of cl_spec, of the expert layers and of the options. The numbers come from a
 * container, which is hostile until checked: after these checks no product of two sizes overflows 64 bits and no index
 * leaves its array. Errors name layer and field.
 */
#include "error.h"
#include "format.h"
#include "model.h"
#include <math.h>
#include <stdio.h>

#define MOST_WIDTH (1u << 24) /* of any dimension of a matrix but the vocabulary */
#define MOST_VOCAB (1u << 28)
#define MOST_LAYERS 65536u
#define MOST_EXPERTS 65536u
#define MOST_THREADS 1024u

typedef struct check {
    cl_error *err;
    int32_t layer; /* -1: the model's own fields */
    int code;
} check;

static void refuse(check *c, const char *field, double value, const char *rule) {
    if (c->code) return;
    if (c->layer < 0) c->code = cl_fail(c->err, CL_INVALID, "spec: %s is %.10g, %s", field, value, rule);
    else c->code = cl_fail(c->err, CL_INVALID, "spec: layer %d: %s is %.10g, %s", c->layer, field, value, rule);
}

static void in_range(check *c, const char *field, uint64_t value, uint64_t least, uint64_t most) {
    if (value >= least && value <= most) return;
    char rule[64];
    snprintf(rule, sizeof rule, "must be %llu..%llu", (unsigned long long)least, (unsigned long long)most);
    refuse(c, field, (double)value, rule);
}

static void must_be_finite(check *c, const char *field, float value) {
    if (!isfinite(value)) refuse(c, field, (double)value, "must be a finite number");
}

static void must_be_positive(check *c, const char *field, float value) {
    if (!(isfinite(value) && value > 0)) refuse(c, field, (double)value, "must be a finite number above 0");
}

static void one_of(check *c, const char *field, int32_t value, int32_t least, int32_t most) {
    if (value >= least && value <= most) return;
    if (c->code) return;
    c->code =
        cl_fail(c->err, CL_UNSUPPORTED, "spec: layer %d: %s %d is not known to this build", c->layer, field, value);
}

static void check_model(check *c, const cl_spec *s) {
    in_range(c, "vocab_size", s->vocab_size, 1, MOST_VOCAB);
    in_range(c, "hidden_size", s->hidden_size, 1, MOST_WIDTH);
    in_range(c, "max_positions", s->max_positions, 1, INT32_MAX);
    in_range(c, "layers", s->n_layers, 1, MOST_LAYERS);
    in_range(c, "ropes", s->n_ropes, 1, MOST_LAYERS);
    if (!(isfinite(s->norm_eps) && s->norm_eps >= 0))
        refuse(c, "norm_eps", (double)s->norm_eps, "must be finite and >= 0");
    must_be_finite(c, "norm_weight_offset", s->norm_weight_offset);
    must_be_positive(c, "embedding_scale", s->embedding_scale);
    must_be_positive(c, "residual_scale", s->residual_scale);
    must_be_positive(c, "logits_divisor", s->logits_divisor);
    in_range(c, "tied_embeddings", s->tied_embeddings, 0, 1);
}

static void check_rope(check *c, const cl_rope_spec *r) {
    one_of(c, "rope style", r->style, CL_ROPE_HALF, CL_ROPE_HALF);
    in_range(c, "rope dims", r->dims, 2, MOST_WIDTH);
    if (r->dims % 2) refuse(c, "rope dims", r->dims, "must be even");
    must_be_positive(c, "rope attention_factor", r->attention_factor);
    if (c->code) return;
    for (uint32_t i = 0; i < r->dims / 2; i++) must_be_finite(c, "rope inv_freq", r->inv_freq[i]);
}

static void check_attention(check *c, const cl_layer_spec *l, const cl_spec *s) {
    one_of(c, "attention", l->attention, CL_ATTENTION_GQA, CL_ATTENTION_GQA);
    in_range(c, "heads", l->heads, 1, MOST_WIDTH);
    in_range(c, "kv_heads", l->kv_heads, 1, l->heads);
    in_range(c, "head_dim", l->head_dim, 1, 65536);
    in_range(c, "heads * head_dim", (uint64_t)l->heads * l->head_dim, 1, MOST_WIDTH);
    if (!c->code && l->heads % l->kv_heads) refuse(c, "heads", l->heads, "must be a multiple of kv_heads");
    must_be_positive(c, "attention scale", l->attention_scale);
    one_of(c, "qk_norm", l->qk_norm, CL_QK_NORM_NONE, CL_QK_NORM_FULL);
    if (!(isfinite(l->clip_qkv) && l->clip_qkv >= 0))
        refuse(c, "clip_qkv", (double)l->clip_qkv, "must be finite and >= 0");
    in_range(c, "rope", l->rope, 0, s->n_ropes - 1);
    if (!c->code && s->ropes[l->rope].dims > l->head_dim)
        refuse(c, "rope dims", s->ropes[l->rope].dims, "must not exceed head_dim");
}

static void check_moe(check *c, const cl_layer_spec *l) {
    in_range(c, "experts", l->experts, 1, MOST_EXPERTS);
    in_range(c, "top_k", l->top_k, 1, l->experts);
    in_range(c, "expert intermediate_size", l->expert_intermediate_size, 1, MOST_WIDTH);
    one_of(c, "score", l->score, CL_SCORE_SOFTMAX, CL_SCORE_SIGMOID);
    one_of(c, "renormalize", l->renormalize, CL_RENORMALIZE_NONE, CL_RENORMALIZE_SUM_EPSILON);
    in_range(c, "select_bias", l->select_bias, 0, 1);
    in_range(c, "groups", l->groups, 1, l->experts);
    in_range(c, "top_groups", l->top_groups, 1, l->groups);
    if (!c->code && l->experts % l->groups) refuse(c, "experts", l->experts, "must be a multiple of groups");
    if (!c->code && l->top_k > l->experts / l->groups * l->top_groups)
        refuse(c, "top_k", l->top_k, "exceeds the experts of top_groups groups");
    must_be_positive(c, "routed_scale", l->routed_scale);
    in_range(c, "shared_intermediate_size", l->shared_intermediate_size, 0, MOST_WIDTH);
    in_range(c, "shared_output_gate", l->shared_output_gate, 0, l->shared_intermediate_size ? 1 : 0);
}

static void check_layer(check *c, const cl_layer_spec *l, const cl_spec *s) {
    check_attention(c, l, s);
    one_of(c, "ffn", l->ffn, CL_FFN_DENSE, CL_FFN_MOE);
    if (c->code) return;
    if (l->ffn == CL_FFN_MOE) check_moe(c, l);
    else in_range(c, "intermediate_size", l->intermediate_size, 1, MOST_WIDTH);
}

static int option(cl_error *err, const char *name, uint64_t value, uint64_t least, uint64_t most) {
    if (value >= least && value <= most) return CL_OK;
    return cl_fail(err, CL_INVALID, "option %s is %llu, must be %llu..%llu", name, (unsigned long long)value,
                   (unsigned long long)least, (unsigned long long)most);
}

static int check_options(const cl_model_options *o, cl_error *err) {
    int code = option(err, "expert_slots", o->expert_slots, 1, INT32_MAX / 2);
    if (!code) code = option(err, "ring_slots", o->ring_slots, 2, 65536);
    if (!code) code = option(err, "kv_pages", o->kv_pages, 1, INT32_MAX);
    if (!code) code = option(err, "kv_dtype", (uint64_t)o->kv_dtype, CL_KV_F16, CL_KV_F32);
    if (!code) code = option(err, "max_rows", o->max_rows, 1, 65536);
    if (!code) code = option(err, "max_prefills", o->max_prefills, 1, 65536);
    if (!code) code = option(err, "pass_tokens", o->pass_tokens, 1, 1u << 24);
    if (!code) code = option(err, "max_context", o->max_context, 1, o->spec->max_positions);
    if (!code) code = option(err, "activation", (uint64_t)o->activation, CL_ACTIVATION_I8, CL_ACTIVATION_I16);
    if (!code) code = option(err, "threads", o->threads, 0, MOST_THREADS);
    if (!code) code = option(err, "io_threads", o->io_threads, 0, MOST_THREADS);
    if (!code) code = option(err, "direct", (uint64_t)o->direct, CL_DIRECT_AUTO, CL_DIRECT_OFF);
    if (!code) code = option(err, "io_backend", (uint64_t)o->io_backend, CL_IO_AUTO, CL_IO_THREADS);
    if (!code) code = option(err, "io_depth", o->io_depth, 0, CL_MOST_IO_DEPTH);
    if (!code) code = option(err, "verify", (uint64_t)o->verify, CL_VERIFY_ALWAYS, CL_VERIFY_NEVER);
    if (!code) code = option(err, "lookahead", (uint64_t)o->lookahead, CL_SWITCH_AUTO, CL_SWITCH_OFF);
    if (!code && !(o->heat_half_life == 0 || (o->heat_half_life >= 1 && o->heat_half_life <= 1e9)))
        code = cl_fail(err, CL_INVALID, "option heat_half_life is %g, must be 0, for the default, or 1..1e9 steps",
                       o->heat_half_life);
    if (!code && !o->isa) code = cl_fail(err, CL_INVALID, "option isa is missing");
    for (uint32_t i = 0; !code && i < o->n_banned_tokens; i++)
        if (o->banned_tokens[i] < 0 || (uint32_t)o->banned_tokens[i] >= o->spec->vocab_size)
            code = cl_fail(err, CL_INVALID, "banned token %d is not in 0..%u", o->banned_tokens[i],
                           o->spec->vocab_size - 1);
    return code;
}

/* A token and one of its experts are a pair, and pairs are numbered in 32 bits. */
static int check_pairs(const cl_model_options *o, cl_error *err) {
    const struct {
        const char *name;
        uint32_t tokens;
    } batches[] = {{"max_rows", o->max_rows}, {"pass_tokens", o->pass_tokens}};
    for (uint32_t l = 0; l < o->spec->n_layers; l++) {
        const cl_layer_spec *layer = &o->spec->layers[l];
        for (int i = 0; layer->ffn == CL_FFN_MOE && i < 2; i++)
            if ((uint64_t)batches[i].tokens * layer->top_k > UINT32_MAX)
                return cl_fail(err, CL_INVALID, "option %s is %u, must be 1..%u: layer %u takes %u experts for each",
                               batches[i].name, batches[i].tokens, UINT32_MAX / layer->top_k, l, layer->top_k);
    }
    return CL_OK;
}

int cl_spec_check(const cl_model_options *options, cl_error *err) {
    const cl_spec *s = options->spec;
    check c = {err, -1, CL_OK};
    check_model(&c, s);
    for (uint32_t i = 0; !c.code && i < s->n_ropes; i++) check_rope(&c, &s->ropes[i]);
    for (uint32_t l = 0; !c.code && l < s->n_layers; l++) {
        c.layer = (int32_t)l;
        check_layer(&c, &s->layers[l], s);
    }
    if (!c.code) c.code = check_options(options, err);
    return c.code ? c.code : check_pairs(options, err);
}

/* ---- expert layers ---- */

static const char *const part_names[CL_PARTS] = {"gate", "up", "down"};

static int check_parts(const cl_expert_layer *e, const cl_layer_spec *l, uint32_t hidden, cl_error *err) {
    uint64_t end = 0;
    for (uint32_t i = 0; i < CL_PARTS; i++) {
        const cl_part *p = &e->parts[i];
        uint64_t rows = i == CL_PART_DOWN ? hidden : l->expert_intermediate_size;
        uint64_t cols = i == CL_PART_DOWN ? l->expert_intermediate_size : hidden, bytes;
        if (p->rows != rows || p->cols != cols)
            return cl_fail(err, CL_INVALID, "layer %u experts: %s is [%llu, %llu], the spec wants [%llu, %llu]",
                           e->layer, part_names[i], (unsigned long long)p->rows, (unsigned long long)p->cols,
                           (unsigned long long)rows, (unsigned long long)cols);
        cl_error inner = {0};
        int code = cl_tiles_bytes(&p->format, rows, cols, &bytes, &inner);
        if (code) return cl_fail(err, code, "layer %u experts: %s: %s", e->layer, part_names[i], inner.text);
        if (p->bytes != bytes || p->offset % CL_PART_ALIGN || p->offset < end || p->offset > e->record_bytes ||
            bytes > e->record_bytes - p->offset)
            return cl_fail(err, CL_INVALID,
                           "layer %u experts: %s of %llu bytes at %llu does not fit a record of %llu bytes", e->layer,
                           part_names[i], (unsigned long long)p->bytes, (unsigned long long)p->offset,
                           (unsigned long long)e->record_bytes);
        end = p->offset + bytes;
    }
    return CL_OK;
}

static int check_extent(const cl_model_options *o, const cl_expert_layer *e, uint32_t expert, const cl_extent *x,
                        uint64_t expected_offset, cl_error *err) {
    const char *what = NULL;
    if (x->stripe >= o->n_stripes) what = "names a stripe that is not there";
    else if (x->bytes == 0 || (x->bytes | x->file_offset | x->record_offset) % CL_ALIGN)
        what = "is not aligned to 4096";
    else if (x->record_offset != expected_offset || x->bytes > e->record_bytes - expected_offset)
        what = "does not continue the record";
    else if (x->file_offset < CL_ALIGN || x->file_offset > o->stripes[x->stripe].bytes ||
             x->bytes > o->stripes[x->stripe].bytes - x->file_offset)
        what = "lies outside its stripe file";
    if (!what) return CL_OK;
    return cl_fail(err, CL_INVALID, "layer %u expert %u: the extent of %llu bytes at offset %llu of stripe %u %s",
                   e->layer, expert, (unsigned long long)x->bytes, (unsigned long long)x->file_offset, x->stripe,
                   what);
}

static int check_extents(const cl_model_options *o, const cl_expert_layer *e, cl_error *err) {
    if (e->record_bytes == 0 || e->record_bytes % CL_ALIGN || e->extents_per_record == 0)
        return cl_fail(err, CL_INVALID, "layer %u experts: record_bytes %llu, extents_per_record %u", e->layer,
                       (unsigned long long)e->record_bytes, e->extents_per_record);
    for (uint32_t expert = 0; expert < e->experts; expert++) {
        uint64_t at = 0;
        for (uint32_t i = 0; i < e->extents_per_record; i++) {
            const cl_extent *x = &e->extents[(uint64_t)expert * e->extents_per_record + i];
            int code = check_extent(o, e, expert, x, at, err);
            if (code) return code;
            at += x->bytes;
        }
        if (at != e->record_bytes)
            return cl_fail(err, CL_INVALID, "layer %u expert %u: its extents cover %llu of %llu bytes", e->layer,
                           expert, (unsigned long long)at, (unsigned long long)e->record_bytes);
    }
    return CL_OK;
}

int cl_expert_layers_check(const cl_model_options *o, cl_error *err) {
    uint32_t at = 0;
    for (uint32_t l = 0; l < o->spec->n_layers; l++) {
        const cl_layer_spec *layer = &o->spec->layers[l];
        if (layer->ffn != CL_FFN_MOE) continue;
        if (at == o->n_expert_layers || o->expert_layers[at].layer != l)
            return cl_fail(err, CL_INVALID, "layer %u is a MoE layer of the spec, but its expert layer is missing", l);
        const cl_expert_layer *e = &o->expert_layers[at++];
        if (e->experts != layer->experts)
            return cl_fail(err, CL_INVALID, "layer %u experts: there are %u, the spec wants %u", l, e->experts,
                           layer->experts);
        int code = check_parts(e, layer, o->spec->hidden_size, err);
        if (!code) code = check_extents(o, e, err);
        if (code) return code;
    }
    if (at < o->n_expert_layers)
        return cl_fail(err, CL_INVALID, "expert layer %u is not a MoE layer of the spec", o->expert_layers[at].layer);
    return CL_OK;
}
