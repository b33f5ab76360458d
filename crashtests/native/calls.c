/* The calls of workload.h: the base store, a run, and what a workload does. */
#include "workload.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checksum.h"
#include "commit/resolve.h"
#include "journal/state.h"
#include "trace.h"

/* ---- the store as a number ---- */

static uint32_t digest_list(struct pms_pool *pool, uint64_t list, uint32_t crc)
{
    struct pms_error e;
    uint64_t count = 0;
    if (pms_sequence_count(pool, list, NULL, 0, &count, &e) != PMS_OK)
        return crc ^ 0xbad;
    crc = pms_crc32c(crc, &count, sizeof count);
    for (uint64_t i = 0; i < count; i++) {
        struct pms_object o;
        if (pms_sequence_get(pool, list, NULL, 0, i, 0, &o, &e) != PMS_OK)
            return crc ^ 0xbad;
        crc = pms_crc32c(crc, o.meta, o.meta_bytes);
        if (o.data)
            crc = pms_crc32c(crc, pool->map.user + o.data, o.data_bytes);
    }
    return crc;
}

#define SLOTS_META "\x81\xa5slots" /* and the number of the current one */

#define DEPTH_MOST 16u /* groups within groups: no workload has so many */

/* idle: of slots, the name of the array whose content is of no account; else 0. */
static uint32_t digest_directory(struct pms_pool *pool, uint64_t dir, char idle, uint32_t depth,
                                 uint32_t crc)
{
    uint64_t node = 0;
    struct pms_error e;
    if (depth > DEPTH_MOST) /* a flipped bit can make groups contain each other */
        return crc ^ 0xbad;
    for (;;) {
        struct pms_object o;
        if (pms_object_next(pool, dir, &node, &o, &e) != PMS_OK)
            return crc ^ 0xbad;
        if (node == 0)
            return crc;
        crc = pms_crc32c(crc, o.name, o.name_bytes);
        crc = pms_crc32c(crc, o.meta, o.meta_bytes);
        crc = pms_crc32c(crc, &o.kind, sizeof o.kind);
        bool slots = o.meta_bytes == sizeof SLOTS_META &&
                     memcmp(o.meta, SLOTS_META, sizeof SLOTS_META - 1) == 0;
        if (o.kind == PMS_OBJECT_GROUP)
            crc = digest_directory(pool, o.data, slots ? (char)('1' - o.meta[o.meta_bytes - 1]) : 0,
                                   depth + 1, crc);
        else if (o.kind == PMS_OBJECT_LIST)
            crc = digest_list(pool, o.data, crc);
        else if (o.data && !(idle && o.name[0] == idle))
            crc = pms_crc32c(crc, pool->map.user + o.data, o.data_bytes);
    }
}

static uint32_t digest_at(struct pms_pool *pool, uint64_t epoch)
{
    return digest_directory(pool, 0, 0, 0, pms_crc32c(0, &epoch, sizeof epoch));
}

uint32_t wl_digest(struct pms_pool *pool) { return digest_at(pool, pms_epoch(pool)); }
uint32_t wl_digest_if_committed(struct pms_pool *pool)
{
    return digest_at(pool, pms_epoch(pool) + 1);
}

/* ---- operations ---- */

static struct pms_pool *open_with(const char *path, struct pms_options o, struct pms_error *error)
{
    struct pms_pool *pool = NULL;
    o.size = 1792 << 10;
    o.hot = 1;
    int status = pms_pool_open(path, &o, &pool, error);
    /* an image of a growth: no copy, but its last page is not there yet */
    if (status == PMS_E_COPIED) {
        o.force = 1;
        status = pms_pool_open(path, &o, &pool, error);
    }
    return status == PMS_OK ? pool : NULL;
}

struct pms_pool *wl_open(const char *path, int domain, int mode, struct pms_error *error)
{
    uint64_t max_size = mode == PMS_MODE_TRUNCATE ? TRACE_MAX_FILE : 0;
    return open_with(
        path, (struct pms_options){.max_size = max_size, .mode = mode, .domain = domain}, error);
}

