/* Snapshots against a model: readers at their own pace, while a writer stores, allocates, frees,
 * commits and rolls back. Whatever a reader gets of a live array is, byte for byte, what the
 * last commit before its snapshot held. */
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "flush/filling.h"
#include "commit/pool_state.h"
#include "store/store.h"
#include "store/grow.h"
#include "log/snapshot_state.h"
#include "declared.h"
#include "test.h"
#include "flush/chunks.h"

#define NAMES 24
#define READERS 3
#define CHUNK (64u << 10)
#ifdef __SANITIZE_THREAD__
#define SHARE 4 /* of the steps: everything is that much slower */
#else
#define SHARE 1
#endif

static char path[256], chunks_path[300], restored_path[300];
static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
static int domain;

struct image { /* of one array as of a commit */
    uint64_t off, bytes;
    unsigned char *content; /* NULL: there is no such array */
};
struct model {
    struct image array[NAMES];
    uint64_t epoch;
};

static struct pms_pool *pool;
static struct model committed;

static uint32_t draw(uint64_t *state, uint32_t n)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33) % n;
}

static struct pms_pool *open_store(const char *where, int mode, uint64_t bytes)
{
    struct pms_options o = {.size = bytes,
                            .mode = mode,
                            .domain = mode == PMS_MODE_TRUNCATE ? domain : PMS_DOMAIN_AUTO,
                            .hot = 1};
    struct pms_pool *p = NULL;
    struct pms_error e = {0};
    if (pms_pool_open(where, &o, &p, &e) != PMS_OK)
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
    return p;
}

static unsigned char *memory(uint64_t off)
{
    struct pms_info info;
    pms_pool_info(pool, &info);
    return (unsigned char *)(uintptr_t)(info.base + off);
}

static void model_free(struct model *m)
{
    for (int i = 0; i < NAMES; i++)
        free(m->array[i].content);
    memset(m, 0, sizeof *m);
}

static bool find(int i, struct pms_object *o)
{
    char name[8];
    struct pms_error e;
    int n = snprintf(name, sizeof name, "a%d", i);
    return pms_object_find(pool, 0, name, (uint32_t)n, o, &e) == PMS_OK;
}

/* What is in the arrays now becomes what was committed. */
static void model_take(void)
{
    model_free(&committed);
    for (int i = 0; i < NAMES; i++) {
        struct pms_object o;
        if (!find(i, &o))
            continue;
        committed.array[i] = (struct image){o.data, o.data_bytes, malloc(o.data_bytes)};
        memcpy(committed.array[i].content, memory(o.data), o.data_bytes);
    }
    committed.epoch = pms_epoch(pool);
}

static struct model *model_copy(void)
{
    struct model *m = malloc(sizeof *m);
    *m = committed;
    for (int i = 0; i < NAMES; i++) {
        if (!m->array[i].content)
            continue;
        m->array[i].content = malloc(m->array[i].bytes);
        memcpy(m->array[i].content, committed.array[i].content, m->array[i].bytes);
    }
    return m;
}

/* ---- readers ---- */

