#include "heap/super.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/checksum.h"
#include "base/pages.h"
#include "base/process.h"

#define ANCHOR_SALT 0x726f68636e61ull
#define LOG_SLACK_PAGES 8u         /* what may stay unused at an extent's end, and a little */
#define HUGE_SEGMENT (32ull << 20) /* from here on data starts at a PMS_HUGE boundary */
#define GROWTH_SHARE 4u            /* a growth step is at least this part of the file */
#define FILE_MAX (1ull << 46)      /* bytes: no sum of sizes below overflows */

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static uint64_t table_bytes(uint64_t data_pages)
{
    return pms_page_up(data_pages * sizeof(struct pms_pte));
}

/* I5: every data page captured whole (a page and a header line), the table granule by granule (a
 * line for each), and slack. */
static uint64_t log_bytes(uint64_t data_pages)
{
    return round_up(data_pages * (PMS_PAGE + PMS_LINE) + 2 * table_bytes(data_pages) +
                        LOG_SLACK_PAGES * PMS_PAGE,
                    PMS_PAGE);
}

/* Of the next segment: where logs are cut in halves each half takes it all, and what the segments
 * before lack, together, because some were made without. */
static uint64_t next_log_bytes(const struct pms_superblock *super, uint64_t data_pages)
{
    uint64_t bytes = log_bytes(data_pages), wanted = 0, made = 0;
    if (!(super->features_incompat & PMS_FEATURE_HOLD))
        return bytes;
    for (uint32_t i = 0; i < super->segment_count; i++) {
        wanted += 2 * log_bytes(super->segment[i].data_pages);
        made += super->segment[i].log_bytes;
    }
    return 2 * bytes + (wanted > made ? wanted - made : 0);
}

static void place(const struct pms_superblock *super, struct pms_segment *s, uint64_t off,
                  uint64_t data_pages)
{
    memset(s, 0, sizeof *s);
    s->data_pages = data_pages;
    s->table_off = off;
    s->log_off = off + table_bytes(data_pages);
    s->log_bytes = next_log_bytes(super, data_pages);
    s->data_off = s->log_off + s->log_bytes;
    if (data_pages * PMS_PAGE >= HUGE_SEGMENT) {
        uint64_t aligned = pms_huge_up(s->data_off);
        s->log_bytes += aligned - s->data_off;
        s->data_off = aligned;
    }
}

static uint64_t end_of(const struct pms_segment *s)
{
    return s->data_off + s->data_pages * PMS_PAGE;
}

/* The largest segment that starts at off and ends by `end`. */
static void fit(const struct pms_superblock *super, struct pms_segment *s, uint64_t off,
                uint64_t end)
{
    uint64_t lo = 0, hi = end > off ? (end - off) / PMS_PAGE : 0;
    while (lo < hi) {
        uint64_t mid = lo + (hi - lo + 1) / 2;
        place(super, s, off, mid);
        if (end_of(s) <= end)
            lo = mid;
        else
            hi = mid - 1;
    }
    place(super, s, off, lo);
}

int pms_super_plan(struct pms_superblock *super, uint64_t file_bytes, uint64_t max_bytes,
                   enum pms_domain domain, uint64_t features, struct pms_error *error)
{
    memset(super, 0, sizeof *super);
    if (file_bytes < PMS_MIN_SIZE) {
        int status = pms_fail(error, PMS_E_INVALID, "a store needs at least 1 MiB");
        if (error) {
            error->needed = PMS_MIN_SIZE;
            error->available = file_bytes;
        }
        return status;
    }
    if (file_bytes > FILE_MAX)
        return pms_fail(error, PMS_E_INVALID, "a store has at most 64 TiB");
    if (max_bytes && max_bytes < file_bytes)
        return pms_fail(error, PMS_E_INVALID, "max_size is smaller than size");
    memcpy(super->magic, PMS_MAGIC, sizeof super->magic);
    super->version = PMS_VERSION;
    super->page_bytes = PMS_PAGE;
    super->max_bytes = max_bytes;
    super->domain = (uint32_t)domain;
    if (getrandom(super->uuid, sizeof super->uuid, 0) != sizeof super->uuid ||
        getrandom(&super->hash_seed, sizeof super->hash_seed, 0) != sizeof super->hash_seed)
        return pms_fail_errno(error, "reading randomness");
    struct pms_segment first;
    super->features_incompat = features;
    fit(super, &first, PMS_OFF_SEGMENTS, pms_page_down(file_bytes));
    super->segment[0] = first;
    super->segment_count = 1;
    super->file_bytes = end_of(&first);
    return PMS_OK;
}

