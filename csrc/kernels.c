/* kernels.c - chooses the kernels, places activation workspaces, and gives Python its one-call matrix product.
 *
 * Owns what all instruction sets share; refuses an instruction set that this CPU lacks. No arithmetic on weights here.
 */
#include "kernels.h"

#include "error.h"
#include "fpmode.h"
#include "isa.h"
#include "numbers.h"

#include <stdlib.h>

const cl_kernels *cl_kernels_find(const char *isa) {
    const cl_kernels *best = &cl_kernels_generic;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        best = &cl_kernels_avx2;
#endif
    if (isa == NULL) return NULL;
    if (strcmp(isa, "auto") == 0) return best;
    if (strcmp(isa, "generic") == 0) return &cl_kernels_generic;
    return strcmp(isa, best->name) == 0 ? best : NULL;
}

void cl_kernels_thread_init(void) { (void)cl_fpmode_enter(); }

/* ---- activations ------------------------------------------------------------------------------------------------- */

static uint64_t align64(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Codes of one token, padded to whole runs of 8 columns and to a cache line. */
static uint64_t code_stride(int32_t format, uint64_t cols) {
    return align64(cols * (format == CL_ACTIVATION_I16 ? 2 : 1) + 16);
}

uint64_t cl_acts_bytes(int32_t format, uint64_t n, uint64_t cols, uint32_t group) {
    if (format == CL_ACTIVATION_F32) return 0;
    return n * code_stride(format, cols) + 3 * align64(4 * n * cl_div_up(cols, group));
}

void cl_acts_place(cl_acts *acts, void *workspace, int32_t format, uint64_t n, uint64_t cols, uint32_t group) {
    memset(acts, 0, sizeof *acts);
    acts->format = format;
    acts->cols = cols;
    if (format == CL_ACTIVATION_F32) return;
    uint8_t *at = workspace;
    acts->group = group;
    acts->groups = cl_div_up(cols, group);
    acts->code_stride = code_stride(format, cols);
    acts->codes = at;
    at += n * acts->code_stride;
    acts->scale = (float *)(void *)at;
    at += align64(4 * n * acts->groups);
    acts->scale_sum = (float *)(void *)at;
    at += align64(4 * n * acts->groups);
    acts->sum = (int32_t *)(void *)at;
}

/* ---- the exported product ---------------------------------------------------------------------------------------- */

/* Activation format that a weight format is multiplied with, or -1. */
static int32_t activation_for(const cl_format *format, int32_t activation) {
    if (!cl_is_grouped(format)) return CL_ACTIVATION_F32;
    return activation == CL_ACTIVATION_I8 || activation == CL_ACTIVATION_I16 ? activation : -1;
}

int cl_matmul(const char *isa, const cl_format *format, const uint8_t *tiles, uint64_t tiles_bytes, uint64_t rows,
              uint64_t cols, int32_t activation, const float *x, uint64_t n, float *y, cl_error *err) {
    cl_matrix w;
    int rc = cl_matrix_init(&w, format, rows, cols, tiles, err);
    if (rc != CL_OK) return rc;
    const cl_kernels *kernels = cl_kernels_find(isa);
    if (kernels == NULL)
        return cl_fail(err, CL_UNSUPPORTED, "isa \"%s\" is not one that this CPU and build have", isa ? isa : "NULL");
    if (tiles_bytes != w.tile_bytes * w.n_tiles)
        return cl_fail(err, CL_INVALID, "tiles_bytes %llu where rows %llu, cols %llu need %llu",
                       (unsigned long long)tiles_bytes, (unsigned long long)rows, (unsigned long long)cols,
                       (unsigned long long)(w.tile_bytes * w.n_tiles));
    int32_t kind = activation_for(format, activation);
    if (kind < 0) return cl_fail(err, CL_INVALID, "activation %d is not CL_ACTIVATION_I8 or _I16", activation);
    if (n > INT64_MAX / 64 / cols) return cl_fail(err, CL_INVALID, "n %llu is too large", (unsigned long long)n);
    void *workspace = NULL;
    uint64_t bytes = cl_acts_bytes(kind, n, cols, format->group_size);
    if (bytes != 0 && posix_memalign(&workspace, 64, bytes) != 0)
        return cl_fail(err, CL_NOMEM, "no memory for %llu bytes of activations", (unsigned long long)bytes);
    cl_acts acts;
    uint32_t mode = cl_fpmode_enter();
    cl_acts_place(&acts, workspace, kind, n, cols, format->group_size);
    kernels->quantize(&acts, x, cols, 0, n);
    kernels->matmul(&w, 0, w.n_tiles, &acts, NULL, n, y, rows);
    cl_fpmode_leave(mode);
    free(workspace);
    return cl_ok(err);
}
