/* policies.c - how many reads other cache policies would have needed for a recorded trace: what ours is judged by.
 *
 * Owns the known policies, each as the literature has it, on the accesses of decoding alone and from an empty cache.
 * All get what the engine gives its own: in a layer's turn the resident experts are used first and are not evicted for
 * the others. None of this runs while a model is served. Definitions and sources stand in docs/caching.md.
 */
#include "error.h"
#include "replay.h"
#include <stdlib.h>
#include <string.h>

#define NOWHERE UINT32_MAX

/* A record of the model, as a policy sees it. */
typedef struct item {
    uint64_t key, then; /* the least goes first; `then` decides ties */
    uint64_t count, last_use, inserted;
    uint64_t next_use; /* of Belady's */
    uint32_t at;       /* in its heap, or NOWHERE */
    uint32_t turn, step;
    uint32_t where;    /* LFRU and S3-FIFO: which part; 0: not in memory */
    uint32_t hits;     /* S3-FIFO: since it came, at most 3 */
    uint32_t previous, next; /* in its list */
} item;

typedef struct heap {
    uint32_t *items; /* [capacity] */
    uint64_t n;
} heap;

typedef struct list {
    uint32_t first, last;
    uint64_t n;
} list;

typedef struct cache {
    const cl_trace *trace;
    const cl_access *accesses;
    item *items; /* [records] */
    uint64_t slots, records, clock, count_from;
    cl_policy_result *out;
    heap main, other;
    list small, large, ghost; /* S3-FIFO; least-stale uses `large` alone */
    uint32_t *aside;          /* [slots] */
    uint64_t *next_use;       /* [accesses] */
} cache;

/* ---- a heap of items, least key first ---- */

static int is_before(const cache *c, uint32_t a, uint32_t b) {
    const item *x = &c->items[a], *y = &c->items[b];
    return x->key != y->key ? x->key < y->key : x->then < y->then;
}

static void place(cache *c, heap *h, uint64_t at, uint32_t which) {
    h->items[at] = which;
    c->items[which].at = (uint32_t)at;
}

static void sift(cache *c, heap *h, uint64_t at) {
    uint32_t which = h->items[at];
    for (; at && is_before(c, which, h->items[(at - 1) / 2]); at = (at - 1) / 2)
        place(c, h, at, h->items[(at - 1) / 2]);
    for (uint64_t child; (child = 2 * at + 1) < h->n; at = child) {
        if (child + 1 < h->n && is_before(c, h->items[child + 1], h->items[child])) child++;
        if (!is_before(c, h->items[child], which)) break;
        place(c, h, at, h->items[child]);
    }
    place(c, h, at, which);
}

static void heap_add(cache *c, heap *h, uint32_t which) {
    h->items[h->n++] = which;
    sift(c, h, h->n - 1);
}

static void heap_remove(cache *c, heap *h, uint32_t which) {
    uint64_t at = c->items[which].at;
    c->items[which].at = NOWHERE;
    if (at == --h->n) return;
    place(c, h, at, h->items[h->n]);
    sift(c, h, at);
}

/* Takes out the least that is not part of this turn; NOWHERE if all are. */
static uint32_t heap_take(cache *c, heap *h, uint32_t turn) {
    uint64_t n = 0;
    uint32_t found = NOWHERE;
    while (h->n && found == NOWHERE) {
        uint32_t which = h->items[0];
        heap_remove(c, h, which);
        if (c->items[which].turn == turn) c->aside[n++] = which;
        else found = which;
    }
    while (n) heap_add(c, h, c->aside[--n]);
    return found;
}

/* ---- lists, first in first out ---- */

static void list_add(cache *c, list *l, uint32_t which) {
    item *it = &c->items[which];
    it->previous = l->last;
    it->next = NOWHERE;
    if (l->n++) c->items[l->last].next = which;
    else l->first = which;
    l->last = which;
}

static void list_remove(cache *c, list *l, uint32_t which) {
    item *it = &c->items[which];
    if (l->first == which) l->first = it->next;
    else c->items[it->previous].next = it->next;
    if (l->last == which) l->last = it->previous;
    else c->items[it->next].previous = it->previous;
    l->n--;
}

/* ---- LRU, LFU: a key that changes only with use. Belady's: the later the next use, the less the key. ---- */

