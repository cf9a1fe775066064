/* crc32c.h - the two implementations of CRC-32C by name; everyone but the test that compares them uses cl_crc32c. */
#ifndef COLIBRI_CRC32C_H
#define COLIBRI_CRC32C_H
#include "colibri.h"

uint32_t cl_crc32c_tables(uint32_t crc, const void *data, uint64_t bytes);

#endif
