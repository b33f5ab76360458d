/* Checksums made right again in the image of a damaged store, as an enemy would. */
#ifndef PMS_TESTS_SEAL_H
#define PMS_TESTS_SEAL_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/checksum.h"
#include "base/layout.h"
#include "heap/super.h"

/* a record with a CRC of everything before it */
static inline void seal_crc(unsigned char *image, uint64_t off, size_t crc_at)
{
    uint32_t crc = pms_crc32c(0, image + off, crc_at);
    memcpy(image + off + crc_at, &crc, sizeof crc);
}

static inline void seal_super(unsigned char *image, uint64_t off)
{
    seal_crc(image, off, offsetof(struct pms_superblock, crc));
}
static inline void seal_session(unsigned char *image, uint64_t off)
{
    seal_crc(image, off, offsetof(struct pms_session, crc));
}
static inline void seal_janchor(unsigned char *image, uint64_t off)
{
    seal_crc(image, off, offsetof(struct pms_janchor, crc));
}

static inline uint32_t log_seed(const unsigned char *image)
{
    struct pms_session s[2];
    for (uint64_t copy = 0; copy < 2; copy++)
        memcpy(&s[copy], image + PMS_OFF_SESSION(copy), sizeof s[copy]);
    return pms_session_seed(&s[s[1].generation > s[0].generation]);
}

static inline void seal_anchor(unsigned char *image)
{
    uint64_t word;
    memcpy(&word, image + PMS_OFF_ANCHOR, sizeof word);
    word = pms_anchor_pack(word & PMS_TX_MASK);
    memcpy(image + PMS_OFF_ANCHOR, &word, sizeof word);
}

/* of the undo log */
static inline void seal_entry(unsigned char *image, uint64_t bytes, uint64_t off)
{
    struct pms_entry e;
    memcpy(&e, image + off, sizeof e);
    uint64_t pre = off + (e.len <= 32 ? sizeof e : PMS_LINE);
    uint32_t crc = pms_crc32c(log_seed(image), &e, 28);
    if (pre <= bytes && e.len <= bytes - pre)
        crc = pms_crc32c(crc, image + pre, e.len);
    memcpy(image + off + offsetof(struct pms_entry, crc), &crc, sizeof crc);
}

/* of the journal: header and runs */
static inline void seal_record(unsigned char *image, uint64_t bytes, uint64_t off)
{
    struct pms_record r;
    memcpy(&r, image + off, sizeof r);
    r.crc = 0;
    uint32_t crc = pms_crc32c(log_seed(image), &r, sizeof r);
    uint64_t runs = (uint64_t)r.run_count * sizeof(struct pms_run), room = bytes - off - sizeof r;
    crc = pms_crc32c(crc, image + off + sizeof r, runs < room ? runs : room);
    memcpy(image + off + offsetof(struct pms_record, crc), &crc, sizeof crc);
}

static inline void seal_pte(unsigned char *image, const struct pms_segment *s, uint64_t entry)
{
    uint64_t word, page = (entry - s->table_off) / sizeof(struct pms_pte) + s->data_off / PMS_PAGE;
    memcpy(&word, image + entry, sizeof word);
    word &= PMS_TX_MASK;
    word |= (uint64_t)pms_check16(page, word) << 48;
    memcpy(image + entry, &word, sizeof word);
}

#endif
