/* dense.c - the dense tensors: what the spec asks for, where each goes in memory, and how it gets there.
 *
 * Owns the table of roles. A tensor is read from dense.safetensors in pieces of a few MiB, checksummed, and tiled on
 * all threads straight into its place in the arena; nothing is ever in memory twice but the piece at hand. Refuses
 * tensors that are missing, doubled, misshapen or not wanted, by layer and role.
 */
#include "error.h"
#include "fpmode.h"
#include "model.h"
#include "reader.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_BYTES (4u << 20)
#define TILES_PER_RUN 16

typedef struct cl_tensor {
    cl_dense_tensor description;
    uint8_t *tiles; /* of a matrix */
    float *vector;
} cl_tensor;

static const char *const role_names[CL_ROLES] = {
    [CL_ROLE_EMBEDDING] = "embedding",
    [CL_ROLE_HEAD] = "head",
    [CL_ROLE_FINAL_NORM] = "final_norm",
    [CL_ROLE_HEAD_BIAS] = "head_bias",
    [CL_ROLE_ATTENTION_NORM] = "attention_norm",
    [CL_ROLE_Q] = "q",
    [CL_ROLE_K] = "k",
    [CL_ROLE_V] = "v",
    [CL_ROLE_O] = "o",
    [CL_ROLE_Q_BIAS] = "q_bias",
    [CL_ROLE_K_BIAS] = "k_bias",
    [CL_ROLE_V_BIAS] = "v_bias",
    [CL_ROLE_O_BIAS] = "o_bias",
    [CL_ROLE_Q_NORM] = "q_norm",
    [CL_ROLE_K_NORM] = "k_norm",
    [CL_ROLE_FFN_NORM] = "ffn_norm",
    [CL_ROLE_FFN_GATE] = "ffn_gate",
    [CL_ROLE_FFN_UP] = "ffn_up",
    [CL_ROLE_FFN_DOWN] = "ffn_down",
    [CL_ROLE_ROUTER] = "router",
    [CL_ROLE_ROUTER_SELECT_BIAS] = "router_select_bias",
    [CL_ROLE_SHARED_GATE] = "shared_gate",
    [CL_ROLE_SHARED_UP] = "shared_up",
    [CL_ROLE_SHARED_DOWN] = "shared_down",
    [CL_ROLE_SHARED_OUTPUT_GATE] = "shared_output_gate",
};

static void tensor_name(int32_t layer, int32_t role, char name[48]) {
    if (layer < 0) snprintf(name, 48, "%s", role_names[role]);
    else snprintf(name, 48, "layers.%d.%s", layer, role_names[role]);
}

/* ---- what the spec asks for ---- */

typedef enum need { ABSENT, OPTIONAL, REQUIRED } need;
typedef struct shape {
    need need;
    uint32_t exact; /* must be f32: vectors and the router */
    uint32_t is_vector;
    uint64_t rows, cols;
} shape;

static shape matrix(int wanted, uint64_t rows, uint64_t cols) {
    return (shape){wanted ? REQUIRED : ABSENT, 0, 0, rows, cols};
}

static shape vector(int wanted, uint64_t cols) { return (shape){wanted ? REQUIRED : ABSENT, 1, 1, 1, cols}; }

static shape bias(uint64_t cols) { return (shape){OPTIONAL, 1, 1, 1, cols}; }

static shape model_shape(const cl_spec *s, int32_t role) {
    switch (role) {
    case CL_ROLE_EMBEDDING: return matrix(1, s->vocab_size, s->hidden_size);
    case CL_ROLE_HEAD: return matrix(!s->tied_embeddings, s->vocab_size, s->hidden_size);
    case CL_ROLE_FINAL_NORM: return vector(1, s->hidden_size);
    case CL_ROLE_HEAD_BIAS: return bias(s->vocab_size);
    default: return matrix(0, 0, 0);
    }
}

static shape attention_shape(const cl_spec *s, const cl_layer_spec *l, int32_t role) {
    uint64_t hidden = s->hidden_size, q = (uint64_t)l->heads * l->head_dim, kv = (uint64_t)l->kv_heads * l->head_dim;
    int full = l->qk_norm == CL_QK_NORM_FULL, any = l->qk_norm != CL_QK_NORM_NONE;
    switch (role) {
    case CL_ROLE_ATTENTION_NORM: return vector(1, hidden);
    case CL_ROLE_Q: return matrix(1, q, hidden);
    case CL_ROLE_K: return matrix(1, kv, hidden);
    case CL_ROLE_V: return matrix(1, kv, hidden);
    case CL_ROLE_O: return matrix(1, hidden, q);
    case CL_ROLE_Q_BIAS: return bias(q);
    case CL_ROLE_K_BIAS: return bias(kv);
    case CL_ROLE_V_BIAS: return bias(kv);
    case CL_ROLE_O_BIAS: return bias(hidden);
    case CL_ROLE_Q_NORM: return vector(any, full ? q : l->head_dim);
    case CL_ROLE_K_NORM: return vector(any, full ? kv : l->head_dim);
    default: return matrix(0, 0, 0);
    }
}

