/* Domain file: one transaction that overwrites more than the memory that its process may take. */
#include <dirent.h>
#include <sched.h>
#include <signal.h>

#include "flush/chunks.h"
#include "log/snapshot.h"
#include "many_arrays.h"
#include "seam/mappings.h"
#include "seam/memory.h"
#include "seam/spill.h"

#define MOST (SHARE + SHARE / 4) /* of pages of the process's own, in a transaction */
#define SLACK (12 * MIB)         /* what else the engine has, and pieces */

static uint64_t size = 110 * MIB;

static void open_with(int mode, int hold)
{
    struct pms_options o = {.size = size, .mode = mode, .domain = PMS_DOMAIN_FILE, .hot = 1};
    o.hold = hold;
    CHECK(ok(pms_pool_open(path, &o, &pool, &e)));
}

static void close_store(int commit) { shut(pool, commit); }

static void write_all(uint32_t value)
{
    for (int i = 0; i < ARRAYS; i++)
        write_array(i, value + (uint32_t)i);
}

static void open_again(int hold)
{
    open_with(PMS_MODE_READ_WRITE, hold);
    find_all();
}

static void check_store(void)
{
    struct pms_check_report report = {0};
    CHECK(ok(pms_check(pool, &report, &e)) && report.problem_count == 0);
}

/* All arrays, committed, and opened anew: nothing is the process's own. */
static void fill_store(int hold)
{
    pms_memory_set_limit(2 * SHARE);
    open_with(PMS_MODE_TRUNCATE, hold);
    for (int i = 0; i < ARRAYS; i++) {
        make(i);
        write_array(i, (uint32_t)i);
        CHECK(ok(pms_commit(pool, &e)));
    }
    close_store(0);
    open_again(hold);
}

static uint64_t spilled(void) { return pms_spill_bytes(&pool->map); }

static void expect_after_close(uint32_t value)
{
    close_store(0);
    open_again(0);
    CHECK(all_are(value));
    check_store();
    close_store(0);
}

/* ---- how much ---- */

static void it_is_bounded(void)
{
    uint64_t before = anonymous(), most = 0;
    fill_store(0);
    for (int i = 0; i < ARRAYS; i++) {
        write_array(i, 500 + (uint32_t)i);
        uint64_t now = anonymous() - before;
        most = now > most ? now : most;
    }
    uint64_t lay = spilled();
    CHECK(pms_map_own_bytes(&pool->map) <= MOST + MIB && lay >= ARRAYS * BYTES - MOST - MIB);
    CHECK(all_are(500) && ok(pms_commit(pool, &e)) && all_are(500));
    uint64_t now = anonymous() - before;
    most = now > most ? now : most;
    printf("  in the spill %llu MiB, anonymous %llu MiB at most\n", (unsigned long long)(lay / MIB),
           (unsigned long long)(most / MIB));
    CHECK(!RSS_TELLS || most <= MOST + SLACK);
    CHECK(spilled() == 0 && pool->map.spill.fd < 0);
    CHECK(pms_map_own_bytes(&pool->map) <= SHARE + MIB);
    expect_after_close(500);
}

/* From the second one on pages are the process's own, and have pre-images: the log goes there. */
static void it_is_bounded_again_and_again(void)
{
    uint64_t before = anonymous(), most = 0;
    bool logged = false;
    fill_store(0);
    for (uint32_t round = 1; round <= 6; round++) {
        for (int k = 0; k < ARRAYS; k++) {
            int i = round % 2 ? k : ARRAYS - 1 - k;
            write_array(i, round * 100 + (uint32_t)i);
            uint64_t now = anonymous() - before;
            most = now > most ? now : most;
        }
        logged = logged || pool->undo.log.spilled[1][0].bytes;
        CHECK(spilled() > 0 && all_are(round * 100));
        CHECK(ok(round % 3 ? pms_commit(pool, &e) : pms_rollback(pool, &e)));
        CHECK(all_are((round - (round % 3 == 0)) * 100));
    }
    printf("  anonymous %llu MiB at most\n", (unsigned long long)(most / MIB));
    CHECK(!RSS_TELLS || most <= MOST + SLACK);
    CHECK(logged && pms_memory_own() <= SHARE + MIB);
    expect_after_close(500);
    CHECK(pms_memory_own() == 0);
}

