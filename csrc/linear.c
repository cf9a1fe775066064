/* linear.c - what every block of the forward pass is made of: quantised activations, matrix products, norms,
 * residuals.
 *
 * Owns the division of that work between threads, always by outputs (tiles of a matrix, tokens), never inside a sum,
 * so the thread count cannot change a bit. Refuses to know what a matrix means.
 */
#include "model.h"
#include <string.h>

#define PIECE_BYTES (192u << 10) /* of weights: large beside a fork-join, small beside a layer */
#define PIECE_FLOATS (16u << 10) /* of activations */

static uint64_t rows_per_piece(uint64_t cols) {
    uint64_t rows = PIECE_FLOATS / (cols ? cols : 1);
    return rows ? rows : 1;
}

/* ---- activations ---- */

void cl_inputs_begin(cl_inputs *in, const float *x, uint64_t stride, uint64_t n, uint64_t cols) {
    in->made = 0;
    in->x = x;
    in->stride = stride;
    in->n = n;
    in->cols = cols;
}

static int is_plain(const cl_format *format) {
    return format->codes == CL_CODES_F32 || format->codes == CL_CODES_BF16;
}

static uint32_t kind_of(const cl_model *m, const cl_format *format) {
    if (is_plain(format)) return CL_MOST_GROUPS;
    for (uint32_t i = 0; i < m->n_group_sizes; i++)
        if (m->group_sizes[i] == format->group_size) return i;
    return CL_MOST_GROUPS; /* not reached: cl_spec_check has listed every group size */
}

cl_acts *cl_inputs_place(cl_model *m, cl_inputs *in, const cl_format *format) {
    uint32_t kind = kind_of(m, format);
    cl_acts *acts = &in->acts[kind];
    if (in->made >> kind & 1) return acts;
    in->made |= 1u << kind;
    if (is_plain(format)) {
        cl_acts_place(acts, in->workspace[kind], CL_ACTIVATION_F32, in->n, in->cols, 0);
        m->kernels->quantize(acts, in->x, in->stride, 0, in->n); /* remembers the pointer */
    } else {
        cl_acts_place(acts, in->workspace[kind], m->activation, in->n, in->cols, format->group_size);
    }
    return acts;
}

typedef struct quantize_job {
    cl_model *m;
    cl_inputs *in;
    cl_acts *acts;
} quantize_job;

static void quantize_rows(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    quantize_job *job = context;
    job->m->kernels->quantize(job->acts, job->in->x, job->in->stride, begin, end - begin);
}

const cl_acts *cl_inputs_for(cl_model *m, cl_inputs *in, const cl_format *format) {
    uint32_t kind = kind_of(m, format);
    if (in->made >> kind & 1) return &in->acts[kind];
    quantize_job job = {m, in, cl_inputs_place(m, in, format)};
    if (!is_plain(format)) cl_pool_run(m->pool, in->n, rows_per_piece(in->cols), quantize_rows, &job);
    return job.acts;
}

/* ---- products ---- */

cl_product cl_product_of(cl_model *m, const cl_weight *w, cl_inputs *in, float *y, uint64_t y_stride) {
    return (cl_product){&w->matrix, cl_inputs_for(m, in, &w->matrix.format), NULL, in->n, y, y_stride, 0, 0};
}

typedef struct products_job {
    const cl_kernels *kernels;
    const cl_product *products;
    uint32_t n;
} products_job;

static void run_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    const products_job *job = context;
    uint32_t at = 0, last = job->n - 1;
    while (at < last) { /* the last product whose first piece is <= begin */
        uint32_t middle = at + (last - at + 1) / 2;
        if (job->products[middle].first_piece <= begin) at = middle;
        else last = middle - 1;
    }
    for (uint64_t piece = begin; piece < end; piece++) {
        while (at + 1 < job->n && job->products[at + 1].first_piece <= piece) at++;
        const cl_product *p = &job->products[at];
        uint64_t tile = (piece - p->first_piece) * p->piece_tiles;
        uint64_t stop = tile + p->piece_tiles < p->w->n_tiles ? tile + p->piece_tiles : p->w->n_tiles;
        job->kernels->matmul(p->w, tile, stop, p->acts, p->index, p->n, p->y, p->y_stride);
    }
}

void cl_products(cl_model *m, cl_product *products, uint32_t n) {
    uint64_t pieces = 0;
    for (uint32_t i = 0; i < n; i++) {
        cl_product *p = &products[i];
        p->piece_tiles = PIECE_BYTES / p->w->tile_bytes;
        if (p->piece_tiles == 0) p->piece_tiles = 1;
        p->first_piece = pieces;
        pieces += (p->w->n_tiles + p->piece_tiles - 1) / p->piece_tiles;
    }
    products_job job = {m->kernels, products, n};
    if (n) cl_pool_run(m->pool, pieces, 1, run_pieces, &job);
}

/* ---- norms and residuals ---- */

typedef struct rows_job {
    cl_model *m;
    const float *weight, *from;
    float *to;
} rows_job;

static void norm_rows(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    const rows_job *job = context;
    const cl_spec *spec = &job->m->spec;
    for (uint64_t i = begin; i < end; i++)
        job->m->kernels->rmsnorm(job->from + i * spec->hidden_size, job->weight, spec->norm_weight_offset,
                                 spec->norm_eps, spec->hidden_size, job->to + i * spec->hidden_size);
}

void cl_norm_rows(cl_model *m, const cl_weight *norm, const float *h, uint64_t n, float *out) {
    rows_job job = {m, norm->vector, h, out};
    cl_pool_run(m->pool, n, rows_per_piece(m->spec.hidden_size), norm_rows, &job);
}

/* h + x and fma(scale, x, h) are the same bits at scale 1: the product is exact. */
void cl_residual(cl_model *m, float *h, const float *x, uint64_t n) {
    m->kernels->axpy(m->spec.residual_scale, x, n * m->spec.hidden_size, h);
}
