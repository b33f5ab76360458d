/* The held version in domain file, by crash points, and what concerns its journal alone. */
#include <errno.h>

#include "base/region.h"
#include "hold_stories.h"
#include "journal/state.h"

static struct pms_error e;

static struct pms_pool *open_base(void)
{
    copy_file(base_path, path);
    return open_as(PMS_MODE_READ_WRITE, 1);
}

/* Without an end of its own. */
static void leave(void (*fn)(struct pms_pool *p))
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        fn(open_as(PMS_MODE_READ_WRITE, 1));
        kill(getpid(), SIGKILL);
    }
    waitpid(pid, NULL, 0);
}

/* ---- syncs ---- */

static _Thread_local bool caller;
static _Atomic unsigned syncs;

static int count_syncs(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    syncs += caller && primitive == PMS_PRIM_SYNC;
    return 0;
}

static unsigned syncs_of(int hold, void (*write)(struct pms_pool *p))
{
    copy_file(base_path, path);
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, hold);
    write(p);
    commit(p); /* the window may become another one */
    caller = true;
    syncs = 0;
    pms_persist_hook = count_syncs;
    for (int i = 0; i < 20; i++) {
        write(p);
        commit(p);
    }
    pms_persist_hook = NULL;
    shut(p, 0);
    return syncs;
}

static void a_commit_that_holds_syncs_once(void)
{
    static void (*const writes[])(struct pms_pool *p) = {small, large, turn, land};
    for (size_t i = 0; i < sizeof writes / sizeof *writes; i++) {
        CHECK(syncs_of(0, writes[i]) == 20);
        CHECK(syncs_of(1, writes[i]) == 20);
    }
}

static _Atomic unsigned writers_syncs, too_early;

/* The thread that writes home is slow. */
static int watch_order(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    if (!caller && primitive == PMS_PRIM_SYNC) {
        usleep(50000);
        writers_syncs++;
    }
    too_early += caller && primitive == PMS_PRIM_PWRITE && bytes == SLOT_BYTES && writers_syncs < 2;
    return 0;
}

static void a_slot_goes_home_after_it_was_let_go(void)
{
    copy_file(base_path, path);
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
    turn(p);
    commit(p);
    caller = true;
    writers_syncs = too_early = 0;
    pms_persist_hook = watch_order;
    turn(p);
    commit(p);
    CHECK(writers_syncs >= 2 && too_early == 0);
    pms_persist_hook = NULL;
    shut(p, 0);
}

/* ---- a record that was dropped ---- */

static void two_commits(struct pms_pool *p)
{
    large(p);
    commit(p);
    large(p);
    commit(p);
}

static off_t last_image; /* the last page of the last record */

static void find_last_image(struct pms_pool *p)
{
    uint64_t room;
    last_image = (off_t)pms_ring_place(&p->journal->ring, p->journal->tail - PMS_PAGE, &room);
}

/* A commit in flight is dropped, for one of its pages did not reach the disk. Should that page come
 * to be there later, by another commit in flight, the record is no commit all the same. */
static void a_dropped_record_stays_dropped(void)
{
    unsigned char was[PMS_PAGE], torn[PMS_PAGE] = {0};
    struct pms_pool *p = open_base();
    two_commits(p);
    uint32_t state = digest(p);
    value(p);
    commit(p);
    find_last_image(p);
    /* as it would be, had the machine failed before the sync: nothing has gone home yet */
    char crashed[300];
    snprintf(crashed, sizeof crashed, "%s.crashed", path);
    copy_file(path, crashed);
    shut(p, 0);
    copy_file(crashed, path);
    unlink(crashed);
    int fd = open(path, O_RDWR);
    CHECK(pread(fd, was, sizeof was, last_image) == (ssize_t)sizeof was);
    CHECK(pwrite(fd, torn, sizeof torn, last_image) == (ssize_t)sizeof torn);
    p = open_as(PMS_MODE_READ_WRITE, 1);
    CHECK(p && digest(p) == state && pms_holds(p));
    shut(p, 0);
    CHECK(pwrite(fd, was, sizeof was, last_image) == (ssize_t)sizeof was);
    close(fd);
    p = open_as(PMS_MODE_READ_WRITE, 1);
    CHECK(p && digest(p) == state);
    shut(p, 1);
}

/* ---- a record that somebody made ---- */

static void *must(size_t bytes)
{
    return aligned_alloc(PMS_PAGE, (bytes + PMS_PAGE - 1) & -PMS_PAGE);
}

