/* Golden counts: lines written back and fences of one whole transaction, in domain emulated.
 * These are what persistent memory is slow at, and a change that adds one shows here, not in a
 * benchmark. Change a number only for a reason that the commit tells.
 *
 * For comparison PMDK's libpmemobj 2.0, by its own count (src/test/obj_persist_count): lines
 * flushed / drains of
 *     empty transaction 0/2; add of a small range 3/3; allocation 4/1; free 1/1.
 * Ours below hold everything from begin to the durable commit, names and the number of commits
 * included. Two fences are the least that a commit in place can do: data before the anchor (F2),
 * the anchor before commit returns (F3). A third (F1) orders pre-images before stores that were
 * not foreseen. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define MIB (1u << 20)

static char path[256];
static struct pms_pool *pool;
static unsigned char *small, *large;

/* ---- operations ---- */

static bool ok(int status) { return status == PMS_OK; }

static unsigned char *put_array(const char *name, uint64_t bytes)
{
    struct pms_error e;
    struct pms_info info;
    uint64_t data = 0;
    CHECK(ok(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                  PMS_FILL_ZERO, NULL, 0, 0, &data, &e)));
    pms_pool_info(pool, &info);
    return (unsigned char *)(uintptr_t)(info.base + data);
}

static void put_value(const char *name, const char *value)
{
    struct pms_error e;
    CHECK(ok(pms_object_put_value(pool, 0, name, (uint32_t)strlen(name), value,
                                  (uint32_t)strlen(value), &e)));
}

static void begin(void)
{
    struct pms_error e;
    CHECK(ok(pms_begin(pool, 0, &e)));
}

static void end(int commit)
{
    struct pms_error e;
    CHECK(ok(pms_end(pool, commit, &e)));
}

static void declare(void *addr, uint64_t bytes)
{
    struct pms_error e;
    struct pms_range r = {(uint64_t)(uintptr_t)addr, bytes};
    CHECK(ok(pms_will_write(pool, &r, 1, &e)));
}

static void write_8(unsigned char *addr)
{
    static uint64_t value = 1;
    value++;
    declare(addr, sizeof value);
    memcpy(addr, &value, sizeof value);
}

static void remove_name(const char *name)
{
    struct pms_error e;
    CHECK(ok(pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e)));
}

static void do_nothing(void) { begin(), end(1); }
static void do_nothing_and_roll_back(void) { begin(), end(0); }
static void do_write_8(void) { begin(), write_8(small), end(1); }
/* one page */
static void do_write_8_twice(void) { begin(), write_8(small), write_8(small + 16), end(1); }
static void do_touch(void) { begin(), small[8]++, end(1); }
static void do_touch_declared(void) { begin(), declare(small, 64), memset(small, 1, 64), end(1); }
static void do_touch_and_roll_back(void) { begin(), small[8]++, end(0); }

/* of the same length: the one that is there would not be stored again */
static const char *another_value(void)
{
    static char text[8];
    static unsigned n;
    snprintf(text, sizeof text, "%03u", n++ % 1000);
    return text;
}

static void do_value(void) { begin(), put_value("value", another_value()), end(1); }
static void do_same_value(void) { begin(), put_value("value", "one"), end(1); }
static void do_new_value(void) { begin(), put_value("new", "one"), end(1); }
static void do_ten_values(void) /* new ones the first time: after a warm-up, replaced in place */
{
    char name[8];
    begin();
    for (int i = 0; i < 10; i++)
        snprintf(name, sizeof name, "n%d", i), put_value(name, another_value());
    end(1);
}
static void do_array(void) { begin(), put_array("new", 64), end(1); }
static void do_large_array(void) { begin(), put_array("new", MIB), end(1); }
static void do_remove_value(void) { begin(), remove_name("value"), end(1); }
static void do_remove_array(void) { begin(), remove_name("small"), end(1); }
static void do_roll_back_array(void) { begin(), put_array("new", 64), end(0); }
static void do_overwrite(void) { begin(), declare(large, MIB), memset(large, 2, MIB), end(1); }

/* ---- groups, lists, slots: each made by a setup of its own, as what is there changes where
 * things lie ---- */

#define SLOT (96u << 10)

static uint64_t items;

static void do_group(void)
{
    struct pms_error e;
    uint64_t group;
    begin();
    CHECK(ok(pms_object_group(pool, 0, "group", 5, 1, &group, &e)));
    end(1);
}

static void splice(uint64_t at, uint64_t remove, const char *value)
{
    struct pms_error e;
    const struct pms_new_item item = {
        .meta = value, .meta_bytes = (uint32_t)strlen(value), .kind = PMS_OBJECT_VALUE};
    begin();
    CHECK(ok(pms_sequence_splice(pool, items, NULL, 0, at, remove, 1, &item, 1, &e)));
    end(1);
}

static void make_list(void)
{
    struct pms_error e;
    CHECK(ok(pms_object_list(pool, 0, "items", 5, 1, &items, &e)));
    for (uint64_t i = 0; i < 20; i++)
        splice(i, 0, "one");
}

static void do_append(void) { splice(20, 0, "one"); }
static void do_replace_item(void) { splice(10, 1, another_value()); }
static void do_insert_item(void) { splice(0, 0, "one"); }