static shape ffn_shape(const cl_spec *s, const cl_layer_spec *l, int32_t role) {
    uint64_t hidden = s->hidden_size, dense = l->intermediate_size, shared = l->shared_intermediate_size;
    int moe = l->ffn == CL_FFN_MOE, has_shared = moe && shared;
    switch (role) {
    case CL_ROLE_FFN_NORM: return vector(1, hidden);
    case CL_ROLE_FFN_GATE: return matrix(!moe, dense, hidden);
    case CL_ROLE_FFN_UP: return matrix(!moe, dense, hidden);
    case CL_ROLE_FFN_DOWN: return matrix(!moe, hidden, dense);
    case CL_ROLE_ROUTER: return (shape){moe ? REQUIRED : ABSENT, 1, 0, l->experts, hidden};
    case CL_ROLE_ROUTER_SELECT_BIAS: return vector(moe && l->select_bias, l->experts);
    case CL_ROLE_SHARED_GATE: return matrix(has_shared, shared, hidden);
    case CL_ROLE_SHARED_UP: return matrix(has_shared, shared, hidden);
    case CL_ROLE_SHARED_DOWN: return matrix(has_shared, hidden, shared);
    case CL_ROLE_SHARED_OUTPUT_GATE: return matrix(has_shared && l->shared_output_gate, 1, hidden);
    default: return matrix(0, 0, 0);
    }
}

static shape shape_of(const cl_spec *s, int32_t layer, int32_t role) {
    if (layer < 0) return model_shape(s, role);
    if (role >= CL_ROLE_FFN_NORM) return ffn_shape(s, &s->layers[layer], role);
    return attention_shape(s, &s->layers[layer], role);
}

/* ---- checks ---- */

static int check_blobs(const cl_dense_tensor *t, const char *name, cl_error *err) {
    uint64_t codes, scales, mins;
    cl_error inner = {0};
    int code = cl_rows_bytes(&t->format, t->rows, t->cols, &codes, &scales, &mins, &inner);
    if (code) return cl_fail(err, code, "tensor %s: %s", name, inner.text);
    const cl_blob *blobs[3] = {&t->codes, &t->scales, &t->mins};
    const uint64_t want[3] = {codes, scales, mins};
    static const char *const kinds[3] = {"codes", "scales", "mins"};
    for (int i = 0; i < 3; i++)
        if (blobs[i]->bytes != want[i] || blobs[i]->offset > INT64_MAX - blobs[i]->bytes)
            return cl_fail(err, CL_INVALID, "tensor %s: %s have %llu bytes at offset %llu, its shape wants %llu", name,
                           kinds[i], (unsigned long long)blobs[i]->bytes, (unsigned long long)blobs[i]->offset,
                           (unsigned long long)want[i]);
    return CL_OK;
}

static int check_tensor(const cl_spec *s, const cl_dense_tensor *t, uint8_t *seen, cl_error *err) {
    if (t->role <= 0 || t->role >= CL_ROLES || !role_names[t->role])
        return cl_fail(err, CL_INVALID, "layer %d: tensor role %d is not known to this build", t->layer, t->role);
    if (t->layer < -1 || t->layer >= (int32_t)s->n_layers)
        return cl_fail(err, CL_INVALID, "tensor %s: layer %d is not in -1..%u", role_names[t->role], t->layer,
                       s->n_layers - 1);
    char name[48];
    tensor_name(t->layer, t->role, name);
    shape want = shape_of(s, t->layer, t->role);
    if (want.need == ABSENT) return cl_fail(err, CL_INVALID, "tensor %s is not part of the spec", name);
    uint8_t *mark = &seen[(uint64_t)(t->layer + 1) * CL_ROLES + (uint64_t)t->role];
    if (*mark) return cl_fail(err, CL_INVALID, "tensor %s is there twice", name);
    *mark = 1;
    if (t->rows != want.rows || t->cols != want.cols)
        return cl_fail(err, CL_INVALID, "tensor %s is [%llu, %llu], the spec wants [%llu, %llu]", name,
                       (unsigned long long)t->rows, (unsigned long long)t->cols, (unsigned long long)want.rows,
                       (unsigned long long)want.cols);
    if (want.exact && t->format.codes != CL_CODES_F32)
        return cl_fail(err, CL_UNSUPPORTED, "tensor %s must be f32", name);
    return check_blobs(t, name, err);
}

