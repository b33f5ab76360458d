/* Domain file: what a fault captured and nobody changed is left out of the commit's record, and
 * nothing else is. */
#include <errno.h>

#include "journal/journal.h"
#include "snapshot_store.h"

#define MIB (1u << 20)
#define BIG (3u * MIB)
#define FEW                                                                              \
    6u /* pages of a record beside the user's: its head, the root's, and what marks cost \
        */

static struct pms_error e;

static void close_store(void)
{
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static void reopen(void)
{
    close_store();
    pool = open_store(path, PMS_MODE_READ_WRITE, 0);
}

static unsigned char *content(int i) { return memory(committed.array[i].off); }

static void declare(int i)
{
    struct pms_range r = {(uint64_t)(uintptr_t)content(i), committed.array[i].bytes};
    CHECK(pms_will_write(pool, &r, 1, &e) == PMS_OK);
}

/* Arrays that this session has written all over: none of their pages is bare any more. */
static void make_store(int arrays, uint64_t bytes)
{
    uint64_t seed = 5;
    domain = PMS_DOMAIN_FILE;
    pool = open_store(path, PMS_MODE_TRUNCATE, 24u * MIB);
    for (int i = 0; i < arrays; i++)
        make(i, bytes, &seed);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    model_take();
}

static bool as_committed(const char *what)
{
    for (int i = 0; i < NAMES; i++) {
        const struct image *a = &committed.array[i];
        struct pms_object o;
        bool same = find(i, &o) ? a->content && o.data_bytes == a->bytes &&
                                      memcmp(memory(o.data), a->content, a->bytes) == 0
                                : !a->content;
        if (!same) {
            printf("array %d is not as it was committed: %s\n", i, what);
            return false;
        }
    }
    return true;
}

/* Pages that the commit writes into the journal. */
static uint64_t commit(void)
{
    uint64_t before = pms_journal_written(pool->journal);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    model_take();
    return (pms_journal_written(pool->journal) - before) / PMS_PAGE;
}

/* As a program that stores what is there already. */
static void store_same(int i)
{
    volatile unsigned char *at = content(i);
    for (uint64_t o = 0; o < committed.array[i].bytes; o += PMS_PAGE / 2)
        at[o] = at[o];
}

/* ---- what is left out ---- */

static void pages_that_were_stored_to(void)
{
    make_store(1, BIG);
    for (unsigned apart = 1; apart <= 64; apart *= 4) {
        unsigned pages = BIG / PMS_PAGE / apart;
        /* its first byte, its last, and one in between: a whole page is compared */
        for (unsigned p = 0; p < pages; p++)
            content(0)[p * apart * PMS_PAGE + (p % 3) * (PMS_PAGE / 2) - (p % 3 == 2)] ^= 1;
        uint64_t written = commit();
        CHECK(written >= pages && written <= pages + FEW);
        reopen();
        CHECK(as_committed("pages apart"));
        declare(0);
        memset(content(0), (int)apart, BIG);
        commit();
    }
    close_store();
}

static void what_is_as_it_was(void)
{
    make_store(1, BIG);
    store_same(0);
    CHECK(commit() <= FEW);
    memset(content(0), 3, BIG); /* and back: the last commit's bytes */
    for (unsigned p = 0; p < BIG / PMS_PAGE; p++)
        content(0)[p * PMS_PAGE] = 4;
    CHECK(commit() >= BIG / PMS_PAGE);
    memset(content(0), 3, BIG);
    for (unsigned p = 0; p < BIG / PMS_PAGE; p++)
        content(0)[p * PMS_PAGE] = 4;
    CHECK(commit() <= FEW);
    reopen();
    CHECK(as_committed("changed and changed back"));
    close_store();
}

/* A page is compared with its own pre-image, not with one beside it. */
static void pages_that_trade_places(void)
{
    make_store(1, BIG);
    declare(0);
    for (unsigned p = 0; p < BIG / PMS_PAGE; p++)
        memset(content(0) + p * PMS_PAGE, (int)(p % 2), PMS_PAGE);
    commit();
    for (unsigned p = 0; p < BIG / PMS_PAGE; p++)
        memset(content(0) + p * PMS_PAGE, (int)((p + 1) % 2), PMS_PAGE);
    CHECK(commit() >= BIG / PMS_PAGE);
    reopen();
    CHECK(as_committed("traded"));
    close_store();
}

/* ---- what is not ---- */

static void what_was_declared(void)
{
    make_store(2, BIG);
    declare(0);
    store_same(1);
    uint64_t written = commit();
    CHECK(written >= BIG / PMS_PAGE && written <= BIG / PMS_PAGE + FEW);
    close_store();
}

/* Their pre-images are at home. */
static void what_is_bare(void)
{
    make_store(1, BIG);
    reopen();
    store_same(0);
    CHECK(commit() > FEW);
    store_same(0);
    CHECK(commit() <= FEW);
    close_store();
}

/* Small arrays share pages: what one transaction makes beside what it stores to. */
static void blocks_on_one_page(bool made_first)
{
    uint64_t seed = 17;
    make_store(4, 700);
    for (int i = 4; i < 12; i++) {
        if (made_first)
            make(i, 700, &seed);
        store_same(i % 4);
        if (!made_first)
            make(i, 700, &seed);
        commit();
        reopen();
        CHECK(as_committed(made_first ? "made, then stored to" : "stored to, then made"));
    }
    close_store();
}

static void what_was_born_beside(void)
{
    blocks_on_one_page(true);
    blocks_on_one_page(false);
}

/* A range that is written in each transaction stays writable: stored to by another thread, it is
 * committed as it was copied. */
static void hot_ranges(void)
{
    struct pms_stats stats;
    make_store(3, 5000);
    for (int round = 0; round < 12; round++) {
        if (round % 5 != 4)
            memset(content(0), round, 5000);
        store_same(1);
        commit();
        CHECK(pms_pool_stats(pool, &stats, &e) == PMS_OK);
        CHECK(round < 6 || stats.hot_ranges > 0);
    }
    reopen();
    CHECK(as_committed("hot"));
    close_store();
}

/* ---- places that memory and home tell differently ---- */

#define PLACE (1u << 20)

static void fill(uint64_t off, uint64_t word)
{
    volatile uint64_t *at = (volatile void *)memory(off);
    for (uint64_t k = 0; k < PLACE / sizeof word; k++)
        at[k] = word;
}

static uint64_t make_place(const char *name, uint64_t word, bool pinned)
{
    uint64_t data = 0;
    struct pms_object o;
    CHECK(pms_object_put_array(pool, 0, name, 2, "m", 1, PLACE, PMS_FILL_PATTERN, &word, 8, 0,
                               &data, &e) == PMS_OK);
    if (pinned)
        CHECK(pms_object_find(pool, 0, name, 2, &o, &e) == PMS_OK &&
              pms_object_pin(pool, &o, &e) == PMS_OK);
    return data;
}

/* A view outlives a roll back and is stored to; then its place goes to an array with the same
 * content, in one transaction. */
static void the_place_of_what_was_rolled_back(void)
{
    make_store(1, BIG);
    uint64_t dead = make_place("a1", 1, true);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    fill(dead, 2);
    pms_unpin(pool, dead);
    CHECK(make_place("a1", 3, false) == dead);
    fill(dead, 1);
    CHECK(commit() > PLACE / PMS_PAGE);
    reopen();
    CHECK(as_committed("in the place of what was rolled back"));
    close_store();
}

/* The same with an idle slot, which was stored to without capture. */
static void the_place_of_a_slot(void)
{
    struct pms_object o;
    make_store(1, BIG);
    CHECK(pms_object_make_slots(pool, 0, "s", 1, "\x81\xa5slots", 8, "m", 1, PLACE, 0, &e) ==
          PMS_OK);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_slot_get(pool, 0, "s", 1, PMS_SLOT_NEXT, &o, &e) == PMS_OK);
    fill(o.data, 2);
    CHECK(pms_object_remove(pool, 0, "s", 1, &e) == PMS_OK && pms_commit(pool, &e) == PMS_OK);
    fill(o.data, 2);
    pms_unpin(pool, o.data);
    uint64_t one = make_place("a1", 2, false), other = make_place("a2", 2, false);
    CHECK(one == o.data || other == o.data);
    CHECK(commit() > 2 * PLACE / PMS_PAGE);
    reopen();
    CHECK(as_committed("in the place of a slot"));
    close_store();
}

