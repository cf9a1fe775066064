/* cache_fit.h - what the past uses of an expert say about the next. See cache_fit.c. */
#ifndef COLIBRI_CACHE_FIT_H
#define COLIBRI_CACHE_FIT_H
#include "store.h"

void cl_fit_init(cl_cache *cache, uint64_t records);
/* One turn of a layer: the heats before it, and who was wanted in it. Before the heats take the turn in. */
void cl_fit_learn(cl_cache *cache, const cl_store_layer *layer);
/* New weights from what was learned; older turns begin to count less. Once per step. */
void cl_fit_solve(cl_cache *cache);

#endif
