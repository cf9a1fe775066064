/* ffn.c - the feed-forward half of a layer, but for its routed experts: dense FFN, shared expert, and the sums.
 *
 * Owns the order in which a MoE layer's parts are added: experts ascending (the caller's sum), shared expert,
 * residual.
 */
#include "model.h"
#include <string.h>

typedef struct silu_job {
    cl_model *m;
    float *gate;
    const float *up;
    uint64_t width;
} silu_job;

static void silu_rows(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    const silu_job *job = context;
    for (uint64_t i = begin; i < end; i++)
        job->m->kernels->silu_mul(job->gate + i * job->width, job->up + i * job->width, job->width,
                                  job->gate + i * job->width);
}

/* out [n, hidden] = down(silu(gate x) * (up x)) for the rows of work.input */
static void gated(cl_model *m, const cl_weight *gate, const cl_weight *up, const cl_weight *down, float *out,
                  uint64_t n) {
    cl_work *work = &m->work;
    uint64_t width = gate->matrix.rows;
    cl_product in[2] = {cl_product_of(m, gate, &work->input, work->gate, width),
                        cl_product_of(m, up, &work->input, work->up, width)};
    cl_products(m, in, 2);
    silu_job job = {m, work->gate, work->up, width};
    cl_pool_run(m->pool, n, 1 + 16384 / width, silu_rows, &job);
    cl_inputs_begin(&work->inner, work->gate, width, n, width);
    cl_product product = cl_product_of(m, down, &work->inner, out, m->spec.hidden_size);
    cl_products(m, &product, 1);
}

void cl_ffn_begin(cl_model *m, uint32_t layer, const float *h, uint64_t n) {
    cl_norm_rows(m, &m->layers[layer].weights[CL_ROLE_FFN_NORM], h, n, m->work.x);
    cl_inputs_begin(&m->work.input, m->work.x, m->spec.hidden_size, n, m->spec.hidden_size);
}

void cl_ffn_dense(cl_model *m, uint32_t layer, float *h, uint64_t n) {
    const cl_weight *w = m->layers[layer].weights;
    gated(m, &w[CL_ROLE_FFN_GATE], &w[CL_ROLE_FFN_UP], &w[CL_ROLE_FFN_DOWN], m->work.out, n);
    cl_residual(m, h, m->work.out, n);
    cl_tick(m);
}

void cl_ffn_shared(cl_model *m, uint32_t layer, uint64_t n) {
    const cl_layer_spec *s = &m->layers[layer].spec;
    const cl_weight *w = m->layers[layer].weights;
    cl_work *work = &m->work;
    if (!s->shared_intermediate_size) return;
    gated(m, &w[CL_ROLE_SHARED_GATE], &w[CL_ROLE_SHARED_UP], &w[CL_ROLE_SHARED_DOWN], work->shared, n);
    if (s->shared_output_gate) {
        cl_product p = cl_product_of(m, &w[CL_ROLE_SHARED_OUTPUT_GATE], &work->input, work->output_gate, 1);
        cl_products(m, &p, 1);
    }
    for (uint64_t i = 0; i < n; i++)
        work->output_gate[i] = s->shared_output_gate ? cl_sigmoidf(work->output_gate[i]) : 1;
    cl_tick(m);
}

void cl_ffn_combine(cl_model *m, uint32_t layer, float *h, float *experts, uint64_t n) {
    uint64_t hidden = m->spec.hidden_size;
    if (m->layers[layer].spec.shared_intermediate_size)
        for (uint64_t i = 0; i < n; i++)
            m->kernels->axpy(m->work.output_gate[i], m->work.shared + i * hidden, hidden, experts + i * hidden);
    cl_residual(m, h, experts, n);
    cl_tick(m);
}
