/* colibri.h - the one header that Python sees.
 *
 * What the core owns: buffers, drives, I/O threads, arithmetic, sampling, KV bytes. What it never sees: text, Hugging
 * Face names, the network, policy.
 *
 * Conventions, for every function here:
 *  - Returns CL_OK or a negative CL_* code and fills the caller-owned `err` (may be NULL). On failure every out
 *    pointer is NULL and nothing has changed unless the comment says otherwise. No operating error kills the process.
 *  - Pointers inside option structs are borrowed for the duration of the call unless stated.
 *  - A cl_model and everything made from it is used by one thread at a time; the functions marked [any thread] are the
 *    exceptions. Handles are freed in reverse order of creation: prefills, sequences, model.
 *  - Sizes are bytes, 64 bit. Times are microseconds.
 */
#ifndef COLIBRI_H
#define COLIBRI_H
#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

/* ---- errors ---------------------------------------------------------------------------------------------------- */

#define CL_OK 0
#define CL_INVALID -1     /* an argument or a spec that cannot be honoured; the text names the field */
#define CL_IO -2          /* the operating system refused; the text names file, offset and errno */
#define CL_CORRUPT -3     /* bytes that fail their checksum or contradict their description */
#define CL_UNSUPPORTED -4 /* understood, but not built (format, op, instruction set) */
#define CL_NOMEM -5
#define CL_FULL -6        /* a planned resource is used up: KV pages, prefill workspaces */
#define CL_CANCELLED -7
#define CL_NONFINITE -8   /* NaN or infinity where numbers were expected; the text says where */
#define CL_INTERNAL -9

#define CL_ERROR_TEXT 512
typedef struct cl_error {
    int32_t code;
    char text[CL_ERROR_TEXT];
} cl_error;

const char *cl_version(void);

/* ---- number formats (docs/numerics.md; csrc/format.h has the bytes) --------------------------------------------- */

/* Values equal those of the manifest's TensorFormat. */
#define CL_CODES_F32 1
#define CL_CODES_BF16 2
#define CL_CODES_INT8 3
#define CL_CODES_INT4 4
#define CL_SCALE_NONE 0
#define CL_SCALE_F16 1
#define CL_CODEBOOK_NONE 0
#define CL_CODEBOOK_UNIFORM 1

typedef struct cl_format {
    uint8_t codes;        /* CL_CODES_* */
    uint8_t scale_format; /* CL_SCALE_* */
    uint8_t codebook;     /* CL_CODEBOOK_* */
    uint8_t asymmetric;   /* 1: value = scale * code + min */
    uint32_t group_size;  /* along the input dimension; multiple of 8, 0 for f32 and bf16; the last may be short */
} cl_format;

#define CL_SOURCE_F32 1
#define CL_SOURCE_BF16 2
#define CL_SOURCE_F16 3

/* Sums over what was quantised; add reports of pieces field by field. */
typedef struct cl_quant_report {
    uint64_t values;
    uint64_t nonzero;        /* source values != 0 */
    uint64_t zeroed;         /* of those, how many became exactly 0 */
    double sum_squares;      /* sum w^2 */
    double error_squares;    /* sum (w - w')^2 */
    int64_t nonfinite_row;   /* first NaN or infinity, -1 if none; then CL_NONFINITE is returned */
    int64_t nonfinite_col;
} cl_quant_report;

/* Bytes of a [rows, cols] matrix in R8 tiles (the form that experts have on disk and dense matrices in memory). */
int cl_tiles_bytes(const cl_format *format, uint64_t rows, uint64_t cols, uint64_t *bytes, cl_error *err);

/* Bytes of the row-major form (the form that dense tensors have on disk): codes, scales, mins. */
int cl_rows_bytes(const cl_format *format, uint64_t rows, uint64_t cols, uint64_t *codes, uint64_t *scales,
                  uint64_t *mins, cl_error *err);

/* Quantise source [rows, cols] (row stride in elements, >= cols) into R8 tiles. Scales are found by MSE search.
 * Pieces of a larger matrix may be done separately if each but the last has a multiple of 8 rows. Deterministic.
 * [any thread] */
int cl_quantize_tiles(const cl_format *format, const void *source, int32_t source_type, uint64_t rows, uint64_t cols,
                      uint64_t row_stride, uint8_t *tiles, uint64_t tiles_bytes, cl_quant_report *report,
                      cl_error *err);