static void what_is_declared_at_once_is_bounded(void)
{
    static struct pms_range range[ARRAYS];
    uint64_t before = anonymous();
    fill_store(0);
    for (int i = 0; i < ARRAYS; i++)
        range[i] = (struct pms_range){(uint64_t)(uintptr_t)at[i], BYTES};
    CHECK(ok(pms_will_write(pool, range, ARRAYS, &e)));
    CHECK(spilled() >= ARRAYS * BYTES - MOST - MIB && all_are(0));
    CHECK(!RSS_TELLS || anonymous() - before <= MOST + SLACK);
    uint64_t faults = pool->capture.faults;
    write_all(7);
    CHECK(pool->capture.faults == faults); /* what was declared is writable */
    CHECK(!RSS_TELLS || anonymous() - before <= MOST + SLACK);
    CHECK(ok(pms_commit(pool, &e)));
    expect_after_close(7);
}

/* A page here and there: what is captured is more than a page, so that mappings do not run out. */
static void what_is_scattered_is_bounded(void)
{
    fill_store(0);
    int64_t mappings = 0; /* as memory gets short */
    for (uint64_t page = 0; page < BYTES / PMS_PAGE; page += 16)
        for (int i = 0; i < ARRAYS; i++) {
            mappings = spilled() ? mappings : pms_mappings_used();
            at[i][page * 1024 + 5] = 77;
        }
    CHECK(spilled() > 0 && pms_map_own_bytes(&pool->map) <= MOST + MIB);
    CHECK(pms_mappings_used() - mappings < 6 * ARRAYS);
    for (uint64_t page = 0; page < BYTES / PMS_PAGE; page += 16)
        for (int i = 0; i < ARRAYS; i++)
            at[i][page * 1024 + 5] = (uint32_t)(page * 1024) + 5 + (uint32_t)i;
    CHECK(ok(pms_commit(pool, &e)) && all_are(0) && spilled() == 0);
    expect_after_close(0);
}

static void small_blocks_are_bounded(void)
{
    static uint32_t *small[6000];
    pms_memory_set_limit(2 * SHARE);
    open_with(PMS_MODE_TRUNCATE, 0);
    for (int i = 0; i < 6000; i++) {
        char name[8];
        name_of(i, name);
        small[i] = array(pool, name, 2500, NULL);
        small[i][2400] = (uint32_t)i;
    }
    CHECK(ok(pms_commit(pool, &e)));
    close_store(0);
    open_with(PMS_MODE_READ_WRITE, 0);
    for (int i = 0; i < 6000; i++) {
        char name[8];
        struct pms_object o;
        name_of(i, name);
        CHECK(ok(pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e)));
        small[i] = (uint32_t *)(void *)(pool->map.user + o.data);
    }
    for (uint32_t round = 0; round < 3; round++) {
        for (int i = 0; i < 6000; i++)
            small[i][2400]++;
        CHECK(spilled() > 0 && pms_map_own_bytes(&pool->map) <= MOST + MIB);
        CHECK(ok(round == 1 ? pms_rollback(pool, &e) : pms_commit(pool, &e)));
    }
    bool all = true;
    for (int i = 0; i < 6000; i++)
        all = all && small[i][2400] == (uint32_t)i + 2;
    CHECK(all);
    close_store(0);
}

static void without_need_nothing_goes_there(void)
{
    fill_store(0);
    pms_memory_set_limit(1ull << 40);
    write_all(3);
    CHECK(spilled() == 0 && pool->map.spill.fd < 0);
    CHECK(ok(pms_commit(pool, &e)));
    expect_after_close(3);
}

