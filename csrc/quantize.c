/* quantize.c - from f32, bf16 or f16 weights to the stored formats, with scales found by a search for the least error.
 *
 * Owns the choice of every code, scale and minimum (docs/numerics.md, "Quantisation") and the error report; refuses
 * NaN, infinity and scales beyond f16. tiles.c owns where the bytes go. Called by the packer, from several threads.
 */
#include "error.h"
#include "fpmode.h"
#include "numbers.h"
#include "search.h"
#include "tiles.h"

/* One call's constants. */
typedef struct job {
    cl_format format;
    const uint8_t *source;
    int32_t source_type;
    uint64_t rows, cols, row_stride;
} job;

/* One group of 8 rows: weights [columns][8], and what they became. */
typedef struct panel {
    v8f w[CL_GROUP_MAX], u[CL_GROUP_MAX];
    int8_t codes[CL_GROUP_MAX * 8];
    v8f scale, min;           /* f32, then the f32 values of the f16 below */
    uint16_t scales[8], mins[8];
    uint64_t nonzero, zeroed;
    double sum_squares, error_squares;
} panel;

static uint64_t element_bytes(int32_t source_type) { return source_type == CL_SOURCE_F32 ? 4 : 2; }

static inline float load(const job *j, const uint8_t *row, uint64_t k) {
    float f;
    uint16_t h;
    if (j->source_type == CL_SOURCE_F32) {
        memcpy(&f, row + 4 * k, 4);
        return f;
    }
    memcpy(&h, row + 2 * k, 2);
    return j->source_type == CL_SOURCE_BF16 ? cl_bf16_to_f32(h) : cl_f16_to_f32(h);
}

static const uint8_t *source_row(const job *j, uint64_t row) {
    return j->source + row * j->row_stride * element_bytes(j->source_type);
}

static int is_finite(float x) { return (cl_float_bits(x) & 0x7f800000u) != 0x7f800000u; }

/* Transposes columns first..first+n-1 of `count` rows into w; missing rows are zero. */
static void load_panel(const job *j, uint64_t row, uint64_t count, uint64_t first, uint64_t n, v8f *w) {
    float *out = (float *)w;
    for (uint64_t lane = 0; lane < 8; lane++) {
        if (lane >= count) {
            for (uint64_t k = 0; k < n; k++) out[k * 8 + lane] = 0.0f;
            continue;
        }
        const uint8_t *at = source_row(j, row + lane) + first * element_bytes(j->source_type);
        if (j->source_type == CL_SOURCE_F32)
            for (uint64_t k = 0; k < n; k++) memcpy(&out[k * 8 + lane], at + 4 * k, 4);
        else
            for (uint64_t k = 0; k < n; k++) out[k * 8 + lane] = load(j, at, k);
    }
}

/* ---- the numbers of one group, for 8 rows at once ---------------------------------------------------------------- */

/* Fills u (weights brought to a fixed range), `origin` and `range`: w = origin + range * u. A range of 0 makes u 0. */
CL_INLINE void normalize(panel *p, uint64_t n, int asymmetric, int int8, v8f *origin, v8f *range) {
    v8f low = p->w[0], high = p->w[0], peak = p->w[0];
    v8f size = (v8f)((v8i)p->w[0] & 0x7fffffff);
    for (uint64_t k = 1; k < n; k++) {
        v8f a = (v8f)((v8i)p->w[k] & 0x7fffffff);
        low = V8_SELECT(p->w[k] < low, p->w[k], low);
        high = V8_SELECT(p->w[k] > high, p->w[k], high);
        v8i larger = a > size;
        peak = V8_SELECT(larger, p->w[k], peak);
        size = V8_SELECT(larger, a, size);
    }
    *origin = asymmetric ? low + 0.0f : (v8f){0}; /* never -0, whichever zero came first */
    *range = asymmetric ? high - low : int8 ? size : peak;
    v8f zero = {0};
    for (uint64_t k = 0; k < n; k++) {
        v8f u = (p->w[k] - *origin) / *range;
        p->u[k] = V8_SELECT(*range != 0.0f, u, zero);
    }
}