/* The same numbers, row-major: codes [rows, code_row_bytes], scales and mins f16 [rows, groups]. [any thread] */
int cl_quantize_rows(const cl_format *format, const void *source, int32_t source_type, uint64_t rows, uint64_t cols,
                     uint64_t row_stride, uint8_t *codes, uint8_t *scales, uint8_t *mins, cl_quant_report *report,
                     cl_error *err);

/* Back to f32 [rows, cols]. [any thread] */
int cl_dequantize_tiles(const cl_format *format, const uint8_t *tiles, uint64_t tiles_bytes, uint64_t rows,
                        uint64_t cols, float *out, cl_error *err);
int cl_dequantize_rows(const cl_format *format, const uint8_t *codes, const uint8_t *scales, const uint8_t *mins,
                       uint64_t rows, uint64_t cols, float *out, cl_error *err);

/* Row-major to tiles, what the core does with dense tensors at load. [any thread] */
int cl_tile_rows(const cl_format *format, const uint8_t *codes, const uint8_t *scales, const uint8_t *mins,
                 uint64_t rows, uint64_t cols, uint8_t *tiles, uint64_t tiles_bytes, cl_error *err);

/* CRC-32C (Castagnoli) of data, continuing from `crc` (0 to start). [any thread] */
uint32_t cl_crc32c(uint32_t crc, const void *data, uint64_t bytes);

/* Activation formats. */
#define CL_ACTIVATION_F32 0 /* only for f32 and bf16 weights; chosen by itself there */
#define CL_ACTIVATION_I8 1
#define CL_ACTIVATION_I16 2

/* y[n, rows] = x[n, cols] * W^T with the kernels of `isa` ("generic", "avx2", "auto"), one thread. For tests and the
 * kernel benchmark: the same code that the forward pass runs. [any thread] */
int cl_matmul(const char *isa, const cl_format *format, const uint8_t *tiles, uint64_t tiles_bytes, uint64_t rows,
              uint64_t cols, int32_t activation, const float *x, uint64_t n, float *y, cl_error *err);

/* ---- the model's spec, in plain fields (filled from the manifest's ModelSpec) ----------------------------------- */

#define CL_ATTENTION_GQA 1
#define CL_FFN_DENSE 1
#define CL_FFN_MOE 2
#define CL_QK_NORM_NONE 0
#define CL_QK_NORM_HEAD 1
#define CL_QK_NORM_FULL 2
#define CL_SCORE_SOFTMAX 1
#define CL_SCORE_SIGMOID 2
#define CL_RENORMALIZE_NONE 0
#define CL_RENORMALIZE_SUM 1
#define CL_RENORMALIZE_SUM_EPSILON 2
#define CL_ROPE_HALF 1

typedef struct cl_rope_spec {
    int32_t style;         /* CL_ROPE_* */
    uint32_t dims;         /* even, <= head_dim */
    const float *inv_freq; /* [dims / 2] */
    float attention_factor;
} cl_rope_spec;

typedef struct cl_layer_spec {
    int32_t attention;
    uint32_t heads, kv_heads, head_dim;
    float attention_scale;
    int32_t qk_norm;
    float clip_qkv; /* 0: none; clamps q, k and v after the q/k norm, before rope */
    uint32_t rope;  /* index into cl_spec.ropes */

    int32_t ffn;
    uint32_t intermediate_size; /* dense */
    uint32_t experts, top_k, expert_intermediate_size;
    int32_t score;
    uint32_t select_bias;
    uint32_t groups, top_groups;
    int32_t renormalize;
    float routed_scale;
    uint32_t shared_intermediate_size; /* 0: none */
    uint32_t shared_output_gate;
} cl_layer_spec;

typedef struct cl_spec {
    uint32_t vocab_size, hidden_size, max_positions;
    float norm_eps, norm_weight_offset;
    float embedding_scale, residual_scale, logits_divisor;
    uint32_t tied_embeddings;
    uint32_t n_layers, n_ropes;
    const cl_layer_spec *layers;
    const cl_rope_spec *ropes;
} cl_spec;

/* ---- where the bytes are ---------------------------------------------------------------------------------------- */

typedef struct cl_blob {
    uint64_t offset, bytes;
    uint32_t crc32c;
} cl_blob;

typedef struct cl_dense_tensor {
    int32_t role;  /* TensorRole of the manifest */
    int32_t layer; /* -1: the model's own */
    cl_format format;
    uint64_t rows, cols;
    cl_blob codes, scales, mins; /* bytes 0 where the format has none */
} cl_dense_tensor;

