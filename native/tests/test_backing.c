/* Room on the disk for the log as a primitive like any other (seam/backing.h): killed at each,
 * refused at each, durable before anything relies on it, given back where it is of no use. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "crash/debug.h"
#include "heap/heap.h"
#include "thin_store.h"

/* ---- killed, and refused, anywhere ---- */

static _Atomic int *done;

/* 1: both are what they were; 2: both are new. Slots captured, more blocks, growth, a flip. */
static int work(void)
{
    uint64_t data;
    int status = put_array("more", 2 * MIB, &data);
    if (status == PMS_OK)
        status = declare(pair.data[pair.current], SLOT);
    if (status == PMS_OK)
        memset(slot(pair.current), 2, SLOT);
    if (status == PMS_OK)
        status = make_slots("grown", 6 * MIB);
    if (status == PMS_OK)
        memset(memory(beside), 2, BESIDE);
    if (status == PMS_OK)
        status = pms_commit(pool, &e);
    return status;
}

static int state(void)
{
    static struct pms_check_report r;
    struct pms_object o;
    if (!find() || !ok(pms_object_find(pool, 0, "beside", 6, &o, &e)))
        return 0;
    int value = slot(pair.current)[0];
    bool whole = all(slot(pair.current), SLOT, value) && all(memory(o.data), BESIDE, value);
    CHECK((pms_object_find(pool, 0, "more", 4, &o, &e) == PMS_OK) == (value == 2));
    CHECK(ok(pms_check(pool, &r, &e)) && r.problem_count == 0);
    return whole ? value : -1;
}

static void begin(void)
{
    open_with(PMS_MODE_TRUNCATE, domain == PMS_DOMAIN_FILE ? 40 * MIB : 16 * MIB, 0);
    CHECK(ok(put_array("beside", BESIDE, &beside)));
    CHECK(ok(make_slots("w", SLOT)));
    memset(memory(beside), 1, BESIDE);
    CHECK(find() && ok(declare(pair.data[pair.current], SLOT)));
    memset(slot(pair.current), 1, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
}

/* The state is one of the two that may be, and goes on from there. */
static void check_state(void)
{
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    int found = state();
    CHECK(found == *done || found == *done + 1);
    if (found == 1)
        CHECK(ok(work()));
    CHECK(state() == 2);
    close_store();
}

/* In a child, which is killed where `arm` says. */
static bool is_killed(void (*arm)(uint64_t n), uint64_t n)
{
    int ws;
    begin();
    close_store();
    *done = 1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        open_with(PMS_MODE_READ_WRITE, 0, 0);
        if (!find())
            _exit(9);
        arm(n);
        if (work() == PMS_OK)
            *done = 2;
        _exit(0);
    }
    waitpid(pid, &ws, 0);
    bool killed = WIFSIGNALED(ws);
    CHECK(killed ? WTERMSIG(ws) == SIGKILL : WEXITSTATUS(ws) == 0);
    return killed;
}

static void kills(void)
{
    bool killed = true;
    uint64_t points = 0;
    for (uint64_t n = 1; killed; n += n < 20 ? 1 : 61, points++) {
        killed = is_killed(pms_debug_kill_at, n);
        check_state();
    }
    CHECK(points > 20);
}

static uint64_t kill_at;
static bool behind;
static _Atomic uint64_t allocations;

static int kill_there(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    if (behind && allocations == kill_at) /* whatever comes next */
        kill(getpid(), SIGKILL);
    if (primitive == PMS_PRIM_ALLOCATE && ++allocations == kill_at && !behind)
        kill(getpid(), SIGKILL);
    return 0;
}

static void arm_at_allocation(uint64_t n)
{
    kill_at = n;
    allocations = 0;
    pms_persist_hook = kill_there;
}

static void kills_at_each_allocation(void)
{
    for (int side = 0; side < 2; side++) {
        uint64_t n = 1;
        behind = side;
        for (; is_killed(arm_at_allocation, n); n++)
            check_state();
        check_state();
        CHECK(n > 3);
    }
}

static void refusals(void)
{
    for (int n = 1, failed = 1; failed; n++) {
        begin();
        CHECK(n == 1 || find());
        asked = 0;
        fail_at = n;
        pms_persist_hook = refuse;
        int status = work();
        pms_persist_hook = NULL;
        failed = asked >= n;
        fail_at = 0;
        CHECK(status == PMS_OK || status == PMS_E_FULL);
        CHECK(failed || status == PMS_OK);
        if (status != PMS_OK) {
            CHECK(ok(pms_rollback(pool, &e)));
            CHECK(state() == 1);
            CHECK(ok(work()));
        }
        CHECK(state() == 2);
        close_store();
        open_with(PMS_MODE_READ_WRITE, 0, 0);
        CHECK(state() == 2);
        close_store();
    }
}

/* ---- durable first ---- */

static _Atomic uint64_t reserved, early;
static _Atomic int sync_error;

/* Between an allocation and its sync nothing is stored to the medium. */
static int watch(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    if (primitive == PMS_PRIM_ALLOCATE && bytes)
        reserved++;
    if (primitive == PMS_PRIM_STORE || primitive == PMS_PRIM_COPY || primitive == PMS_PRIM_FENCE)
        early += reserved > 0;
    if (primitive != PMS_PRIM_SYNC)
        return 0;
    reserved = 0;
    return sync_error;
}

