/* Threads that store while the transaction ends: what they write may land on either side of it,
 * but nothing else is harmed. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "optim/optim.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define MIB (1u << 20)
#define HOT_BYTES 60000u
#define COLD_BYTES (256u << 10)
#define ROUNDS 400
#if defined(__SANITIZE_THREAD__)
#define OPTIM_ROUNDS 40
#else
#define OPTIM_ROUNDS 200
#endif

static char path[256];
static int domain;
static struct pms_pool *pool;

static void open_store(void)
{
    struct pms_options o = {
        .size = 16u * MIB, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
}

static void close_store(void)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static unsigned char *array(const char *name, uint64_t bytes)
{
    struct pms_error e;
    uint64_t data = 0;
    CHECK(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes, PMS_FILL_ZERO,
                               NULL, 0, 0, &data, &e) == PMS_OK);
    return pool->map.user + data;
}

static void commit(void)
{
    struct pms_error e;
    CHECK(pms_commit(pool, &e) == PMS_OK);
}

static _Atomic bool stop;

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread"))) /* the race is what is tested */
#endif
static void *store_all_the_time(void *arg)
{
    volatile unsigned char *a = arg;
    for (uint32_t i = 0; !atomic_load_explicit(&stop, memory_order_relaxed);
         i = (i + 61) % HOT_BYTES)
        a[i] = (unsigned char)(a[i] + 1);
    return NULL;
}

/* A hot range is captured while it is writable. A torn pre-image would end the log there, and
 * hide every later entry (I1, I2). */
