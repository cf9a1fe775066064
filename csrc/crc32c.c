/* crc32c.c - CRC-32C (Castagnoli, reflected polynomial 0x82f63b78), the checksum of every blob and extent.
 *
 * Owns one function with two implementations of the same value: tables, and the SSE4.2 instruction on three interleaved
 * streams (its latency is three times its throughput). Tables are filled when the library is loaded, so no call races.
 */
#include "crc32c.h"

#include <string.h>

#define POLYNOMIAL 0x82f63b78u

static uint32_t table[8][256]; /* table[i][b]: byte b followed by i zero bytes */

/* Appending BLOCK zero bytes to a message maps its CRC linearly; one table per byte of the CRC. */
#define BLOCK 4096
static uint32_t shift_block[4][256];

static uint32_t append_zeros(uint32_t crc, uint64_t bytes) {
    for (uint64_t i = 0; i < bytes; i++) crc = table[0][crc & 255] ^ crc >> 8;
    return crc;
}

__attribute__((constructor)) static void fill_tables(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        table[0][b] = crc;
    }
    for (int i = 1; i < 8; i++)
        for (uint32_t b = 0; b < 256; b++) table[i][b] = append_zeros(table[i - 1][b], 1);
    uint32_t image[32]; /* of each single bit */
    for (int bit = 0; bit < 32; bit++) image[bit] = append_zeros(1u << bit, BLOCK);
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t b = 0; b < 256; b++) {
            uint32_t crc = 0;
            for (int bit = 0; bit < 8; bit++)
                if (b >> bit & 1) crc ^= image[8 * byte + bit];
            shift_block[byte][b] = crc;
        }
}

static uint32_t crc_tables(uint32_t crc, const uint8_t *at, uint64_t bytes) {
    for (; bytes >= 8; bytes -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++) crc ^= table[7 - i][word >> 8 * i & 255];
    }
    for (; bytes > 0; bytes--) crc = table[0][(crc ^ *at++) & 255] ^ crc >> 8;
    return crc;
}

#if defined(__x86_64__)
static uint32_t shifted(uint32_t crc) {
    return shift_block[0][crc & 255] ^ shift_block[1][crc >> 8 & 255] ^ shift_block[2][crc >> 16 & 255] ^
           shift_block[3][crc >> 24];
}

static inline uint64_t word_at(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

__attribute__((target("sse4.2"))) static uint32_t crc_sse42(uint32_t crc, const uint8_t *at, uint64_t bytes) {
    for (; bytes >= 3 * BLOCK; bytes -= 3 * BLOCK, at += 3 * BLOCK) {
        uint64_t a = crc, b = 0, c = 0;
        for (uint64_t i = 0; i < BLOCK; i += 8) {
            a = __builtin_ia32_crc32di(a, word_at(at + i));
            b = __builtin_ia32_crc32di(b, word_at(at + BLOCK + i));
            c = __builtin_ia32_crc32di(c, word_at(at + 2 * BLOCK + i));
        }
        crc = shifted(shifted((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    uint64_t wide = crc;
    for (; bytes >= 8; bytes -= 8, at += 8) wide = __builtin_ia32_crc32di(wide, word_at(at));
    crc = (uint32_t)wide;
    for (; bytes > 0; bytes--) crc = __builtin_ia32_crc32qi(crc, *at++);
    return crc;
}
#endif

uint32_t cl_crc32c_tables(uint32_t crc, const void *data, uint64_t bytes) { return ~crc_tables(~crc, data, bytes); }

uint32_t cl_crc32c(uint32_t crc, const void *data, uint64_t bytes) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("sse4.2")) return ~crc_sse42(~crc, data, bytes);
#endif
    return cl_crc32c_tables(crc, data, bytes);
}
