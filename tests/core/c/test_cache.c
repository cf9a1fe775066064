/* test_cache.c - store.c and cache.c without drives: every read is complete at once. What may be evicted for whom, that
 * the victim is the one a plain search finds, that a state that was written and read goes on the same. */
#include "check.h"
#include "store.h"
#include "trace.h"

#define LAYERS 3
#define EXPERTS 24
#define SLOTS 7
#define RING 3

typedef struct fixture {
    cl_store store;
    cl_counters counters;
    cl_expert_layer layers[LAYERS];
    void *memory;
} fixture;

static void make(fixture *f, uint64_t slots, uint32_t ring) {
    memset(f, 0, sizeof *f);
    for (uint32_t l = 0; l < LAYERS; l++) f->layers[l] = (cl_expert_layer){.layer = l, .experts = EXPERTS};
    cl_model_options options = {
        .expert_layers = f->layers, .n_expert_layers = LAYERS, .expert_slots = slots, .ring_slots = ring};
    cl_carve carve = {0};
    cl_store_place(&f->store, &carve, &options);
    f->memory = aligned_alloc(64, (carve.used + 127) & ~63ull);
    memset(f->memory, 0, (carve.used + 127) & ~63ull);
    carve = (cl_carve){f->memory, 0, 0};
    f->store.counters = &f->counters;
    cl_store_place(&f->store, &carve, &options);
    cl_store_init(&f->store, &options);
}

/* One turn of decoding: what is resident first. */
static uint32_t use(cl_store *s, uint32_t layer, const uint32_t *experts, uint32_t n) {
    cl_slot *slots[EXPERTS] = {0};
    uint32_t loads = 0;
    for (int resident = 1; resident >= 0; resident--)
        for (uint32_t i = 0; i < n; i++) {
            int loaded;
            if (slots[i] || cl_store_resident(s, layer, experts[i]) != resident) continue;
            slots[i] = cl_store_acquire(s, layer, experts[i], CL_FOR_DECODE, &loaded);
            CHECK(slots[i] && slots[i]->layer == (int32_t)layer && slots[i]->expert == experts[i]);
            cl_cache_touch(s, layer, experts[i], 1);
            loads += (uint32_t)loaded;
        }
    for (uint32_t i = 0; i < n; i++) cl_store_release(s, slots[i]);
    return loads;
}

static uint32_t random_turn(cl_store *s, uint32_t layer) {
    uint32_t a = (uint32_t)(test_random() % EXPERTS), b = (uint32_t)(test_random() % 3);
    return a == b ? use(s, layer, &a, 1) : use(s, layer, (uint32_t[]){a, b}, 2);
}

static void random_step(cl_store *s) {
    for (uint32_t l = 0; l < LAYERS; l++) random_turn(s, l);
    cl_cache_tick(s);
}

/* ---- the tables agree with each other ---- */

static void check_tables(const cl_store *s) {
    uint64_t empty = 0, pinned = 0, found = 0;
    for (uint64_t i = 0; i < s->cache_slots + s->ring_slots; i++) {
        const cl_slot *slot = &s->slots[i];
        if (i < s->cache_slots) {
            empty += slot->layer < 0;
            pinned += slot->pins > 0;
        }
        if (slot->layer < 0) CHECK(!slot->loading && !atomic_load(&slot->read.failed));
        else CHECK(s->layers[slot->layer].slot_of[slot->expert] == (int32_t)i);
    }
    for (uint32_t l = 0; l < s->n_layers; l++)
        for (uint32_t e = 0; e < EXPERTS; e++) {
            int32_t at = s->layers[l].slot_of[e];
            if (at < 0) continue;
            CHECK(s->slots[at].layer == (int32_t)l && s->slots[at].expert == e);
            found++;
        }
    CHECK(empty == s->cache_empty && pinned == s->cache_pinned);
    uint64_t held = 0;
    for (uint64_t i = 0; i < s->cache_slots + s->ring_slots; i++) held += s->slots[i].layer >= 0;
    CHECK(held == found);
}

