/* trace.c - records what decides which expert is in memory, so that a replay can decide the same again.
 *
 * Owns the coding: an expert of a decode step takes about one byte. A full block is handed to trace_writer.c, with its
 * checksum and the model's own counters, so that a file that was cut off can be read up to its last whole block.
 * Refuses to disturb the model: nothing is allocated after the start, no step waits for the trace's drive, and when
 * the file cannot be written the recording stops, keeps the error for who asks, and decoding goes on.
 */
#include "trace.h"
#include "error.h"
#include "trace_writer.h"
#include <stdlib.h>
#include <string.h>

#define MOST_EVENT_BYTES 32
#define MOST_RELEASE_BYTES 11 /* kind and record */

/* An expert that decoding has acquired in this turn. */
typedef struct held {
    uint32_t expert;
    uint32_t is_released; /* and no event written yet */
} held;

struct cl_recorder {
    cl_trace_writer *writer;
    uint64_t hits, loads, steps; /* when it began */
    uint64_t *first_record;      /* [n_layers] number of the layer's first expert */
    uint64_t last_record[CL_EVENTS];
    int32_t layer;  /* whose turn it is, -1: none yet */
    int64_t expert; /* the last that decoding acquired in it */
    held turn[CL_TURN_MOST];
    uint32_t n_turn, n_released;
    uint32_t used;
    uint8_t *block; /* the writer's */
};

/* ---- blocks ---- */

/* Puts the header before the block's payload; bytes of both. */
static uint64_t finish_block(const cl_store *store, const cl_recorder *r, uint32_t flags) {
    const uint64_t crc_end = offsetof(cl_block_header, flags);
    cl_block_header header = {.magic = CL_BLOCK_MAGIC,
                              .bytes = r->used,
                              .flags = flags,
                              .steps = store->cache.step - r->steps,
                              .hits = atomic_load(&store->counters->expert_hits) - r->hits,
                              .loads = atomic_load(&store->counters->expert_loads) - r->loads};
    memcpy(r->block, &header, sizeof header);
    header.crc32c = cl_crc32c(0, r->block + crc_end, sizeof header - crc_end + r->used);
    memcpy(r->block, &header, sizeof header);
    return sizeof header + r->used;
}

static void write_block(const cl_store *store, cl_recorder *r) {
    cl_trace_writer_put(r->writer, finish_block(store, r, 0));
    r->block = cl_trace_writer_block(r->writer);
    r->used = 0;
}

static void put_byte(cl_recorder *r, uint32_t byte) { r->block[sizeof(cl_block_header) + r->used++] = (uint8_t)byte; }

static void put_number(cl_recorder *r, uint64_t number) {
    for (; number >= 0x80; number >>= 7) put_byte(r, (uint32_t)(number | 0x80));
    put_byte(r, (uint32_t)number);
}

static uint64_t zigzag(int64_t number) { return (uint64_t)number << 1 ^ (uint64_t)(number >> 63); }

static void put_record(cl_recorder *r, cl_event_kind kind, uint32_t layer, uint32_t expert) {
    uint64_t record = r->first_record[layer] + expert;
    put_number(r, zigzag((int64_t)(record - r->last_record[kind])));
    r->last_record[kind] = record;
}

/* ---- events ---- */

/* Releases of a turn are held back: mostly all of them follow, and one byte says so. */
static void put_held_releases(cl_recorder *r) {
    uint32_t kept = 0;
    for (uint32_t i = 0; r->n_released && i < r->n_turn; i++) {
        if (r->turn[i].is_released) {
            put_byte(r, CL_EVENT_RELEASE);
            put_record(r, CL_EVENT_RELEASE, (uint32_t)r->layer, r->turn[i].expert);
        } else {
            r->turn[kept++] = r->turn[i];
        }
    }
    if (r->n_released) r->n_turn = kept;
    r->n_released = 0;
}

/* Room for an event and all releases held back; what is held back comes first. 0: nothing is recorded any more. */
static int make_room(const cl_store *store, cl_recorder *r) {
    if (cl_trace_writer_has_stopped(r->writer)) return 0;
    if (r->used + MOST_EVENT_BYTES + MOST_RELEASE_BYTES * r->n_released > CL_BLOCK_BYTES) write_block(store, r);
    put_held_releases(r);
    return 1;
}

static cl_recorder *begin_event(cl_store *store) {
    return make_room(store, store->recorder) ? store->recorder : NULL;
}

void cl_recorder_event(cl_store *store, cl_event_kind kind, const cl_slot *slot) {
    cl_recorder *r = begin_event(store);
    if (!r) return;
    put_byte(r, kind);
    put_record(r, kind, (uint32_t)slot->layer, slot->expert);
}

static void begin_turn(cl_store *store, cl_recorder *r, int32_t layer) {
    if (r->layer == layer) return;
    if (r->layer + 1 == layer || (r->layer + 1 == (int32_t)store->n_layers && layer == 0)) {
        put_byte(r, CL_EVENT_NEXT_LAYER);
    } else {
        put_byte(r, CL_EVENT_LAYER);
        put_number(r, (uint64_t)layer);
    }
    r->layer = layer;
    r->expert = -1;
    r->n_turn = 0;
}

