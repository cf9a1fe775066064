/* test_overlap.c - what runs while drives are read: arithmetic while a read is held up, guesses, reads ahead, many
 * cursors in a small ring, a broken record in the middle of all that.
 *
 * Every pread of a stripe passes the gate below, which can hold up the reads of one record until the engine has gone
 * on, and counts them by record.
 * link: tiny_model.c -Wl,--wrap=pread
 */
#include "check.h"
#include "clock.h"
#include "tiny_model.h"
#include "trial.h"
#include <errno.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <unistd.h>

#define TOKENS 60
#define LAYERS 2
#define RECORDS (LAYERS * TINY_EXPERTS)
#define PATIENCE_US 5000000

static float expected[TOKENS][TINY_VOCAB];
static const cl_sampling greedy = {0, 0, 1, 0};

static int32_t token_at(uint64_t position) { return (int32_t)((position * position * 7 + position + 2) % TINY_VOCAB); }

/* ---- the gate ---- */

/* The middle extent of a record has 4096 bytes; those of stripe 1 lie there in the order of the records. */
static const tiny_model *gate_model;
static _Atomic uint32_t record_reads[RECORDS];
static _Atomic int held_record = -1, broken_record = -1;
static _Atomic uint32_t is_held; /* a reading thread waits at the gate */
static _Atomic uint64_t go_on_at; /* ... until the heartbeat has come to this */
static _Atomic uint32_t gave_up;
static cl_model *_Atomic watched;

static uint64_t heartbeat_of(const cl_model *m) {
    cl_model_stats stats;
    cl_model_get_stats(m, &stats);
    return stats.heartbeat;
}

/* The record whose middle extent this read is, -1: none. Told apart by what is read, not by the descriptor. */
static int record_of(const uint8_t *data, size_t bytes) {
    if (bytes != 4096) return -1;
    uint32_t crc = cl_crc32c(0, data, bytes);
    for (int l = 0; l < LAYERS; l++)
        for (int e = 0; e < TINY_EXPERTS; e++)
            if (gate_model->extents[l][e * 3 + 1].crc32c == crc) return l * TINY_EXPERTS + e;
    return -1;
}

static void wait_at_gate(void) {
    uint64_t give_up_at = cl_now_us() + PATIENCE_US;
    atomic_store(&is_held, 1);
    while (heartbeat_of(atomic_load(&watched)) < atomic_load(&go_on_at)) {
        if (cl_now_us() > give_up_at) {
            atomic_store(&gave_up, 1);
            break;
        }
        usleep(200);
    }
    atomic_store(&is_held, 0);
}

ssize_t __real_pread(int fd, void *data, size_t bytes, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t bytes, off_t offset) {
    ssize_t got = __real_pread(fd, data, bytes, offset);
    int record = gate_model ? record_of(data, bytes) : -1;
    if (record < 0) return got;
    atomic_fetch_add(&record_reads[record], 1);
    if (record == atomic_load(&broken_record)) {
        errno = EIO;
        return -1;
    }
    if (record == atomic_load(&held_record)) wait_at_gate();
    return got;
}

static void clear_gate(void) {
    for (int i = 0; i < RECORDS; i++) atomic_store(&record_reads[i], 0);
    atomic_store(&held_record, -1);
    atomic_store(&broken_record, -1);
}

static uint32_t reads_of(int layer) {
    uint32_t sum = 0;
    for (int e = 0; e < TINY_EXPERTS; e++) sum += atomic_load(&record_reads[layer * TINY_EXPERTS + e]);
    return sum;
}

/* ---- helpers ---- */

static cl_model *open_model(const cl_model_options *options) {
    cl_model *m;
    cl_error err = {0};
    if (cl_model_open(&m, options, &err) || cl_model_load(m, &err)) fprintf(stderr, "%s\n", err.text);
    CHECK(err.code == CL_OK);
    atomic_store(&watched, m);
    return m;
}

static cl_seq *new_seq(cl_model *m) {
    cl_seq *seq;
    CHECK(cl_seq_create(&seq, m, NULL) == CL_OK);
    return seq;
}

static int same(const float *a, uint64_t position) { return memcmp(a, expected[position], sizeof expected[0]) == 0; }

/* One decode step; the row's error code. */
static int decode(cl_model *m, cl_seq *seq) {
    float logits[TINY_VOCAB];
    uint64_t position = cl_seq_length(seq);
    cl_row row = {.seq = seq, .token = token_at(position), .sampling = greedy, .logits = logits};
    CHECK(cl_step(m, &row, 1, NULL, 0, 0, NULL) == CL_OK);
    if (row.error.code == CL_OK) CHECK(same(logits, position));
    return row.error.code;
}

