/* Copies of a store that is being written: whoever reads the file from its beginning to its end, at whatever speed, has a copy that opens
 * as one of the commits, whole, or is refused. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pool_state.h"
#include "test.h"

#define LARGE 160000u /* bytes: on pages of its own, captured piece by piece */
#define SMALL 200u    /* becomes hot */
#define ROUNDS 40u
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define COPIES 30u
#else
#define COPIES 100u
#endif

static char path[256], copy_path[300];
static int domain;
static struct pms_pool *pool;

/* ---- a copy that goes on at each primitive, of whatever thread ---- */

static pthread_mutex_t copying = PTHREAD_MUTEX_INITIALIZER;
static int from = -1, to = -1;
static uint64_t copied, speed; /* bytes; pages a primitive, in 16ths */
static unsigned credit, seed;
static _Atomic unsigned before_it; /* primitives until it begins */
static _Atomic bool ended;

static void copy_pages(uint64_t pages)
{
    static unsigned char page[PMS_PAGE];
    for (; pages && !ended; pages--) {
        ssize_t n = pread(from, page, sizeof page, (off_t)copied);
        ended = n <= 0;
        if (n > 0 && pwrite(to, page, (size_t)n, (off_t)copied) == n)
            copied += (uint64_t)n;
    }
}

static int go_on(enum pms_primitive p, uintptr_t addr, size_t bytes)
{
    (void)p, (void)addr, (void)bytes;
    if (pthread_mutex_trylock(&copying) != 0)
        return 0;
    if (before_it) {
        before_it--;
    } else {
        credit += (unsigned)speed;
        copy_pages(credit / 16);
        credit %= 16;
    }
    pthread_mutex_unlock(&copying);
    return 0;
}

static void begin_copy(void)
{
    from = open(path, O_RDONLY | O_CLOEXEC);
    to = open(copy_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    copied = credit = 0;
    ended = false;
    speed = 1u << rand_r(&seed) % 11;
    before_it = (unsigned)rand_r(&seed) % 400;
    pms_persist_hook = go_on;
}

static void end_copy(void)
{
    pms_persist_hook = NULL;
    pthread_mutex_lock(&copying); /* the journal's thread may be in it */
    copy_pages(~0ull);
    pthread_mutex_unlock(&copying);
    close(from);
    close(to);
}

/* ---- the store: after each commit all of it is one number ---- */

static uint64_t put(const char *name, uint64_t bytes, unsigned char value)
{
    struct pms_error e;
    uint64_t data = 0;
    CHECK(pms_object_put_array(pool, 0, name, 1, "m", 1, bytes, PMS_FILL_PATTERN, &value, 1, 0, &data, &e) == PMS_OK);
    return data;
}

static uint64_t large, small;

static void transaction(unsigned i)
{
    struct pms_error e;
    unsigned char value = (unsigned char)(i % 251 + 1);
    memset(pool->map.user + large, value, LARGE / 2);
    put("n", i % 3 ? LARGE : 300, value); /* a new block; the old one is freed, and used again */
    if (i % 16 == 15)
        put("g", (uint64_t)(i / 16) * 400000, value); /* may grow the file */
    memset(pool->map.user + large + LARGE / 2, value, LARGE / 2);
    memset(pool->map.user + small, value, SMALL);
    if (i % 11 == 10)
        CHECK(pms_rollback(pool, &e) == PMS_OK);
    else
        CHECK(pms_commit(pool, &e) == PMS_OK);
}

static bool is_one_number(struct pms_pool *other, const char *name, uint64_t bytes, unsigned char value)
{
    struct pms_error e;
    struct pms_object found;
    if (pms_object_find(other, 0, name, 1, &found, &e) != PMS_OK)
        return false;
    for (uint64_t i = 0; i < bytes; i++)
        if (other->map.user[found.data + i] != value)
            return false;
    return true;
}

/* 1: a commit, whole; 0: refused; -1: anything else. */
static int look_at_copy(int mode)
{
    struct pms_options o = {.mode = mode, .domain = domain, .hot = 1};
    struct pms_error e;
    struct pms_object found;
    struct pms_pool *other;
    int status = pms_pool_open(copy_path, &o, &other, &e);
    if (status != PMS_OK)
        return status == PMS_E_COPIED ? 0 : status == PMS_E_CORRUPT ? 0 : -1;
    bool whole = pms_object_find(other, 0, "a", 1, &found, &e) == PMS_OK;
    unsigned char value = whole ? other->map.user[found.data] : 0;
    whole = whole && is_one_number(other, "a", LARGE, value) && is_one_number(other, "h", SMALL, value);
    whole = whole && is_one_number(other, "n", 300, value);
    struct pms_check_report *r = malloc(sizeof *r);
    whole = whole && r && pms_check(other, r, &e) == PMS_OK && r->problem_count == 0;
    free(r);
    pms_pool_close(other, 0, &e);
    pms_pool_release(other);
    return whole ? 1 : -1;
}

static void copies_beside_a_writer(void)
{
    unsigned whole = 0, refused = 0, torn = 0;
    for (seed = 1; seed <= COPIES; seed++) {
        unsigned chosen = seed;
        struct pms_options o = {.size = 3u << 20, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
        struct pms_error e;
        if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
            abort();
        large = put("a", LARGE, 1);
        small = put("h", SMALL, 1);
        put("n", 300, 1);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        for (unsigned i = 0; i < 6; i++)
            transaction(i);
        begin_copy();
        unsigned rounds = (unsigned)rand_r(&seed) % ROUNDS;
        for (unsigned i = 6; i < 6 + rounds && !ended; i++)
            transaction(i);
        end_copy();
        int found = look_at_copy(chosen % 2 ? PMS_MODE_READ : PMS_MODE_READ_WRITE);
        whole += found == 1;
        refused += found == 0;
        torn += found < 0;
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
        seed = chosen;
    }
    printf("     domain %d: %u whole, %u refused, %u torn\n", domain, whole, refused, torn);
    CHECK(torn == 0 && whole > 0 && refused > 0);
}

int main(void)
{
    const char *dir = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-footer-%ld", dir, (long)getpid());
    snprintf(copy_path, sizeof copy_path, "%s-copy", path);
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(copies_beside_a_writer);
    }
    unlink(path);
    unlink(copy_path);
    return test_summary();
}
