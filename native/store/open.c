/* Opening a store, step by step, in this order:
 *
 *    1  find      the file, or a new one beside the path under a name of its own; its lock
 *    2  format    new: segments, session record, superblock last
 *    3  read      superblock and session record
 *       beside    reader without the lock: does anybody write? then that process shows it
 *    4  judge     may it be torn since the machine restarted? then it is refused
 *    5  choose    the domain: how stores reach the medium
 *    6  fill      writer: room on the disk for the file's holes, but for the logs
 *    7  recover   writer: the last commit, in the file, under the log that is to be in force
 *    8  limit     writer: another limit of growth
 *    9  whole     writer: logs that were cut in halves are whole again
 *   10  plan      writer: this session's record, in memory alone; room for a footer
 *   11  map       the views
 *   12  show      reader: the last commit, in private pages, or as the writer tells it
 *   13  footer    writer: kept from here on
 *   14  journal   domain file: the thread that writes home; memory for commits
 *   15  engine    log, heap, capture: memory alone, and room on the disk for as much of the logs as
 *                 the blocks need; reader: all names and descriptions
 *   16  hold      writer: what the held version needs stays; room for two transactions' logs, which
 *                 are cut in halves
 *   17  memory    writer: may all of the view be written?
 *   18  begin     writer: the session record says that the store is open
 *   19  start     writer: the first transaction, which captures what every commit changes
 *   20  root      new: the root directory, committed
 *   21  publish   new: the file gets the name
 *
 * Crash in 1 or 2 => a file under a name that nobody asks for and nobody locks: the next creator
 * removes it. So it stays for a new store up to 21, whose rename gives the path the whole store or
 * leaves there what was. The others:
 *    6 => some holes are filled; no byte that can be read has changed
 *    7 => the next open does it again, to the same end
 *    8 => the old superblock holds, or the new one
 *    9 => the logs, which are empty but for what is held, are of either kind
 *   10 => the file may be a page longer than its superblock says
 *   13 => the footer names the last transaction, which is over: it is no part of the state
 *   14 => a page of the ring is written as it was, to try how it can be written
 *   16 => the store has grown by a segment, or not; then as in 9
 *   18 => one copy of the record, or both, say that the store was left open: the next open finds
 *         logs that hold nothing
 *   19 => entries of what is there anyway: the next open puts them back, and nothing changes
 *   15 => some holes in the logs are filled
 * In 3 to 5, 11, 12 and 17 nothing is stored. A reader stores nothing at all. */
#include "store/open.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/pages.h"
#include "commit/fork.h"
#include "commit/relief.h"
#include "commit/runs.h"
#include "commit/tx.h"
#include "crash/debug.h"
#include "seam/footer.h"
#include "store/close.h"
#include "store/filelock.h"
#include "store/grow.h"
#include "store/job.h"
#include "store/populate.h"
#include "store/recover.h"
#include "store/room.h"
#include "store/session.h"
#include "store/show.h"

#define BESIDE_TRIES 200u
#define BESIDE_NS 5000000l /* between two of them: a writer that begins needs no longer */

struct opening {
    struct pms_pool *pool;
    const char *path;
    const struct pms_options *options;
    struct pms_files files;
};

static int find(struct opening *o, struct pms_error *error)
{
    struct pms_opened *opened = &o->pool->opened;
    int status = pms_files_open(&o->files, o->path, o->options, error);
    opened->fd = o->files.fd;
    opened->lock_fd = o->files.lock_fd;
    opened->read_only = o->options->mode == PMS_MODE_READ;
    opened->forced = o->options->force != 0;
    opened->before = opened->read_only && !o->options->beside && o->options->before;
    opened->info.created = o->files.created;
    if (status == PMS_OK && pms_debug_board)
        pms_debug_file(o->pool, opened->fd);
    return status;
}

static int format(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    uint64_t bytes = o->options->size ? o->options->size : PMS_DEFAULT_SIZE;
    int status = pms_super_plan(&pool->super, bytes, o->options->max_size,
                                (enum pms_domain)o->options->domain,
                                o->options->hold ? PMS_FEATURE_HOLD : 0, error);
    return status == PMS_OK ? pms_super_format(pool->opened.fd, &pool->persist, &pool->super, error)
                            : status;
}

