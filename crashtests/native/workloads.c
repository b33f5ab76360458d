#include "workload.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/checksum.h"
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

static struct pms_pool *open_limited(const char *path, int domain, int mode, uint64_t max_size,
                                     struct pms_error *error)
{
    struct pms_options o = {
        .size = 1792 << 10, .max_size = max_size, .mode = mode, .domain = domain, .hot = 1};
    struct pms_pool *pool = NULL;
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
    return open_limited(path, domain, mode, mode == PMS_MODE_TRUNCATE ? TRACE_MAX_FILE : 0, error);
}

void wl_done(struct wl *w, int status)
{
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

/* A copy of these bytes. */
static void array_of(struct wl *w, const char *name, const void *src, uint64_t bytes)
{
    uint64_t data;
    if (!w->failed)
        wl_done(w, pms_object_put_array(w->pool, 0, name, (uint32_t)strlen(name), "f", 1, bytes,
                                        PMS_FILL_COPY, src, bytes, 0, &data, &w->error));
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
    uint32_t *p = wl_data(w, name, NULL);
    if (!w->failed)
        wl_done(w, pms_write(w->pool, p + at, &value, sizeof value, &w->error));
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

void wl_reopen(struct wl *w)
{
    char path[300];
    if (w->failed)
        return;
    int domain = (int)w->pool->opened.domain;
    snprintf(path, sizeof path, "%s", w->pool->opened.path);
    /* another one */
    uint64_t limit = w->pool->super.max_bytes == TRACE_MAX_FILE ? TRACE_MAX_FILE - PMS_PAGE
                                                                : TRACE_MAX_FILE;
    wl_done(w, pms_pool_close(w->pool, 0, &w->error));
    pms_pool_release(w->pool);
    w->pool = open_limited(path, domain, PMS_MODE_READ_WRITE, limit, &w->error);
    if (!w->pool)
        w->failed = true;
}

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
        w->failed = true;
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
    int status = w->pool ? pms_pool_close(w->pool, 0, failed_before ? &ignored : &w->error)
                         : PMS_OK;
    if (!failed_before)
        wl_done(w, status);
    running = NULL;
    if (w->pool)
        pms_pool_release(w->pool);
    w->pool = NULL;
}

/* ================================================================ the workloads
 * ================================================ */

static void write_small(struct wl *w)
{
    wl_data(w, "keep", NULL)[3] = 99;
    wl_commit(w);
}

/* the same line in two transactions: the log of each is whole while it is needed */
static void write_twice(struct wl *w)
{
    wl_data(w, "keep", NULL)[0] = 1;
    wl_commit(w);
    wl_data(w, "keep", NULL)[0] = 2;
    wl_data(w, "keep", NULL)[1] = 2;
    wl_commit(w);
}

static void write_all(struct wl *w)
{
    uint64_t n;
    uint32_t *large = wl_data(w, "large", &n);
    for (uint32_t i = 0; i < n; i++)
        large[i] = i;
    memset(wl_data(w, "medium", NULL), 7, 12000);
    wl_data(w, "keep", NULL)[0] = 5;
    wl_value(w, 0, "value", "two", 3);
    wl_commit(w);
}

static void write_nothing(struct wl *w)
{
    (void)wl_data(w, "keep", NULL);
    wl_commit(w);
    wl_rollback(w);
    wl_commit(w);
}

static void uncommitted(struct wl *w) /* written, and never committed: close rolls back */
{
    memset(wl_data(w, "medium", NULL), 9, 4000);
    wl_value(w, 0, "value", "never", 5);
    wl_array(w, 0, "never", 3000, 1);
}

static void hot(struct wl *w)
{
    for (uint32_t i = 0; i < 10; i++) {
        wl_data(w, "keep", NULL)[i] = i + 100;
        wl_value(w, 0, "value", i % 2 ? "odd" : "evn", 3);
        wl_commit(w);
    }
}

static void hot_and_back(struct wl *w) /* hot ranges under a roll back, and one that cools */
{
    for (uint32_t i = 0; i < 6; i++) {
        wl_data(w, "keep", NULL)[i] = i + 100;
        wl_data(w, "medium", NULL)[i] = i;
        wl_commit(w);
    }
    wl_data(w, "keep", NULL)[2] = 1;
    wl_data(w, "medium", NULL)[2] = 1;
    wl_rollback(w);
    wl_data(w, "medium", NULL)[3] = 4;
    wl_commit(w);
}

static void declared(struct wl *w)
{
    wl_declare(w, (const char *const[]){"medium", "keep"}, 2);
    memset(wl_data(w, "medium", NULL), 1, 12000);
    memset(wl_data(w, "keep", NULL), 2, 64);
    wl_commit(w);
}

static void scattered(struct wl *w) /* small writes that the engine does */
{
    for (uint32_t i = 0; i < 12; i++)
        wl_write(w, "large", i * 1537, i);
    wl_write(w, "keep", 3, 8);
    wl_commit(w);
    wl_write(w, "keep", 3, 9);
    wl_rollback(w);
    wl_write(w, "keep", 4, 9);
    /* the page is captured with what the engine has just stored there: the granule's older
     * pre-image is the true one */
    wl_data(w, "keep", NULL)[5] = 10;
    wl_rollback(w);
    wl_write(w, "keep", 4, 11);
    wl_data(w, "keep", NULL)[5] = 12;
    wl_commit(w);
}

static void values(struct wl *w)
{
    char text[6000];
    memset(text, 'x', sizeof text);
    wl_value(w, 0, "value", "a", 1);
    wl_value(w, 0, "new", "b", 1);
    wl_commit(w);
    wl_value(w, 0, "value", text, sizeof text);
    wl_commit(w);
    wl_value(w, 0, "value", "c", 1);
    wl_remove(w, 0, "new");
    wl_commit(w);
}

static void allocate(struct wl *w)
{
    wl_array(w, 0, "n1", 10, 11);
    wl_commit(w);
    wl_array(w, 0, "n2", 9000, 12);
    wl_commit(w);
}

static void release(struct wl *w)
{
    wl_remove(w, 0, "medium");
    wl_commit(w);
    wl_remove(w, 0, "large");
    wl_commit(w);
}

/* under the same name; freed space is used again one transaction later */
static void replace(struct wl *w)
{
    wl_array(w, 0, "medium", 3100, 13);
    wl_data(w, "medium", NULL)[0] = 1;
    wl_commit(w);
    wl_array(w, 0, "medium", 3000, 14);
    wl_data(w, "medium", NULL)[2999] = 1;
    wl_commit(w);
    wl_array(w, 0, "other", 3000, 15);
    wl_commit(w);
}

static void groups(struct wl *w)
{
    uint64_t h = wl_group(w, wl_group(w, 0, "g"), "h");
    wl_array(w, h, "deep", 700, 1);
    wl_commit(w);
    wl_remove(w, 0, "g");
    wl_remove(w, 0, "group");
    wl_commit(w);
}

static void many_names(struct wl *w) /* the directory's table grows */
{
    char name[16];
    for (int i = 0; i < 70; i++) {
        snprintf(name, sizeof name, "name%d", i);
        wl_value(w, 0, name, "v", 1);
    }
    wl_commit(w);
    for (int i = 0; i < 70; i += 2) {
        snprintf(name, sizeof name, "name%d", i);
        wl_remove(w, 0, name);
    }
    wl_commit(w);
}

static void grow(struct wl *w)
{
    wl_data(w, "keep", NULL)[1] = 1;
    wl_array(w, 0, "huge", 120000, 9);
    wl_data(w, "huge", NULL)[99999] = 1;
    wl_commit(w);
    wl_data(w, "huge", NULL)[5] = 6;
    wl_commit(w);
}

/* of pages: longer than what the journal's recovery replays at a time */
static void long_run(struct wl *w)
{
    wl_array(w, 0, "huge", 300000, 9);
    wl_commit(w);
    memset(wl_data(w, "huge", NULL), 5, 1200000);
    wl_commit(w);
}

static void roll_back(struct wl *w)
{
    wl_begin(w);
    memset(wl_data(w, "large", NULL), 9, 60000);
    wl_array(w, 0, "gone", 3000, 1);
    wl_remove(w, 0, "value");
    wl_end(w, false);
    wl_data(w, "keep", NULL)[2] = 77;
    wl_commit(w);
}

/* more entries than a roll back without memory takes at a time */
static void long_back(struct wl *w)
{
    for (uint32_t i = 0; i < 300; i++)
        wl_write(w, "large", i * 61, i);
    wl_rollback(w);
    wl_data(w, "keep", NULL)[2] = 77;
    wl_commit(w);
}

static void nested(struct wl *w)
{
    wl_data(w, "keep", NULL)[5] = 1; /* pending: entering the block commits it */
    wl_begin(w);
    wl_data(w, "keep", NULL)[6] = 1;
    wl_begin(w);
    wl_value(w, 0, "value", "inner", 5);
    wl_end(w, true);
    wl_data(w, "medium", NULL)[7] = 1;
    wl_end(w, true);
}

static void reopen(struct wl *w) /* closed with something pending, and opened again */
{
    for (uint32_t i = 0; i < 3; i++) {
        wl_data(w, "keep", NULL)[i] = i + 7;
        wl_array(w, 0, "again", 200 + i, i);
        wl_commit(w);
        memset(wl_data(w, "medium", NULL), 9, 4000);
        wl_reopen(w);
    }
}

static void born_and_gone(struct wl *w) /* born and freed in one transaction, again and again */
{
    for (uint32_t i = 0; i < 8; i++)
        wl_array(w, 0, "short", 40 + i, i);
    wl_remove(w, 0, "short");
    wl_array(w, 0, "last", 20, 5);
    wl_commit(w);
}

/* in a page with committed blocks, of which nothing else changes */
static void born_beside(struct wl *w)
{
    for (uint32_t i = 0; i < 3; i++) {
        char name[2] = {(char)('p' + i), 0}, text[400];
        memset(text, 'y', sizeof text);
        if (i == 2)
            array_of(w, name, text, sizeof text);
        else
            wl_array(w, 0, name, 100, i);
        wl_commit(w);
    }
}

/* the ring of domain file goes round; both fast logs are used again */
static void many_commits(struct wl *w)
{
    char text[8];
    for (uint32_t i = 0; i < 24; i++) {
        wl_data(w, i % 3 ? "medium" : "keep", NULL)[i % 13] = i;
        snprintf(text, sizeof text, "%03u", i);
        wl_value(w, 0, i % 2 ? "value" : "counter", text, 3);
        if (i % 5 == 4)
            wl_rollback(w);
        wl_commit(w);
    }
}

/* A log that outgrew the fast log, twice in a row: the second must not end before the first is
 * finished. */
static void long_log(struct wl *w)
{
    for (uint32_t round = 0; round < 2; round++) {
        uint64_t n;
        uint32_t *large = wl_data(w, "large", &n);
        for (uint32_t i = 0; i < n; i += 200)
            large[i] = round * 1000 + i;
        memset(wl_data(w, "medium", NULL), (int)round + 4, 12000);
        wl_array(w, 0, "more", 12000, round);
        wl_data(w, "more", NULL)[0] = 1;
        wl_commit(w);
    }
    wl_data(w, "more", NULL)[1] = 2;
    memset(wl_data(w, "large", NULL), 3, 70000);
    wl_rollback(w);
    wl_data(w, "keep", NULL)[9] = 3;
    wl_commit(w);
}

const struct workload wl_table[] = {
    {"write_small", write_small, false, 0},
    {"write_twice", write_twice, false, 0},
    {"write_all", write_all, false, 0},
    {"write_nothing", write_nothing, false, 0},
    {"uncommitted", uncommitted, false, 0},
    {"hot", hot, false, 0},
    {"hot_and_back", hot_and_back, false, 0},
    {"declared", declared, false, 0},
    {"scattered", scattered, false, 0},
    {"values", values, false, 0},
    {"allocate", allocate, false, 0},
    {"release", release, false, 0},
    {"replace", replace, false, 0},
    {"groups", groups, false, 0},
    {"many_names", many_names, false, 0},
    {"grow", grow, false, 0},
    {"long_run", long_run, false, 0},
    {"roll_back", roll_back, false, 0},
    {"long_back", long_back, false, 0},
    {"nested", nested, false, 0},
    {"born_and_gone", born_and_gone, false, 0},
    {"born_beside", born_beside, false, 0},
    {"threads", wl_threads, false, 0},
    {"faults_between", wl_faults_between, false, 0},
    {"turns", wl_turns, false, 0},
    {"all_cores", wl_all_cores, false, 700},
    {"many_commits", many_commits, false, 0},
    {"long_log", long_log, false, 0},
    {"slots", wl_slots, false, 0},
    {"list_edits", wl_list_edits, false, 0},
    {"list_splits", wl_list_splits, false, 0},
    {"slots_flip", wl_slots_flip, false, 0},
    {"slots_back", wl_slots_back, false, 0},
    {"slots_beside", wl_slots_beside, false, 0},
    {"slots_small", wl_slots_small, false, 0},
    {"slots_freed", wl_slots_freed, false, 0},
    {"history", wl_history, false, 0},
    {"flush", wl_flush, false, 0},
    {"slots_flush", wl_slots_flush, false, 0},
    {"grow_beside", wl_grow_beside, false, 0},
    {"grow_between", wl_grow_between, false, 0},
    {"mirrors", wl_mirrors, false, 0},
    {"fork", wl_fork, false, 0},
    {"repair", wl_repair, true, 0},
    {"reopen", reopen, false, 0},
    {"churn", wl_churn, false, 0},
    {"pins", wl_pins, false, 0},
    {"mixture_1", wl_mixture_1, false, 0},
    {"mixture_2", wl_mixture_2, false, 0},
    {"mixture_3", wl_mixture_3, false, 0},
    {"script", wl_script, false, 0},
};
const unsigned wl_count = sizeof wl_table / sizeof wl_table[0];
