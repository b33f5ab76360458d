/* Snapshots against a model: readers at their own pace, while a writer stores, allocates, frees,
 * commits and rolls back. Whatever a reader gets of a live array is, byte for byte, what the
 * last commit before its snapshot held. */
#include "snapshot_store.h"

#define READERS 3

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

int main(void)
{
    snprintf(path, sizeof path, "/dev/shm/pms-test-snapshot-race-%d", (int)getpid());
    TEST(the_bound_holds);
    TEST(readers_race_with_a_writer);
    TEST(copies_race_with_commits);
    TEST(writers_wait_at_the_bound);
    TEST(a_slow_reader_loses_its_snapshot);
    unlink(path);
    return test_summary();
}
