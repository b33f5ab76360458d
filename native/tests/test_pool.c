/* A store from the outside: create, write through protected pages, commit, roll back, reopen, in
 * every domain that runs here. */
#include "pool_store.h"

static uint32_t *find(struct pms_pool *pool, const char *name)
{
    struct pms_object o;
    struct pms_error e;
    struct pms_info info;
    if (pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e) != PMS_OK)
        return NULL;
    pms_pool_info(pool, &info);
    return (uint32_t *)(uintptr_t)(info.base + o.data);
}

static void sound(struct pms_pool *pool)
{
    static struct pms_check_report r;
    struct pms_error e;
    CHECK(pms_check(pool, &r, &e) == PMS_OK);
    CHECK(r.problem_count == 0);
    for (uint32_t i = 0; i < r.problem_count && i < PMS_CHECK_PROBLEMS; i++)
        printf("  problem: %s\n", r.problem[i]);
}

static void commit_and_reopen(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(4 << 20);
    uint32_t *a = array(pool, "a", 1000, NULL);
    uint64_t before = pms_epoch(pool);
    for (uint32_t i = 0; i < 1000; i++)
        a[i] = i;
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_epoch(pool) == before + 1);
    CHECK(pms_commit(pool, &e) == PMS_OK); /* nothing to commit: not a commit */
    CHECK(pms_epoch(pool) == before + 1);
    sound(pool);
    shut(pool, 0);
    pool = open_store(PMS_MODE_READ_WRITE, 0, &e);
    CHECK(pool != NULL);
    CHECK(pms_epoch(pool) == before + 1);
    CHECK(pool->opened.info.clean && pool->opened.info.undone_entries == 0);
    a = find(pool, "a");
    for (uint32_t i = 0; i < 1000; i++)
        CHECK(a[i] == i);
    sound(pool);
    shut(pool, 0);
}

static void rollback_restores(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(32 << 20);
    uint32_t *small = array(pool, "small", 16, NULL), *large = array(pool, "large", 1 << 20, NULL);
    small[3] = 7;
    large[12345] = 8;
    CHECK(pms_commit(pool, &e) == PMS_OK);
    for (int round = 0; round < 5; round++) { /* hot, after a while */
        CHECK(pms_begin(pool, 0, &e) == PMS_OK);
        small[3] = 100;
        for (uint32_t i = 0; i < 1 << 20; i += 1000)
            large[i] = i + 1;
        array(pool, "born", 5000, NULL)[4999] = 1;
        CHECK(pms_end(pool, 0, &e) == PMS_OK);
        CHECK(small[3] == 7 && large[12345] == 8 && large[1000] == 0);
        CHECK(find(pool, "born") == NULL);
        sound(pool);
    }
    for (uint32_t round = 0; round < 40; round++) {
        CHECK(pms_begin(pool, 0, &e) == PMS_OK);
        small[0] = round;
        CHECK(pms_end(pool, 1, &e) == PMS_OK);
    }
    struct pms_stats s;
    CHECK(pms_pool_stats(pool, &s, &e) == PMS_OK);
    CHECK(s.hot_ranges == 1);
    CHECK(pms_begin(pool, 0, &e) == PMS_OK);
    small[0] = 999;
    CHECK(pms_end(pool, 0, &e) == PMS_OK);
    CHECK(small[0] == 39);
    for (uint32_t round = 0; round < 60; round++) { /* no longer written: cools */
        large[round] = round;
        CHECK(pms_commit(pool, &e) == PMS_OK);
    }
    CHECK(pms_pool_stats(pool, &s, &e) == PMS_OK);
    CHECK(small[0] == 39);
    sound(pool);
    shut(pool, 1);
}

