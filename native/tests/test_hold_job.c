/* Held for a job: doubt, and switching it on while a store is open. The crash points of its commits
 * are among the stories of test_hold.c. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commit/landing.h"
#include "crash/power.h"
#include "heap/state.h"
#include "hold_fixture.h"

static struct pms_error e;

static struct pms_pool *open_plain(void) { return open_as(PMS_MODE_READ_WRITE, 0); }

/* A store made without hold, open, in a job from now on. */
static struct pms_pool *begin(void)
{
    make_store(0);
    struct pms_pool *p = open_plain();
    MUST(pms_hold_for_job(p, &e));
    return p;
}

static void touch(struct pms_pool *p) { bytes_of(p, "small")[3]++; }
static void allowed(struct pms_pool *p)
{
    MUST(pms_allow(p, &e));
    commit(p);
}

/* Without an end of its own: what is not durable stays as it is. */
static void dies(void (*fn)(void))
{
    int ws;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        test_checks_failed = 0;
        fn();
        fflush(stdout);
        kill(getpid(), test_checks_failed ? SIGTERM : SIGKILL);
    }
    waitpid(pid, &ws, 0);
    CHECK(WIFSIGNALED(ws) && WTERMSIG(ws) == SIGKILL);
}

static bool in_halves(void)
{
    struct pms_superblock super;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    MUST(pms_super_read(fd, &super, &e));
    close(fd);
    return super.features_incompat & PMS_FEATURE_HOLD;
}

/* ---- doubt ---- */

static void a_commit_is_in_doubt_until_it_is_allowed(void)
{
    struct pms_pool *p = begin();
    CHECK(pms_holds(p) == PMS_HELD_NOT && !pms_in_doubt(p));
    touch(p);
    commit(p);
    CHECK(pms_holds(p) == PMS_HELD_FOR_JOB && pms_in_doubt(p));
    uint32_t d = digest(p);
    uint64_t epoch = pms_epoch(p), fences = p->persist.fences;
    commit(p); /* of nothing */
    touch(p);
    CHECK(pms_commit(p, &e) == PMS_E_INDOUBT && pms_epoch(p) == epoch);
    MUST(pms_rollback(p, &e));
    CHECK(pms_in_doubt(p) && digest(p) == d);
    fences = p->persist.fences;
    MUST(pms_allow(p, &e));
    MUST(pms_allow(p, &e));
    CHECK(p->persist.fences == fences && !pms_in_doubt(p));
    CHECK(pms_holds(p) == PMS_HELD_FOR_JOB);
    touch(p);
    commit(p);
    CHECK(pms_in_doubt(p) && pms_holds(p) == PMS_HELD_FOR_JOB);
    shut(p, 0);
}

static void blocks_are_refused_when_entered(void)
{
    struct pms_pool *p = begin();
    struct pms_entered entry;
    touch(p);
    commit(p);
    CHECK(pms_txblock_enter(p, 0, 1, 0, &entry, &e) == PMS_E_INDOUBT);
    CHECK(pms_txblock_enter(p, 0, 0, 0, &entry, &e) == PMS_E_INDOUBT);
    CHECK(pms_begin(p, 0, &e) == PMS_E_INDOUBT && pms_txblock_depth(p) == 0);
    MUST(pms_allow(p, &e));
    touch(p); /* pending: its commit would leave the block in doubt */
    uint64_t epoch = pms_epoch(p);
    CHECK(pms_begin(p, 0, &e) == PMS_E_INDOUBT && pms_txblock_depth(p) == 0);
    CHECK(pms_epoch(p) == epoch && pms_tx_pending(p));
    MUST(pms_rollback(p, &e));
    MUST(pms_begin(p, 0, &e));
    touch(p);
    CHECK(pms_hold_for_job(p, &e) == PMS_E_STATE);
    MUST(pms_end(p, 1, &e));
    CHECK(pms_in_doubt(p));
    shut(p, 0);
}