void cl_recorder_acquire(cl_store *store, const cl_slot *slot, cl_purpose purpose, int loaded) {
    cl_recorder *r = begin_event(store);
    if (!r) return;
    if (purpose != CL_FOR_DECODE && purpose != CL_FOR_DECODE_NOW) {
        put_byte(r, CL_EVENT_ACQUIRE);
        put_number(r, 2 * purpose + (loaded != 0));
        put_record(r, CL_EVENT_ACQUIRE, (uint32_t)slot->layer, slot->expert);
        return;
    }
    begin_turn(store, r, slot->layer);
    int64_t distance = slot->expert - r->expert;
    if (distance >= -CL_EVENT_ZERO && distance < CL_EVENT_OTHER - CL_EVENT_ZERO) {
        put_byte(r, (uint32_t)(distance + CL_EVENT_ZERO));
    } else {
        put_byte(r, CL_EVENT_FAR);
        put_number(r, zigzag(distance));
    }
    r->expert = slot->expert;
    if (r->n_turn < CL_TURN_MOST) r->turn[r->n_turn++] = (held){slot->expert, 0};
}

static held *held_in_turn(cl_recorder *r, const cl_slot *slot) {
    if (slot->layer != r->layer) return NULL;
    for (uint32_t i = 0; i < r->n_turn; i++)
        if (r->turn[i].expert == slot->expert && !r->turn[i].is_released) return &r->turn[i];
    return NULL;
}

void cl_recorder_release(cl_store *store, const cl_slot *slot, cl_slot_state state) {
    cl_recorder *r = store->recorder;
    held *mine = held_in_turn(r, slot);
    if (mine && state == CL_SLOT_READY) {
        mine->is_released = 1;
        if (++r->n_released < r->n_turn) return;
        r->n_turn = r->n_released = 0;
        if ((r = begin_event(store))) put_byte(r, CL_EVENT_RELEASE_TURN);
        return;
    }
    static const cl_event_kind kinds[] = {[CL_SLOT_LOADING] = CL_EVENT_ABANDON,
                                          [CL_SLOT_READY] = CL_EVENT_RELEASE,
                                          [CL_SLOT_FAILED] = CL_EVENT_RELEASE_FAILED};
    cl_recorder_event(store, kinds[state], slot);
    mine = held_in_turn(r, slot);
    if (mine) *mine = r->turn[--r->n_turn];
}

void cl_recorder_uses(cl_store *store, uint32_t uses) {
    cl_recorder *r = uses == 1 ? NULL : begin_event(store);
    if (!r) return;
    put_byte(r, CL_EVENT_USES);
    put_number(r, uses);
}

void cl_recorder_tick(cl_store *store) {
    cl_recorder *r = begin_event(store);
    if (r) put_byte(r, CL_EVENT_TICK);
}

/* ---- the whole file ---- */

static int begin_file(cl_recorder *r, const cl_store *store, double heat_half_life, const char *path, cl_error *err) {
    const uint64_t crc_end = offsetof(cl_trace_header, bytes);
    uint64_t layers = store->n_layers * sizeof(cl_trace_layer);
    cl_trace_header header = {.version = CL_TRACE_VERSION,
                              .bytes = sizeof header + layers + cl_state_bytes(store),
                              .cache_slots = store->cache_slots,
                              .ring_slots = store->ring_slots,
                              .heat_half_life = heat_half_life,
                              .n_layers = store->n_layers,
                              .has_state = 1};
    uint8_t *out = calloc(1, header.bytes);
    if (!out) return cl_fail(err, CL_NOMEM, "no memory for the header of a trace");
    memcpy(header.magic, CL_TRACE_MAGIC, sizeof header.magic);
    for (uint32_t l = 0; l < store->n_layers; l++) {
        cl_trace_layer layer = {store->layers[l].layer, store->layers[l].experts, store->layers[l].record_bytes};
        memcpy(out + sizeof header + l * sizeof layer, &layer, sizeof layer);
    }
    cl_state_write(store, out + sizeof header + layers);
    memcpy(out, &header, sizeof header);
    header.crc32c = cl_crc32c(0, out + crc_end, header.bytes - crc_end);
    memcpy(out, &header, sizeof header);
    int code = cl_trace_writer_open(&r->writer, path, out, header.bytes, err);
    free(out);
    return code;
}

static int prepare(cl_recorder *r, const cl_store *store, cl_error *err) {
    uint64_t records = 0;
    r->layer = -1;
    r->first_record = calloc(store->n_layers + 1ull, sizeof *r->first_record);
    for (uint32_t l = 0; l < store->n_layers; l++) {
        if (r->first_record) r->first_record[l] = records;
        records += store->layers[l].experts;
    }
    if (!r->first_record) return cl_fail(err, CL_NOMEM, "no memory for a trace");
    r->hits = atomic_load(&store->counters->expert_hits);
    r->loads = atomic_load(&store->counters->expert_loads);
    r->steps = store->cache.step;
    return CL_OK;
}

static void free_recorder(cl_recorder *r) {
    free(r->first_record);
    free(r);
}

int cl_recorder_open(cl_recorder **out, cl_store *store, double heat_half_life, const char *path, cl_error *err) {
    *out = NULL;
    cl_recorder *r = calloc(1, sizeof *r);
    if (!r) return cl_fail(err, CL_NOMEM, "no memory for a trace");
    int code = prepare(r, store, err);
    if (!code) code = begin_file(r, store, heat_half_life, path, err);
    if (code) {
        free_recorder(r);
        return code;
    }
    r->block = cl_trace_writer_block(r->writer);
    *out = r;
    return CL_OK;
}

int cl_recorder_state(const cl_recorder *r, cl_error *err) { return cl_trace_writer_state(r->writer, err); }

int cl_recorder_close(cl_recorder *r, cl_store *store, cl_error *err) {
    if (!r) return CL_OK;
    uint64_t bytes = make_room(store, r) ? finish_block(store, r, CL_LAST_BLOCK) : 0;
    int code = cl_trace_writer_close(r->writer, bytes, err);
    free_recorder(r);
    return code;
}
