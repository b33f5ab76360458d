/* A store and several threads, in every domain that runs here: transaction blocks, their orphans,
 * faults at once, waiters, a fork's child. */
#include "pool_store.h"

static void fork_child(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(4 << 20);
    uint32_t *a = array(pool, "a", 10000, NULL);
    a[0] = 42;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        _exit(a[0] == 42 && pms_commit(pool, &e) == PMS_E_FORKED ? 0 : 1);
    int ws;
    waitpid(pid, &ws, 0);
    CHECK(WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
    pid = fork();
    if (pid == 0) {
        close(STDERR_FILENO);
        a[0] = 43;
        _exit(0);
    }
    waitpid(pid, &ws, 0);
    CHECK(!(WIFEXITED(ws) && WEXITSTATUS(ws) == 0)); /* died of its store */
    CHECK(a[0] == 42);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    shut(pool, 0);
}

static void *second_thread(void *arg)
{
    struct pms_error e;
    return (void *)(intptr_t)pms_begin(arg, 50000000, &e);
}

static void blocks_exclude_threads(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(2 << 20);
    pthread_t t;
    void *result;
    CHECK(pms_begin(pool, 0, &e) == PMS_OK);
    CHECK(pms_begin(pool, 0, &e) == PMS_OK && pms_txblock_depth(pool) == 2);
    CHECK(pms_commit(pool, &e) == PMS_E_STATE);
    pthread_create(&t, NULL, second_thread, pool);
    pthread_join(t, &result);
    CHECK((intptr_t)result == PMS_E_BUSY);
    CHECK(pms_end(pool, 1, &e) == PMS_OK && pms_end(pool, 1, &e) == PMS_OK);
    CHECK(pms_end(pool, 1, &e) == PMS_E_STATE);
    shut(pool, 0);
}

static void *enter_and_end(void *arg)
{
    struct pms_error e;
    int status = pms_begin(arg, -1, &e);
    return (void *)(intptr_t)(status != PMS_OK ? status
                                               : pms_object_put_value(arg, 0, "a", 1, "1", 1, &e));
}

static void *put_beside(void *arg)
{
    struct pms_error e;
    return (void *)(intptr_t)pms_object_put_value(arg, 0, "b", 1, "2", 1, &e);
}

/* Whoever meets the block of a thread that has ended rolls it back; a commit is told. */
static void an_orphan_is_rolled_back(void)
{
    struct pms_error e;
    struct pms_object o;
    pthread_t t;
    void *result;
    for (int meets = 0; meets < 4; meets++) {
        struct pms_pool *pool = fresh(2 << 20);
        pthread_create(&t, NULL, enter_and_end, pool);
        pthread_join(t, &result);
        CHECK((intptr_t)result == PMS_OK);
        /* as if its id had been given to another thread since */
        pool->gate.owner.id = (int64_t)syscall(SYS_gettid);
        if (meets == 0) {
            CHECK(pms_commit(pool, &e) == PMS_E_STATE && strstr(e.what, "had ended"));
            CHECK(pms_commit(pool, &e) == PMS_OK);
        } else if (meets == 1) {
            CHECK(pms_begin(pool, 1000000000, &e) == PMS_OK && pms_txblock_depth(pool) == 1);
            CHECK(pms_end(pool, 1, &e) == PMS_OK);
        } else if (meets == 2) {
            CHECK(pms_object_put_value(pool, 0, "b", 1, "2", 1, &e) == PMS_OK);
            CHECK(pms_commit(pool, &e) == PMS_OK);
        } else {
            CHECK(pms_txblock_wait(pool, 1000000000, &e) == PMS_E_STATE &&
                  strstr(e.what, "had ended"));
        }
        CHECK(pms_object_find(pool, 0, "a", 1, &o, &e) == PMS_E_NOT_FOUND);
        CHECK((pms_object_find(pool, 0, "b", 1, &o, &e) == PMS_OK) == (meets == 2));
        shut(pool, 0);
    }
}

/* Calls of others that change the store are refused; a store that is closed then is rolled back
 * whole. */
static void others_are_refused_and_a_block_is_never_halved(void)
{
    struct pms_error e;
    struct pms_entered outer, inner;
    struct pms_object o;
    pthread_t t;
    void *result;
    struct pms_pool *pool = fresh(2 << 20);
    CHECK(pms_txblock_enter(pool, 0, 1, 0, &outer, &e) == PMS_OK && outer.depth == 1);
    CHECK(pms_txblock_enter(pool, 0, 1, 0, &inner, &e) == PMS_OK && inner.depth == 2 &&
          inner.number == outer.number);
    CHECK(pms_object_put_value(pool, 0, "a", 1, "1", 1, &e) == PMS_OK);
    pthread_create(&t, NULL, put_beside, pool);
    pthread_join(t, &result);
    CHECK((intptr_t)result == PMS_E_BUSY);
    /* the outermost decides */
    CHECK(pms_txblock_leave(pool, &outer, PMS_COMMIT, &e) == PMS_OK &&
          pms_txblock_depth(pool) == 0);
    CHECK(pms_txblock_leave(pool, &inner, PMS_COMMIT, &e) == PMS_E_STATE);
    CHECK(pms_begin(pool, 0, &e) == PMS_OK);
    CHECK(pms_object_put_value(pool, 0, "c", 1, "1", 1, &e) == PMS_OK);
    CHECK(pms_pool_close(pool, 1, &e) == PMS_E_STATE && pool->gate.closed);
    CHECK(pms_pool_close(pool, 1, &e) == PMS_E_CLOSED && pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
    pool = open_store(PMS_MODE_READ_WRITE, 0, &e);
    CHECK(pms_object_find(pool, 0, "a", 1, &o, &e) == PMS_OK);
    CHECK(pms_object_find(pool, 0, "c", 1, &o, &e) == PMS_E_NOT_FOUND);
    shut(pool, 0);
}

struct writer {
    uint32_t *a;
    uint32_t id;
};

static void *write_stripes(void *arg)
{
    const struct writer *w = arg;
    for (uint32_t i = w->id; i < 1 << 18; i += 4)
        w->a[i] = i ^ 0x55;
    return NULL;
}

/* Threads that fault on the same chunks at once: captured once, nothing lost. */
static void threads_write(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(16 << 20);
    uint32_t *a = array(pool, "a", 1 << 18, NULL);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    for (int round = 0; round < 6; round++) {
        pthread_t t[4];
        struct writer w[4];
        struct pms_stats s, s2;
        pms_pool_stats(pool, &s, &e);
        CHECK(pms_begin(pool, 0, &e) == PMS_OK);
        for (uint32_t i = 0; i < 4; i++) {
            w[i] = (struct writer){a, i};
            pthread_create(&t[i], NULL, write_stripes, &w[i]);
        }
        for (int i = 0; i < 4; i++)
            pthread_join(t[i], NULL);
        pms_pool_stats(pool, &s2, &e);
        CHECK(s2.captured_bytes - s.captured_bytes <= (1 << 20) + 65536);
        CHECK(a[12345] == (12345 ^ 0x55));
        CHECK(pms_end(pool, round == 5, &e) == PMS_OK);
        CHECK(a[12345] == (round == 5 ? 12345 ^ 0x55 : 0));
    }
    shut(pool, 0);
}

/* ---- waiting for a block ---- */

static _Thread_local int fails;
static struct pms_pool *waited_for;
static _Atomic int waiting;

static int fail_mine(enum pms_primitive p, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    return p == PMS_PRIM_PWRITE && fails ? ENOSPC : 0;
}

static void *wait_for_block(void *failing)
{
    struct pms_error e;
    fails = failing != NULL;
    atomic_fetch_add(&waiting, 1);
    int status = pms_begin(waited_for, -1, &e);
    if (status == PMS_OK)
        CHECK(pms_end(waited_for, 0, &e) == PMS_OK);
    return NULL;
}

static _Atomic bool through;

#if defined(__SANITIZE_THREAD__)
/* a commit protects the page before it reads it, which is no lock that the sanitizer knows */
__attribute__((no_sanitize("thread")))
#endif
/* so that something is pending whenever a waiter comes to it */
static void *store_all_the_time(void *at)
{
    volatile unsigned char *a = at;
    while (!atomic_load(&through))
        a[0]++;
    return NULL;
}

/* Whoever was woken, and cannot commit what is pending, wakes the next one. */
static void a_waiter_that_fails_wakes_the_next(void)
{
    struct pms_error e;
    struct timespec end;
    pthread_t thread[2], storer;
    uint64_t data;
    if (domain != PMS_DOMAIN_FILE) /* in the others a commit does not fail */
        return;
    struct pms_pool *pool = waited_for = fresh(4u << 20);
    CHECK(pms_object_put_array(pool, 0, "a", 1, "m", 1, 8192, PMS_FILL_ZERO, NULL, 0, 0, &data,
                               &e) == PMS_OK);
    CHECK(pms_begin(pool, -1, &e) == PMS_OK);
    pms_persist_hook = fail_mine;
    atomic_store(&waiting, 0);
    atomic_store(&through, false);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&thread[i], NULL, wait_for_block, i ? NULL : &fails) == 0);
        while (atomic_load(&waiting) <= i)
            usleep(1000);
        usleep(50000); /* asleep by now, most likely: else the test is easier to pass */
    }
    CHECK(pthread_create(&storer, NULL, store_all_the_time, pool->map.user + data) == 0);
    CHECK(pms_end(pool, 1, &e) == PMS_OK);
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += 60;
    for (int i = 0; i < 2; i++)
        if (pthread_timedjoin_np(thread[i], NULL, &end) != 0) {
            printf("tests/test_pool_threads.c: waiter %d sleeps on\n", i);
            fflush(stdout);
            _exit(1);
        }
    atomic_store(&through, true);
    pthread_join(storer, NULL);
    pms_persist_hook = NULL;
    shut(pool, 0);
}

