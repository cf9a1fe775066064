/* fpmode.h - rounding and denormal mode of the calling thread (docs/numerics.md, "Rules for all code").
 *
 * Compute threads set it once (cl_kernels_thread_init); functions called on another's thread borrow and restore it.
 */
#ifndef COLIBRI_FPMODE_H
#define COLIBRI_FPMODE_H
#include <stdint.h>

#if defined(__x86_64__)
#define CL_MXCSR 0x1f80u /* exceptions masked, nearest even, no FTZ, no DAZ */
static inline uint32_t cl_fpmode_enter(void) {
    uint32_t saved = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(CL_MXCSR);
    return saved;
}
static inline void cl_fpmode_leave(uint32_t saved) { __builtin_ia32_ldmxcsr(saved); }
#elif defined(__aarch64__)
static inline uint32_t cl_fpmode_enter(void) {
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return (uint32_t)saved;
}
static inline void cl_fpmode_leave(uint32_t saved) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)saved)); }
#else
#error "cl_fpmode_enter is not written for this architecture"
#endif

#endif