static int read_head(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    int status = pms_super_read(pool->opened.fd, &pool->super, error);
    if (status != PMS_OK)
        return status;
    off_t end = lseek(pool->opened.fd, 0, SEEK_END);
    if (end < 0 || (uint64_t)end < pool->super.file_bytes) {
        status = pms_fail(error, PMS_E_CORRUPT, "the file is shorter than its superblock says");
        if (error) {
            error->needed = pool->super.file_bytes;
            error->available = end < 0 ? 0 : (uint64_t)end;
        }
        return status;
    }
    status = pms_session_read(pool->opened.fd, &pool->session, error);
    if (status == PMS_OK)
        pool->persist.log_seed = pms_session_seed(&pool->session);
    return status;
}

/* Of the file, the superblock is read once more: a writer that has ended since may have grown it.
 */
static int beside(struct opening *o, struct pms_error *error)
{
    if (!o->options->beside)
        return PMS_OK;
    int status = pms_show_choose(o->pool, &o->files, o->options->keep != 0, error);
    return status == PMS_OK && o->pool->sight.of == PMS_SIGHT_OF_FILE ? read_head(o, error)
                                                                      : status;
}

/* of a writer: it has the store, and recovered it */
static bool is_shown(const struct opening *o) { return o->pool->sight.of == PMS_SIGHT_OF_WRITER; }

static int judge(struct opening *o, struct pms_error *error)
{
    if (is_shown(o))
        return PMS_OK;
    return pms_session_check(o->pool, o->options, error);
}

static int choose_domain(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    (void)error;
    pool->opened.domain = pms_domain_choose(pool->opened.fd, (enum pms_domain)o->options->domain,
                                            (enum pms_domain)pool->super.domain);
    pool->persist.flush = pms_domain_flush(pool->opened.domain);
    return PMS_OK;
}

/* Before recovery, which stores too. */
static int fill_holes(struct opening *o, struct pms_error *error)
{
    return pms_room_fill_holes(o->pool, error);
}

static int recover(struct opening *o, struct pms_error *error)
{
    return pms_recover_file(o->pool, error);
}

