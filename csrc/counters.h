/* counters.h - what a model counts, readable from any thread while a step runs. Fields as in cl_model_stats. */
#ifndef COLIBRI_COUNTERS_H
#define COLIBRI_COUNTERS_H
#include <stdatomic.h>
#include <stdint.h>

typedef struct cl_counters {
    _Atomic uint64_t load_bytes_done, load_bytes_total;
    _Atomic uint64_t heartbeat;
    _Atomic uint64_t expert_hits, expert_loads, expert_evictions, expert_bytes;
    _Atomic uint64_t read_errors, checksum_errors;
    _Atomic uint64_t steps, decode_tokens, prefill_tokens;
    _Atomic uint64_t compute_us, wait_us;
    _Atomic uint64_t prefill_wasted_bytes;
    _Atomic uint64_t lookahead_predicted, lookahead_right, lookahead_loads, lookahead_bytes, lookahead_wasted_bytes;
    _Atomic uint64_t lookahead_late, lookahead_saved_us, lookahead_us, lookahead_active, lookahead_trying;
    _Atomic uint64_t kv_pages_free, prefills_free;
} cl_counters;

static inline void cl_count(_Atomic uint64_t *counter, uint64_t n) {
    atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

#endif
