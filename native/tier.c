#include "tier.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "checksum.h"
#include "pool_state.h"
#include "snapshot.h"

#define BATCH_BYTES (4ull << 20)   /* of one write */
#define BATCHES_A_SECOND 16u       /* at least, where the rate is limited: an even stream */
#define WINDOW_PAGES 16u           /* of a page table, read at once */
#define ALLOCATE_BYTES (16ull << 20)
#define BOUND_SHARE 4u
#define BOUND_MIN (4ull << 20)

/* ---- snapshots of a pool ---- */

int pms_snapshot_begin(struct pms_pool *pool, uint64_t bound_bytes, int64_t max_wait_ns, struct pms_snapshot **snapshot,
                       struct pms_error *error)
{
    *snapshot = NULL;
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (!bound_bytes) {
        struct pms_heap_stats h;
        pms_heap_stats(pool->heap, &h);
        bound_bytes = h.used_bytes / BOUND_SHARE > BOUND_MIN ? h.used_bytes / BOUND_SHARE : BOUND_MIN;
    }
    status = pms_snapshot_open(&pool->undo, &pool->super, bound_bytes, max_wait_ns, snapshot, error);
    if (status == PMS_OK)
        pool->refs++;
    pms_pool_leave(pool);
    return status;
}

void pms_snapshot_end(struct pms_pool *pool, struct pms_snapshot *snapshot)
{
    if (pms_pool_forked(pool))
        return; /* the parent's, whose locks may have been held at the fork */
    pms_snapshot_close(snapshot);
    pms_pool_unref(pool);
}

int pms_snapshot_info(struct pms_snapshot *s, struct pms_snapshot_info *info, struct pms_error *error)
{
    unsigned char *page = malloc(PMS_PAGE);
    if (!page)
        return pms_fail_errno(error, "allocating memory");
    struct pms_snapshot_stats stats;
    int status = pms_snapshot_read(s, PMS_OFF_ROOT, PMS_PAGE, page, error);
    pms_snapshot_get_stats(s, &stats);
    const struct pms_superblock *super = pms_snapshot_super(s);
    memset(info, 0, sizeof *info);
    memcpy(&info->epoch, page + offsetof(struct pms_root, epoch), sizeof info->epoch);
    memcpy(info->super, super, sizeof info->super);
    info->tag = pms_snapshot_tag(s);
    info->file_bytes = super->file_bytes;
    info->kept_bytes = stats.kept_bytes;
    info->peak_bytes = stats.peak_bytes;
    info->bound_bytes = stats.bound_bytes;
    info->waits = stats.waits;
    info->wait_ns = stats.wait_ns;
    free(page);
    return status;
}

/* ---- which chunks hold something ---- */

struct walk {
    struct pms_snapshot *s;
    uint64_t at;            /* file page of the window's first page; 0: nothing read */
    struct pms_pte window[WINDOW_PAGES * PMS_PAGE / sizeof(struct pms_pte)];
    uint64_t chunk_pages, count;
    uint8_t *state;
};

static void mark(struct walk *w, uint64_t page, uint64_t pages)
{
    if (!pages)
        return;
    for (uint64_t i = page / w->chunk_pages; i <= (page + pages - 1) / w->chunk_pages && i < w->count; i++)
        w->state[i] |= PMS_CHUNK_LIVE;
}

static int entry(struct walk *w, uint64_t off, struct pms_pte *pte, struct pms_error *error)
{
    uint64_t page = off / PMS_PAGE;
    if (!w->at || page < w->at || page >= w->at + WINDOW_PAGES) {
        int status = pms_snapshot_read(w->s, page * PMS_PAGE, sizeof w->window, w->window, error);
        if (status)
            return status;
        w->at = page;
    }
    *pte = w->window[(off - w->at * PMS_PAGE) / sizeof *pte];
    return PMS_OK;
}

static int walk_segment(struct walk *w, const struct pms_segment *g, struct pms_error *error)
{
    uint64_t first = g->data_off / PMS_PAGE, end = first + g->data_pages;
    mark(w, g->table_off / PMS_PAGE, (g->log_off - g->table_off) / PMS_PAGE);
    for (uint64_t page = first; page < end;) {
        struct pms_pte pte;
        uint64_t off = g->table_off + (page - first) * sizeof pte;
        int status = entry(w, off, &pte, error);
        if (status)
            return status;
        uint64_t bare = pte.word & PMS_TX_MASK, pages = bare & ((1ull << 36) - 1), kind = bare >> 44;
        if (pms_check16(page, bare) != pte.word >> 48 || pages == 0 || pages > end - page) {
            if (error)
                error->offset = off;
            return pms_fail(error, PMS_E_CORRUPT, "page table: check bits of an extent's descriptor");
        }
        if (kind != PMS_KIND_FREE)
            mark(w, page, pages);
        page += pages;
    }
    return PMS_OK;
}

