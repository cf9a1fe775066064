/* pool.h - the compute threads. See pool.c. */
#ifndef COLIBRI_POOL_H
#define COLIBRI_POOL_H
#include "colibri.h"

typedef struct cl_pool cl_pool;

/* Does pieces begin..end-1 of a job; `thread` is 0 (the caller of cl_pool_run) .. cl_pool_threads - 1. */
typedef void (*cl_pool_work)(void *context, uint64_t begin, uint64_t end, uint32_t thread);

/* How many threads an option of 0 means: the cores in this process's affinity mask. */
uint32_t cl_pool_default_threads(void);

/* `threads` counts the caller of cl_pool_run, which takes part; at least 1. */
int cl_pool_create(cl_pool **out, uint32_t threads, cl_error *err);
void cl_pool_free(cl_pool *pool); /* NULL is fine */
uint32_t cl_pool_threads(const cl_pool *pool);

/* Calls work on 0..n-1 in runs of `piece`, returns when all is done. One caller at a time. */
void cl_pool_run(cl_pool *pool, uint64_t n, uint64_t piece, cl_pool_work work, void *context);

/* The caller is about to wait for a drive: workers stop spinning until the next run. */
void cl_pool_rest(cl_pool *pool);

#endif
