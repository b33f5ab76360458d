/* Power failure in the byte-addressable domains, as far as the order of primitives tells (the
 * rule of PMDK's pmemcheck): every line that the engine stored to is written back, and fenced,
 * before the anchor makes it the state (F2); and nothing that the last commit needs is stored to
 * before its log entry is durable (F1). A line never written back is the bug that no SIGKILL
 * shows. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "declared.h"
#include "test.h"

#define MIB (1u << 20)
#define SIZE (8u * MIB)
#define ROOM                                                                            \
    (192u * MIB) /* bytes of file that are watched: more than growth in this test makes \
                  */
#define LINES (ROOM / PMS_LINE)

enum line_state { DURABLE, STORED, FLUSHED };
static unsigned char state[LINES]; /* enum line_state of each line of the file */
static uint32_t touched[LINES];    /* lines that are not DURABLE */
static uint32_t touched_count;
static uint64_t anchors, unflushed, first_unflushed;
static struct pms_pool *pool;
static char path[256];

static bool offset_of(uintptr_t addr, uint64_t *off)
{
    uintptr_t user = (uintptr_t)pool->map.user, engine = (uintptr_t)pool->map.engine;
    uintptr_t base = addr >= engine && addr < engine + ROOM ? engine : user;
    *off = addr - base;
    return addr >= base && *off < ROOM;
}

static void set(uint64_t off, uint64_t bytes, enum line_state to)
{
    for (uint64_t l = off / PMS_LINE; bytes && l <= (off + bytes - 1) / PMS_LINE && l < LINES;
         l++) {
        if (to == FLUSHED && state[l] == DURABLE)
            continue;
        if (state[l] == DURABLE)
            touched[touched_count++] = (uint32_t)l;
        state[l] = (unsigned char)to;
    }
}

static void fence(void)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < touched_count; i++) {
        if (state[touched[i]] == FLUSHED)
            state[touched[i]] = DURABLE;
        else
            touched[left++] = touched[i];
    }
    touched_count = left;
}

static void at_anchor(void)
{
    anchors++;
    for (uint32_t i = 0; i < touched_count; i++) {
        if (!unflushed++)
            first_unflushed = (uint64_t)touched[i] * PMS_LINE;
    }
}

static int watch(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    uint64_t off;
    if (primitive == PMS_PRIM_FENCE)
        fence();
    if ((primitive != PMS_PRIM_STORE && primitive != PMS_PRIM_COPY &&
         primitive != PMS_PRIM_FLUSH) ||
        !offset_of(addr, &off))
        return 0;
    if (primitive == PMS_PRIM_STORE && off == PMS_OFF_ANCHOR)
        at_anchor();
    if (primitive == PMS_PRIM_COPY) { /* non-temporal: nothing stays in the cache */
        set(off, bytes, STORED);
        set(off, bytes, FLUSHED);
    } else {
        set(off, bytes, primitive == PMS_PRIM_STORE ? STORED : FLUSHED);
    }
    return 0;
}

/* ---- work ---- */

static uint64_t random_state = 0x2545f4914f6cdd1dull;

static uint32_t draw(uint32_t n)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)(random_state * 2685821657736338717ull >> 33) % n;
}

static void value(uint64_t dir, uint32_t number, uint32_t bytes)
{
    struct pms_error e;
    char name[16], meta[256];
    memset(meta, (int)draw(256), sizeof meta);
    int n = snprintf(name, sizeof name, "n%u", number);
    CHECK(pms_object_put_value(pool, dir, name, (uint32_t)n, meta, bytes, &e) == PMS_OK);
}

static unsigned char *array(uint32_t number, uint64_t bytes, int fill)
{
    struct pms_error e;
    char name[16];
    uint64_t data = 0;
    int n = snprintf(name, sizeof name, "a%u", number);
    CHECK(pms_object_put_array(pool, 0, name, (uint32_t)n, "m", 1, bytes, fill, NULL, 0, 0, &data,
                               &e) == PMS_OK);
    return pool->map.user + data;
}