int pms_super_plan_growth(struct pms_superblock *super, uint64_t data_bytes,
                          struct pms_error *error)
{
    uint64_t most = super->max_bytes && super->max_bytes < FILE_MAX ? super->max_bytes : FILE_MAX;
    uint64_t asked = data_bytes < FILE_MAX ? data_bytes : FILE_MAX;
    /* where data starts at such a boundary no room is lost to a block's */
    uint64_t spare = asked < HUGE_SEGMENT ? 2 * PMS_HUGE : 0;
    uint64_t pages = pms_page_up(asked + spare) / PMS_PAGE;
    uint64_t share = super->file_bytes / GROWTH_SHARE / 2 / PMS_PAGE;
    struct pms_segment s;
    place(super, &s, super->file_bytes, pages > share ? pages : share);
    if (end_of(&s) > most) { /* the rest up to the limit, if that is enough */
        fit(super, &s, super->file_bytes, most);
        if (s.data_pages * PMS_PAGE < data_bytes) {
            int status = pms_fail(error, PMS_E_FULL,
                                  most == FILE_MAX ? "a store has at most 64 TiB"
                                                   : "the store may not grow beyond max_size");
            if (error) {
                error->needed = data_bytes;
                error->available = s.data_pages * PMS_PAGE;
            }
            return status;
        }
    }
    if (super->segment_count == PMS_MAX_SEGMENTS)
        return pms_fail(error, PMS_E_FULL,
                        "the store has grown %u times: export and import it into a larger one",
                        PMS_MAX_SEGMENTS);
    super->segment[super->segment_count++] = s;
    super->file_bytes = end_of(&s);
    return PMS_OK;
}

static uint64_t free_word(uint64_t page, uint64_t pages)
{
    uint64_t word = pages | (uint64_t)PMS_KIND_FREE << 44;
    return word | (uint64_t)pms_check16(page, word) << 48;
}

uint32_t pms_super_stretches(const struct pms_superblock *super, uint32_t first,
                             struct pms_stretch *stretch)
{
    uint32_t n = 0;
    uint64_t from = first ? end_of(&super->segment[first - 1]) : 0;
    bool whole = super->features_incompat & PMS_FEATURE_HOLD;
    for (uint32_t i = first; i < super->segment_count && !whole; i++) {
        const struct pms_segment *s = &super->segment[i];
        stretch[n++] = (struct pms_stretch){from, s->log_off + PMS_PAGE - from};
        from = s->data_off;
    }
    stretch[n++] = (struct pms_stretch){from, super->file_bytes - from};
    return n;
}

int pms_super_allocate(int fd, struct pms_persist *p, const struct pms_superblock *super,
                       uint32_t first)
{
    struct pms_stretch stretch[PMS_STRETCHES_MOST];
    uint32_t n = pms_super_stretches(super, first, stretch);
    int err = 0;
    for (uint32_t i = 0; i < n && !err; i++)
        err = pms_persist_reserve(p, fd, stretch[i].off, stretch[i].bytes);
    return PMS_CANNOT_RESERVE(err)
               ? pms_persist_allocate(p, fd, stretch->off, super->file_bytes - stretch->off)
               : err;
}

int pms_super_format_segments(int fd, struct pms_persist *p, const struct pms_superblock *super,
                              uint32_t first, struct pms_error *error)
{
    uint64_t from = first ? end_of(&super->segment[first - 1]) : 0;
    off_t before = lseek(fd, 0, SEEK_END);
    errno = pms_super_allocate(fd, p, super, first);
    if (errno) {
        int status = pms_fail_errno(error, "allocating the store's space on the disk");
        /* a file system may keep what it found before it was full: give the disk's last bytes
         * back */
        if (before >= 0)
            (void)pms_persist_truncate(p, fd, (uint64_t)before);
        if (error)
            error->needed = super->file_bytes - from;
        return status;
    }
    for (uint32_t i = first; i < super->segment_count; i++) {
        const struct pms_segment *s = &super->segment[i];
        /* The rest of the table is never read before it is written; stale bytes past an old end
         * are harmless too. */
        struct pms_pte all_free = {free_word(s->data_off / PMS_PAGE, s->data_pages), 0};
        errno = pms_persist_pwrite(p, fd, &all_free, sizeof all_free, s->table_off);
        if (errno)
            return pms_fail_errno(error, "writing a page table");
    }
    /* page tables, before the superblock that refers to them */
    return pms_persist_sync(p, fd, "syncing a page table", error);
}