/* The position of a page's image in the record, which has one. */
static uint64_t image_of(const struct pms_ring *ring, uint64_t at, const struct pms_record *record,
                         uint64_t page)
{
    struct pms_run_reader reader;
    pms_runs_start(&reader, ring, at, record);
    for (;;) {
        struct pms_run run;
        uint64_t image;
        MUST(pms_runs_next(&reader, &run, &image, &e));
        if (!run.home && page - run.page < run.pages)
            return image + (page - run.page) * PMS_PAGE;
    }
}

/* The record at a position has another byte (unless mask is 0) of the file's, and right checksums.
 */
static void forge(const struct pms_ring *ring, struct pms_persist *p, uint64_t at, uint64_t byte,
                  unsigned char mask)
{
    struct pms_record *record = must(PMS_PAGE);
    MUST(pms_ring_read(ring, at, record, PMS_PAGE, &e));
    uint64_t head = pms_record_head(record->run_count);
    uint64_t image = image_of(ring, at, record, byte / PMS_PAGE);
    unsigned char *whole = must(record->bytes);
    MUST(pms_ring_read(ring, at, whole, record->bytes, &e));
    free(record);
    record = (void *)whole;
    whole[image - at + byte % PMS_PAGE] ^= mask;
    record->images_crc = pms_crc32c(0, whole + head, record->image_bytes);
    record->crc = 0;
    record->crc = pms_crc32c(ring->seed, whole,
                             sizeof *record + record->run_count * sizeof(struct pms_run));
    struct iovec iov = {whole, record->bytes};
    MUST(pms_ring_write(ring, p, at, &iov, 1, &e));
    free(whole);
}

/* Behind the last entry of a page table nothing is ever changed: going back could not undo it. */
static void a_record_of_no_place_is_refused(void)
{
    char crashed[300];
    snprintf(crashed, sizeof crashed, "%s.crashed", path);
    for (int forged = 0; forged < 2; forged++) {
        struct pms_pool *p = open_base();
        huge(p);
        commit(p);
        to_the_end(p);
        commit(p);
        copy_file(path, crashed);
        struct pms_ring ring = p->journal->ring;
        ring.fd = open(crashed, O_RDWR);
        ring.direct = -1;
        forge(&ring, &p->persist, p->journal->loose.position,
              pms_region_table_end(&p->super.segment[1]), forged ? 0x5a : 0);
        close(ring.fd);
        shut(p, 0);
        CHECK(rename(crashed, path) == 0);
        struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain, .hold = 1};
        CHECK(pms_pool_open(path, &o, &p, &e) == (forged ? PMS_E_CORRUPT : PMS_OK));
        if (p) {
            back(p);
            shut(p, 0);
        }
    }
}

/* ---- commits that fail ---- */

static _Atomic int fail_after;
static enum pms_primitive failing;

static int fail(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    return caller && primitive == failing && --fail_after == 0 ? EIO : 0;
}

static void fail_next(enum pms_primitive primitive)
{
    caller = true;
    failing = primitive;
    fail_after = 1;
    pms_persist_hook = fail;
}

/* Copies of hot ranges lie where the held log began. */
static void a_commit_that_fails_lets_go(void)
{
    struct pms_pool *p = open_base();
    for (int i = 0; i < 6; i++) { /* small becomes hot */
        small(p);
        commit(p);
    }
    uint32_t state = digest(p);
    CHECK(pms_holds(p));
    small(p);
    fail_next(PMS_PRIM_PWRITE);
    CHECK(pms_commit(p, &e) == PMS_E_OS);
    pms_persist_hook = NULL;
    CHECK(!pms_holds(p) && pms_back(p, &e) == PMS_E_STATE);
    CHECK(pms_rollback(p, &e) == PMS_OK && digest(p) == state);
    value(p);
    commit(p);
    back(p);
    CHECK(digest(p) == state);
    shut(p, 1);
}

/* The file has it still: nothing is lost. */
static void going_back_that_fails_can_be_had_again(void)
{
    static const enum pms_primitive what[] = {PMS_PRIM_PWRITE, PMS_PRIM_SYNC};
    for (int i = 0; i < 2; i++) {
        struct pms_pool *p = open_base();
        for (int k = 0; k < 6; k++) {
            small(p);
            commit(p);
        }
        uint32_t before = digest(p);
        small(p);
        large(p);
        commit(p);
        fail_next(what[i]);
        CHECK(pms_back(p, &e) == PMS_E_OS);
        pms_persist_hook = NULL;
        CHECK(pms_commit(p, &e) == PMS_E_READONLY);
        CHECK(pms_pool_close(p, 0, &e) == PMS_E_READONLY);
        pms_pool_release(p);
        p = open_as(PMS_MODE_READ_WRITE, 1);
        CHECK(p && (pms_holds(p) || (i == 1 && digest(p) == before)));
        if (pms_holds(p))
            back(p);
        CHECK(digest(p) == before);
        shut(p, 1);
    }
}