/* ---- what it is ---- */

static void a_roll_back(void)
{
    fill_store(0);
    for (uint32_t round = 0; round < 3; round++) {
        write_all(900 + round);
        CHECK(spilled() > 0 && all_are(900 + round));
        CHECK(ok(pms_rollback(pool, &e)) && all_are(0));
        CHECK(spilled() == 0); /* each was bare, and is the file's again */
    }
    write_all(30);
    CHECK(ok(pms_commit(pool, &e)));
    write_all(40);
    CHECK(spilled() > 0);
    CHECK(ok(pms_rollback(pool, &e)) && all_are(30));
    expect_after_close(30);
}

/* It is written again and again after it went there, and the commit has the newest. */
static void what_is_written_again(void)
{
    fill_store(0);
    for (uint32_t pass = 1; pass <= 3; pass++) {
        write_all(pass * 50);
        CHECK(all_are(pass * 50));
    }
    for (int i = 0; i < ARRAYS; i += 7)
        write_array(i, 1000);
    CHECK(ok(pms_commit(pool, &e)));
    close_store(0);
    open_again(0);
    for (int i = 0; i < ARRAYS; i++)
        CHECK(array_is(at[i], i % 7 ? 150 + (uint32_t)i : 1000));
    close_store(0);
}

static void the_store_grows_meanwhile(void)
{
    uint64_t data;
    fill_store(0);
    write_all(60);
    uint64_t bytes = pool->map.bytes;
    uint32_t *more[8];
    for (int i = 0; i < 8; i++) {
        char name[8];
        snprintf(name, sizeof name, "m%d", i);
        more[i] = array(pool, name, 4 * WORDS, &data);
        memset(more[i], i + 1, 4 * BYTES);
    }
    CHECK(pool->map.bytes > bytes && all_are(60));
    write_all(61);
    CHECK(ok(pms_commit(pool, &e)) && all_are(61));
    for (int i = 0; i < 8; i++)
        CHECK(more[i][4 * WORDS - 1] == 0x01010101u * (uint32_t)(i + 1));
    expect_after_close(61);
}

static void held_versions(void)
{
    fill_store(1);
    for (uint32_t round = 1; round <= 4; round++) {
        write_all(round * 10);
        CHECK(spilled() > 0);
        CHECK(ok(pms_commit(pool, &e)));
        write_all(round * 10 + 500);
        CHECK(ok(pms_commit(pool, &e)) && all_are(round * 10 + 500));
        CHECK(ok(pms_back(pool, &e)) && all_are(round * 10));
    }
    close_store(0);
    open_again(1);
    CHECK(all_are(40));
    write_all(70);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(pms_back(pool, &e)) && all_are(40));
    check_store();
    close_store(0);
}

/* What a commit holds is not home before the next one. Then it goes, as small ones follow. */
static void a_held_version_goes_home(void)
{
    fill_store(1);
    write_all(100);
    CHECK(ok(pms_commit(pool, &e)) && spilled() > 0);
    for (uint32_t n = 0; n < 400 && spilled() > 0; n++) {
        write_array((int)n % 3, 100 + n % 3);
        CHECK(ok(pms_commit(pool, &e)));
        usleep(5000); /* the thread that writes home is not waited for */
    }
    CHECK(spilled() == 0 && pool->map.spill.fd < 0 && all_are(100));
    expect_after_close(100);
}

/* The log has halves, by turns: what one of them left in the spill says nothing of the other. */
static void held_versions_of_any_size(void)
{
    size = 400 * MIB; /* of one segment, and so of one log */
    fill_store(1);
    size = 110 * MIB;
    uint64_t least = anonymous(), most = 0; /* the store before may still be going */
    for (uint32_t round = 1; round <= 6; round++) {
        int count = round % 3 ? 5 : ARRAYS;
        for (int i = 0; i < ARRAYS; i++) {
            if (i < count)
                write_array(i, round * 10 + (uint32_t)i);
            uint64_t now = anonymous();
            least = now < least ? now : least;
            most = now > most && round > 2 ? now : most;
        }
        CHECK(ok(pms_commit(pool, &e)));
    }
    most -= least;
    printf("  anonymous %llu MiB at most\n", (unsigned long long)(most / MIB));
    CHECK(!RSS_TELLS || most <= MOST + SLACK);
    CHECK(all_are(60));
    close_store(0);
    open_again(1);
    CHECK(all_are(60));
    close_store(0);
}

