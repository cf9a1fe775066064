/* grouping.h - from "token wants experts" to "expert is wanted by tokens". See grouping.c. */
#ifndef COLIBRI_GROUPING_H
#define COLIBRI_GROUPING_H
#include <stdint.h>

/* ids [n, top_k] of tokens 0..n-1; tokens with skip[i] != 0 want nothing. first [experts + 1]: the pairs of expert e
 * are order[first[e]] .. order[first[e + 1] - 1], each i * top_k + j, ascending. Returns how many pairs there are. */
uint64_t cl_group_by_expert(const uint32_t *ids, uint64_t n, uint32_t top_k, uint32_t experts, const uint8_t *skip,
                            uint32_t *first, uint32_t *order);

#endif
