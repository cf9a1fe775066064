/* tiny_model.c - writes the model that tiny_model.h describes. */
#include "tiny_model.h"
#include "check.h"
#include "format.h"
#include "model.h"
#include <unistd.h>

#define HIDDEN 42
#define WIDTH 20
#define SHARED 12

typedef struct writer {
    tiny_model *t;
    FILE *file;
    uint64_t at;
    cl_format format;
} writer;

static cl_blob put(writer *w, const void *data, uint64_t bytes) {
    cl_blob blob = {w->at, bytes, cl_crc32c(0, data, bytes)};
    if (bytes) CHECK(fwrite(data, 1, bytes, w->file) == bytes);
    w->at += bytes;
    return blob;
}

static void put_tensor(writer *w, int32_t role, int32_t layer, cl_format format, uint64_t rows, uint64_t cols,
                       float centre, float spread) {
    cl_dense_tensor *d = &w->t->dense[w->t->options.n_dense++];
    float *x = test_floats(rows * cols);
    for (uint64_t i = 0; i < rows * cols; i++) x[i] = centre + spread * x[i];
    uint64_t codes, scales, mins;
    CHECK(!cl_rows_bytes(&format, rows, cols, &codes, &scales, &mins, NULL));
    uint8_t *buffer = malloc(codes + scales + mins + 1);
    cl_quant_report report;
    CHECK(!cl_quantize_rows(&format, x, CL_SOURCE_F32, rows, cols, cols, buffer, buffer + codes,
                            buffer + codes + scales, &report, NULL));
    *d = (cl_dense_tensor){.role = role, .layer = layer, .format = format, .rows = rows, .cols = cols};
    d->codes = put(w, buffer, codes);
    d->scales = put(w, buffer + codes, scales);
    d->mins = put(w, buffer + codes + scales, mins);
    free(buffer);
    free(x);
}

static void put_matrix(writer *w, int32_t role, int32_t layer, uint64_t rows, uint64_t cols) {
    put_tensor(w, role, layer, w->format, rows, cols, 0, 2.0f / sqrtf((float)cols));
}

static const cl_format plain = {.codes = CL_CODES_F32};

static void put_vector(writer *w, int32_t role, int32_t layer, uint64_t cols, float centre) {
    put_tensor(w, role, layer, plain, 1, cols, centre, 0.3f);
}

static void put_layer(writer *w, int32_t layer) {
    const cl_layer_spec *s = &w->t->layers[layer];
    uint64_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim;
    put_vector(w, CL_ROLE_ATTENTION_NORM, layer, HIDDEN, 1);
    put_matrix(w, CL_ROLE_Q, layer, q, HIDDEN);
    put_matrix(w, CL_ROLE_K, layer, kv, HIDDEN);
    put_matrix(w, CL_ROLE_V, layer, kv, HIDDEN);
    put_matrix(w, CL_ROLE_O, layer, HIDDEN, q);
    put_vector(w, CL_ROLE_V_BIAS, layer, kv, 0);
    put_vector(w, CL_ROLE_Q_NORM, layer, s->head_dim, 1);
    put_vector(w, CL_ROLE_K_NORM, layer, s->head_dim, 1);
    put_vector(w, CL_ROLE_FFN_NORM, layer, HIDDEN, 1);
    if (s->ffn == CL_FFN_DENSE) {
        put_matrix(w, CL_ROLE_FFN_GATE, layer, s->intermediate_size, HIDDEN);
        put_matrix(w, CL_ROLE_FFN_UP, layer, s->intermediate_size, HIDDEN);
        put_matrix(w, CL_ROLE_FFN_DOWN, layer, HIDDEN, s->intermediate_size);
        return;
    }
    put_tensor(w, CL_ROLE_ROUTER, layer, plain, TINY_EXPERTS, HIDDEN, 0, 1);
    put_vector(w, CL_ROLE_ROUTER_SELECT_BIAS, layer, TINY_EXPERTS, 0);
    put_matrix(w, CL_ROLE_SHARED_GATE, layer, SHARED, HIDDEN);
    put_matrix(w, CL_ROLE_SHARED_UP, layer, SHARED, HIDDEN);
    put_matrix(w, CL_ROLE_SHARED_DOWN, layer, HIDDEN, SHARED);
    put_matrix(w, CL_ROLE_SHARED_OUTPUT_GATE, layer, 1, HIDDEN);
}

