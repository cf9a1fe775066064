/* trace_file.c - reads a recorded trace and refuses one that is damaged, before anything is computed from it.
 *
 * Owns the whole file in memory and the decoding of its events. A trace may come from anywhere: header, layers and
 * every block must fit their checksums, every event must name a layer and an expert that exist. A file that was cut off
 * in its last block is read up to the block before, and says so.
 */
#include "error.h"
#include "reader.h"
#include "replay.h"
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MOST_LAYERS 65536u
#define MOST_EXPERTS 65536u
#define MOST_RECORDS (1u << 24)
#define MOST_SLOTS (1ull << 30)
#define MOST_RING 65536u

/* ---- events ---- */

void cl_events_begin(cl_event_reader *reader, const cl_trace *trace) {
    memset(reader, 0, sizeof *reader);
    reader->trace = trace;
    reader->at = reader->block_end = trace->data + trace->header.bytes;
    reader->layer = reader->expert = -1;
}

static int damaged(const cl_event_reader *r, const char *what, cl_error *err) {
    return cl_fail(err, CL_CORRUPT, "the trace's event before offset %llu %s",
                   (unsigned long long)(r->at - r->trace->data), what);
}

static int get_number(cl_event_reader *r, uint64_t *number) {
    *number = 0;
    for (uint32_t shift = 0; shift < 63 && r->at < r->block_end; shift += 7) {
        uint64_t byte = *r->at++;
        *number |= (byte & 0x7f) << shift;
        if (byte < 0x80) return 1;
    }
    return 0;
}

static int64_t unzigzag(uint64_t number) { return (int64_t)(number >> 1) ^ -(int64_t)(number & 1); }

/* The next whole block, 0 at the end. cl_trace_open has found all to be sound. */
static int enter_block(cl_event_reader *r) {
    const cl_trace *t = r->trace;
    while (r->at == r->block_end) {
        cl_block_header header;
        if ((uint64_t)(t->data + t->bytes - r->at) < sizeof header) return 0;
        memcpy(&header, r->at, sizeof header);
        if ((uint64_t)(t->data + t->bytes - r->at) - sizeof header < header.bytes) return 0;
        r->at += sizeof header;
        r->block_end = r->at + header.bytes;
    }
    return 1;
}

static int get_record(cl_event_reader *r, cl_event *event, cl_error *err) {
    const cl_trace *t = r->trace;
    uint64_t number, *last = &r->last_record[event->kind];
    if (!get_number(r, &number)) return damaged(r, "ends early", err);
    *last += (uint64_t)unzigzag(number);
    if (*last >= t->first_record[t->header.n_layers]) return damaged(r, "names a record that is not there", err);
    uint32_t low = 0, high = t->header.n_layers;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (t->first_record[middle] <= *last) low = middle;
        else high = middle;
    }
    event->layer = low;
    event->expert = (uint32_t)(*last - t->first_record[low]);
    return 1;
}

static int get_acquire(cl_event_reader *r, cl_event *event, int64_t distance, cl_error *err) {
    if (r->layer < 0) return damaged(r, "has an expert before any layer", err);
    if (distance > (int64_t)MOST_EXPERTS || distance < -(int64_t)MOST_EXPERTS)
        return damaged(r, "names an expert that is not there", err);
    r->expert += distance;
    if (r->expert < 0 || r->expert >= r->trace->layers[r->layer].experts)
        return damaged(r, "names an expert that is not there", err);
    *event = (cl_event){CL_EVENT_FAR, (uint32_t)r->layer, (uint32_t)r->expert, 0};
    return 1;
}

static int get_layer(cl_event_reader *r, cl_event_kind kind, cl_error *err) {
    uint64_t layer = (uint64_t)(r->layer + 1) % r->trace->header.n_layers;
    if (kind == CL_EVENT_LAYER && !get_number(r, &layer)) return damaged(r, "ends early", err);
    if (layer >= r->trace->header.n_layers) return damaged(r, "names a layer that is not there", err);
    r->layer = (int64_t)layer;
    r->expert = -1;
    return 1;
}