static void set_key(cache *c, int32_t policy, uint32_t which) {
    item *it = &c->items[which];
    it->then = it->last_use;
    if (policy == CL_POLICY_LFU || policy == CL_POLICY_LFRU) it->key = it->count;
    else if (policy == CL_POLICY_BELADY) it->key = UINT64_MAX - it->next_use;
    else it->key = it->last_use;
}

static void keyed_hit(cache *c, int32_t policy, uint32_t which) {
    set_key(c, policy, which);
    sift(c, &c->main, c->items[which].at);
}

static void keyed_miss(cache *c, int32_t policy, uint32_t which, uint32_t turn) {
    set_key(c, policy, which);
    if (c->main.n == c->slots) {
        uint32_t victim = c->main.items[0];
        /* Belady's may also leave the record out, and is not held to the turn: a bound, not a policy. */
        if (policy == CL_POLICY_BELADY && !is_before(c, victim, which)) return;
        if (policy == CL_POLICY_BELADY) heap_remove(c, &c->main, victim);
        else if (heap_take(c, &c->main, turn) == NOWHERE) return;
    }
    heap_add(c, &c->main, which);
}

/* ---- LFRU: a privileged part by recency, an unprivileged one by frequency (Bilal and Kang, 2017) ---- */

enum { PRIVILEGED = 1, UNPRIVILEGED };

static void lfru_promote(cache *c, uint32_t which) {
    uint64_t room = c->slots / 2;
    item *it = &c->items[which];
    heap_remove(c, &c->other, which);
    if (room && c->main.n == room) {
        uint32_t demoted = c->main.items[0];
        heap_remove(c, &c->main, demoted);
        c->items[demoted].where = UNPRIVILEGED;
        set_key(c, CL_POLICY_LFU, demoted);
        heap_add(c, &c->other, demoted);
    }
    it->where = room ? PRIVILEGED : UNPRIVILEGED;
    set_key(c, room ? CL_POLICY_LRU : CL_POLICY_LFU, which);
    heap_add(c, room ? &c->main : &c->other, which);
}

static void lfru_hit(cache *c, uint32_t which) {
    if (c->items[which].where == UNPRIVILEGED) lfru_promote(c, which);
    else keyed_hit(c, CL_POLICY_LRU, which);
}

static void lfru_miss(cache *c, uint32_t which, uint32_t turn) {
    if (c->main.n + c->other.n == c->slots) {
        uint32_t victim = heap_take(c, &c->other, turn);
        if (victim == NOWHERE) victim = heap_take(c, &c->main, turn);
        if (victim == NOWHERE) return;
        c->items[victim].where = 0;
    }
    c->items[which].where = UNPRIVILEGED;
    set_key(c, CL_POLICY_LFU, which);
    heap_add(c, &c->other, which);
}

/* ---- least-stale: what this step has not used goes first, oldest insertion first (SpecMD, 2602.03921) ---- */

static void stale_miss(cache *c, uint32_t which, uint32_t turn, uint32_t step) {
    if (c->large.n == c->slots) {
        uint32_t victim = NOWHERE, oldest = NOWHERE;
        for (uint32_t i = c->large.first; i != NOWHERE && victim == NOWHERE; i = c->items[i].next) {
            if (c->items[i].turn == turn) continue;
            if (c->items[i].step < step) victim = i;
            else if (oldest == NOWHERE) oldest = i;
        }
        if (victim == NOWHERE) victim = oldest;
        if (victim == NOWHERE) return;
        list_remove(c, &c->large, victim);
        c->items[victim].where = 0;
    }
    c->items[which].where = 1;
    list_add(c, &c->large, which);
}

/* ---- S3-FIFO: a small queue of a tenth, a main queue, a ghost queue (Yang et al., SOSP 2023) ---- */

enum { SMALL = 1, LARGE, GHOST };

static void s3_enter(cache *c, list *l, uint32_t where, uint32_t which) {
    c->items[which].where = where;
    c->items[which].hits = 0;
    list_add(c, l, which);
}

static void s3_evict_large(cache *c) {
    for (;;) {
        uint32_t which = c->large.first;
        list_remove(c, &c->large, which);
        if (c->items[which].hits) {
            c->items[which].hits--;
            list_add(c, &c->large, which);
        } else {
            c->items[which].where = 0;
            return;
        }
    }
}

