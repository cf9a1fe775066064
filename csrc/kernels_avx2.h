/* kernels_avx2.h - loads and attributes shared by the two AVX2 files; x86-64 only. */
#ifndef COLIBRI_KERNELS_AVX2_H
#define COLIBRI_KERNELS_AVX2_H
#include "kernels.h"
#include "numbers.h"

#include <immintrin.h>

/* The build has no -m flags: each function that uses the instructions says so, and so must every inline helper. */
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define INLINE AVX2 static inline __attribute__((always_inline))
/* For loops whose bounds are constants after inlining; their arrays then live in registers. Instrumented builds keep
 * the loops: the checks of unrolled code would take minutes to compile. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLL
#define UNROLL_RUNS
#else
#define UNROLL _Pragma("GCC unroll 16")
#define UNROLL_RUNS _Pragma("GCC unroll 4")
#endif

INLINE __m256 load_f32(const void *at) { return _mm256_loadu_ps((const float *)at); }
INLINE __m256 load_f16(const void *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE __m256 load_bf16(const void *at) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

void cl_avx2_matmul(const cl_matrix *w, uint64_t tile_begin, uint64_t tile_end, const cl_acts *acts,
                    const uint32_t *index, uint64_t n, float *y, uint64_t y_stride);

#endif