static cl_cursor new_cursor(cl_seq *seq, uint32_t n, float *logits) {
    int32_t tokens[TOKENS];
    for (uint32_t i = 0; i < n; i++) tokens[i] = token_at(cl_seq_length(seq) + i);
    cl_cursor cursor = {0};
    CHECK(cl_prefill_create(&cursor.prefill, seq, tokens, n, &greedy, logits, NULL) == CL_OK);
    return cursor;
}

/* ---- decoding ---- */

/* The experts of the first token in the first MoE layer, ascending: what is read when nothing is in memory. */
static void experts_of_first_token(const tiny_model *t, int experts[TINY_TOP_K]) {
    cl_model_options o = t->options;
    cl_model *m = open_model(&o);
    cl_seq *seq = new_seq(m);
    clear_gate();
    CHECK(decode(m, seq) == CL_OK);
    int n = 0;
    for (int e = 0; e < TINY_EXPERTS; e++)
        if (atomic_load(&record_reads[e]) && n < TINY_TOP_K) experts[n++] = e;
    CHECK(n == TINY_TOP_K);
    cl_seq_free(seq);
    cl_model_close(m);
}

/* One record does not arrive before the heartbeat has ticked as often as all other work of the layer ticks it. */
static void check_decode_while_held(const tiny_model *t, int record, uint64_t ticks, uint64_t slots) {
    cl_model_options o = t->options;
    o.expert_slots = slots;
    o.threads = 2;
    cl_model *m = open_model(&o);
    cl_seq *seq = new_seq(m);
    clear_gate();
    atomic_store(&gave_up, 0);
    atomic_store(&go_on_at, heartbeat_of(m) + ticks);
    atomic_store(&held_record, record);
    CHECK(decode(m, seq) == CL_OK);
    CHECK(!atomic_load(&gave_up));
    clear_gate();
    cl_seq_free(seq);
    cl_model_close(m);
}

static void test_arithmetic_goes_on_while_a_read_is_held_up(const tiny_model *t) {
    int experts[TINY_TOP_K];
    experts_of_first_token(t, experts);
    /* Dense layer: attention, ffn. MoE layer: attention, router, shared expert, then every expert; and the extents that
     * are not held up: two of this record and three of each other one. */
    uint64_t ticks = 2 + 3 + (TINY_TOP_K - 1) + 2 + 3 * (TINY_TOP_K - 1);
    for (int i = 0; i < TINY_TOP_K; i++) check_decode_while_held(t, experts[i], ticks, RECORDS);
    check_decode_while_held(t, experts[0], ticks, TINY_TOP_K); /* as many slots as the layer needs */
}

static void check_a_broken_record(const tiny_model *t, int32_t lookahead) {
    int experts[TINY_TOP_K];
    experts_of_first_token(t, experts);
    cl_model_options o = t->options;
    o.expert_slots = 3;
    o.lookahead = lookahead;
    cl_model *m = open_model(&o);
    cl_seq *seqs[4];
    for (int i = 0; i < 4; i++) seqs[i] = new_seq(m);
    clear_gate();
    atomic_store(&broken_record, experts[1]);
    float logits[4][TINY_VOCAB];
    cl_row rows[4];
    for (int i = 0; i < 4; i++) {
        rows[i] = (cl_row){.seq = seqs[i], .token = i % 2 ? (int32_t)(i * 9) : token_at(0), .sampling = greedy};
        rows[i].logits = logits[i];
    }
    CHECK(cl_step(m, rows, 4, NULL, 0, 0, NULL) == CL_OK);
    CHECK(rows[0].error.code == CL_IO && rows[2].error.code == CL_IO && strstr(rows[0].error.text, "layer 1 expert"));
    atomic_store(&broken_record, -1);
    for (int i = 0; i < 4; i++) CHECK(cl_seq_length(seqs[i]) == (rows[i].error.code == CL_OK));
    CHECK(decode(m, seqs[0]) == CL_OK);
    for (int i = 0; i < 4; i++) cl_seq_free(seqs[i]);
    cl_model_close(m);
}

static void test_a_broken_record_fails_the_rows_that_want_it(const tiny_model *t) {
    check_a_broken_record(t, CL_SWITCH_OFF);
    check_a_broken_record(t, CL_SWITCH_ON);
}

