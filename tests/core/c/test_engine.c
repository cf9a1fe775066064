/* test_engine.c - the engine under sanitizers: bits, faults of the drive, suspension, cancellation, no allocation.
 *
 * Reads can be made short, interrupted or broken, and allocations during a step are counted, because the linker puts
 * the __wrap_ functions below in front of the real ones.
 * link: tiny_model.c -Wl,--wrap=pread,--wrap=open,--wrap=malloc,--wrap=calloc,--wrap=realloc
 */
#define _GNU_SOURCE
#include "check.h"
#include "pool.h"
#include "tiny_model.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#define POSITIONS 150

static float expected[POSITIONS][TINY_VOCAB];

static int32_t token_at(uint64_t position) {
    return (int32_t)((position * position * 5 + position * 3 + 1) % TINY_VOCAB);
}

/* ---- what is wrapped ---- */

typedef enum fault { NO_FAULT, SHORT, INTERRUPTED, BROKEN_ONCE, BROKEN } fault;
static _Atomic fault drive_fault;
static _Atomic uint64_t broken_from; /* BROKEN: reads at or beyond this offset */
static _Atomic uint32_t reads, in_step, allocations;

ssize_t __real_pread(int fd, void *data, size_t bytes, off_t offset);
ssize_t __wrap_pread(int fd, void *data, size_t bytes, off_t offset) {
    uint32_t n = atomic_fetch_add(&reads, 1);
    switch (atomic_load(&drive_fault)) {
    case NO_FAULT: break;
    case SHORT: { /* says less than it has read: O_DIRECT takes no odd request */
        ssize_t got = __real_pread(fd, data, bytes, offset);
        return got > 7 ? 7 + (ssize_t)(n * 977 % (uint64_t)(got - 6)) : got;
    }
    case INTERRUPTED:
        if (n % 3) {
            errno = EINTR;
            return -1;
        }
        break;
    case BROKEN_ONCE:
        if (n % 2 == 0) {
            errno = EIO;
            return -1;
        }
        break;
    case BROKEN:
        if ((uint64_t)offset >= atomic_load(&broken_from)) {
            errno = EIO;
            return -1;
        }
        break;
    }
    return __real_pread(fd, data, bytes, offset);
}

/* A file system without O_DIRECT. */
static _Atomic uint32_t no_direct;
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    if (!atomic_load(&no_direct) || !(flags & O_DIRECT)) return __real_open(path, flags);
    errno = EINVAL;
    return -1;
}

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes) {
    atomic_fetch_add(&allocations, atomic_load(&in_step));
    return __real_malloc(bytes);
}
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes) {
    atomic_fetch_add(&allocations, atomic_load(&in_step));
    return __real_calloc(n, bytes);
}
void *__real_realloc(void *p, size_t bytes);
void *__wrap_realloc(void *p, size_t bytes) {
    atomic_fetch_add(&allocations, atomic_load(&in_step));
    return __real_realloc(p, bytes);
}

/* ---- helpers ---- */

static cl_model *open_model(const cl_model_options *options) {
    cl_model *m;
    cl_error err = {0};
    if (cl_model_open(&m, options, &err) || cl_model_load(m, &err)) fprintf(stderr, "%s\n", err.text);
    CHECK(err.code == CL_OK);
    return m;
}

static cl_seq *new_seq(cl_model *m) {
    cl_seq *seq;
    CHECK(cl_seq_create(&seq, m, NULL) == CL_OK);
    return seq;
}

static int step(cl_model *m, cl_row *rows, uint32_t n_rows, cl_cursor *cursors, uint32_t n_cursors, uint64_t budget) {
    atomic_store(&in_step, 1);
    int code = cl_step(m, rows, n_rows, cursors, n_cursors, budget, NULL);
    atomic_store(&in_step, 0);
    return code;
}

static int same(const float *a, uint64_t position) { return memcmp(a, expected[position], sizeof expected[0]) == 0; }

static const cl_sampling greedy = {0, 0, 1, 0};

