/* test_quantize.c - quantisation and tiling over odd sizes with buffers of exactly the announced sizes, so that the
 * sanitizers see a byte too far. The numbers themselves are tested from Python against an emulation. */
#include "check.h"
#include "colibri.h"

static void check_size(const cl_format *f, uint64_t rows, uint64_t cols, uint64_t stride, int32_t source_type) {
    uint64_t bytes, codes, scales, mins, width = source_type == CL_SOURCE_F32 ? 4 : 2;
    cl_error err;
    cl_quant_report report, same;
    CHECK(cl_tiles_bytes(f, rows, cols, &bytes, &err) == CL_OK);
    CHECK(cl_rows_bytes(f, rows, cols, &codes, &scales, &mins, &err) == CL_OK);
    uint64_t elements = (rows - 1) * stride + cols;
    uint8_t *source = malloc(elements * width);
    for (uint64_t i = 0; i < elements; i++) {
        float w = (float)(2.0 * test_uniform() - 1.0);
        uint16_t h = (uint16_t)(0x3000 + test_random() % 0x800);
        if (width == 4)
            memcpy(source + 4 * i, &w, 4);
        else
            memcpy(source + 2 * i, &h, 2);
    }
    uint8_t *tiles = malloc(bytes), *again = malloc(bytes);
    uint8_t *c = malloc(codes), *s = malloc(scales), *m = malloc(mins);
    float *a = malloc(rows * cols * 4), *b = malloc(rows * cols * 4);
    CHECK(cl_quantize_tiles(f, source, source_type, rows, cols, stride, tiles, bytes, &report, &err) == CL_OK);
    CHECK(cl_quantize_rows(f, source, source_type, rows, cols, stride, c, s, m, &same, &err) == CL_OK);
    CHECK(memcmp(&report, &same, sizeof report) == 0);
    CHECK(cl_tile_rows(f, c, s, m, rows, cols, again, bytes, &err) == CL_OK);
    CHECK(memcmp(tiles, again, bytes) == 0);
    CHECK(cl_dequantize_tiles(f, tiles, bytes, rows, cols, a, &err) == CL_OK);
    CHECK(cl_dequantize_rows(f, c, s, m, rows, cols, b, &err) == CL_OK);
    CHECK(memcmp(a, b, rows * cols * 4) == 0);
    CHECK(cl_quantize_tiles(f, source, source_type, rows, cols, stride, tiles, bytes - 1, &report, &err) == CL_INVALID);
    CHECK(cl_dequantize_tiles(f, tiles, bytes + 1, rows, cols, a, NULL) == CL_INVALID);
    free(source), free(tiles), free(again), free(c), free(s), free(m), free(a), free(b);
}

int main(void) {
    static const cl_format formats[] = {{1, 0, 0, 0, 0},  {2, 0, 0, 0, 0}, {3, 1, 1, 0, 64}, {4, 1, 1, 0, 64},
                                        {4, 1, 1, 1, 64}, {3, 1, 1, 0, 8}, {4, 1, 1, 1, 24}, {4, 1, 1, 1, 512}};
    static const uint64_t sizes[][2] = {{1, 1}, {7, 3}, {8, 64}, {9, 65}, {17, 130}, {3, 513}, {16, 7}};
    for (uint64_t f = 0; f < sizeof formats / sizeof *formats; f++)
        for (uint64_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int32_t type = CL_SOURCE_F32; type <= CL_SOURCE_F16; type++)
                check_size(&formats[f], sizes[i][0], sizes[i][1], sizes[i][1] + i % 3, type);
    return test_result();
}
