#include "flush/chunks.h"
#include "commit/gate.h"
#include "commit/refs.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"
#include "log/snapshot.h"

#define WINDOW_PAGES 16u /* of a page table, read at once */
#define ALLOCATE_BYTES (16ull << 20)
#define BOUND_SHARE 4u
#define BOUND_MIN (4ull << 20)

/* ---- snapshots of a pool ---- */

int pms_snapshot_begin(struct pms_pool *pool, uint64_t bound_bytes, int64_t max_wait_ns,
                       struct pms_snapshot **snapshot, struct pms_error *error)
{
    *snapshot = NULL;
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (pool->sight.of != PMS_SIGHT_NONE) { /* it has what was loaded alone */
        pms_pool_leave(pool);
        return pms_fail(error, PMS_E_STATE,
                        "a reader beside writers does not flush: open the store with lock=True, "
                        "or flush in the process that writes");
    }
    if (!bound_bytes) {
        struct pms_heap_stats h;
        pms_heap_stats(pool->heap, &h);
        bound_bytes = h.used_bytes / BOUND_SHARE > BOUND_MIN ? h.used_bytes / BOUND_SHARE
                                                             : BOUND_MIN;
    }
    status = pms_snapshot_open(&pool->undo, &pool->super, bound_bytes, max_wait_ns, snapshot,
                               error);
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

int pms_snapshot_info(struct pms_snapshot *s, struct pms_snapshot_info *info,
                      struct pms_error *error)
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
    uint64_t at; /* file page of the window's first page; 0: nothing read */
    struct pms_pte window[WINDOW_PAGES * PMS_PAGE / sizeof(struct pms_pte)];
    uint64_t chunk_pages, count;
    uint8_t *state;
};

static void mark(struct walk *w, uint64_t page, uint64_t pages)
{
    if (!pages)
        return;
    for (uint64_t i = page / w->chunk_pages;
         i <= (page + pages - 1) / w->chunk_pages && i < w->count; i++)
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
        uint64_t bare = pte.word & PMS_TX_MASK, pages = bare & ((1ull << 36) - 1),
                 kind = bare >> 44;
        if (pms_check16(page, bare) != pte.word >> 48 || pages == 0 || pages > end - page) {
            if (error)
                error->offset = off;
            return pms_fail(error, PMS_E_CORRUPT,
                            "page table: check bits of an extent's descriptor");
        }
        if (kind != PMS_KIND_FREE)
            mark(w, page, pages);
        page += pages;
    }
    return PMS_OK;
}

int pms_snapshot_chunks(struct pms_snapshot *s, uint64_t since, uint64_t chunk_bytes,
                        uint8_t *state, uint64_t count, struct pms_error *error)
{
    const struct pms_superblock *super = pms_snapshot_super(s);
    if (chunk_bytes < PMS_PAGE || chunk_bytes % PMS_PAGE ||
        count != (super->file_bytes + chunk_bytes - 1) / chunk_bytes)
        return pms_fail(error, PMS_E_INVALID,
                        "chunks are whole pages, and as many as the store has");
    struct walk *w = calloc(1, sizeof *w);
    uint8_t *changed = malloc(count);
    int status = w && changed ? PMS_OK : pms_fail_errno(error, "allocating memory");
    if (status == PMS_OK) {
        memset(state, 0, count);
        *w = (struct walk){
            .s = s, .chunk_pages = chunk_bytes / PMS_PAGE, .count = count, .state = state};
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

/* ---- a new store ---- */

int pms_restore_begin(const uint8_t *raw, uint64_t *file_bytes, struct pms_error *error)
{
    struct pms_superblock super;
    memcpy(&super, raw, sizeof super);
    *file_bytes = super.file_bytes;
    return pms_super_check(&super, error);
}

/* The logs of a new store are whole. */
uint32_t pms_restore_space(const uint8_t *raw, struct pms_stretch *stretch)
{
    struct pms_superblock super;
    memcpy(&super, raw, sizeof super);
    super.features_incompat &= ~PMS_FEATURE_HOLD;
    return pms_super_stretches(&super, 0, stretch);
}

/* Piece by piece: tmpfs zeroes what it allocates, and lets nobody write meanwhile. Returns errno;
 * ECANCELED: somebody said so. */
static int make_room(int fd, int (*allocate)(struct pms_persist *, int, uint64_t, uint64_t),
                     const struct pms_stretch *of, const struct pms_transfer *transfer)
{
    struct pms_persist p = {.flush = PMS_FLUSH_NONE};
    int err = 0;
    for (uint64_t at = of->off, end = of->off + of->bytes; at < end && !err; at += ALLOCATE_BYTES) {
        uint64_t bytes = end - at < ALLOCATE_BYTES ? end - at : ALLOCATE_BYTES;
        err = __atomic_load_n(&transfer->cancel, __ATOMIC_RELAXED) ? ECANCELED
                                                                   : allocate(&p, fd, at, bytes);
    }
    return err;
}

static int room_made(int err, uint64_t needed, struct pms_error *error)
{
    if (!err)
        return PMS_OK;
    if (err == ECANCELED)
        return pms_fail(error, PMS_E_STATE, "cancelled");
    errno = err;
    int status = pms_fail_errno(error, "allocating the restored store's space on the disk");
    if (error)
        error->needed = needed;
    return status;
}

int pms_restore_reserve(int fd, const uint8_t *raw, int *reserved,
                        const struct pms_transfer *transfer, struct pms_error *error)
{
    struct pms_stretch stretch[PMS_STRETCHES_MOST];
    uint32_t n = pms_restore_space(raw, stretch);
    uint64_t needed = 0;
    int err = 0;
    for (uint32_t i = 0; i < n; i++) {
        needed += stretch[i].bytes;
        err = err ? err : make_room(fd, pms_persist_reserve, &stretch[i], transfer);
    }
    *reserved = !PMS_CANNOT_RESERVE(err);
    return *reserved ? room_made(err, needed, error) : PMS_OK;
}

int pms_restore_allocate(int fd, uint64_t file_bytes, const struct pms_transfer *transfer,
                         struct pms_error *error)
{
    struct pms_stretch all = {0, file_bytes};
    return room_made(make_room(fd, pms_persist_allocate, &all, transfer), file_bytes, error);
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
