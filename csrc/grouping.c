/* grouping.c - turns the router's choice around: for every expert, the (token, choice) pairs that want it.
 *
 * A counting sort, so tokens stay ascending within an expert. Owns nothing.
 */
#include "grouping.h"
#include <string.h>

uint64_t cl_group_by_expert(const uint32_t *ids, uint64_t n, uint32_t top_k, uint32_t experts, const uint8_t *skip,
                            uint32_t *first, uint32_t *order) {
    memset(first, 0, ((uint64_t)experts + 1) * sizeof *first);
    for (uint64_t pair = 0; pair < n * top_k; pair++)
        if (!skip[pair / top_k]) first[ids[pair]]++;
    uint32_t total = 0;
    for (uint32_t e = 0; e <= experts; e++) {
        uint32_t wanted = first[e];
        first[e] = total;
        total += wanted;
    }
    for (uint64_t pair = 0; pair < n * top_k; pair++)
        if (!skip[pair / top_k]) order[first[ids[pair]]++] = (uint32_t)pair;
    /* Every first[e] now stands where e's pairs end, which is where those of e + 1 begin. */
    memmove(first + 1, first, (uint64_t)experts * sizeof *first);
    first[0] = 0;
    return total;
}