struct job {
    struct pms_snapshot *snapshot;
    struct model *model;
    bool may_be_lost;
};
static struct job queue[READERS];
static int queued, busy;
static bool stopping;
static _Atomic int verified, given_up, wrong;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static bool same(const struct job *job, int i, uint64_t *seed)
{
    const struct image *a = &job->model->array[i];
    uint64_t from = a->off & ~(uint64_t)(PMS_PAGE - 1),
             to = (a->off + a->bytes + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
    struct pms_error e;
    unsigned char *copy = malloc(to - from);
    bool ok = true;
    for (uint64_t at = from; ok && at < to;) { /* in pieces, so that commits fall between them */
        uint64_t n = (1 + draw(seed, 40)) * (uint64_t)PMS_PAGE;
        n = n < to - at ? n : to - at;
        ok = pms_snapshot_read(job->snapshot, at, n, copy + (at - from), &e) == PMS_OK;
        at += n;
    }
    if (!ok && job->may_be_lost && e.status == PMS_E_STATE) {
        free(copy);
        return false;
    }
    if (!ok || memcmp(copy + (a->off - from), a->content, a->bytes) != 0) {
        uint64_t k = 0;
        for (; k < a->bytes && copy[a->off - from + k] == a->content[k];)
            k++;
        printf("array %d of epoch %lu differs at %lu of %lu\n", i, (unsigned long)job->model->epoch,
               (unsigned long)k, (unsigned long)a->bytes);
        wrong++;
    }
    free(copy);
    return ok;
}

static void verify(const struct job *job, uint64_t *seed)
{
    struct pms_snapshot_info info;
    struct pms_error e;
    int order[NAMES];
    int status = pms_snapshot_info(job->snapshot, &info, &e);
    bool ok = status == PMS_OK;
    if (ok && info.epoch != job->model->epoch)
        wrong++;
    for (int i = 0; i < NAMES; i++) {
        int k = (int)draw(seed, (uint32_t)i + 1);
        order[i] = order[k];
        order[k] = i;
    }
    for (int i = 0; ok && i < NAMES; i++) {
        if (job->model->array[order[i]].content)
            ok = same(job, order[i], seed);
        if (draw(seed, 4) == 0)
            usleep(draw(seed, 300));
    }
    if (ok)
        verified++;
    else
        given_up++;
}

static void *reader(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    for (;;) {
        pthread_mutex_lock(&mutex);
        while (!queued && !stopping)
            pthread_cond_wait(&changed, &mutex);
        if (!queued) {
            pthread_mutex_unlock(&mutex);
            return NULL;
        }
        struct job job = queue[--queued];
        pthread_mutex_unlock(&mutex);
        verify(&job, &seed);
        pms_snapshot_end(pool, job.snapshot);
        model_free(job.model);
        free(job.model);
        pthread_mutex_lock(&mutex);
        busy--;
        pthread_mutex_unlock(&mutex);
    }
}

static void await_reader(void)
{
    for (bool room = false; !room;) {
        pthread_mutex_lock(&mutex);
        room = busy < READERS;
        pthread_mutex_unlock(&mutex);
        if (!room)
            usleep(100);
    }
}

/* A snapshot of the last commit, if a reader is free; what was written since must not show. */
static void offer(uint64_t bound, int64_t max_wait_ns)
{
    struct pms_error e;
    struct job job = {.may_be_lost = max_wait_ns >= 0};
    pthread_mutex_lock(&mutex);
    bool room = busy < READERS;
    pthread_mutex_unlock(&mutex);
    if (!room)
        return;
    if (pms_snapshot_begin(pool, bound, max_wait_ns, &job.snapshot, &e) != PMS_OK) {
        CHECK(!"begin");
        return;
    }
    job.model = model_copy();
    pthread_mutex_lock(&mutex);
    queue[queued++] = job;
    busy++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

/* ---- the writer ---- */

static void make(int i, uint64_t bytes, uint64_t *seed)
{
    char name[8];
    struct pms_error e;
    uint64_t data, pattern = draw(seed, 1000000) * 0x9e3779b97f4a7c15ull;
    int n = snprintf(name, sizeof name, "a%d", i);
    int status = pms_object_put_array(pool, 0, name, (uint32_t)n, "m", 1, bytes, PMS_FILL_PATTERN,
                                      &pattern, 8, 0, &data, &e);
    if (status != PMS_OK)
        printf("put: %d %s\n", e.status, e.what);
    CHECK(status == PMS_OK);
}

static void change(uint64_t *seed)
{
    static const uint64_t sizes[] = {48, 700, 5000, 33000, 70000, 300000, 1100000};
    struct pms_object o;
    struct pms_error e;
    int i = (int)draw(seed, NAMES);
    bool there = find(i, &o);
    uint32_t what = draw(seed, 10);
    if (!there || what == 0) {
        make(i, sizes[draw(seed, 7)] + draw(seed, 64), seed);
    } else if (what == 1) {
        char name[8];
        int n = snprintf(name, sizeof name, "a%d", i);
        CHECK(pms_object_remove(pool, 0, name, (uint32_t)n, &e) == PMS_OK);
    } else if (what == 2) { /* declared */
        unsigned char bytes[40];
        memset(bytes, (int)draw(seed, 256), sizeof bytes);
        uint64_t n = o.data_bytes < sizeof bytes ? o.data_bytes : sizeof bytes;
        uint64_t at = draw(seed, (uint32_t)(o.data_bytes - n + 1));
        CHECK(declared_write(pool, memory(o.data) + at, bytes, n, &e) == PMS_OK);
    } else if (what < 6) { /* all of it */
        memset(memory(o.data), (int)draw(seed, 256), o.data_bytes);
    } else { /* here and there */
        for (int k = 0; k < 20; k++)
            memory(o.data)[draw(seed, (uint32_t)o.data_bytes)] = (unsigned char)draw(seed, 256);
    }
}

static void race(uint64_t bound, int64_t max_wait_ns, int steps, uint64_t seed)
{
    struct pms_error e;
    pthread_t thread[READERS];
    stopping = false;
    pool = open_store(path, PMS_MODE_TRUNCATE, 24u << 20);
    CHECK(pool != NULL);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    model_take();
    for (uint64_t i = 0; i < READERS; i++)
        pthread_create(&thread[i], NULL, reader, (void *)(uintptr_t)(seed * 31 + i));
    for (int step = 0; step < steps; step++) {
        if (step % 4 == 0) /* so often at least, however slow readers are */
            await_reader();
        if (draw(&seed, 3) == 0 || step % 4 == 0)
            offer(bound, max_wait_ns);
        for (uint32_t n = draw(&seed, 6); n > 0; n--)
            change(&seed);
        if (draw(&seed, 3) == 0)
            offer(bound, max_wait_ns); /* with uncommitted changes */
        if (draw(&seed, 5) == 0) {
            CHECK(pms_rollback(pool, &e) == PMS_OK);
        } else {
            CHECK(pms_commit(pool, &e) == PMS_OK);
            model_take();
        }
    }
    pthread_mutex_lock(&mutex);
    stopping = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    for (int i = 0; i < READERS; i++)
        pthread_join(thread[i], NULL);
    static struct pms_check_report report;
    CHECK(pms_check(pool, &report, &e) == PMS_OK && report.problem_count == 0);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
    model_free(&committed);
}

static int more(void)
{
    return getenv("PMS_SNAPSHOT_MORE") ? atoi(getenv("PMS_SNAPSHOT_MORE")) : 1;
}

static void readers_race_with_a_writer(void)
{
    for (int d = 0; d < 3; d++) {
        domain = domains[d];
        for (int i = 0; i < more(); i++) {
            verified = given_up = wrong = 0;
            race(1ull << 30, -1, 200 / SHARE, 7 + (uint64_t)i);
            CHECK(wrong == 0 && given_up == 0 && verified > 40 / SHARE);
        }
    }
}

static void writers_wait_at_the_bound(void)
{
    for (int d = 0; d < 3; d++) {
        domain = domains[d];
        verified = given_up = wrong = 0;
        race(40 * PMS_PAGE, -1, 80 / SHARE, 99);
        CHECK(wrong == 0 && given_up == 0 && verified > 16 / SHARE);
    }
}

static void a_slow_reader_loses_its_snapshot(void)
{
    domain = PMS_DOMAIN_PROCESS;
    verified = given_up = wrong = 0;
    race(8 * PMS_PAGE, 0, 100, 5);
    CHECK(wrong == 0 && given_up > 0);
}

/* ---- commits in the middle of copies: every byte of an array is the low byte of the epoch's
 * number ---- */

#define UNIFORM (768u << 10)
static _Atomic uint64_t uniform_off, uniform_turn; /* turn: +1 whenever off changes */
static _Atomic bool uniform_stop;

static void *uniform_reader(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)arg;
    unsigned char *copy = malloc(UNIFORM);
    while (!atomic_load(&uniform_stop)) {
        struct pms_snapshot *s;
        struct pms_snapshot_info info;
        struct pms_error e;
        uint64_t turn = atomic_load(&uniform_turn), off = atomic_load(&uniform_off);
        if (pms_snapshot_begin(pool, 1u << 30, -1, &s, &e) != PMS_OK)
            break;
        bool ok = pms_snapshot_info(s, &info, &e) == PMS_OK;
        /* the array was there when the snapshot was opened */
        if (off && turn == atomic_load(&uniform_turn)) {
            for (int k = 0; ok && k < 20; k++) {
                uint64_t pages = 1 + draw(&seed, UNIFORM / PMS_PAGE - 1),
                         at = draw(&seed, UNIFORM / PMS_PAGE - (uint32_t)pages);
                ok = pms_snapshot_read(s, off + at * PMS_PAGE, pages * PMS_PAGE, copy, &e) ==
                     PMS_OK;
                for (uint64_t i = 0; ok && i < pages * PMS_PAGE; i += 256)
                    ok = copy[i] == (unsigned char)info.epoch;
            }
            wrong += !ok;
            verified++;
        }
        pms_snapshot_end(pool, s);
    }
    free(copy);
    return NULL;
}

static void place_uniform(void)
{
    static unsigned char next;
    struct pms_error e;
    uint64_t data;
    next = (unsigned char)(pms_epoch(pool) + 1);
    CHECK(pms_object_put_array(pool, 0, "u", 1, "m", 1, UNIFORM, PMS_FILL_PATTERN, &next, 1, 0,
                               &data, &e) == PMS_OK);
    atomic_fetch_add(&uniform_turn, 1);
    atomic_store(&uniform_off, 0); /* readers keep off until it is committed */
    CHECK(pms_commit(pool, &e) == PMS_OK);
    atomic_store(&uniform_off, data);
    atomic_fetch_add(&uniform_turn, 1);
}

static void copies_race_with_commits(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        pthread_t thread[2];
        domain = domains[d];
        verified = wrong = 0;
        uniform_stop = false;
        pool = open_store(path, PMS_MODE_TRUNCATE, 24u << 20);
        place_uniform();
        for (uint64_t i = 0; i < 2; i++)
            pthread_create(&thread[i], NULL, uniform_reader, (void *)(uintptr_t)(i + 1));
        struct timespec from, to;
        clock_gettime(CLOCK_MONOTONIC, &from);
        for (int i = 0;; i++) {
            clock_gettime(CLOCK_MONOTONIC, &to);
            long ms = (to.tv_sec - from.tv_sec) * 1000 + (to.tv_nsec - from.tv_nsec) / 1000000;
            /* a busy machine takes its time */
            if (ms > 400 * more() && (verified > 10 || ms > 60000))
                break;
            unsigned char *a = memory(uniform_off);
            if (i % 4 == 3)
                place_uniform();
            else if (i % 4 == 2) {
                memset(a, 0xee, UNIFORM);
                CHECK(pms_rollback(pool, &e) == PMS_OK);
            } else {
                memset(a, (unsigned char)(pms_epoch(pool) + 1), UNIFORM);
                CHECK(pms_commit(pool, &e) == PMS_OK);
            }
        }
        uniform_stop = true;
        for (int i = 0; i < 2; i++)
            pthread_join(thread[i], NULL);
        if (getenv("PMS_SNAPSHOT_MORE") || wrong)
            printf("domain %d: %d of %d wrong\n", domain, wrong, verified);
        CHECK(wrong == 0 && verified > 10);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

/* ---- a bound that holds, and is told ---- */

static void the_bound_holds(void)
{
    struct pms_error e;
    struct pms_snapshot *s;
    struct pms_snapshot_info info;
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(path, PMS_MODE_TRUNCATE, 24u << 20);
    uint64_t seed = 1;
    make(0, 1u << 20, &seed);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_snapshot_begin(pool, 64 * PMS_PAGE, 30000000, &s, &e) == PMS_OK); /* 30 ms */
    struct pms_object o;
    CHECK(find(0, &o));
    memset(memory(o.data), 1, 20 * PMS_PAGE);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_snapshot_info(s, &info, &e) == PMS_OK);
    CHECK(info.kept_bytes >= 20 * PMS_PAGE && info.kept_bytes <= 64 * PMS_PAGE && info.waits == 0 &&
          info.epoch == 1);
    /* what is kept is not kept twice; the rest does not fit */
    memset(memory(o.data), 2, o.data_bytes);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_snapshot_info(s, &info, &e) == PMS_E_STATE);
    CHECK(info.peak_bytes <= 64 * PMS_PAGE && info.kept_bytes == 0 && info.waits == 1 &&
          info.wait_ns >= 10000000);
    pms_snapshot_end(pool, s);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* ---- closing under a reader ---- */

