/* The journal of domain file when the medium fails, and when a program writes while it commits. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "journal/state.h"
#include "journal_fixture.h"

static unsigned char image[FILE_BYTES];

/* primitives of the chosen side and kind until the one that fails; 0: none */
static _Atomic int fail_after;
static enum pms_primitive fail_kind;
static bool fail_caller;
static int fail_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive != fail_kind || !is_writer() != fail_caller || atomic_load(&fail_after) == 0)
        return 0;
    return atomic_fetch_sub(&fail_after, 1) == 1 ? EIO : 0;
}

static void arm(enum pms_primitive kind, bool in_caller, int after)
{
    fail_kind = kind;
    fail_caller = in_caller;
    atomic_store(&fail_after, after);
    pms_persist_hook = fail_hook;
}

/* The writer fails at its nth write or sync: one call says so, nothing is lost, and it goes on. */
static void test_writer_errors(void)
{
    for (int nth = 1; nth <= 40; nth++) {
        struct store s;
        struct pms_error error;
        int fd = new_file(), failures = 0;
        plan_steps(12, 11, 6, 3);
        format(fd, 0);
        arm(nth % 2 ? PMS_PRIM_PWRITE : PMS_PRIM_SYNC, false, 1 + nth / 2);
        store_open(&s, fd, 0);
        while (s.tx < tx_count) {
            int status = store_step(&s, &error);
            if (status != PMS_OK) {
                MUST(status == PMS_E_OS && error.sys_errno == EIO);
                failures++;
                continue;
            }
            while (steps[s.tx].drain && pms_journal_drain(s.journal, &error) != PMS_OK)
                MUST(++failures < 3);
        }
        bool fired = atomic_exchange(&fail_after, 0) == 0;
        store_close(&s);
        pms_persist_hook = NULL;
        MUST(failures <= 1 && failures <= fired); /* a failed twin of an anchor is no failure */
        load_file(fd, image);
        MUST(same_state(image, tx_count));
        MUST(recover_tx(fd, NULL) == tx_count);
        close(fd);
    }
}

/* A commit's own write fails: not committed, and neither that nor its leavings hinder the next
 * try or recovery. */
static void test_commit_errors(void)
{
    for (int nth = 1; nth <= 30; nth++) {
        struct store s;
        struct pms_error error;
        int fd = new_file(), failures = 0;
        plan_steps(10, 12, 6, 0);
        format(fd, nth % 2 ? 0 : 4 * PMS_PAGE);
        arm(PMS_PRIM_PWRITE, true, nth);
        store_open(&s, fd, 0);
        while (s.tx < tx_count) {
            uint32_t chain = s.journal->chain;
            if (store_step(&s, &error) == PMS_OK)
                continue;
            failures++;
            MUST(failures == 1 && error.sys_errno == EIO);
            MUST(store_step(&s, &error) == PMS_OK);
            /* what the failed one left can never be completed by accident */
            MUST(s.journal->record->chain != chain);
        }
        atomic_store(&fail_after, 0);
        store_close(&s);
        pms_persist_hook = NULL;
        load_file(fd, image);
        MUST(same_state(image, tx_count) && recover_tx(fd, NULL) == tx_count);
        close(fd);
    }
}

static void test_sync_error(void)
{
    struct store s;
    struct pms_error error;
    struct pms_run runs[1] = {{.page = DATA0_PAGE, .pages = 1}};
    int fd = new_file();
    plan_steps(3, 13, 3, 0);
    format(fd, 0);
    arm(PMS_PRIM_SYNC, true, 2);
    store_open(&s, fd, 0);
    MUST(store_step(&s, &error) == PMS_OK);
    store_write(&s, steps[2].runs, steps[2].count, 2);
    MUST(pms_journal_commit(
             s.journal,
             &(struct pms_change){.tx = 2, .runs = steps[2].runs, .run_count = steps[2].count},
             &error) == PMS_E_OS);
    MUST(s.persist.failed_syncs == 1 && error.sys_errno == EIO);
    MUST(pms_journal_commit(s.journal, &(struct pms_change){.tx = 2, .runs = runs, .run_count = 1},
                            &error) == PMS_E_READONLY);
    MUST(pms_journal_drain(s.journal, &error) == PMS_E_READONLY);
    MUST(pms_journal_close(s.journal, false, &error) == PMS_E_READONLY);
    pms_persist_hook = NULL;
    pms_map_close(&s.map);
    uint64_t tx = recover_tx(fd, NULL);
    MUST(tx == 1 || tx == 2);
    load_file(fd, image);
    MUST(same_state(image, tx));
    close(fd);
}