static void declared_writes(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(64 << 20);
    uint64_t off;
    uint32_t *a = array(pool, "a", 4 << 20, &off);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    struct pms_stats s, t;
    pms_pool_stats(pool, &s, &e);
    struct pms_range r = {(uint64_t)(uintptr_t)a, 16 << 20};
    CHECK(pms_will_write(pool, &r, 1, &e) == PMS_OK);
    memset(a, 1, 16 << 20);
    pms_pool_stats(pool, &t, &e);
    CHECK(t.faults == s.faults);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(a[0] == 0 && a[(4 << 20) - 1] == 0);
    struct pms_range bad = {(uint64_t)(uintptr_t)&e, 8};
    CHECK(pms_will_write(pool, &bad, 1, &e) == PMS_E_INVALID);
    struct pms_range header = {pool->opened.info.base, 8};
    CHECK(pms_will_write(pool, &header, 1, &e) == PMS_E_INVALID);
    shut(pool, 0);
}

/* Blocks side by side that are declared in every transaction become huge pages after a few:
 * nothing else changes, whoever writes. */
static void declared_again_and_again(void)
{
    enum { BLOCKS = 12, WORDS = 200 * 1024 + 100 }; /* neither huge nor on a huge page's edge */
    struct pms_error e;
    struct pms_pool *pool = fresh(64 << 20);
    uint32_t *a[BLOCKS];
    struct pms_range r[BLOCKS];
    for (unsigned i = 0; i < BLOCKS; i++) {
        char name[8];
        snprintf(name, sizeof name, "a%u", i);
        a[i] = array(pool, name, WORDS, NULL);
        r[BLOCKS - 1 - i] = (struct pms_range){(uint64_t)(uintptr_t)a[i], WORDS * 4};
    }
    CHECK(pms_commit(pool, &e) == PMS_OK);
    struct pms_stats s, t;
    pms_pool_stats(pool, &s, &e);
    for (uint32_t step = 1; step <= 20; step++) {
        CHECK(pms_begin(pool, 0, &e) == PMS_OK);
        CHECK(pms_will_write(pool, r, BLOCKS, &e) == PMS_OK);
        for (unsigned i = 0; i < BLOCKS; i++)
            for (uint32_t w = 0; w < WORDS; w += 500)
                a[i][w] = step * 1000 + i;
        bool keep = step % 7 != 0;
        CHECK(pms_end(pool, keep, &e) == PMS_OK);
        for (unsigned i = 0; i < BLOCKS; i++)
            for (uint32_t w = 0; w < WORDS; w += 125)
                CHECK(a[i][w] == (w % 500 ? 0 : (keep ? step : step - 1) * 1000 + i));
    }
    pms_pool_stats(pool, &t, &e);
    CHECK(t.faults == s.faults); /* all was declared */
    CHECK(pms_begin(pool, 0, &e) == PMS_OK);
    a[5][7] = 1; /* protected as ever: captured by a fault */
    CHECK(pms_end(pool, 0, &e) == PMS_OK);
    CHECK(a[5][7] == 0);
    pms_pool_stats(pool, &t, &e);
    CHECK(t.faults > s.faults);
    sound(pool);
    shut(pool, 1);
    pool = open_store(PMS_MODE_READ_WRITE, 0, &e);
    uint32_t *last = find(pool, "a11");
    CHECK(last && last[500] == 20 * 1000 + 11 && last[501] == 0);
    shut(pool, 0);
}

static void growth(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(1 << 20);
    uint32_t *first = array(pool, "first", 100, NULL);
    first[1] = 11;
    CHECK(pms_commit(pool, &e) == PMS_OK);
    first[1] = 12; /* uncommitted while the file grows */
    char name[16];
    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "a%d", i);
        uint32_t *a = array(pool, name, 1 << 18, NULL);
        a[5] = (uint32_t)i;
    }
    sound(pool);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(first[1] == 11 && find(pool, "a3") == NULL);
    sound(pool);
    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "b%d", i);
        array(pool, name, 1 << 18, NULL)[5] = (uint32_t)i;
    }
    CHECK(pms_commit(pool, &e) == PMS_OK);
    sound(pool);
    shut(pool, 0);
    pool = open_store(PMS_MODE_READ_WRITE, 0, &e);
    CHECK(pool != NULL && find(pool, "b19")[5] == 19 && find(pool, "first")[1] == 11);
    sound(pool);
    shut(pool, 0);
}

