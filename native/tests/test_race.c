/* Threads that store while the transaction ends: what they write may land on either side of it, but nothing else is harmed. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool_state.h"
#include "test.h"

#define MIB (1u << 20)
#define HOT_BYTES 60000u
#define COLD_BYTES (256u << 10)
#define ROUNDS 400

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

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-race-%ld", getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED};
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(a_racing_writer_hides_no_other_entry);
    }
    unlink(path);
    return test_summary();
}