/* Which tokens fail, each alone at position 0, one step after the other; only the broken record may be named. */
static void find_failing(const tiny_model *t, uint64_t slots, int32_t lookahead, uint8_t fails[TINY_VOCAB]) {
    cl_model_options o = t->options;
    int broken = atomic_load(&broken_record);
    char name[48];
    snprintf(name, sizeof name, "layer %d expert %d:", 1 + broken / TINY_EXPERTS, broken % TINY_EXPERTS);
    o.expert_slots = slots;
    o.lookahead = lookahead;
    cl_model *m = open_model(&o);
    for (int32_t token = 0; token < TINY_VOCAB; token++) {
        cl_row row = {.seq = new_seq(m), .token = token, .sampling = greedy};
        CHECK(cl_step(m, &row, 1, NULL, 0, 0, NULL) == CL_OK);
        fails[token] = row.error.code != CL_OK;
        CHECK(!fails[token] || (row.error.code == CL_IO && strstr(row.error.text, name)));
        cl_seq_free(row.seq);
    }
    cl_model_close(m);
}

/* Whose slots held a broken record before must not matter: where all have room, each has its own. */
static void test_a_broken_record_fails_nobody_else_in_a_small_cache(const tiny_model *t) {
    for (int record = 0; record < RECORDS; record++) {
        uint8_t expected_fails[TINY_VOCAB], fails[TINY_VOCAB];
        clear_gate();
        atomic_store(&broken_record, record);
        find_failing(t, RECORDS, CL_SWITCH_OFF, expected_fails);
        for (uint64_t slots = 1; slots <= 4; slots++)
            for (int on = 0; on < 2; on++) {
                find_failing(t, slots, on ? CL_SWITCH_ON : CL_SWITCH_OFF, fails);
                CHECK(memcmp(fails, expected_fails, sizeof fails) == 0);
            }
    }
    clear_gate();
}

/* ---- lookahead ---- */

/* Holds up one record of the second MoE layer until everything else of the step is done. */
static cl_model_stats guess_while_held(const tiny_model *t, int record) {
    cl_model_options o = t->options;
    o.lookahead = CL_SWITCH_ON;
    o.expert_slots = RECORDS;
    cl_model *m = open_model(&o);
    cl_seq *seq = new_seq(m);
    clear_gate();
    atomic_store(&gave_up, 0);
    /* Dense layer; first MoE layer with the guess, its experts and their extents; second one without one expert. */
    atomic_store(&go_on_at, heartbeat_of(m) + 2 + (5 + TINY_TOP_K + 3 * TINY_TOP_K) + 3 + (TINY_TOP_K - 1) * 4 + 2);
    atomic_store(&held_record, record);
    CHECK(decode(m, seq) == CL_OK);
    CHECK(!atomic_load(&gave_up));
    clear_gate();
    cl_model_stats stats;
    cl_model_get_stats(m, &stats);
    cl_seq_free(seq);
    cl_model_close(m);
    return stats;
}

static void test_a_guessed_record_that_is_still_on_its_way_is_waited_for(const tiny_model *t) {
    uint64_t late = 0;
    clear_gate();
    for (int e = 0; e < TINY_EXPERTS; e++) {
        cl_model_stats stats = guess_while_held(t, TINY_EXPERTS + e);
        CHECK(stats.lookahead_predicted == TINY_TOP_K && stats.lookahead_right <= TINY_TOP_K);
        CHECK(stats.lookahead_late <= stats.lookahead_right && stats.lookahead_active == 1);
        late += stats.lookahead_late;
        for (int i = 0; i < RECORDS; i++) CHECK(atomic_load(&record_reads[i]) <= 1);
    }
    CHECK(late > 0);
}

static void test_auto_begins_with_a_trial_and_then_decides(const tiny_model *t) {
    cl_model_options o = t->options;
    o.expert_slots = 1; /* with the ring fewer than a step needs: steps that read nothing would not count */
    o.lookahead = CL_SWITCH_AUTO;
    cl_model *m = open_model(&o);
    cl_seq *seq = new_seq(m);
    uint64_t guessed[CL_TRIAL_WINDOWS];
    for (int i = 0; i < CL_TRIAL_WINDOWS * CL_TRIAL_WINDOW; i++) {
        if (cl_seq_length(seq) == TOKENS) {
            cl_seq_free(seq);
            seq = new_seq(m);
        }
        CHECK(decode(m, seq) == CL_OK);
        cl_model_stats stats;
        cl_model_get_stats(m, &stats);
        guessed[i / CL_TRIAL_WINDOW] = stats.lookahead_predicted;
        int is_last = i == CL_TRIAL_WINDOWS * CL_TRIAL_WINDOW - 1;
        CHECK(stats.lookahead_active == 0 || is_last);
        CHECK(stats.lookahead_trying == !is_last);
    }
    CHECK(guessed[0] == 0);
    for (int w = 1; w < CL_TRIAL_WINDOWS; w++) CHECK((guessed[w] > guessed[w - 1]) == w % 2);
    cl_seq_free(seq);
    cl_model_close(m);
}