static void full_changes_nothing(void)
{
    struct pms_error e;
    struct pms_options o = {.size = 2 << 20,
                            .max_size = 2 << 20,
                            .mode = PMS_MODE_TRUNCATE,
                            .domain = domain,
                            .hot = 1};
    struct pms_pool *pool;
    CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_OK);
    char name[16];
    int n = 0;
    uint64_t data;
    for (;; n++) {
        snprintf(name, sizeof name, "a%d", n);
        int status = pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, 40000,
                                          PMS_FILL_ZERO, NULL, 0, 1, &data, &e);
        if (status != PMS_OK) {
            CHECK(status == PMS_E_FULL && e.needed > 0);
            break;
        }
        CHECK(n < 1000);
    }
    CHECK(n > 10);
    sound(pool);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_object_remove(pool, 0, "a0", 2, &e) == PMS_OK); /* deleting works when full */
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_object_put_array(pool, 0, "z", 1, "m", 1, 40000, PMS_FILL_ZERO, NULL, 0, 1, &data,
                               &e) == PMS_OK);
    for (int i = 1; i < n; i++) { /* I5: capture of everything always fits */
        snprintf(name, sizeof name, "a%d", i);
        memset(find(pool, name), i, 40000);
    }
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(find(pool, "a1")[0] == 0);
    sound(pool);
    shut(pool, 1);
}

static void groups(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(8 << 20);
    uint64_t g, h, data, count;
    CHECK(pms_object_group(pool, 0, "g", 1, 0, &g, &e) == PMS_E_NOT_FOUND);
    CHECK(pms_object_group(pool, 0, "g", 1, 1, &g, &e) == PMS_OK);
    CHECK(pms_object_group(pool, g, "h", 1, 1, &h, &e) == PMS_OK);
    for (int i = 0; i < 300; i++) {
        char name[16];
        snprintf(name, sizeof name, "n%d", i);
        CHECK(pms_object_put_value(pool, h, name, (uint32_t)strlen(name), "v", 1, &e) == PMS_OK);
    }
    CHECK(pms_object_put_array(pool, h, "x", 1, "m", 1, 10000, PMS_FILL_COPY, path, 100, 0, &data,
                               &e) == PMS_E_INVALID);
    CHECK(pms_object_put_array(pool, g, "x", 1, "m", 1, 10000, PMS_FILL_PATTERN, "abc", 3, 0, &data,
                               &e) == PMS_OK);
    CHECK(memcmp(pool->map.user + data, "abcabcabc", 9) == 0 &&
          pool->map.user[data + 9999] == "abc"[9999 % 3]);
    CHECK(pms_object_group(pool, g, "x", 1, 1, &h, &e) == PMS_E_EXISTS);
    sound(pool);
    CHECK(pms_object_count(pool, 0, &count, &e) == PMS_OK && count == 1);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_object_remove(pool, 0, "g", 1, &e) == PMS_OK);
    sound(pool);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    sound(pool);
    CHECK(pms_object_remove(pool, 0, "g", 1, &e) == PMS_OK);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_object_count(pool, 0, &count, &e) == PMS_OK && count == 0);
    struct pms_stats s;
    pms_pool_stats(pool, &s, &e);
    CHECK(s.blocks == 2); /* the root directory */
    sound(pool);
    shut(pool, 0);
}

/* A path is walked in the step that uses it, which makes the groups that are missing, or none;
 * what is got is pinned in the same step. */
