/* store.h - the one way to get an expert: resident, else read. See store.c and cache.c. */
#ifndef COLIBRI_STORE_H
#define COLIBRI_STORE_H
#include "arena.h"
#include "colibri.h"
#include "counters.h"
#include "io.h"

/* A place for one record. */
typedef struct cl_slot {
    uint8_t *data;
    int32_t layer; /* index of the expert layer, -1: empty */
    uint32_t expert;
    uint32_t pins;    /* users; a pinned slot keeps its record */
    uint32_t loading; /* read submitted, its end not yet noticed */
    uint64_t last_use;
    cl_read read;
} cl_slot;

typedef struct cl_store_layer {
    uint32_t layer; /* of the model */
    uint32_t experts;
    uint32_t extents_per_record;
    uint64_t record_bytes;
    cl_extent *extents; /* [experts][extents_per_record] */
    uint8_t *verified;  /* the same shape: 1 once its checksum has been compared, see cl_read */
    int32_t *slot_of;   /* [experts], -1: not in memory */
    double *heat;       /* [experts], how much decoding used it of late; kept for absent experts too */
} cl_store_layer;

typedef struct cl_store {
    cl_store_layer *layers;
    uint32_t n_layers;
    cl_slot *slots; /* [cache_slots] the cache, then [ring_slots] the ring */
    uint64_t cache_slots, ring_slots;
    uint64_t cache_empty, cache_pinned;
    uint64_t clock;
    double heat_unit; /* what one use adds now; grows, so that older uses weigh less */
    cl_io *io;
    cl_counters *counters;
} cl_store;

/* Whom a slot is for decides where it may come from.
 *  DECODE: an empty or the least valued slot of the cache, else a free one of the ring.
 *  PREFILL: a free slot of the ring, or an empty one of the cache as long as another one stays unpinned (a cursor may
 * be suspended while it holds slots, and decoding must be able to go on). Evicts nothing. PREFILL_NOW: as PREFILL,
 * else the least valued one of the cache; to be released before the cursor is suspended. */
typedef enum cl_purpose { CL_FOR_DECODE, CL_FOR_PREFILL, CL_FOR_PREFILL_NOW } cl_purpose;
typedef enum cl_slot_state { CL_SLOT_LOADING, CL_SLOT_READY, CL_SLOT_FAILED } cl_slot_state;

/* Carves tables and slots; with carve->base NULL only counts. Bytes of slots and ring are returned for the plan. */
void cl_store_place(cl_store *store, cl_carve *carve, const cl_model_options *options);
uint64_t cl_store_slot_bytes(const cl_model_options *options);
/* Copies the layers' descriptions into what cl_store_place carved. */
void cl_store_init(cl_store *store, const cl_model_options *options);

/* The slot of an expert, pinned; its read is started if it is not in memory (*loaded = 1). NULL: no slot is free. */
cl_slot *cl_store_acquire(cl_store *store, uint32_t layer, uint32_t expert, cl_purpose purpose, int *loaded);
int cl_store_resident(cl_store *store, uint32_t layer, uint32_t expert);
cl_slot_state cl_store_state(cl_slot *slot);
/* Unpins. A slot whose read failed becomes empty, so that a later step tries again. */
void cl_store_release(cl_store *store, cl_slot *slot);

/* ---- cache.c ---- */

void cl_cache_touch(cl_store *store, uint32_t layer, uint32_t expert, uint32_t uses);
void cl_cache_tick(cl_store *store); /* once per decode step */
/* An empty slot, else the least valued one that nobody uses; NULL if all are in use. */
cl_slot *cl_cache_victim(cl_store *store);

#endif
