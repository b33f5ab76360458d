/* A hash of whole pages, by which a process knows again what it has seen before. Two different
 * contents of one size have the same one with a chance of at most 2^-126, whoever made them up,
 * if the key was drawn at random and whoever made them up does not know it. So neither keys nor
 * fingerprints leave the process. */
#ifndef PMS_BASE_FINGERPRINT_H
#define PMS_BASE_FINGERPRINT_H

#include <stdint.h>

#define PMS_FINGERPRINT_WORDS 4u  /* of a fingerprint */
#define PMS_FINGERPRINT_KEY 2056u /* words of a key */
#define PMS_FINGERPRINT_MOST (1ull << 30)

/* REQUIRES: whole pages, one at least, PMS_FINGERPRINT_MOST bytes at most. */
void pms_fingerprint(const uint64_t *key, const void *data, uint64_t bytes, uint64_t *out);

#endif