int cl_events_next(cl_event_reader *r, cl_event *event, cl_error *err) {
    if (!enter_block(r)) return 0;
    uint64_t number, byte = *r->at++;
    if (byte < CL_EVENT_OTHER) return get_acquire(r, event, (int64_t)byte - CL_EVENT_ZERO, err);
    *event = (cl_event){(cl_event_kind)byte, r->layer < 0 ? 0 : (uint32_t)r->layer, 0, 0};
    switch (event->kind) {
    case CL_EVENT_NEXT_LAYER:
    case CL_EVENT_LAYER: {
        int code = get_layer(r, event->kind, err);
        event->layer = r->layer < 0 ? 0 : (uint32_t)r->layer;
        return code;
    }
    case CL_EVENT_FAR:
        if (!get_number(r, &number)) return damaged(r, "ends early", err);
        return get_acquire(r, event, unzigzag(number), err);
    case CL_EVENT_USES:
    case CL_EVENT_ACQUIRE:
        if (!get_number(r, &number)) return damaged(r, "ends early", err);
        if (number > UINT32_MAX || (event->kind == CL_EVENT_ACQUIRE && number >= 2 * CL_PURPOSES_RECORDED))
            return damaged(r, "has a number out of range", err);
        event->number = (uint32_t)number;
        return event->kind == CL_EVENT_USES ? 1 : get_record(r, event, err);
    case CL_EVENT_TICK:
    case CL_EVENT_RELEASE_TURN: return 1;
    case CL_EVENT_RELEASE:
    case CL_EVENT_ABANDON:
    case CL_EVENT_RELEASE_FAILED:
    case CL_EVENT_SETTLED:
    case CL_EVENT_SETTLED_FAILED:
    case CL_EVENT_PREFILL_HIT:
    case CL_EVENT_PREFILL_LOAD: return get_record(r, event, err);
    case CL_EVENTS: break;
    }
    return damaged(r, "is of no known kind", err);
}

/* ---- the file ---- */

static int read_file(cl_trace *t, const char *path, cl_error *err) {
    cl_reader reader;
    struct stat status;
    uint64_t done = 0;
    int code = cl_reader_open(&reader, path, CL_DIRECT_OFF, err);
    if (code) return code;
    if (fstat(reader.buffered_fd, &status) || !S_ISREG(status.st_mode)) {
        code = cl_fail(err, CL_INVALID, "%s: not a regular file", path);
    } else {
        t->bytes = (uint64_t)status.st_size;
        t->data = malloc(t->bytes + 1);
        if (!t->data) code = cl_fail(err, CL_NOMEM, "%s: no memory for a trace of %llu bytes", path,
                                     (unsigned long long)t->bytes);
        else if (t->bytes && cl_reader_read(&reader, t->data, t->bytes, 0, &done))
            code = cl_fail(err, CL_IO, "%s: reading %llu bytes failed after %llu", path, (unsigned long long)t->bytes,
                           (unsigned long long)done);
    }
    cl_reader_close(&reader);
    return code;
}

static int read_layers(cl_trace *t, const char *path, cl_error *err) {
    uint32_t n = t->header.n_layers;
    uint64_t records = 0;
    t->layers = calloc(n, sizeof *t->layers);
    t->first_record = calloc(n + 1ull, sizeof *t->first_record);
    if (!t->layers || !t->first_record) return cl_fail(err, CL_NOMEM, "%s: no memory for %u layers", path, n);
    memcpy(t->layers, t->data + sizeof t->header, n * sizeof *t->layers);
    for (uint32_t l = 0; l < n; l++) {
        const cl_trace_layer *layer = &t->layers[l];
        if (layer->experts < 1 || layer->experts > MOST_EXPERTS || records + layer->experts > MOST_RECORDS ||
            layer->record_bytes > INT64_MAX / MOST_RECORDS)
            return cl_fail(err, CL_CORRUPT, "%s: layer %u of %u experts of %llu bytes is beyond what a trace can hold",
                           path, layer->layer, layer->experts, (unsigned long long)layer->record_bytes);
        t->first_record[l] = records;
        records += layer->experts;
    }
    t->first_record[n] = records;
    return CL_OK;
}