static bool snapshot_is(struct pms_snapshot *s, uint32_t value)
{
    static uint32_t read[WORDS];
    for (int i = 0; i < ARRAYS; i++)
        if (!ok(pms_snapshot_read(s, offset[i], BYTES, read, &e)) ||
            !array_is(read, value + (uint32_t)i))
            return false;
    return true;
}

/* Before the transaction, and in it. */
static void snapshots(void)
{
    struct pms_snapshot *s;
    fill_store(0);
    CHECK(ok(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e)));
    write_all(20);
    CHECK(spilled() > 0 && snapshot_is(s, 0));
    CHECK(ok(pms_commit(pool, &e)) && snapshot_is(s, 0));
    pms_snapshot_end(pool, s);
    write_all(30);
    CHECK(spilled() > 0);
    CHECK(ok(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e)));
    CHECK(snapshot_is(s, 20));
    write_all(40);
    CHECK(snapshot_is(s, 20) && ok(pms_rollback(pool, &e)));
    CHECK(snapshot_is(s, 20) && all_are(20));
    pms_snapshot_end(pool, s);
    expect_after_close(20);
}

static void pages_locked_in_memory(void)
{
    fill_store(0);
    if (syscall(SYS_mlock, at[ARRAYS - 1], BYTES) == 0) {
        write_all(8);
        for (uint64_t p = 0; RSS_TELLS && p < BYTES / PMS_PAGE; p++)
            CHECK(!pms_map_is_spilled(&pool->map, offset[ARRAYS - 1] / PMS_PAGE + p));
        CHECK(spilled() > 0);
        syscall(SYS_munlock, at[ARRAYS - 1], BYTES);
        CHECK(ok(pms_commit(pool, &e)));
    } else {
        write_all(8);
        CHECK(ok(pms_commit(pool, &e)));
    }
    expect_after_close(8);
}

static void few_mappings(void)
{
    pms_mappings_set_limit(160);
    fill_store(0);
    for (uint32_t round = 1; round <= 2; round++) {
        for (int i = 0; i < ARRAYS; i += 2)
            write_array(i, round * 10 + (uint32_t)i);
        for (int i = 1; i < ARRAYS; i += 2)
            write_array(i, round * 10 + (uint32_t)i);
        CHECK(ok(pms_commit(pool, &e)) && all_are(round * 10));
    }
    pms_mappings_set_limit(0);
    expect_after_close(20);
}

/* ---- what fails ---- */

static _Atomic int fails; /* errno of the disk for all but the store's file */
static _Atomic int store_fails;
static _Atomic int loses; /* errno, as it is asked whether the disk has what lies in the spill */
static _Atomic int writes_left; /* before it does */

static int hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    bool writes = primitive == PMS_PRIM_PWRITE, allocates = primitive == PMS_PRIM_ALLOCATE,
         syncs = primitive == PMS_PRIM_SYNC;
    if (syncs && pms_persist_hook_fd == pool->map.spill.fd)
        return atomic_load(&loses);
    if (!writes && !allocates)
        return 0;
    if (pms_persist_hook_fd == pool->map.spill.fd)
        return atomic_load(&fails) && atomic_fetch_sub(&writes_left, 1) <= 0 ? atomic_load(&fails)
                                                                             : 0;
    return writes ? atomic_load(&store_fails) : 0;
}

