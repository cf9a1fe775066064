/* model.h - a model in memory, as the forward pass sees it: layers bound to their weights, work buffers, store, KV.
 *
 * Every function here runs on the thread of the step. Shapes are [rows, columns], row-major f32 unless said otherwise.
 */
#ifndef COLIBRI_MODEL_H
#define COLIBRI_MODEL_H
#include "arena.h"
#include "colibri.h"
#include "counters.h"
#include "io.h"
#include "kernels.h"
#include "kv.h"
#include "pool.h"
#include "store.h"
#include "trial.h"

#define CL_TILE_TOKENS 64 /* most tokens of a prefill that one work item takes */
#define CL_MOST_GROUPS 8  /* distinct group sizes of the quantised weights of a model */
#define CL_ACTS_KINDS (CL_MOST_GROUPS + 1)

/* TensorRole of the manifest, the roles that this core knows. */
typedef enum cl_role {
    CL_ROLE_EMBEDDING = 1,
    CL_ROLE_HEAD = 2,
    CL_ROLE_FINAL_NORM = 3,
    CL_ROLE_HEAD_BIAS = 4,
    CL_ROLE_ATTENTION_NORM = 10,
    CL_ROLE_Q = 11,
    CL_ROLE_K = 12,
    CL_ROLE_V = 13,
    CL_ROLE_O = 14,
    CL_ROLE_Q_BIAS = 15,
    CL_ROLE_K_BIAS = 16,
    CL_ROLE_V_BIAS = 17,
    CL_ROLE_O_BIAS = 18,
    CL_ROLE_Q_NORM = 19,
    CL_ROLE_K_NORM = 20,
    CL_ROLE_FFN_NORM = 30,
    CL_ROLE_FFN_GATE = 31,
    CL_ROLE_FFN_UP = 32,
    CL_ROLE_FFN_DOWN = 33,
    CL_ROLE_ROUTER = 40,
    CL_ROLE_ROUTER_SELECT_BIAS = 41,
    CL_ROLE_SHARED_GATE = 42,
    CL_ROLE_SHARED_UP = 43,
    CL_ROLE_SHARED_DOWN = 44,
    CL_ROLE_SHARED_OUTPUT_GATE = 45,
    CL_ROLES = 46
} cl_role;

/* A dense tensor in memory: a matrix in tiles, or a vector of f32. Absent: cols 0. */
typedef struct cl_weight {
    cl_matrix matrix;
    const float *vector;
} cl_weight;

typedef struct cl_layer {
    cl_layer_spec spec;
    int32_t store_layer; /* index of its experts in the store, -1 without */
    cl_part parts[CL_PARTS];
    cl_weight weights[CL_ROLES]; /* by role */
} cl_layer;

/* Activations of one place in the layer, quantised once per group size of the weights that they meet. */
typedef struct cl_inputs {
    uint8_t *workspace[CL_ACTS_KINDS];
    cl_acts acts[CL_ACTS_KINDS];
    uint32_t made; /* bit per kind */
    const float *x;
    uint64_t stride, n, cols;
} cl_inputs;

/* y[i] = W x[index[i]] for i in 0..n-1 */
typedef struct cl_product {
    const cl_matrix *w;
    const cl_acts *acts;
    const uint32_t *index; /* NULL: i */
    uint64_t n;
    float *y;
    uint64_t y_stride;
    uint64_t piece_tiles, first_piece; /* set by cl_products */
} cl_product;

/* Tokens on their way through a layer: the rows of a decode step, or a tile of a prefill cursor. */
typedef struct cl_batch {
    uint64_t n;
    float *h;                  /* [n, hidden], the residual stream */
    cl_seq *const *seqs;       /* [n] */
    const uint64_t *positions; /* [n] */
} cl_batch;

/* An expert in memory and the tokens that want it. */
typedef struct cl_expert_job {
    const uint8_t *record;
    const uint32_t *tokens; /* [n] rows of the inputs, NULL: 0..n-1 */
    uint64_t n;
    uint64_t pair; /* its results go to pair_out[pair .. pair + n - 1] */
} cl_expert_job;