static int check_complete(const cl_spec *s, const uint8_t *seen, cl_error *err) {
    for (int32_t layer = -1; layer < (int32_t)s->n_layers; layer++)
        for (int32_t role = 1; role < CL_ROLES; role++) {
            if (!role_names[role] || shape_of(s, layer, role).need != REQUIRED) continue;
            if (seen[(uint64_t)(layer + 1) * CL_ROLES + (uint64_t)role]) continue;
            char name[48];
            tensor_name(layer, role, name);
            return cl_fail(err, CL_INVALID, "tensor %s is missing", name);
        }
    return CL_OK;
}

int cl_dense_check(const cl_model_options *options, cl_error *err) {
    const cl_spec *s = options->spec;
    uint8_t *seen = calloc((uint64_t)s->n_layers + 1, CL_ROLES);
    if (!seen) return cl_fail(err, CL_NOMEM, "no memory to check the tensors");
    int code = CL_OK;
    for (uint64_t i = 0; i < options->n_dense && !code; i++) code = check_tensor(s, &options->dense[i], seen, err);
    if (!code) code = check_complete(s, seen, err);
    free(seen);
    return code;
}

/* ---- places ---- */

void cl_dense_place(cl_model *m, cl_carve *tables, cl_carve *weights, const cl_model_options *options) {
    m->n_tensors = options->n_dense;
    m->tensors = cl_carve_take(tables, m->n_tensors, sizeof *m->tensors, 64);
    for (uint64_t i = 0; i < options->n_dense; i++) {
        const cl_dense_tensor *d = &options->dense[i];
        cl_tensor t = {.description = *d};
        cl_weight weight = {0};
        if (shape_of(options->spec, d->layer, d->role).is_vector) {
            weight.vector = t.vector = cl_carve_take(weights, d->cols, sizeof *t.vector, 64);
        } else {
            uint64_t bytes = 0;
            cl_tiles_bytes(&d->format, d->rows, d->cols, &bytes, NULL); /* checked by cl_dense_check */
            t.tiles = cl_carve_take(weights, bytes, 1, 64);
            cl_matrix_init(&weight.matrix, &d->format, d->rows, d->cols, t.tiles, NULL);
        }
        if (!m->tensors) continue;
        m->tensors[i] = t;
        if (d->layer < 0) m->weights[d->role] = weight;
        else m->layers[d->layer].weights[d->role] = weight;
    }
}

/* ---- loading ---- */

typedef struct loader {
    cl_model *m;
    cl_reader *reader;
    const cl_tensor *tensor;
    char name[48];
    uint64_t codes_row, scales_row, mins_row; /* bytes of one row */
    uint8_t *codes, *scales, *mins;           /* the piece at hand */
    uint64_t rows;                            /* in it */
    uint8_t *tiles;                           /* where its tiles go */
    uint64_t tile_bytes;
    uint32_t crc[3];
    _Atomic uint32_t failed;
} loader;

static int read_blob(loader *l, const cl_blob *blob, int kind, uint64_t at, uint8_t *data, uint64_t bytes,
                     cl_error *err) {
    uint64_t done;
    int failed = cl_reader_read(l->reader, data, bytes, blob->offset + at, &done);
    if (failed == ENODATA)
        return cl_fail(err, CL_CORRUPT, "%s ends at offset %llu, inside tensor %s", l->m->dense_path,
                       (unsigned long long)(blob->offset + at + done), l->name);
    if (failed)
        return cl_fail(err, CL_IO, "%s: reading tensor %s at offset %llu failed: %s (errno %d)", l->m->dense_path,
                       l->name, (unsigned long long)(blob->offset + at + done), strerror(failed), failed);
    l->crc[kind] = cl_crc32c(l->crc[kind], data, bytes);
    cl_count(&l->m->counters.load_bytes_done, bytes);
    cl_tick(l->m);
    return CL_OK;
}

static void tile_runs(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    loader *l = context;
    const cl_dense_tensor *d = &l->tensor->description;
    uint64_t row = begin * CL_TILE_ROWS, stop = end * CL_TILE_ROWS < l->rows ? end * CL_TILE_ROWS : l->rows;
    if (cl_tile_rows(&d->format, l->codes + row * l->codes_row, l->scales + row * l->scales_row,
                     l->mins + row * l->mins_row, stop - row, d->cols, l->tiles + begin * l->tile_bytes,
                     (end - begin) * l->tile_bytes, NULL))
        atomic_store(&l->failed, 1);
}