/* Then it takes memory, as ever. */
static void a_full_disk(void)
{
    fill_store(0);
    for (int left = 0; left < 8; left++) {
        atomic_store(&fails, ENOSPC);
        atomic_store(&writes_left, left * 3);
        atomic_store(&pms_persist_hook, hook);
        write_all(100 + (uint32_t)left);
        atomic_store(&pms_persist_hook, NULL);
        CHECK(all_are(100 + (uint32_t)left));
        CHECK(spilled() < ARRAYS * BYTES - MOST - MIB);
        if (left % 2)
            CHECK(ok(pms_rollback(pool, &e)) && all_are(99 + (uint32_t)left));
        else
            CHECK(ok(pms_commit(pool, &e)) && all_are(100 + (uint32_t)left));
    }
    atomic_store(&fails, 0);
    expect_after_close(106);
}

static void a_commit_that_fails(void)
{
    fill_store(0);
    write_all(5);
    for (int i = 0; i < 2; i++) {
        atomic_store(&store_fails, EIO);
        atomic_store(&pms_persist_hook, hook);
        CHECK(pms_commit(pool, &e) != PMS_OK);
        atomic_store(&pms_persist_hook, NULL);
        atomic_store(&store_fails, 0);
        CHECK(spilled() > 0 && all_are(5));
    }
    CHECK(ok(pms_rollback(pool, &e)) && all_are(0));
    write_all(6);
    atomic_store(&store_fails, EIO);
    atomic_store(&pms_persist_hook, hook);
    CHECK(pms_commit(pool, &e) != PMS_OK);
    atomic_store(&pms_persist_hook, NULL);
    atomic_store(&store_fails, 0);
    CHECK(ok(pms_commit(pool, &e)) && all_are(6));
    expect_after_close(6);
}

/* The disk could not write what memory was given up for: it is noticed before anything counts. At
 * the commit, as more goes there, and at a fork. */
static void a_disk_that_loses_it(void)
{
    fill_store(0);
    for (int when = 0; when < 3; when++) {
        write_all(40);
        CHECK(spilled() > 0);
        atomic_store(&loses, EIO);
        atomic_store(&pms_persist_hook, hook);
        if (when == 1) {
            CHECK(ok(pms_rollback(pool, &e)));
            write_all(50);
        } else if (when == 2) {
            pid_t child = fork();
            if (child == 0)
                _exit(0);
            CHECK(waitpid(child, NULL, 0) == child);
        }
        if (when)
            atomic_store(&loses, 0);
        int status = pms_commit(pool, &e);
        CHECK(status == (when ? PMS_E_READONLY : PMS_E_OS));
        atomic_store(&loses, 0);
        CHECK(pms_commit(pool, &e) == PMS_E_READONLY);
        atomic_store(&pms_persist_hook, NULL);
        (void)pms_pool_close(pool, 0, &e);
        pms_pool_release(pool);
        open_again(0);
        CHECK(all_are(0));
    }
    check_store();
    close_store(0);
}

static int entries_of_folder(void)
{
    char folder[256];
    int n = 0;
    snprintf(folder, sizeof folder, "%s", path);
    char *name = strrchr(folder, '/');
    *name++ = 0;
    DIR *d = opendir(folder);
    for (struct dirent *x = d ? readdir(d) : NULL; x; x = readdir(d))
        n += strstr(x->d_name, name) != NULL;
    if (d)
        closedir(d);
    return n;
}

/* It dies at any moment, with nothing committed: the next one finds what was. */
static void deaths(void)
{
    fill_store(0);
    close_store(0);
    for (int when = 1; when <= ARRAYS; when += 9) {
        pid_t child = fork();
        if (child == 0) {
            open_again(0);
            for (int i = 0; i < when; i++)
                write_array(i, 4);
            if (when > 3 * ARRAYS / 4 && !spilled())
                _exit(1);
            raise(SIGKILL);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
        open_again(0);
        CHECK(all_are(0));
        check_store();
        close_store(0);
    }
    CHECK(entries_of_folder() == 1);
}

/* Each moment of the commit and of what comes behind it: a write or a sync is its last. */
static _Atomic int calls_left;

static int die(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive != PMS_PRIM_PWRITE && primitive != PMS_PRIM_SYNC &&
        primitive != PMS_PRIM_ALLOCATE)
        return 0;
    if (atomic_fetch_sub(&calls_left, 1) == 1)
        kill(getpid(), SIGKILL);
    return 0;
}

