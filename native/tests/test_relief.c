/* Domain file: a store that is larger than the memory that its process may take. */
#include <sched.h>

#include "flush/chunks.h"
#include "log/snapshot.h"
#include "many_arrays.h"
#include "seam/memory.h"
#include "seam/spill.h"

/* what is committed between two looks, and by one transaction */
#define SLACK (SHARE / 16 + 2 * BYTES + MIB)

static bool keeps_hot = true;

static struct pms_stats stats(void)
{
    struct pms_stats s = {0};
    CHECK(ok(pms_pool_stats(pool, &s, &e)));
    return s;
}

static void open_with(int mode, int hold)
{
    struct pms_options o = {
        .size = 110 * MIB, .mode = mode, .domain = PMS_DOMAIN_FILE, .hot = keeps_hot};
    o.hold = hold;
    CHECK(ok(pms_pool_open(path, &o, &pool, &e)));
}

/* A transaction for each array. */
static void fill_store(int hold)
{
    open_with(PMS_MODE_TRUNCATE, hold);
    for (int i = 0; i < ARRAYS; i++) {
        make(i);
        write_array(i, (uint32_t)i);
        CHECK(ok(pms_commit(pool, &e)));
    }
}

static void write_all(uint32_t value)
{
    for (int i = 0; i < ARRAYS; i++) {
        write_array(i, value + (uint32_t)i);
        CHECK(ok(pms_commit(pool, &e)));
    }
}

static void close_store(void) { shut(pool, 0); }

/* ---- how much ---- */

static void what_is_filled_is_bounded(void)
{
    uint64_t before = anonymous(), most = 0, own = 0;
    pms_memory_set_limit(2 * SHARE);
    open_with(PMS_MODE_TRUNCATE, 0);
    for (int i = 0; i < ARRAYS; i++) {
        make(i);
        write_array(i, (uint32_t)i);
        CHECK(ok(pms_commit(pool, &e)));
        uint64_t now = anonymous() - before;
        most = now > most ? now : most;
        own = stats().own_bytes > own ? stats().own_bytes : own;
    }
    printf("  own %llu MiB at most, anonymous %llu MiB\n", (unsigned long long)(own / MIB),
           (unsigned long long)(most / MIB));
    CHECK(own <= SHARE + SLACK && stats().given_back_bytes > (ARRAYS * BYTES) / 2);
    CHECK(!RSS_TELLS || most <= SHARE + SLACK + 12 * MIB);
    CHECK(all_are(0));
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0);
    find_all();
    CHECK(all_are(0));
    close_store();
}

static void what_is_written_again_is_bounded(void)
{
    uint64_t before = anonymous(), most = 0, own = 0;
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    for (uint32_t round = 1; round <= 3; round++) {
        for (int i = 0; i < ARRAYS; i++) {
            write_array(i, round * 1000 + (uint32_t)i);
            CHECK(ok(pms_commit(pool, &e)));
            uint64_t now = anonymous() - before;
            most = now > most ? now : most;
            own = stats().own_bytes > own ? stats().own_bytes : own;
        }
        CHECK(all_are(round * 1000));
    }
    printf("  own %llu MiB at most, anonymous %llu MiB\n", (unsigned long long)(own / MIB),
           (unsigned long long)(most / MIB));
    CHECK(own <= SHARE + SLACK);
    CHECK(!RSS_TELLS || most <= SHARE + SLACK + 12 * MIB);
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0);
    find_all();
    CHECK(all_are(3000));
    close_store();
}