static unsigned char *racing;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
static int racing_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive != PMS_PRIM_PWRITE || is_writer())
        return 0;
    pthread_mutex_lock(&one_at_a_time);
    if (racing)
        racing[draw(PMS_PAGE)]++;
    pthread_mutex_unlock(&one_at_a_time);
    return 0;
}

/* A store into a page left writable, between its checksum and its way to the file: that page may
 * be either, but the commit counts. */
static void test_racing_writer(void)
{
    struct store s;
    struct pms_error error;
    struct pms_run runs[2] = {{.page = DATA0_PAGE, .pages = 1},
                              {.page = EXTENT0_PAGE, .pages = 1, .home = 1}};
    int fd = new_file(), copy = new_file();
    format(fd, 0);
    pms_persist_hook = racing_hook;
    store_open(&s, fd, 0);
    for (uint64_t tx = 1; tx <= 8; tx++) {
        store_write(&s, runs, 2, 1 + 3 * tx); /* so salted, it leaves its pages writable */
        runs[0].home = 0;
        runs[1].home = 1;
        racing = s.map.user + runs[tx % 2].page * PMS_PAGE;
        MUST(pms_map_unprotect(&s.map, runs[tx % 2].page * PMS_PAGE, PMS_PAGE) == 0);
        MUST(pms_journal_commit(s.journal,
                                &(struct pms_change){.tx = tx, .runs = runs, .run_count = 2},
                                &error) == PMS_OK);
        racing = NULL;
        load_file(fd, image);
        store_file(copy, image);
        MUST(recover_tx(copy, NULL) == tx);
    }
    store_close(&s);
    pms_persist_hook = NULL;
    close(fd);
    close(copy);
}

static _Atomic bool headed;
static int late_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)bytes;
    if (primitive != PMS_PRIM_PWRITE || is_writer())
        return 0;
    if (addr != EXTENT0_PAGE * PMS_PAGE) {
        atomic_store(&headed, true);
        return 0;
    }
    for (int ms = 0; ms < 10000 && !atomic_load(&headed); ms++)
        usleep(1000);
    return EIO;
}

static struct store *store_of(const struct pms_change *change, int fd)
{
    static struct store s;
    struct pms_error error;
    format(fd, 0);
    store_open(&s, fd, 0);
    store_write(&s, change->runs, change->run_count, 1);
    MUST(pms_journal_commit(s.journal, change, &error) == PMS_OK);
    MUST(pms_journal_drain(s.journal, &error) == PMS_OK);
    return &s;
}

/* The second commit, of the first run alone, fails, and a crash after it finds the first. */
static void fail_second(struct store *s, struct pms_change *change, pms_persist_hook_fn *hook,
                        int fd)
{
    struct pms_error error;
    int copy = new_file();
    store_write(s, change->runs, 1, 2);
    change->tx = 2;
    pms_persist_hook = hook;
    MUST(pms_journal_commit(s->journal, change, &error) == PMS_E_OS && error.sys_errno == EIO);
    pms_persist_hook = NULL;
    MUST(s->persist.failed_syncs == 0);
    load_file(fd, image);
    store_file(copy, image);
    MUST(recover_tx(copy, NULL) == 1);
    close(copy);
}

/* What goes straight home fails when the record's header is written, and home happens to have the
 * same bytes: the record is whole, and must not count. */
