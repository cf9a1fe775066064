/* test_crc32c.c - CRC-32C against a bit-by-bit division, for lengths around every block size and all alignments; the
 * table implementation, which CPUs without SSE4.2 use, gives the same. */
#include "check.h"
#include "crc32c.h"

static uint32_t slow(const uint8_t *data, uint64_t n) {
    uint32_t crc = ~0u;
    for (uint64_t i = 0; i < n; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static void check_length(uint64_t n, uint64_t offset) {
    uint8_t *block = malloc(n + offset), *data = block + offset;
    for (uint64_t i = 0; i < n; i++) data[i] = (uint8_t)test_random();
    uint32_t want = slow(data, n);
    uint64_t cut = n ? test_random() % n : 0;
    CHECK(cl_crc32c(0, data, n) == want);
    CHECK(cl_crc32c_tables(0, data, n) == want);
    CHECK(cl_crc32c(cl_crc32c(0, data, cut), data + cut, n - cut) == want);
    CHECK(cl_crc32c_tables(cl_crc32c_tables(0, data, cut), data + cut, n - cut) == want);
    free(block);
}

int main(void) {
    CHECK(cl_crc32c(0, "123456789", 9) == 0xe3069283u);
    CHECK(cl_crc32c_tables(0, "123456789", 9) == 0xe3069283u);
    for (uint64_t n = 0; n < 200; n++)
        for (uint64_t offset = 0; offset < 8; offset++) check_length(n, offset);
    for (uint64_t blocks = 1; blocks <= 7; blocks++)
        for (uint64_t extra = 0; extra < 18; extra++) check_length(blocks * 4096 + extra - 9, extra % 8);
    return test_result();
}