static void a_slot_of_the_held_version_stays_shut(void)
{
    struct pms_pool *p = begin();
    struct pms_object o;
    for (int i = 1; i < 3; i++) {
        MUST(pms_allow(p, &e));
        fill_next(p, i);
        flip(p);
        commit(p);
    }
    uint32_t d = digest(p);
    CHECK(pms_slot_get(p, 0, "w", 1, PMS_SLOT_NEXT, &o, &e) == PMS_E_INDOUBT);
    CHECK(pms_slot_flip(p, 0, "w", 1, NULL, &e) == PMS_E_INDOUBT);
    CHECK(pms_commit(p, &e) == PMS_OK && digest(p) == d); /* nothing is pending */
    shut(p, 0);
    p = open_plain();
    CHECK(pms_slot_get(p, 0, "w", 1, PMS_SLOT_NEXT, &o, &e) == PMS_E_INDOUBT);
    CHECK(pms_slot_flip(p, 0, "w", 1, NULL, &e) == PMS_E_INDOUBT);
    back(p);
    MUST(pms_slot_get(p, 0, "w", 1, PMS_SLOT_CURRENT, &o, &e));
    CHECK(p->map.user[o.data] == 1 && p->map.user[o.data + SLOT_BYTES - 1] == 1);
    pms_unpin(p, o.data);
    shut(p, 0);
}

static struct pms_landing *landing_of(struct pms_pool *p, const unsigned char *src)
{
    static char meta[8] = "\x81\xa5slots";
    struct pms_slot_pair slots;
    MUST(pms_slot_find(p, 0, "w", 1, &slots, &e));
    meta[7] = (char)!slots.current;
    uint64_t data = slots.data[!slots.current];
    struct pms_land_copy copy = {.data = data, .bytes = SLOT_BYTES, .src = src};
    struct pms_land_flip turned = {
        .data = data, .name = "w", .meta = meta, .name_bytes = 1, .meta_bytes = sizeof meta};
    struct pms_landing *l = pms_landing_new(&copy, 1, &turned, 1, -1, &e);
    MUST(l ? PMS_OK : e.status);
    return l;
}

static void landings_are_refused(void)
{
    static unsigned char src[SLOT_BYTES];
    struct pms_pool *p = begin();
    memset(src, 5, sizeof src);
    struct pms_landing *l = landing_of(p, src);
    MUST(pms_landing_start(p, l, PMS_LANDING_NEW, &e));
    pms_landing_wait(l, PMS_LANDING_DONE, -1);
    CHECK(pms_landing_result(l, &e) == PMS_OK && pms_in_doubt(p));
    pms_landing_free(l);
    uint32_t d = digest(p);
    l = landing_of(p, src);
    CHECK(pms_landing_start(p, l, PMS_LANDING_NEW, &e) == PMS_E_INDOUBT);
    CHECK(pms_landing_arm(p, l, &e) == PMS_E_INDOUBT && !p->tx.landing);
    pms_landing_free(l);
    MUST(pms_allow(p, &e));
    memset(src, 6, sizeof src);
    l = landing_of(p, src);
    MUST(pms_landing_arm(p, l, &e));
    touch(p);
    commit(p);
    pms_landing_free(l);
    CHECK(pms_in_doubt(p) && digest(p) != d);
    back(p);
    CHECK(digest(p) == d);
    shut(p, 0);
}

/* One that was armed before: by whoever commits in between. */
static void an_armed_landing_waits_for_no_doubt(void)
{
    static unsigned char src[SLOT_BYTES];
    struct pms_pool *p = begin();
    struct pms_landing *l = landing_of(p, src);
    touch(p);
    commit(p);
    uint32_t d = digest(p);
    MUST(pms_allow(p, &e));
    MUST(pms_landing_arm(p, l, &e));
    p->hold.in_doubt = true; /* as a landing's thread may leave it */
    CHECK(pms_commit(p, &e) == PMS_E_INDOUBT && !p->tx.landing);
    CHECK(pms_landing_result(l, &e) == PMS_E_INDOUBT);
    pms_landing_free(l);
    CHECK(pms_holds(p) == PMS_HELD_FOR_JOB && digest(p) == d);
    shut(p, 0);
}

static void going_back_and_release_end_the_doubt(void)
{
    struct pms_pool *p = begin();
    uint32_t d = digest(p);
    touch(p);
    commit(p);
    touch(p); /* pending */
    back(p);
    CHECK(digest(p) == d && !pms_in_doubt(p) && pms_holds(p) == PMS_HELD_NOT);
    CHECK(pms_back(p, &e) == PMS_E_STATE);
    touch(p);
    commit(p); /* holding stays on */
    CHECK(pms_in_doubt(p));
    MUST(pms_release(p, &e));
    CHECK(!pms_in_doubt(p) && pms_holds(p) == PMS_HELD_NOT);
    touch(p);
    commit(p);
    CHECK(pms_in_doubt(p));
    allowed(p);
    CHECK(pms_holds(p) == PMS_HELD_FOR_JOB); /* nothing was pending */
    shut(p, 0);
}