typedef struct cl_extent {
    uint32_t stripe, crc32c;
    uint64_t file_offset;   /* multiple of 4096 */
    uint64_t record_offset; /* multiple of 4096 */
    uint64_t bytes;         /* multiple of 4096 */
} cl_extent;

#define CL_PART_GATE 0
#define CL_PART_UP 1
#define CL_PART_DOWN 2
#define CL_PARTS 3

typedef struct cl_part {
    cl_format format;
    uint64_t rows, cols;
    uint64_t offset, bytes; /* in the record */
} cl_part;

typedef struct cl_expert_layer {
    uint32_t layer, experts;
    uint64_t record_bytes;
    cl_part parts[CL_PARTS];
    uint32_t extents_per_record;
    const cl_extent *extents; /* [experts][extents_per_record], ascending record_offset, covering the record */
} cl_expert_layer;

typedef struct cl_stripe {
    const char *path;
    uint64_t bytes;          /* the file must be at least this long */
    const char *mirror_path; /* a second copy of the file on another drive, or NULL */
} cl_stripe;

/* ---- a model in memory ------------------------------------------------------------------------------------------ */

#define CL_KV_F16 1
#define CL_KV_F32 2
#define CL_DIRECT_AUTO 0
#define CL_DIRECT_ON 1
#define CL_DIRECT_OFF 2
#define CL_VERIFY_ALWAYS 0
#define CL_VERIFY_FIRST 1 /* an extent is checked when it is read for the first time */
#define CL_VERIFY_NEVER 2
#define CL_IO_AUTO 0 /* io_uring where the kernel allows it, else threads */
#define CL_IO_URING 1
#define CL_IO_THREADS 2
#define CL_SWITCH_AUTO 0 /* on where it wins */
#define CL_SWITCH_ON 1
#define CL_SWITCH_OFF 2
#define CL_KV_PAGE_POSITIONS 64

typedef struct cl_model_options {
    const cl_spec *spec;
    const char *dense_path;
    const cl_dense_tensor *dense;
    uint64_t n_dense;
    const cl_expert_layer *expert_layers; /* ascending layer, exactly the MoE layers of the spec */
    uint32_t n_expert_layers;
    const cl_stripe *stripes;
    uint32_t n_stripes;

    uint64_t expert_slots; /* experts kept in memory; at least 1 */
    uint32_t ring_slots;   /* read ring beside the cache, for prefill; at least 2 */
    uint64_t kv_pages;     /* pages of CL_KV_PAGE_POSITIONS positions, shared by all sequences */
    int32_t kv_dtype;      /* CL_KV_* */
    uint32_t max_rows;     /* decode rows in one step */
    uint32_t max_prefills; /* prefill cursors alive at once */
    uint32_t pass_tokens;  /* longest pass of a prefill cursor */
    uint32_t max_context;  /* <= spec.max_positions */

    int32_t activation;          /* CL_ACTIVATION_I8 or CL_ACTIVATION_I16, for quantised weights */
    const char *isa;             /* "auto", "generic", "avx2" */
    uint32_t threads;            /* compute threads; 0: all cores this process may use */
    int32_t io_backend;          /* CL_IO_* */
    uint32_t io_threads;         /* per stripe, where threads read; 0: 4 */
    uint32_t io_depth;           /* requests in flight per stripe, where io_uring reads; 0: 4 */
    int32_t direct;              /* CL_DIRECT_* */
    int32_t verify;              /* CL_VERIFY_* */
    int32_t lookahead;           /* CL_SWITCH_* */
    double heat_half_life;       /* decode steps after which a use counts half; 0: the default */
    const int32_t *banned_tokens; /* never sampled (ids without a string); copied */
    uint32_t n_banned_tokens;
} cl_model_options;

/* What an open with these options would allocate. Nothing is read or allocated. */
typedef struct cl_memory_plan {
    uint64_t dense_bytes, kv_bytes, kv_page_bytes, slot_bytes, slots_bytes, ring_bytes, prefill_bytes, buffers_bytes;
    uint64_t total_bytes;
} cl_memory_plan;
int cl_model_plan(const cl_model_options *options, cl_memory_plan *plan, cl_error *err);

typedef struct cl_model cl_model;
typedef struct cl_seq cl_seq;
typedef struct cl_prefill cl_prefill;