static void *read_until_closed(void *arg)
{
    struct pms_snapshot *s = arg;
    struct pms_error e;
    unsigned char *buffer = malloc(1u << 20);
    int status;
    while ((status = pms_snapshot_read(s, PMS_OFF_SEGMENTS & ~(uint64_t)(PMS_PAGE - 1), 1u << 20,
                                       buffer, &e)) == PMS_OK) {
    }
    free(buffer);
    return (void *)(intptr_t)status;
}

static void the_store_closes_under_a_snapshot(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct pms_snapshot *s;
        pthread_t thread;
        void *status;
        uint64_t seed = 3;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 24u << 20);
        make(0, 1u << 20, &seed);
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
        pthread_create(&thread, NULL, read_until_closed, s);
        usleep(3000);
        CHECK(pms_pool_close(pool, 1, &e) == PMS_OK);
        pthread_join(thread, &status);
        CHECK((intptr_t)status == PMS_E_CLOSED);
        pms_snapshot_release(s, 0, 1u << 20);
        pms_snapshot_end(pool, s);
        pms_pool_release(pool);
    }
}

static void *end_it(void *snapshot)
{
    pms_snapshot_end(pool, snapshot);
    return NULL;
}

static void *close_it(void *arg)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    return arg;
}

/* Both wait for the log lock when it is given back: whoever comes first, the other must not look
 * at what is gone. */