void wl_done(struct wl *w, int status)
{
    if (status != PMS_OK && !w->failed)
        w->status = status;
    if (status != PMS_OK)
        w->failed = true;
}

uint32_t *wl_data(struct wl *w, const char *name, uint64_t *count)
{
    static uint32_t nowhere[1 << 20]; /* where a workload writes after an error */
    struct pms_object o = {0};
    if (!w->failed)
        wl_done(w, pms_object_find(w->pool, 0, name, (uint32_t)strlen(name), &o, &w->error));
    if (count)
        *count = o.data_bytes / 4;
    return w->failed ? nowhere : (uint32_t *)(void *)(w->pool->map.user + o.data);
}

uint64_t wl_array(struct wl *w, uint64_t dir, const char *name, uint32_t n, uint32_t fill)
{
    uint64_t data = 0;
    if (!w->failed)
        wl_done(w, pms_object_put_array(w->pool, dir, name, (uint32_t)strlen(name), "f", 1,
                                        4ull * n, PMS_FILL_PATTERN, &fill, 4, 0, &data, &w->error));
    return data;
}

void wl_value(struct wl *w, uint64_t dir, const char *name, const char *value, uint32_t bytes)
{
    if (!w->failed)
        wl_done(w, pms_object_put_value(w->pool, dir, name, (uint32_t)strlen(name), value, bytes,
                                        &w->error));
}

void wl_remove(struct wl *w, uint64_t dir, const char *name)
{
    if (!w->failed)
        wl_done(w, pms_object_remove(w->pool, dir, name, (uint32_t)strlen(name), &w->error));
}

uint64_t wl_group(struct wl *w, uint64_t dir, const char *name)
{
    uint64_t group = 0;
    if (!w->failed)
        wl_done(w,
                pms_object_group(w->pool, dir, name, (uint32_t)strlen(name), 1, &group, &w->error));
    return group;
}

void wl_declare(struct wl *w, const char *const *names, unsigned count)
{
    struct pms_range r[8];
    for (unsigned i = 0; i < count && i < 8; i++) {
        uint64_t n;
        r[i].addr = (uint64_t)(uintptr_t)wl_data(w, names[i], &n);
        r[i].bytes = 4 * n;
    }
    if (!w->failed)
        wl_done(w, pms_will_write(w->pool, r, count, &w->error));
}

void wl_write(struct wl *w, const char *name, uint32_t at, uint32_t value)
{
    uint32_t *p = wl_data(w, name, NULL) + at;
    struct pms_range r = {(uint64_t)(uintptr_t)p, sizeof value};
    if (!w->failed)
        wl_done(w, pms_will_write(w->pool, &r, 1, &w->error));
    if (!w->failed)
        *p = value;
}

/* ---- transactions: their marks are what the oracle goes by ---- */

static void commit_begins(struct wl *w)
{
    uint32_t n = atomic_load(&w->board->acked) + 1;
    trace_mark(TR_BEGIN, n);
    atomic_store(&w->board->begun, n);
}

static void commit_ended(struct wl *w, int status)
{
    wl_done(w, status);
    if (w->failed) {
        atomic_store(&w->board->failed_in_commit, 1);
        return;
    }
    uint32_t n = atomic_load(&w->board->begun);
    if (w->keep_states && n < STATES_MAX) {
        w->board->state[n] = wl_digest(w->pool);
        atomic_store(&w->board->states, n + 1);
    }
    atomic_store(&w->board->acked, n);
    trace_mark(TR_ACK, n);
}

void wl_commit_by(struct wl *w, int (*commit)(struct wl *w, void *arg), void *arg)
{
    if (w->failed)
        return;
    commit_begins(w);
    commit_ended(w, commit(w, arg));
}

static int plain_commit(struct wl *w, void *arg)
{
    (void)arg;
    return pms_commit(w->pool, &w->error);
}

void wl_commit(struct wl *w) { wl_commit_by(w, plain_commit, NULL); }

void wl_begin(struct wl *w)
{
    if (w->failed)
        return;
    bool commits = pms_txblock_depth(w->pool) == 0 && pms_tx_pending(w->pool);
    if (commits)
        commit_begins(w);
    int status = pms_begin(w->pool, -1, &w->error);
    if (commits)
        commit_ended(w, status);
    else
        wl_done(w, status);
}