/* Validates the spec against the tensors and layers, opens the files, allocates and touches everything. The options
 * are copied; nothing of them is needed afterwards. */
int cl_model_open(cl_model **out, const cl_model_options *options, cl_error *err);
/* Reads, verifies and tiles the dense tensors. May take minutes; progress in cl_model_stats. Call once, before any
 * sequence. On failure the model may only be closed. */
int cl_model_load(cl_model *model, cl_error *err);
void cl_model_close(cl_model *model); /* NULL is fine */

typedef struct cl_model_stats {
    uint64_t load_bytes_done, load_bytes_total;
    uint64_t heartbeat;     /* ticks per work item: an expert, an attention tile, a read */
    uint64_t expert_hits;   /* (layer, expert) uses that found the record in memory */
    uint64_t expert_loads;  /* (layer, expert) uses that read it */
    uint64_t expert_evictions; /* records that lost their place in the cache to another; the ring may still keep them */
    uint64_t expert_bytes;  /* read from stripes */
    uint64_t read_errors;
    uint64_t checksum_errors;
    uint64_t steps, decode_tokens, prefill_tokens;
    uint64_t compute_us, wait_us; /* inside steps: all, and of that waiting for drives */
    uint64_t kv_pages_free;
    uint64_t prefills_free;
    uint32_t direct_active; /* 1 while all stripes are read with O_DIRECT */
    uint32_t threads;
    /* Experts of the next layer that decoding guessed, and what came of it; recall is right / predicted. */
    uint64_t lookahead_predicted, lookahead_right;
    uint64_t lookahead_loads, lookahead_bytes; /* of those, read before the router had chosen */
    uint64_t lookahead_wasted_bytes;           /* ... and then not chosen */
    uint64_t lookahead_late;                   /* ... or chosen while the read was still under way */
    uint64_t lookahead_saved_us; /* estimate: right reads, each at the average stall of an expert, at most its lead */
    uint64_t lookahead_us;       /* spent on guessing by the threads that compute */
    uint32_t lookahead_active;   /* 1: on, or auto and better than off when it was last tried */
    uint32_t lookahead_trying;   /* 1: auto, and the first or a further trial of both is under way */
    uint64_t prefill_wasted_bytes; /* of expert_bytes: read before the router had chosen, and then not chosen */
    uint64_t buffered_stripes; /* bit i: stripe i, one of the first 64, is read through the page cache */
} cl_model_stats;
void cl_model_get_stats(const cl_model *model, cl_model_stats *stats); /* [any thread] */

#define CL_DRIVE_TEXT 512
/* One stripe's drive since the model was opened. A read here is one request to the drive, a piece of an extent. */
typedef struct cl_drive_stats {
    int32_t backend;   /* CL_IO_URING or CL_IO_THREADS */
    uint32_t direct;   /* 1: read with O_DIRECT */
    uint32_t mirror;   /* 1: a mirror is open */
    uint32_t degraded; /* 1: an extent could not be read even by the second try; until reopened */
    uint32_t depth;    /* requests in flight at most */
    uint64_t reads, read_bytes;
    uint64_t busy_us; /* with at least one read in flight */
    uint64_t cpu_us;  /* processor time of the I/O threads, checksums included */
    uint64_t retries; /* extents read a second time, after EIO or a wrong checksum */
    uint64_t errors;  /* failed reads of extents (EIO, end of file ...), retried or not */
    uint64_t checksum_errors; /* the same for wrong checksums */
    uint64_t mirror_reads;    /* extents read from the mirror instead */
    uint64_t latency_p50_us, latency_p99_us; /* of reads, within an eighth; 0: none yet */
    char last_error[CL_DRIVE_TEXT]; /* why it is degraded, or empty */
    char note[CL_DRIVE_TEXT];       /* what it goes without (io_uring, registered buffers, its mirror), or empty */
} cl_drive_stats;
/* Fills up to `capacity` drives in stripe order, returns how many there are. [any thread] */
uint32_t cl_model_drive_stats(const cl_model *model, cl_drive_stats *out, uint32_t capacity);

/* Opens again every stripe and mirror that is degraded, missing, or whose path now names another file; the header must
 * fit the container. Clears what was degraded. Where it fails the old file stays open, the others are still tried, and
 * the first failure of a stripe is returned; a mirror's is a note, as at the open. Between steps. */
int cl_model_reopen_stripes(cl_model *model, cl_error *err);

