/* Copies of a store that is being written: whoever reads the file from its beginning to its end,
 * at whatever speed, has a copy that opens as one of the commits, whole, or is refused. Of a store
 * that holds it may hold the commit before, and goes back to that. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "seam/footer.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define LARGE 160000u /* bytes: on pages of its own, captured piece by piece */
#define SMALL 200u    /* becomes hot */
#define TILES 24u     /* pages, one a transaction: more than the journal has records */
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
/* burst: pages that are read at once; the rest when the writer is through */
static unsigned credit, seed, burst;
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
    } else if (burst) {
        copy_pages(burst);
        burst = 0;
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
    /* the journal's thread may be in the hook of the copy before still */
    pthread_mutex_lock(&copying);
    from = open(path, O_RDONLY | O_CLOEXEC);
    to = open(copy_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    copied = credit = 0;
    ended = false;
    bool at_once = rand_r(&seed) % 2;
    speed = at_once ? 0 : 1u << rand_r(&seed) % 11;
    burst = at_once ? 1 + (unsigned)rand_r(&seed) % (unsigned)(lseek(from, 0, SEEK_END) / PMS_PAGE)
                    : 0;
    before_it = (unsigned)rand_r(&seed) % (at_once ? 100 : 400);
    pthread_mutex_unlock(&copying);
    pms_persist_hook = go_on;
}

static void end_copy(void)
{
    pms_persist_hook = NULL;
    pthread_mutex_lock(&copying); /* the journal's thread may be in it */
    copy_pages(~0ull);
    ended = true; /* for one that is late */
    close(from);
    close(to);
    pthread_mutex_unlock(&copying);
}

/* ---- the store: after each commit one number everywhere; a tile has that of the commit that
 * wrote it ---- */

static uint64_t put(const char *name, uint64_t bytes, unsigned char value)
{
    struct pms_error e;
    uint64_t data = 0;
    CHECK(pms_object_put_array(pool, 0, name, 1, "m", 1, bytes, PMS_FILL_PATTERN, &value, 1, 0,
                               &data, &e) == PMS_OK);
    return data;
}

static uint64_t large, small, tiles;
/* and uses again what was freed; else pages come home by the journal alone */
static bool allocates;
static bool holds; /* the store does */
static unsigned backs;

static unsigned char value_of(unsigned i) { return (unsigned char)(i + 2); }
static bool rolls_back(unsigned i) { return i % 11 == 10; }

static void transaction(unsigned i)
{
    struct pms_error e;
    unsigned char value = value_of(i);
    memset(pool->map.user + tiles + i % TILES * PMS_PAGE, value, PMS_PAGE);
    memset(pool->map.user + large, value, LARGE / 2);
    if (allocates)
        /* a new block; the old one is freed, and used again */
        put("n", i % 3 ? LARGE : 300, value);
    if (allocates && i % 16 == 15)
        put("g", (uint64_t)(i / 16) * 400000, value); /* may grow the file */
    memset(pool->map.user + large + LARGE / 2, value, LARGE / 2);
    memset(pool->map.user + small, value, SMALL);
    if (rolls_back(i))
        CHECK(pms_rollback(pool, &e) == PMS_OK);
    else
        CHECK(pms_commit(pool, &e) == PMS_OK);
}

static bool is_one_number(struct pms_pool *other, const char *name, unsigned char value)
{
    struct pms_error e;
    struct pms_object found;
    if (pms_object_find(other, 0, name, 1, &found, &e) != PMS_OK)
        return false;
    for (uint64_t i = 0; i < found.data_bytes; i++)
        if (other->map.user[found.data + i] != value)
            return false;
    return true;
}

static bool tiles_are_of(struct pms_pool *other, unsigned char value)
{
    struct pms_error e;
    struct pms_object found;
    unsigned char last[TILES];
    memset(last, 1, sizeof last);
    for (unsigned i = 0; value_of(i) <= value; i++)
        if (!rolls_back(i))
            last[i % TILES] = value_of(i);
    int status = pms_object_find(other, 0, "t", 1, &found, &e);
    if (status != PMS_OK)
        return status == PMS_E_NOT_FOUND; /* a store that was made without */
    for (uint64_t i = 0; i < TILES * PMS_PAGE; i++)
        if (other->map.user[found.data + i] != last[i / PMS_PAGE])
            return false;
    return true;
}

static bool is_a_commit(struct pms_pool *other, unsigned char *value)
{
    struct pms_error e;
    struct pms_object found;
    bool whole = pms_object_find(other, 0, "a", 1, &found, &e) == PMS_OK;
    *value = whole ? other->map.user[found.data] : 0;
    whole = whole && is_one_number(other, "a", *value) && is_one_number(other, "h", *value);
    whole = whole && tiles_are_of(other, *value);
    whole = whole && (!allocates || is_one_number(other, "n", *value));
    struct pms_check_report *r = malloc(sizeof *r);
    whole = whole && r && pms_check(other, r, &e) == PMS_OK && r->problem_count == 0;
    free(r);
    return whole;
}

static unsigned char commit_before(unsigned char value)
{
    unsigned i = value - value_of(0) - 1u;
    return value_of(rolls_back(i) ? i - 1 : i);
}

/* 1: a commit, whole; 0: refused; -1: anything else. */
static int look_at_copy(int mode)
{
    struct pms_options o = {.mode = mode, .domain = domain, .hot = 1};
    struct pms_error e;
    struct pms_pool *other;
    unsigned char value, before;
    int status = pms_pool_open(copy_path, &o, &other, &e);
    if (status != PMS_OK)
        return status == PMS_E_COPIED ? 0 : status == PMS_E_CORRUPT ? 0 : -1;
    bool whole = is_a_commit(other, &value);
    if (whole && mode == PMS_MODE_READ_WRITE && pms_holds(other)) {
        whole = pms_back(other, &e) == PMS_OK && is_a_commit(other, &before) &&
                before == commit_before(value);
        backs++;
    }
    pms_pool_close(other, 0, &e);
    pms_pool_release(other);
    return whole ? 1 : -1;
}

static void copies_beside_a_writer(void)
{
    unsigned whole = 0, refused = 0, torn = 0;
    for (seed = 1; seed <= COPIES; seed++) {
        unsigned chosen = seed;
        allocates = seed % 4 < 2;
        struct pms_options o = {
            .size = 3u << 20, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1, .hold = holds};
        struct pms_error e;
        if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
            abort();
        large = put("a", LARGE, 1);
        small = put("h", SMALL, 1);
        tiles = put("t", TILES * PMS_PAGE, 1);
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
    printf("     domain %d: %u whole, %u refused, %u torn; %u held\n", domain, whole, refused, torn,
           backs);
    CHECK(torn == 0 && whole > 0 && refused > 0 && (backs > 0) == holds);
    backs = 0;
}

static void copies_beside_a_writer_that_holds(void)
{
    holds = true;
    copies_beside_a_writer();
    holds = false;
}

/* ---- copies that are there in part when the writer does something of which the footer must
 * tell ---- */

static void open_store(int mode)
{
    struct pms_options o = {.size = 3u << 20, .mode = mode, .domain = domain, .hot = 1};
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
}

static void close_store(int commit)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, commit, &e) == PMS_OK);
    pms_pool_release(pool);
}