void wl_end(struct wl *w, bool commit)
{
    if (w->failed)
        return;
    bool commits = commit && pms_txblock_depth(w->pool) == 1;
    if (commits)
        commit_begins(w);
    int status = pms_end(w->pool, commit, &w->error);
    if (commits)
        commit_ended(w, status);
    else
        wl_done(w, status);
}

void wl_rollback(struct wl *w)
{
    if (!w->failed)
        wl_done(w, pms_rollback(w->pool, &w->error));
}

static void open_again(struct wl *w, struct pms_options o)
{
    char path[300];
    if (w->failed)
        return;
    o.domain = (int)w->pool->opened.domain;
    o.mode = PMS_MODE_READ_WRITE;
    snprintf(path, sizeof path, "%s", w->pool->opened.path);
    w->closing = true;
    wl_done(w, pms_pool_close(w->pool, 0, &w->error));
    w->closing = false;
    pms_pool_release(w->pool);
    w->pool = NULL;
    if (w->failed)
        return;
    w->pool = open_with(path, o, &w->error);
    if (!w->pool)
        wl_done(w, w->error.status ? w->error.status : PMS_E_STATE);
}

void wl_reopen(struct wl *w)
{
    if (w->failed)
        return;
    bool small = w->pool->super.max_bytes == TRACE_MAX_FILE; /* another limit each time */
    open_again(w, (struct pms_options){.max_size = TRACE_MAX_FILE - (small ? PMS_PAGE : 0)});
}

void wl_reopen_holding(struct wl *w) { open_again(w, (struct pms_options){.hold = 1}); }

static int go_back(struct wl *w, void *arg)
{
    (void)arg;
    return pms_back(w->pool, &w->error);
}

void wl_back(struct wl *w) { wl_commit_by(w, go_back, NULL); }

void wl_make_base(const char *path, int domain)
{
    static struct board board;
    struct wl w = {.board = &board};
    w.pool = wl_open(path, domain, PMS_MODE_TRUNCATE, &w.error);
    if (!w.pool) {
        printf("cannot make %s: %s\n", path, w.error.what);
        exit(2);
    }
    wl_array(&w, 0, "keep", 16, 1);
    wl_array(&w, 0, "medium", 3000, 2);
    wl_array(&w, 0, "large", 20000, 3);
    wl_value(&w, 0, "value", "one", 3);
    wl_array(&w, wl_group(&w, 0, "group"), "x", 100, 4);
    wl_commit(&w);
    if (w.failed || pms_pool_close(w.pool, 0, &w.error) != PMS_OK)
        exit(2);
    pms_pool_release(w.pool);
}

static struct wl *running; /* for trace_may_run */
static bool journal_is_wanted(void)
{
    struct pms_journal *j = running && running->pool ? running->pool->journal : NULL;
    if (!j)
        return true;
    pthread_mutex_lock(&j->mutex);
    bool wanted = j->wanted || j->stop;
    pthread_mutex_unlock(&j->mutex);
    return wanted;
}

void wl_run(const struct workload *workload, const char *path, int domain, struct board *board,
            bool keep_states, struct wl *w)
{
    *w = (struct wl){.board = board, .keep_states = keep_states};
    running = w;
    trace_may_run = journal_is_wanted;
    w->pool = wl_open(path, domain, PMS_MODE_READ_WRITE, &w->error);
    if (!w->pool) {
        wl_done(w, w->error.status ? w->error.status : PMS_E_STATE);
        return;
    }
    atomic_store(&board->opened, 1);
    if (keep_states) {
        board->state[0] = wl_digest(w->pool);
        atomic_store(&board->states, 1);
    }
    workload->run(w);
    struct pms_error ignored;
    bool failed_before = w->failed;
    w->closing = true;
    int status = w->pool ? pms_pool_close(w->pool, 0, failed_before ? &ignored : &w->error)
                         : PMS_OK;
    if (!failed_before)
        wl_done(w, status);
    running = NULL;
    if (w->pool)
        pms_pool_release(w->pool);
    w->pool = NULL;
}