static void s3_evict(cache *c) {
    uint64_t small = c->slots / 10 ? c->slots / 10 : 1;
    while (c->small.n && (c->small.n >= small || !c->large.n)) {
        uint32_t which = c->small.first;
        list_remove(c, &c->small, which);
        if (c->items[which].hits > 1) {
            s3_enter(c, &c->large, LARGE, which);
            continue;
        }
        s3_enter(c, &c->ghost, GHOST, which);
        if (c->ghost.n > c->slots - small) {
            uint32_t forgotten = c->ghost.first;
            list_remove(c, &c->ghost, forgotten);
            c->items[forgotten].where = 0;
        }
        return;
    }
    s3_evict_large(c);
}

static void s3_miss(cache *c, uint32_t which) {
    int was_ghost = c->items[which].where == GHOST;
    if (was_ghost) list_remove(c, &c->ghost, which);
    c->items[which].where = 0;
    if (c->small.n + c->large.n == c->slots) s3_evict(c);
    s3_enter(c, was_ghost ? &c->large : &c->small, was_ghost ? LARGE : SMALL, which);
}

/* ---- one run ---- */

static int is_resident(const cache *c, int32_t policy, uint32_t which) {
    const item *it = &c->items[which];
    switch (policy) {
    case CL_POLICY_S3_FIFO: return it->where == SMALL || it->where == LARGE;
    case CL_POLICY_LEAST_STALE:
    case CL_POLICY_PINS: return it->where != 0;
    default: return it->at != NOWHERE;
    }
}

static void hit(cache *c, int32_t policy, uint32_t which) {
    if (policy == CL_POLICY_S3_FIFO) c->items[which].hits += c->items[which].hits < 3;
    else if (policy == CL_POLICY_LFRU) lfru_hit(c, which);
    else if (policy != CL_POLICY_LEAST_STALE && policy != CL_POLICY_PINS) keyed_hit(c, policy, which);
}

static void miss(cache *c, int32_t policy, const cl_access *a) {
    switch (policy) {
    case CL_POLICY_S3_FIFO: s3_miss(c, a->record); break;
    case CL_POLICY_LFRU: lfru_miss(c, a->record, a->turn); break;
    case CL_POLICY_LEAST_STALE: stale_miss(c, a->record, a->turn, a->step); break;
    case CL_POLICY_PINS: break;
    default: keyed_miss(c, policy, a->record, a->turn);
    }
}

/* The most used of what has been seen; ties go to the lower record. */
static void choose_pins(cache *c) {
    for (uint32_t i = 0; i < c->records; i++) {
        if (!c->items[i].count) continue;
        c->items[i].key = UINT64_MAX - c->items[i].count;
        c->items[i].then = i;
        c->items[i].turn = NOWHERE;
        heap_add(c, &c->other, i);
    }
    for (uint64_t n = 0; n < c->slots && c->other.n; n++) {
        uint32_t which = c->other.items[0];
        heap_remove(c, &c->other, which);
        c->items[which].where = 1;
    }
}

static void note_use(cache *c, uint64_t index) {
    const cl_access *a = &c->accesses[index];
    item *it = &c->items[a->record];
    it->count++;
    it->last_use = ++c->clock;
    it->turn = a->turn;
    it->step = a->step;
    if (c->next_use) it->next_use = c->next_use[index];
}

/* The soonest used of what has been seen: no policy can hold anything better, whatever it did before. */
static void choose_best(cache *c) {
    while (c->main.n) heap_remove(c, &c->main, c->main.items[0]);
    for (uint32_t i = 0; i < c->records; i++)
        if (c->items[i].count) keyed_miss(c, CL_POLICY_BELADY, i, NOWHERE);
}

void cl_policy_load(cl_policy_result *out, const cl_trace *trace, const cl_access *access) {
    out->loads++;
    out->bytes += trace->layers[access->layer].record_bytes;
}

