/* kv.c - the paged pool of keys and values, and the sequences that own its pages.
 *
 * Owns the pages (in the arena) and the list of the free ones. A page holds CL_KV_PAGE_POSITIONS positions of all
 * layers; a sequence takes pages as it grows and gives them back when it is freed or when an item of it failed.
 * Refuses to grow: without a free page the item gets CL_FULL. Export and import copy pages as they are; what they mean
 * to a session, and their checksums, are the caller's.
 */
#include "kv.h"
#include "error.h"
#include "format.h"
#include "model.h"
#include <stdlib.h>
#include <string.h>

static uint64_t element_bytes(int32_t dtype) { return dtype == CL_KV_F16 ? 2 : 4; }

static uint64_t layer_head_bytes(const cl_layer_spec *layer, int32_t dtype) {
    return (uint64_t)CL_KV_PAGE_POSITIONS * layer->head_dim * element_bytes(dtype);
}

static uint64_t layer_bytes(const cl_layer_spec *layer, int32_t dtype) {
    return 2 * layer->kv_heads * layer_head_bytes(layer, dtype);
}

uint64_t cl_kv_page_bytes(const cl_model_options *options) {
    uint64_t bytes = 0;
    for (uint32_t l = 0; l < options->spec->n_layers; l++)
        bytes += layer_bytes(&options->spec->layers[l], options->kv_dtype);
    return bytes;
}

void cl_kv_place(cl_kv *kv, cl_carve *tables, cl_carve *pages, const cl_model_options *options) {
    kv->n_layers = options->spec->n_layers;
    kv->layers = cl_carve_take(tables, kv->n_layers, sizeof *kv->layers, 64);
    kv->free = cl_carve_take(tables, options->kv_pages, sizeof *kv->free, 64);
    kv->pages = cl_carve_take(pages, options->kv_pages, cl_kv_page_bytes(options), CL_ALIGN);
}

void cl_kv_init(cl_kv *kv, const cl_model_options *options) {
    uint64_t offset = 0;
    kv->dtype = options->kv_dtype;
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        const cl_layer_spec *spec = &options->spec->layers[l];
        kv->layers[l] = (cl_kv_layer){offset, layer_bytes(spec, kv->dtype), layer_head_bytes(spec, kv->dtype),
                                      spec->kv_heads, spec->head_dim};
        offset += kv->layers[l].bytes;
    }
    kv->page_bytes = offset;
    kv->n_pages = kv->n_free = options->kv_pages;
    for (uint64_t i = 0; i < kv->n_pages; i++) kv->free[i] = (uint32_t)(kv->n_pages - 1 - i);
    atomic_store(&kv->counters->kv_pages_free, kv->n_free);
}

/* ---- sequences ---- */

int cl_seq_create(cl_seq **out, cl_model *model, cl_error *err) {
    *out = NULL;
    cl_ok(err);
    uint64_t most = ((uint64_t)model->max_context + CL_KV_PAGE_POSITIONS - 1) / CL_KV_PAGE_POSITIONS;
    cl_seq *seq = calloc(1, sizeof *seq + most * sizeof *seq->pages);
    if (!seq) return cl_fail(err, CL_NOMEM, "no memory for a sequence");
    seq->model = model;
    seq->most_pages = most;
    *out = seq;
    return CL_OK;
}

static void give_back(cl_seq *seq, uint64_t keep) {
    cl_kv *kv = &seq->model->kv;
    while (seq->n_pages > keep)
        kv->free[kv->n_free++] = (uint32_t)((uint64_t)(seq->pages[--seq->n_pages] - kv->pages) / kv->page_bytes);
    atomic_store(&kv->counters->kv_pages_free, kv->n_free);
}

static uint64_t pages_for(uint64_t positions) { return (positions + CL_KV_PAGE_POSITIONS - 1) / CL_KV_PAGE_POSITIONS; }

void cl_seq_trim(cl_seq *seq) { give_back(seq, pages_for(seq->length)); }

void cl_seq_free(cl_seq *seq) {
    if (!seq) return;
    give_back(seq, 0);
    free(seq);
}