static void paths(void)
{
    struct pms_error e;
    struct pms_object o, got;
    struct pms_stats stats;
    uint64_t data = 0;
    struct pms_pool *pool = fresh(4u << 20);
    CHECK(pms_object_put_array(pool, 0, "a\0b\0x", 5, "m", 1, 400, PMS_FILL_ZERO, NULL, 0, 1, &data,
                               &e) == PMS_OK);
    CHECK(pms_object_find(pool, 0, "a\0b\0x", 5, &o, &e) == PMS_OK && o.data == data);
    /* no group */
    CHECK(pms_object_put_value(pool, 0, "a\0b\0x\0y", 7, "v", 1, &e) == PMS_E_EXISTS);
    /* a group is not replaced */
    CHECK(pms_object_put_value(pool, 0, "a\0b", 3, "v", 1, &e) == PMS_E_EXISTS);
    CHECK(pms_object_put_array(pool, 0, "c\0d\0x", 5, "m", 1, 1ull << 61, PMS_FILL_ZERO, NULL, 0, 1,
                               &data, &e) != PMS_OK);
    CHECK(pms_object_find(pool, 0, "c", 1, &o, &e) == PMS_E_NOT_FOUND); /* taken back */
    CHECK(pms_object_get(pool, 0, "a\0b\0x", 5, &got, &e) == PMS_OK);
    CHECK(pms_object_remove(pool, 0, "a", 1, &e) == PMS_OK && pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_object_get(pool, 0, "a\0b\0x", 5, &o, &e) == PMS_E_NOT_FOUND &&
          !pms_is_live(pool, got.data, &e));
    for (int i = 0; i < 8; i++) { /* none of them lies in the block that was got */
        char name = (char)('p' + i);
        CHECK(pms_object_put_array(pool, 0, &name, 1, "m", 1, 400, PMS_FILL_ZERO, NULL, 0, 1, &data,
                                   &e) == PMS_OK);
        CHECK(data != got.data);
    }
    pms_unpin(pool, got.data);
    CHECK(pms_pool_stats(pool, &stats, &e) == PMS_OK && stats.pinned_bytes == 0);
    sound(pool);
    shut(pool, 1);
}

static void modes_and_locks(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(2 << 20), *second;
    array(pool, "a", 10, NULL)[0] = 5;
    CHECK(pms_commit(pool, &e) == PMS_OK);
    CHECK(open_store(PMS_MODE_READ_WRITE, 0, &e) == NULL && e.status == PMS_E_LOCKED);
    CHECK(open_store(PMS_MODE_READ, 0, &e) == NULL && e.status == PMS_E_LOCKED);
    CHECK(open_store(PMS_MODE_EXCLUSIVE, 0, &e) == NULL && e.sys_errno == EEXIST);
    shut(pool, 0);
    pool = open_store(PMS_MODE_READ, 0, &e);
    second = open_store(PMS_MODE_READ, 0, &e);
    CHECK(pool && second && find(second, "a")[0] == 5);
    CHECK(pms_commit(pool, &e) == PMS_E_READONLY);
    CHECK(open_store(PMS_MODE_READ_WRITE, 0, &e) == NULL && e.status == PMS_E_LOCKED);
    shut(pool, 0);
    shut(second, 0);
    unlink(path);
    CHECK(open_store(PMS_MODE_READ_WRITE, 0, &e) == NULL && e.sys_errno == ENOENT);
    CHECK(open_store(PMS_MODE_EXCLUSIVE, 1000, &e) == NULL && e.status == PMS_E_INVALID);
    CHECK(access(path, F_OK) != 0);
    close(open(path, O_CREAT | O_WRONLY, 0640));
    CHECK(open_store(PMS_MODE_READ, 0, &e) == NULL && e.status == PMS_E_NOT_A_STORE);
    pool = open_store(PMS_MODE_APPEND, 2 << 20, &e);
    CHECK(pool != NULL);
    struct stat st;
    CHECK(stat(path, &st) == 0 && (st.st_mode & 0777) == 0640);
    shut(pool, 0);
}

/* A view outlives its name, the roll back that unmade it, and the store. */
static void views(void)
{
    struct pms_error e;
    struct pms_object o;
    uint64_t off, off2;
    struct pms_pool *pool = fresh(8 << 20);
    uint32_t *a = array(pool, "a", 5000, &off);
    CHECK(pms_object_get(pool, 0, "a", 1, &o, &e) == PMS_OK && o.data == off);
    a[7] = 7;
    CHECK(pms_commit(pool, &e) == PMS_OK);
    uint32_t *b = array(pool, "b", 20000, &off2);
    CHECK(pms_object_get(pool, 0, "b", 1, &o, &e) == PMS_OK && o.data == off2);
    b[1] = 1;
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    b[2] = 2; /* its block is dead, and nobody else's */
    CHECK(pms_object_remove(pool, 0, "a", 1, &e) == PMS_OK);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    for (int i = 0; i < 30; i++) {
        char name[16];
        snprintf(name, sizeof name, "n%d", i);
        memset(array(pool, name, 20000, NULL), 0xee, 80000);
        memset(array(pool, name + 1, 5000, NULL), 0xee, 20000);
    }
    CHECK(a[7] == 7 && a[4999] == 0 && b[2] == 2);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    sound(pool);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    CHECK(a[7] == 7 && b[2] == 2);
    a[8] = 8;
    CHECK(a[8] == 8);
    CHECK(pms_commit(pool, &e) == PMS_E_CLOSED);
    pms_pool_release(pool);
    CHECK(a[8] == 8);
    pms_unpin(pool, off);
    pms_unpin(pool, off2);
}