static int read_header(cl_trace *t, const char *path, cl_error *err) {
    const uint64_t crc_end = offsetof(cl_trace_header, bytes);
    cl_trace_header *h = &t->header;
    if (t->bytes < sizeof *h) return cl_fail(err, CL_CORRUPT, "%s: too short for a trace", path);
    memcpy(h, t->data, sizeof *h);
    if (memcmp(h->magic, CL_TRACE_MAGIC, sizeof h->magic)) return cl_fail(err, CL_CORRUPT, "%s: not a trace", path);
    if (h->version != CL_TRACE_VERSION)
        return cl_fail(err, CL_UNSUPPORTED, "%s: trace format %u, this build reads %u", path, h->version,
                       CL_TRACE_VERSION);
    if (h->bytes > t->bytes || h->bytes < sizeof *h)
        return cl_fail(err, CL_CORRUPT, "%s: cut off in its header", path);
    if (cl_crc32c(0, t->data + crc_end, h->bytes - crc_end) != h->crc32c)
        return cl_fail(err, CL_CORRUPT, "%s: the header fails its checksum", path);
    if (h->n_layers < 1 || h->n_layers > MOST_LAYERS ||
        h->bytes - sizeof *h < (uint64_t)h->n_layers * sizeof *t->layers || h->cache_slots > MOST_SLOTS ||
        h->ring_slots > MOST_RING || h->has_state > 1 ||
        !(h->heat_half_life == 0 || (h->heat_half_life >= 1 && h->heat_half_life <= 1e9)))
        return cl_fail(err, CL_CORRUPT, "%s: the header has numbers out of range", path);
    t->state = t->data + sizeof *h + h->n_layers * sizeof *t->layers;
    t->state_bytes = (uint64_t)(t->data + h->bytes - t->state);
    if (!h->has_state && t->state_bytes) return cl_fail(err, CL_CORRUPT, "%s: the header is too long", path);
    if (h->has_state && (h->cache_slots + h->ring_slots) > t->state_bytes / CL_STATE_SLOT_BYTES)
        return cl_fail(err, CL_CORRUPT, "%s: the state of %llu slots is missing", path,
                       (unsigned long long)(h->cache_slots + h->ring_slots));
    return read_layers(t, path, err);
}

static int check_blocks(cl_trace *t, const char *path, cl_error *err) {
    const uint64_t crc_end = offsetof(cl_block_header, flags);
    uint64_t at = t->header.bytes;
    while (!t->is_complete && t->bytes - at >= sizeof t->last) {
        cl_block_header header;
        memcpy(&header, t->data + at, sizeof header);
        if (header.magic != CL_BLOCK_MAGIC || header.bytes > CL_BLOCK_BYTES)
            return cl_fail(err, CL_CORRUPT, "%s: no block of a trace at offset %llu", path, (unsigned long long)at);
        if (t->bytes - at - sizeof header < header.bytes) break;
        if (cl_crc32c(0, t->data + at + crc_end, sizeof header - crc_end + header.bytes) != header.crc32c)
            return cl_fail(err, CL_CORRUPT, "%s: the block at offset %llu fails its checksum", path,
                           (unsigned long long)at);
        t->last = header;
        t->is_complete = header.flags & CL_LAST_BLOCK;
        at += sizeof header + header.bytes;
    }
    if (t->is_complete && at != t->bytes)
        return cl_fail(err, CL_CORRUPT, "%s: %llu bytes follow the last block", path,
                       (unsigned long long)(t->bytes - at));
    t->bytes = at;
    return CL_OK;
}

