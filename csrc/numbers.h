/* numbers.h - conversions between number formats, exact by definition, as inline C.
 *
 * Owns f16 and bf16 to and from f32, rounding to integers, and the arithmetic of R8 tile offsets. No sums, no state.
 * Every function gives the same bits on every CPU; vector kernels may use instructions that agree with them.
 */
#ifndef COLIBRI_NUMBERS_H
#define COLIBRI_NUMBERS_H
#include "colibri.h"
#include "format.h"

#include <string.h>

static inline uint32_t cl_float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float cl_float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float cl_bf16_to_f32(uint16_t h) { return cl_float_from_bits((uint32_t)h << 16); }

/* Round to nearest even; NaN stays NaN (quiet). */
static inline uint16_t cl_f32_to_bf16(float x) {
    uint32_t bits = cl_float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float cl_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t rest = (uint32_t)(h & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) { /* infinity or NaN (made quiet) */
        uint32_t quiet = rest > 0x0f800000u ? 0x400000u : 0u;
        return cl_float_from_bits(sign | 0x70000000u | rest | quiet);
    }
    /* As f32 bits the exponent is 112 too small; the product repairs it, and makes f16 subnormals normal, exactly. */
    return cl_float_from_bits(sign | cl_float_bits(cl_float_from_bits(rest) * 0x1p112f));
}

/* Round to nearest even; beyond the range to infinity; NaN stays NaN (quiet, upper payload bits kept). */
static inline uint16_t cl_f32_to_f16(float x) {
    uint32_t bits = cl_float_bits(x);
    uint32_t sign = bits >> 16 & 0x8000u;
    uint32_t rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* >= 65520 */
    if (rest < 0x38800000u) {                                   /* subnormal f16: align to 2^-24 by an addition */
        float aligned = cl_float_from_bits(rest) + 0.5f;
        return (uint16_t)(sign | (cl_float_bits(aligned) - 0x3f000000u));
    }
    return (uint16_t)(sign | (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13);
}

/* Nearest integer, ties to even, for |x| <= 2^22: adding 1.5 * 2^23 leaves the integer in the low bits. */
#define CL_ROUNDER 12582912.0f
static inline int32_t cl_round(float x) {
    return (int32_t)(cl_float_bits(x + CL_ROUNDER) - cl_float_bits(CL_ROUNDER));
}

static inline uint64_t cl_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t cl_div_up(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

/* ---- R8 tile arithmetic, for checked formats (cl_format_check) --------------------------------------------------- */

static inline int cl_is_grouped(const cl_format *f) { return f->group_size != 0; }
static inline uint64_t cl_groups(const cl_format *f, uint64_t cols) { return cl_div_up(cols, f->group_size); }
static inline uint64_t cl_group_columns(const cl_format *f, uint64_t cols, uint64_t group) {
    return cl_min_u64(f->group_size, cols - group * f->group_size);
}
/* Bytes of scales and mins in front of a group's codes. */
static inline uint64_t cl_group_header(const cl_format *f) { return f->asymmetric ? 32 : 16; }
/* Bytes of codes for `columns` columns of one group. */
static inline uint64_t cl_group_codes(const cl_format *f, uint64_t columns) {
    return 32 * cl_div_up(columns, f->codes == CL_CODES_INT4 ? 8 : 4);
}
static inline uint64_t cl_group_stride(const cl_format *f) {
    return cl_group_header(f) + cl_group_codes(f, f->group_size);
}

#endif