/* Anchor, session record and superblock of a new file. */
static int write_head(int fd, struct pms_persist *p, struct pms_superblock *super,
                      struct pms_error *error)
{
    int status = PMS_OK;
    uint64_t anchor = pms_anchor_pack(0);
    errno = pms_persist_pwrite(p, fd, &anchor, sizeof anchor, PMS_OFF_ANCHOR);
    if (errno)
        return pms_fail_errno(error, "writing the anchor");
    struct pms_session session = {.state = PMS_SESSION_CLEAN, .domain = PMS_DOMAIN_PROCESS};
    for (int copy = 0; copy < 2 && !status; copy++)
        status = pms_session_write(fd, p, &session, error);
    for (int copy = 0; copy < 2 && !status; copy++)
        status = pms_super_write(fd, p, super, error);
    return status;
}

int pms_super_format(int fd, struct pms_persist *p, struct pms_superblock *super,
                     struct pms_error *error)
{
    int status = pms_super_format_segments(fd, p, super, 0, error);
    return status ? status : write_head(fd, p, super, error);
}

/* ---- superblock ---- */

static uint32_t super_crc(const struct pms_superblock *s)
{
    return pms_crc32c(0, s, offsetof(struct pms_superblock, crc));
}

static bool segments_sane(const struct pms_superblock *s)
{
    uint64_t end = PMS_OFF_SEGMENTS;
    if (s->segment_count == 0 || s->segment_count > PMS_MAX_SEGMENTS || s->file_bytes > FILE_MAX)
        return false;
    for (uint32_t i = 0; i < s->segment_count; i++) {
        const struct pms_segment *g = &s->segment[i];
        if (g->data_pages == 0 || g->data_pages > (1ull << 34) || g->log_bytes > FILE_MAX)
            return false;
        if (g->table_off != end || g->log_off != end + table_bytes(g->data_pages) ||
            g->log_bytes < log_bytes(g->data_pages) || g->log_bytes % PMS_PAGE ||
            g->data_off != g->log_off + g->log_bytes)
            return false;
        end = end_of(g);
    }
    return end == s->file_bytes;
}

int pms_super_check(const struct pms_superblock *s, struct pms_error *error)
{
    if (memcmp(s->magic, PMS_MAGIC, sizeof s->magic) != 0)
        return pms_fail(error, PMS_E_NOT_A_STORE, "not a pmstore file (no magic)");
    if (s->version != PMS_VERSION || s->features_incompat & ~PMS_FEATURES) {
        int status = pms_fail(error, PMS_E_VERSION,
                              "made by another version of pmstore (format %u, features %llx)",
                              s->version, (unsigned long long)s->features_incompat);
        if (error)
            error->needed = s->version;
        return status;
    }
    if (s->crc != super_crc(s) || s->page_bytes != PMS_PAGE || s->domain > PMS_DOMAIN_EMULATED ||
        !segments_sane(s))
        return pms_fail(error, PMS_E_CORRUPT, "the superblock is damaged");
    return PMS_OK;
}

/* A file that ends before the copy has none. */
static int read_copy(int fd, uint64_t copy, struct pms_superblock *s, struct pms_error *error)
{
    ssize_t n = pms_persist_read(fd, s, sizeof *s, PMS_OFF_SUPER(copy));
    if (n < 0)
        return pms_fail_errno(error, "reading the superblock");
    if (n != (ssize_t)sizeof *s)
        memset(s, 0, sizeof *s);
    int status = pms_super_check(s, error);
    if (status == PMS_OK && (s->generation & 1) != copy)
        status = pms_fail(error, PMS_E_CORRUPT, "the superblock is damaged");
    return status;
}

int pms_super_read(int fd, struct pms_superblock *super, struct pms_error *error)
{
    /* of the copies; a damaged copy beside a good one is no reason to refuse */
    int worst = PMS_E_NOT_A_STORE;
    bool found = false;
    for (uint64_t copy = 0; copy < 2; copy++) {
        struct pms_superblock s;
        struct pms_error e;
        int status = read_copy(fd, copy, &s, &e);
        if (status == PMS_OK && (!found || s.generation > super->generation)) {
            *super = s;
            found = true;
        }
        if (status != PMS_OK && worst == PMS_E_NOT_A_STORE) {
            worst = status;
            if (error)
                *error = e;
        }
    }
    return found ? PMS_OK : worst;
}

uint32_t pms_super_sound_copies(int fd)
{
    struct pms_superblock s;
    struct pms_error e;
    uint32_t sound = 0;
    for (uint32_t copy = 0; copy < 2; copy++)
        if (read_copy(fd, copy, &s, &e) == PMS_OK)
            sound |= 1u << copy;
    return sound;
}

int pms_super_write(int fd, struct pms_persist *p, struct pms_superblock *super,
                    struct pms_error *error)
{
    super->generation++;
    super->crc = super_crc(super);
    errno = pms_persist_pwrite(p, fd, super, sizeof *super, PMS_OFF_SUPER(super->generation & 1));
    if (errno)
        return pms_fail_errno(error, "writing the superblock");
    /* this copy, before anything relies on it or the other one is rewritten */
    return pms_persist_sync(p, fd, "syncing the superblock", error);
}