static void commits_and_dies(void)
{
    struct pms_pool *p = open_plain();
    MUST(pms_hold_for_job(p, &e));
    touch(p);
    commit(p);
    MUST(pms_allow(p, &e)); /* is forgotten */
    put_value(p, "value", "pending");
}

static void an_open_finds_it_in_doubt(void)
{
    make_store(0);
    struct pms_pool *p = open_plain();
    uint32_t before = digest(p);
    touch(p);
    uint32_t after = digest(p);
    MUST(pms_rollback(p, &e));
    shut(p, 0);
    dies(commits_and_dies);
    for (int hold = 0; hold < 3; hold++) {
        p = open_as(hold < 2 ? PMS_MODE_READ_WRITE : PMS_MODE_READ, hold == 1);
        CHECK(pms_in_doubt(p) && pms_holds(p) == PMS_HELD_FOR_JOB && digest(p) == after);
        if (hold == 2) {
            CHECK(pms_allow(p, &e) == PMS_E_READONLY);
            CHECK(pms_hold_for_job(p, &e) == PMS_E_READONLY);
            shut(p, 0);
            break;
        }
        touch(p);
        CHECK(pms_commit(p, &e) == PMS_E_INDOUBT);
        MUST(pms_rollback(p, &e));
        shut(p, 1); /* it only looked: nothing is released, and nothing is wrong */
    }
    p = open_plain();
    MUST(pms_hold_for_job(p, &e));
    CHECK(pms_in_doubt(p));
    back(p);
    CHECK(digest(p) == before);
    shut(p, 1);
    p = open_plain();
    CHECK(pms_holds(p) == PMS_HELD_NOT);
    shut(p, 1);
}

static void closing_with_a_commit_releases_nothing_in_doubt(void)
{
    struct pms_pool *p = begin();
    touch(p);
    commit(p);
    uint32_t d = digest(p);
    CHECK(pms_pool_close(p, 1, &e) == PMS_E_INDOUBT); /* its own commit, of which nobody said */
    pms_pool_release(p);
    p = open_plain();
    CHECK(pms_in_doubt(p) && digest(p) == d);
    touch(p);
    CHECK(pms_pool_close(p, 1, &e) == PMS_E_INDOUBT); /* pending: rolled back */
    pms_pool_release(p);
    p = open_plain();
    CHECK(pms_in_doubt(p) && digest(p) == d);
    MUST(pms_allow(p, &e));
    MUST(pms_hold_for_job(p, &e));
    touch(p);
    CHECK(pms_pool_close(p, 1, &e) == PMS_E_INDOUBT); /* committed, and held in its turn */
    pms_pool_release(p);
    p = open_plain();
    CHECK(pms_in_doubt(p) && digest(p) != d);
    MUST(pms_allow(p, &e));
    MUST(pms_hold_for_job(p, &e));
    shut(p, 1); /* allowed, nothing pending: final */
    p = open_plain();
    CHECK(pms_holds(p) == PMS_HELD_NOT && digest(p) != d);
    shut(p, 1);
    CHECK(!in_halves());
}

/* ---- switching it on ---- */

static void not_while_something_is_pending(void)
{
    make_store(0);
    struct pms_pool *p = open_plain();
    touch(p);
    CHECK(pms_hold_for_job(p, &e) == PMS_E_STATE && !in_halves() && !p->undo.log.halves);
    commit(p);
    for (int i = 0; i < 5; i++, touch(p), commit(p))
        ; /* hot by now: it stays writable over commits */
    touch(p);
    CHECK(pms_hold_for_job(p, &e) == PMS_E_STATE && !in_halves());
    commit(p);
    MUST(pms_hold_for_job(p, &e));
    uint64_t file_bytes = p->super.file_bytes, tag = p->undo.tag;
    MUST(pms_hold_for_job(p, &e)); /* it is on */
    CHECK(in_halves() && p->super.file_bytes == file_bytes && p->undo.tag == tag);
    touch(p);
    CHECK(pms_hold_for_job(p, &e) == PMS_E_STATE); /* also where no log is to be cut */
    commit(p);
    CHECK(pms_in_doubt(p));
    shut(p, 0);
}