/* p->scale and p->min by search, in f32. */
CL_INLINE void fit_panel(panel *p, uint64_t n, int asymmetric, int int8) {
    v8f origin, range;
    cl_fit best;
    normalize(p, n, asymmetric, int8, &origin, &range);
    if (asymmetric)
        search_asymmetric(p->u, n, &best);
    else
        search_symmetric(p->u, n, int8, &best);
    v8f zero = {0};
    p->scale = best.scale * range;
    p->min = origin + best.min * range;
    p->scale = V8_SELECT(range != 0.0f, p->scale, zero);
    p->min = V8_SELECT(range != 0.0f, p->min, origin);
    /* Where the scale vanishes in f16 all codes are 0: the middle of the group is then the best minimum. */
    v8f middle = origin + 0.5f * range;
    v8f magnitude = (v8f)((v8i)p->scale & 0x7fffffff);
    p->min = V8_SELECT((magnitude <= 0x1p-25f) & (range != 0.0f), middle, p->min);
    if (!asymmetric) p->min = zero;
}

/* Codes for the rounded scale and minimum, and what they cost. */
CL_INLINE void code_panel(panel *p, uint64_t n, int asymmetric, int int8) {
    typedef double v8d __attribute__((vector_size(64)));
    float low = asymmetric ? 0.0f : int8 ? -127.0f : -8.0f, high = asymmetric ? 15.0f : int8 ? 127.0f : 7.0f;
    v8f steps = 1.0f / p->scale, zero = {0};
    steps = V8_SELECT(p->scale != 0.0f, steps, zero);
    v8i nonzero = {0}, zeroed = {0};
    v8d squares = {0}, errors = {0};
    v8i offset = (!asymmetric && !int8 ? 8 : 0) - (v8i){0};
    for (uint64_t k = 0; k < n; k++) {
        v8f q = (p->w[k] - p->min) * steps;
        v8_code(&q, low, high);
        v8f value = p->scale * q + p->min;
        v8i code = __builtin_convertvector(q, v8i) + offset;
        for (int lane = 0; lane < 8; lane++) p->codes[k * 8 + lane] = (int8_t)code[lane];
        nonzero -= p->w[k] != 0.0f;
        zeroed -= (p->w[k] != 0.0f) & (value == 0.0f);
        v8d w = __builtin_convertvector(p->w[k], v8d), error = w - __builtin_convertvector(value, v8d);
        squares += w * w;
        errors += error * error;
    }
    p->nonzero = p->zeroed = 0;
    p->sum_squares = p->error_squares = 0;
    for (int lane = 0; lane < 8; lane++) {
        p->nonzero += (uint32_t)nonzero[lane];
        p->zeroed += (uint32_t)zeroed[lane];
        p->sum_squares += squares[lane];
        p->error_squares += errors[lane];
    }
}

