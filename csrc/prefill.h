/* prefill.h - a pass of a prompt on its way through the layers. See prefill.c and prefill_ring.c. */
#ifndef COLIBRI_PREFILL_H
#define COLIBRI_PREFILL_H
#include "model.h"

typedef enum cl_phase {
    CL_PHASE_ATTENTION, /* per tile of tokens */
    CL_PHASE_DENSE,     /* per tile */
    CL_PHASE_ROUTE,     /* per tile */
    CL_PHASE_EXPERTS,   /* per expert and tile of the tokens that want it */
    CL_PHASE_COMBINE,   /* per tile */
    CL_PHASE_HEAD,      /* per tile, or the last token */
    CL_PHASE_DONE
} cl_phase;

/* A slot that a cursor keeps pinned for an expert that comes later. */
typedef struct cl_held {
    cl_slot *slot;
    uint32_t loaded;  /* the cursor itself has started the read */
    uint32_t counted; /* the router has chosen it, and it is in the counts */
} cl_held;

struct cl_prefill {
    cl_model *model;
    uint32_t taken;
    cl_seq *seq;
    uint32_t n;
    int32_t *tokens; /* [pass_tokens] */
    cl_sampling sampling;
    float *all_logits;

    float *h;                /* [pass_tokens, hidden] the residual stream */
    float *sum;              /* [pass_tokens, hidden] the routed experts so far */
    uint32_t *ids;           /* [pass_tokens, top_k] */
    float *weights;          /* [pass_tokens, top_k] */
    uint8_t *bad;            /* [pass_tokens] */
    uint32_t *first, *order; /* pairs by expert */

    /* where it stands */
    uint32_t layer;
    cl_phase phase;
    uint32_t at; /* next token of the phase, or next pair of the expert */
    uint32_t expert;

    /* what it holds and reads ahead */
    cl_slot *slot;       /* of the expert at hand, NULL: not taken yet */
    int64_t routed;      /* the layer that first and order are about, -1: none yet */
    uint32_t read_layer; /* the MoE layer that is read ahead, n_layers: none is left */
    uint32_t next_read;  /* its first expert not yet looked at */
    cl_held *held;       /* [ring_slots] reads ahead, ascending, from held_first on, in a circle */
    uint32_t held_first, n_held;

    int32_t next_token;
    cl_counts counts;
    cl_error error;
};

/* ---- prefill_ring.c ---- */

void cl_prefill_ring_begin(cl_prefill *p);
/* Keeps as many reads under way as the ring has room for. Between any two work items. */
void cl_prefill_read_ahead(cl_prefill *p);
/* The router has chosen for p->layer: what was read ahead and is not wanted is given back. */
void cl_prefill_routed(cl_prefill *p);
/* Puts the slot of p->expert into p->slot and starts its read if need be; 0: no slot is free. */
int cl_prefill_take_slot(cl_prefill *p);
/* Whether the cursor may be suspended with what it holds: decoding needs one slot of the cache to go on. */
int cl_prefill_may_pause(const cl_prefill *p);
void cl_prefill_drop_slot(cl_prefill *p);
/* Gives everything back. */
void cl_prefill_ring_end(cl_prefill *p);

#endif
