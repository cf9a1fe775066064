/* arena.h - the one block of memory that everything big lies in. See arena.c. */
#ifndef COLIBRI_ARENA_H
#define COLIBRI_ARENA_H
#include "colibri.h"
#include "pool.h"

#define CL_HUGE_PAGE (2u << 20)

typedef struct cl_arena {
    uint8_t *base; /* aligned to CL_HUGE_PAGE */
    uint64_t bytes;
    void *mapping;
    uint64_t mapping_bytes;
} cl_arena;

/* Cuts a block into pieces. With base NULL it only counts: the plan and the allocation are the same code. Overflow of
 * 64 bits sets `overflow`, and `used` then means nothing. */
typedef struct cl_carve {
    uint8_t *base;
    uint64_t used;
    uint32_t overflow;
} cl_carve;

/* count * size bytes at a multiple of `align` (a power of two); NULL while counting. */
void *cl_carve_take(cl_carve *carve, uint64_t count, uint64_t size, uint64_t align);

int cl_arena_map(cl_arena *arena, uint64_t bytes, cl_error *err);
/* First touch of every page, on all threads, so that no page fault falls into a step. */
void cl_arena_touch(cl_arena *arena, cl_pool *pool);
void cl_arena_unmap(cl_arena *arena);

#endif