static void put_dense(tiny_model *t, cl_format format) {
    writer w = {t, fopen(t->dense_path, "wb"), 0, format};
    put_matrix(&w, CL_ROLE_EMBEDDING, -1, TINY_VOCAB, HIDDEN);
    put_matrix(&w, CL_ROLE_HEAD, -1, TINY_VOCAB, HIDDEN);
    put_vector(&w, CL_ROLE_FINAL_NORM, -1, HIDDEN, 1);
    for (int32_t layer = 0; layer < 3; layer++) put_layer(&w, layer);
    CHECK(fclose(w.file) == 0);
}

static uint64_t align(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

static void describe_parts(cl_expert_layer *e, cl_format format) {
    uint64_t at = 0;
    for (int p = 0; p < CL_PARTS; p++) {
        cl_part *part = &e->parts[p];
        *part = (cl_part){format, p == CL_PART_DOWN ? HIDDEN : WIDTH, p == CL_PART_DOWN ? WIDTH : HIDDEN, at, 0};
        CHECK(!cl_tiles_bytes(&format, part->rows, part->cols, &part->bytes, NULL));
        at = align(at + part->bytes, CL_PART_ALIGN);
    }
    e->record_bytes = align(at, CL_ALIGN);
    if (e->record_bytes < 3 * CL_ALIGN) e->record_bytes = 3 * CL_ALIGN; /* enough to cut in three */
}

static void fill_record(const cl_expert_layer *e, uint8_t *record) {
    memset(record, 0, e->record_bytes);
    for (int p = 0; p < CL_PARTS; p++) {
        const cl_part *part = &e->parts[p];
        float *x = test_floats(part->rows * part->cols);
        cl_quant_report report;
        CHECK(!cl_quantize_tiles(&part->format, x, CL_SOURCE_F32, part->rows, part->cols, part->cols,
                                 record + part->offset, part->bytes, &report, NULL));
        free(x);
    }
}

/* Extents of 4096 bytes on stripe 0, 4096 on stripe 1, and the rest on stripe 0 again. */
static void put_record(tiny_model *t, FILE *files[2], uint64_t at[2], int layer, uint32_t expert, uint8_t *record) {
    cl_expert_layer *e = &t->experts[layer];
    fill_record(e, record);
    uint64_t offset = 0;
    for (uint32_t i = 0; i < 3; i++) {
        cl_extent *x = &t->extents[layer][expert * 3 + i];
        uint64_t bytes = i < 2 ? CL_ALIGN : e->record_bytes - offset;
        *x = (cl_extent){i % 2, cl_crc32c(0, record + offset, bytes), at[i % 2], offset, bytes};
        CHECK(fwrite(record + offset, 1, bytes, files[i % 2]) == bytes);
        at[i % 2] += bytes;
        offset += bytes;
    }
}

static void put_header(FILE *file, uint32_t stripe, uint64_t file_bytes) {
    uint8_t block[CL_ALIGN] = {0};
    cl_stripe_header h = {.version = CL_FORMAT_VERSION, .stripe = stripe, .stripes = 2, .file_bytes = file_bytes};
    memcpy(h.magic, CL_STRIPE_MAGIC, sizeof h.magic);
    memset(h.uuid, 7, sizeof h.uuid);
    h.header_crc32c = cl_crc32c(0, &h, offsetof(cl_stripe_header, header_crc32c));
    memcpy(block, &h, sizeof h);
    CHECK(fseek(file, 0, SEEK_SET) == 0 && fwrite(block, 1, sizeof block, file) == sizeof block);
}

static void put_experts(tiny_model *t, cl_format format) {
    FILE *files[2] = {fopen(t->stripe_paths[0], "wb"), fopen(t->stripe_paths[1], "wb")};
    uint64_t at[2] = {CL_ALIGN, CL_ALIGN};
    for (int s = 0; s < 2; s++) put_header(files[s], (uint32_t)s, 0);
    for (int layer = 0; layer < 2; layer++) {
        cl_expert_layer *e = &t->experts[layer];
        *e = (cl_expert_layer){.layer = (uint32_t)layer + 1, .experts = TINY_EXPERTS, .extents_per_record = 3};
        describe_parts(e, format);
        e->extents = t->extents[layer] = calloc((size_t)TINY_EXPERTS * 3, sizeof(cl_extent));
        uint8_t *record = malloc(e->record_bytes);
        for (uint32_t expert = 0; expert < TINY_EXPERTS; expert++) put_record(t, files, at, layer, expert, record);
        free(record);
    }
    for (int s = 0; s < 2; s++) {
        put_header(files[s], (uint32_t)s, at[s]);
        CHECK(fclose(files[s]) == 0);
        t->stripes[s] = (cl_stripe){t->stripe_paths[s], at[s], NULL};
    }
}

static void fill_spec(tiny_model *t) {
    for (int i = 0; i < 3; i++) t->inv_freq[i] = powf(100, (float)-i / 3);
    t->rope = (cl_rope_spec){CL_ROPE_HALF, 6, t->inv_freq, 1};
    cl_layer_spec layer = {.attention = CL_ATTENTION_GQA, .heads = 4, .kv_heads = 2, .head_dim = 9};
    layer.attention_scale = 1.0f / 3;
    layer.qk_norm = CL_QK_NORM_HEAD;
    layer.ffn = CL_FFN_DENSE;
    layer.intermediate_size = 30;
    t->layers[0] = layer;
    layer.ffn = CL_FFN_MOE;
    layer.experts = TINY_EXPERTS;
    layer.top_k = TINY_TOP_K;
    layer.expert_intermediate_size = WIDTH;
    layer.score = CL_SCORE_SIGMOID;
    layer.select_bias = layer.groups = layer.top_groups = 1;
    layer.renormalize = CL_RENORMALIZE_SUM_EPSILON;
    layer.routed_scale = 1.5f;
    layer.shared_intermediate_size = SHARED;
    layer.shared_output_gate = 1;
    t->layers[1] = t->layers[2] = layer;
    t->spec = (cl_spec){TINY_VOCAB, HIDDEN, 1000, 1e-5f, 0, 1.25f, 0.8f, 3, 0, 3, 1, t->layers, &t->rope};
}

void tiny_make(tiny_model *t, cl_format dense, cl_format expert) {
    memset(t, 0, sizeof *t);
    char folder[] = "/tmp/colibri-tiny-XXXXXX";
    CHECK(mkdtemp(folder) != NULL);
    strcpy(t->folder, folder);
    snprintf(t->dense_path, sizeof t->dense_path, "%s/dense", folder);
    for (int s = 0; s < 2; s++) snprintf(t->stripe_paths[s], sizeof t->stripe_paths[s], "%s/stripe%d", folder, s);
    fill_spec(t);
    put_dense(t, dense);
    put_experts(t, expert);
    cl_model_options *o = &t->options;
    o->spec = &t->spec;
    o->dense_path = t->dense_path;
    o->dense = t->dense;
    o->expert_layers = t->experts;
    o->n_expert_layers = 2;
    o->stripes = t->stripes;
    o->n_stripes = 2;
    o->expert_slots = 2 * TINY_EXPERTS;
    o->ring_slots = 2;
    o->kv_pages = 40;
    o->kv_dtype = CL_KV_F16;
    o->max_rows = 4;
    o->max_prefills = 2;
    o->pass_tokens = 150;
    o->max_context = 200;
    o->activation = CL_ACTIVATION_I16;
    o->isa = "auto";
    o->threads = 1;
    o->io_backend = CL_IO_THREADS; /* whose pread tests may wrap */
    o->direct = CL_DIRECT_OFF;
}

void tiny_remove(tiny_model *t) {
    unlink(t->dense_path);
    for (int s = 0; s < 2; s++) {
        unlink(t->stripe_paths[s]);
        free(t->extents[s]);
    }
    CHECK(rmdir(t->folder) == 0);
}
