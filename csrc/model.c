/* model.c - the two ends of the forward pass: from token ids to the residual stream, and from it to the next token.
 *
 * Between them lie the layers: cl_attention, then either cl_ffn_dense or route, experts, combine. decode.c walks them
 * for one token of many sequences, prefill.c for many tokens of one.
 */
#include "model.h"
#include "error.h"
#include <math.h>

static void scale_by(float factor, float *x, uint64_t n) {
    if (factor == 1) return;
    for (uint64_t i = 0; i < n; i++) x[i] *= factor;
}

void cl_embed(cl_model *m, const int32_t *tokens, uint64_t n, float *h) {
    uint64_t hidden = m->spec.hidden_size;
    for (uint64_t i = 0; i < n; i++)
        cl_matrix_row(&m->weights[CL_ROLE_EMBEDDING].matrix, (uint64_t)tokens[i], h + i * hidden);
    scale_by(m->spec.embedding_scale, h, n * hidden);
}

void cl_head(cl_model *m, const float *h, uint64_t n, float *logits) {
    uint64_t hidden = m->spec.hidden_size, vocab = m->spec.vocab_size;
    cl_norm_rows(m, &m->weights[CL_ROLE_FINAL_NORM], h, n, m->work.x);
    cl_inputs_begin(&m->work.input, m->work.x, hidden, n, hidden);
    const cl_weight *head = &m->weights[m->spec.tied_embeddings ? CL_ROLE_EMBEDDING : CL_ROLE_HEAD];
    cl_product p = cl_product_of(m, head, &m->work.input, logits, vocab);
    cl_products(m, &p, 1);
    const float *bias = m->weights[CL_ROLE_HEAD_BIAS].vector;
    float divisor = m->spec.logits_divisor;
    for (uint64_t i = 0; bias && i < n * vocab; i++) logits[i] += bias[i % vocab];
    for (uint64_t i = 0; divisor != 1 && i < n * vocab; i++) logits[i] /= divisor;
    cl_tick(m);
}

int cl_all_finite(const float *x, uint64_t n) {
    float sum = 0; /* x - x is 0 for numbers and NaN for the rest, and NaN stays */
    for (uint64_t i = 0; i < n; i++) sum += x[i] - x[i];
    return sum == 0;
}

int cl_sampling_check(const cl_sampling *sampling, cl_error *err) {
    if (!(sampling->temperature >= 0) || isinf(sampling->temperature))
        return cl_fail(err, CL_INVALID, "sampling: temperature is %g, must be a number >= 0",
                       (double)sampling->temperature);
    if (!(sampling->top_p > 0 && sampling->top_p <= 1))
        return cl_fail(err, CL_INVALID, "sampling: top_p is %g, must be above 0 and at most 1",
                       (double)sampling->top_p);
    return CL_OK;
}

int cl_choose(cl_model *m, const float *logits, const cl_sampling *sampling, uint64_t position, int32_t *token,
              cl_error *err) {
    if (!cl_all_finite(logits, m->spec.vocab_size))
        return cl_fail(err, CL_NONFINITE, "the logits after position %llu are not all finite",
                       (unsigned long long)(position - 1));
    *token = cl_sample(logits, m->spec.vocab_size, sampling, position, m->banned, m->work.sample_scratch);
    if (*token < 0) return cl_fail(err, CL_INVALID, "every token of the vocabulary is banned");
    return CL_OK;
}