static int check_events(cl_trace *t, cl_error *err) {
    cl_event_reader reader;
    cl_event event;
    int more;
    cl_events_begin(&reader, t);
    while ((more = cl_events_next(&reader, &event, err)) > 0) {
        t->events++;
        t->prefill_uses += event.kind == CL_EVENT_PREFILL_HIT || event.kind == CL_EVENT_PREFILL_LOAD;
        t->accesses += event.kind == CL_EVENT_FAR;
        if (event.kind == CL_EVENT_USES && !t->accesses) return damaged(&reader, "counts uses of nothing", err);
    }
    return more;
}

int cl_trace_open(cl_trace **out, const char *path, cl_error *err) {
    *out = NULL;
    cl_ok(err);
    cl_trace *t = calloc(1, sizeof *t);
    if (!t) return cl_fail(err, CL_NOMEM, "no memory for a trace");
    int code = read_file(t, path, err);
    if (!code) code = read_header(t, path, err);
    if (!code) code = check_blocks(t, path, err);
    if (!code) code = check_events(t, err);
    if (code) cl_trace_close(t);
    else *out = t;
    return code;
}

void cl_trace_close(cl_trace *t) {
    if (!t) return;
    free(t->data);
    free(t->layers);
    free(t->first_record);
    free(t);
}

void cl_trace_get_info(const cl_trace *t, cl_trace_info *info) {
    *info = (cl_trace_info){.layers = t->header.n_layers,
                            .is_complete = t->is_complete,
                            .records = t->first_record[t->header.n_layers],
                            .cache_slots = t->header.cache_slots,
                            .ring_slots = t->header.ring_slots,
                            .steps = t->last.steps,
                            .events = t->events,
                            .accesses = t->accesses,
                            .prefill_uses = t->prefill_uses,
                            .live_hits = t->last.hits,
                            .live_loads = t->last.loads,
                            .bytes = t->bytes};
    for (uint32_t l = 0; l < t->header.n_layers; l++) {
        if (t->layers[l].record_bytes > info->most_record_bytes) info->most_record_bytes = t->layers[l].record_bytes;
        info->model_bytes += t->layers[l].record_bytes * t->layers[l].experts;
    }
}

/* ---- accesses ---- */

static int by_record(const void *a, const void *b) {
    uint32_t x = ((const cl_access *)a)->record, y = ((const cl_access *)b)->record;
    return x < y ? -1 : x > y;
}

cl_access *cl_trace_accesses(const cl_trace *t, cl_error *err) {
    cl_access *all = malloc((t->accesses + 1) * sizeof *all);
    if (!all) {
        cl_fail(err, CL_NOMEM, "no memory for the %llu accesses of a trace", (unsigned long long)t->accesses);
        return NULL;
    }
    cl_event_reader reader;
    cl_event event;
    uint64_t n = 0, first = 0; /* of the turn */
    uint32_t turn = 0, step = 0;
    cl_events_begin(&reader, t);
    while (cl_events_next(&reader, &event, NULL) > 0) {
        if (event.kind == CL_EVENT_FAR)
            all[n++] = (cl_access){(uint32_t)t->first_record[event.layer] + event.expert, event.layer, 1, turn, step};
        if (event.kind == CL_EVENT_USES) all[n - 1].uses = event.number;
        if (event.kind != CL_EVENT_NEXT_LAYER && event.kind != CL_EVENT_LAYER && event.kind != CL_EVENT_TICK) continue;
        qsort(all + first, n - first, sizeof *all, by_record);
        turn += n > first;
        first = n;
        step += event.kind == CL_EVENT_TICK;
    }
    qsort(all + first, n - first, sizeof *all, by_record);
    return all;
}

uint64_t cl_trace_turn_end(const cl_trace *t, const cl_access *accesses, uint64_t first) {
    uint64_t end = first + 1;
    while (end < t->accesses && accesses[end].turn == accesses[first].turn) end++;
    return end;
}