/* A prefill of n tokens at the sequence's end, run to its end; its error code. */
static int prefill(cl_model *m, cl_seq *seq, uint32_t n, uint64_t budget) {
    int32_t tokens[POSITIONS];
    float *logits = malloc(n * sizeof expected[0]);
    uint64_t start = cl_seq_length(seq);
    for (uint32_t i = 0; i < n; i++) tokens[i] = token_at(start + i);
    cl_cursor cursor = {0};
    cl_error err = {0};
    CHECK(cl_prefill_create(&cursor.prefill, seq, tokens, n, &greedy, logits, &err) == CL_OK);
    while (!cursor.done && !cursor.error.code) CHECK(step(m, NULL, 0, &cursor, 1, budget) == CL_OK);
    for (uint32_t i = 0; cursor.done && i < n; i++) CHECK(same(logits + i * TINY_VOCAB, start + i));
    CHECK(cl_seq_length(seq) == start + (cursor.done ? n : 0));
    cl_prefill_free(cursor.prefill);
    free(logits);
    return cursor.error.code;
}

static int decode(cl_model *m, cl_seq *seq) {
    float logits[TINY_VOCAB];
    uint64_t position = cl_seq_length(seq);
    cl_row row = {.seq = seq, .token = token_at(position), .sampling = greedy, .logits = logits};
    CHECK(step(m, &row, 1, NULL, 0, 0) == CL_OK);
    if (row.error.code == CL_OK) CHECK(same(logits, position));
    CHECK(cl_seq_length(seq) == position + (row.error.code == CL_OK));
    return row.error.code;
}

static void set_expected(const tiny_model *t) {
    cl_model *m = open_model(&t->options);
    cl_seq *seq = new_seq(m);
    for (uint64_t i = 0; i < POSITIONS; i++) {
        cl_row row = {.seq = seq, .token = token_at(i), .sampling = greedy, .logits = expected[i]};
        CHECK(step(m, &row, 1, NULL, 0, 0) == CL_OK && row.error.code == CL_OK);
    }
    cl_seq_free(seq);
    cl_model_close(m);
}

/* ---- tests ---- */

static void test_bits_do_not_depend_on_placement(const tiny_model *t) {
    static const uint64_t slots[] = {1, 5, 10};
    for (int i = 0; i < 12; i++) {
        cl_model_options o = t->options;
        o.expert_slots = slots[i / 2 % 3];
        o.io_backend = i < 6 ? CL_IO_THREADS : CL_IO_AUTO;
        o.io_depth = (uint32_t)i % 6;
        o.verify = i % 3;
        o.threads = 1 + (uint32_t)i % 3;
        o.direct = i % 2 ? CL_DIRECT_AUTO : CL_DIRECT_OFF;
        cl_model *m = open_model(&o);
        cl_seq *a = new_seq(m), *b = new_seq(m);
        CHECK(prefill(m, a, 70, UINT64_MAX) == CL_OK);
        CHECK(prefill(m, a, 80, 0) == CL_OK);
        for (int n = 0; n < 20; n++) CHECK(decode(m, b) == CL_OK);
        CHECK(prefill(m, b, 1, 0) == CL_OK);
        cl_seq_free(a);
        cl_seq_free(b);
        cl_model_close(m);
    }
}

static void test_reads_that_are_short_interrupted_or_fail_once_do_not_show(const tiny_model *t) {
    for (int direct = 0; direct < 2; direct++)
        for (fault f = SHORT; f <= BROKEN_ONCE; f++) {
            cl_model_options o = t->options;
            o.expert_slots = 1;
            o.io_threads = 1; /* so that every second read really is every second */
            o.n_stripes = 2;
            o.direct = direct ? CL_DIRECT_AUTO : CL_DIRECT_OFF;
            cl_model *m = open_model(&o);
            atomic_store(&drive_fault, f == BROKEN_ONCE ? NO_FAULT : f);
            cl_seq *seq = new_seq(m);
            CHECK(prefill(m, seq, 70, UINT64_MAX) == CL_OK);
            for (int i = 0; i < 5; i++) CHECK(decode(m, seq) == CL_OK);
            cl_model_stats stats;
            cl_model_get_stats(m, &stats);
            CHECK(stats.read_errors == 0 && stats.checksum_errors == 0 && stats.expert_loads > 10);
            atomic_store(&drive_fault, NO_FAULT);
            cl_seq_free(seq);
            cl_model_close(m);
        }
    /* Loading the dense weights reads with one thread: here every second read fails, and each is tried again. */
    atomic_store(&reads, 1);
    cl_model *m;
    CHECK(cl_model_open(&m, &t->options, NULL) == CL_OK);
    atomic_store(&reads, 0);
    atomic_store(&drive_fault, BROKEN_ONCE);
    CHECK(cl_model_load(m, NULL) == CL_OK);
    atomic_store(&drive_fault, NO_FAULT);
    cl_model_close(m);
}