/* [first, end) is a turn: the resident experts first. */
static void run_turn(cache *c, int32_t policy, uint64_t first, uint64_t end) {
    if (policy == CL_POLICY_PINS && first == c->count_from) choose_pins(c);
    if (policy == CL_POLICY_BELADY && first == c->count_from) choose_best(c);
    for (uint64_t i = first; i < end; i++) {
        uint32_t which = c->accesses[i].record;
        if (!is_resident(c, policy, which)) continue;
        note_use(c, i);
        hit(c, policy, which);
    }
    for (uint64_t i = first; i < end; i++) {
        if (c->items[c->accesses[i].record].turn == c->accesses[i].turn) continue;
        note_use(c, i);
        if (i >= c->count_from) cl_policy_load(c->out, c->trace, &c->accesses[i]);
        miss(c, policy, &c->accesses[i]);
    }
}

static int find_next_uses(cache *c, cl_error *err) {
    c->next_use = malloc((c->trace->accesses + 1) * sizeof *c->next_use);
    if (!c->next_use) return cl_fail(err, CL_NOMEM, "no memory to look into a trace's future");
    for (uint64_t r = 0; r < c->records; r++) c->items[r].next_use = INT64_MAX;
    for (uint64_t i = c->trace->accesses; i-- > 0;) {
        c->next_use[i] = c->items[c->accesses[i].record].next_use;
        c->items[c->accesses[i].record].next_use = i;
    }
    return CL_OK;
}

static int prepare(cache *c, int32_t policy, cl_error *err) {
    uint64_t in_heap = policy == CL_POLICY_PINS ? c->records : c->slots;
    c->items = calloc(c->records, sizeof *c->items);
    c->aside = calloc(c->slots, sizeof *c->aside);
    c->main.items = calloc(c->slots, sizeof *c->main.items);
    c->other.items = calloc(in_heap, sizeof *c->other.items);
    if (!c->items || !c->aside || !c->main.items || !c->other.items)
        return cl_fail(err, CL_NOMEM, "no memory to replay with %llu slots", (unsigned long long)c->slots);
    for (uint64_t r = 0; r < c->records; r++) {
        c->items[r].at = NOWHERE;
        c->items[r].turn = NOWHERE;
    }
    c->small.first = c->small.last = c->large.first = c->large.last = c->ghost.first = c->ghost.last = NOWHERE;
    return policy == CL_POLICY_BELADY ? find_next_uses(c, err) : CL_OK;
}

static int run(const cl_trace *t, int32_t policy, cache *c, cl_error *err) {
    int code = prepare(c, policy, err);
    for (uint64_t first = 0, end; !code && first < t->accesses; first = end) {
        end = cl_trace_turn_end(t, c->accesses, first);
        run_turn(c, policy, first, end);
    }
    free(c->items);
    free(c->aside);
    free(c->main.items);
    free(c->other.items);
    free(c->next_use);
    return code;
}

/* Returns where the counted part begins: with the turn of this access. */
static uint64_t count(const cl_trace *t, const cl_access *accesses, uint64_t from, cl_policy_result *out) {
    if (from > t->accesses) from = t->accesses;
    while (from && from < t->accesses && accesses[from].turn == accesses[from - 1].turn) from--;
    out->accesses = t->accesses - from;
    for (uint64_t i = from; i < t->accesses; i++) out->steps += i == from || accesses[i].step != accesses[i - 1].step;
    return from;
}

int cl_trace_policy(const cl_trace *t, int32_t policy, uint64_t slots, uint64_t count_from, cl_policy_result *out,
                    cl_error *err) {
    cl_ok(err);
    *out = (cl_policy_result){0};
    uint64_t records = t->first_record[t->header.n_layers];
    if (policy < CL_POLICY_LRU || policy > CL_POLICY_BELADY)
        return cl_fail(err, CL_INVALID, "policy %d is not known", policy);
    if (slots < 1 || slots > records)
        return cl_fail(err, CL_INVALID, "slots is %llu, must be 1..%llu", (unsigned long long)slots,
                       (unsigned long long)records);
    cl_access *accesses = cl_trace_accesses(t, err);
    if (!accesses) return CL_NOMEM;
    uint64_t from = count(t, accesses, count_from, out);
    cache c = {.trace = t, .accesses = accesses, .slots = slots, .records = records, .count_from = from, .out = out};
    int code = policy == CL_POLICY_OURS ? cl_replay_ours(t, accesses, slots, from, out, err) : run(t, policy, &c, err);
    free(accesses);
    return code;
}