static void test_record_taken_back(void)
{
    struct pms_error error;
    struct pms_run runs[2] = {{.page = DATA0_PAGE, .pages = 1},
                              {.page = EXTENT0_PAGE, .pages = 1, .home = 1}};
    struct pms_change change = {.tx = 1, .runs = runs, .run_count = 2};
    int fd = new_file();
    struct store *s = store_of(&change, fd);
    fail_second(s, &change, late_hook, fd);
    MUST(atomic_load(&headed));
    MUST(pms_journal_commit(s->journal, &change, &error) == PMS_OK);
    store_close(s);
    MUST(recover_tx(fd, NULL) == 2);
    close(fd);
}

static struct store *failing;
static int written_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    if (primitive != PMS_PRIM_PWRITE || is_writer() || !failing)
        return 0;
    size_t head = bytes - PMS_PAGE;
    const unsigned char *behind = failing->map.user + DATA0_PAGE * PMS_PAGE;
    MUST(pwrite(pms_persist_hook_fd, failing->journal->record, head, (off_t)addr) == (ssize_t)head);
    MUST(pwrite(pms_persist_hook_fd, behind, PMS_PAGE, (off_t)(addr + head)) == PMS_PAGE);
    failing = NULL;
    return EIO;
}

/* The disk wrote all of the record, and said that it failed. */
static void test_record_of_a_write_that_failed(void)
{
    struct pms_run runs[1] = {{.page = DATA0_PAGE, .pages = 1}};
    struct pms_change change = {.tx = 1, .runs = runs, .run_count = 1};
    int fd = new_file();
    failing = NULL;
    struct store *s = store_of(&change, fd);
    failing = s;
    fail_second(s, &change, written_hook, fd);
    MUST(!failing);
    store_close(s);
    close(fd);
}

/* Which copies of the anchor the medium surely holds: written since, and a sync after it that
 * succeeded. */
static bool sure[2], unsynced[2];
static int anchor_fail_at, anchor_primitives;
static int anchor_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)bytes;
    bool fails = ++anchor_primitives == anchor_fail_at;
    if (primitive == PMS_PRIM_PWRITE) {
        unsigned copy = addr == PMS_OFF_JANCHOR(1);
        MUST(sure[!copy]);
        sure[copy] = false;
        unsynced[copy] = !fails;
    } else if (primitive == PMS_PRIM_SYNC) {
        for (unsigned copy = 0; copy < 2; copy++) {
            sure[copy] |= unsynced[copy] && !fails;
            /* after a failed sync the kernel takes what it could not write for clean */
            unsynced[copy] = false;
        }
    }
    return fails ? EIO : 0;
}

/* An anchor's copy is overwritten only while the other is sure, whatever failed before. */
static void test_anchor_failures(void)
{
    for (anchor_fail_at = 1; anchor_fail_at <= 20; anchor_fail_at++) {
        struct pms_superblock super = fixture_super();
        struct pms_persist p = {0};
        struct pms_janchor anchor;
        struct pms_ring ring;
        struct pms_error error;
        bool twins;
        int fd = new_file();
        format(fd, 0);
        pms_ring_init(&ring, fd, &super, 0);
        MUST(pms_anchor_read(&ring, &anchor, &twins, &error) == PMS_OK && twins);
        sure[0] = sure[1] = true;
        anchor_primitives = 0;
        pms_persist_hook = anchor_hook;
        for (uint64_t tx = 1; tx <= 8; tx++) {
            struct pms_janchor found;
            anchor.tx = tx;
            int status = pms_anchor_advance(fd, &p, &anchor, &error);
            MUST(pms_anchor_read(&ring, &found, &twins, &error) == PMS_OK);
            MUST(found.tx == tx || (status != PMS_OK && found.tx == tx - 1));
        }
        pms_persist_hook = NULL;
        MUST(twins);
        close(fd);
    }
}

int main(void)
{
    TEST(test_writer_errors);
    TEST(test_commit_errors);
    TEST(test_sync_error);
    TEST(test_racing_writer);
    TEST(test_record_taken_back);
    TEST(test_record_of_a_write_that_failed);
    TEST(test_anchor_failures);
    return test_summary();
}