/* What is stored beside the switch, which no call announces, is pending. */
static void a_store_into_a_hot_range_is_pending(void)
{
    make_store(0);
    struct pms_pool *p = open_plain();
    for (int i = 0; i < 6; i++, touch(p), commit(p))
        ;
    uint32_t d = digest(p);
    touch(p);
    CHECK(pms_tx_halve(p, &e) == PMS_E_STATE && !p->undo.log.halves);
    CHECK(digest(p) != d);
    touch(p); /* protected meanwhile: captured all the same */
    MUST(pms_rollback(p, &e));
    CHECK(digest(p) == d);
    shut(p, 0);
}

#define FULL_BYTES (24ull << 20) /* growth adds less than what its log lacks */

static void fill_store(struct pms_pool *p)
{
    char name[16];
    struct pms_object o;
    for (int i = 0; i < 1000; i++) {
        uint64_t data;
        uint8_t fill = 0;
        snprintf(name, sizeof name, "f%d", i);
        if (pms_object_put_array(p, 0, name, (uint32_t)strlen(name), "f", 1, 60000,
                                 PMS_FILL_PATTERN, &fill, 1, 0, &data, &e) != PMS_OK)
            break;
        MUST(pms_object_find(p, 0, name, (uint32_t)strlen(name), &o, &e));
    }
    CHECK(e.status == PMS_E_FULL);
}

static void fill_all(struct pms_pool *p, uint8_t value)
{
    struct pms_object o;
    uint64_t node = 0;
    while (pms_object_next(p, 0, &node, &o, &e) == PMS_OK && node)
        if (o.name_bytes && o.name[0] == 'f')
            memset(p->map.user + o.data, value, o.data_bytes);
}

static struct pms_pool *open_limited(uint64_t max_size, int mode, int hold)
{
    struct pms_options o = {
        .size = FULL_BYTES, .max_size = max_size, .mode = mode, .domain = domain, .hold = hold};
    struct pms_pool *p = NULL;
    return pms_pool_open(path, &o, &p, &e) == PMS_OK ? p : NULL;
}

static void rewrites_all_and_dies(void)
{
    struct pms_pool *p = open_limited(8 * FULL_BYTES, PMS_MODE_READ_WRITE, 0);
    MUST(pms_hold_for_job(p, &e));
    for (uint8_t i = 1; i < 4; i++) {
        MUST(pms_allow(p, &e));
        fill_all(p, i);
        commit(p);
    }
    fill_all(p, 9); /* both halves are in use */
}

static void a_full_store_makes_room_or_is_left_as_it_is(void)
{
    struct pms_pool *p = open_limited(FULL_BYTES, PMS_MODE_TRUNCATE, 0);
    fill_store(p);
    commit(p);
    uint32_t d = digest(p);
    uint64_t file_bytes = p->super.file_bytes;
    CHECK(pms_hold_for_job(p, &e) == PMS_E_FULL && strstr(e.what, "two transactions"));
    CHECK(e.needed > e.available && p->super.file_bytes == file_bytes && !in_halves());
    fill_all(p, 1);
    commit(p);
    CHECK(pms_holds(p) == PMS_HELD_NOT);
    fill_all(p, 0);
    commit(p);
    shut(p, 1);
    CHECK(!open_limited(FULL_BYTES, PMS_MODE_READ_WRITE, 1) && e.status == PMS_E_FULL);
    CHECK(strstr(e.what, "two transactions") && !in_halves());
    dies(rewrites_all_and_dies);
    p = open_plain();
    CHECK(pms_in_doubt(p) && digest(p) != d);
    back(p);
    CHECK(bytes_of(p, "f0")[0] == 2 && bytes_of(p, "f3")[59999] == 2);
    shut(p, 0);
}

/* ---- a superblock that cannot be written ---- */

static int failing_primitive; /* PMS_PRIM_PWRITE: it does not say halves; SYNC: perhaps it does */
static bool armed;

static int fail_superblock(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)bytes;
    bool super = primitive == PMS_PRIM_PWRITE && addr < PMS_OFF_ANCHOR;
    if (failing_primitive == PMS_PRIM_PWRITE && super)
        return EIO;
    if (failing_primitive == PMS_PRIM_SYNC && super)
        armed = true;
    return failing_primitive == PMS_PRIM_SYNC && primitive == PMS_PRIM_SYNC && armed ? EIO : 0;
}