static void deaths_in_a_commit(void)
{
    uint32_t value = 0;
    bool over = false;
    fill_store(0);
    close_store(0);
    int step = RSS_TELLS ? 19 : 67;
    for (int when = 1; !over; when += step) {
        pid_t child = fork();
        if (child == 0) {
            open_again(0);
            atomic_store(&calls_left, when);
            atomic_store(&pms_persist_hook, die);
            write_all(value + 50);
            int status = pms_commit(pool, &e);
            atomic_store(&pms_persist_hook, NULL);
            _exit(status == PMS_OK ? 0 : 1);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        over = WIFEXITED(status);
        CHECK(!over || WEXITSTATUS(status) == 0);
        open_again(0);
        bool after = all_are(value + 50);
        CHECK(after || (!over && all_are(value)));
        value += after ? 50 : 0;
        close_store(0);
    }
    CHECK(value > 0);
}

/* ---- beside others ---- */

/* A child that looks when it is told to. */
struct child {
    pid_t pid;
    int go, said;
};

static struct child fork_child(uint32_t value, int written)
{
    int go[2], said[2];
    char byte = 0;
    CHECK(pipe(go) == 0 && pipe(said) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(go[1]);
        bool right = read(go[0], &byte, 1) == 1;
        for (int i = 0; i < ARRAYS && right; i++)
            right = array_is(at[i], (i < written ? value : 0) + (uint32_t)i);
        byte = right;
        _exit(write(said[1], &byte, 1) == 1 ? 0 : 1);
    }
    close(go[0]);
    close(said[1]);
    return (struct child){pid, go[1], said[0]};
}

static bool child_is_right(struct child c)
{
    char byte = 0;
    bool right = write(c.go, "x", 1) == 1 && read(c.said, &byte, 1) == 1 && byte == 1;
    right = waitpid(c.pid, NULL, 0) == c.pid && right;
    close(c.go);
    close(c.said);
    return right;
}

/* Two in one transaction; the parent stores on, and commits. */
static void fork_children_see_their_state(void)
{
    fill_store(0);
    for (int i = 0; i < 2 * ARRAYS / 3; i++)
        write_array(i, 300 + (uint32_t)i);
    CHECK(spilled() > 0);
    struct child first = fork_child(300, 2 * ARRAYS / 3);
    CHECK(!pool->map.spill.shown && spilled() > 0);
    uint64_t lay = spilled();
    for (int i = 2 * ARRAYS / 3; i < ARRAYS; i++)
        write_array(i, 300 + (uint32_t)i);
    CHECK(spilled() > lay); /* to another file */
    struct child second = fork_child(300, ARRAYS);
    write_all(400);
    CHECK(all_are(400) && ok(pms_commit(pool, &e)) && all_are(400));
    CHECK(spilled() == 0);
    write_all(500);
    CHECK(spilled() > 0);
    CHECK(ok(pms_rollback(pool, &e)) && all_are(400));
    write_all(600);
    CHECK(ok(pms_commit(pool, &e)) && all_are(600));
    CHECK(child_is_right(first) && child_is_right(second));
    expect_after_close(600);
}

static void pin_all(void)
{
    struct pms_object o;
    char name[8];
    for (int i = 0; i < ARRAYS; i++) {
        name_of(i, name);
        CHECK(ok(pms_object_get(pool, 0, name, (uint32_t)strlen(name), &o, &e)));
    }
}

static void close_with_views(int commit, uint32_t value)
{
    CHECK(pms_pool_close(pool, commit, &e) == PMS_OK && all_are(value));
    struct child child = fork_child(value, ARRAYS);
    for (int i = 0; i < ARRAYS; i++)
        write_array(i, value + 1 + (uint32_t)i);
    CHECK(all_are(value + 1) && child_is_right(child));
    for (int i = 0; i < ARRAYS; i++)
        pms_unpin(pool, offset[i]);
    pms_pool_release(pool);
    open_again(0);
    CHECK(all_are(value));
}

/* Views of a store that was closed go on with what they showed, or were rolled back to, and a child
 * has its own. */
static void views_outlive_it(void)
{
    struct pms_snapshot *s;
    fill_store(0);
    pin_all();
    write_all(200);
    CHECK(spilled() > 0);
    close_with_views(1, 200);
    /* with pre-images in the log, it is not given back when it is rolled back */
    pin_all();
    CHECK(ok(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e)));
    write_all(300);
    CHECK(ok(pms_rollback(pool, &e)) && spilled() > 0 && all_are(200));
    pms_snapshot_end(pool, s);
    close_with_views(0, 200);
    close_store(0);
}