/* Many small blocks, of the engine's too. */
static void small_things_are_bounded(void)
{
    unsigned char value[3000];
    uint64_t own = 0;
    pms_memory_set_limit(2 * SHARE);
    open_with(PMS_MODE_TRUNCATE, 0);
    for (int i = 0; i < 20000; i++) {
        char name[16];
        memset(value, i, sizeof value);
        uint32_t n = (uint32_t)snprintf(name, sizeof name, "v%d", i);
        CHECK(pms_object_put_value(pool, 0, name, n, (char *)value, sizeof value, &e) == PMS_OK);
        if (i % 100 == 99) {
            CHECK(ok(pms_commit(pool, &e)));
            own = stats().own_bytes > own ? stats().own_bytes : own;
        }
    }
    printf("  own %llu MiB at most of %llu\n", (unsigned long long)(own / MIB),
           (unsigned long long)(stats().used_bytes / MIB));
    CHECK(stats().used_bytes > 55 * MIB && own <= SHARE + SLACK);
    for (int i = 0; i < 20000; i++) {
        char name[16];
        struct pms_object o;
        memset(value, i, sizeof value);
        uint32_t n = (uint32_t)snprintf(name, sizeof name, "v%d", i);
        bool same = pms_object_find(pool, 0, name, n, &o, &e) == PMS_OK &&
                    o.meta_bytes == sizeof value && memcmp(o.meta, value, sizeof value) == 0;
        CHECK(same);
        if (!same)
            break;
    }
    struct pms_check_report report = {0};
    CHECK(ok(pms_check(pool, &report, &e)) && report.problem_count == 0);
    close_store();
}

static void without_need_nothing_is_given_back(void)
{
    pms_memory_set_limit(1ull << 40);
    fill_store(0);
    write_all(7);
    CHECK(stats().given_back_bytes == 0 && stats().own_bytes >= ARRAYS * BYTES);
    close_store();
}

/* The first half is written once, the second again and again. */
static void the_coldest_goes_first(void)
{
    uint64_t run;
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    for (uint32_t round = 0; round < 40; round++) {
        for (int i = ARRAYS - 3; i < ARRAYS; i++)
            write_array(i, round + (uint32_t)i);
        CHECK(ok(pms_commit(pool, &e)) && ok(pms_journal_drain(pool->journal, &e)));
        int k = (int)(round % (ARRAYS - 3));
        write_array(k, (uint32_t)k + 5);
        CHECK(ok(pms_commit(pool, &e)));
    }
    uint64_t kept = 0, pages = BYTES / PMS_PAGE, cold = (ARRAYS + 40) * BYTES;
    for (int i = ARRAYS - 3; i < ARRAYS; i++)
        for (uint64_t p = 0; p < pages; p++)
            kept += !pms_map_foreign(&pool->map, offset[i] + p * PMS_PAGE, PMS_PAGE, &run);
    CHECK(kept == 3 * pages);
    /* what was written in all rounds never was given back */
    CHECK(stats().given_back_bytes > cold / 2 && stats().given_back_bytes < cold);
    close_store();
}

/* ---- what is not given back, or is as it was ---- */

static void a_roll_back_after_it(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    for (uint32_t round = 0; round < 3; round++) {
        for (int i = 0; i < ARRAYS; i += 3)
            write_array(i, 99);
        CHECK(ok(pms_rollback(pool, &e)) && all_are(round * 100));
        write_all((round + 1) * 100);
    }
    close_store();
}

/* An array that was made in a transaction which was rolled back: its view shows what it showed. */
static void what_was_never_committed_stays(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    CHECK(ok(pms_object_remove(pool, 0, "7", 1, &e)) && ok(pms_commit(pool, &e)));
    CHECK(pms_journal_drain(pool->journal, &e) == PMS_OK);
    uint64_t data;
    uint32_t *lost = array(pool, "lost", WORDS, &data);
    struct pms_object o;
    CHECK(data == offset[7] && ok(pms_object_get(pool, 0, "lost", 4, &o, &e)));
    for (uint64_t w = 0; w < WORDS; w += STRIDE)
        lost[w] = 77 + (uint32_t)w;
    CHECK(ok(pms_rollback(pool, &e)));
    for (uint32_t round = 1; round < 3; round++)
        for (int i = 0; i < ARRAYS; i++) {
            if (i == 7)
                continue;
            write_array(i, round);
            CHECK(ok(pms_commit(pool, &e)));
        }
    CHECK(array_is(lost, 77));
    pms_unpin(pool, data);
    close_store();
}