/* The definition: least value minus price x time until the layer's turn; ties to the longest unused. */
static const cl_slot *plain_victim(const cl_store *s, uint64_t begin, uint64_t end) {
    const cl_slot *victim = NULL;
    double least = 0;
    for (uint64_t i = begin; i < end; i++) {
        const cl_slot *slot = &s->slots[i];
        if (slot->layer < 0 || slot->pins || slot->loading) continue;
        int64_t ahead = slot->layer - s->cache.layer_at;
        double left = (double)(ahead > 0 ? ahead : ahead + LAYERS) / LAYERS;
        double its = s->layers[slot->layer].value[slot->expert] - s->cache.price * left;
        if (!victim || its < least || (its == least && slot->last_use < victim->last_use)) {
            victim = slot;
            least = its;
        }
    }
    return victim;
}

static void test_victims(void) {
    fixture f;
    make(&f, SLOTS, RING);
    for (int step = 0; step < 400; step++) {
        for (uint32_t l = 0; l < LAYERS; l++) {
            random_turn(&f.store, l);
            check_tables(&f.store);
            if (!f.store.cache_empty) CHECK(cl_cache_victim(&f.store) == plain_victim(&f.store, 0, SLOTS));
        }
        cl_cache_tick(&f.store);
        check_tables(&f.store);
    }
    free(f.memory);
}

/* ---- who may evict whom ---- */

static void fill(fixture *f, uint64_t slots, uint32_t ring) {
    make(f, slots, ring);
    for (int step = 0; step < 50; step++) {
        for (uint32_t l = 0; l < LAYERS; l++) use(&f->store, l, (uint32_t[]){0, 1}, 2); /* hot */
        cl_cache_tick(&f->store);
    }
    for (uint32_t l = 0; l < LAYERS; l++) /* an expert was seen once, long ago */
        CHECK(cl_store_resident(&f->store, l, 0) && cl_store_resident(&f->store, l, 1));
}

static void test_purposes(void) {
    fixture f;
    int loaded;
    fill(&f, 6, 4);
    cl_store *s = &f.store;
    CHECK(s->cache_empty == 0);
    CHECK(cl_store_acquire(s, 0, 5, CL_FOR_WARM, &loaded) == NULL);
    /* Lookahead takes the ring, and never what is hotter. */
    cl_slot *first = cl_store_acquire(s, 0, 5, CL_FOR_LOOKAHEAD, &loaded);
    cl_slot *second = cl_store_acquire(s, 0, 6, CL_FOR_LOOKAHEAD, &loaded);
    CHECK(first && second && loaded && !cl_store_in_cache(s, first) && !cl_store_in_cache(s, second));
    CHECK(cl_store_acquire(s, 0, 7, CL_FOR_LOOKAHEAD, &loaded) == NULL);
    cl_slot *third = cl_store_acquire(s, 1, 5, CL_FOR_PREFILL, &loaded);
    cl_slot *fourth = cl_store_acquire(s, 1, 6, CL_FOR_PREFILL, &loaded);
    CHECK(third && fourth && !cl_store_in_cache(s, third) && !cl_store_in_cache(s, fourth));
    CHECK(cl_store_acquire(s, 0, 7, CL_FOR_PREFILL, &loaded) == NULL);
    for (uint32_t l = 0; l < LAYERS; l++) CHECK(cl_store_resident(s, l, 0) && cl_store_resident(s, l, 1));
    /* A prompt that cannot wait takes the least valued; its own record has no value and goes next. */
    cl_slot *now = cl_store_acquire(s, 0, 7, CL_FOR_PREFILL_NOW, &loaded);
    CHECK(now && loaded && cl_store_in_cache(s, now));
    cl_store_release(s, now);
    CHECK(cl_cache_victim(s) == now);
    /* Now there is something colder than a hot absent record. */
    uint32_t layer = 0, expert = 0;
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t e = 0; e < 2; e++)
            if (!cl_store_resident(s, l, e)) layer = l, expert = e;
    cl_slot *again = cl_store_acquire(s, layer, expert, CL_FOR_LOOKAHEAD, &loaded);
    CHECK(again == now && loaded);
    cl_store_release(s, again);
    cl_store_release(s, first);
    cl_store_release(s, second);
    cl_store_release(s, third);
    cl_store_release(s, fourth);
    check_tables(s);
    free(f.memory);
}

