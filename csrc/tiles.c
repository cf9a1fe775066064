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

/* Interleaves rows of 4-byte or 2-byte values; rows beyond `count` are zero. */
static void tile_f32(const uint8_t *rows, uint64_t count, uint64_t cols, uint8_t *tile) {
    memset(tile, 0, cols * 32);
    for (uint64_t lane = 0; lane < count; lane++, rows += 4 * cols)
        for (uint64_t k = 0; k < cols; k++) memcpy(tile + k * 32 + lane * 4, rows + k * 4, 4);
}

static void tile_bf16(const uint8_t *rows, uint64_t count, uint64_t cols, uint8_t *tile) {
    memset(tile, 0, cols * 16);
    for (uint64_t lane = 0; lane < count; lane++, rows += 2 * cols)
        for (uint64_t k = 0; k < cols; k++) memcpy(tile + k * 16 + lane * 2, rows + k * 2, 2);
}

/* The 4 bytes of a lane for columns k.. of a row, of which `left` remain in the group (a run is 4 or 8 columns). */
static uint32_t lane_word(const cl_format *f, const uint8_t *row, uint64_t k, uint64_t left) {
    uint32_t word = 0;
    if (f->codes == CL_CODES_INT8) {
        if (left >= 4)
            memcpy(&word, row + k, 4);
        else
            memcpy(&word, row + k, left);
        return word;
    }
    if (left >= 8) { /* nibbles 0 1 2 3 4 5 6 7 become 0 4 1 5 2 6 3 7 */
        memcpy(&word, row + k / 2, 4);
        uint32_t low = word & 0xffffu, high = word >> 16;
        low = (low & 0xffu) | (low & 0xff00u) << 8;
        high = (high & 0xffu) | (high & 0xff00u) << 8;
        low = (low & 0x000f000fu) | (low & 0x00f000f0u) << 4;
        high = (high & 0x000f000fu) | (high & 0x00f000f0u) << 4;
        return low | high << 4;
    }
    uint32_t nothing = f->asymmetric ? 0 : 8;
    for (uint64_t i = 0; i < 8; i++)
        word |= (i < left ? (uint32_t)row_code(f, row, k + i) : nothing) << (i % 4 * 8 + i / 4 * 4);
    return word;
}

/* One group of one tile: scales and minima [rows, groups] at the group's first row. */
static void tile_group(const cl_format *f, const uint8_t *codes, const uint8_t *scales, const uint8_t *mins,
                       uint64_t count, uint64_t cols, uint64_t g, uint8_t *group) {
    uint64_t first = g * f->group_size, columns = cl_group_columns(f, cols, g);
    uint64_t run = f->codes == CL_CODES_INT8 ? 4 : 8, bytes = cl_group_header(f);
    uint32_t zero = f->codes == CL_CODES_INT4 && !f->asymmetric ? 0x88888888u : 0; /* rows that do not exist */
    memset(group, 0, bytes);
    for (uint64_t lane = 0; lane < CL_TILE_ROWS; lane++) {
        uint8_t *out = group + bytes + lane * 4;
        if (lane >= count) {
            for (uint64_t k = 0; k < columns; k += run, out += 32) memcpy(out, &zero, 4);
            continue;
        }
        const uint8_t *row = codes + lane * row_code_bytes(f, cols);
        memcpy(group + lane * 2, scales + 2 * (lane * cl_groups(f, cols) + g), 2);
        if (f->asymmetric) memcpy(group + 16 + lane * 2, mins + 2 * (lane * cl_groups(f, cols) + g), 2);
        for (uint64_t k = 0; k < columns; k += run, out += 32) {
            uint32_t word = lane_word(f, row, first + k, columns - k);
            memcpy(out, &word, 4);
        }
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
        const uint8_t *source = codes + first * row_bytes;
        if (f->codes == CL_CODES_F32) tile_f32(source, count, cols, tiles + t * one);
        if (f->codes == CL_CODES_BF16) tile_bf16(source, count, cols, tiles + t * one);
        if (!cl_is_grouped(f)) continue;
        uint64_t groups = cl_groups(f, cols), at = 2 * first * groups;
        for (uint64_t g = 0; g < groups; g++)
            tile_group(f, source, scales + at, f->asymmetric ? mins + at : NULL, count, cols, g,
                       tiles + t * one + cl_tile_group_offset(f, g));
    }
    return cl_ok(err);
}