/* ---- a commit that fails ---- */

static _Atomic int fails;
static int fail(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    return primitive == PMS_PRIM_PWRITE && fails ? ENOSPC : 0;
}

/* The transaction goes on, and is compared with the same pre-images. */
static void a_commit_that_failed(void)
{
    make_store(1, BIG);
    for (unsigned p = 0; p < BIG / PMS_PAGE; p += 2)
        content(0)[p * PMS_PAGE] ^= 1;
    CHECK(pms_journal_drain(pool->journal, &e) == PMS_OK);
    fails = 1;
    pms_persist_hook = fail;
    CHECK(pms_commit(pool, &e) != PMS_OK);
    fails = 0;
    pms_persist_hook = NULL;
    for (unsigned p = 0; p < BIG / PMS_PAGE; p += 4)
        content(0)[p * PMS_PAGE] ^= 1; /* back */
    content(0)[BIG - 1] ^= 1;
    uint64_t written = commit();
    CHECK(written > BIG / PMS_PAGE / 4 && written <= BIG / PMS_PAGE / 4 + 1 + FEW);
    reopen();
    CHECK(as_committed("after a commit that failed"));
    close_store();
}

/* ---- anything, at random ---- */

static void step(uint64_t *seed)
{
    struct pms_object o;
    int i = (int)draw(seed, NAMES);
    if (!find(i, &o) || draw(seed, 2)) {
        change(seed);
        return;
    }
    volatile unsigned char *at = memory(o.data);
    uint64_t from = draw(seed, (uint32_t)o.data_bytes), n = 1 + draw(seed, 40000);
    n = n < o.data_bytes - from ? n : o.data_bytes - from;
    for (uint64_t k = from; k < from + n; k++)
        at[k] = at[k];
    if (draw(seed, 2))
        at[from + n - 1] ^= 1;
}

