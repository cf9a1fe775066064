/* crc32c.h - beside cl_crc32c of colibri.h: the same value from tables only, and checksums put together. */
#ifndef COLIBRI_CRC32C_H
#define COLIBRI_CRC32C_H
#include "colibri.h"

uint32_t cl_crc32c_tables(uint32_t crc, const void *data, uint64_t bytes);

/* What the checksum of `head` is worth in the checksum of a message that goes on for `tail_bytes` more bytes: the
 * checksum of the whole is the xor of this and the checksum of the tail, started at 0. So pieces may be checked in any
 * order. */
uint32_t cl_crc32c_shift(uint32_t head, uint64_t tail_bytes);

#endif