/* Another domain takes over: what one log finished the other one knows. */
static void change_domain(void)
{
    struct pms_error e;
    struct pms_pool *pool = fresh(4 << 20);
    uint32_t *a = array(pool, "a", 3000, NULL);
    uint32_t value = 0;
    int mine = domain;
    for (unsigned i = 0; i < 9; i++) {
        a[100] = ++value;
        CHECK(pms_commit(pool, &e) == PMS_OK);
        a[100] = 0xffff;
        shut(pool, 0);
        domain = domains[i % 3];
        pool = open_store(PMS_MODE_READ_WRITE, 0, &e);
        CHECK(pool != NULL);
        a = find(pool, "a");
        CHECK(a[100] == value);
        sound(pool);
    }
    shut(pool, 0);
    domain = mine;
}

static void a_declared_write_is_where_it_belongs(void)
{
    struct pms_error e;
    uint64_t data;
    struct pms_pool *pool = fresh(4u << 20);
    CHECK(pms_object_put_array(pool, 0, "a", 1, "m", 1, 8192, PMS_FILL_ZERO, NULL, 0, 0, &data,
                               &e) == PMS_OK);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    unsigned char *a = pool->map.user + data;
    CHECK(declared_write(pool, a + 1000, "declared", 8, &e) == PMS_OK);
    CHECK(memcmp(a + 1000, "declared", 8) == 0 && a[0] == 0);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    shut(pool, 0);
}

/* ---- waiting for a block ---- */

/* An enemy's file: many groups that are one. The check's time must not be their number times the
 * directory's size. */
static void a_directory_with_two_owners_is_checked_once(void)
{
    static struct pms_check_report r;
    struct pms_error e;
    struct pms_object o;
    struct pms_pool *pool = fresh(4u << 20);
    uint64_t first, other;
    CHECK(pms_object_group(pool, 0, "a", 1, 1, &first, &e) == PMS_OK);
    for (char name = 'p'; name < 's'; name++)
        CHECK(pms_object_put_value(pool, first, &name, 1, "v", 1, &e) == PMS_OK);
    for (char name = 'b'; name < 'f'; name++) {
        CHECK(pms_object_group(pool, 0, &name, 1, 1, &other, &e) == PMS_OK);
        CHECK(pms_object_find(pool, 0, &name, 1, &o, &e) == PMS_OK);
        struct pms_node *node = pms_map_at(&pool->map, o.node);
        node->data = first;
    }
    CHECK(pms_check(pool, &r, &e) == PMS_OK);
    CHECK(r.problem_count > 0 && r.names == 5 + 3);
    pms_pool_close(pool, 0, &e);
    pms_pool_release(pool);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-pool-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    for (unsigned i = 0; i < 3; i++) {
        domain = domains[i];
        printf("domain %d\n", domain);
        TEST(commit_and_reopen);
        TEST(rollback_restores);
        TEST(declared_writes);
        TEST(declared_again_and_again);
        TEST(growth);
        TEST(full_changes_nothing);
        TEST(groups);
        TEST(paths);
        TEST(modes_and_locks);
        TEST(views);
        TEST(a_declared_write_is_where_it_belongs);
        TEST(a_directory_with_two_owners_is_checked_once);
        TEST(change_domain);
    }
    unlink(path);
    return test_summary();
}