int pms_snapshot_chunks(struct pms_snapshot *s, uint64_t since, uint64_t chunk_bytes, uint8_t *state, uint64_t count,
                        struct pms_error *error)
{
    const struct pms_superblock *super = pms_snapshot_super(s);
    if (chunk_bytes < PMS_PAGE || chunk_bytes % PMS_PAGE || count != (super->file_bytes + chunk_bytes - 1) / chunk_bytes)
        return pms_fail(error, PMS_E_INVALID, "chunks are whole pages, and as many as the store has");
    struct walk *w = calloc(1, sizeof *w);
    uint8_t *changed = malloc(count);
    int status = w && changed ? PMS_OK : pms_fail_errno(error, "allocating memory");
    if (status == PMS_OK) {
        memset(state, 0, count);
        *w = (struct walk){.s = s, .chunk_pages = chunk_bytes / PMS_PAGE, .count = count, .state = state};
        mark(w, PMS_OFF_ROOT / PMS_PAGE, 1);
    }
    for (uint32_t i = 0; status == PMS_OK && i < super->segment_count; i++)
        status = walk_segment(w, &super->segment[i], error);
    if (status == PMS_OK)
        status = pms_snapshot_only(s, chunk_bytes, state, count, error);
    if (status == PMS_OK) {
        pms_snapshot_changed(s, since, chunk_bytes, changed, count);
        for (uint64_t i = 0; i < count; i++)
            state[i] = state[i] && changed[i] ? PMS_CHUNK_LIVE | PMS_CHUNK_CHANGED : state[i];
    }
    free(changed);
    free(w);
    return status;
}

