/* step.c - the one call that runs the model: all decode rows through all layers, then the prefill cursors for a while.
 *
 * Owns the order of the two, the budget, and the checks of the call itself. Refuses a malformed call (too many rows,
 * one sequence twice, another model's sequence) before anything runs; what goes wrong with one item is reported in
 * that item. Rounding mode and denormals of the calling thread are set for the duration and restored.
 */
#include "clock.h"
#include "error.h"
#include "fpmode.h"
#include "prefill.h"

#define CANCEL_POLL_US 20000

void cl_wait_for_drive(cl_model *m, uint32_t seen, uint64_t deadline_us) {
    uint64_t start = cl_now_us(), timeout = CANCEL_POLL_US;
    if (deadline_us <= start) return;
    if (deadline_us - start < timeout) timeout = deadline_us - start;
    cl_pool_rest(m->pool);
    cl_io_wait(m->io, seen, timeout);
    cl_count(&m->counters.wait_us, cl_now_us() - start);
}

/* Marks the sequence as part of this step; an error if it is not this model's or already part of it. */
static int enter(cl_model *m, cl_seq *seq, const char *what, uint32_t i, cl_error *err) {
    if (!seq || seq->model != m) return cl_fail(err, CL_INVALID, "%s %u: its sequence is not this model's", what, i);
    if (seq->step == m->step) return cl_fail(err, CL_INVALID, "%s %u: its sequence is in this step twice", what, i);
    seq->step = m->step;
    return CL_OK;
}

static int check_call(cl_model *m, const cl_row *rows, uint32_t n_rows, const cl_cursor *cursors, uint32_t n_cursors,
                      cl_error *err) {
    if (m->loaded != 1) return cl_fail(err, CL_INVALID, "the model is not loaded");
    if (n_rows > m->max_rows)
        return cl_fail(err, CL_INVALID, "%u rows are more than max_rows, %u", n_rows, m->max_rows);
    int code = CL_OK;
    for (uint32_t i = 0; i < n_rows && !code; i++) {
        code = enter(m, rows[i].seq, "row", i, err);
        if (!code && rows[i].seq->in_use)
            code = cl_fail(err, CL_INVALID, "row %u: its sequence is used by a prefill", i);
    }
    for (uint32_t i = 0; i < n_cursors && !code; i++) {
        const cl_prefill *p = cursors[i].prefill;
        if (!p || p->model != m || !p->taken)
            return cl_fail(err, CL_INVALID, "cursor %u: no prefill of this model", i);
        if (!p->seq) return cl_fail(err, CL_INVALID, "cursor %u: its prefill has already ended", i);
        code = enter(m, p->seq, "cursor", i, err);
    }
    return code;
}

static uint64_t add_saturating(uint64_t a, uint64_t b) { return b > UINT64_MAX - a ? UINT64_MAX : a + b; }

int cl_step(cl_model *m, cl_row *rows, uint32_t n_rows, cl_cursor *cursors, uint32_t n_cursors, uint64_t budget_us,
            cl_error *err) {
    cl_ok(err);
    m->step++;
    int code = check_call(m, rows, n_rows, cursors, n_cursors, err);
    if (code) return code;
    uint64_t start = cl_now_us();
    uint32_t mode = cl_fpmode_enter();
    if (n_rows) cl_decode(m, rows, n_rows);
    uint64_t deadline = add_saturating(cl_now_us(), budget_us);
    int used_up = 0;
    for (uint32_t i = 0; i < n_cursors; i++) {
        if (used_up) cl_prefill_report(&cursors[i]);
        else used_up = cl_prefill_advance(&cursors[i], deadline);
    }
    cl_fpmode_leave(mode);
    cl_count(&m->counters.steps, 1);
    cl_count(&m->counters.compute_us, cl_now_us() - start);
    return CL_OK;
}