/* ---- a copy ---- */

/* Of a store that was left, or closed, as it holds. */
static void a_copy_at_rest_holds_too(void)
{
    char original[300];
    snprintf(original, sizeof original, "%s.original", path);
    for (int closed = 0; closed < 2; closed++) {
        copy_file(base_path, path);
        if (closed) {
            struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
            two_commits(p);
            shut(p, 0);
            shut(open_as(PMS_MODE_READ_WRITE, 1), 0);
        } else {
            leave(two_commits);
        }
        CHECK(rename(path, original) == 0);
        copy_file(original, path); /* another file */
        struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
        CHECK(p && pms_holds(p));
        unsigned char now = bytes_of(p, "large")[9];
        back(p);
        CHECK(bytes_of(p, "large")[9] == now - 1);
        shut(p, 1);
    }
    unlink(original);
}

static void copy_part(int from, int to, uint64_t at, uint64_t end)
{
    unsigned char page[PMS_PAGE];
    for (ssize_t n = 1; n > 0 && at < end; at += (uint64_t)n) {
        n = pread(from, page, sizeof page, (off_t)at);
        CHECK(n >= 0 && pwrite(to, page, (size_t)n, (off_t)at) == n);
    }
}

/* It has the journal of one moment, and the home of a later one. */
static void a_copy_beside_a_release_holds_nothing(void)
{
    char copy[300];
    snprintf(copy, sizeof copy, "%s.copy", path);
    struct pms_pool *p = open_base();
    two_commits(p);
    uint32_t state = digest(p);
    int from = open(path, O_RDONLY), to = open(copy, O_RDWR | O_CREAT | O_TRUNC, 0600);
    uint64_t data = p->super.segment[0].data_off;
    copy_part(from, to, 0, data);
    CHECK(pms_release(p, &e) == PMS_OK && pms_journal_drain(p->journal, &e) == PMS_OK);
    copy_part(from, to, data, UINT64_MAX);
    close(from);
    close(to);
    shut(p, 0);
    CHECK(rename(copy, path) == 0);
    p = open_as(PMS_MODE_READ, 0);
    CHECK(p && !pms_holds(p) && digest(p) == state);
    shut(p, 0);
    p = open_as(PMS_MODE_READ_WRITE, 1);
    CHECK(p && !pms_holds(p) && digest(p) == state);
    shut(p, 1);
}

/* ---- a child ---- */

/* It reads the state of the fork, also when the record that was held then goes home. */
static void a_fork_child_reads_one_state(void)
{
    int go[2], ws;
    leave(two_commits);
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
    CHECK(p && pms_holds(p));
    uint32_t crc = pms_crc32c(0, bytes_of(p, "large"), 160000);
    const unsigned char *at = bytes_of(p, "large");
    CHECK(pipe(go) == 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        _exit(read(go[0], &c, 1) == 1 && pms_crc32c(0, at, 160000) == crc ? 0 : 1);
    }
    two_commits(p);
    CHECK(pms_release(p, &e) == PMS_OK && pms_journal_drain(p->journal, &e) == PMS_OK);
    CHECK(write(go[1], "g", 1) == 1);
    waitpid(pid, &ws, 0);
    CHECK(WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
    close(go[0]);
    close(go[1]);
    shut(p, 1);
}

static void of_the_journal(void)
{
    a_commit_that_holds_syncs_once();
    a_slot_goes_home_after_it_was_let_go();
    a_dropped_record_stays_dropped();
    a_record_of_no_place_is_refused();
    a_commit_that_fails_lets_go();
    going_back_that_fails_can_be_had_again();
    a_copy_at_rest_holds_too();
    a_copy_beside_a_release_holds_nothing();
    a_fork_child_reads_one_state();
}

int main(void)
{
    static const struct model model[] = {
        {PMS_DOMAIN_FILE, false, false},
        {PMS_DOMAIN_FILE, true, false},
        {PMS_DOMAIN_FILE, true, true},
    };
    return tell_stories("test-hold-file", model, sizeof model / sizeof *model, of_the_journal);
}