/* Bytes per second that the engine's own way of reading gets from an existing file: extents of request_bytes (a
 * multiple of 4096) in scattered order, `depth` requests in flight (0: the default; with threads, that many threads),
 * until `bytes` are read. backend: CL_IO_*. Takes memory for the reads in flight. [any thread] */
int cl_drive_probe(const char *path, uint64_t request_bytes, uint32_t depth, uint64_t bytes, int32_t backend,
                   double *bytes_per_second, cl_error *err);
const char *cl_model_isa(const cl_model *model);

/* ---- what stays in memory: all between steps ------------------------------------------------------------------- */

/* Heat: per expert, layer by layer, in what part of the steps decoding has wanted it of late (0..1), fading with
 * heat_half_life. The model's own, for the next run of it. */
uint64_t cl_model_heat_entries(const cl_model *model);
int cl_model_export_heat(const cl_model *model, float *out, uint64_t n, cl_error *err);
/* Takes heat learned by an earlier run of the same model for its own past; every value must be 0..1. Not while a trace
 * is recorded. Lets cl_model_warm read up to a cacheful. */
int cl_model_import_heat(cl_model *model, const float *heat, uint64_t n, cl_error *err);
/* Reads the hottest absent experts into empty slots for about budget_us, at the lowest priority, evicting nothing;
 * reads may still be under way afterwards. *more = 1 while there is more to do. A read that fails is dropped: whoever
 * needs the expert will get the error. */
int cl_model_warm(cl_model *model, uint64_t budget_us, uint32_t *more, cl_error *err);
/* Starts to record routing and whatever else decides which expert is in memory, to a new file (docs/caching.md); NULL:
 * writes the end, fsyncs and closes, and reports the first error since the start. A thread of its own writes, so that
 * no step waits for the trace's drive. A write error, or a drive that is too slow for long, ends the recording, not
 * the model: cl_model_trace_state returns it from then on, and the file holds all that came before. */
int cl_model_trace(cl_model *model, const char *path, cl_error *err);
int cl_model_trace_state(const cl_model *model, cl_error *err);

/* ---- sequences and their KV -------------------------------------------------------------------------------------- */

int cl_seq_create(cl_seq **out, cl_model *model, cl_error *err);
void cl_seq_free(cl_seq *seq); /* gives its pages back; NULL is fine */
uint64_t cl_seq_length(const cl_seq *seq); /* positions whose KV is present */
/* Makes the item of this sequence that is running, or the next one, return CL_CANCELLED at its next work item; the
 * sequence keeps its length. The flag is cleared when reported. [any thread] */
void cl_seq_cancel(cl_seq *seq);

/* What a page holds, for whoever stores pages: one section per layer and kind, same for every page. */
#define CL_SECTION_KV 1
typedef struct cl_kv_section {
    uint32_t layer;
    uint32_t kind;  /* CL_SECTION_* */
    uint32_t dtype; /* CL_KV_* */
    uint64_t offset, bytes;
} cl_kv_section;
/* Fills up to `capacity` sections, returns how many there are. */
uint32_t cl_kv_layout(const cl_model *model, cl_kv_section *sections, uint32_t capacity);
/* Copies page `page_index` (positions from 64 * page_index) out; positions beyond the sequence's length are zero. */
int cl_seq_export_page(const cl_seq *seq, uint64_t page_index, uint8_t *out, uint64_t out_bytes, cl_error *err);
/* Appends a page with `positions` valid positions (1..64); the length must be a multiple of 64 before. */
int cl_seq_import_page(cl_seq *seq, const uint8_t *data, uint64_t data_bytes, uint32_t positions, cl_error *err);

/* ---- the step ---------------------------------------------------------------------------------------------------- */

typedef struct cl_sampling {
    float temperature; /* 0: greedy, ties to the lower id */
    uint32_t top_k;    /* 0: off */
    float top_p;       /* 1: off */
    uint64_t seed;     /* the random number of a position depends on (seed, position) only */
} cl_sampling;

typedef struct cl_counts {
    uint64_t expert_hits, expert_loads, expert_bytes;
} cl_counts;

/* One token of one sequence: runs `token` at position cl_seq_length, appends its KV, samples the next. */
typedef struct cl_row {
    cl_seq *seq;
    int32_t token;
    cl_sampling sampling;
    float *logits; /* caller-owned [vocab_size], or NULL */
    /* out */
    int32_t next_token;
    cl_counts counts;
    cl_error error; /* CL_OK, or why this row alone failed; its sequence is then unchanged */
} cl_row;

