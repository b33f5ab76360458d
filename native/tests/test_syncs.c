/* A sync of the store's file that fails, wherever it is made: somebody is told, nothing more is
 * committed, the store does not say that it was closed, and the last commit is what is found. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "one_store.h"
#include "store/grow.h"

#define MIB (1u << 20)

/* ---- the nth sync through the descriptor of commits fails ---- */

static _Atomic int left;
static int sync_errno;

static int fail_nth(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    bool counts = primitive == PMS_PRIM_SYNC && pms_persist_hook_fd == pool->opened.fd;
    return counts && atomic_fetch_sub(&left, 1) == 1 ? sync_errno : 0;
}

/* ---- what makes syncs ---- */

static int put(const char *name, uint64_t bytes)
{
    uint64_t data;
    return pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes, PMS_FILL_ZERO,
                                NULL, 0, 0, &data, &e);
}

static int slots(const char *name, uint64_t bytes)
{
    return pms_object_make_slots(pool, 0, name, (uint32_t)strlen(name), "\x81\xa5slots", 8, "m", 1,
                                 bytes, 0, &e);
}

static int grow(void) { return put("large", 24 * MIB - 100); }
static int make_groups(void)
{
    int status = PMS_OK;
    char name[16];
    for (int i = 0; status == PMS_OK && pool->super.segment_count == 1; i++) {
        uint64_t group;
        int n = snprintf(name, sizeof name, "group%d", i);
        status = pms_object_group(pool, 0, name, (uint32_t)n, 1, &group, &e);
    }
    return status;
}
static int make_slots(void) { return slots("new", 100000); }
static int hold_for_job(void) { return pms_hold_for_job(pool, &e); }
static int write_history(void) { return pms_history_write(pool, "abc", 3, &e); }
static int mend(void) { return pms_mend_superblock(pool, &e); }
static int write_slots(void)
{
    struct pms_slot_pair pair;
    int status = pms_slot_find(pool, 0, "w", 1, &pair, &e);
    struct pms_range all = {(uint64_t)(uintptr_t)memory(pair.data[pair.current]), pair.bytes};
    return status == PMS_OK ? pms_will_write(pool, &all, 1, &e) : status;
}
static int commit(void)
{
    int status = put("before", 2000);
    return status == PMS_OK ? pms_commit(pool, &e) : status;
}
static int grow_and_commit(void)
{
    int status = grow();
    return status == PMS_OK ? pms_commit(pool, &e) : status;
}

static int (*const act[])(void) = {grow, make_groups, make_slots,  hold_for_job,   write_history,
                                   mend, commit,      write_slots, grow_and_commit};

/* ---- */

static bool said_closed(void)
{
    struct pms_session session;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(ok(pms_session_read(fd, &session, &e)));
    close(fd);
    return session.state == PMS_SESSION_CLEAN;
}

static void is_sound(void)
{
    struct pms_check_report *r = malloc(sizeof *r);
    CHECK(r && ok(pms_check(pool, r, &e)) && r->problem_count == 0);
    if (r && r->problem_count)
        printf("  %s\n", r->problem[0]);
    free(r);
}

static void check_refusals(void)
{
    CHECK(e.status == PMS_E_OS && (e.sys_errno == sync_errno || e.sys_errno == EIO));
    is_sound();
    CHECK(put("more", 1000) == PMS_E_READONLY);
    CHECK(pms_commit(pool, &e) == PMS_E_READONLY);
    CHECK(pms_history_write(pool, "abc", 3, &e) == PMS_E_READONLY);
    CHECK(pms_pool_close(pool, 1, &e) == PMS_E_READONLY);
    pms_pool_release(pool);
    CHECK(!said_closed());
    CHECK(open_store(PMS_MODE_READ_WRITE));
}

/* Returns whether there was an nth sync. */
static bool fails_at(int (*what)(void), int nth, uint64_t bytes)
{
    struct pms_object o;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    CHECK(ok(put("before", 1000)) && (what != write_slots || ok(slots("w", 2 * MIB))));
    CHECK(ok(pms_commit(pool, &e)));
    memset(&e, 0, sizeof e);
    atomic_store(&left, nth);
    pms_persist_hook = fail_nth;
    int status = what();
    pms_persist_hook = NULL;
    bool failed = atomic_load(&left) <= 0;
    CHECK((status == PMS_OK) == !failed && (status == PMS_OK || e.status == status));
    if (failed)
        check_refusals();
    CHECK(ok(pms_object_find(pool, 0, "before", 6, &o, &e)));
    CHECK(o.data_bytes == bytes || (what == commit && o.data_bytes == 2000));
    CHECK(ok(put("after", 1000)) && (what == hold_for_job || ok(pms_commit(pool, &e))));
    is_sound();
    close_store();
    return failed;
}

static void no_failed_sync_is_forgotten(void)
{
    int failed = 0;
    for (size_t i = 0; i < sizeof act / sizeof *act; i++)
        for (int nth = 1; fails_at(act[i], nth, 1000); nth++)
            failed++;
    CHECK(failed > 8); /* of growth alone: the page table's, the superblock's, its twin's */
}

/* ---- the directory's ---- */

static _Atomic int directory_syncs, directory_errno;

int fsync(int fd)
{
    atomic_fetch_add(&directory_syncs, 1);
    errno = atomic_load(&directory_errno);
    return errno ? -1 : fdatasync(fd);
}

/* Else commits would be durable in a file that nobody finds: who made it may have failed, or died,
 * before its name was. */
static void a_name_is_durable_before_an_open_returns(void)
{
    struct pms_options o = {.size = 4u << 20, .domain = domain, .hot = 1};
    static const int modes[] = {PMS_MODE_TRUNCATE, PMS_MODE_READ_WRITE};
    unlink(path);
    for (int i = 0; i < 2; i++) {
        o.mode = modes[i];
        atomic_store(&directory_errno, EIO);
        CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_E_OS && e.sys_errno == EIO);
        atomic_store(&directory_errno, 0);
    }
    for (int i = 0; i < 2; i++) { /* one that was closed, too: it may have been put there since */
        int before = atomic_load(&directory_syncs);
        CHECK(open_store(PMS_MODE_READ_WRITE));
        CHECK(atomic_load(&directory_syncs) == before + 1);
        CHECK(ok(put("a", 100)) && ok(pms_commit(pool, &e)));
        close_store();
    }
    int before = atomic_load(&directory_syncs);
    CHECK(open_store(PMS_MODE_READ) && atomic_load(&directory_syncs) == before);
    close_store();
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-syncs-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    static const int reasons[] = {EIO, ENOSPC, EDQUOT};
    for (size_t i = 0; i < 2 * sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i / 2];
        sync_errno = reasons[i % 3];
        TEST(no_failed_sync_is_forgotten);
        TEST(a_name_is_durable_before_an_open_returns);
    }
    unlink(path);
    return test_summary();
}