/* Steps of `off` and `on` us, every seventh disturbed, until a trial is over; the verdict. */
static uint32_t verdict_of(cl_trial *trial, double off, double on) {
    while (trial->resting) cl_trial_add(trial, 1);
    for (int i = 0; !trial->resting; i++) {
        double us = cl_trial_position(trial) ? on : off;
        cl_trial_add(trial, i % 7 ? us + i % 3 : 10 * (i % 2 ? on : off));
    }
    return cl_trial_position(trial);
}

static void test_a_trial_leaves_the_switch_where_it_wins(void) {
    cl_trial trial = {0};
    CHECK(verdict_of(&trial, 1000, 900) == 1);
    CHECK(verdict_of(&trial, 1000, 950) == 1);
    CHECK(verdict_of(&trial, 1000, 1000) == 0); /* costs nothing, brings nothing */
    CHECK(verdict_of(&trial, 900, 1000) == 0);
    CHECK(verdict_of(&trial, 1000, 500) == 1);
    uint32_t steps = 0;
    for (; trial.resting; steps++) cl_trial_add(&trial, 1e9);
    CHECK(steps == CL_TRIAL_REST && cl_trial_position(&trial) == 0);
}

/* ---- prompts ---- */

/* A read that was asked for happens when the reading thread gets its turn: it has a tenth of a second. */
static int is_read_soon(int layer) {
    for (int i = 0; i < 100 && !reads_of(layer); i++) usleep(1000);
    return reads_of(layer) > 0;
}

static void test_the_next_layer_is_read_before_its_router_has_chosen(const tiny_model *t) {
    cl_model_options o = t->options;
    o.expert_slots = 1;
    o.ring_slots = 4;
    o.max_prefills = 1;
    cl_model *m = open_model(&o);
    cl_seq *seq = new_seq(m);
    float *logits = malloc(TOKENS * sizeof expected[0]);
    clear_gate();
    cl_cursor cursor = new_cursor(seq, TOKENS, logits);
    int early[LAYERS] = {0, 0};
    while (!cursor.done && !cursor.error.code) {
        CHECK(cl_step(m, NULL, 0, &cursor, 1, 0, NULL) == CL_OK);
        /* positions_done grows by a quarter per layer: here the layer before the MoE layer is under way, or it is. */
        uint32_t layer = cursor.positions_done * 4 / TOKENS;
        for (int i = 0; i < LAYERS; i++)
            if (layer == (uint32_t)i && !early[i]) early[i] = is_read_soon(i);
    }
    CHECK(cursor.done && early[0] && early[1]);
    for (int i = 0; i < RECORDS; i++) CHECK(atomic_load(&record_reads[i]) == 1);
    for (int i = 0; i < TOKENS; i++) CHECK(same(logits + i * TINY_VOCAB, (uint64_t)i));
    cl_prefill_free(cursor.prefill);
    free(logits);
    cl_seq_free(seq);
    cl_model_close(m);
}

typedef struct crowd {
    cl_model *m;
    cl_seq *seqs[4], *row_seq;
    cl_cursor cursors[4];
    float *logits[4];
} crowd;

static crowd make_crowd(const tiny_model *t, uint32_t ring, uint64_t slots, uint32_t n) {
    cl_model_options o = t->options;
    o.expert_slots = slots;
    o.ring_slots = ring;
    o.max_prefills = n;
    o.kv_pages = 10;
    o.threads = 2;
    o.lookahead = test_random() % 2 ? CL_SWITCH_ON : CL_SWITCH_OFF;
    crowd c = {.m = open_model(&o)};
    c.row_seq = new_seq(c.m);
    for (uint32_t i = 0; i < n; i++) {
        c.seqs[i] = new_seq(c.m);
        c.logits[i] = malloc(TOKENS * sizeof expected[0]);
        c.cursors[i] = new_cursor(c.seqs[i], TOKENS, c.logits[i]);
    }
    return c;
}

