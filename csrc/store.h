/* store.h - the one way to get an expert: resident, else read. See store.c and cache.c. */
#ifndef COLIBRI_STORE_H
#define COLIBRI_STORE_H
#include "arena.h"
#include "colibri.h"
#include "counters.h"
#include "io.h"

struct cl_recorder;

/* A place for one record. */
typedef struct cl_slot {
    uint8_t *data; /* slots of the cache and the ring may exchange theirs, see exchange in cache.c */
    int32_t layer; /* index of the expert layer, -1: empty */
    uint32_t expert;
    uint32_t pins;    /* users; a pinned slot keeps its record */
    uint32_t loading; /* read submitted, its end not yet noticed */
    uint32_t fresh;   /* read for a prefill, and not yet counted as one of its uses */
    uint32_t is_expected; /* read by lookahead, for a turn that has not ended yet */
    uint32_t for_decode; /* a slot of the ring that decoding holds; stays set while a prompt holds it too */
    uint32_t is_abandoned; /* in the list that begins at store->abandoned */
    int32_t next_abandoned;
    uint64_t last_use;
    cl_read read;
} cl_slot;

/* How often an expert was wanted, as averages over its layer's turns: each turn adds 1 or 0, and counts half after this
 * many turns. The longest, which is the option heat_half_life, comes in two parts: what this run has seen, and what is
 * left of what an earlier one had learned; together they survive the next restart. */
#define CL_HEATS 6
#define CL_HALF_LIVES {1, 4, 16, 64, 512, 512}
#define CL_LONG_HEAT (CL_HEATS - 2)
#define CL_LEARNED_HEAT (CL_HEATS - 1)
#define CL_FEATURES (CL_HEATS + 1) /* the heats, and 1 */

typedef struct cl_store_layer {
    uint32_t layer; /* of the model */
    uint32_t experts;
    uint32_t extents_per_record;
    uint64_t record_bytes;
    cl_extent *extents;       /* [experts][extents_per_record] */
    uint8_t *verified;        /* the same shape: 1 once its checksum has been compared, see cl_read */
    int32_t *slot_of;         /* [experts], -1: not in memory */
    float (*heats)[CL_HEATS]; /* [experts], known of absent ones too */
    float *value;             /* [experts] estimated probability to be wanted when the layer's turn comes again */
    uint8_t *wanted;          /* [experts], in the turn that is open */
    uint64_t turns;           /* how many steps have come through here */
    int32_t coldest;          /* slot of the cache with the least value among this layer's that may go, -1: none */
    uint32_t is_stale;        /* coldest must be looked for again */
} cl_store_layer;

/* What cache.c knows beside the experts' heats. */
typedef struct cl_cache {
    double decay[CL_HEATS];
    double weights[CL_FEATURES];           /* value = weights . (heats, 1) */
    double gram[CL_FEATURES][CL_FEATURES]; /* of the fit: sums of products of the features, upper triangle, ... */
    double moment[CL_FEATURES];            /* ... and of the features with what came */
    double price;                          /* what a slot's contents must be worth, per sweep over the layers */
    uint64_t step;
    int32_t open_layer; /* whose turn it is, -1: nobody's */
    uint32_t learn_every;
    int32_t layer_at; /* the last layer that had its turn */
} cl_cache;

typedef struct cl_store {
    cl_store_layer *layers;
    uint32_t n_layers;
    cl_slot *slots; /* [cache_slots] the cache, then [ring_slots] the ring */
    uint64_t cache_slots, ring_slots;
    uint64_t cache_empty, cache_pinned;
    uint64_t first_empty; /* no slot of the cache below this one is empty */
    uint64_t clock;
    int32_t abandoned; /* slots whose read goes on though nobody has them pinned; -1: none */
    cl_cache cache;
    uint64_t warm_left; /* reads that cl_model_warm may still start */
    cl_io *io;          /* NULL in a replay: every read is complete at once */
    cl_counters *counters;
    struct cl_recorder *recorder; /* NULL: nothing is recorded */
} cl_store;