/* A cold record goes into the ring; one that is wanted again and again moves up, without being read twice. */
static void test_ring(void) {
    fixture f;
    fill(&f, 6, 2);
    cl_store *s = &f.store;
    CHECK(use(s, 1, (uint32_t[]){4}, 1) == 1);
    cl_cache_tick(s);
    for (uint32_t l = 0; l < LAYERS; l++) CHECK(cl_store_resident(s, l, 0) && cl_store_resident(s, l, 1));
    CHECK(!cl_store_in_cache(s, &s->slots[s->layers[1].slot_of[4]]));
    uint32_t loads = 0;
    for (int step = 0; step < 60; step++) {
        loads += use(s, 1, (uint32_t[]){4}, 1);
        cl_cache_tick(s);
        check_tables(s);
    }
    CHECK(loads == 0);
    CHECK(cl_store_in_cache(s, &s->slots[s->layers[1].slot_of[4]]));
    free(f.memory);
}

/* What it takes the place of stays in the ring, and what was read there with the least to lose goes first. */
static void test_ring_keeps_the_best(void) {
    fixture f;
    fill(&f, 6, 3);
    cl_store *s = &f.store;
    const uint32_t both[] = {4, 5};
    for (int step = 0; step < 60; step++) { /* {0, 1} of layer 1 cool down and leave the cache, one by one */
        use(s, 1, both, 2);
        cl_cache_tick(s);
        check_tables(s);
    }
    for (uint32_t i = 0; i < 2; i++) CHECK(cl_store_in_cache(s, &s->slots[s->layers[1].slot_of[both[i]]]));
    uint32_t in_ring = 0;
    for (uint64_t i = s->cache_slots; i < s->cache_slots + s->ring_slots; i++)
        if (s->slots[i].layer >= 0) in_ring += s->slots[i].expert < 2; /* hot once, and still in memory */
    CHECK(in_ring == 2);
    cl_cache_open_layer(s, 2);
    for (uint32_t cold = 4; cold < 8; cold++) {
        cl_slot before[3];
        const cl_slot *ring = s->slots + s->cache_slots, *least = plain_victim(s, s->cache_slots, s->cache_slots + 3);
        memcpy(before, ring, sizeof before);
        int is_full = ring[0].layer >= 0 && ring[1].layer >= 0 && ring[2].layer >= 0, loaded;
        cl_slot *slot = cl_store_acquire(s, 2, cold, CL_FOR_DECODE, &loaded);
        CHECK(loaded && (is_full ? slot == least : before[slot - ring].layer < 0));
        for (int i = 0; i < 3; i++)
            if (slot != &ring[i]) CHECK(ring[i].layer == before[i].layer && ring[i].expert == before[i].expert);
        cl_store_release(s, slot);
    }
    free(f.memory);
}

/* What lookahead has read for a turn that is yet to come is not given to a cold record while another slot is free. */
static void test_expected(void) {
    fixture f;
    int loaded;
    fill(&f, 6, 3);
    cl_store *s = &f.store;
    cl_slot *ahead = cl_store_acquire(s, 2, 6, CL_FOR_LOOKAHEAD, &loaded);
    CHECK(ahead && loaded && !cl_store_in_cache(s, ahead));
    cl_store_release(s, ahead);
    for (uint32_t cold = 2; cold < 8; cold++) {
        CHECK(use(s, 1, &cold, 1) == 1);
        CHECK(cl_store_resident(s, 2, 6));
    }
    CHECK(use(s, 2, (uint32_t[]){0, 1}, 2) == 0); /* its turn: it was not wanted */
    cl_cache_tick(s);
    CHECK(!ahead->is_expected);
    check_tables(s);
    free(f.memory);
}

/* What moves up from the ring into a slot whose own read has failed is as good as it was. */
static void test_moving_up_after_a_failure(void) {
    fixture f;
    int loaded;
    fill(&f, 6, 2);
    cl_store *s = &f.store;
    cl_slot *good = cl_store_acquire(s, 1, 4, CL_FOR_DECODE, &loaded);
    cl_cache_touch(s, 1, 4, 1);
    cl_slot *other = cl_store_acquire(s, 0, 5, CL_FOR_PREFILL, &loaded);
    CHECK(good && other && !cl_store_in_cache(s, good) && !cl_store_in_cache(s, other));
    cl_slot *failing = cl_store_acquire(s, 0, 6, CL_FOR_PREFILL_NOW, &loaded);
    CHECK(failing && loaded && cl_store_in_cache(s, failing));
    atomic_store(&failing->read.failed, 1);
    CHECK(cl_store_state(failing) == CL_SLOT_FAILED);
    cl_store_release(s, failing);
    CHECK(failing->layer == -1 && !cl_store_resident(s, 0, 6));
    cl_store_release(s, other);
    cl_store_release(s, good);
    cl_cache_tick(s);
    CHECK(failing->layer == 1 && failing->expert == 4);
    CHECK(cl_store_acquire(s, 1, 4, CL_FOR_DECODE, &loaded) == failing && !loaded);
    CHECK(cl_store_state(failing) == CL_SLOT_READY);
    cl_store_release(s, failing);
    CHECK(cl_store_resident(s, 1, 4));
    check_tables(s);
    free(f.memory);
}

