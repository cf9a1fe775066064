/* attention.c - grouped-query attention over the paged KV of each token's own sequence.
 *
 * Owns the order q/k/v (+ bias), q/k norm, clamp, rope, append, attend, o (+ bias), residual. The keys and values of
 * all tokens of the batch are written before any of them is attended to; a token sees the positions up to its own.
 * Blocks of 64 positions are reduced each by itself and merged in ascending order, whatever the batch
 * (docs/numerics.md).
 */
#include "model.h"
#include <math.h>
#include <string.h>

typedef struct attention_job {
    cl_model *m;
    const cl_layer *layer;
    const cl_kv_layer *kv;
    const cl_batch *batch;
    uint64_t q_width, kv_width;
} attention_job;

static void add_bias(const cl_weight *bias, float *x, uint64_t n) {
    if (!bias->vector) return;
    for (uint64_t i = 0; i < n; i++) x[i] += bias->vector[i];
}

static void qk_norm(const attention_job *job, const cl_weight *norm, float *x, uint64_t heads) {
    const cl_layer_spec *s = &job->layer->spec;
    const cl_spec *spec = &job->m->spec;
    if (s->qk_norm == CL_QK_NORM_NONE) return;
    uint64_t width = s->qk_norm == CL_QK_NORM_HEAD ? s->head_dim : heads * s->head_dim;
    for (uint64_t at = 0; at < heads * s->head_dim; at += width)
        job->m->kernels->rmsnorm(x + at, norm->vector, spec->norm_weight_offset, spec->norm_eps, width, x + at);
}

static void clamp(float limit, float *x, uint64_t n) {
    if (limit == 0) return;
    for (uint64_t i = 0; i < n; i++) x[i] = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
}

static uint8_t *kv_plane(const attention_job *job, const cl_seq *seq, uint64_t page, uint64_t head) {
    return seq->pages[page] + job->kv->offset + 2 * head * job->kv->head_bytes;
}

static void append(const attention_job *job, const cl_seq *seq, uint64_t position, const float *k, const float *v) {
    uint64_t dim = job->layer->spec.head_dim, page = position / CL_KV_PAGE_POSITIONS;
    uint64_t at = position % CL_KV_PAGE_POSITIONS * dim;
    for (uint64_t head = 0; head < job->layer->spec.kv_heads; head++) {
        uint8_t *keys = kv_plane(job, seq, page, head), *values = keys + job->kv->head_bytes;
        if (job->m->kv.dtype == CL_KV_F16) {
            job->m->kernels->to_f16(k + head * dim, dim, (uint16_t *)keys + at);
            job->m->kernels->to_f16(v + head * dim, dim, (uint16_t *)values + at);
        } else {
            memcpy((float *)keys + at, k + head * dim, dim * sizeof(float));
            memcpy((float *)values + at, v + head * dim, dim * sizeof(float));
        }
    }
}

/* From the raw projections of a token to its rotated query and its keys and values in the page. */
static void finish_projections(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    const attention_job *job = context;
    cl_model *m = job->m;
    const cl_layer_spec *s = &job->layer->spec;
    const cl_weight *w = job->layer->weights;
    const cl_rope_spec *rope = &m->spec.ropes[s->rope];
    for (uint64_t i = begin; i < end; i++) {
        float *q = m->work.q + i * job->q_width, *k = m->work.k + i * job->kv_width,
              *v = m->work.v + i * job->kv_width;
        float *cosine = m->work.cosine + i * (rope->dims / 2), *sine = m->work.sine + i * (rope->dims / 2);
        add_bias(&w[CL_ROLE_Q_BIAS], q, job->q_width);
        add_bias(&w[CL_ROLE_K_BIAS], k, job->kv_width);
        add_bias(&w[CL_ROLE_V_BIAS], v, job->kv_width);
        qk_norm(job, &w[CL_ROLE_Q_NORM], q, s->heads);
        qk_norm(job, &w[CL_ROLE_K_NORM], k, s->kv_heads);
        clamp(s->clip_qkv, q, job->q_width);
        clamp(s->clip_qkv, k, job->kv_width);
        clamp(s->clip_qkv, v, job->kv_width);
        cl_rope_table(rope->inv_freq, rope->dims / 2, rope->attention_factor, job->batch->positions[i], cosine, sine);
        cl_rope_half(q, s->heads, s->head_dim, rope->dims, cosine, sine);
        cl_rope_half(k, s->kv_heads, s->head_dim, rope->dims, cosine, sine);
        append(job, job->batch->seqs[i], job->batch->positions[i], k, v);
    }
}