static void a_snapshot_ends_while_the_store_closes(void)
{
    for (int round = 0; round < 60; round++) {
        struct pms_error e;
        struct pms_snapshot *s;
        pthread_t ends, closes;
        domain = PMS_DOMAIN_PROCESS;
        pool = open_store(path, PMS_MODE_TRUNCATE, 1u << 20);
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
        pms_lock_acquire(&pool->undo.lock);
        pthread_create(&ends, NULL, end_it, s);
        usleep(500);
        pthread_create(&closes, NULL, close_it, NULL);
        usleep(500);
        pms_lock_release(&pool->undo.lock);
        pthread_join(ends, NULL);
        pthread_join(closes, NULL);
        pms_pool_release(pool);
    }
}

static void a_fork_child_leaves_it_alone(void)
{
    struct pms_error e;
    struct pms_snapshot *s, *t;
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(path, PMS_MODE_TRUNCATE, 4u << 20);
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
    pid_t child = fork();
    if (child == 0) {
        int status = pms_snapshot_begin(pool, 0, -1, &t, &e);
        pms_snapshot_end(pool, s);
        _exit(status == PMS_E_FORKED ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    pms_snapshot_end(pool, s);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* ---- to a file and back ---- */

struct tier {
    uint64_t count, *chunk, *at;
    uint32_t *crc;
    uint8_t super[PMS_PAGE];
    uint64_t file_bytes, tag;
};

static void save(struct tier *t, uint64_t since, uint64_t *written)
{
    struct pms_error e;
    struct pms_snapshot *s;
    struct pms_snapshot_info info;
    struct pms_transfer transfer = {0};
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
    CHECK(pms_snapshot_info(s, &info, &e) == PMS_OK);
    uint64_t n = (info.file_bytes + CHUNK - 1) / CHUNK;
    uint8_t *state = malloc(n);
    CHECK(pms_snapshot_chunks(s, since, CHUNK, state, n, &e) == PMS_OK);
    *t = (struct tier){.chunk = malloc(n * 8),
                       .at = malloc(n * 8),
                       .crc = malloc(n * 4),
                       .file_bytes = info.file_bytes,
                       .tag = info.tag};
    memcpy(t->super, info.super, sizeof t->super);
    *written = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (state[i])
            t->chunk[t->count++] = i;
        *written += state[i] == (PMS_CHUNK_LIVE | PMS_CHUNK_CHANGED);
    }
    int fd = open(chunks_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(pms_snapshot_write(s, fd, CHUNK, t->chunk, t->count, 0, t->crc, &transfer, &e) == PMS_OK);
    CHECK(transfer.done_bytes == t->count * CHUNK && pms_transfer_sync(fd, &e) == PMS_OK);
    for (uint64_t i = 0; i < t->count; i++)
        t->at[i] = i * CHUNK;
    close(fd);
    free(state);
    pms_snapshot_end(pool, s);
}

/* filled: through a mapping, where the file system is memory. */
static int load_by(struct tier *t, bool filled, struct pms_error *e)
{
    struct pms_transfer transfer = {0};
    uint64_t bytes = 0, bad = 0, *to = malloc(t->count * 8);
    struct pms_filling *f = NULL;
    int in = open(chunks_path, O_RDONLY | O_CLOEXEC),
        out = open(restored_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    for (uint64_t i = 0; i < t->count; i++)
        to[i] = t->chunk[i] * CHUNK;
    int status = pms_restore_begin(t->super, &bytes, e);
    if (status == PMS_OK && filled)
        status = pms_filling_open(out, bytes, &f, e);
    if (status == PMS_OK && !f)
        status = pms_restore_allocate(out, bytes, &(struct pms_transfer){0}, e);
    if (status == PMS_OK)
        status = pms_transfer_copy(in, t->at, out, f, to, t->crc, t->count, CHUNK, bytes, &bad,
                                   &transfer, e);
    if (status == PMS_OK && f)
        status = pms_filling_room(f, 0, bytes, 0, &transfer, e);
    if (f)
        pms_filling_close(f);
    if (status == PMS_OK)
        status = pms_restore_seal(out, t->super, PMS_DOMAIN_AUTO, e);
    close(in);
    close(out);
    free(to);
    return status;
}

static int load(struct tier *t, struct pms_error *e) { return load_by(t, false, e); }

static bool same_from(uint64_t off, int a, int b)
{
    static unsigned char x[1 << 16], y[1 << 16];
    for (ssize_t n; (n = pread(a, x, sizeof x, (off_t)off)) > 0; off += (uint64_t)n)
        if (pread(b, y, sizeof y, (off_t)off) != n || memcmp(x, y, (size_t)n) != 0)
            return false;
    return pread(b, y, 1, (off_t)off) == 0;
}

static void both_ways_are_the_same(struct tier *t)
{
    struct pms_error e;
    struct stat status;
    CHECK(load(t, &e) == PMS_OK);
    int plain = open(restored_path, O_RDONLY | O_CLOEXEC);
    CHECK(plain >= 0 && unlink(restored_path) == 0);
    CHECK(load_by(t, true, &e) == PMS_OK);
    int filled = open(restored_path, O_RDONLY | O_CLOEXEC);
    CHECK(same_from(PMS_OFF_ROOT, plain, filled));
    CHECK(fstat(filled, &status) == 0 && (uint64_t)status.st_blocks * 512 >= t->file_bytes);
    close(plain);
    close(filled);
}

static void drop(struct tier *t)
{
    free(t->chunk);
    free(t->at);
    free(t->crc);
}

static void a_snapshot_becomes_a_store_again(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct tier t;
        uint64_t seed = 11, written;
        static struct pms_check_report report;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 2u << 20); /* it grows */
        for (int i = 0; i < 200; i++) {
            change(&seed);
            if (i % 20 == 19)
                CHECK(pms_commit(pool, &e) == PMS_OK);
        }
        model_take();
        struct model *m = model_copy();
        for (int i = 0; i < 10; i++)
            change(&seed); /* uncommitted */
        save(&t, 0, &written);
        CHECK(written == t.count);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        uint8_t uuid[16];
        memcpy(uuid, pool->super.uuid, 16);
        pms_pool_release(pool);
        both_ways_are_the_same(&t);
        pool = open_store(restored_path, PMS_MODE_READ_WRITE, 0);
        CHECK(pool != NULL && pms_epoch(pool) == m->epoch &&
              memcmp(uuid, pool->super.uuid, 16) != 0);
        CHECK(pms_check(pool, &report, &e) == PMS_OK && report.problem_count == 0);
        for (int i = 0; i < NAMES; i++) {
            struct pms_object o;
            bool there = find(i, &o);
            CHECK(there == (m->array[i].content != NULL));
            CHECK(!there || (o.data == m->array[i].off &&
                             memcmp(memory(o.data), m->array[i].content, m->array[i].bytes) == 0));
        }
        for (int i = 0; i < 20; i++) /* and it can be worked with */
            change(&seed);
        CHECK(pms_commit(pool, &e) == PMS_OK && pms_epoch(pool) == m->epoch + 1);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);

        int fd = open(chunks_path, O_RDWR | O_CLOEXEC); /* a byte of the tier goes bad */
        unsigned char byte;
        CHECK(pread(fd, &byte, 1, CHUNK + 5) == 1);
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, CHUNK + 5) == 1);
        CHECK(load(&t, &e) == PMS_E_CORRUPT && load_by(&t, true, &e) == PMS_E_CORRUPT);
        CHECK(ftruncate(fd, (off_t)(t.count * CHUNK - 1)) == 0);
        byte ^= 1;
        CHECK(pwrite(fd, &byte, 1, CHUNK + 5) == 1);
        CHECK(load(&t, &e) == PMS_E_CORRUPT && load_by(&t, true, &e) == PMS_E_CORRUPT);
        close(fd);
        t.super[100] ^= 1;
        CHECK(load(&t, &e) == PMS_E_CORRUPT);
        drop(&t);
        model_free(m);
        free(m);
        model_free(&committed);
    }
}