/* Where decoding keeps the drives busy through the ring, a cold record waits instead of evicting a hot one. */
static void test_waiting(void) {
    fixture f;
    int loaded;
    cl_slot *held[5];
    fill(&f, 6, 5);
    cl_store *s = &f.store;
    for (uint32_t i = 0; i < 5; i++) {
        held[i] = cl_store_acquire(s, 0, 2 + i, CL_FOR_DECODE, &loaded);
        CHECK(held[i] && loaded && !cl_store_in_cache(s, held[i]));
    }
    CHECK(cl_store_acquire(s, 0, 7, CL_FOR_DECODE, &loaded) == NULL && !loaded);
    cl_store_release(s, held[3]);
    held[3] = cl_store_acquire(s, 0, 7, CL_FOR_DECODE, &loaded);
    CHECK(held[3] && loaded && !cl_store_in_cache(s, held[3]));
    for (uint32_t i = 0; i < 5; i++) cl_store_release(s, held[i]);
    for (uint32_t l = 0; l < LAYERS; l++) CHECK(cl_store_resident(s, l, 0) && cl_store_resident(s, l, 1));
    free(f.memory);
}

/* A prompt that is suspended keeps the ring: decoding, which holds nothing, cannot wait for it. */
static void test_waiting_for_a_prompt(void) {
    fixture f;
    int loaded;
    cl_slot *both[2];
    fill(&f, 6, 2);
    cl_store *s = &f.store;
    for (uint32_t i = 0; i < 2; i++) {
        both[i] = cl_store_acquire(s, 0, 2 + i, CL_FOR_PREFILL, &loaded);
        CHECK(both[i] == cl_store_acquire(s, 0, 2 + i, CL_FOR_DECODE, &loaded) && !loaded);
    }
    CHECK(cl_store_acquire(s, 0, 4, CL_FOR_DECODE, &loaded) == NULL);
    for (uint32_t i = 0; i < 2; i++) cl_store_release(s, both[i]); /* by decoding */
    cl_slot *now = cl_store_acquire(s, 0, 4, CL_FOR_DECODE_NOW, &loaded);
    CHECK(now && loaded && cl_store_in_cache(s, now));
    cl_store_release(s, now);
    cl_cache_tick(s);
    for (uint32_t i = 0; i < 2; i++) CHECK(both[i]->pins == 1 && !both[i]->for_decode);
    for (uint32_t i = 0; i < 2; i++) cl_store_release(s, both[i]);
    check_tables(s);
    free(f.memory);
}

/* ---- heat and state ---- */

static void test_heat(void) {
    fixture f, g;
    float heat[LAYERS * EXPERTS], back[LAYERS * EXPERTS];
    make(&f, SLOTS, RING);
    for (int step = 0; step < 40; step++) {
        for (uint32_t l = 0; l < LAYERS; l++) {
            uint32_t always = l, sometimes = 7;
            use(&f.store, l, &always, 1);
            if (step % 4 == 0) use(&f.store, l, &sometimes, 1);
        }
        cl_cache_tick(&f.store);
    }
    cl_cache_get_heats(&f.store, heat);
    for (uint32_t l = 0; l < LAYERS; l++) {
        CHECK(heat[l * EXPERTS + l] > 0.99f && heat[l * EXPERTS + l] <= 1);
        CHECK(heat[l * EXPERTS + 7] > 0.2f && heat[l * EXPERTS + 7] < 0.3f);
        CHECK(heat[l * EXPERTS + 6] == 0);
    }
    make(&g, SLOTS, RING);
    cl_cache_set_heats(&g.store, heat);
    cl_cache_get_heats(&g.store, back);
    CHECK(memcmp(heat, back, sizeof heat) == 0);
    CHECK(g.store.layers[1].value[1] > g.store.layers[1].value[7]);
    CHECK(g.store.layers[1].value[7] > g.store.layers[1].value[6]);
    free(f.memory);
    free(g.memory);
}