static void slots_that_are_open(void)
{
    struct pms_slot_pair pair;
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    CHECK(
        ok(pms_object_make_slots(pool, 0, "s", 1, "\x81\xa5slots", 8, "m", 1, 4 * BYTES, 0, &e)) &&
        ok(pms_commit(pool, &e)) && ok(pms_slot_find(pool, 0, "s", 1, &pair, &e)));
    for (uint32_t round = 1; round <= 6; round++) {
        struct pms_object o;
        struct pms_slot_turn turn = {UINT64_MAX, 0};
        CHECK(ok(pms_slot_get(pool, 0, "s", 1, PMS_SLOT_NEXT, &o, &e)));
        uint32_t *idle = (uint32_t *)(void *)(pool->map.user + o.data);
        for (uint64_t w = 0; w < 4 * WORDS; w += STRIDE)
            idle[w] = round + (uint32_t)w;
        write_all(round); /* meanwhile */
        CHECK(array_is(idle, round) && array_is(idle + 3 * WORDS, round + 3 * (uint32_t)WORDS));
        CHECK(ok(pms_slot_flip(pool, 0, "s", 1, &turn, &e)) && ok(pms_commit(pool, &e)));
        pms_unpin(pool, o.data);
        write_all(round + 50);
        CHECK(array_is(idle, round) && array_is(idle + 3 * WORDS, round + 3 * (uint32_t)WORDS));
    }
    CHECK(all_are(56));
    close_store();
}

static void hot_pages(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    uint64_t data;
    uint32_t *hot = array(pool, "hot", 64, &data);
    for (uint32_t round = 0; round < 3 * ARRAYS; round++) {
        hot[3] = round;
        write_array((int)(round % ARRAYS), round + 5);
        CHECK(ok(pms_commit(pool, &e)));
        CHECK(hot[3] == round);
    }
    CHECK(stats().hot_ranges > 0);
    hot[3] = 12;
    CHECK(ok(pms_rollback(pool, &e)) && hot[3] == 3 * ARRAYS - 1);
    close_store();
}

static void a_held_version(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(1);
    for (uint32_t round = 1; round <= 4; round++) {
        write_all(round * 10);
        for (int i = 0; i < 4; i++)
            write_array(i * 9, 1);
        CHECK(ok(pms_commit(pool, &e)));
        CHECK(ok(pms_back(pool, &e)) && all_are(round * 10));
    }
    CHECK(stats().given_back_bytes > 0);
    close_store();
}

/* It is not home while it is held: larger than the share, all of it is the process's own. */
static void what_holds_a_version_stays(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(1);
    write_all(10);
    for (int i = 0; i < ARRAYS; i++)
        write_array(i, 20 + (uint32_t)i);
    CHECK(ok(pms_commit(pool, &e)) && all_are(20));
    CHECK(stats().own_bytes + pms_spill_bytes(&pool->map) >= ARRAYS * BYTES);
    CHECK(ok(pms_back(pool, &e)) && all_are(10));
    close_store();
}

static void a_snapshot(void)
{
    struct pms_snapshot *s;
    static uint32_t read[WORDS];
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    CHECK(ok(pms_snapshot_begin(pool, 1ull << 30, -1, &s, &e)));
    for (uint32_t round = 1; round <= 3; round++) {
        write_all(round * 20);
        for (int i = 0; i < ARRAYS; i++) {
            uint64_t from = offset[i] & ~(uint64_t)(PMS_PAGE - 1);
            CHECK(from == offset[i] && ok(pms_snapshot_read(s, from, BYTES, read, &e)));
            CHECK(array_is(read, (uint32_t)i));
        }
        CHECK(all_are(round * 20));
    }
    pms_snapshot_end(pool, s);
    CHECK(stats().given_back_bytes > 0);
    close_store();
}

