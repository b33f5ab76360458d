/* Threads that store while the transaction ends: what they write may land on either side of it, but nothing else is harmed. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "optim.h"
#include "pool_state.h"
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
    struct pms_options o = {.size = 16u * MIB, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
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
    CHECK(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes, PMS_FILL_ZERO, NULL, 0, 0, &data, &e) == PMS_OK);
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
    for (uint32_t i = 0; !atomic_load_explicit(&stop, memory_order_relaxed); i = (i + 61) % HOT_BYTES)
        a[i] = (unsigned char)(a[i] + 1);
    return NULL;
}

/* A hot range is captured while it is writable. A torn pre-image would end the log there, and hide every later entry (I1, I2). */
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

/* The step's outputs are protected by the other thread's commits: they fault on the caller and on the workers, and are captured there. */
static void an_optimizer_steps_while_others_capture_and_commit(void)
{
    static float grad[ELEMENTS], step = 0, steps;
    struct pms_error e;
    pthread_t thread;
    struct pms_options o = {.size = 128u * MIB, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
    unsigned char *large = array("large", LARGE_BYTES);
    float *param = (float *)array("param", sizeof grad);
    commit();
    for (uint32_t i = 0; i < ELEMENTS; i++)
        grad[i] = 1;
    struct pms_optim_tensor t = {.param = param, .param_out = param, .grad = grad, .step = &step, .step_out = &steps, .count = ELEMENTS};
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

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-race-%ld", getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED};
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(a_racing_writer_hides_no_other_entry);
        TEST(an_optimizer_steps_while_others_capture_and_commit);
    }
    unlink(path);
    return test_summary();
}
