/* tiles.c - the two forms of a matrix, R8 tiles and rows, and the ways between them and back to f32.
 *
 * Owns sizes, offsets and the order of bytes (format.h); refuses formats that no kernel computes with. Rounds nothing
 * but the one sum scale * code + min. Sits below quantize.c, which makes the numbers, and the kernels, which use them.
 */
#include "tiles.h"

#include "error.h"
#include "kernels.h"
#include "numbers.h"

int cl_format_check(const cl_format *f, cl_error *err) {
    if (f == NULL) return cl_fail(err, CL_INVALID, "format is NULL");
    if (f->codes == CL_CODES_F32 || f->codes == CL_CODES_BF16) {
        if (f->scale_format != CL_SCALE_NONE || f->codebook != CL_CODEBOOK_NONE || f->asymmetric || f->group_size)
            return cl_fail(err, CL_INVALID, "format: f32 and bf16 have no scale format, codebook, minimum, group_size");
        return CL_OK;
    }
    if (f->codes != CL_CODES_INT8 && f->codes != CL_CODES_INT4)
        return cl_fail(err, CL_UNSUPPORTED, "format.codes %u is not supported", f->codes);
    if (f->scale_format != CL_SCALE_F16)
        return cl_fail(err, CL_UNSUPPORTED, "format.scale_format %u is not supported for integers", f->scale_format);
    if (f->codebook != CL_CODEBOOK_UNIFORM)
        return cl_fail(err, CL_UNSUPPORTED, "format.codebook %u is not supported for integer codes", f->codebook);
    if (f->asymmetric > (f->codes == CL_CODES_INT4))
        return cl_fail(err, CL_UNSUPPORTED, "format.asymmetric %u is not supported for int%d", f->asymmetric,
                       f->codes == CL_CODES_INT4 ? 4 : 8);
    if (f->group_size == 0 || f->group_size % 8 != 0 || f->group_size > CL_GROUP_MAX)
        return cl_fail(err, CL_UNSUPPORTED, "format.group_size %u is not a multiple of 8 in 8..%d", f->group_size,
                       CL_GROUP_MAX);
    return CL_OK;
}

uint64_t cl_tile_group_offset(const cl_format *f, uint64_t group) { return group * cl_group_stride(f); }

/* Bytes of one tile; CL_INVALID where they exceed 2^63. */
static int tile_bytes(const cl_format *f, uint64_t rows, uint64_t cols, uint64_t *bytes, cl_error *err) {
    int rc = cl_format_check(f, err);
    if (rc != CL_OK) return rc;
    if (rows == 0 || cols == 0)
        return cl_fail(err, CL_INVALID, "matrix has rows %llu, cols %llu; both must be positive",
                       (unsigned long long)rows, (unsigned long long)cols);
    /* No format takes more than 32 bytes and no group header more than 32 per column of a tile. */
    if (cols > INT64_MAX / 64 || cl_div_up(rows, CL_TILE_ROWS) > (uint64_t)INT64_MAX / (64 * cols))
        return cl_fail(err, CL_INVALID, "matrix of rows %llu, cols %llu is too large", (unsigned long long)rows,
                       (unsigned long long)cols);
    if (!cl_is_grouped(f)) {
        *bytes = cols * (f->codes == CL_CODES_F32 ? 32 : 16);
    } else {
        uint64_t last = cl_groups(f, cols) - 1, columns = cl_group_columns(f, cols, last);
        *bytes = cl_tile_group_offset(f, last) + cl_group_header(f) + cl_group_codes(f, columns);
    }
    return CL_OK;
}

int cl_tiles_bytes(const cl_format *format, uint64_t rows, uint64_t cols, uint64_t *bytes, cl_error *err) {
    uint64_t one = 0;
    *bytes = 0;
    int rc = tile_bytes(format, rows, cols, &one, err);
    if (rc != CL_OK) return rc;
    *bytes = one * cl_div_up(rows, CL_TILE_ROWS);
    return cl_ok(err);
}

/* Bytes of one row of codes in the row-major form. */
static uint64_t row_code_bytes(const cl_format *f, uint64_t cols) {
    switch (f->codes) {
    case CL_CODES_F32: return 4 * cols;
    case CL_CODES_BF16: return 2 * cols;
    case CL_CODES_INT8: return cols;
    default: return cl_div_up(cols, 2);
    }
}

int cl_rows_bytes(const cl_format *format, uint64_t rows, uint64_t cols, uint64_t *codes, uint64_t *scales,
                  uint64_t *mins, cl_error *err) {
    uint64_t one = 0;
    *codes = *scales = *mins = 0;
    int rc = tile_bytes(format, rows, cols, &one, err);
    if (rc != CL_OK) return rc;
    *codes = rows * row_code_bytes(format, cols);
    if (cl_is_grouped(format)) {
        *scales = rows * cl_groups(format, cols) * 2;
        *mins = format->asymmetric ? *scales : 0;
    }
    return cl_ok(err);
}