static void a_fork_child_reads_its_state(void)
{
    int go[2], said[2];
    char byte = 0;
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    write_array(3, 1234);
    CHECK(pipe(go) == 0 && pipe(said) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(go[1]);
        bool right = read(go[0], &byte, 1) == 1;
        for (int i = 0; i < ARRAYS && right; i++)
            right = array_is(at[i], i == 3 ? 1234 : (uint32_t)i);
        byte = right;
        _exit(write(said[1], &byte, 1) == 1 ? 0 : 1);
    }
    write_all(500);
    write_all(600);
    CHECK(write(go[1], "x", 1) == 1 && read(said[0], &byte, 1) == 1 && byte == 1);
    CHECK(waitpid(child, NULL, 0) == child && all_are(600));
    for (int i = 0; i < 2; i++) {
        close(go[i]);
        close(said[i]);
    }
    close_store();
}

/* ---- one transaction ---- */

static void make_all(uint32_t value)
{
    for (int i = 0; i < ARRAYS; i++) {
        make(i);
        write_array(i, value + (uint32_t)i);
    }
}

static bool none_is_there(void)
{
    struct pms_object o;
    for (int i = 0; i < ARRAYS; i++) {
        char name[8];
        name_of(i, name);
        if (pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e) != PMS_E_NOT_FOUND)
            return false;
    }
    return true;
}

/* What it bears is home before it is committed. */
static void what_one_transaction_bears_is_bounded(void)
{
    uint64_t before = anonymous(), most = 0;
    pms_memory_set_limit(2 * SHARE);
    open_with(PMS_MODE_TRUNCATE, 0);
    for (int i = 0; i < ARRAYS; i++) {
        make(i);
        write_array(i, (uint32_t)i);
        uint64_t now = anonymous() - before;
        most = now > most ? now : most;
        CHECK(stats().own_bytes <= SHARE + SLACK);
    }
    printf("  anonymous %llu MiB at most\n", (unsigned long long)(most / MIB));
    CHECK(!RSS_TELLS || most <= SHARE + SLACK + 12 * MIB);
    CHECK(all_are(0));
    /* again, some of it: that is written once more */
    for (int i = 0; i < ARRAYS; i += 5) {
        write_array(i, 70 + (uint32_t)i);
        write_array(i, (uint32_t)i + 3);
    }
    CHECK(ok(pms_commit(pool, &e)));
    for (int i = 0; i < ARRAYS; i++)
        CHECK(array_is(at[i], (uint32_t)i + (i % 5 ? 0 : 3)));
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0);
    find_all();
    for (int i = 0; i < ARRAYS; i++)
        CHECK(array_is(at[i], (uint32_t)i + (i % 5 ? 0 : 3)));
    close_store();
}

/* Over blocks that were freed, whose images may still be on their way home. */
static void what_is_borne_where_others_died(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    for (uint32_t round = 1; round <= 3; round++) {
        pms_memory_set_limit(1ull << 40); /* nobody hurries */
        CHECK(ok(pms_journal_drain(pool->journal, &e)));
        for (int i = ARRAYS; i-- > 0;)
            write_array(i, round * 100);
        CHECK(ok(pms_commit(pool, &e)));
        for (int i = 0; i < ARRAYS; i++) {
            char name[8];
            name_of(i, name);
            CHECK(ok(pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e)));
        }
        CHECK(ok(pms_commit(pool, &e)));
        pms_memory_set_limit(2 * SHARE);
        pool->relief.most = 0; /* looks at once */
        make_all(round * 100 + 7);
        CHECK(all_are(round * 100 + 7) && ok(pms_commit(pool, &e)) && all_are(round * 100 + 7));
    }
    CHECK(ok(pms_journal_drain(pool->journal, &e)) && all_are(307));
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0);
    find_all();
    CHECK(all_are(307));
    close_store();
}

static void what_one_transaction_bears_is_rolled_back(void)
{
    struct pms_check_report report = {0};
    pms_memory_set_limit(2 * SHARE);
    open_with(PMS_MODE_TRUNCATE, 0);
    for (int round = 0; round < 3; round++) {
        make_all(5);
        CHECK(ok(pms_rollback(pool, &e)) && none_is_there());
    }
    CHECK(ok(pms_check(pool, &report, &e)) && report.problem_count == 0);
    make_all(6);
    CHECK(ok(pms_commit(pool, &e)) && all_are(6));
    close_store();
}

