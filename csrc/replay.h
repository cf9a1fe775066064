/* replay.h - a recorded trace in memory, and what would have happened with another cache. See trace_file.c, replay.c,
 * policies.c. */
#ifndef COLIBRI_REPLAY_H
#define COLIBRI_REPLAY_H
#include "trace.h"

struct cl_trace {
    uint8_t *data; /* the whole file */
    uint64_t bytes;
    cl_trace_header header;
    cl_trace_layer *layers;
    uint64_t *first_record; /* [n_layers + 1] number of the layer's first expert, and of all */
    const uint8_t *state;
    uint64_t state_bytes;
    uint32_t is_complete; /* ends with the last block */
    cl_block_header last; /* of the last whole block; zero if there is none */
    uint64_t events, uses, accesses, turns, prefill_uses;
};

typedef struct cl_event {
    cl_event_kind kind; /* of a decode acquire: CL_EVENT_FAR */
    uint32_t layer, expert;
    uint32_t number; /* USES: rows; ACQUIRE: 2 * purpose + loaded */
} cl_event;

/* A place in the events of a trace. */
typedef struct cl_event_reader {
    const cl_trace *trace;
    const uint8_t *at, *block_end;
    int64_t layer, expert;
    uint64_t last_record[CL_EVENTS];
} cl_event_reader;

void cl_events_begin(cl_event_reader *reader, const cl_trace *trace);
/* 1 and the next event; 0 at the end; CL_CORRUPT. */
int cl_events_next(cl_event_reader *reader, cl_event *event, cl_error *err);

/* An expert that decoding wanted in a turn of its layer. */
typedef struct cl_access {
    uint32_t record; /* counted through all layers */
    uint32_t layer;  /* index of the expert layer */
    uint32_t uses;   /* rows */
    uint32_t turn, step;
} cl_access;

/* All accesses of decoding in order, ascending within a turn: [trace->accesses], to be freed. NULL: no memory. */
cl_access *cl_trace_accesses(const cl_trace *trace, cl_error *err);
/* The first access behind the turn that access `first` begins. */
uint64_t cl_trace_turn_end(const cl_trace *trace, const cl_access *accesses, uint64_t first);

/* A counted access that had to be read. */
void cl_policy_load(cl_policy_result *out, const cl_trace *trace, const cl_access *access);
/* CL_POLICY_OURS of cl_trace_policy: adds the loads of the accesses from `count_from`, a turn's first, to `out`. */
int cl_replay_ours(const cl_trace *trace, const cl_access *accesses, uint64_t slots, uint64_t count_from,
                   cl_policy_result *out, cl_error *err);

#endif