int pms_super_write_both(int fd, struct pms_persist *p, struct pms_superblock *super,
                         struct pms_error *error)
{
    int status = pms_super_write(fd, p, super, error);
    if (status != PMS_OK)
        return status;
    /* The other copy too, so that either one may be damaged. Should it not be written, the first
     * is durable, and the next write goes to the copy that failed. */
    struct pms_superblock twin = *super;
    struct pms_error of_twin;
    uint64_t failed_syncs = p->failed_syncs;
    status = pms_super_write(fd, p, &twin, &of_twin);
    if (status == PMS_OK)
        *super = twin;
    if (p->failed_syncs == failed_syncs)
        return PMS_OK;
    if (error)
        *error = of_twin;
    return status;
}

int pms_super_adopt(int fd, struct pms_persist *p, struct pms_superblock *super,
                    enum pms_domain domain, struct pms_error *error)
{
    int status = pms_super_check(super, error);
    if (status)
        return status;
    super->domain = (uint32_t)domain;
    super->features_incompat &= ~PMS_FEATURE_HOLD;
    if (getrandom(super->uuid, sizeof super->uuid, 0) != sizeof super->uuid)
        return pms_fail_errno(error, "reading randomness");
    /* page tables and data, before the superblock that refers to them */
    status = pms_persist_sync(p, fd, "syncing the store", error);
    return status ? status : write_head(fd, p, super, error);
}

/* ---- session ---- */

static uint32_t session_crc(const struct pms_session *s)
{
    return pms_crc32c(0, s, offsetof(struct pms_session, crc));
}

int pms_session_read(int fd, struct pms_session *session, struct pms_error *error)
{
    bool found = false;
    for (uint64_t copy = 0; copy < 2; copy++) {
        struct pms_session s;
        ssize_t n = pms_persist_read(fd, &s, sizeof s, PMS_OFF_SESSION(copy));
        if (n < 0)
            return pms_fail_errno(error, "reading the session record");
        bool sane = n == (ssize_t)sizeof s && s.crc == session_crc(&s) &&
                    (s.generation & 1) == copy &&
                    (s.state == PMS_SESSION_CLEAN || s.state == PMS_SESSION_DIRTY) &&
                    s.domain >= PMS_DOMAIN_DAX && s.domain <= PMS_DOMAIN_EMULATED;
        if (sane && (!found || s.generation > session->generation)) {
            *session = s;
            found = true;
        }
    }
    return found ? PMS_OK
                 : pms_fail(error, PMS_E_CORRUPT, "both copies of the session record are damaged");
}

int pms_session_write_unsynced(int fd, struct pms_persist *p, struct pms_session *session,
                               struct pms_error *error)
{
    session->crc = session_crc(session);
    errno = pms_persist_pwrite(p, fd, session, sizeof *session,
                               PMS_OFF_SESSION(session->generation & 1));
    return errno ? pms_fail_errno(error, "writing the session record") : PMS_OK;
}

int pms_session_write(int fd, struct pms_persist *p, struct pms_session *session,
                      struct pms_error *error)
{
    session->generation++;
    int status = pms_session_write_unsynced(fd, p, session, error);
    if (status != PMS_OK)
        return status;
    /* the record, before what it announces (first store) or after what it sums up */
    return pms_persist_sync(p, fd, "syncing the session record", error);
}

uint32_t pms_session_seed(const struct pms_session *session)
{
    return pms_crc32c(0, &session->nonce, sizeof session->nonce);
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

void pms_boot_id(uint8_t id[16])
{
    char text[64];
    memset(id, 0, 16);
    ssize_t n = pms_process_read("/proc/sys/kernel/random/boot_id", text, sizeof text);
    int digits = 0;
    for (ssize_t i = 0; i < n && digits < 32; i++) {
        int h = hex(text[i]);
        if (h < 0)
            continue;
        id[digits / 2] = (uint8_t)(id[digits / 2] << 4 | h);
        digits++;
    }
}

/* ---- anchor ---- */

uint64_t pms_anchor_pack(uint64_t tx)
{
    PMS_ASSERT(tx <= PMS_TX_MASK);
    return tx | (uint64_t)pms_check16(ANCHOR_SALT, tx) << PMS_TX_BITS;
}

bool pms_anchor_unpack(uint64_t word, uint64_t *tx)
{
    *tx = word & PMS_TX_MASK;
    return pms_check16(ANCHOR_SALT, *tx) == word >> PMS_TX_BITS;
}
