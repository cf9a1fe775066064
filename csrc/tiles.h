/* tiles.h - what quantisation and the kernels share about checked formats and tiles (tiles.c). */
#ifndef COLIBRI_TILES_H
#define COLIBRI_TILES_H
#include "colibri.h"

#define CL_GROUP_MAX 512 /* an i8 x i16 sum of a group must stay below 2^31 */

/* CL_OK if the format is one that this core computes with. */
int cl_format_check(const cl_format *format, cl_error *err);

/* Writes codes (code values as the format stores them, unsigned for int4) of one group of one tile.
 * codes [columns][8]; scales, mins: f16 [8], mins ignored where symmetric. `group_bytes` points at the header. */
void cl_tile_group_write(const cl_format *format, uint64_t columns, const int8_t *codes, const uint16_t *scales,
                         const uint16_t *mins, uint8_t *group_bytes);

/* Where the group starts inside its tile. */
uint64_t cl_tile_group_offset(const cl_format *format, uint64_t group);

#endif
