/* experts.c - the routed experts of a layer: which token wants which, and their arithmetic on records in memory.
 *
 * Owns the router's check and the three products of an expert. Refuses to fetch anything: jobs come with their record.
 * A job's results lie at its own pairs, so the order in which experts arrive cannot change a sum.
 */
#include "model.h"

typedef struct route_job {
    cl_model *m;
    const cl_layer *layer;
    uint32_t *ids;
    float *weights;
    uint8_t *bad;
} route_job;

static void route_rows(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    const route_job *job = context;
    const cl_layer_spec *s = &job->layer->spec;
    for (uint64_t i = begin; i < end; i++) {
        const float *logits = job->m->work.router_logits + i * s->experts;
        job->bad[i] = !cl_all_finite(logits, s->experts);
        if (job->bad[i]) continue;
        cl_route(s, logits, job->layer->weights[CL_ROLE_ROUTER_SELECT_BIAS].vector, job->ids + i * s->top_k,
                 job->weights + i * s->top_k, job->m->work.route_scratch + i * 2 * s->experts);
    }
}

void cl_experts_route(cl_model *m, uint32_t layer, cl_inputs *input, uint64_t n, uint32_t *ids, float *weights,
                      uint8_t *bad) {
    const cl_layer *l = &m->layers[layer];
    cl_product p =
        cl_product_of(m, &l->weights[CL_ROLE_ROUTER], input, m->work.router_logits, l->spec.experts);
    cl_products(m, &p, 1);
    route_job job = {m, l, ids, weights, bad};
    cl_pool_run(m->pool, n, 1 + 4096 / l->spec.experts, route_rows, &job);
    cl_tick(m);
}

void cl_experts_begin(cl_model *m, uint32_t layer, uint64_t pairs) {
    uint64_t width = m->layers[layer].spec.expert_intermediate_size;
    cl_inputs_begin(&m->work.inner, m->work.gate, width, pairs, width);
    cl_inputs_place(m, &m->work.inner, &m->layers[layer].parts[CL_PART_DOWN].format);
}

typedef struct inner_job {
    cl_model *m;
    cl_acts *acts;
    uint64_t width;
} inner_job;

static void silu_and_quantize(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    const inner_job *job = context;
    cl_work *work = &job->m->work;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t pair = work->wave[i];
        float *gate = work->gate + pair * job->width;
        job->m->kernels->silu_mul(gate, work->up + pair * job->width, job->width, gate);
        if (job->acts->format != CL_ACTIVATION_F32)
            job->m->kernels->quantize(job->acts, work->gate, job->width, pair, 1);
    }
}

static cl_matrix part_of(const cl_layer *l, uint32_t part, const uint8_t *record) {
    const cl_part *p = &l->parts[part];
    cl_matrix matrix;
    cl_matrix_init(&matrix, &p->format, p->rows, p->cols, record + p->offset, NULL); /* checked at open */
    return matrix;
}

void cl_experts_run(cl_model *m, uint32_t layer, const cl_expert_job *jobs, uint32_t n) {
    const cl_layer *l = &m->layers[layer];
    cl_work *work = &m->work;
    uint64_t width = l->spec.expert_intermediate_size, hidden = m->spec.hidden_size, pairs = 0;
    const cl_acts *gate_in = cl_inputs_for(m, &work->input, &l->parts[CL_PART_GATE].format);
    const cl_acts *up_in = cl_inputs_for(m, &work->input, &l->parts[CL_PART_UP].format);
    cl_acts *down_in = cl_inputs_place(m, &work->inner, &l->parts[CL_PART_DOWN].format);
    for (uint32_t j = 0; j < n; j++) {
        const cl_expert_job *job = &jobs[j];
        cl_matrix *matrices = work->matrices + 3 * j;
        for (uint32_t part = 0; part < CL_PARTS; part++) matrices[part] = part_of(l, part, job->record);
        work->products[2 * j] = (cl_product){&matrices[CL_PART_GATE],        gate_in, job->tokens, job->n,
                                             work->gate + job->pair * width, width,   0,           0};
        work->products[2 * j + 1] =
            (cl_product){&matrices[CL_PART_UP], up_in, job->tokens, job->n, work->up + job->pair * width, width, 0, 0};
        for (uint64_t i = 0; i < job->n; i++) work->wave[pairs++] = (uint32_t)(job->pair + i);
    }
    cl_products(m, work->products, 2 * n);
    inner_job inner = {m, down_in, width};
    cl_pool_run(m->pool, pairs, 1 + 8192 / width, silu_and_quantize, &inner);
    for (uint32_t j = 0; j < n; j++)
        work->products[j] = (cl_product){work->matrices + 3 * j + CL_PART_DOWN,
                                         down_in,
                                         work->iota + jobs[j].pair,
                                         jobs[j].n,
                                         work->pair_out + jobs[j].pair * hidden,
                                         hidden,
                                         0,
                                         0};
    cl_products(m, work->products, n);
    cl_count(&m->counters.heartbeat, n);
}
