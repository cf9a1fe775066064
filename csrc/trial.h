/* trial.h - finds out by measuring whether a switch is worth having on. See trial.c. */
#ifndef COLIBRI_TRIAL_H
#define COLIBRI_TRIAL_H
#include <stdint.h>

#define CL_TRIAL_WINDOW 16  /* steps in a row with the switch in one position */
#define CL_TRIAL_SETTLE 2   /* of these, the first ones that do not count */
#define CL_TRIAL_WINDOWS 12 /* half of them on */
#define CL_TRIAL_REST 512   /* steps between two trials */
#define CL_TRIAL_SAMPLES ((CL_TRIAL_WINDOW - CL_TRIAL_SETTLE) * CL_TRIAL_WINDOWS / 2)

/* All zero: a trial begins, in the position off. */
typedef struct cl_trial {
    uint32_t resting;                    /* steps until the next trial, 0: one is under way */
    uint32_t step;                       /* of the trial */
    uint32_t verdict;                    /* of the last trial; off before the first */
    uint32_t n[2];                       /* samples, by position */
    double samples[2][CL_TRIAL_SAMPLES]; /* times per token */
} cl_trial;

/* The position for the next step: 1 is on. */
uint32_t cl_trial_position(const cl_trial *trial);
/* A step in that position took so long per token. */
void cl_trial_add(cl_trial *trial, double us_per_token);

#endif
