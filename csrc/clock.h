/* clock.h - monotonic time in microseconds, and futex waits; Linux only, no state. */
#ifndef COLIBRI_CLOCK_H
#define COLIBRI_CLOCK_H
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static inline uint64_t cl_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000u;
}

/* Sleeps while *word == value, at most timeout_us; may return early for no reason. */
static inline void cl_futex_wait(_Atomic uint32_t *word, uint32_t value, uint64_t timeout_us) {
    struct timespec t = {(time_t)(timeout_us / 1000000u), (long)(timeout_us % 1000000u) * 1000};
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, value, &t, NULL, 0);
}

static inline void cl_futex_wake_all(_Atomic uint32_t *word) {
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
}

#endif
