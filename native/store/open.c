/* Opening, growing and closing a store. */
#include "commit/pool_state.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "crash/debug.h"
#include "store/filelock.h"
#include "seam/footer.h"
#include "heap/state.h"
#include "seam/holder.h"
#include "commit/landing.h"
#include "store/populate.h"
#include "store/recover.h"
#include "store/room.h"
#include "store/session.h"
#include "log/snapshot.h"

/* ---- open, step by step ---- */

static int read_head(struct pms_pool *pool, struct pms_error *error)
{
    int status = pms_super_read(pool->opened.fd, &pool->super, error);
    if (status == PMS_OK)
        status = pms_session_read(pool->opened.fd, &pool->session, error);
    if (status != PMS_OK)
        return status;
    pool->persist.log_seed = pms_session_seed(&pool->session);
    off_t end = lseek(pool->opened.fd, 0, SEEK_END);
    if (end >= 0 && (uint64_t)end >= pool->super.file_bytes)
        return PMS_OK;
    status = pms_fail(error, PMS_E_CORRUPT, "the file is shorter than its superblock says");
    if (error) {
        error->needed = pool->super.file_bytes;
        error->available = end < 0 ? 0 : (uint64_t)end;
    }
    return status;
}

static int map_store(struct pms_pool *pool, struct pms_error *error)
{
    enum pms_map_how how = PMS_MAP_SHARED;
    if (pool->opened.read_only || pool->opened.domain == PMS_DOMAIN_FILE)
        how = PMS_MAP_PRIVATE;
    else if (pool->opened.domain == PMS_DOMAIN_DAX)
        how = PMS_MAP_SYNC;
    int status = pms_map_open(&pool->map, pool->opened.fd, pool->super.file_bytes,
                              pms_room_address_space(pool), how, &pool->persist, error);
    if (status == PMS_OK)
        pms_map_read_around(&pool->map, false); /* an open reads a page here and there */
    return status;
}

static int open_reading(struct pms_pool *pool, struct pms_error *error)
{
    int status = map_store(pool, error);
    if (status != PMS_OK)
        return status;
    pool->opened.info.clean = pool->session.state == PMS_SESSION_CLEAN;
    errno = pms_map_unprotect(&pool->map, 0, pool->map.bytes);
    if (errno)
        return pms_fail_errno(error, "preparing a private view of the store");
    status = pms_recover_view(pool, error);
    pms_map_protect(&pool->map, 0, pool->map.bytes);
    return status;
}

/* Another limit of growth than the store was given before. */
static int set_limit(struct pms_pool *pool, uint64_t max_bytes, struct pms_error *error)
{
    if (max_bytes == 0 || max_bytes == pool->super.max_bytes)
        return PMS_OK;
    if (max_bytes < pool->super.file_bytes) {
        int status = pms_fail(error, PMS_E_INVALID, "max_size is smaller than the file is");
        if (error) {
            error->needed = pool->super.file_bytes;
            error->available = max_bytes;
        }
        return status;
    }
    struct pms_superblock super = pool->super;
    super.max_bytes = max_bytes;
    int status = pms_super_write(pool->opened.fd, &pool->persist, &super, error);
    if (status == PMS_OK)
        pool->super = super;
    return status;
}