/* It dies with all of it written, and nothing committed; the next one finds what was committed. */
static void a_death_before_the_commit(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    for (int i = 0; i < ARRAYS / 2; i++) {
        char name[8];
        name_of(i, name);
        CHECK(ok(pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e)));
    }
    CHECK(ok(pms_commit(pool, &e)));
    close_store();
    pid_t child = fork();
    if (child == 0) {
        open_with(PMS_MODE_READ_WRITE, 0);
        for (int i = 0; i < ARRAYS / 2; i++) {
            make(i);
            write_array(i, 9);
        }
        _exit(stats().given_back_bytes > 0 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    open_with(PMS_MODE_READ_WRITE, 0);
    for (int i = 0; i < ARRAYS; i++) {
        char name[8];
        struct pms_object o;
        name_of(i, name);
        int found = pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e);
        CHECK(found == (i < ARRAYS / 2 ? PMS_E_NOT_FOUND : PMS_OK));
        if (found == PMS_OK)
            CHECK(array_is((uint32_t *)(void *)(pool->map.user + o.data), (uint32_t)i));
    }
    close_store();
}

/* Twelve pairs of two: each transaction flips them all. */
static void slots_that_one_transaction_flips(void)
{
    pms_memory_set_limit(2 * SHARE);
    open_with(PMS_MODE_TRUNCATE, 0);
    for (int i = 0; i < 12; i++) {
        char name[8];
        name_of(i, name);
        CHECK(ok(pms_object_make_slots(pool, 0, name, (uint32_t)strlen(name), "\x81\xa5slots", 8,
                                       "m", 1, 2 * BYTES, 0, &e)));
    }
    CHECK(ok(pms_commit(pool, &e)));
    uint32_t *current[12] = {0};
    for (uint32_t round = 1; round <= 5; round++) {
        for (int i = 0; i < 12; i++) {
            char name[8];
            struct pms_object o;
            struct pms_slot_turn turn = {UINT64_MAX, 0};
            name_of(i, name);
            uint32_t n = (uint32_t)strlen(name);
            CHECK(ok(pms_slot_get(pool, 0, name, n, PMS_SLOT_NEXT, &o, &e)));
            uint32_t *idle = (uint32_t *)(void *)(pool->map.user + o.data);
            for (uint64_t w = 0; w < 2 * WORDS; w += STRIDE)
                idle[w] = round * 50 + (uint32_t)i + (uint32_t)w;
            CHECK(ok(pms_slot_flip(pool, 0, name, n, &turn, &e)));
            CHECK(stats().own_bytes <= SHARE + 3 * BYTES + SLACK);
            idle[0] = round * 50 + (uint32_t)i; /* still its own to write */
            pms_unpin(pool, o.data);
            if (round < 5)
                current[i] = idle;
        }
        if (round == 5)
            CHECK(ok(pms_rollback(pool, &e)));
        else
            CHECK(ok(pms_commit(pool, &e)));
        for (int i = 0; i < 12; i++)
            CHECK(array_is(current[i], (round < 5 ? round : 4) * 50 + (uint32_t)i));
    }
    CHECK(stats().given_back_bytes > 12 * BYTES);
    close_store();
}

/* ---- beside others ---- */

static _Atomic bool over;
static _Atomic uint32_t wrong;

/* Of these nobody writes: whatever becomes of their pages, they show the same. */
static void *read_on(void *arg)
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