static void changed_chunks_are_known(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct tier t, later;
        uint64_t seed = 5, written;
        struct pms_object o;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 64u << 20);
        make(0, 16u << 20, &seed);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        save(&t, 0, &written);
        CHECK(written == t.count && t.count > 256);
        save(&later, t.tag, &written);
        CHECK(written <= 3); /* the root; what commits capture ahead */
        drop(&later);
        CHECK(find(0, &o));
        memory(o.data)[5u << 20] = 7;
        memory(o.data)[9u << 20] = 7;
        CHECK(pms_commit(pool, &e) == PMS_OK);
        memory(o.data)[12u << 20] = 7; /* not committed: may be told as changed, need not */
        save(&later, t.tag, &written);
        CHECK(written >= 3 && written <= 6);
        drop(&later);
        drop(&t);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

/* Also where nothing is put into the new part: its page table begins in a chunk that may have
 * been flushed before. */
static void growth_is_a_change(void)
{
    for (int d = 0; d < 3; d++) {
        struct pms_error e;
        struct pms_snapshot *s;
        struct pms_snapshot_info info;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 4u << 20);
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK &&
              pms_snapshot_info(s, &info, &e) == PMS_OK);
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_grow(pool, 1 << 20, &e) == PMS_OK && pool->super.segment_count == 2);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        uint64_t since = info.tag, pages, page = pool->super.segment[1].table_off / PMS_PAGE;
        uint64_t end = pool->super.segment[1].log_off / PMS_PAGE;
        CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK &&
              pms_snapshot_info(s, &info, &e) == PMS_OK);
        pages = info.file_bytes / PMS_PAGE;
        uint8_t *state = malloc(pages);
        CHECK(pms_snapshot_chunks(s, since, PMS_PAGE, state, pages, &e) == PMS_OK);
        for (; page < end; page++)
            CHECK(state[page] == (PMS_CHUNK_LIVE | PMS_CHUNK_CHANGED));
        free(state);
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