/* Whom a slot is for decides where it may come from.
 *  DECODE: an empty slot of the cache; else the place of the least valued record of the cache, or, if the new record is
 * worth less than that one, a free slot of the ring, or none for now if enough of the ring is held to keep the drives
 * busy. What the ring holds moves into the cache when it turns out to be worth it. DECODE_NOW: as DECODE, when decoding
 * itself holds nothing that it could give back and wait for: never "none for now".
 *  PREFILL: a free slot of the ring, or an empty one of the cache as long as another one stays unpinned (a cursor may
 * be suspended while it holds slots, and decoding must be able to go on). Evicts nothing. PREFILL_NOW: as PREFILL,
 * else the least valued one of the cache; a suspended cursor may keep it only while another one is unpinned.
 *  LOOKAHEAD: an empty slot of the cache, or one of the ring while half of it is free, else the place of a record of
 * the cache that is worth less than the new one. WARM: an empty slot of the cache. Both as long as another slot stays
 * unpinned. */
typedef enum cl_purpose {
    CL_FOR_DECODE,
    CL_FOR_PREFILL,
    CL_FOR_PREFILL_NOW,
    CL_FOR_LOOKAHEAD,
    CL_FOR_WARM,
    CL_PURPOSES_RECORDED, /* the others are, in a trace, a turn's uses */
    CL_FOR_DECODE_NOW = CL_PURPOSES_RECORDED
} cl_purpose;
typedef enum cl_slot_state { CL_SLOT_LOADING, CL_SLOT_READY, CL_SLOT_FAILED } cl_slot_state;

/* Carves tables and slots; with carve->base NULL only counts. Bytes of slots and ring are returned for the plan. */
void cl_store_place(cl_store *store, cl_carve *carve, const cl_model_options *options);
uint64_t cl_store_slot_bytes(const cl_model_options *options);
/* Copies the layers' descriptions into what cl_store_place carved. */
void cl_store_init(cl_store *store, const cl_model_options *options);

/* The slot of an expert, pinned; its read is started if it is not in memory (*loaded = 1). NULL: no slot is free.
 * Never waits. Decoding asks for what it needs of a layer together, and for what is in memory first. */
cl_slot *cl_store_acquire(cl_store *store, uint32_t layer, uint32_t expert, cl_purpose purpose, int *loaded);
int cl_store_resident(cl_store *store, uint32_t layer, uint32_t expert);
cl_slot_state cl_store_state(cl_slot *slot);
/* Unpins. A slot whose read failed becomes empty, so that a later step tries again. */
void cl_store_release(cl_store *store, cl_slot *slot);

/* For recorded traces: a prefill counts a use of the expert whose slot it holds, as a load or a hit. */
void cl_store_prefill_use(cl_store *store, cl_slot *slot, int loaded);

/* ---- between store.c, cache.c and replay.c ---- */

int cl_store_in_cache(const cl_store *store, const cl_slot *slot);
/* Notices which abandoned reads have ended. */
void cl_store_settle(cl_store *store);
/* The end of an abandoned read; if it failed, the slot becomes empty. */
void cl_store_settled(cl_store *store, cl_slot *slot, int failed);
cl_slot *cl_store_empty_slot(cl_store *store); /* of the cache, the first; NULL: none */
void cl_store_forget(cl_store *store, cl_slot *slot);
/* Gives the slot to another record; what it held is forgotten. */
void cl_store_put(cl_store *store, cl_slot *slot, uint32_t layer, uint32_t expert);

/* ---- cache.c ---- */

void cl_cache_place(cl_store_layer *layer, cl_carve *carve, uint32_t experts);
void cl_cache_init(cl_store *store, double heat_half_life);
/* An expert of which decoding has a slot, for `uses` rows. */
void cl_cache_touch(cl_store *store, uint32_t layer, uint32_t expert, uint32_t uses);
void cl_cache_tick(cl_store *store); /* once per decode step */
/* The turn of a layer begins; that of another one, if still open, ends. */
void cl_cache_open_layer(cl_store *store, uint32_t layer);
/* The unpinned slot of the cache with the least valued record; NULL if all are in use. Only while none is empty. */
cl_slot *cl_cache_victim(cl_store *store);
/* The slot of the ring that is empty, or else free with the least to lose; NULL if all are in use. */
cl_slot *cl_cache_ring_slot(cl_store *store);
/* Where decoding puts a record that is not in memory while no slot of the cache is empty. NULL: it waits for a slot of
 * its own, unless it may not; or all are in use. */
cl_slot *cl_cache_choose(cl_store *store, uint32_t layer, uint32_t expert, int may_wait);
/* Whether the record in `slot` is worth less than the absent expert. */
int cl_cache_is_colder(const cl_store *store, const cl_slot *slot, uint32_t layer, uint32_t expert);
void cl_cache_set_heats(cl_store *store, const float *heat); /* of all experts, layer by layer, 0..1 */
void cl_cache_get_heats(const cl_store *store, float *heat);

#endif
