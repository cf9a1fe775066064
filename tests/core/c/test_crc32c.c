/* test_crc32c.c - CRC-32C against a bit-by-bit division, for lengths around every block size and all alignments; the
 * table implementation, which CPUs without SSE4.2 use, gives the same; pieces in any order add up to the whole. */
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
    uint32_t tail = cl_crc32c(0, data + cut, n - cut);
    CHECK((cl_crc32c_shift(cl_crc32c(0, data, cut), n - cut) ^ tail) == want);
    free(block);
}

/* The checksum of zeros that no memory holds: moving by a + b is moving by a, then by b. */
static void check_shift(uint64_t a, uint64_t b) {
    uint32_t head = (uint32_t)test_random();
    CHECK(cl_crc32c_shift(cl_crc32c_shift(head, a), b) == cl_crc32c_shift(head, a + b));
}

int main(void) {
    CHECK(cl_crc32c(0, "123456789", 9) == 0xe3069283u);
    CHECK(cl_crc32c_tables(0, "123456789", 9) == 0xe3069283u);
    for (uint64_t n = 0; n < 200; n++)
        for (uint64_t offset = 0; offset < 8; offset++) check_length(n, offset);
    for (uint64_t blocks = 1; blocks <= 7; blocks++)
        for (uint64_t extra = 0; extra < 18; extra++) check_length(blocks * 4096 + extra - 9, extra % 8);
    for (uint64_t extra = 0; extra < 3; extra++) {
        check_length(3 * 8192 + extra * 1021, extra);
        check_length(3 * 65536 + 3 * 8192 + extra * 3067, extra);
        check_length(2 * 3 * 65536 + extra, 7 - extra);
    }
    for (uint64_t i = 0; i < 64; i++) check_shift(test_random() >> (8 + i % 48), test_random() >> (8 + i % 31));
    return test_result();
}