static void test_a_broken_drive_fails_items_and_nothing_else(const tiny_model *t) {
    cl_model_options o = t->options;
    o.expert_slots = 1;
    cl_model *m = open_model(&o);
    cl_seq *seq = new_seq(m);
    atomic_store(&broken_from, 4096);
    atomic_store(&drive_fault, BROKEN);
    CHECK(decode(m, seq) == CL_IO);
    CHECK(prefill(m, seq, 70, UINT64_MAX) == CL_IO);
    CHECK(prefill(m, seq, 70, 0) == CL_IO);
    cl_model_stats stats;
    cl_model_get_stats(m, &stats);
    CHECK(stats.read_errors > 0 && stats.kv_pages_free == o.kv_pages && stats.prefills_free == o.max_prefills);
    atomic_store(&drive_fault, NO_FAULT);
    CHECK(prefill(m, seq, 70, UINT64_MAX) == CL_OK);
    cl_seq_free(seq);
    cl_model_close(m);
}

typedef struct walk {
    cl_model *m;
    cl_seq *seqs[5];
    cl_cursor cursors[2];
    float *logits[2];
    uint64_t starts[2];
    uint32_t lengths[2];
    int owners[2]; /* sequence of the cursor, -1: none */
} walk;

static void start_prefill(walk *w, int c, int s) {
    uint64_t start = cl_seq_length(w->seqs[s]);
    uint32_t n = 1 + (uint32_t)(test_random() % 40);
    if (start + n > POSITIONS) return;
    int32_t tokens[40];
    for (uint32_t i = 0; i < n; i++) tokens[i] = token_at(start + i);
    w->logits[c] = malloc(n * sizeof expected[0]);
    int code = cl_prefill_create(&w->cursors[c].prefill, w->seqs[s], tokens, n, &greedy, w->logits[c], NULL);
    CHECK(code == CL_OK || code == CL_FULL);
    if (code) {
        free(w->logits[c]);
        return;
    }
    w->owners[c] = s;
    w->starts[c] = start;
    w->lengths[c] = n;
}

static void end_prefill(walk *w, int c) {
    cl_cursor *cursor = &w->cursors[c];
    for (uint32_t i = 0; cursor->done && i < w->lengths[c]; i++)
        CHECK(same(w->logits[c] + i * TINY_VOCAB, w->starts[c] + i));
    CHECK(cl_seq_length(w->seqs[w->owners[c]]) == w->starts[c] + (cursor->done ? w->lengths[c] : 0));
    cl_prefill_free(cursor->prefill);
    free(w->logits[c]);
    memset(cursor, 0, sizeof *cursor);
    w->owners[c] = -1;
}

static int is_owned(const walk *w, int s) { return w->owners[0] == s || w->owners[1] == s; }

static void renew(walk *w, int s) {
    for (int c = 0; c < 2; c++)
        if (w->owners[c] == s) end_prefill(w, c);
    cl_seq_free(w->seqs[s]);
    w->seqs[s] = new_seq(w->m);
}