static void readers_and_writers_beside_it(void)
{
    pthread_t thread[3];
    /* ranges that stay writable are compared while others store there, as they may */
    keeps_hot = RSS_TELLS;
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    for (int i = 8; i < 10; i++)
        memset(at[i], 0, BYTES);
    CHECK(ok(pms_commit(pool, &e)));
    atomic_store(&over, false);
    CHECK(pthread_create(&thread[0], NULL, read_on, NULL) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&thread[1 + i], NULL, write_on, at[8 + i]) == 0);
    for (uint32_t round = 1; round <= 4; round++)
        for (int i = 10; i < ARRAYS; i++) {
            write_array(i, round + (uint32_t)i);
            CHECK(ok(pms_commit(pool, &e)));
        }
    atomic_store(&over, true);
    for (int i = 0; i < 3; i++)
        pthread_join(thread[i], NULL);
    CHECK(atomic_load(&wrong) == 0 && stats().given_back_bytes > ARRAYS * BYTES);
    CHECK(ok(pms_commit(pool, &e)));
    uint32_t *last = malloc(2 * BYTES);
    for (uint64_t i = 0; i < 2; i++)
        memcpy(last + i * WORDS, at[8 + i], BYTES);
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0);
    find_all();
    for (uint64_t i = 0; i < 2; i++)
        CHECK(memcmp(last + i * WORDS, at[8 + i], BYTES) == 0);
    for (int i = 10; i < ARRAYS; i++)
        CHECK(array_is(at[i], 4 + (uint32_t)i));
    free(last);
    close_store();
    keeps_hot = true;
}

/* Pages that may not leave memory stay; the store goes on. (The sanitizers make mlock do nothing.)
 */
static void pages_locked_in_memory(void)
{
    pms_memory_set_limit(2 * SHARE);
    fill_store(0);
    write_array(0, 40);
    if (syscall(SYS_mlock, at[0], BYTES) == 0) {
        CHECK(ok(pms_commit(pool, &e)));
        for (int i = 1; i < ARRAYS; i++) {
            write_array(i, 40 + (uint32_t)i);
            CHECK(ok(pms_commit(pool, &e)));
        }
        uint64_t run;
        CHECK(!pms_map_foreign(&pool->map, offset[0], BYTES, &run) && run == BYTES);
        syscall(SYS_munlock, at[0], BYTES);
        CHECK(all_are(40));
    }
    close_store();
}

static void several_stores_share_it(void)
{
    char other_path[300];
    struct pms_pool *other = NULL;
    pms_memory_set_limit(2 * SHARE);
    snprintf(other_path, sizeof other_path, "%s.other", path);
    fill_store(0);
    uint64_t alone = pms_memory_own();
    CHECK(alone > 0 && alone <= SHARE + SLACK);
    struct pms_options o = {
        .size = 40 * MIB, .mode = PMS_MODE_TRUNCATE, .domain = PMS_DOMAIN_FILE, .hot = 1};
    CHECK(ok(pms_pool_open(other_path, &o, &other, &e)));
    for (int i = 0; i < 12; i++) {
        char name[8];
        name_of(i, name);
        uint32_t *words = array(other, name, WORDS, NULL);
        memset(words, i, BYTES);
        CHECK(ok(pms_commit(other, &e)));
    }
    /* what the first one has it keeps: it commits nothing. But together they have no more */
    struct pms_stats s;
    CHECK(ok(pms_pool_stats(other, &s, &e)) && s.given_back_bytes > 0);
    write_all(3);
    CHECK(pms_memory_own() <= SHARE + SLACK && all_are(3));
    shut(other, 0);
    unlink(other_path);
    close_store();
    CHECK(pms_memory_own() == 0);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-relief-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    TEST(what_is_filled_is_bounded);
    TEST(what_is_written_again_is_bounded);
    TEST(small_things_are_bounded);
    TEST(without_need_nothing_is_given_back);
    TEST(the_coldest_goes_first);
    TEST(a_roll_back_after_it);
    TEST(what_was_never_committed_stays);
    TEST(slots_that_are_open);
    TEST(hot_pages);
    TEST(a_held_version);
    TEST(what_holds_a_version_stays);
    TEST(a_snapshot);
    TEST(a_fork_child_reads_its_state);
    TEST(what_one_transaction_bears_is_bounded);
    TEST(what_is_borne_where_others_died);
    TEST(what_one_transaction_bears_is_rolled_back);
    TEST(a_death_before_the_commit);
    TEST(slots_that_one_transaction_flips);
    TEST(readers_and_writers_beside_it);
    TEST(pages_locked_in_memory);
    TEST(several_stores_share_it);
    unlink(path);
    return test_summary();
}