static void a_racing_writer_hides_no_other_entry(void)
{
    struct pms_error e;
    struct pms_stats st;
    pthread_t thread;
    open_store();
    unsigned char *hot = array("hot", HOT_BYTES), *cold = array("cold", COLD_BYTES);
    commit();
    for (int i = 0; i < 10; i++)
        hot[i]++, commit();
    CHECK(pms_pool_stats(pool, &st, &e) == PMS_OK && st.hot_ranges == 1);
    atomic_store(&stop, false);
    CHECK(pthread_create(&thread, NULL, store_all_the_time, hot) == 0);
    uint64_t wrong = 0;
    for (uint32_t i = 0; i < ROUNDS; i++) {
        for (int k = 0; k < 4; k++) { /* after a roll back it has to become hot again */
            hot[0]++;
            commit();
        }
        memset(cold, 0xee, COLD_BYTES);
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        for (uint32_t k = 0; k < COLD_BYTES; k += 997)
            wrong += cold[k] != 0;
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    CHECK(wrong == 0);
    close_store();
}

/* ---- optimizer steps while others capture ---- */

#define ELEMENTS (512u << 10)
#define LARGE_BYTES (24u << 20)

static void *fill_all_the_time(void *arg) /* captures of megabytes, which all cores copy */
{
    unsigned char *large = arg;
    struct pms_error e;
    for (uint32_t i = 0; !atomic_load_explicit(&stop, memory_order_relaxed); i++) {
        struct pms_range r = {(uint64_t)(uintptr_t)large, LARGE_BYTES};
        CHECK(pms_will_write(pool, &r, 1, &e) == PMS_OK);
        memset(large, (int)i, LARGE_BYTES);
        CHECK(pms_commit(pool, &e) == PMS_OK);
    }
    return NULL;
}

/* The step's outputs are protected by the other thread's commits: they fault on the caller and
 * on the workers, and are captured there. */
static void an_optimizer_steps_while_others_capture_and_commit(void)
{
    static float grad[ELEMENTS], step = 0, steps;
    struct pms_error e;
    pthread_t thread;
    struct pms_options o = {
        .size = 128u * MIB, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
    unsigned char *large = array("large", LARGE_BYTES);
    float *param = (float *)array("param", sizeof grad);
    commit();
    for (uint32_t i = 0; i < ELEMENTS; i++)
        grad[i] = 1;
    struct pms_optim_tensor t = {.param = param,
                                 .param_out = param,
                                 .grad = grad,
                                 .step = &step,
                                 .step_out = &steps,
                                 .count = ELEMENTS};
    struct pms_optim_hyper h = {.kind = PMS_OPTIM_SGD, .lr = 1};
    atomic_store(&stop, false);
    CHECK(pthread_create(&thread, NULL, fill_all_the_time, large) == 0);
    for (int i = 0; i < OPTIM_ROUNDS; i++)
        pms_optim_step(&t, 1, &h);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    uint32_t wrong = 0;
    for (uint32_t i = 0; i < ELEMENTS; i++)
        wrong += param[i] != -(float)OPTIM_ROUNDS;
    CHECK(wrong == 0);
    close_store();
}

/* ---- a new small array beside others, whose pages it shares ---- */

#define SHARING 31104u /* bytes: of a class whose blocks share pages */
#define PAIRS 80

static uint64_t kept[PAIRS], made[PAIRS];
static _Thread_local enum { NEITHER, FILLS, CAPTURES } role;
static _Atomic int filling, capturing;

static void spin(int turns)
{
    for (int i = 0; i < turns; i++)
        __asm__ volatile("");
}

/* That the two overlap often, nothing else: a fill begins about when the capture of its
 * neighbour does. */
static int meet(enum pms_primitive p, uintptr_t addr, size_t bytes)
{
    static _Thread_local unsigned seed = 1;
    (void)addr;
    if (role == FILLS && p == PMS_PRIM_COPY && bytes == SHARING) {
        int seen = atomic_load(&capturing);
        atomic_fetch_add(&filling, 1);
        for (int i = 0; i < 10000 && atomic_load(&capturing) == seen; i++)
            spin(100);
    }
    if (role == CAPTURES && p == PMS_PRIM_COPY && bytes > 2 * PMS_PAGE) {
        atomic_fetch_add(&capturing, 1);
        spin(rand_r(&seed) % 3000);
    }
    return 0;
}

static void *store_behind_the_new_ones(void *arg)
{
    (void)arg;
    role = CAPTURES;
    for (int i = 0; i < PAIRS; i++) {
        for (int k = 0; k < 100000 && atomic_load(&filling) <= i; k++)
            spin(100);
        memset(pool->map.user + made[i] + SHARING, 0x55, SHARING);
    }
    return NULL;
}

static int count_entry(void *count, const struct pms_entry *entry, const void *image)
{
    (void)entry, (void)image;
    ++*(uint32_t *)count;
    return 0;
}

static void put_sharing(char kind, int i, const void *content, uint64_t *at)
{
    char name[8];
    struct pms_error e;
    int n = snprintf(name, sizeof name, "%c%d", kind, i);
    CHECK(pms_object_put_array(pool, 0, name, (uint32_t)n, "m", 1, SHARING, PMS_FILL_COPY, content,
                               SHARING, 0, at, &e) == PMS_OK);
}

/* The fill of a new block changes pages while a neighbour's fault captures them: what is
 * checksummed is to be what is copied. */
static void a_new_array_spoils_no_capture_beside_it(void)
{
    static unsigned char old[SHARING], new[SHARING];
    char name[8];
    struct pms_error e;
    memset(old, 0x11, sizeof old);
    memset(new, 0x77, sizeof new);
    open_store();
    for (int i = 0; i < 2 * PAIRS; i++)
        put_sharing('k', i, old, i % 2 ? &kept[i / 2] : &made[i / 2]);
    commit();
    for (int i = 0; i < 2 * PAIRS; i += 2)
        CHECK(pms_object_remove(pool, 0, name, (uint32_t)snprintf(name, sizeof name, "k%d", i),
                                &e) == PMS_OK);
    commit();
    for (int round = 0; round < 20; round++) {
        pthread_t thread;
        uint32_t valid = 0;
        uint64_t at;
        /* where they will be: the allocator does as after its last roll back */
        for (int dry = 0; dry < 2; dry++) {
            for (int i = 0; i < PAIRS; i++)
                put_sharing('m', i, old, &made[i]);
            CHECK(pms_rollback(pool, &e) == PMS_OK);
        }
        atomic_store(&filling, 0);
        pms_persist_hook = meet;
        CHECK(pthread_create(&thread, NULL, store_behind_the_new_ones, NULL) == 0);
        role = FILLS;
        for (int i = 0; i < PAIRS; i++) {
            put_sharing('m', i, new, &at);
            CHECK(at == made[i]);
        }
        role = NEITHER;
        pthread_join(thread, NULL);
        pms_persist_hook = NULL;
        pms_undo_scan(&pool->undo, pool->undo.tag, count_entry, &valid);
        CHECK(valid == pool->undo.log.seq); /* all that a recovery would find */
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        for (int i = 0; i < PAIRS; i++)
            CHECK(memcmp(pool->map.user + kept[i], old, SHARING) == 0);
    }
    close_store();
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-race-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED};
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(a_racing_writer_hides_no_other_entry);
        TEST(an_optimizer_steps_while_others_capture_and_commit);
        TEST(a_new_array_spoils_no_capture_beside_it);
    }
    unlink(path);
    return test_summary();
}