/* A part of a page is declared, then it is stored to anywhere; and its neighbour. */
static void a_page_is_stored_to_after_a_part_was_declared(void)
{
    for (int d = 0; d < 3; d++) {
        static unsigned char got[4 * PMS_PAGE];
        struct pms_error e;
        struct pms_snapshot *s;
        uint64_t data;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 8u << 20);
        CHECK(pms_object_put_array(pool, 0, "a", 1, "m", 1, 1u << 20, PMS_FILL_PATTERN, "x", 1, 0,
                                   &data, &e) == PMS_OK);
        CHECK(pms_commit(pool, &e) == PMS_OK && pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK);
        uint64_t first = (data + PMS_PAGE - 1) & ~(uint64_t)(PMS_PAGE - 1);
        for (int step = 0; step < 4; step++) {
            CHECK(step != 0 ||
                  declared_write(pool, memory(first + 100), "12345678", 8, &e) == PMS_OK);
            if (step == 1)
                memory(first)[3000] = 'y'; /* this page, whole, and its neighbours */
            CHECK(step != 2 ||
                  declared_write(pool, memory(first + PMS_PAGE + 50), "12345678", 8, &e) == PMS_OK);
            CHECK(step != 3 || pms_commit(pool, &e) == PMS_OK);
            CHECK(pms_snapshot_read(s, first, sizeof got, got, &e) == PMS_OK);
            for (size_t i = 0; i < sizeof got; i++)
                CHECK(got[i] == 'x');
        }
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

static void a_transfer_is_cancelled_and_limited(void)
{
    struct pms_error e;
    struct pms_snapshot *s;
    struct pms_snapshot_info info;
    uint64_t seed = 5;
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(path, PMS_MODE_TRUNCATE, 24u << 20);
    make(0, 8u << 20, &seed);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_snapshot_begin(pool, 0, -1, &s, &e) == PMS_OK &&
          pms_snapshot_info(s, &info, &e) == PMS_OK);
    uint64_t chunk[128];
    uint32_t crc[128];
    for (uint64_t i = 0; i < 128; i++)
        chunk[i] = i;
    struct pms_transfer t = {.bytes_per_second = 80u << 20};
    struct timespec from, to;
    int fd = open(chunks_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    clock_gettime(CLOCK_MONOTONIC, &from);
    /* 8 MiB at 80 MiB/s */
    CHECK(pms_snapshot_write(s, fd, CHUNK, chunk, 128, 0, crc, &t, &e) == PMS_OK);
    clock_gettime(CLOCK_MONOTONIC, &to);
    CHECK((double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec) >= 0.095);
    t.cancel = 1;
    CHECK(pms_snapshot_write(s, fd, CHUNK, chunk, 128, 0, crc, &t, &e) == PMS_E_STATE);
    close(fd);
    pms_snapshot_end(pool, s);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* Memory that was never touched is slow to touch first, and it is a commit that would. A smaller
 * one does not do. */
static void memory_for_kept_pages_is_used_again(void)
{
    struct pms_error e;
    struct pms_object o;
    struct pms_snapshot *s;
    struct pms_snapshot_info info;
    unsigned char page[PMS_PAGE];
    uint64_t seed = 9,
             bounds[] = {8u << 20, (8u << 20) + (512u << 10), 4u << 20, 16u << 20, 16u << 20};
    const struct pms_snapshots *before = NULL;
    domain = PMS_DOMAIN_PROCESS;
    pool = open_store(path, PMS_MODE_TRUNCATE, 64u << 20);
    make(0, 2u << 20, &seed);
    CHECK(pms_commit(pool, &e) == PMS_OK && find(0, &o));
    for (unsigned i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        CHECK(pms_snapshot_begin(pool, bounds[i], -1, &s, &e) == PMS_OK);
        const struct pms_snapshots *now = pool->undo.snapshots.open;
        CHECK(!pool->undo.snapshots.spare && (i == 0 || i == 3 || now == before));
        for (uint64_t at = 0; at < o.data_bytes; at += PMS_PAGE)
            memory(o.data)[at] = (unsigned char)(i + 100);
        CHECK(pms_commit(pool, &e) == PMS_OK && pms_snapshot_info(s, &info, &e) == PMS_OK);
        CHECK(info.bound_bytes == bounds[i] && /* this one's */ info.kept_bytes >= o.data_bytes &&
              info.peak_bytes == info.kept_bytes);
        for (uint64_t at = o.data; i && at < o.data + o.data_bytes; at += PMS_PAGE)
            CHECK(pms_snapshot_read(s, at, PMS_PAGE, page, &e) == PMS_OK && page[0] == i - 1 + 100);
        pms_snapshot_end(pool, s);
        CHECK(pool->undo.snapshots.spare == now && !pool->undo.snapshots.open);
        before = now;
    }
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* Blocks that are made on pages which the transaction has written to: what its log tells is
 * looked at once, not for every block. Shown by a count, and by what the snapshot reads. */
static void many_new_blocks_while_a_snapshot_is_open(void)
{
    enum { PAIRS = 3000 / SHARE, HALF = PMS_PAGE / 2 };
    for (int d = 0; d < 3; d++) {
        static unsigned char got[PMS_PAGE];
        static uint64_t at[2 * PAIRS];
        char name[12];
        struct pms_error e;
        struct pms_snapshot *s;
        domain = domains[d];
        pool = open_store(path, PMS_MODE_TRUNCATE, 192u << 20);
        for (uint32_t i = 0; i < 2 * PAIRS; i++) {
            uint32_t n = (uint32_t)snprintf(name, sizeof name, "%u", i);
            CHECK(pms_object_put_array(pool, 0, name, n, "m", 1, HALF, PMS_FILL_PATTERN, "x", 1, 0,
                                       &at[i], &e) == PMS_OK);
        }
        CHECK(pms_commit(pool, &e) == PMS_OK);
        for (uint32_t i = 0; i < 2 * PAIRS; i += 2)
            CHECK(pms_object_remove(pool, 0, name, (uint32_t)snprintf(name, sizeof name, "%u", i),
                                    &e) == PMS_OK);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        CHECK(pms_snapshot_begin(pool, 96u << 20, -1, &s, &e) == PMS_OK);
        for (uint32_t i = 1; i < 2 * PAIRS; i += 2)
            memory(at[i])[5] = 'y';
        for (uint32_t i = 0; i < 2 * PAIRS; i += 2) {
            uint32_t n = (uint32_t)snprintf(name, sizeof name, "n%u", i);
            CHECK(pms_object_put_array(pool, 0, name, n, "m", 1, HALF, PMS_FILL_PATTERN, "z", 1, 1,
                                       &at[i], &e) == PMS_OK);
        }
        CHECK(pool->undo.log.seq > PAIRS / 2 && pool->undo.snapshots.open->looks > 0);
        CHECK(pool->undo.snapshots.open->looks <= 3 * (uint64_t)pool->undo.log.seq);
        for (int committed_too = 0; committed_too < 2; committed_too++) {
            for (uint32_t i = 1; i < 2 * PAIRS; i += 2) {
                uint64_t page = at[i] & ~(uint64_t)(PMS_PAGE - 1);
                CHECK(pms_snapshot_read(s, page, PMS_PAGE, got, &e) == PMS_OK);
                for (uint32_t k = 0; k < HALF; k++)
                    CHECK(got[at[i] - page + k] == 'x');
                i += committed_too ? 0 : PAIRS / 50 * 2;
            }
            CHECK(committed_too || pms_commit(pool, &e) == PMS_OK);
        }
        CHECK(pool->undo.snapshots.open->looks <= 3ull * 8 * PAIRS);
        pms_snapshot_end(pool, s);
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
    }
}

int main(void)
{
    snprintf(path, sizeof path, "/dev/shm/pms-test-snapshot-%d", (int)getpid());
    snprintf(chunks_path, sizeof chunks_path, "%s.chunks", path);
    snprintf(restored_path, sizeof restored_path, "%s.restored", path);
    TEST(the_bound_holds);
    TEST(readers_race_with_a_writer);
    TEST(copies_race_with_commits);
    TEST(writers_wait_at_the_bound);
    TEST(a_slow_reader_loses_its_snapshot);
    TEST(the_store_closes_under_a_snapshot);
    TEST(a_snapshot_ends_while_the_store_closes);
    TEST(a_fork_child_leaves_it_alone);
    TEST(a_snapshot_becomes_a_store_again);
    TEST(changed_chunks_are_known);
    TEST(growth_is_a_change);
    TEST(a_page_is_stored_to_after_a_part_was_declared);
    TEST(many_new_blocks_while_a_snapshot_is_open);
    TEST(a_transfer_is_cancelled_and_limited);
    TEST(memory_for_kept_pages_is_used_again);
    unlink(path);
    unlink(chunks_path);
    unlink(restored_path);
    return test_summary();
}