/* One step with random rows and the cursors in random order; what comes out right must be the expected bits. */
static void random_step(walk *w) {
    cl_row rows[4];
    float logits[4][TINY_VOCAB];
    uint32_t n = 0;
    for (int s = 0; s < 5 && n < 4; s++) {
        if (is_owned(w, s) || test_random() % 3 == 0 || cl_seq_length(w->seqs[s]) >= POSITIONS) continue;
        rows[n] = (cl_row){.seq = w->seqs[s], .token = token_at(cl_seq_length(w->seqs[s])), .sampling = greedy};
        rows[n].logits = logits[n];
        n++;
    }
    cl_cursor active[2];
    int which[2];
    uint32_t n_active = 0;
    int turn = (int)(test_random() % 2);
    for (int i = 0; i < 2; i++) {
        int c = (i + turn) % 2;
        if (w->owners[c] < 0 || test_random() % 4 == 0) continue;
        which[n_active] = c;
        active[n_active++] = w->cursors[c];
    }
    static const uint64_t budgets[] = {0, 200, 3000, UINT64_MAX};
    CHECK(step(w->m, rows, n, active, n_active, budgets[test_random() % 4]) == CL_OK);
    for (uint32_t i = 0; i < n; i++)
        if (rows[i].error.code == CL_OK) CHECK(same(logits[i], cl_seq_length(rows[i].seq) - 1));
    for (uint32_t i = 0; i < n_active; i++) {
        w->cursors[which[i]] = active[i];
        if (active[i].done || active[i].error.code) end_prefill(w, which[i]);
    }
}

static void test_a_random_walk(const tiny_model *t, int steps) {
    cl_model_options o = t->options;
    o.expert_slots = 1 + test_random() % 4;
    o.threads = 2;
    o.kv_pages = 9;
    walk w = {.m = open_model(&o), .owners = {-1, -1}};
    for (int s = 0; s < 5; s++) w.seqs[s] = new_seq(w.m);
    for (int i = 0; i < steps; i++) {
        int s = (int)(test_random() % 5), c = (int)(test_random() % 2);
        uint64_t dice = test_random() % 20;
        if (dice == 0 || cl_seq_length(w.seqs[s]) > POSITIONS - 3) renew(&w, s);
        if (dice == 1) cl_seq_cancel(w.seqs[s]);
        if (dice == 2 && w.owners[c] >= 0) end_prefill(&w, c);
        atomic_store(&broken_from, 4096 + 4096 * (test_random() % 12));
        atomic_store(&drive_fault, dice == 3 ? BROKEN : dice < 8 ? SHORT : NO_FAULT);
        if (w.owners[c] < 0 && !is_owned(&w, s)) start_prefill(&w, c, s);
        random_step(&w);
    }
    atomic_store(&drive_fault, NO_FAULT);
    for (int s = 0; s < 5; s++) {
        renew(&w, s);
        cl_seq_free(w.seqs[s]);
    }
    cl_model_stats stats;
    cl_model_get_stats(w.m, &stats);
    CHECK(stats.kv_pages_free == o.kv_pages && stats.prefills_free == o.max_prefills);
    CHECK(stats.decode_tokens > 0 && stats.prefill_tokens > 0 && stats.expert_evictions > 0);
    cl_model_close(w.m);
}

static void *cancel_and_look(void *argument) {
    cl_seq *seq = ((void **)argument)[0];
    const cl_model *m = ((void **)argument)[1];
    cl_model_stats stats;
    for (int i = 0; i < 200; i++) {
        cl_model_get_stats(m, &stats);
        if (i % 20 == 0) cl_seq_cancel(seq);
    }
    return NULL;
}

static void test_cancel_and_stats_come_from_any_thread(const tiny_model *t) {
    cl_model_options o = t->options;
    o.threads = 2;
    o.expert_slots = 2;
    cl_model *m = open_model(&o);
    cl_seq *seq = new_seq(m);
    void *argument[2] = {seq, m};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, cancel_and_look, argument) == 0);
    for (int i = 0; i < 30; i++) {
        int code = decode(m, seq);
        CHECK(code == CL_OK || code == CL_CANCELLED);
    }
    pthread_join(thread, NULL);
    cl_seq_free(seq);
    cl_model_close(m);
}

