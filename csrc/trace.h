/* trace.h - a record of what decides which expert is in memory. See trace.c; docs/caching.md tells the format. */
#ifndef COLIBRI_TRACE_H
#define COLIBRI_TRACE_H
#include "store.h"

/* ---- the file ---- */

#define CL_TRACE_MAGIC "COLTRACE"
#define CL_TRACE_VERSION 1
#define CL_BLOCK_MAGIC 0x4b4c4243u /* "CBLK" */
#define CL_BLOCK_BYTES 16384u      /* of payload at most */
#define CL_LAST_BLOCK 1u           /* flag: the recording was ended, not cut off */
#define CL_TURN_MOST 1024u         /* experts of one turn that CL_EVENT_RELEASE_TURN speaks of: the first so many */

/* At the start; then the layers, and the state if there is one. */
typedef struct cl_trace_header {
    char magic[8];
    uint32_t version;
    uint32_t crc32c; /* of all that follows up to the first block, this struct's rest included */
    uint64_t bytes;  /* of all that precedes the first block */
    uint64_t cache_slots, ring_slots;
    double heat_half_life; /* as given to cl_model_open; 0: the default */
    uint32_t n_layers;
    uint32_t has_state; /* 0: nothing in memory and nothing learned */
} cl_trace_header;

typedef struct cl_trace_layer {
    uint32_t layer, experts;
    uint64_t record_bytes;
} cl_trace_layer;

typedef struct cl_block_header {
    uint32_t magic, bytes; /* of the payload that follows */
    uint32_t crc32c;       /* of the rest of this struct and the payload */
    uint32_t flags;
    uint64_t steps;       /* ended since the recording began, at the end of this block, and ... */
    uint64_t hits, loads; /* ... what the model's own counters say of that time */
} cl_block_header;

/* Events. A byte below CL_EVENT_OTHER is a decode acquire of the expert at distance (byte - CL_EVENT_ZERO) from the
 * last one in this layer's turn, the first counting from -1. Numbers are LEB128; "record" is the zigzag distance from
 * the record of the event of this kind before, counting records through all layers. */
#define CL_EVENT_OTHER 0xc0
#define CL_EVENT_ZERO 64
typedef enum cl_event_kind {
    CL_EVENT_NEXT_LAYER = CL_EVENT_OTHER, /* the turn of the layer after the last one */
    CL_EVENT_LAYER,                       /* the turn of: layer */
    CL_EVENT_FAR,                         /* decode acquire, zigzag distance */
    CL_EVENT_USES,                        /* of the acquire before: number of rows, where it is not 1 */
    CL_EVENT_RELEASE_TURN,                /* all that decoding acquired in this turn and still holds */
    CL_EVENT_ACQUIRE,                     /* 2 * purpose + (1 if it was read), record */
    CL_EVENT_RELEASE,                     /* record */
    CL_EVENT_ABANDON,                     /* record: released while its read goes on */
    CL_EVENT_RELEASE_FAILED,              /* record: its read had failed */
    CL_EVENT_SETTLED,                     /* record: the read of an abandoned slot has ended */
    CL_EVENT_SETTLED_FAILED,
    CL_EVENT_PREFILL_HIT, /* record: a prefill counts a use of it ... */
    CL_EVENT_PREFILL_LOAD, /* ... for which it was read */
    CL_EVENT_TICK,         /* a decode step has ended */
    CL_EVENTS
} cl_event_kind;

/* ---- recording ---- */

typedef struct cl_recorder cl_recorder;

/* Starts a recording of `store` in a new file; the caller puts it into store->recorder. */
int cl_recorder_open(cl_recorder **out, cl_store *store, double heat_half_life, const char *path, cl_error *err);
/* Writes what is left, and the end; frees. Reports the first error of the recording. NULL is fine. */
int cl_recorder_close(cl_recorder *recorder, cl_store *store, cl_error *err);
/* CL_OK, or what has stopped it. */
int cl_recorder_state(const cl_recorder *recorder, cl_error *err);

void cl_recorder_acquire(cl_store *store, const cl_slot *slot, cl_purpose purpose, int loaded);
void cl_recorder_release(cl_store *store, const cl_slot *slot, cl_slot_state state);
void cl_recorder_event(cl_store *store, cl_event_kind kind, const cl_slot *slot);
void cl_recorder_uses(cl_store *store, uint32_t uses);
void cl_recorder_tick(cl_store *store);

/* What store.c and cache.c call; without a recording, one comparison. */
static inline void cl_record_acquire(cl_store *store, const cl_slot *slot, cl_purpose purpose, int loaded) {
    if (store->recorder) cl_recorder_acquire(store, slot, purpose, loaded);
}
static inline void cl_record_release(cl_store *store, const cl_slot *slot, cl_slot_state state) {
    if (store->recorder) cl_recorder_release(store, slot, state);
}
static inline void cl_record_settled(cl_store *store, const cl_slot *slot, int failed) {
    if (store->recorder) cl_recorder_event(store, failed ? CL_EVENT_SETTLED_FAILED : CL_EVENT_SETTLED, slot);
}
static inline void cl_record_prefill_use(cl_store *store, const cl_slot *slot, int loaded) {
    if (store->recorder) cl_recorder_event(store, loaded ? CL_EVENT_PREFILL_LOAD : CL_EVENT_PREFILL_HIT, slot);
}
static inline void cl_record_uses(cl_store *store, uint32_t uses) {
    if (store->recorder) cl_recorder_uses(store, uses);
}
static inline void cl_record_tick(cl_store *store) {
    if (store->recorder) cl_recorder_tick(store);
}

/* ---- what a recording begins with: trace_state.c ---- */

#define CL_STATE_SLOT_BYTES 32

/* Bytes of the state of a store of this shape, and the two directions. cl_state_read checks every number. */
uint64_t cl_state_bytes(const cl_store *store);
void cl_state_write(const cl_store *store, uint8_t *out);
int cl_state_read(cl_store *store, const uint8_t *in, uint64_t bytes, cl_error *err);

#endif