static int load_rows(loader *l, uint64_t row, uint64_t rows, cl_error *err) {
    const cl_dense_tensor *d = &l->tensor->description;
    int code = read_blob(l, &d->codes, 0, row * l->codes_row, l->codes, rows * l->codes_row, err);
    if (!code) code = read_blob(l, &d->scales, 1, row * l->scales_row, l->scales, rows * l->scales_row, err);
    if (!code) code = read_blob(l, &d->mins, 2, row * l->mins_row, l->mins, rows * l->mins_row, err);
    if (code) return code;
    l->rows = rows;
    l->tiles = l->tensor->tiles + row / CL_TILE_ROWS * l->tile_bytes;
    cl_pool_run(l->m->pool, (rows + CL_TILE_ROWS - 1) / CL_TILE_ROWS, TILES_PER_RUN, tile_runs, l);
    if (atomic_load(&l->failed)) return cl_fail(err, CL_CORRUPT, "tensor %s could not be tiled", l->name);
    return CL_OK;
}

static int load_matrix(loader *l, cl_error *err) {
    const cl_dense_tensor *d = &l->tensor->description;
    cl_matrix shape;
    cl_matrix_init(&shape, &d->format, d->rows, d->cols, NULL, NULL);
    cl_rows_bytes(&d->format, 1, d->cols, &l->codes_row, &l->scales_row, &l->mins_row, NULL);
    l->tile_bytes = shape.tile_bytes;
    uint64_t row_bytes = l->codes_row + l->scales_row + l->mins_row;
    uint64_t piece = PIECE_BYTES / row_bytes / CL_TILE_ROWS * CL_TILE_ROWS;
    if (piece == 0) piece = CL_TILE_ROWS;
    if (piece > d->rows) piece = d->rows;
    l->codes = malloc(piece * row_bytes);
    if (!l->codes) return cl_fail(err, CL_NOMEM, "no memory to read tensor %s", l->name);
    l->scales = l->codes + piece * l->codes_row;
    l->mins = l->scales + piece * l->scales_row;
    int code = CL_OK;
    for (uint64_t row = 0; row < d->rows && !code; row += piece)
        code = load_rows(l, row, d->rows - row < piece ? d->rows - row : piece, err);
    free(l->codes);
    return code;
}

static int check_sums(const loader *l, cl_error *err) {
    const cl_dense_tensor *d = &l->tensor->description;
    const cl_blob *blobs[3] = {&d->codes, &d->scales, &d->mins};
    static const char *const kinds[3] = {"codes", "scales", "mins"};
    for (int i = 0; i < 3; i++) {
        if (blobs[i]->bytes == 0 || l->crc[i] == blobs[i]->crc32c) continue;
        cl_count(&l->m->counters.checksum_errors, 1);
        return cl_fail(err, CL_CORRUPT, "%s: tensor %s: %s (%llu bytes at offset %llu) fail their checksum",
                       l->m->dense_path, l->name, kinds[i], (unsigned long long)blobs[i]->bytes,
                       (unsigned long long)blobs[i]->offset);
    }
    return CL_OK;
}

static int load_tensor(cl_model *m, cl_reader *reader, const cl_tensor *tensor, cl_error *err) {
    const cl_dense_tensor *d = &tensor->description;
    loader l = {.m = m, .reader = reader, .tensor = tensor};
    tensor_name(d->layer, d->role, l.name);
    int code = tensor->vector ? read_blob(&l, &d->codes, 0, 0, (uint8_t *)tensor->vector, d->codes.bytes, err)
                              : load_matrix(&l, err);
    return code ? code : check_sums(&l, err);
}

static int load_all(cl_model *m, cl_error *err) {
    cl_reader reader;
    int code = cl_reader_open(&reader, m->dense_path, m->direct, err);
    if (code) return code;
    for (uint64_t i = 0; i < m->n_tensors && !code; i++) code = load_tensor(m, &reader, &m->tensors[i], err);
    cl_reader_close(&reader);
    return code;
}

int cl_model_load(cl_model *m, cl_error *err) {
    cl_ok(err);
    if (m->loaded) return cl_fail(err, CL_INVALID, "the model has been loaded already");
    uint64_t total = 0;
    for (uint64_t i = 0; i < m->n_tensors; i++) {
        const cl_dense_tensor *d = &m->tensors[i].description;
        total += d->codes.bytes + d->scales.bytes + d->mins.bytes;
    }
    atomic_store(&m->counters.load_bytes_total, total);
    uint32_t mode = cl_fpmode_enter();
    int code = load_all(m, err);
    cl_fpmode_leave(mode);
    m->loaded = code ? 2 : 1;
    return code;
}