/* As domain dax does it. */
static void an_allocation_is_durable_first(void)
{
    uint64_t data;
    if (domain != PMS_DOMAIN_EMULATED)
        return;
    made();
    uint64_t syncs = pool->persist.syncs;
    reserved = early = 0;
    pms_persist_hook = watch;
    CHECK(ok(declare(pair.data[pair.current], SLOT / 2)));
    memset(slot(pair.current), 3, SLOT); /* and by faults */
    CHECK(ok(put_array("more", 4 * MIB, &data)));
    pms_persist_hook = NULL;
    CHECK(pool->persist.syncs >= syncs + 3 && early == 0 && reserved == 0);
    CHECK(ok(pms_commit(pool, &e)));
    close_store();
}

static void a_sync_that_failed_is_not_asked_again(void)
{
    uint64_t data;
    if (domain != PMS_DOMAIN_EMULATED)
        return;
    made();
    uint64_t room = pool->undo.charge.backing.room;
    pms_persist_hook = watch;
    sync_error = EIO;
    CHECK(declare(pair.data[pair.current], SLOT) == PMS_E_OS && e.sys_errno == EIO);
    sync_error = 0;
    CHECK(declare(pair.data[pair.current], SLOT) == PMS_E_READONLY);
    CHECK(put_array("more", 4 * MIB, &data) == PMS_E_READONLY);
    pms_persist_hook = NULL;
    CHECK(pms_backing_reach(&pool->undo.charge.backing, room + 1) == EIO); /* as a fault does */
    CHECK(pool->undo.charge.backing.room == room && pool->undo.charge.of_slots == 0);
    memset(memory(beside), 4, BESIDE); /* what is backed is backed */
    CHECK(pms_commit(pool, &e) == PMS_E_READONLY);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_E_READONLY);
    pms_pool_release(pool);
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    CHECK(find() && all(memory(beside), BESIDE, 0));
    CHECK(ok(declare(pair.data[pair.current], SLOT)));
    close_store();
}

static int fail_elsewhere(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    pool->persist.failed_syncs += primitive == PMS_PRIM_MAP;
    return 0;
}

/* A write to slots in another thread backs log while the store grows. */
static void a_sync_that_failed_in_another_thread_is_told(void)
{
    uint64_t data;
    made();
    memset(&e, 0x55, sizeof e);
    pms_persist_hook = fail_elsewhere;
    int status = put_array("more", 30 * MIB, &data);
    pms_persist_hook = NULL;
    CHECK(status == PMS_E_READONLY && e.status == PMS_E_READONLY);
    CHECK(pms_commit(pool, &e) == PMS_E_READONLY);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_E_READONLY);
    pms_pool_release(pool);
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    CHECK(find() && all(memory(beside), BESIDE, 0));
    close_store();
}

/* ---- growth ---- */

/* What was captured of a block counts until the transaction is over, though its last view dies and
 * the store grows meanwhile. */
static void growth_takes_no_room_away(void)
{
    struct pms_object o;
    uint64_t gone;
    open_with(PMS_MODE_TRUNCATE, SIZE, 0);
    CHECK(ok(put_array("gone", 4 * MIB, &gone)) && ok(make_slots("w", SLOT)));
    CHECK(ok(pms_commit(pool, &e)) && find());
    CHECK(ok(pms_object_get(pool, 0, "gone", 4, &o, &e))); /* pinned */
    CHECK(ok(pms_object_remove(pool, 0, "gone", 4, &e)) && ok(pms_commit(pool, &e)));
    memset(memory(gone), 5, 4 * MIB);
    uint64_t ordinary = pool->undo.charge.ordinary;
    pms_unpin(pool, gone);
    uint32_t segments = pool->super.segment_count;
    CHECK(ok(make_slots("grown", 40 * MIB)) && pool->super.segment_count > segments);
    CHECK(pool->undo.charge.ordinary >= ordinary);
    CHECK(ok(declare(pair.data[pair.current], SLOT)));
    disk_is_full();
    memset(slot(pair.current), 6, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    CHECK(pool->undo.charge.ordinary < ordinary);
    close_store();
}

static uint64_t file_bytes(void)
{
    struct stat st;
    CHECK(stat(path, &st) == 0);
    return (uint64_t)st.st_size;
}

/* The disk gets full. */
static int refuse_from(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    return primitive == PMS_PRIM_ALLOCATE && bytes && ++asked >= fail_at ? ENOSPC : 0;
}

/* The disk's last bytes are nobody's for a growth that it has no room for. */
static void what_a_refused_growth_got_is_given_back(void)
{
    int refused = 0;
    for (bool again = true; again;) {
        uint64_t data;
        made();
        uint64_t before = allocated(), bytes = file_bytes();
        asked = 0;
        fail_at = refused + 1;
        pms_persist_hook = refuse_from;
        int status = put_array("more", 30 * MIB, &data);
        pms_persist_hook = NULL;
        again = asked >= fail_at;
        fail_at = 0;
        /* what was backed of the log that was there already stays */
        uint64_t most = before + pool->super.segment[0].log_bytes;
        CHECK(again ? status == PMS_E_FULL && allocated() <= most && file_bytes() == bytes
                    : ok(status));
        refused += again;
        CHECK(ok(put_array("after", 30 * MIB, &data)) && ok(pms_commit(pool, &e)));
        close_store();
        open_with(PMS_MODE_READ_WRITE, 0, 0);
        CHECK(find() && ok(pms_rollback(pool, &e)));
        close_store();
    }
    CHECK(refused >= 3);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-backing-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    done = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(kills);
        TEST(kills_at_each_allocation);
        TEST(refusals);
        TEST(an_allocation_is_durable_first);
        TEST(a_sync_that_failed_is_not_asked_again);
        TEST(a_sync_that_failed_in_another_thread_is_told);
        TEST(growth_takes_no_room_away);
        TEST(what_a_refused_growth_got_is_given_back);
    }
    unlink(path);
    return test_summary();
}