#define PANEL_FUNCTIONS(suffix, target)                                                                                \
    target static void fit_int4_asymmetric_##suffix(panel *p, uint64_t n) { fit_panel(p, n, 1, 0); }                   \
    target static void fit_int4_symmetric_##suffix(panel *p, uint64_t n) { fit_panel(p, n, 0, 0); }                    \
    target static void fit_int8_##suffix(panel *p, uint64_t n) { fit_panel(p, n, 0, 1); }                              \
    target static void code_int4_asymmetric_##suffix(panel *p, uint64_t n) { code_panel(p, n, 1, 0); }                 \
    target static void code_int4_symmetric_##suffix(panel *p, uint64_t n) { code_panel(p, n, 0, 0); }                  \
    target static void code_int8_##suffix(panel *p, uint64_t n) { code_panel(p, n, 0, 1); }                            \
    static const panel_functions functions_##suffix = {                                                                \
        {fit_int4_asymmetric_##suffix, fit_int4_symmetric_##suffix, fit_int8_##suffix},                                \
        {code_int4_asymmetric_##suffix, code_int4_symmetric_##suffix, code_int8_##suffix}}

/* By format: 0 int4 asymmetric, 1 int4 symmetric, 2 int8. */
typedef struct panel_functions {
    void (*fit[3])(panel *p, uint64_t n);
    void (*code[3])(panel *p, uint64_t n);
} panel_functions;

PANEL_FUNCTIONS(generic, );
#if defined(__x86_64__)
PANEL_FUNCTIONS(avx2, __attribute__((target("avx2"))));
#endif

static const panel_functions *functions_for_this_cpu(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return &functions_avx2;
#endif
    return &functions_generic;
}

/* Rounds scale and minimum of lane to f16. */
static int round_lane(panel *p, int lane, uint64_t row, uint64_t group, cl_error *err) {
    float scale = p->scale[lane], min = p->min[lane];
    if (!(scale < 65520.0f && scale > -65520.0f))
        return cl_fail(err, CL_UNSUPPORTED, "row %llu, group %llu: scale %g is beyond the range of f16",
                       (unsigned long long)row, (unsigned long long)group, (double)scale);
    if (!(min < 65520.0f && min > -65520.0f))
        return cl_fail(err, CL_UNSUPPORTED, "row %llu, group %llu: minimum %g is beyond the range of f16",
                       (unsigned long long)row, (unsigned long long)group, (double)min);
    p->scales[lane] = cl_f32_to_f16(scale);
    p->mins[lane] = cl_f32_to_f16(min);
    p->scale[lane] = cl_f16_to_f32(p->scales[lane]);
    p->min[lane] = cl_f16_to_f32(p->mins[lane]);
    return CL_OK;
}

/* One group of the 8 (or fewer) rows from `row`. CL_NONFINITE without text: the caller finds the first. */
static int quantize_panel(const job *j, const panel_functions *functions, panel *p, uint64_t row, uint64_t count,
                          uint64_t group, cl_quant_report *report, cl_error *err) {
    uint64_t n = cl_group_columns(&j->format, j->cols, group);
    load_panel(j, row, count, group * j->format.group_size, n, p->w);
    v8i bad = {0};
    for (uint64_t k = 0; k < n; k++) bad |= ((v8i)p->w[k] & 0x7f800000) == 0x7f800000;
    for (int lane = 0; lane < 8; lane++)
        if (bad[lane]) return CL_NONFINITE;
    int kind = j->format.codes == CL_CODES_INT8 ? 2 : j->format.asymmetric ? 0 : 1;
    functions->fit[kind](p, n);
    for (int lane = 0; lane < 8; lane++) {
        int rc = round_lane(p, lane, row + (uint64_t)lane, group, err);
        if (rc != CL_OK) return rc;
    }
    functions->code[kind](p, n);
    report->values += count * n;
    report->nonzero += p->nonzero;
    report->zeroed += p->zeroed;
    report->sum_squares += p->sum_squares;
    report->error_squares += p->error_squares;
    return CL_OK;
}

/* ---- f32 and bf16 ------------------------------------------------------------------------------------------------ */

/* The stored value of a weight in a format without scales; adds it to the report. */
static uint32_t plain_bits(const job *j, float w, cl_quant_report *report) {
    uint32_t bits = cl_float_bits(w);
    float value = w;
    if (j->format.codes == CL_CODES_BF16) {
        bits = cl_f32_to_bf16(w);
        value = cl_bf16_to_f32((uint16_t)bits);
    }
    double error = (double)w - (double)value;
    report->values++;
    report->nonzero += w != 0.0f;
    report->zeroed += w != 0.0f && value == 0.0f;
    report->sum_squares += (double)w * (double)w;
    report->error_squares += error * error;
    return bits;
}

/* One row to out, elements `step` bytes apart. */
static int plain_row(const job *j, uint64_t row, uint8_t *out, uint64_t step, cl_quant_report *report, cl_error *err) {
    const uint8_t *at = source_row(j, row);
    uint64_t size = j->format.codes == CL_CODES_F32 ? 4 : 2;
    for (uint64_t k = 0; k < j->cols; k++) {
        float w = load(j, at, k);
        if (!is_finite(w)) return CL_NONFINITE;
        uint32_t bits = plain_bits(j, w, report);
        if (size == 2 && (bits & 0x7f80u) == 0x7f80u)
            return cl_fail(err, CL_UNSUPPORTED, "row %llu, column %llu: %g is beyond the range of bf16",
                           (unsigned long long)row, (unsigned long long)k, (double)w);
        memcpy(out + k * step, &bits, size); /* little-endian, as the whole container */
    }
    return CL_OK;
}

/* ---- whole matrices ---------------------------------------------------------------------------------------------- */

/* Names the first NaN or infinity in row-major order. */
static int report_nonfinite(const job *j, cl_quant_report *report, cl_error *err) {
    for (uint64_t row = 0; row < j->rows; row++)
        for (uint64_t k = 0; k < j->cols; k++)
            if (!is_finite(load(j, source_row(j, row), k))) {
                report->nonfinite_row = (int64_t)row;
                report->nonfinite_col = (int64_t)k;
                return cl_fail(err, CL_NONFINITE, "row %llu, column %llu: %g is not finite", (unsigned long long)row,
                               (unsigned long long)k, (double)load(j, source_row(j, row), k));
            }
    return cl_fail(err, CL_INTERNAL, "a non-finite weight was seen and then not found");
}

static int start(job *j, const cl_format *format, const void *source, int32_t source_type, uint64_t rows,
                 uint64_t cols, uint64_t row_stride, cl_quant_report *report, cl_error *err) {
    memset(report, 0, sizeof *report);
    report->nonfinite_row = report->nonfinite_col = -1;
    if (source_type < CL_SOURCE_F32 || source_type > CL_SOURCE_F16)
        return cl_fail(err, CL_INVALID, "source_type %d is not one of CL_SOURCE_*", source_type);
    if (row_stride < cols)
        return cl_fail(err, CL_INVALID, "row_stride %llu is less than cols %llu", (unsigned long long)row_stride,
                       (unsigned long long)cols);
    *j = (job){.format = *format, .source = source, .source_type = source_type, .rows = rows, .cols = cols,
               .row_stride = row_stride};
    return CL_OK;
}

/* One tile. */
static int quantize_tile(const job *j, const panel_functions *functions, panel *p, uint64_t row, uint8_t *tile,
                         cl_quant_report *report, cl_error *err) {
    uint64_t count = cl_min_u64(CL_TILE_ROWS, j->rows - row);
    int rc = CL_OK;
    if (!cl_is_grouped(&j->format)) {
        uint64_t size = j->format.codes == CL_CODES_F32 ? 4 : 2;
        memset(tile, 0, j->cols * size * CL_TILE_ROWS);
        for (uint64_t lane = 0; lane < count && rc == CL_OK; lane++)
            rc = plain_row(j, row + lane, tile + lane * size, size * CL_TILE_ROWS, report, err);
        return rc;
    }
    for (uint64_t g = 0; g < cl_groups(&j->format, j->cols) && rc == CL_OK; g++) {
        rc = quantize_panel(j, functions, p, row, count, g, report, err);
        if (rc == CL_OK)
            cl_tile_group_write(&j->format, cl_group_columns(&j->format, j->cols, g), p->codes, p->scales, p->mins,
                                tile + cl_tile_group_offset(&j->format, g));
    }
    return rc;
}

int cl_quantize_tiles(const cl_format *format, const void *source, int32_t source_type, uint64_t rows, uint64_t cols,
                      uint64_t row_stride, uint8_t *tiles, uint64_t tiles_bytes, cl_quant_report *report,
                      cl_error *err) {
    job j;
    panel p;
    uint64_t need;
    int rc = start(&j, format, source, source_type, rows, cols, row_stride, report, err);
    if (rc == CL_OK) rc = cl_tiles_bytes(format, rows, cols, &need, err);
    if (rc != CL_OK) return rc;
    if (tiles_bytes != need)
        return cl_fail(err, CL_INVALID, "tiles_bytes %llu where rows %llu, cols %llu need %llu",
                       (unsigned long long)tiles_bytes, (unsigned long long)rows, (unsigned long long)cols,
                       (unsigned long long)need);
    uint64_t one = need / cl_div_up(rows, CL_TILE_ROWS);
    uint32_t mode = cl_fpmode_enter();
    for (uint64_t row = 0; row < rows && rc == CL_OK; row += CL_TILE_ROWS)
        rc = quantize_tile(&j, functions_for_this_cpu(), &p, row, tiles + row / CL_TILE_ROWS * one, report, err);
    if (rc == CL_NONFINITE) rc = report_nonfinite(&j, report, err);
    cl_fpmode_leave(mode);
    return rc == CL_OK ? cl_ok(err) : rc;
}

/* Codes, scales and minima of one group of `count` rows to their rows. */
static void write_rows(const job *j, const panel *p, uint64_t row, uint64_t count, uint64_t group, uint8_t *codes,
                       uint8_t *scales, uint8_t *mins) {
    const cl_format *f = &j->format;
    uint64_t n = cl_group_columns(f, j->cols, group), first = group * f->group_size;
    for (uint64_t lane = 0; lane < count; lane++) {
        uint64_t at = 2 * ((row + lane) * cl_groups(f, j->cols) + group);
        memcpy(scales + at, &p->scales[lane], 2);
        if (f->asymmetric) memcpy(mins + at, &p->mins[lane], 2);
        if (f->codes == CL_CODES_INT8) {
            uint8_t *out = codes + (row + lane) * j->cols + first;
            for (uint64_t k = 0; k < n; k++) out[k] = (uint8_t)p->codes[k * 8 + lane];
        } else {
            uint8_t *out = codes + (row + lane) * cl_div_up(j->cols, 2) + first / 2;
            for (uint64_t k = 0; k < n; k += 2) {
                uint8_t high = k + 1 < n ? (uint8_t)p->codes[(k + 1) * 8 + lane] : 0;
                out[k / 2] = (uint8_t)((uint8_t)p->codes[k * 8 + lane] | high << 4);
            }
        }
    }
}

int cl_quantize_rows(const cl_format *format, const void *source, int32_t source_type, uint64_t rows, uint64_t cols,
                     uint64_t row_stride, uint8_t *codes, uint8_t *scales, uint8_t *mins, cl_quant_report *report,
                     cl_error *err) {
    job j;
    panel p;
    uint64_t code_bytes, scale_bytes, min_bytes;
    int rc = start(&j, format, source, source_type, rows, cols, row_stride, report, err);
    if (rc == CL_OK) rc = cl_rows_bytes(format, rows, cols, &code_bytes, &scale_bytes, &min_bytes, err);
    if (rc != CL_OK) return rc;
    uint32_t mode = cl_fpmode_enter();
    for (uint64_t row = 0; row < rows && rc == CL_OK; row += CL_TILE_ROWS) {
        uint64_t count = cl_min_u64(CL_TILE_ROWS, rows - row), size = format->codes == CL_CODES_F32 ? 4 : 2;
        if (!cl_is_grouped(format)) {
            for (uint64_t r = row; r < row + count && rc == CL_OK; r++)
                rc = plain_row(&j, r, codes + r * cols * size, size, report, err);
            continue;
        }
        for (uint64_t g = 0; g < cl_groups(format, cols) && rc == CL_OK; g++) {
            rc = quantize_panel(&j, functions_for_this_cpu(), &p, row, count, g, report, err);
            if (rc == CL_OK) write_rows(&j, &p, row, count, g, codes, scales, mins);
        }
    }
    if (rc == CL_NONFINITE) rc = report_nonfinite(&j, report, err);
    cl_fpmode_leave(mode);
    return rc == CL_OK ? cl_ok(err) : rc;
}