static int set_limit(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    uint64_t max_bytes = o->options->max_size;
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

static bool in_halves(const struct pms_pool *pool)
{
    return pool->super.features_incompat & PMS_FEATURE_HOLD;
}

/* While the logs are empty. */
static int make_logs_whole(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    if (o->options->hold || pool->hold.tag || !in_halves(pool))
        return PMS_OK;
    struct pms_superblock super = pool->super;
    super.features_incompat &= ~PMS_FEATURE_HOLD;
    int status = pms_super_write_both(pool->opened.fd, &pool->persist, &super, error);
    if (status == PMS_OK)
        pool->super = super;
    return status;
}

static int plan_session(struct opening *o, struct pms_error *error)
{
    return pms_session_plan(o->pool, error);
}

static int map_views(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    enum pms_map_how how = PMS_MAP_SHARED;
    if (pool->opened.read_only || pool->opened.domain == PMS_DOMAIN_FILE)
        how = PMS_MAP_PRIVATE;
    else if (pool->opened.domain == PMS_DOMAIN_DAX)
        how = PMS_MAP_SYNC;
    uint64_t reserve = pool->sight.of == PMS_SIGHT_NONE ? pms_room_address_space(pool) : 0;
    int status = pms_map_open(&pool->map, is_shown(o) ? -1 : pool->opened.fd,
                              pool->super.file_bytes, reserve, how, &pool->persist, error);
    if (status == PMS_OK)
        pms_map_read_around(&pool->map, false); /* an open reads a page here and there */
    return status;
}

static int show(struct opening *o, struct pms_error *error)
{
    return pms_show_begin(o->pool, error);
}

static int begin_footer(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    (void)error;
    if (pool->session.footer)
        pms_footer_begin(&pool->map, pms_pool_home(pool), PMS_FOOTER_ALL);
    return PMS_OK;
}

static int open_journal(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    if (pool->opened.domain != PMS_DOMAIN_FILE)
        return PMS_OK;
    int status = pms_journal_open(&pool->journal, &pool->map, &pool->super, pool->tx.last, error);
    if (status != PMS_OK)
        return status;
    pms_relief_begin(pool);
    return pms_runs_open(pool, error);
}

static int start_engine(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    int status = pms_undo_open(&pool->undo, &pool->map, !pool->map.shared, error);
    if (status != PMS_OK)
        return status;
    struct pms_backing *backing = &pool->undo.charge.backing;
    if (!pool->opened.read_only)
        pms_backing_open(backing, pool->opened.fd, pool->map.shared ? &pool->map : NULL,
                         &pool->persist, pool->persist.flush != PMS_FLUSH_NONE);
    pms_undo_set_extents(&pool->undo, &pool->super);
    pms_backing_trust(backing, pool->opened.backed);
    pms_backing_tell(backing, pms_footer_told(&pool->map));
    if (pool->journal && pool->hold.tag) {
        pms_undo_begin(&pool->undo, pool->hold.tag);
        status = pms_journal_show_held(pool->journal, &pool->undo, &pool->super, error);
    }
    if (status != PMS_OK)
        return status;
    status = pms_heap_open(&pool->heap, &pool->undo, &pool->super, error);
    if (status == PMS_OK)
        status = pms_room_back_logs(pool, error);
    return status == PMS_OK
               ? pms_capture_open(&pool->capture, &pool->undo, pool->heap, &pool->super,
                                  pool->opened.read_only, o->options->hot != 0, error)
               : status;
}

static int show_names(struct opening *o, struct pms_error *error)
{
    return pms_show_names(o->pool, error);
}

static int begin_hold(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
    int status = pool->hold.tag ? pms_heap_hold(pool->heap, pool->hold.tag, error) : PMS_OK;
    if (status == PMS_OK && (in_halves(pool) || o->options->hold)) /* made, or filled, without */
        status = pms_pool_grow_for_halves(pool, error);
    if (status != PMS_OK || in_halves(pool) || !o->options->hold)
        return status;
    status = pms_halves_publish(pool, error); /* the logs are empty */
    if (status == PMS_OK)
        pms_undo_set_extents(&pool->undo, &pool->super);
    return status;
}

static int check_memory(struct opening *o, struct pms_error *error)
{
    return pms_room_check_memory(o->pool, error);
}

static int begin_session(struct opening *o, struct pms_error *error)
{
    return pms_session_begin(o->pool, error);
}

static int start_transaction(struct opening *o, struct pms_error *error)
{
    (void)error;
    pms_tx_start(o->pool);
    return PMS_OK;
}

/* So that no reader ever finds a store without one. */
static int make_root(struct opening *o, struct pms_error *error)
{
    struct pms_pool *pool = o->pool;
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

static int publish(struct opening *o, struct pms_error *error)
{
    return pms_files_publish(&o->files, error);
}

static int confirm(struct opening *o, struct pms_error *error)
{
    return o->pool->opened.info.created ? PMS_OK : pms_files_confirm(&o->files, error);
}

enum who { ALL, WRITER, READER, NEW };

static const struct step {
    int (*run)(struct opening *o, struct pms_error *error);
    enum who who;
} steps[] = {
    {find, ALL},
    {format, NEW},
    {read_head, ALL},
    {beside, READER},
    {judge, ALL},
    {choose_domain, ALL},
    {fill_holes, WRITER},
    {recover, WRITER},
    {set_limit, WRITER},
    {make_logs_whole, WRITER},
    {plan_session, WRITER},
    {map_views, ALL},
    {show, READER},
    {begin_footer, WRITER},
    {open_journal, WRITER},
    {start_engine, ALL},
    {show_names, READER},
    {begin_hold, WRITER},
    {check_memory, WRITER},
    {begin_session, WRITER},
    {start_transaction, WRITER},
    {make_root, NEW},
    {publish, NEW},
    {confirm, WRITER},
};

static bool takes_part(const struct pms_opened *opened, enum who who)
{
    return who == ALL || (who == NEW && opened->info.created) ||
           (who != NEW && opened->read_only == (who == READER));
}

static int run_steps(struct opening *o, struct pms_error *error)
{
    int status = PMS_OK;
    for (size_t i = 0; i < sizeof steps / sizeof *steps && status == PMS_OK; i++)
        if (takes_part(&o->pool->opened, steps[i].who))
            status = steps[i].run(o, error);
    return status;
}

/* An open that failed: as it was before the first step. */
static void take_back(struct opening *o)
{
    struct pms_pool *pool = o->pool;
    pms_capture_close(&pool->capture);
    if (pool->journal)
        pms_journal_close(pool->journal, false, NULL);
    pool->journal = NULL;
    pms_close_engine(pool);
    pms_sight_close(&pool->sight);
    pms_map_close(&pool->map);
    pms_files_close(&o->files);
    memset(&pool->opened.info, 0, sizeof pool->opened.info);
}

/* What pms_pool_info tells from now on. */
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
    info->beside = (int32_t)pool->sight.of;
}

/* Readers in other processes may come now. */
static void offer(struct pms_pool *pool)
{
    if (pool->opened.read_only)
        return;
    struct stat st;
    if (fstat(pool->opened.fd, &st) != 0)
        return;
    pool->served = (struct pms_served){.undo = &pool->undo,
                                       .super = &pool->super,
                                       .epoch = &pool->tx.epoch,
                                       .device = st.st_dev,
                                       .inode = st.st_ino,
                                       .opened_ns = pool->session.opened_ns};
    memcpy(pool->served.secret, pool->session.secret, sizeof pool->served.secret);
    pms_serve(&pool->served);
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

static struct pms_pool *new_pool(void)
{
    struct pms_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    init_locks(pool);
    pool->gate.process = pms_process_generation();
    pool->refs = 1;
    return pool;
}

/* A reader's open that failed because a writer came, went or was too fast: it is tried again. */
static bool is_passing(const struct opening *o, int status, bool changed)
{
    if (o->pool->sight.silent || o->pool->sight.interrupted)
        return false;
    struct timespec pause = {0, BESIDE_NS};
    bool again = o->options->mode == PMS_MODE_READ && o->options->beside &&
                 (changed || status == PMS_E_LOST || status == PMS_E_LOCKED);
    if (again)
        nanosleep(&pause, NULL);
    return again;
}

int pms_pool_open(const char *path, const struct pms_options *options, struct pms_pool **out,
                  struct pms_error *error)
{
    struct pms_options own = *options;
    *out = NULL;
    if (own.mode < PMS_MODE_READ || own.mode > PMS_MODE_EXCLUSIVE || own.domain < PMS_DOMAIN_AUTO ||
        own.domain > PMS_DOMAIN_EMULATED)
        return pms_fail(error, PMS_E_INVALID, "no such mode or domain");
    struct opening o = {.pool = new_pool(), .path = path, .options = &own};
    if (!o.pool)
        return pms_fail_errno(error, "allocating memory");
    pms_fork_prepare_once();
    pms_debug_opened(path);
    pms_parallel_start();
    int status;
    uint32_t tries = 0;
    while ((status = run_steps(&o, error)) != PMS_OK) {
        bool changed = pms_sight_is_old(&o.pool->sight, 0);
        take_back(&o);
        if (status == PMS_E_EXISTS &&
            (own.mode == PMS_MODE_APPEND || own.mode == PMS_MODE_TRUNCATE))
            continue; /* somebody else created it meanwhile: open, or replace, that one */
        if (is_passing(&o, status, changed) && tries++ < BESIDE_TRIES)
            continue;
        free(o.pool);
        return status;
    }
    o.pool->opened.path = o.files.path;
    o.pool->hold.on = own.hold ? PMS_HELD_FOR_STORE
                               : PMS_HELD_NOT; /* from the first commit of the user's on */
    atomic_store(&o.pool->tx.epoch, pms_pool_root(o.pool)->epoch);
    fill_info(o.pool);
    offer(o.pool);
    if (o.pool->sight.of == PMS_SIGHT_NONE)
        pms_populate_start(o.pool);
    if (!o.pool->populate.running)
        pms_map_read_around(&o.pool->map, true);
    *out = o.pool;
    return PMS_OK;
}