/* ---- transfers ---- */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* Counts, keeps to the rate, and stops when told to. */
static int proceed(struct pms_transfer *t, uint64_t bytes, struct pms_error *error)
{
    uint64_t zero = 0;
    __atomic_compare_exchange_n(&t->started_ns, &zero, now_ns(), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    uint64_t done = __atomic_add_fetch(&t->done_bytes, bytes, __ATOMIC_RELAXED);
    while (!__atomic_load_n(&t->cancel, __ATOMIC_RELAXED)) {
        uint64_t rate = __atomic_load_n(&t->bytes_per_second, __ATOMIC_RELAXED);
        uint64_t due = rate ? (uint64_t)((double)done / (double)rate * 1e9) : 0;
        uint64_t spent = now_ns() - __atomic_load_n(&t->started_ns, __ATOMIC_RELAXED);
        if (spent >= due)
            return PMS_OK;
        uint64_t rest = due - spent < 50000000 ? due - spent : 50000000;
        struct timespec nap = {0, (long)rest};
        nanosleep(&nap, NULL);
    }
    return pms_fail(error, PMS_E_STATE, "cancelled");
}

int pms_snapshot_take(struct pms_snapshot *s, uint64_t off, uint64_t bytes, void *dst, int release, struct pms_error *error)
{
    int status = pms_snapshot_read(s, off, bytes, dst, error);
    if (status == PMS_OK && release)
        pms_snapshot_release(s, off, bytes);
    return status;
}

int pms_snapshot_write(struct pms_snapshot *s, int fd, uint64_t chunk_bytes, const uint64_t *chunk, uint64_t count, uint64_t at,
                       uint32_t *crc, struct pms_transfer *transfer, struct pms_error *error)
{
    uint64_t rate = __atomic_load_n(&transfer->bytes_per_second, __ATOMIC_RELAXED);
    uint64_t most = rate && rate / BATCHES_A_SECOND < BATCH_BYTES ? rate / BATCHES_A_SECOND : BATCH_BYTES;
    uint64_t batch = chunk_bytes < most ? most / chunk_bytes : 1;
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    unsigned char *buffer = aligned_alloc(PMS_PAGE, batch * chunk_bytes);
    int status = buffer ? PMS_OK : pms_fail_errno(error, "allocating memory");
    for (uint64_t i = 0, n; status == PMS_OK && i < count; i += n) {
        n = count - i < batch ? count - i : batch;
        for (uint64_t k = 0; status == PMS_OK && k < n; k++) {
            status = pms_snapshot_take(s, chunk[i + k] * chunk_bytes, chunk_bytes, buffer + k * chunk_bytes, 1, error);
            crc[i + k] = pms_crc32c(0, buffer + k * chunk_bytes, chunk_bytes);
        }
        if (status == PMS_OK)
            status = proceed(transfer, n * chunk_bytes, error);
        if (status != PMS_OK)
            break;
        errno = pms_persist_pwrite(&p, fd, buffer, n * chunk_bytes, at + i * chunk_bytes);
        if (errno)
            status = pms_fail_errno(error, "writing chunks to a tier");
    }
    free(buffer);
    return status;
}

static int read_all(int fd, unsigned char *to, uint64_t bytes, uint64_t off, uint64_t *got, struct pms_error *error)
{
    for (*got = 0; *got < bytes;) {
        ssize_t n = pread(fd, to + *got, bytes - *got, (off_t)(off + *got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return pms_fail_errno(error, "reading chunks of a tier");
        if (n == 0)
            break;
        *got += (uint64_t)n;
    }
    return PMS_OK;
}

int pms_transfer_copy(int in_fd, const uint64_t *from, int out_fd, const uint64_t *to, const uint32_t *crc, uint64_t count,
                      uint64_t piece_bytes, uint64_t out_end, uint64_t *bad, struct pms_transfer *transfer, struct pms_error *error)
{
    uint64_t batch = piece_bytes < BATCH_BYTES ? BATCH_BYTES / piece_bytes : 1;
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    unsigned char *buffer = aligned_alloc(PMS_PAGE, batch * piece_bytes);
    int status = buffer ? PMS_OK : pms_fail_errno(error, "allocating memory");
    for (uint64_t i = 0, n; status == PMS_OK && i < count; i += n) {
        uint64_t got;
        for (n = 1; n < batch && i + n < count && from[i + n] == from[i] + n * piece_bytes; n++) {}
        status = read_all(in_fd, buffer, n * piece_bytes, from[i], &got, error);
        for (uint64_t k = 0; status == PMS_OK && k < n; k++) {
            unsigned char *piece = buffer + k * piece_bytes;
            uint64_t bytes = to[i + k] >= out_end ? 0 : out_end - to[i + k] < piece_bytes ? out_end - to[i + k] : piece_bytes;
            *bad = i + k;
            if (got < (k + 1) * piece_bytes)
                status = pms_fail(error, PMS_E_CORRUPT, "the file of the chunk is too short");
            else if (pms_crc32c(0, piece, piece_bytes) != crc[i + k])
                status = pms_fail(error, PMS_E_CORRUPT, "the chunk's checksum is wrong");
            else if ((errno = pms_persist_pwrite(&p, out_fd, piece, bytes, to[i + k])) != 0)
                status = pms_fail_errno(error, "writing the restored store");
        }
        if (status == PMS_OK)
            status = proceed(transfer, n * piece_bytes, error);
    }
    free(buffer);
    return status;
}

/* ---- a new store ---- */

int pms_restore_begin(const uint8_t *raw, uint64_t *file_bytes, struct pms_error *error)
{
    struct pms_superblock super;
    memcpy(&super, raw, sizeof super);
    *file_bytes = super.file_bytes;
    return pms_super_check(&super, error);
}

/* Piece by piece: tmpfs zeroes what it allocates, and lets nobody write meanwhile. */
int pms_restore_allocate(int fd, uint64_t file_bytes, const struct pms_transfer *transfer, struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    for (uint64_t at = 0; at < file_bytes; at += ALLOCATE_BYTES) {
        if (__atomic_load_n(&transfer->cancel, __ATOMIC_RELAXED))
            return pms_fail(error, PMS_E_STATE, "cancelled");
        errno = pms_persist_allocate(&p, fd, at, file_bytes - at < ALLOCATE_BYTES ? file_bytes - at : ALLOCATE_BYTES);
        if (!errno)
            continue;
        int status = pms_fail_errno(error, "allocating the restored store's space on the disk");
        if (error)
            error->needed = file_bytes;
        return status;
    }
    return PMS_OK;
}

int pms_restore_seal(int fd, const uint8_t *raw, int domain, struct pms_error *error)
{
    struct pms_superblock super;
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    memcpy(&super, raw, sizeof super);
    if (domain < PMS_DOMAIN_AUTO || domain > PMS_DOMAIN_EMULATED)
        return pms_fail(error, PMS_E_INVALID, "no such domain");
    return pms_super_adopt(fd, &p, &super, (enum pms_domain)domain, error);
}

int pms_transfer_sync(int fd, struct pms_error *error)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    errno = pms_persist_sync(&p, fd);
    return errno ? pms_fail_errno(error, "syncing a tier's file") : PMS_OK;
}

uint32_t pms_checksum(uint32_t crc, const void *data, uint64_t bytes) { return pms_crc32c(crc, data, bytes); }