/* A pass of a prompt: `tokens` [n], 1 <= n <= pass_tokens, appended at cl_seq_length when it finishes (not before: a
 * failed or cancelled cursor leaves its sequence unchanged). all_logits: caller-owned f32 [n, vocab_size] that must
 * outlive the cursor, or NULL. The sequence must not be used by a row or another cursor meanwhile. CL_FULL if all
 * prefill workspaces are taken or the KV pages do not suffice. */
int cl_prefill_create(cl_prefill **out, cl_seq *seq, const int32_t *tokens, uint32_t n, const cl_sampling *sampling,
                      float *all_logits, cl_error *err);
void cl_prefill_free(cl_prefill *prefill); /* at any time between steps; NULL is fine */

typedef struct cl_cursor {
    cl_prefill *prefill;
    /* out */
    uint32_t done;          /* 1: finished, the sequence is n longer and next_token is valid */
    uint32_t positions_done; /* progress, 0..n: layers done scaled to positions */
    int32_t next_token;
    cl_counts counts; /* since the cursor was created */
    cl_error error;   /* CL_OK, or why it failed; then only cl_prefill_free may follow */
} cl_cursor;

/* Runs all rows through the whole model, then advances the cursors (in order, each to its end before the next) for
 * about budget_us; UINT64_MAX runs them to the end. Rows and cursors use distinct sequences of this model. Returns an
 * error only for a malformed call; failures of items are in the items. */
int cl_step(cl_model *model, cl_row *rows, uint32_t n_rows, cl_cursor *cursors, uint32_t n_cursors, uint64_t budget_us,
            cl_error *err);

/* ---- recorded traces: no model needed ---------------------------------------------------------------------------- */

typedef struct cl_trace cl_trace;
/* Reads and checks a file of cl_model_trace. One that was cut off is read up to its last whole block. [any thread] */
int cl_trace_open(cl_trace **out, const char *path, cl_error *err);
void cl_trace_close(cl_trace *trace); /* NULL is fine */

typedef struct cl_trace_info {
    uint32_t layers, is_complete; /* 1: the recording was ended, not cut off */
    uint64_t records;             /* experts of all layers */
    uint64_t most_record_bytes, model_bytes;
    uint64_t cache_slots, ring_slots; /* of the model that was recorded */
    uint64_t steps, events;
    uint64_t accesses;              /* experts that decoding wanted, counted once per step and layer */
    uint64_t prefill_uses;
    uint64_t live_hits, live_loads; /* what the model counted itself, as in cl_model_stats */
    uint64_t bytes;
} cl_trace_info;
void cl_trace_get_info(const cl_trace *trace, cl_trace_info *info);

typedef struct cl_replay {
    uint64_t hits, loads; /* decode and prefill, counted as in cl_model_stats */
    uint64_t prefill_uses, prefill_loads;
    uint64_t early_loads; /* reads of lookahead and warm-up */
    uint64_t evictions;
    uint64_t differences; /* recorded acquires that came out otherwise; 0 */
    uint64_t accesses, decode_loads;
} cl_replay;
/* Repeats the recording event by event, with its numbers of slots, from the state that it began with. [any thread] */
int cl_trace_replay(const cl_trace *trace, cl_replay *out, cl_error *err);

#define CL_POLICY_LRU 0
#define CL_POLICY_LFU 1
#define CL_POLICY_LFRU 2
#define CL_POLICY_LEAST_STALE 3
#define CL_POLICY_S3_FIFO 4
#define CL_POLICY_PINS 5
#define CL_POLICY_OURS 6
#define CL_POLICY_BELADY 7
typedef struct cl_policy_result {
    uint64_t accesses, steps, loads, bytes; /* counted; bytes: of the loads */
} cl_policy_result;
/* What the uses of decoding would have read under a policy with `slots` (1..records) in memory in all, from an empty
 * cache; docs/caching.md defines the policies. Counted from the turn of access `count_from` on. CL_POLICY_PINS learns
 * from what comes before; CL_POLICY_BELADY knows the future, and the counted part begins with the best that any policy
 * could hold by then; CL_POLICY_OURS has the ring within its slots. [any thread] */
int cl_trace_policy(const cl_trace *trace, int32_t policy, uint64_t slots, uint64_t count_from, cl_policy_result *out,
                    cl_error *err);

/* cffi: end */

#endif