static struct pms_pool *watched;
static uint64_t unmoved;
static int stores, unannounced;

static int announced(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive == PMS_PRIM_STORE || primitive == PMS_PRIM_COPY) {
        stores++;
        unannounced += pms_put_backs(watched) == unmoved;
    }
    return 0;
}

/* Who reads without a lock (a value's bytes, as Python does) looks afterwards whether a roll
 * back may have stored meanwhile. */
static void a_roll_back_says_so_before_it_stores(void)
{
    struct pms_error e;
    struct pms_pool *pool = watched = fresh(4u << 20);
    CHECK(pms_object_put_value(pool, 0, "v", 1, "old", 3, &e) == PMS_OK &&
          pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_object_put_value(pool, 0, "v", 1, "new", 3, &e) == PMS_OK);
    unmoved = pms_put_backs(pool);
    stores = unannounced = 0;
    pms_persist_hook = announced;
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    pms_persist_hook = NULL;
    CHECK(stores > 0 && unannounced == 0 && pms_put_backs(pool) == unmoved + 2);
    shut(pool, 0);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-pool-threads-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    for (unsigned i = 0; i < 3; i++) {
        domain = domains[i];
        printf("domain %d\n", domain);
        TEST(fork_child);
        TEST(blocks_exclude_threads);
        TEST(an_orphan_is_rolled_back);
        TEST(others_are_refused_and_a_block_is_never_halved);
        TEST(threads_write);
        TEST(a_waiter_that_fails_wakes_the_next);
        TEST(a_roll_back_says_so_before_it_stores);
    }
    unlink(path);
    return test_summary();
}