/* Buffers that live from one work item to the end of it (decode: of the step). */
typedef struct cl_work {
    uint64_t tokens; /* capacity in tokens */
    uint64_t pairs;  /* capacity in (token, expert) pairs */
    cl_seq **seqs;
    uint64_t *positions;
    float *h; /* [max_rows, hidden], decode's residual stream */
    float *x; /* [tokens, hidden], normed */
    float *q, *k, *v, *attended;
    float *out;                           /* [tokens, hidden] */
    float *gate, *up;                     /* [pairs, widest intermediate] */
    float *pair_out;                      /* [pairs, hidden] */
    float *router_logits, *route_scratch; /* [tokens, experts], [tokens, 2 * experts] */
    uint32_t *ids;                        /* [max_rows, top_k] */
    float *weights;
    float *shared;        /* [tokens, hidden], the shared expert */
    float *output_gate;   /* [tokens], its factor */
    float *cosine, *sine; /* [tokens, rope pairs] */
    float *attend;        /* [threads, attend_floats] */
    uint64_t attend_floats;
    float *logits; /* [max_rows, vocab] */
    void *sample_scratch;
    cl_inputs input, inner;
    cl_product *products;
    cl_expert_job *jobs; /* [pairs] */
    cl_matrix *matrices; /* [pairs, 3] */
    uint32_t *iota;      /* [pairs] 0, 1, 2, ... */
    uint32_t *wave;      /* [pairs] the pairs that one round of experts computes */
    /* decode: its rows, and what they want of the layer at hand */
    cl_row **rows;                          /* [max_rows] */
    uint8_t *dead;                          /* [max_rows] */
    uint8_t *bad;                           /* [tokens] */
    uint32_t *first;                        /* [experts + 1] */
    uint32_t *order, *tokens_of, *place_of; /* [pairs] */
    struct cl_use *uses;                    /* [pairs] */
} cl_work;

/* Reads of the next MoE layer's experts before its router has chosen them. See lookahead.c. */
typedef struct cl_lookahead {
    int32_t mode; /* CL_SWITCH_* */
    uint32_t on;  /* in the step at hand */
    uint32_t stripes;
    float *x; /* [max_rows, hidden] the state as it is known, normed */
    cl_inputs input;
    uint32_t *ids; /* [max_rows, top_k] */
    float *weights;
    uint8_t *bad;  /* [max_rows] */
    float *scores; /* [experts] */
    int32_t layer; /* the one that the guesses are about, -1: none */
    struct cl_guess *guesses; /* [experts] */
    uint32_t n_guesses;
    uint32_t next; /* the first guess not yet read */
    cl_trial trial;
    uint64_t start_us, start_wait_us, start_loads; /* of the step */
    uint64_t reads_saved;                          /* in the step: experts that were wanted and read ahead */
    double stall_us;                               /* waited per expert that decoding had to read, of late */
} cl_lookahead;

struct cl_model {
    cl_arena arena;
    cl_pool *pool;
    cl_io *io;
    const cl_kernels *kernels;
    cl_counters counters;

    cl_spec spec; /* layers and ropes point to copies in the arena */
    cl_layer *layers;
    cl_weight weights[CL_ROLES]; /* the model's own */
    uint32_t group_sizes[CL_MOST_GROUPS];
    uint32_t n_group_sizes;
    int32_t activation;
    uint64_t widest_attention; /* most heads * head_dim */
    uint64_t widest_kv;
    uint64_t widest_ffn, widest_expert;
    uint32_t most_experts, most_top_k;

    struct cl_tensor *tensors; /* [n_tensors] what cl_model_load reads */
    uint64_t n_tensors;
    char *dense_path;
    int32_t direct;  /* CL_DIRECT_* */
    uint32_t loaded; /* 1: cl_model_load has succeeded; 2: has failed */

    cl_store store;
    double heat_half_life; /* as opened with; 0: the default */
    cl_kv kv;
    cl_work work;
    cl_lookahead lookahead;
    struct cl_prefill *prefills;
    uint32_t max_rows, max_prefills, pass_tokens, max_context, threads;
    uint8_t *banned; /* bitmap */
    uint32_t step;   /* number of the step, to mark sequences */
};

static inline void cl_tick(cl_model *m) { cl_count(&m->counters.heartbeat, 1); }

/* ---- linear.c: activations, products, norms ---- */

void cl_inputs_begin(cl_inputs *in, const float *x, uint64_t stride, uint64_t n, uint64_t cols);
/* The activations in the form that weights of `format` want; quantised at first use. */
const cl_acts *cl_inputs_for(cl_model *m, cl_inputs *in, const cl_format *format);
/* The same, but without quantising: the caller does that, token by token. */
cl_acts *cl_inputs_place(cl_model *m, cl_inputs *in, const cl_format *format);
void cl_products(cl_model *m, cl_product *products, uint32_t n);
/* y [n, w->rows] = W x for all rows of the inputs. */
cl_product cl_product_of(cl_model *m, const cl_weight *w, cl_inputs *in, float *y, uint64_t y_stride);
/* out [n, hidden] = rmsnorm(h) with the vector of `norm` */
void cl_norm_rows(cl_model *m, const cl_weight *norm, const float *h, uint64_t n, float *out);
/* h = h + scale * x, both [n, hidden] */
void cl_residual(cl_model *m, float *h, const float *x, uint64_t n);