static void remove_any(const char *kind, uint32_t number)
{
    struct pms_error e;
    char name[16];
    int n = snprintf(name, sizeof name, "%s%u", kind, number);
    int status = pms_object_remove(pool, 0, name, (uint32_t)n, &e);
    CHECK(status == PMS_OK || status == PMS_E_NOT_FOUND);
}

static void store_8(unsigned char *addr)
{
    struct pms_error e;
    uint64_t x = random_state;
    CHECK(declared_write(pool, addr, &x, sizeof x, &e) == PMS_OK);
}

static void one_operation(void)
{
    static const uint64_t sizes[] = {8, 100, 4096, 20000, 70000, MIB};
    struct pms_error e;
    uint64_t group;
    uint64_t bytes = sizes[draw(6)];
    uint32_t n = draw(40);
    unsigned char *a;
    switch (draw(7)) {
    case 0:
    case 1: value(0, n, draw(200)); break;
    case 2:
        a = array(n, bytes, draw(2) ? PMS_FILL_ZERO : PMS_FILL_NONE);
        store_8(a); /* into what this transaction made */
        a[bytes - 1]++;
        store_8(a + bytes - 8);
        break;
    case 3: remove_any("n", n); break;
    case 4: remove_any("a", n); break;
    case 5:
        if (pms_object_group(pool, 0, "g", 1, 1, &group, &e) == PMS_OK)
            for (uint32_t i = 0; i < 100; i++)
                value(group, i, 8);
        break;
    default:
        if (draw(4) == 0) {
            int status = pms_object_remove(pool, 0, "g", 1, &e);
            CHECK(status == PMS_OK || status == PMS_E_NOT_FOUND);
        }
    }
}