static void make_pair(void)
{
    struct pms_error e;
    uint64_t group, data;
    CHECK(ok(pms_object_group(pool, 0, "pair", 4, 1, &group, &e)));
    for (int i = 0; i < 2; i++)
        CHECK(ok(pms_object_put_array(pool, group, i ? "1" : "0", 1, "m", 1, SLOT,
                                      PMS_FILL_ZERO | PMS_FILL_OF_SLOT, NULL, 0, 0, &data, &e)));
    CHECK(ok(pms_object_describe_group(pool, 0, "pair", 4, "\x81\xa5slots", 8, &e)));
    CHECK(ok(pms_commit(pool, &e)));
}

static void do_flip(void)
{
    struct pms_error e;
    struct pms_info info;
    struct pms_object next;
    pms_pool_info(pool, &info);
    begin();
    CHECK(ok(pms_slot_get(pool, 0, "pair", 4, PMS_SLOT_NEXT, &next, &e)));
    memset((unsigned char *)(uintptr_t)(info.base + next.data), 5, SLOT);
    pms_unpin(pool, next.data);
    CHECK(ok(pms_slot_flip(pool, 0, "pair", 4, NULL, &e)));
    end(1);
}

/* ---- the table ---- */

struct golden {
    const char *name;
    void (*run)(void);
    int warm_up; /* runs before the one that counts */
    uint64_t fences, lines;
    void (*setup)(void); /* what else is in the store; may be NULL */
};

/* Lines of every commit: the root, the anchor, and the root's pre-image for the next
 * transaction. A granule the engine stores to: a line of log, and its own. A page the user
 * stores to: 65 of log and 64 of its own; a hot one the same, but for the next time. */
static const struct golden golden[] = {
    {"empty transaction", do_nothing, 0, 0, 0, NULL},
    {"empty, rolled back", do_nothing_and_roll_back, 0, 0, 0, NULL},
    {"8 bytes, declared, first", do_write_8, 0, 3, 132, NULL},
    {"8 bytes, declared, steady", do_write_8, 5, 2, 132, NULL},
    {"2 x 8 bytes in one page, steady", do_write_8_twice, 5, 2, 132, NULL},
    {"undeclared store into 64 bytes, first", do_touch, 0, 3, 132, NULL},
    {"undeclared store into 64 bytes, hot", do_touch, 20, 2, 132, NULL},
    {"declared store into 64 bytes, first", do_touch_declared, 0, 3, 132, NULL},
    {"undeclared store, rolled back", do_touch_and_roll_back, 0, 3, 132, NULL},
    {"value replaced in place, first", do_value, 0, 3, 6, NULL},
    {"value replaced in place, steady", do_value, 5, 2, 5, NULL},
    {"value replaced by itself", do_same_value, 0, 0, 0, NULL},
    {"new value", do_new_value, 0, 4, 20, NULL},
    {"ten values replaced in place", do_ten_values, 1, 12, 23, NULL},
    {"new array of 64 bytes", do_array, 0, 5, 18, NULL},
    {"new array of 1 MiB", do_large_array, 0, 5, 32787, NULL},
    {"value removed", do_remove_value, 0, 4, 17, NULL},
    {"array removed", do_remove_array, 0, 5, 16, NULL},
    {"new array, rolled back", do_roll_back_array, 0, 5, 18, NULL},
    {"1 MiB overwritten, declared", do_overwrite, 0, 3, 32773, NULL},
    {"new group", do_group, 0, 6, 35, NULL},
    {"list: item appended", do_append, 0, 2, 13, make_list},
    {"list: item replaced, steady", do_replace_item, 5, 2, 9, make_list},
    {"list: item put first", do_insert_item, 0, 3, 15, make_list},
    {"slots of 96 KiB: next written and flipped", do_flip, 5, 2, 1541, make_pair},
};

/* A store as it is after some use: a value, a small and a large array, the last transaction of
 * no help to the next. */
static void prepare(void)
{
    struct pms_options o = {
        .size = 16u << 20, .mode = PMS_MODE_TRUNCATE, .domain = PMS_DOMAIN_EMULATED, .hot = 1};
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK) {
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
        abort();
    }
    put_value("value", "one");
    small = put_array("small", 64);
    put_array("beside", 64);
    put_array("x", 40000);
    large = put_array("large", MIB);
    /* log on the disk for what is made later: to back it takes a sync */
    put_array("room", 4 * MIB);
    CHECK(ok(pms_object_remove(pool, 0, "room", 4, &e)));
    CHECK(ok(pms_commit(pool, &e)));
}

static void finish(void)
{
    struct pms_error e;
    CHECK(ok(pms_pool_close(pool, 0, &e)));
    pms_pool_release(pool);
}

static void count(const struct golden *g, uint64_t *fences, uint64_t *lines)
{
    struct pms_stats before, after;
    struct pms_error e;
    prepare();
    if (g->setup)
        g->setup();
    for (int i = 0; i < g->warm_up; i++)
        g->run();
    CHECK(ok(pms_pool_stats(pool, &before, &e)));
    g->run();
    CHECK(ok(pms_pool_stats(pool, &after, &e)));
    CHECK(after.syncs == before.syncs);
    *fences = after.fences - before.fences;
    *lines = after.lines - before.lines;
    finish();
}

static void counts_are_golden(void)
{
    for (size_t i = 0; i < sizeof golden / sizeof golden[0]; i++) {
        uint64_t fences, lines;
        count(&golden[i], &fences, &lines);
        CHECK(fences == golden[i].fences);
        CHECK(lines == golden[i].lines);
        printf("  %-40s %3llu fences %6llu lines\n", golden[i].name, (unsigned long long)fences,
               (unsigned long long)lines);
    }
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-golden-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    TEST(counts_are_golden);
    unlink(path);
    return test_summary();
}