static int open_writing(struct pms_pool *pool, const struct pms_options *o, struct pms_error *error)
{
    int status = pms_room_fill_holes(pool, error); /* first: recovery stores too */
    if (status == PMS_OK)
        status = pms_recover_file(pool, error);
    if (status == PMS_OK)
        status = set_limit(pool, o->max_size, error);
    if (status == PMS_OK)
        status = pms_session_plan(pool, error);
    if (status == PMS_OK)
        status = map_store(pool, error);
    if (status == PMS_OK && pool->session.footer)
        pms_footer_begin(&pool->map, pool->tx.last, PMS_FOOTER_ALL);
    if (status == PMS_OK && pool->opened.domain == PMS_DOMAIN_FILE) {
        status = pms_journal_open(&pool->journal, &pool->map, &pool->super, pool->tx.last, error);
        pool->tx.runs_room = pool->map.reserve / PMS_PAGE;
        void *runs = mmap(NULL, pool->tx.runs_room * sizeof *pool->tx.runs, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (status == PMS_OK && runs == MAP_FAILED)
            status = pms_fail_errno(error, "reserving memory for commits");
        pool->tx.runs = runs == MAP_FAILED ? NULL : runs;
    }
    return status;
}

/* Log, heap, capture: the same in every domain. */
static int start_engine(struct pms_pool *pool, const struct pms_options *o, struct pms_error *error)
{
    int status = pms_undo_open(&pool->undo, &pool->map, !pool->map.shared, error);
    if (status != PMS_OK)
        return status;
    pms_undo_set_extents(&pool->undo, &pool->super);
    status = pms_heap_open(&pool->heap, &pool->undo, &pool->super, error);
    if (status == PMS_OK)
        status = pms_capture_open(&pool->capture, &pool->undo, pool->heap, &pool->super,
                                  pool->opened.read_only, o->hot != 0, error);
    if (status == PMS_OK && !pool->opened.read_only)
        status = pms_room_check_memory(pool, error);
    if (status == PMS_OK && !pool->opened.read_only)
        status = pms_session_begin(pool, error);
    if (status == PMS_OK && !pool->opened.read_only)
        pms_tx_start(pool);
    return status;
}

/* A new store's root directory, committed, so that no reader ever finds a store without one. */
static int make_root(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    uint64_t dir = 0;
    int status = pms_dir_create(&dirs, &dir, error);
    if (status != PMS_OK)
        return status;
    /* making the store is not a commit of the user's: the first one makes epoch 1 */
    uint64_t none = (uint64_t)-1;
    pms_undo_store(&pool->undo, PMS_OFF_ROOT + offsetof(struct pms_root, directory), &dir,
                   sizeof dir);
    pms_undo_store(&pool->undo, PMS_OFF_ROOT + offsetof(struct pms_root, epoch), &none,
                   sizeof none);
    return pms_tx_commit(pool, error);
}

static void fill_info(struct pms_pool *pool)
{
    struct pms_info *info = &pool->opened.info;
    info->base = (uint64_t)(uintptr_t)pool->map.user;
    info->reserve_bytes = pool->map.reserve;
    info->domain = (int32_t)(pool->opened.read_only ? pool->session.domain : pool->opened.domain);
    info->flush = (int32_t)pool->persist.flush;
    info->sync_mapping = pool->map.sync;
    info->read_only = pool->opened.read_only;
    info->asked_domain = (int32_t)pool->super.domain;
    info->max_bytes = pool->super.max_bytes;
    info->opens = pool->session.opens;
    info->unclean_opens = pool->session.unclean;
    memcpy(info->uuid, pool->super.uuid, sizeof info->uuid);
    struct stat st = {0}; /* unknown is 0: no file has that inode, and nothing is as private */
    (void)fstat(pool->opened.fd, &st);
    info->inode = st.st_ino;
    info->permissions = st.st_mode & 0777;
}

static int create(struct pms_pool *pool, struct pms_files *files, const struct pms_options *o,
                  struct pms_error *error)
{
    pool->opened.info.created = 1;
    int status = pms_super_plan(&pool->super, o->size ? o->size : PMS_DEFAULT_SIZE, o->max_size,
                                (enum pms_domain)o->domain, error);
    if (status == PMS_OK)
        status = pms_super_format(files->fd, &pool->persist, &pool->super, error);
    return status;
}

static int open_files(struct pms_pool *pool, const char *path, const struct pms_options *o,
                      struct pms_files *files, struct pms_error *error)
{
    int status = pms_files_open(files, path, o, error);
    pool->opened.fd = files->fd;
    pool->opened.lock_fd = files->lock_fd;
    if (status == PMS_OK && pms_debug_board)
        pms_debug_file(pool, pool->opened.fd);
    if (status == PMS_OK && files->created)
        status = create(pool, files, o, error);
    if (status == PMS_OK)
        status = read_head(pool, error);
    if (status == PMS_OK)
        status = pms_session_check(pool, o, error);
    if (status != PMS_OK)
        return status;
    pool->opened.domain = pms_domain_choose(pool->opened.fd, (enum pms_domain)o->domain,
                                            (enum pms_domain)pool->super.domain);
    pool->persist.flush = pms_domain_flush(pool->opened.domain);
    status = pool->opened.read_only ? open_reading(pool, error) : open_writing(pool, o, error);
    if (status == PMS_OK)
        status = start_engine(pool, o, error);
    if (status == PMS_OK && pms_pool_root(pool)->directory == 0 && pool->opened.info.created)
        status = make_root(pool, error);
    if (status == PMS_OK)
        status = pms_files_publish(files, error); /* complete, or not there at all */
    return status;
}

static void tear_down(struct pms_pool *pool)
{
    pms_capture_close(&pool->capture);
    if (pool->journal)
        pms_journal_close(pool->journal, false, NULL);
    pool->journal = NULL;
    if (pool->heap)
        pms_heap_close(pool->heap);
    pool->heap = NULL;
    if (pool->tx.runs)
        munmap(pool->tx.runs, pool->tx.runs_room * sizeof *pool->tx.runs);
    pool->tx.runs = NULL;
    pms_undo_close(&pool->undo);
    pms_map_close(&pool->map);
}

static void init_locks(struct pms_pool *pool)
{
    pthread_condattr_t attr;
    pthread_mutex_init(&pool->gate.lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&pool->gate.left, &attr);
    pthread_condattr_destroy(&attr);
}

int pms_pool_open(const char *path, const struct pms_options *options, struct pms_pool **out,
                  struct pms_error *error)
{
    struct pms_options o = *options;
    struct pms_files files;
    *out = NULL;
    if (o.mode < PMS_MODE_READ || o.mode > PMS_MODE_EXCLUSIVE || o.domain < PMS_DOMAIN_AUTO ||
        o.domain > PMS_DOMAIN_EMULATED)
        return pms_fail(error, PMS_E_INVALID, "no such mode or domain");
    struct pms_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return pms_fail_errno(error, "allocating memory");
    pms_fork_prepare_once();
    pms_debug_opened(path);
    pms_parallel_start();
    init_locks(pool);
    pool->gate.process = pms_process_generation();
    pool->refs = 1;
    int status;
    do {
        pool->opened.read_only = o.mode == PMS_MODE_READ;
        pool->opened.forced = o.force != 0;
        status = open_files(pool, path, &o, &files, error);
        if (status == PMS_OK)
            break;
        /* somebody else created it: open that one */
        bool raced = status == PMS_E_EXISTS && o.mode == PMS_MODE_APPEND;
        tear_down(pool);
        pms_files_close(&files);
        memset(&pool->opened.info, 0, sizeof pool->opened.info);
        if (!raced) {
            free(pool);
            return status;
        }
    } while (true);
    pool->opened.path = files.path;
    fill_info(pool);
    pms_populate_start(pool);
    if (!pool->populate.running)
        pms_map_read_around(&pool->map, true);
    *out = pool;
    return PMS_OK;
}

/* ---- growth ---- */

static int grow_file(struct pms_pool *pool, struct pms_superblock *super, uint32_t first,
                     struct pms_error *error)
{
    int status = pms_super_format_segments(pool->opened.fd, &pool->persist, super, first, error);
    if (status == PMS_OK)
        status = pms_map_grow(&pool->map, super->file_bytes, error);
    if (status == PMS_OK)
        status = pms_super_write(pool->opened.fd, &pool->persist, super, error);
    if (status != PMS_OK)
        return status; /* the superblock in force does not know the new part */
    /* The other copy too, so that either one may be damaged. Should it not be written, the first
     * is durable, and the next write goes to the copy that failed. */
    struct pms_superblock twin = *super;
    if (pms_super_write(pool->opened.fd, &pool->persist, &twin, error) == PMS_OK)
        *super = twin;
    return PMS_OK;
}

/* The new part begins where the footer is. */
static int grow_beyond_footer(struct pms_pool *pool, struct pms_superblock *super, uint32_t first,
                              struct pms_error *error)
{
    if (!pool->map.footer)
        return grow_file(pool, super, first, error);
    int status = pms_footer_reserve(pool->opened.fd, super->file_bytes, error);
    if (status != PMS_OK)
        return status;
    pms_undo_lock(&pool->undo);
    pms_footer_end(&pool->map);
    pms_undo_unlock(&pool->undo);
    status = grow_file(pool, super, first, error);
    pms_undo_lock(&pool->undo);
    bool in_memory = pool->undo.log.in_memory;
    pms_footer_begin(&pool->map, in_memory ? pool->tx.last : pool->undo.tag,
                     in_memory ? PMS_FOOTER_ALL : pms_undo_entries(&pool->undo));
    pms_undo_unlock(&pool->undo);
    return status;
}

int pms_pool_grow(struct pms_pool *pool, uint64_t bytes, struct pms_error *error)
{
    struct pms_superblock super = pool->super;
    uint32_t first = super.segment_count;
    uint64_t failed_syncs = pool->persist.failed_syncs;
    int status = pms_super_plan_growth(&super, bytes, error);
    if (status == PMS_OK && pool->journal)
        status = pms_journal_drain(pool->journal, error);
    if (status == PMS_OK)
        status = grow_beyond_footer(pool, &super, first, error);
    if (pool->persist.failed_syncs > failed_syncs) {
        /* The file may name the new part or not, so nothing may be written there again: another
         * growth would overwrite its page table. */
        pool->failed = true;
        return PMS_E_OS;
    }
    if (status != PMS_OK)
        return status;
    pms_undo_lock(&pool->undo);
    pool->super = super;
    pms_undo_set_extents(&pool->undo, &pool->super);
    const struct pms_segment *added = &super.segment[first];
    /* formatted beside the log: the next flush has to write it */
    pms_undo_set_changed(&pool->undo, added->table_off, added->log_off - added->table_off);
    pms_undo_unlock(&pool->undo);
    if (pool->journal)
        pms_journal_set_super(pool->journal, &pool->super);
    return pms_heap_add_segment(pool->heap, first, error);
}

/* ---- close ---- */

/* of views made private at once: bounds the memory that close needs beside them */
#define WINDOW_BYTES (1ull << 30)

struct window { /* of the user's view, and what takes its place */
    const struct pms_map *map;
    unsigned char *copy;
    uint64_t from, to;
    bool any;
};

static void copy_into_window(void *ctx, uint64_t off, uint64_t bytes)
{
    struct window *w = ctx;
    uint64_t from = off & ~(uint64_t)(PMS_PAGE - 1),
             to = (off + bytes + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
    from = from > w->from ? from : w->from;
    to = to < w->to ? to : w->to;
    if (from >= to)
        return;
    memcpy(w->copy + (from - w->from), w->map->user + from, to - from);
    w->any = true;
}

/* Live views keep their address and get private pages: what they show is nobody else's any more.
 * One mapping takes the place of all pages of the window, so that a process with any number of
 * views has mappings enough. REQUIRES: all pages protected, the log lock. */
static void make_private(struct pms_pool *pool, uint64_t from, uint64_t to)
{
    struct pms_map *map = &pool->map;
    size_t bytes = (size_t)(to - from);
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    struct window w = {.map = map, .from = from, .to = to};
    w.copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (w.copy == MAP_FAILED)
        return; /* views of this part stay read-only ones of the file */
    pms_heap_each_pin(pool->heap, copy_into_window, &w);
    if (!w.any) {
        munmap(w.copy, bytes);
        /* a wild pointer finds nothing here */
        (void)mmap(map->user + from, bytes, PROT_NONE, flags | MAP_FIXED, -1, 0);
    } else if (mremap(w.copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, map->user + from) ==
               MAP_FAILED) {
        munmap(w.copy, bytes);
    } else {
        /* it is writable: so that a thread that waits in its fault goes on */
        int err = pms_map_unprotect(map, from, bytes);
        PMS_ASSERT(err == 0);
    }
}

static void release_views(struct pms_pool *pool)
{
    struct pms_map *map = &pool->map;
    /* a thread that stores meanwhile waits here, and then finds its page writable */
    pms_undo_lock(&pool->undo);
    pms_map_protect(map, 0, map->bytes);
    for (uint64_t from = 0; from < map->bytes; from += WINDOW_BYTES)
        make_private(pool, from,
                     map->bytes - from < WINDOW_BYTES ? map->bytes : from + WINDOW_BYTES);
    pms_undo_unlock(&pool->undo);
    pms_capture_close(&pool->capture);
    if (map->shared)
        munmap(map->engine, map->reserve);
    map->engine = map->user; /* pms_map_close, at the last unpin, frees the rest */
}

static int finish_writing(struct pms_pool *pool, int commit, struct pms_error *error)
{
    int status = PMS_OK;
    if (pool->failed)
        return pms_fail(error, PMS_E_READONLY, "an earlier failure left unknown what is durable");
    if (commit)
        status = pms_tx_commit(pool, error);
    if (!commit || status != PMS_OK) {
        int undone = pms_tx_rollback(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? undone : status;
    }
    return status;
}

static int mark_clean(struct pms_pool *pool, struct pms_error *error)
{
    int status = PMS_OK;
    if (pool->journal) {
        status = pms_journal_close(pool->journal, false, error);
        pool->journal = NULL;
    }
    if (status != PMS_OK || pool->failed)
        return status;
    /* all data, before the mark that says it is all there */
    errno = pms_persist_sync(&pool->persist, pool->opened.fd);
    if (errno)
        return pms_fail_errno(error, "syncing the store at close");
    /* it is over: a copy that began in it does not have all of its entries */
    pms_footer_note(&pool->map, pool->tx.last, PMS_FOOTER_ALL);
    pool->session.state = PMS_SESSION_CLEAN;
    return pms_session_write(pool->opened.fd, &pool->persist, &pool->session, error);
}

int pms_pool_close(struct pms_pool *pool, int commit, struct pms_error *error)
{
    if (pms_pool_forked(pool)) {
        pool->gate.closed = true; /* the parent's: nothing of it is touched */
        return PMS_OK;
    }
    pthread_mutex_lock(&pool->gate.lock);
    bool half = pool->gate.owner != 0; /* of a block is no state */
    int status = PMS_OK;
    if (pool->gate.closed)
        status = commit ? pms_fail(error, PMS_E_CLOSED, "the store is closed") : PMS_OK;
    else if (half && commit && pms_txblock_of_another_thread(pool))
        status = pms_fail(error, PMS_E_BUSY, "another thread is inside a transaction block");
    if (status != PMS_OK || pool->gate.closed) {
        pthread_mutex_unlock(&pool->gate.lock);
        return status;
    }
    pms_populate_stop(pool);
    if (!pool->opened.read_only)
        status = finish_writing(pool, commit && !half, error);
    if (half && commit && status == PMS_OK)
        status = pms_fail(
            error, PMS_E_STATE,
            "a transaction block was open when the store was closed: all that was written since it was "
            "entered is rolled back");
    pms_landing_disarm(pool);
    pool->gate.closed = true;
    pms_snapshot_detach_all(&pool->undo);
    /* before the clean mark: from here on no thread stores into the file any more */
    release_views(pool);
    if (!pool->opened.read_only) {
        int marked = mark_clean(pool, status == PMS_OK ? error : NULL);
        status = status == PMS_OK ? marked : status;
    }
    pms_footer_close(&pool->map); /* views may live on, but nothing of the file stays mapped */
    pms_heap_close(pool->heap);
    pool->heap = NULL;
    if (pool->tx.runs)
        munmap(pool->tx.runs, pool->tx.runs_room * sizeof *pool->tx.runs);
    pool->tx.runs = NULL;
    pms_undo_close(&pool->undo);
    pms_process_close(pool->opened.fd);
    pms_holder_close(pool->opened.lock_fd); /* last: whoever gets the lock finds a closed store */
    pool->opened.fd = pool->opened.lock_fd = -1;
    pms_txblock_forget(pool);
    pthread_cond_broadcast(&pool->gate.left);
    pthread_mutex_unlock(&pool->gate.lock);
    return status;
}

/* ---- references: the handle and the views ---- */

void pms_pool_unref(struct pms_pool *pool)
{
    pthread_mutex_lock(&pool->gate.lock);
    PMS_ASSERT(pool->refs > 0);
    bool last = --pool->refs == 0;
    pthread_mutex_unlock(&pool->gate.lock);
    if (!last)
        return;
    PMS_ASSERT(pool->gate.closed);
    pms_map_close(&pool->map);
    pthread_cond_destroy(&pool->gate.left);
    pthread_mutex_destroy(&pool->gate.lock);
    free(pool->opened.path);
    free(pool);
}

void pms_pool_release(struct pms_pool *pool)
{
    if (pms_pool_forked(pool))
        return;
    pms_pool_close(pool, 0, NULL);
    pms_pool_unref(pool);
}

int pms_pin(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = pms_heap_pin(pool->heap, data, error);
    if (status == PMS_OK)
        pool->refs++;
    pms_pool_leave(pool);
    return status;
}

int pms_is_live(struct pms_pool *pool, uint64_t data, struct pms_error *error)
{
    if (pms_pool_enter(pool, error) != PMS_OK)
        return 0;
    bool live = pms_heap_live_block(pool->heap, data) != NULL;
    pms_pool_leave(pool);
    return live;
}

void pms_unpin(struct pms_pool *pool, uint64_t data)
{
    if (pms_pool_forked(pool))
        return;
    pthread_mutex_lock(&pool->gate.lock);
    /* after a failure the index may be incomplete, and nothing is allocated any more */
    if (!pool->gate.closed && !pool->failed)
        pms_heap_unpin(pool->heap, data);
    pthread_mutex_unlock(&pool->gate.lock);
    pms_pool_unref(pool);
}

/* ---- facts ---- */

void pms_pool_info(const struct pms_pool *pool, struct pms_info *info)
{
    *info = pool->opened.info;
}

int pms_pool_stats(struct pms_pool *pool, struct pms_stats *stats, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_heap_stats h;
    struct pms_journal_stats j = {0};
    pms_heap_stats(pool->heap, &h);
    if (pool->journal)
        pms_journal_stats(pool->journal, &j);
    *stats = (struct pms_stats){
        .epoch = pms_pool_root(pool)->epoch,
        .tx = pool->tx.last,
        .file_bytes = pool->super.file_bytes,
        .data_bytes = h.data_bytes,
        .used_bytes = h.used_bytes,
        .free_bytes = h.free_bytes,
        .pinned_bytes = h.pinned_bytes,
        .largest_free_bytes = h.largest_free,
        .blocks = h.blocks,
        .log_bytes = pms_undo_capacity(&pool->undo),
        .log_need_bytes = h.log_need,
        .commits = pool->tx.commits,
        .rollbacks = pool->tx.rollbacks,
        .faults = pool->capture.faults,
        .captures = pool->capture.captures,
        .captured_bytes = pool->undo.log.captured_bytes,
        .fences = pool->persist.fences,
        .lines = pool->persist.lines,
        .syncs = pool->persist.syncs,
        .journal_bytes = j.journal_bytes,
        .home_bytes = j.home_bytes,
        .straight_bytes = j.straight_bytes,
        .home_syncs = j.home_syncs,
        .journal_waits = j.waits,
    };
    const struct pms_dirty *d = pms_dirty_first(&pool->undo.dirty);
    for (uint64_t i = 0; i < pool->tx.begun && i < pms_dirty_count(&pool->undo.dirty); i++) {
        stats->hot_ranges += d[i].kind == PMS_DIRTY_HOT;
        stats->hot_bytes += d[i].kind == PMS_DIRTY_HOT ? d[i].len : 0;
    }
    pms_pool_leave(pool);
    return PMS_OK;
}