/* Items of random cursors with decode rows between them, until all have come to their end. */
static void run_crowd(crowd *c, uint32_t n) {
    uint32_t left = n;
    for (int steps = 0; left && steps < 20000; steps++) {
        uint32_t i = (uint32_t)(test_random() % n);
        if (cl_seq_length(c->row_seq) == TOKENS) {
            cl_seq_free(c->row_seq);
            c->row_seq = new_seq(c->m);
        }
        if (steps % 3 == 0) decode(c->m, c->row_seq);
        if (c->cursors[i].done || c->cursors[i].error.code) continue;
        CHECK(cl_step(c->m, NULL, 0, &c->cursors[i], 1, test_random() % 2 ? 0 : 300, NULL) == CL_OK);
        left -= c->cursors[i].done || c->cursors[i].error.code;
    }
    CHECK(left == 0);
}

static void end_crowd(crowd *c, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        for (int k = 0; c->cursors[i].done && k < TOKENS; k++) CHECK(same(c->logits[i] + k * TINY_VOCAB, (uint64_t)k));
        cl_prefill_free(c->cursors[i].prefill);
        free(c->logits[i]);
        cl_seq_free(c->seqs[i]);
    }
    cl_seq_free(c->row_seq);
    cl_model_close(c->m);
}

/* More cursors than the ring has slots included: then one of the cache is lent. */
static void test_many_cursors_in_a_small_ring_all_come_to_their_end(const tiny_model *t) {
    for (uint32_t n = 2; n <= 4; n++)
        for (uint64_t slots = 1; slots <= 3; slots++) {
            crowd c = make_crowd(t, 2 + (uint32_t)(test_random() % 3), slots, n);
            clear_gate();
            run_crowd(&c, n);
            for (uint32_t i = 0; i < n; i++) {
                CHECK(c.cursors[i].done);
                CHECK(c.cursors[i].counts.expert_hits + c.cursors[i].counts.expert_loads == RECORDS);
            }
            end_crowd(&c, n);
        }
}

static void test_a_record_that_breaks_in_between_fails_cursors_and_leaves_nothing_pinned(const tiny_model *t) {
    for (int record = 0; record < RECORDS; record += 3) {
        crowd c = make_crowd(t, 3, 2, 2);
        clear_gate();
        atomic_store(&broken_record, record);
        run_crowd(&c, 2);
        CHECK(c.cursors[0].error.code == CL_IO && c.cursors[1].error.code == CL_IO);
        clear_gate();
        for (int i = 0; i < 2; i++) { /* the workspaces and all slots serve again */
            cl_prefill_free(c.cursors[i].prefill);
            c.cursors[i] = new_cursor(c.seqs[i], TOKENS, c.logits[i]);
        }
        run_crowd(&c, 2);
        CHECK(c.cursors[0].done && c.cursors[1].done);
        end_crowd(&c, 2);
    }
}

static void set_expected(const tiny_model *t) {
    cl_model *m = open_model(&t->options);
    cl_seq *seq = new_seq(m);
    for (uint64_t i = 0; i < TOKENS; i++) {
        cl_row row = {.seq = seq, .token = token_at(i), .sampling = greedy, .logits = expected[i]};
        CHECK(cl_step(m, &row, 1, NULL, 0, 0, NULL) == CL_OK && row.error.code == CL_OK);
    }
    cl_seq_free(seq);
    cl_model_close(m);
}

int main(void) {
    tiny_model t;
    cl_format f32 = {.codes = CL_CODES_F32};
    tiny_make(&t, f32, f32);
    gate_model = &t;
    set_expected(&t);
    test_arithmetic_goes_on_while_a_read_is_held_up(&t);
    test_a_broken_record_fails_the_rows_that_want_it(&t);
    test_a_broken_record_fails_nobody_else_in_a_small_cache(&t);
    test_a_guessed_record_that_is_still_on_its_way_is_waited_for(&t);
    test_auto_begins_with_a_trial_and_then_decides(&t);
    test_a_trial_leaves_the_switch_where_it_wins();
    test_the_next_layer_is_read_before_its_router_has_chosen(&t);
    test_many_cursors_in_a_small_ring_all_come_to_their_end(&t);
    test_a_record_that_breaks_in_between_fails_cursors_and_leaves_nothing_pinned(&t);
    gate_model = NULL;
    tiny_remove(&t);
    return test_result();
}