static void fails_to_switch_and_stores_on(void)
{
    struct pms_pool *p = open_plain();
    pms_persist_hook = fail_superblock;
    CHECK(pms_hold_for_job(p, &e) == PMS_E_OS);
    pms_persist_hook = NULL;
    CHECK(in_halves() == (failing_primitive == PMS_PRIM_SYNC));
    memset(bytes_of(p, "huge"), 7, 3000000); /* more than a fast log takes */
    CHECK(pms_commit(p, &e) == PMS_E_READONLY);
    CHECK(pms_hold_for_job(p, &e) == PMS_E_READONLY);
    memset(bytes_of(p, "huge"), 8, 3000000);
}

static void a_switch_that_fails_ends_in_the_last_commit(void)
{
    static const enum pms_primitive fails[] = {PMS_PRIM_PWRITE, PMS_PRIM_SYNC};
    for (unsigned i = 0; i < 4; i++) {
        failing_primitive = (int)fails[i / 2];
        make_store(0);
        struct pms_pool *p = open_plain();
        put_array(p, "huge", 3000000, 21);
        commit(p);
        put_value(p, "value", "three");
        commit(p);
        if (i % 2) { /* the other parity */
            touch(p);
            commit(p);
        }
        uint32_t d = digest(p);
        shut(p, 1);
        dies(fails_to_switch_and_stores_on);
        p = open_plain();
        CHECK(digest(p) == d && pms_holds(p) == PMS_HELD_NOT);
        static struct pms_check_report r;
        CHECK(pms_check(p, &r, &e) == PMS_OK && r.problem_count == 0);
        shut(p, 1);
    }
}

/* ---- dying in the switch ---- */

static char base_path[300];
static bool power;
static _Atomic uint64_t seen, fail_at;
static uint32_t first_state, second_state;

static int count_and_fail(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    if (power)
        pms_power_note(primitive, addr, bytes);
    if (atomic_fetch_add(&seen, 1) + 1 == atomic_load(&fail_at)) {
        if (power)
            pms_power_fail();
        kill(getpid(), SIGKILL);
    }
    return 0;
}

static void copy_file(const char *from, const char *to)
{
    static unsigned char buffer[1 << 20];
    int in = open(from, O_RDONLY | O_CLOEXEC),
        out = open(to, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    for (ssize_t n; (n = read(in, buffer, sizeof buffer)) > 0;)
        CHECK(write(out, buffer, (size_t)n) == n);
    close(in);
    close(out);
}

static void change(struct pms_pool *p)
{
    memset(bytes_of(p, "huge"), bytes_of(p, "huge")[0] + 1, 1500000);
    put_value(p, "value", has(p, "new") ? "odd" : "even");
    del(p, "medium");
}

static void switches_and_commits(void)
{
    if (power && !pms_power_start(open(path, O_RDWR | O_CLOEXEC), atomic_load(&fail_at) * 7919 + 1))
        abort();
    pms_persist_hook = count_and_fail;
    struct pms_pool *p = open_plain();
    if (pms_in_doubt(p))
        back(p);
    MUST(pms_hold_for_job(p, &e));
    change(p);
    commit(p);
    CHECK(pms_in_doubt(p));
    pms_persist_hook = NULL;
    exit(test_checks_failed ? 1 : 77); /* beyond the last primitive */
}

/* Whether it died: at primitive n of opening, switching and a commit. */
static bool dies_at(uint64_t n)
{
    int ws;
    atomic_store(&seen, 0);
    atomic_store(&fail_at, n);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        test_checks_failed = 0;
        switches_and_commits();
    }
    waitpid(pid, &ws, 0);
    CHECK(WIFSIGNALED(ws) ? WTERMSIG(ws) == SIGKILL : WEXITSTATUS(ws) == 77);
    return WIFSIGNALED(ws);
}

/* The old store, whole, of which nothing is held; or the commit, in doubt. Either goes on. */
static void is_one_or_the_other(void)
{
    static struct pms_check_report r;
    struct pms_pool *p = open_plain();
    uint32_t d = digest(p);
    CHECK(d == first_state || d == second_state);
    CHECK(pms_in_doubt(p) == (d == second_state));
    if (pms_in_doubt(p))
        back(p);
    CHECK(digest(p) == first_state && pms_holds(p) == PMS_HELD_NOT);
    CHECK(pms_check(p, &r, &e) == PMS_OK && r.problem_count == 0);
    MUST(pms_hold_for_job(p, &e));
    change(p);
    commit(p);
    CHECK(digest(p) == second_state && pms_in_doubt(p));
    back(p);
    CHECK(digest(p) == first_state);
    shut(p, 0);
}