static void every_stored_line_is_written_back(void)
{
    struct pms_options o = {.size = SIZE,
                            .max_size = ROOM,
                            .mode = PMS_MODE_TRUNCATE,
                            .domain = PMS_DOMAIN_EMULATED,
                            .hot = 1};
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
    pms_persist_hook = watch;
    for (int t = 0; t < 300; t++) {
        for (uint32_t i = draw(12); i > 0; i--)
            one_operation();
        CHECK((draw(6) ? pms_commit(pool, &e) : pms_rollback(pool, &e)) == PMS_OK);
        if (unflushed) {
            printf("transaction %d: %llu lines not durable before the anchor, the first at %llu\n",
                   t, (unsigned long long)unflushed, (unsigned long long)first_unflushed);
            break;
        }
    }
    pms_persist_hook = NULL;
    CHECK(unflushed == 0);
    CHECK(anchors > 100);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* ---- large ranges: by all cores, and each core's write-backs are fenced by itself ---- */

#define LARGE (24u * MIB)
static pthread_mutex_t large_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t large_off, large_anchors, large_missed;
static bool large_durable[LARGE / PMS_LINE];
static __thread struct {
    uint64_t off, bytes;
} own_flush[64];
static __thread uint32_t own_flushes;

static void large_is(uint64_t off, uint64_t bytes, bool durable)
{
    for (uint64_t l = off / PMS_LINE; l < (off + bytes) / PMS_LINE; l++)
        large_durable[l] = durable;
}

static int watch_large(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    uint64_t off;
    pthread_mutex_lock(&large_lock);
    if (primitive == PMS_PRIM_FENCE) {
        for (; own_flushes > 0; own_flushes--)
            large_is(own_flush[own_flushes - 1].off, own_flush[own_flushes - 1].bytes, true);
    } else if (offset_of(addr, &off) && primitive == PMS_PRIM_STORE && off == PMS_OFF_ANCHOR) {
        large_anchors++;
        for (uint64_t l = 0; l < LARGE / PMS_LINE; l++)
            large_missed += !large_durable[l];
    } else if (offset_of(addr, &off) && primitive == PMS_PRIM_FLUSH && off >= large_off &&
               off + bytes <= large_off + LARGE) {
        if (own_flushes == 64)
            abort();
        own_flush[own_flushes].off = off - large_off;
        own_flush[own_flushes++].bytes = bytes;
    }
    pthread_mutex_unlock(&large_lock);
    return 0;
}

static void large_ranges_are_written_back_whole(void)
{
    struct pms_options o = {
        .size = SIZE, .max_size = ROOM, .mode = PMS_MODE_TRUNCATE, .domain = PMS_DOMAIN_EMULATED};
    struct pms_error e;
    struct pms_stats before, after;
    CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_OK);
    unsigned char *a = array(0, LARGE, PMS_FILL_ZERO);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    large_off = (uint64_t)(a - pool->map.user);
    for (int t = 0; t < 20; t++) {
        struct pms_range all = {(uint64_t)(uintptr_t)a, LARGE};
        CHECK(pms_will_write(pool, &all, 1, &e) == PMS_OK);
        memset(a, t, LARGE);
        large_is(0, LARGE, false);
        CHECK(pms_pool_stats(pool, &before, &e) == PMS_OK);
        pms_persist_hook = watch_large;
        CHECK(pms_commit(pool, &e) == PMS_OK);
        pms_persist_hook = NULL;
        CHECK(pms_pool_stats(pool, &after, &e) == PMS_OK);
        CHECK(after.lines - before.lines >= LARGE / PMS_LINE);
    }
    CHECK(large_anchors == 20 && large_missed == 0);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

/* ---- recovery in another domain than the one that crashed ---- */

static char order[1 << 16]; /* a letter for each primitive of a recovery */
static size_t order_length;

static int note_order(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    /* the anchor: alone on its page */
    bool word = primitive == PMS_PRIM_STORE && bytes == sizeof(uint64_t) && addr % PMS_PAGE == 0;
    char letter = word ? 'A' : ".SFfPY.aCM"[primitive];
    if (order_length < sizeof order - 1)
        order[order_length++] = letter;
    return 0;
}

static void copy_file(const char *from, const char *to)
{
    static char block[MIB];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    if (!in || !out)
        abort();
    for (size_t n; (n = fread(block, 1, sizeof block, in)) > 0;)
        CHECK(fwrite(block, 1, n, out) == n);
    fclose(in);
    fclose(out);
}

/* The log of a domain that writes back is undone with write-back, whatever domain is asked for
 * now; and synced: the mapping in which it is undone is not MAP_SYNC. */
static void undone_with_the_guarantees_of_the_domain_that_crashed(void)
{
    static const int next[] = {PMS_DOMAIN_EMULATED, PMS_DOMAIN_PROCESS, PMS_DOMAIN_FILE};
    for (size_t i = 0; i < sizeof next / sizeof next[0]; i++) {
        struct pms_options o = {
            .size = SIZE, .mode = PMS_MODE_TRUNCATE, .domain = PMS_DOMAIN_EMULATED};
        struct pms_error e;
        char crashed[300];
        snprintf(crashed, sizeof crashed, "%s-crashed", path);
        CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_OK);
        unsigned char *a = array(0, 100000, PMS_FILL_ZERO);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        memset(a, 1, 100000);
        copy_file(path, crashed); /* what a SIGKILL would leave */
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
        order_length = 0;
        pms_persist_hook = note_order;
        o.mode = PMS_MODE_READ_WRITE;
        o.domain = next[i];
        CHECK(pms_pool_open(crashed, &o, &pool, &e) == PMS_OK);
        pms_persist_hook = NULL;
        order[order_length] = '\0';
        CHECK(pool->opened.info.undone_entries > 0);
        const char *anchor = strchr(order, 'A'), *sync = strchr(order, 'Y');
        CHECK(anchor && sync && sync < anchor); /* pre-images before the anchor */
        CHECK(anchor && anchor[1] == 'F');      /* which is written back, */
        CHECK(anchor && strchr(anchor, 'Y'));   /* and synced before the log is used again */
        CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
        pms_pool_release(pool);
        unlink(crashed);
    }
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-durable-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    TEST(every_stored_line_is_written_back);
    TEST(large_ranges_are_written_back_whole);
    TEST(undone_with_the_guarantees_of_the_domain_that_crashed);
    unlink(path);
    return test_summary();
}