static void at_random(void)
{
    const char *given = getenv("PMS_TEST_SEED");
    uint64_t seed = given ? strtoull(given, NULL, 0) : 20261126;
    make_store(12, 300000);
    int before = test_checks_failed;
    for (int i = 0; i < 300 / SHARE && test_checks_failed == before; i++) {
        for (uint32_t k = 1 + draw(&seed, 5); k > 0; k--)
            step(&seed);
        if (draw(&seed, 4)) {
            commit();
        } else {
            CHECK(pms_rollback(pool, &e) == PMS_OK);
            CHECK(as_committed("rolled back"));
        }
        if (draw(&seed, 4) == 0) {
            reopen();
            CHECK(as_committed("reopened"));
        }
    }
    close_store();
}

int main(void)
{
    const char *folder = getenv("PMS_TEST_DIR");
    snprintf(path, sizeof path, "%s/pms-test-unchanged-%ld", folder ? folder : "/dev/shm",
             (long)getpid());
    TEST(pages_that_were_stored_to);
    TEST(what_is_as_it_was);
    TEST(pages_that_trade_places);
    TEST(what_was_declared);
    TEST(what_is_bare);
    TEST(what_was_born_beside);
    TEST(hot_ranges);
    TEST(the_place_of_what_was_rolled_back);
    TEST(the_place_of_a_slot);
    TEST(a_commit_that_failed);
    TEST(at_random);
    model_free(&committed);
    unlink(path);
    return test_summary();
}