int cl_seq_reserve(cl_seq *seq, uint64_t positions, cl_error *err) {
    cl_kv *kv = &seq->model->kv;
    if (positions > seq->model->max_context)
        return cl_fail(err, CL_FULL, "%llu positions are more than max_context, %u", (unsigned long long)positions,
                       seq->model->max_context);
    uint64_t want = pages_for(positions);
    if (want <= seq->n_pages) return CL_OK;
    if (want - seq->n_pages > kv->n_free)
        return cl_fail(err, CL_FULL, "%llu KV pages are needed for %llu positions, %llu of %llu are free",
                       (unsigned long long)(want - seq->n_pages), (unsigned long long)positions,
                       (unsigned long long)kv->n_free, (unsigned long long)kv->n_pages);
    while (seq->n_pages < want) seq->pages[seq->n_pages++] = kv->pages + kv->free[--kv->n_free] * kv->page_bytes;
    atomic_store(&kv->counters->kv_pages_free, kv->n_free);
    return CL_OK;
}

uint64_t cl_seq_length(const cl_seq *seq) { return seq->length; }

void cl_seq_cancel(cl_seq *seq) { atomic_store(&seq->cancelled, 1); }

int cl_seq_take_cancel(cl_seq *seq) {
    return atomic_load_explicit(&seq->cancelled, memory_order_relaxed) && atomic_exchange(&seq->cancelled, 0);
}

/* ---- pages in and out ---- */

uint32_t cl_kv_layout(const cl_model *model, cl_kv_section *sections, uint32_t capacity) {
    const cl_kv *kv = &model->kv;
    for (uint32_t l = 0; l < kv->n_layers && l < capacity; l++)
        sections[l] =
            (cl_kv_section){l, CL_SECTION_KV, (uint32_t)kv->dtype, kv->layers[l].offset, kv->layers[l].bytes};
    return kv->n_layers;
}

/* Zeroes the positions from `positions` on: what lies there is left over from others or from a failed item. */
static void clear_tail(const cl_kv *kv, uint8_t *page, uint64_t positions) {
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        const cl_kv_layer *layer = &kv->layers[l];
        uint64_t position_bytes = layer->head_bytes / CL_KV_PAGE_POSITIONS;
        for (uint64_t plane = 0; plane < 2 * (uint64_t)layer->kv_heads; plane++)
            memset(page + layer->offset + plane * layer->head_bytes + positions * position_bytes, 0,
                   (CL_KV_PAGE_POSITIONS - positions) * position_bytes);
    }
}

int cl_seq_export_page(const cl_seq *seq, uint64_t page_index, uint8_t *out, uint64_t out_bytes, cl_error *err) {
    cl_ok(err);
    const cl_kv *kv = &seq->model->kv;
    if (page_index >= pages_for(seq->length))
        return cl_fail(err, CL_INVALID, "page %llu: the sequence has %llu positions", (unsigned long long)page_index,
                       (unsigned long long)seq->length);
    if (out_bytes != kv->page_bytes)
        return cl_fail(err, CL_INVALID, "out_bytes is %llu, a page has %llu", (unsigned long long)out_bytes,
                       (unsigned long long)kv->page_bytes);
    memcpy(out, seq->pages[page_index], kv->page_bytes);
    uint64_t valid = seq->length - page_index * CL_KV_PAGE_POSITIONS;
    if (valid < CL_KV_PAGE_POSITIONS) clear_tail(kv, out, valid);
    return CL_OK;
}

int cl_seq_import_page(cl_seq *seq, const uint8_t *data, uint64_t data_bytes, uint32_t positions, cl_error *err) {
    cl_ok(err);
    const cl_kv *kv = &seq->model->kv;
    if (seq->in_use) return cl_fail(err, CL_INVALID, "the sequence is used by a prefill");
    if (positions < 1 || positions > CL_KV_PAGE_POSITIONS)
        return cl_fail(err, CL_INVALID, "positions is %u, must be 1..%d", positions, CL_KV_PAGE_POSITIONS);
    if (seq->length % CL_KV_PAGE_POSITIONS)
        return cl_fail(err, CL_INVALID, "the sequence has %llu positions: its last page is not full",
                       (unsigned long long)seq->length);
    if (data_bytes != kv->page_bytes)
        return cl_fail(err, CL_INVALID, "data_bytes is %llu, a page has %llu", (unsigned long long)data_bytes,
                       (unsigned long long)kv->page_bytes);
    int code = cl_seq_reserve(seq, seq->length + positions, err);
    if (code) return code;
    memcpy(seq->pages[seq->length / CL_KV_PAGE_POSITIONS], data, kv->page_bytes);
    seq->length += positions;
    return CL_OK;
}