int cl_matrix_init(cl_matrix *m, const cl_format *format, uint64_t rows, uint64_t cols, const uint8_t *tiles,
                   cl_error *err) {
    memset(m, 0, sizeof *m);
    uint64_t one = 0;
    int rc = tile_bytes(format, rows, cols, &one, err);
    if (rc != CL_OK) return rc;
    m->format = *format;
    m->rows = rows;
    m->cols = cols;
    m->tile_bytes = one;
    m->n_tiles = cl_div_up(rows, CL_TILE_ROWS);
    m->tiles = tiles;
    return cl_ok(err);
}

/* ---- one group of one tile --------------------------------------------------------------------------------------- */

void cl_tile_group_write(const cl_format *f, uint64_t columns, const int8_t *codes, const uint16_t *scales,
                         const uint16_t *mins, uint8_t *out) {
    memcpy(out, scales, 16);
    if (f->asymmetric) memcpy(out + 16, mins, 16);
    uint8_t *at = out + cl_group_header(f);
    if (f->codes == CL_CODES_INT8) {
        for (uint64_t k = 0; k < columns; k += 4)
            for (unsigned lane = 0; lane < 8; lane++)
                for (unsigned i = 0; i < 4; i++) *at++ = k + i < columns ? (uint8_t)codes[(k + i) * 8 + lane] : 0;
        return;
    }
    int8_t nothing = f->asymmetric ? 0 : 8;
    for (uint64_t k = 0; k < columns; k += 8)
        for (unsigned lane = 0; lane < 8; lane++)
            for (unsigned i = 0; i < 4; i++) {
                int8_t low = k + i < columns ? codes[(k + i) * 8 + lane] : nothing;
                int8_t high = k + 4 + i < columns ? codes[(k + 4 + i) * 8 + lane] : nothing;
                *at++ = (uint8_t)(low | high << 4);
            }
}

static uint16_t read_u16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

/* The stored code of column k (inside its group) and lane. */
static int tile_code(const cl_format *f, const uint8_t *group_codes, uint64_t k, unsigned lane) {
    if (f->codes == CL_CODES_INT8) return (int8_t)group_codes[k / 4 * 32 + lane * 4 + k % 4];
    uint8_t byte = group_codes[k / 8 * 32 + lane * 4 + k % 4];
    return k % 8 < 4 ? byte & 15 : byte >> 4;
}

static float value_of(const cl_format *f, int code, float scale, float min) {
    if (f->codes == CL_CODES_INT8) return scale * (float)code;
    if (!f->asymmetric) return scale * (float)(code - 8);
    return scale * (float)code + min; /* the product is exact, so fusing it would change nothing */
}

/* ---- whole matrices ---------------------------------------------------------------------------------------------- */

static void plain_row(const cl_matrix *m, const uint8_t *tile, unsigned lane, float *out) {
    for (uint64_t k = 0; k < m->cols; k++) {
        if (m->format.codes == CL_CODES_F32)
            memcpy(&out[k], tile + k * 32 + lane * 4, 4);
        else
            out[k] = cl_bf16_to_f32(read_u16(tile + k * 16 + lane * 2));
    }
}

void cl_matrix_row(const cl_matrix *m, uint64_t row, float *out) {
    const cl_format *f = &m->format;
    const uint8_t *tile = m->tiles + row / CL_TILE_ROWS * m->tile_bytes;
    unsigned lane = row % CL_TILE_ROWS;
    if (!cl_is_grouped(f)) {
        plain_row(m, tile, lane, out);
        return;
    }
    for (uint64_t g = 0; g < cl_groups(f, m->cols); g++) {
        const uint8_t *group = tile + cl_tile_group_offset(f, g);
        float scale = cl_f16_to_f32(read_u16(group + lane * 2));
        float min = f->asymmetric ? cl_f16_to_f32(read_u16(group + 16 + lane * 2)) : 0.0f;
        for (uint64_t k = 0; k < cl_group_columns(f, m->cols, g); k++)
            *out++ = value_of(f, tile_code(f, group + cl_group_header(f), k, lane), scale, min);
    }
}

int cl_dequantize_tiles(const cl_format *format, const uint8_t *tiles, uint64_t bytes, uint64_t rows, uint64_t cols,
                        float *out, cl_error *err) {
    cl_matrix m;
    int rc = cl_matrix_init(&m, format, rows, cols, tiles, err);
    if (rc != CL_OK) return rc;
    if (bytes != m.tile_bytes * m.n_tiles)
        return cl_fail(err, CL_INVALID, "tiles_bytes %llu where rows %llu, cols %llu need %llu",
                       (unsigned long long)bytes, (unsigned long long)rows, (unsigned long long)cols,
                       (unsigned long long)(m.tile_bytes * m.n_tiles));
    for (uint64_t row = 0; row < rows; row++) cl_matrix_row(&m, row, out + row * cols);
    return cl_ok(err);
}