static void test_written_state(void) {
    fixture f, g;
    cl_error err;
    int loaded;
    make(&f, SLOTS, RING);
    for (int step = 0; step < 100; step++) random_step(&f.store);
    cl_slot *held = cl_store_acquire(&f.store, 2, 6, CL_FOR_PREFILL_NOW, &loaded);
    uint64_t bytes = cl_state_bytes(&f.store);
    uint8_t *state = malloc(bytes);
    cl_state_write(&f.store, state);
    make(&g, SLOTS, RING);
    CHECK(cl_state_read(&g.store, state, bytes, &err) == CL_OK);
    check_tables(&g.store);
    CHECK(g.store.cache_pinned == f.store.cache_pinned);
    cl_store_release(&f.store, held);
    cl_store_release(&g.store, &g.store.slots[held - f.store.slots]);
    for (int step = 0; step < 100; step++)
        for (uint32_t l = 0; l <= LAYERS; l++) {
            uint32_t wanted = (uint32_t)(test_random() % EXPERTS);
            if (l < LAYERS) CHECK(use(&f.store, l, &wanted, 1) == use(&g.store, l, &wanted, 1));
            else cl_cache_tick(&f.store), cl_cache_tick(&g.store);
        }
    CHECK(memcmp(f.store.cache.weights, g.store.cache.weights, sizeof f.store.cache.weights) == 0);
    /* Nothing that is read is believed. */
    for (uint64_t at = 0; at < bytes; at += 3) {
        uint8_t was = state[at];
        state[at] ^= 0x81;
        free(g.memory);
        make(&g, SLOTS, RING);
        if (cl_state_read(&g.store, state, bytes, &err) == CL_OK) random_step(&g.store);
        state[at] = was;
    }
    CHECK(cl_state_read(&g.store, state, bytes - 1, &err) == CL_CORRUPT);
    free(state);
    free(f.memory);
    free(g.memory);
}

/* ---- a workload that has moved away from what was learned ---- */

#define HOT 8
#define SHIFT_SLOTS (HOT * LAYERS)
#define RECOVERY 20 /* steps after which the wrong heat costs at most 5 % more reads than none */

/* Reads of steps RECOVERY.. of a workload over experts that are neither hot nor in memory. */
static uint32_t shifted(int has_learned) {
    fixture f;
    float heat[LAYERS * EXPERTS] = {0};
    uint32_t loads = 0;
    uint64_t seed = test_state; /* both see the same workload */
    make(&f, SHIFT_SLOTS, 8);
    for (uint32_t i = 0; i < LAYERS * EXPERTS; i++) heat[i] = i % EXPERTS < HOT ? 0.9f : 0;
    if (has_learned) cl_cache_set_heats(&f.store, heat);
    for (uint32_t i = 0; has_learned && i < LAYERS * EXPERTS; i++) {
        int loaded;
        if (heat[i] == 0) continue;
        cl_slot *slot = cl_store_acquire(&f.store, i / EXPERTS, i % EXPERTS, CL_FOR_WARM, &loaded);
        CHECK(slot && loaded);
        cl_store_release(&f.store, slot);
    }
    CHECK(f.store.cache_empty == (has_learned ? 0 : SHIFT_SLOTS));
    for (int step = 0; step < 400; step++) {
        for (uint32_t l = 0; l < LAYERS; l++) {
            uint32_t wanted[4], first = (uint32_t)(test_random() % 10), stride = test_random() % 2 ? 1 : 3;
            for (uint32_t i = 0; i < 4; i++) wanted[i] = HOT + (first + i * stride) % 10;
            uint32_t n = use(&f.store, l, wanted, 4);
            if (step >= RECOVERY) loads += n;
        }
        cl_cache_tick(&f.store);
    }
    test_state = seed;
    free(f.memory);
    return loads;
}

static void test_shift(void) {
    uint32_t learned = shifted(1), empty = shifted(0);
    CHECK(learned <= empty + empty / 20);
}

int main(void) {
    test_shift();
    test_victims();
    test_purposes();
    test_ring();
    test_ring_keeps_the_best();
    test_expected();
    test_moving_up_after_a_failure();
    test_waiting();
    test_waiting_for_a_prompt();
    test_heat();
    test_written_state();
    return test_result();
}
