/* format.h - every byte that Colibri puts on a drive and computes from. No code.
 *
 * All integers are little-endian. docs/container.md explains the files, docs/numerics.md the numbers.
 *
 * R8 tiles. A matrix [rows, cols] (rows = outputs) is stored as ceil(rows / 8) tiles, one after the other. A tile is 8
 * neighbouring rows interleaved, so that one 32-byte load feeds 8 outputs and no horizontal sum is ever needed.
 * Missing rows of the last tile are zero. Lane r of a tile is row 8 * tile + r.
 *
 *   f32    for k in 0..cols-1:  8 x f32                        (32 bytes per k)
 *   bf16   for k in 0..cols-1:  8 x bf16                       (16 bytes per k)
 *   int8   for each group g:  scales 8 x f16, [mins 8 x f16],
 *            then per 4 columns: 8 lanes x 4 codes i8          (32 bytes per 4 k)
 *   int4   for each group g:  scales 8 x f16, [mins 8 x f16],
 *            then per 8 columns: 8 lanes x 4 bytes; byte i of a lane holds code[k + i] in its low and code[k + 4 + i]
 *            in its high nibble                                (32 bytes per 8 k)
 *
 * Group g covers columns g * group_size .. min(cols, (g + 1) * group_size) - 1; the last group may be short. Inside a
 * group the columns are padded to a multiple of 4 (int8) or 8 (int4) with codes that stand for nothing: int8 0;
 * int4 8 where symmetric, 0 where asymmetric. Their activations are zero.
 *
 * Values: int8 symmetric  scale * code, code in -127..127;  int8 asymmetric is not defined.
 *         int4 symmetric  scale * (code - 8), code in 0..15; int4 asymmetric  scale * code + min.
 *
 * Row-major (dense.safetensors): int8 codes i8 [rows, cols]; int4 codes u8 [rows, ceil(cols / 2)], column 2j in the
 * low, 2j + 1 in the high nibble of byte j (an odd last column leaves the high nibble 0); scales, mins f16
 * [rows, groups]; f32 and bf16 as they are.
 */
#ifndef COLIBRI_FORMAT_H
#define COLIBRI_FORMAT_H
#include <assert.h>
#include <stdint.h>

#define CL_FORMAT_VERSION 1
#define CL_TILE_ROWS 8
#define CL_ALIGN 4096       /* records, extents, and the header of a stripe file */
#define CL_PART_ALIGN 64    /* parts inside a record */

/* The first 4096 bytes of every stripe file ("stripe-NNN.colibri") and of every mirror; the rest of the block is zero.
 * A mirror equals its stripe byte for byte but for `mirror` and the checksum of the header. */
#define CL_STRIPE_MAGIC "COLIBRI\x01"
typedef struct cl_stripe_header {
    uint8_t magic[8];
    uint32_t version; /* CL_FORMAT_VERSION */
    uint32_t stripe;  /* its number */
    uint32_t stripes; /* how many the container has */
    uint32_t mirror;       /* 0: the stripe itself; 1: its second copy, "mirror-NNN.colibri" on another drive */
    uint8_t uuid[16];       /* of the pack: manifest layout.uuid */
    uint8_t content_id[32]; /* what the records belong to */
    uint64_t file_bytes;    /* size of the whole file */
    uint8_t zero[12];
    uint32_t header_crc32c; /* of the 92 bytes before it */
} cl_stripe_header;
static_assert(sizeof(cl_stripe_header) == 96, "stripe header");

/* "extents.crc32c" and "records.sha256": this header, then `count` entries of `entry_bytes` in logical order
 * (layer ascending, expert ascending, extent ascending). */
#define CL_TABLE_MAGIC "COLITBL\x01"
typedef struct cl_table_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t entry_bytes; /* 4 or 32 */
    uint64_t count;
    uint8_t uuid[16];
    uint32_t entries_crc32c;
    uint32_t header_crc32c; /* of the 44 bytes before it */
} cl_table_header;
static_assert(sizeof(cl_table_header) == 48, "table header");

#endif