static _Atomic bool over;
static _Atomic uint32_t wrong;

static void *read_on(void *arg) /* of these nobody writes */
{
    uint64_t n = 0;
    (void)arg;
    while (!atomic_load(&over)) {
        int i = (int)(n++ % 8);
        if (!array_is(at[i], (uint32_t)i))
            atomic_fetch_add(&wrong, 1);
    }
    return NULL;
}

/* An array of its own: each word only grows, whichever commit it is in. */
static void *write_on(void *arg)
{
    _Atomic uint32_t *own = arg;
    for (uint32_t n = 1; !atomic_load(&over); n++)
        for (uint64_t w = 0; w < WORDS; w += 257) {
            if (atomic_load(&own[w]) != n - 1)
                atomic_fetch_add(&wrong, 1);
            atomic_store(&own[w], n);
        }
    return NULL;
}

static void *fork_on(void *arg)
{
    (void)arg;
    while (RSS_TELLS && !atomic_load(&over)) {
        pid_t child = fork();
        if (child == 0)
            _exit(array_is(at[3], 3) ? 0 : 1);
        int status = 0;
        if (waitpid(child, &status, 0) != child || status != 0)
            atomic_fetch_add(&wrong, 1);
        usleep(2000);
    }
    return NULL;
}

static void threads_beside_it(void)
{
    pthread_t thread[4];
    fill_store(0);
    for (int i = 8; i < 10; i++)
        memset(at[i], 0, BYTES);
    CHECK(ok(pms_commit(pool, &e)));
    atomic_store(&over, false);
    CHECK(pthread_create(&thread[0], NULL, read_on, NULL) == 0);
    CHECK(pthread_create(&thread[1], NULL, fork_on, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&thread[2 + i], NULL, write_on, at[8 + i]) == 0);
    for (uint32_t round = 1; round <= 4; round++) {
        for (int i = 10; i < ARRAYS; i++)
            write_array(i, round + (uint32_t)i);
        CHECK(ok(pms_commit(pool, &e)));
    }
    atomic_store(&over, true);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    CHECK(atomic_load(&wrong) == 0);
    CHECK(ok(pms_commit(pool, &e)));
    uint32_t *last = malloc(2 * BYTES);
    for (uint64_t i = 0; i < 2; i++)
        memcpy(last + i * WORDS, at[8 + i], BYTES);
    close_store(0);
    open_again(0);
    for (uint64_t i = 0; i < 2; i++)
        CHECK(memcmp(last + i * WORDS, at[8 + i], BYTES) == 0);
    for (int i = 10; i < ARRAYS; i++)
        CHECK(array_is(at[i], 4 + (uint32_t)i));
    free(last);
    close_store(0);
}

/* ---- anything, against what it should be ---- */

static uint32_t model[ARRAYS][BYTES / PMS_PAGE], committed[ARRAYS][BYTES / PMS_PAGE];
static uint64_t seed = 88172645463325252ull;

