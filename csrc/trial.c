/* trial.c - finds out by measuring whether a switch is worth having on.
 *
 * Owns a trial: windows of some decode steps with the switch off and on in turn, so that both see the same text and the
 * same neighbours, and then the medians of the times per token, which a few disturbed steps do not move. Until the next
 * trial, some hundreds of steps later, the switch stays in the better position. Refuses to leave it on for nothing: on
 * must be clearly better. Knows nothing of what is switched.
 */
#include "trial.h"

#define LEAST_GAIN 0.02 /* part of the time per token */

uint32_t cl_trial_position(const cl_trial *trial) {
    return trial->resting ? trial->verdict : trial->step / CL_TRIAL_WINDOW % 2;
}

/* Sorts in place: a step must not allocate, and qsort may. */
static double median(double *samples, uint32_t n) {
    for (uint32_t i = 1; i < n; i++) {
        double sample = samples[i];
        uint32_t at = i;
        for (; at > 0 && samples[at - 1] > sample; at--) samples[at] = samples[at - 1];
        samples[at] = sample;
    }
    return (samples[(n - 1) / 2] + samples[n / 2]) / 2;
}

static void decide(cl_trial *trial) {
    double off = median(trial->samples[0], trial->n[0]), on = median(trial->samples[1], trial->n[1]);
    trial->verdict = on < (1 - LEAST_GAIN) * off;
    trial->resting = CL_TRIAL_REST;
    trial->step = trial->n[0] = trial->n[1] = 0;
}

void cl_trial_add(cl_trial *trial, double us_per_token) {
    if (trial->resting) {
        trial->resting--;
        return;
    }
    uint32_t position = cl_trial_position(trial);
    if (trial->step % CL_TRIAL_WINDOW >= CL_TRIAL_SETTLE)
        trial->samples[position][trial->n[position]++] = us_per_token;
    if (++trial->step == CL_TRIAL_WINDOW * CL_TRIAL_WINDOWS) decide(trial);
}
