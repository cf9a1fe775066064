/* arena.c - one block of zeroed, huge-page backed memory, mapped and touched when a model is opened.
 *
 * Owns the mapping: dense weights, expert slots, read ring, KV pages, prefill workspaces and step buffers are carved
 * from it. Refuses to grow: what was planned is all there is. Huge pages are asked for because O_DIRECT reads into
 * 4 KiB pages are split into many segments and become slow and unsteady.
 */
#include "arena.h"
#include "error.h"
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define TOUCH_PIECE (32u << 20)

void *cl_carve_take(cl_carve *carve, uint64_t count, uint64_t size, uint64_t align) {
    uint64_t bytes, start, end;
    if (__builtin_mul_overflow(count, size, &bytes) || __builtin_add_overflow(carve->used, align - 1, &start) ||
        __builtin_add_overflow(start & ~(align - 1), bytes, &end)) {
        carve->overflow = 1;
        return NULL;
    }
    start &= ~(align - 1);
    carve->used = end;
    return carve->base ? carve->base + start : NULL;
}

int cl_arena_map(cl_arena *arena, uint64_t bytes, cl_error *err) {
    memset(arena, 0, sizeof *arena);
    uint64_t rounded;
    if (__builtin_add_overflow(bytes, 2 * (uint64_t)CL_HUGE_PAGE, &rounded) || rounded > INT64_MAX)
        return cl_fail(err, CL_NOMEM, "%llu bytes of memory cannot be mapped", (unsigned long long)bytes);
    rounded &= ~(uint64_t)(CL_HUGE_PAGE - 1);
    void *p = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return cl_fail(err, CL_NOMEM, "mapping %llu bytes of memory failed: %s", (unsigned long long)rounded,
                       strerror(errno));
    arena->mapping = p;
    arena->mapping_bytes = rounded;
    arena->base = (uint8_t *)(((uintptr_t)p + CL_HUGE_PAGE - 1) & ~(uintptr_t)(CL_HUGE_PAGE - 1));
    arena->bytes = bytes;
    /* Where huge pages are switched off the call fails and everything still works, only slower. */
    madvise(arena->base, bytes, MADV_HUGEPAGE);
    /* A child that runs another program must not share these pages: copy-on-write under a running O_DIRECT read loses
     * what the drive delivers. */
    madvise(arena->base, bytes, MADV_DONTFORK);
    return CL_OK;
}

static void touch(void *context, uint64_t begin, uint64_t end, uint32_t thread) {
    (void)thread;
    const cl_arena *arena = context;
    for (uint64_t piece = begin; piece < end; piece++) {
        uint64_t stop = (piece + 1) * TOUCH_PIECE;
        if (stop > arena->bytes) stop = arena->bytes;
        for (uint64_t at = piece * TOUCH_PIECE; at < stop; at += 4096) *(volatile uint8_t *)(arena->base + at) = 0;
    }
}

void cl_arena_touch(cl_arena *arena, cl_pool *pool) {
    cl_pool_run(pool, (arena->bytes + TOUCH_PIECE - 1) / TOUCH_PIECE, 1, touch, arena);
}

void cl_arena_unmap(cl_arena *arena) {
    if (arena->mapping) munmap(arena->mapping, arena->mapping_bytes);
    memset(arena, 0, sizeof *arena);
}