/* The query heads of one token that share a KV head, over all blocks up to the token's position. */
static void attend_group(const attention_job *job, uint64_t token, uint64_t kv_head, float *scratch) {
    const cl_layer_spec *s = &job->layer->spec;
    const cl_seq *seq = job->batch->seqs[token];
    uint64_t group = s->heads / s->kv_heads, dim = s->head_dim;
    float *max = scratch, *sum = max + group, *acc = sum + group;
    float *b_max = acc + group * dim, *b_sum = b_max + group, *b_acc = b_sum + group;
    const float *q = job->m->work.q + token * job->q_width + kv_head * group * dim;
    float *out = job->m->work.attended + token * job->q_width + kv_head * group * dim;
    for (uint64_t g = 0; g < group; g++) max[g] = -INFINITY;
    memset(sum, 0, group * sizeof *sum);
    memset(acc, 0, group * dim * sizeof *acc);
    uint64_t left = job->batch->positions[token] + 1;
    for (uint64_t page = 0; left > 0; page++) {
        uint64_t positions = left < CL_KV_PAGE_POSITIONS ? left : CL_KV_PAGE_POSITIONS;
        const uint8_t *keys = kv_plane(job, seq, page, kv_head);
        job->m->kernels->attend_block(q, dim, group, dim, keys, keys + job->kv->head_bytes, job->m->kv.dtype,
                                      positions, s->attention_scale, b_max, b_sum, b_acc, dim);
        for (uint64_t g = 0; g < group; g++)
            cl_attend_merge(&max[g], &sum[g], acc + g * dim, dim, b_max[g], b_sum[g], b_acc + g * dim);
        left -= positions;
    }
    for (uint64_t g = 0; g < group; g++) cl_attend_finish(acc + g * dim, sum[g], dim, out + g * dim);
}

static void attend(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    const attention_job *job = context;
    uint64_t kv_heads = job->layer->spec.kv_heads;
    float *scratch = job->m->work.attend + thread * job->m->work.attend_floats;
    for (uint64_t i = begin; i < end; i++) attend_group(job, i / kv_heads, i % kv_heads, scratch);
}

void cl_attention(cl_model *m, uint32_t index, const cl_batch *batch) {
    const cl_layer *layer = &m->layers[index];
    const cl_weight *w = layer->weights;
    cl_work *work = &m->work;
    attention_job job = {m,
                         layer,
                         &m->kv.layers[index],
                         batch,
                         (uint64_t)layer->spec.heads * layer->spec.head_dim,
                         (uint64_t)layer->spec.kv_heads * layer->spec.head_dim};
    cl_norm_rows(m, &w[CL_ROLE_ATTENTION_NORM], batch->h, batch->n, work->x);
    cl_inputs_begin(&work->input, work->x, m->spec.hidden_size, batch->n, m->spec.hidden_size);
    cl_product qkv[3] = {cl_product_of(m, &w[CL_ROLE_Q], &work->input, work->q, job.q_width),
                         cl_product_of(m, &w[CL_ROLE_K], &work->input, work->k, job.kv_width),
                         cl_product_of(m, &w[CL_ROLE_V], &work->input, work->v, job.kv_width)};
    cl_products(m, qkv, 3);
    cl_pool_run(m->pool, batch->n, 1, finish_projections, &job);
    cl_pool_run(m->pool, batch->n * layer->spec.kv_heads, 1, attend, &job);

    cl_inputs_begin(&work->inner, work->attended, job.q_width, batch->n, job.q_width);
    cl_product o = cl_product_of(m, &w[CL_ROLE_O], &work->inner, work->out, m->spec.hidden_size);
    cl_products(m, &o, 1);
    for (uint64_t i = 0; i < batch->n; i++)
        add_bias(&w[CL_ROLE_O_BIAS], work->out + i * m->spec.hidden_size, m->spec.hidden_size);
    cl_residual(m, batch->h, work->out, batch->n);
    cl_tick(m);
}