/* The stored code of column k of a row in the row-major form. */
static int row_code(const cl_format *f, const uint8_t *codes, uint64_t k) {
    if (f->codes == CL_CODES_INT8) return (int8_t)codes[k];
    return k % 2 == 0 ? codes[k / 2] & 15 : codes[k / 2] >> 4;
}

int cl_dequantize_rows(const cl_format *f, const uint8_t *codes, const uint8_t *scales, const uint8_t *mins,
                       uint64_t rows, uint64_t cols, float *out, cl_error *err) {
    uint64_t one;
    int rc = tile_bytes(f, rows, cols, &one, err);
    if (rc != CL_OK) return rc;
    for (uint64_t row = 0; row < rows; row++, codes += row_code_bytes(f, cols)) {
        for (uint64_t k = 0; k < cols; k++) {
            if (f->codes == CL_CODES_F32) {
                memcpy(out++, codes + 4 * k, 4);
            } else if (f->codes == CL_CODES_BF16) {
                *out++ = cl_bf16_to_f32(read_u16(codes + 2 * k));
            } else {
                uint64_t at = 2 * (row * cl_groups(f, cols) + k / f->group_size);
                float min = f->asymmetric ? cl_f16_to_f32(read_u16(mins + at)) : 0.0f;
                *out++ = value_of(f, row_code(f, codes, k), cl_f16_to_f32(read_u16(scales + at)), min);
            }
        }
    }
    return cl_ok(err);
}

/* ---- rows to tiles ----------------------------------------------------------------------------------------------- */

/* Interleaves values of `size` bytes; rows beyond `count` are zero. */
static void tile_plain(const uint8_t *rows, uint64_t row_bytes, uint64_t count, uint64_t cols, uint64_t size,
                       uint8_t *tile) {
    for (uint64_t k = 0; k < cols; k++)
        for (uint64_t lane = 0; lane < 8; lane++, tile += size) {
            if (lane < count)
                memcpy(tile, rows + lane * row_bytes + k * size, size);
            else
                memset(tile, 0, size);
        }
}

/* One tile of `count` rows, group by group. Rows that do not exist are all zero: scale, minimum and value. */
static void tile_grouped(const cl_format *f, const uint8_t *codes, const uint8_t *scales, const uint8_t *mins,
                         uint64_t count, uint64_t cols, uint8_t *tile) {
    int8_t panel[CL_GROUP_MAX * 8];
    uint64_t groups = cl_groups(f, cols);
    int8_t zero = f->codes == CL_CODES_INT4 && !f->asymmetric ? 8 : 0;
    for (uint64_t g = 0; g < groups; g++) {
        uint16_t d[8] = {0}, m[8] = {0};
        uint64_t columns = cl_group_columns(f, cols, g);
        for (uint64_t lane = 0; lane < 8; lane++) {
            for (uint64_t k = 0; k < columns; k++)
                panel[k * 8 + lane] =
                    lane < count ? (int8_t)row_code(f, codes + lane * row_code_bytes(f, cols), g * f->group_size + k)
                                 : zero;
            if (lane >= count) continue;
            d[lane] = read_u16(scales + 2 * (lane * groups + g));
            if (f->asymmetric) m[lane] = read_u16(mins + 2 * (lane * groups + g));
        }
        cl_tile_group_write(f, columns, panel, d, m, tile + cl_tile_group_offset(f, g));
    }
}

int cl_tile_rows(const cl_format *f, const uint8_t *codes, const uint8_t *scales, const uint8_t *mins, uint64_t rows,
                 uint64_t cols, uint8_t *tiles, uint64_t tiles_bytes, cl_error *err) {
    uint64_t one;
    int rc = tile_bytes(f, rows, cols, &one, err);
    if (rc != CL_OK) return rc;
    uint64_t n_tiles = cl_div_up(rows, CL_TILE_ROWS), row_bytes = row_code_bytes(f, cols);
    if (tiles_bytes != one * n_tiles)
        return cl_fail(err, CL_INVALID, "tiles_bytes %llu where rows %llu, cols %llu need %llu",
                       (unsigned long long)tiles_bytes, (unsigned long long)rows, (unsigned long long)cols,
                       (unsigned long long)(one * n_tiles));
    for (uint64_t t = 0; t < n_tiles; t++) {
        uint64_t first = t * CL_TILE_ROWS, count = cl_min_u64(CL_TILE_ROWS, rows - first);
        if (!cl_is_grouped(f)) {
            tile_plain(codes + first * row_bytes, row_bytes, count, cols, row_bytes / cols, tiles + t * one);
        } else {
            uint64_t at = 2 * first * cl_groups(f, cols);
            tile_grouped(f, codes + first * row_bytes, scales + at, f->asymmetric ? mins + at : NULL, count, cols,
                         tiles + t * one);
        }
    }
    return cl_ok(err);
}
