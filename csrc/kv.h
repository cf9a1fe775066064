/* kv.h - pages of keys and values, and the sequences that own them. See kv.c. */
#ifndef COLIBRI_KV_H
#define COLIBRI_KV_H
#include "arena.h"
#include "colibri.h"
#include "counters.h"
#include <stdatomic.h>

/* Where a layer's keys and values lie in a page: per KV head K [64, head_dim], then V [64, head_dim]. */
typedef struct cl_kv_layer {
    uint64_t offset, bytes;
    uint64_t head_bytes; /* K of one head; V follows, then the next head */
    uint32_t kv_heads, head_dim;
} cl_kv_layer;

typedef struct cl_kv {
    uint8_t *pages;
    uint64_t n_pages, page_bytes;
    uint32_t *free; /* stack of free page numbers */
    uint64_t n_free;
    cl_kv_layer *layers;
    uint32_t n_layers;
    int32_t dtype;
    cl_counters *counters;
} cl_kv;

struct cl_seq {
    struct cl_model *model;
    uint64_t length;
    uint64_t n_pages, most_pages;
    uint32_t in_use; /* a prefill cursor owns it, or a step is running it */
    uint32_t step;   /* mark of the step that saw it last, to find duplicates */
    _Atomic uint32_t cancelled;
    uint8_t *pages[]; /* [most_pages] */
};

void cl_kv_place(cl_kv *kv, cl_carve *tables, cl_carve *pages, const cl_model_options *options);
void cl_kv_init(cl_kv *kv, const cl_model_options *options);
uint64_t cl_kv_page_bytes(const cl_model_options *options);

/* Makes room for `positions` positions in all; CL_FULL, and nothing taken, if the pool has not enough pages. */
int cl_seq_reserve(cl_seq *seq, uint64_t positions, cl_error *err);
/* Gives back the pages beyond the sequence's length. */
void cl_seq_trim(cl_seq *seq);
/* 1, and the flag is cleared, if cl_seq_cancel was called. */
int cl_seq_take_cancel(cl_seq *seq);

#endif