/* ---- attention.c ---- */

/* h += attention(norm(h)); appends the tokens' keys and values to their sequences' pages. */
void cl_attention(cl_model *m, uint32_t layer, const cl_batch *batch);

/* ---- ffn.c ---- */

/* work.x = norm(h), and the inputs of everything that follows in the layer. */
void cl_ffn_begin(cl_model *m, uint32_t layer, const float *h, uint64_t n);
/* h += ffn(work.x) of a dense layer */
void cl_ffn_dense(cl_model *m, uint32_t layer, float *h, uint64_t n);
/* work.shared [n, hidden] = shared expert(work.x), and its factor in work.output_gate: 1, or the sigmoid of its gate.
 * Uses the buffers of the routed experts. Without a shared expert: nothing. */
void cl_ffn_shared(cl_model *m, uint32_t layer, uint64_t n);
/* h += experts (already summed, [n, hidden]) + what cl_ffn_shared has left */
void cl_ffn_combine(cl_model *m, uint32_t layer, float *h, float *experts, uint64_t n);

/* ---- experts.c ---- */

/* Routes the rows of `input`: ids and weights [n, top_k], ids ascending. A token whose logits are not finite gets
 * bad[i] = 1 and no ids. */
void cl_experts_route(cl_model *m, uint32_t layer, cl_inputs *input, uint64_t n, uint32_t *ids, float *weights,
                      uint8_t *bad);
/* Prepares the buffers for `pairs` (token, expert) pairs of a layer. */
void cl_experts_begin(cl_model *m, uint32_t layer, uint64_t pairs);
/* pair_out of the jobs = expert(work.x of their tokens). */
void cl_experts_run(cl_model *m, uint32_t layer, const cl_expert_job *jobs, uint32_t n);

/* ---- model.c ---- */

void cl_embed(cl_model *m, const int32_t *tokens, uint64_t n, float *h);
/* logits [n, vocab] of the rows of h */
void cl_head(cl_model *m, const float *h, uint64_t n, float *logits);
int cl_all_finite(const float *x, uint64_t n);
/* The token after `position - 1`; CL_NONFINITE if the logits are not numbers. */
int cl_choose(cl_model *m, const float *logits, const cl_sampling *sampling, uint64_t position, int32_t *token,
              cl_error *err);
int cl_sampling_check(const cl_sampling *sampling, cl_error *err);

/* ---- decode.c, prefill.c ---- */

void cl_decode(cl_model *m, cl_row *rows, uint32_t n);
uint64_t cl_decode_use_bytes(void);
/* Runs work items until the deadline; 1 if it came before the end of the pass. */
int cl_prefill_advance(cl_cursor *cursor, uint64_t deadline_us);
void cl_prefill_report(cl_cursor *cursor);
void cl_prefill_place(cl_model *m, cl_carve *carve, const cl_model_options *options);
/* Sleeps until a record arrives (or 20 ms have passed, so that cancel flags are seen); counts the time. */
void cl_wait_for_drive(cl_model *m, uint32_t seen, uint64_t deadline_us);

/* ---- lookahead.c ---- */

void cl_lookahead_place(cl_model *m, cl_carve *c);
/* Around a decode step of `rows` rows. */
void cl_lookahead_begin(cl_model *m);
void cl_lookahead_end(cl_model *m, uint64_t rows);
/* Guesses the experts of the MoE layer after `layer`, whose shared expert is known; h [n, hidden] is its residual
 * stream, without dead rows. Starts no read. */
void cl_lookahead_guess(cl_model *m, uint32_t layer, const float *h, uint64_t n, const uint8_t *dead);
/* Keeps a few reads of guessed experts under way; whenever the step comes by and nobody lacks a slot. */
void cl_lookahead_read(cl_model *m);
/* The router of `layer` has chosen: first [experts + 1] as from cl_group_by_expert. Before anything is acquired. */
void cl_lookahead_routed(cl_model *m, uint32_t layer, const uint32_t *first);

/* ---- spec.c ---- */

/* Every number of the spec and the options within what the core can run; says nothing about tensors. */
int cl_spec_check(const cl_model_options *options, cl_error *err);
/* The expert layers are exactly the spec's MoE layers, their parts have the right shapes, their extents cover the
 * records and lie inside the stripes. */
int cl_expert_layers_check(const cl_model_options *options, cl_error *err);

/* ---- dense.c ---- */

/* Every role that the spec asks for is there exactly once with the right shape and blob sizes, and nothing else. */
int cl_dense_check(const cl_model_options *options, cl_error *err);
/* Carves the weights and binds them to the layers. */
void cl_dense_place(cl_model *m, cl_carve *tables, cl_carve *weights, const cl_model_options *options);

#endif
