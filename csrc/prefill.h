/* prefill.h - a pass of a prompt on its way through the layers. See prefill.c. */
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
    uint32_t next_read; /* first expert not yet looked at for reading ahead */
    cl_slot **held;     /* [ring_slots] reads ahead, ascending expert, from held_first on, in a circle */
    uint32_t held_first, n_held;

    int32_t next_token;
    cl_counts counts;
    cl_error error;
};

#endif