static void dies_everywhere(void)
{
    char crashed[320];
    snprintf(crashed, sizeof crashed, "%s.crashed", path);
    make_store(0);
    struct pms_pool *p = open_plain();
    put_array(p, "huge", 1500000, 21); /* its log has no room for two transactions */
    commit(p);
    first_state = digest(p);
    change(p);
    second_state = digest(p);
    MUST(pms_rollback(p, &e));
    shut(p, 1);
    copy_file(path, base_path);
    uint64_t n = 1;
    for (; !test_checks_failed; n++) {
        copy_file(base_path, path);
        bool died = dies_at(n);
        copy_file(path, crashed);
        is_one_or_the_other();
        if (!died)
            break;
        for (uint64_t m = 1 + n % 23; n % 10 == 0; m += 23) { /* again, at what follows */
            copy_file(crashed, path);
            bool again = dies_at(m);
            is_one_or_the_other();
            if (!again)
                break;
        }
    }
    CHECK(n > 30);
    unlink(crashed);
    unlink(base_path);
}

static void killed_in_the_switch(void)
{
    power = false;
    dies_everywhere();
}

static void power_fails_in_the_switch(void)
{
    power = true;
    dies_everywhere();
}

/* ---- the heap ---- */

/* An empty slab that held slots, and is given back while the version is still held: its pages wait
 * for the commit of the transaction that gave it back, not for the release. */
static uint64_t extent_of(struct pms_pool *p, uint64_t off)
{
    struct pms_block b;
    CHECK(pms_heap_find(p->heap, off, &b));
    return b.extent_off / PMS_PAGE;
}

static void what_was_given_back_since_waits_for_its_commit(void)
{
    make_store(1); /* with room in its log for slabs */
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
    struct pms_object o;
    uint64_t at = put_array(p, "b", 1000, 1);
    commit(p);
    struct pms_extent *slab = pms_index_at(&p->heap->index, extent_of(p, at));
    CHECK(slab && slab->state == PMS_EXTENT_SLAB);
    del(p, "b");
    allowed(p);
    touch(p);
    allowed(p); /* it is empty now, and kept */
    CHECK(slab->used == 0 && !slab->held);
    put_array(p, "x", 1000, 2);
    put_array(p, "y", 1000, 3);
    MUST(pms_object_get(p, 0, "y", 1, &o, &e));
    del(p, "y");
    pms_unpin(p, o.data);
    del(p, "x");
    allowed(p);
    CHECK(slab->used == 0 && slab->held);
    put_array(p, "large", 40 << 20, 4); /* space is short: it is given back */
    CHECK(slab->state == PMS_EXTENT_DEAD && slab->deferred && slab->held);
    MUST(pms_release(p, &e));
    CHECK(slab->state == PMS_EXTENT_DEAD && slab->deferred && !slab->held);
    commit(p);
    back(p);
    shut(p, 0);
}

int main(void)
{
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    const char *dir = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-hold-job-%ld", dir, (long)getpid());
    snprintf(base_path, sizeof base_path, "%s.base", path);
    for (unsigned i = 0; i < sizeof domains / sizeof *domains; i++) {
        domain = domains[i];
        TEST(a_commit_is_in_doubt_until_it_is_allowed);
        TEST(blocks_are_refused_when_entered);
        TEST(a_slot_of_the_held_version_stays_shut);
        TEST(landings_are_refused);
        TEST(an_armed_landing_waits_for_no_doubt);
        TEST(going_back_and_release_end_the_doubt);
        TEST(an_open_finds_it_in_doubt);
        TEST(closing_with_a_commit_releases_nothing_in_doubt);
        TEST(not_while_something_is_pending);
        TEST(a_store_into_a_hot_range_is_pending);
        TEST(a_full_store_makes_room_or_is_left_as_it_is);
        TEST(a_switch_that_fails_ends_in_the_last_commit);
        TEST(what_was_given_back_since_waits_for_its_commit);
        if (test_failed)
            break;
        TEST(killed_in_the_switch);
        if (domain != PMS_DOMAIN_PROCESS)
            TEST(power_fails_in_the_switch);
    }
    unlink(path);
    return test_summary();
}