static uint64_t draw(uint64_t n)
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed % n;
}

static bool is_as_modelled(void)
{
    for (int i = 0; i < ARRAYS; i++)
        for (uint64_t p = 0; p < BYTES / PMS_PAGE; p++)
            if (at[i][p * 1024] != model[i][p] || at[i][p * 1024 + 1023] != model[i][p])
                return false;
    return true;
}

static void write_pages(int i, uint64_t page, uint64_t pages, uint32_t value)
{
    for (uint64_t p = page; p < page + pages; p++)
        at[i][p * 1024] = at[i][p * 1024 + 1023] = model[i][p] = value;
}

static void whatever_comes(void)
{
    uint64_t went = 0;
    fill_store(0);
    for (int i = 0; i < ARRAYS; i++)
        write_pages(i, 0, BYTES / PMS_PAGE, (uint32_t)i);
    CHECK(ok(pms_commit(pool, &e)));
    memcpy(committed, model, sizeof model);
    for (uint32_t n = 1; n <= (RSS_TELLS ? 4000 : 600); n++) {
        int i = (int)draw(ARRAYS);
        uint64_t pages = 1 + draw(draw(4) ? 40 : BYTES / PMS_PAGE), kind = draw(200);
        uint64_t page = draw(BYTES / PMS_PAGE - pages + 1);
        if (kind < 150) {
            write_pages(i, page, pages, n);
        } else if (kind < 180) {
            struct pms_range r = {(uint64_t)(uintptr_t)&at[i][page * 1024], pages * PMS_PAGE};
            CHECK(ok(pms_will_write(pool, &r, 1, &e)));
            write_pages(i, page, pages, n);
        } else if (kind < 185) {
            for (int k = 0; k < ARRAYS; k++)
                write_pages(k, 0, BYTES / PMS_PAGE, n);
        } else if (kind < 190) {
            CHECK(ok(pms_commit(pool, &e)));
            memcpy(committed, model, sizeof model);
        } else if (kind < 194) {
            CHECK(ok(pms_rollback(pool, &e)));
            memcpy(model, committed, sizeof model);
        } else if (kind < 197) {
            pid_t child = fork();
            if (child == 0)
                _exit(is_as_modelled() ? 0 : 1);
            int status = 0;
            CHECK(waitpid(child, &status, 0) == child && status == 0);
        } else if (kind < 199) {
            close_store(0);
            memcpy(model, committed, sizeof model);
            open_again(0);
        } else {
            struct pms_snapshot *s;
            CHECK(ok(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e)));
            pms_snapshot_end(pool, s);
        }
        went += spilled() > 0;
        bool right = is_as_modelled();
        CHECK(right);
        if (!right) {
            printf("  step %u kind %llu\n", n, (unsigned long long)kind);
            break;
        }
    }
    CHECK(went > 0);
    check_store();
    close_store(0);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-spill-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    TEST(it_is_bounded);
    TEST(it_is_bounded_again_and_again);
    TEST(what_is_declared_at_once_is_bounded);
    TEST(what_is_scattered_is_bounded);
    TEST(small_blocks_are_bounded);
    TEST(without_need_nothing_goes_there);
    TEST(a_roll_back);
    TEST(what_is_written_again);
    TEST(the_store_grows_meanwhile);
    TEST(held_versions);
    TEST(a_held_version_goes_home);
    TEST(held_versions_of_any_size);
    TEST(snapshots);
    TEST(pages_locked_in_memory);
    TEST(few_mappings);
    TEST(a_full_disk);
    TEST(a_commit_that_fails);
    TEST(a_disk_that_loses_it);
    TEST(deaths);
    TEST(deaths_in_a_commit);
    TEST(fork_children_see_their_state);
    TEST(views_outlive_it);
    TEST(threads_beside_it);
    TEST(whatever_comes);
    unlink(path);
    return test_summary();
}