static void test_what_cannot_be_opened_leaves_nothing_behind(const tiny_model *t) {
    cl_model *m;
    cl_error err;
    cl_model_options o = t->options;
    o.isa = "none";
    CHECK(cl_model_open(&m, &o, &err) == CL_UNSUPPORTED && m == NULL);
    o = t->options;
    cl_stripe stripes[2] = {t->stripes[1], t->stripes[0]};
    o.stripes = stripes;
    CHECK(cl_model_open(&m, &o, &err) == CL_INVALID || err.code == CL_CORRUPT);
    CHECK(m == NULL);
    stripes[0] = t->stripes[0];
    stripes[1] = (cl_stripe){"/nonexistent/stripe", t->stripes[1].bytes, NULL};
    CHECK(cl_model_open(&m, &o, &err) == CL_IO && m == NULL && strstr(err.text, "stripe 1 (/nonexistent/stripe)"));
    o = t->options;
    o.expert_slots = INT32_MAX / 2;
    CHECK(cl_model_open(&m, &o, &err) == CL_NOMEM && m == NULL);
    o = t->options;
    o.dense_path = "/nonexistent/dense";
    CHECK(cl_model_open(&m, &o, &err) == CL_OK && cl_model_load(m, &err) == CL_IO);
    cl_model_close(m);
    cl_model_close(NULL);
}

static void test_a_file_system_without_o_direct_is_read_through_the_page_cache(const tiny_model *t) {
    cl_model_options o = t->options;
    cl_model *m;
    cl_error err;
    cl_model_stats stats;
    atomic_store(&no_direct, 1);
    o.direct = CL_DIRECT_ON;
    CHECK(cl_model_open(&m, &o, &err) == CL_UNSUPPORTED && m == NULL && strstr(err.text, "stripe 0"));
    o.direct = CL_DIRECT_AUTO;
    m = open_model(&o);
    cl_model_get_stats(m, &stats);
    CHECK(stats.direct_active == 0 && stats.buffered_stripes == ((uint64_t)1 << o.n_stripes) - 1);
    cl_seq *seq = new_seq(m);
    CHECK(prefill(m, seq, 70, UINT64_MAX) == CL_OK);
    cl_seq_free(seq);
    cl_model_close(m);
    atomic_store(&no_direct, 0);
}

typedef struct sums {
    _Atomic uint64_t total;
    _Atomic uint32_t calls;
} sums;

static void add_up(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    sums *s = context;
    CHECK(thread < 3 && begin < end);
    for (uint64_t i = begin; i < end; i++) atomic_fetch_add(&s->total, i);
    atomic_fetch_add(&s->calls, 1);
}

static void test_the_pool_does_every_piece_once(void) {
    cl_pool *pool;
    CHECK(cl_pool_create(&pool, 3, NULL) == CL_OK);
    for (uint64_t n = 0; n < 300; n++) {
        sums s = {0, 0};
        uint64_t piece = 1 + n % 7;
        cl_pool_run(pool, n, piece, add_up, &s);
        CHECK(s.total == n * (n - (n > 0)) / 2);
        CHECK(s.calls == (n == 0 ? 0 : n <= piece ? 1 : (n + piece - 1) / piece));
        if (n % 50 == 0) cl_pool_rest(pool);
    }
    cl_pool_free(pool);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 300;
    cl_format f32 = {.codes = CL_CODES_F32};
    cl_format int8 = {CL_CODES_INT8, CL_SCALE_F16, CL_CODEBOOK_UNIFORM, 0, 32};
    cl_format int4 = {CL_CODES_INT4, CL_SCALE_F16, CL_CODEBOOK_UNIFORM, 1, 16};
    test_the_pool_does_every_piece_once();
    for (int quantised = 0; quantised < 2; quantised++) {
        tiny_model t;
        tiny_make(&t, quantised ? int8 : f32, quantised ? int4 : f32);
        set_expected(&t);
        test_bits_do_not_depend_on_placement(&t);
        test_reads_that_are_short_interrupted_or_fail_once_do_not_show(&t);
        test_a_broken_drive_fails_items_and_nothing_else(&t);
        test_cancel_and_stats_come_from_any_thread(&t);
        test_what_cannot_be_opened_leaves_nothing_behind(&t);
        test_a_file_system_without_o_direct_is_read_through_the_page_cache(&t);
        for (int i = 0; i < 3; i++) test_a_random_walk(&t, steps);
        tiny_remove(&t);
    }
    CHECK(atomic_load(&allocations) == 0);
    return test_result();
}