static void make_store(void)
{
    struct pms_error e;
    open_store(PMS_MODE_TRUNCATE);
    large = put("a", LARGE, 1);
    small = put("h", SMALL, 1);
    put("n", 300, 1);
    CHECK(pms_commit(pool, &e) == PMS_OK);
}

/* The copy has half of the large array: what comes after it is of another moment. */
static void copy_half(void)
{
    begin_copy();
    pms_persist_hook = NULL;
    pthread_mutex_lock(&copying);
    copy_pages((large + LARGE / 2) / PMS_PAGE);
    pthread_mutex_unlock(&copying);
}

static void store(unsigned char value)
{
    memset(pool->map.user + large, value, LARGE);
    memset(pool->map.user + small, value, SMALL);
}

static void the_writer_commits_once_and_closes(void)
{
    make_store();
    copy_half();
    store(2);
    put("n", 300, 2);
    close_store(1);
    end_copy();
    CHECK(look_at_copy(PMS_MODE_READ_WRITE) == 0);
}

static void the_writer_commits_once_closes_and_opens_again(void)
{
    make_store();
    copy_half();
    store(2);
    put("n", 300, 2);
    close_store(1);
    open_store(PMS_MODE_READ_WRITE);
    end_copy();
    CHECK(look_at_copy(PMS_MODE_READ_WRITE) == 0);
    close_store(0);
}

/* The closed file's log has entries that were captured ahead: they are not those of the session
 * that begins, which runs under other tags. */
static void the_store_is_opened_and_written(void)
{
    struct pms_error e;
    make_store();
    for (unsigned char i = 2; i < 12; i++) { /* small blocks that become hot */
        store(i);
        put("n", 300, i);
        CHECK(pms_commit(pool, &e) == PMS_OK);
    }
    store(12);
    put("n", 300, 12);
    close_store(1);
    copy_half();
    open_store(PMS_MODE_READ_WRITE);
    memset(pool->map.user + large + LARGE - 5000, 13, 5000); /* one entry */
    end_copy();
    /* there nothing of the session is in the file */
    CHECK(look_at_copy(PMS_MODE_READ_WRITE) == (domain == PMS_DOMAIN_FILE));
    close_store(0);
}

/* A fast writer comes that far within a minute. */
static void the_writer_is_many_transactions_ahead(void)
{
    make_store();
    copy_half();
    store(2);
    pms_footer_note(&pool->map, pool->tx.last + (1u << 23) + 2, 1);
    end_copy();
    CHECK(look_at_copy(PMS_MODE_READ_WRITE) == 0);
    close_store(0);
}

static void a_closed_store_is_copied(void)
{
    make_store();
    store(2);
    put("n", 300, 2);
    close_store(1);
    begin_copy();
    end_copy();
    CHECK(look_at_copy(PMS_MODE_READ) == 1);
    CHECK(look_at_copy(PMS_MODE_READ_WRITE) == 1);
    open_store(PMS_MODE_READ_WRITE); /* and after a close that committed nothing */
    close_store(0);
    begin_copy();
    end_copy();
    CHECK(look_at_copy(PMS_MODE_READ_WRITE) == 1);
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
        TEST(copies_beside_a_writer_that_holds);
        TEST(the_writer_commits_once_and_closes);
        TEST(the_writer_commits_once_closes_and_opens_again);
        TEST(the_store_is_opened_and_written);
        TEST(the_writer_is_many_transactions_ahead);
        TEST(a_closed_store_is_copied);
    }
    unlink(path);
    unlink(copy_path);
    return test_summary();
}
