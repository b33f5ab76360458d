/* CRC-32C (Castagnoli), by the CPU's instruction where there is one, and the keyed hash of
 * directory names. */
#ifndef PMS_BASE_CHECKSUM_H
#define PMS_BASE_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

/* Continues crc (0 to start) over n bytes. crc(a then b) = pms_crc32c(pms_crc32c(0, a), b). No
 * alignment asked. */
uint32_t pms_crc32c(uint32_t crc, const void *data, size_t n);

/* The CRC-32C of two messages, one after the other: of the first one's, and the second one's of n
 * bytes. */
uint32_t pms_crc32c_join(uint32_t first, uint32_t second, uint64_t n);

/* The table-driven one, for tests and CPUs without the instruction. */
uint32_t pms_crc32c_portable(uint32_t crc, const void *data, size_t n);

/* 64-bit hash of n bytes keyed by seed; never 0. Not cryptographic. */
uint64_t pms_hash(uint64_t seed, const void *data, size_t n);

/* 16 check bits of a word of at most 48 bits; salt makes a word valid in one place only. */
uint16_t pms_check16(uint64_t salt, uint64_t word);

#endif
