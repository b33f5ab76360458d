/* The journal of domain file: torn and damaged records, images on their way home, anchors, an
 * enemy's records. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "journal_fixture.h"
#include "journal/state.h"

static unsigned char image[FILE_BYTES], other[FILE_BYTES], whole[FILE_BYTES];

static pthread_t caller;

static int writer_rests_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)primitive;
    (void)addr;
    (void)bytes;
    while (is_writer())
        pause();
    return 0;
}

/* A file whose journal holds transactions 1..n of the plan, none home: the process that wrote it
 * died. */
static int crashed_file(uint32_t n)
{
    int fd = new_file();
    format(fd, 0);
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0) {
        struct store s;
        struct pms_error error;
        caller = pthread_self();
        pms_persist_hook = writer_rests_hook;
        store_open(&s, fd, 0);
        for (uint32_t t = 1; t <= n; t++)
            MUST(store_step(&s, &error) == PMS_OK);
        _exit(0);
    }
    int status;
    MUST(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return fd;
}

/* Positions of the records in a journal that holds n, and its ring. */
static void find_records(int fd, uint32_t n, struct pms_ring *ring, uint64_t *position,
                         struct pms_record *record)
{
    struct pms_superblock super = fixture_super();
    struct pms_janchor anchor;
    struct pms_error error;
    bool twins;
    pms_ring_init(ring, fd, &super, 0);
    MUST(pms_anchor_read(ring, &anchor, &twins, &error) == PMS_OK);
    MUST(anchor.tx == 0);
    uint64_t at = anchor.head;
    uint32_t chain = anchor.chain;
    for (uint32_t i = 0; i < n; i++) {
        enum pms_verdict verdict;
        MUST(pms_record_load(ring, at, ring->window, i + 1, chain, &record[i], &verdict, &error) ==
             PMS_OK);
        MUST(verdict == PMS_RECORD_WHOLE);
        position[i] = at;
        at += record[i].bytes;
        chain = record[i].crc;
    }
}

/* ---- damage ---- */

static void flip(int fd, uint64_t offset, unsigned char bits)
{
    unsigned char byte;
    MUST(pread(fd, &byte, 1, (off_t)offset) == 1);
    byte ^= bits;
    MUST(pwrite(fd, &byte, 1, (off_t)offset) == 1);
}

static void expect(int fd, uint64_t tx)
{
    load_file(fd, whole); /* mode r: the same state, and the file stays as it is */
    memcpy(other, whole, FILE_BYTES);
    MUST(recover_tx(fd, other) == tx);
    MUST(same_state(other, tx));
    load_file(fd, other);
    MUST(memcmp(other, whole, FILE_BYTES) == 0);
    MUST(recover_tx(fd, NULL) == tx);
    load_file(fd, other);
    MUST(same_state(other, tx));
    MUST(recover_tx(fd, NULL) == tx);
    load_file(fd, whole);
    MUST(memcmp(other, whole, FILE_BYTES) == 0);
}

static void test_torn(void)
{
    enum { N = 3 };
    uint64_t position[N];
    struct pms_record record[N];
    struct pms_ring ring;
    plan_steps(N, 8, 4, 0);
    int fd = crashed_file(N);
    find_records(fd, N, &ring, position, record);
    load_file(fd, image);
    for (uint32_t i = 0; i < N; i++) {
        uint64_t used = sizeof(struct pms_record) + record[i].run_count * sizeof(struct pms_run);
        for (uint64_t at = 0; at < record[i].bytes; at += 512) {
            uint64_t room;
            if (at >= used && at < pms_record_head(record[i].run_count))
                continue; /* padding: says nothing */
            uint64_t bad = at + draw(at < used && used - at < 512 ? (uint32_t)(used - at) : 512);
            store_file(fd, image);
            flip(fd, pms_ring_place(&ring, position[i] + bad, &room),
                 (unsigned char)(1u << draw(8)));
            if (i == N - 1) {
                expect(fd, N - 1);
                continue;
            }
            /* an acknowledged commit was damaged, and a later one shows it */
            struct pms_journal_recovery result;
            MUST(recover_status(fd, NULL, &result) == PMS_E_CORRUPT);
            load_file(fd, other);
            flip(fd, pms_ring_place(&ring, position[i] + bad, &room), 0);
            load_file(fd, whole);
            MUST(memcmp(other, whole, FILE_BYTES) == 0);
        }
    }
    store_file(fd, image);
    expect(fd, N);
    close(fd);
}

/* The last record's straight-home pages are part of it. */
static void test_torn_home(void)
{
    uint32_t n = 1, seed = 0;
    for (bool found = false; !found;) {
        plan_steps(4, ++seed, 3, 0);
        for (n = 2; n <= 4 && !found; n++)
            for (uint32_t i = 0; i < steps[n].count; i++)
                if (steps[n].runs[i].home && !dead[n][steps[n].runs[i].page] &&
                    writer[n - 1][steps[n].runs[i].page] == 0)
                    found = true;
    }
    n--;
    int fd = crashed_file(n);
    load_file(fd, image);
    for (uint32_t i = 0; i < steps[n].count; i++) {
        const struct pms_run *run = &steps[n].runs[i];
        if (!run->home || writer[n - 1][run->page] != 0)
            continue;
        store_file(fd, image);
        flip(fd, (run->page + draw(run->pages)) * PMS_PAGE + draw(PMS_PAGE), 1);
        struct pms_journal_recovery result;
        load_file(fd, other);
        MUST(recover_status(fd, other, &result) == PMS_OK && result.torn && result.tx == n - 1);
        expect(fd, n - 1);
    }
    close(fd);
}

static _Atomic int writer_calls;
static _Atomic bool writer_goes;

static int slow_writer_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (!is_writer() || primitive != PMS_PRIM_PWRITE)
        return 0;
    if (atomic_fetch_add(&writer_calls, 1) == 4) /* two pages, anchor, twin; then the next batch */
        _exit(0);
    while (!atomic_load(&writer_goes))
        usleep(100);
    return 0;
}

/* While the writer brings transaction 1 home, 2 changes the same pages. The anchor then says 1
 * is home, and so it must be: should 2 turn out damaged, 1 is the state. */
static void test_newer_image_beyond_batch(void)
{
    plan_steps(2, 1, 1, 0);
    for (uint32_t t = 1; t <= 2; t++) {
        steps[t].count = 2;
        steps[t].runs[0] = (struct pms_run){.page = PMS_OFF_ROOT / PMS_PAGE, .pages = 1};
        steps[t].runs[1] = (struct pms_run){.page = DATA1_PAGE, .pages = 1};
        memset(writer[t], 0, sizeof writer[t]);
        writer[t][PMS_OFF_ROOT / PMS_PAGE] = writer[t][DATA1_PAGE] = t;
    }
    int fd = new_file(), status;
    format(fd, 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct store s;
        struct pms_error error;
        caller = pthread_self();
        pms_persist_hook = slow_writer_hook;
        store_open(&s, fd, 0);
        MUST(store_step(&s, &error) == PMS_OK);
        while (atomic_load(&writer_calls) == 0)
            usleep(100);
        MUST(store_step(&s, &error) == PMS_OK);
        atomic_store(&writer_goes, true);
        for (;;)
            pause();
    }
    MUST(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    struct pms_superblock super = fixture_super();
    struct pms_ring ring;
    struct pms_janchor anchor;
    struct pms_error error;
    bool twins;
    uint64_t room;
    pms_ring_init(&ring, fd, &super, 0);
    MUST(pms_anchor_read(&ring, &anchor, &twins, &error) == PMS_OK && anchor.tx == 1 && twins);
    flip(fd, pms_ring_place(&ring, anchor.head + PMS_PAGE + 77, &room), 1);
    expect(fd, 1);
    close(fd);
}

static void test_anchors(bool journaled)
{
    plan_steps(2, 9, 3, 0);
    int fd = crashed_file(2);
    if (!journaled)
        MUST(recover_tx(fd, NULL) == 2);
    load_file(fd, image);
    for (unsigned copy = 0; copy < 2; copy++)
        for (uint32_t bit = 0; bit < 512 * 8; bit++) {
            flip(fd, PMS_OFF_JANCHOR(copy) + bit / 8, (unsigned char)(1u << bit % 8));
            memcpy(other, image, FILE_BYTES);
            MUST(recover_tx(fd, other) == 2);
            if (bit % 128 == 0) {
                MUST(same_state(other, 2));
                flip(fd, PMS_OFF_JANCHOR(!copy) + draw(512), 4);
                struct pms_journal_recovery result;
                MUST(recover_status(fd, NULL, &result) == PMS_E_CORRUPT);
                store_file(fd, image);
                flip(fd, PMS_OFF_JANCHOR(copy) + bit / 8, (unsigned char)(1u << bit % 8));
                expect(fd, 2); /* and the bad copy is made good */
                flip(fd, PMS_OFF_JANCHOR(!copy) + draw(512), 4);
                MUST(recover_tx(fd, NULL) == 2);
                store_file(fd, image);
                continue;
            }
            flip(fd, PMS_OFF_JANCHOR(copy) + bit / 8, (unsigned char)(1u << bit % 8));
        }
    close(fd);
}

/* Writes a record with any header and runs, and right checksums, as transaction 1 if it names
 * none. */
static int hostile(const struct pms_run *runs, uint32_t count, struct pms_record header, bool seal)
{
    struct pms_superblock super = fixture_super();
    unsigned char page[PMS_PAGE] = {0}, images[8 * PMS_PAGE] = {0};
    struct pms_persist p = {0};
    struct pms_ring ring;
    struct pms_janchor anchor;
    struct pms_journal_recovery result;
    struct pms_error error;
    bool twins;
    int fd = new_file();
    format(fd, 0);
    pms_ring_init(&ring, fd, &super, 0);
    MUST(pms_anchor_read(&ring, &anchor, &twins, &error) == PMS_OK);
    header.magic = PMS_RECORD_MAGIC;
    header.tx = header.tx ? header.tx : 1;
    header.chain = anchor.chain;
    header.images_crc = pms_crc32c(0, images,
                                   header.image_bytes <= sizeof images ? header.image_bytes : 0);
    memcpy(page + sizeof header, runs, count * sizeof runs[0]);
    memcpy(page, &header, sizeof header);
    header.crc = seal ? pms_crc32c(ring.seed, page, sizeof header + count * sizeof runs[0]) : 0;
    memcpy(page, &header, sizeof header);
    struct iovec iov[2] = {{page, sizeof page}, {images, sizeof images}};
    MUST(pms_ring_write(&ring, &p, anchor.head, iov, 2, &error) == PMS_OK);
    int status = recover_status(fd, NULL, &result);
    MUST(status != PMS_OK || result.tx == 0 || result.tx == 1);
    if (status == PMS_OK && result.tx == 0)
        MUST(result.torn == (header.tx == 1));
    close(fd);
    return status == PMS_OK ? (result.tx ? 1 : 0) : -status;
}

static void test_hostile(void)
{
    const struct pms_record one = {.bytes = 2 * PMS_PAGE, .image_bytes = PMS_PAGE, .run_count = 1};
    struct pms_run run = {.page = DATA0_PAGE, .pages = 1};
    MUST(hostile(&run, 1, one, true) == 1);
    MUST(hostile(&run, 1, one, false) == 0);
    struct pms_record later = one;
    later.tx = 2;
    MUST(hostile(&run, 1, later, true) == 0);
    for (uint64_t page = 0; page < FILE_PAGES + 2; page++) {
        run.page = page;
        MUST(hostile(&run, 1, one, true) ==
             (page < FILE_PAGES && is_logged(page) ? 1 : -PMS_E_CORRUPT));
    }
    const uint64_t far[] = {UINT64_MAX, UINT64_MAX / PMS_PAGE,
                            UINT64_MAX / PMS_PAGE + 1 + DATA0_PAGE, 1ull << 51};
    for (unsigned i = 0; i < sizeof far / sizeof far[0]; i++) {
        run.page = far[i];
        MUST(hostile(&run, 1, one, true) == -PMS_E_CORRUPT);
    }
    const struct pms_run bad[] = {
        {.page = DATA0_PAGE, .pages = 0},
        {.page = DATA0_PAGE, .pages = 2},
        {.page = DATA0_PAGE, .pages = UINT32_MAX},
        {.page = DATA0_PAGE, .pages = 1, .home = 2},
        {.page = DATA0_PAGE, .pages = 1, .home_crc = 1},
        {.page = DATA0_PAGE, .pages = 1, .reserved = 1},
    };
    for (unsigned i = 0; i < sizeof bad / sizeof bad[0]; i++)
        MUST(hostile(&bad[i], 1, one, true) == -PMS_E_CORRUPT);
    const struct pms_run twice[2] = {{.page = DATA0_PAGE + 1, .pages = 1},
                                     {.page = DATA0_PAGE, .pages = 1}};
    const struct pms_record two = {
        .bytes = 3 * PMS_PAGE, .image_bytes = 2 * PMS_PAGE, .run_count = 2};
    MUST(hostile(twice, 2, two, true) == -PMS_E_CORRUPT);
    run.page = DATA0_PAGE;
    /* lengths that do not fit each other or the ring: as good as torn */
    const struct pms_record odd[] = {
        {.bytes = UINT64_MAX, .image_bytes = PMS_PAGE, .run_count = 1},
        {.bytes = 2 * PMS_PAGE, .image_bytes = UINT64_MAX - PMS_PAGE + 1, .run_count = 1},
        {.bytes = 2 * PMS_PAGE, .image_bytes = PMS_PAGE, .run_count = UINT32_MAX},
        {.bytes = 2 * PMS_PAGE, .image_bytes = 2 * PMS_PAGE, .run_count = 1},
        {.bytes = 0, .image_bytes = 0, .run_count = 0},
        {.bytes = 200 * PMS_PAGE, .image_bytes = 199 * PMS_PAGE, .run_count = 1},
        {.bytes = PMS_PAGE + 1, .image_bytes = 1, .run_count = 1},
    };
    for (unsigned i = 0; i < sizeof odd / sizeof odd[0]; i++)
        MUST(hostile(&run, 1, odd[i], true) == 0);
}

static int damaged_fd;
static off_t damaged_at;

static void flip_byte(void)
{
    unsigned char byte;
    MUST(pread(damaged_fd, &byte, 1, damaged_at) == 1);
    byte ^= 1;
    MUST(pwrite(damaged_fd, &byte, 1, damaged_at) == 1);
}

static int damage_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive == PMS_PRIM_SYNC && pthread_equal(pthread_self(), caller) && damaged_at) {
        pms_persist_hook = NULL; /* once: the record lies there, and does not count yet */
        flip_byte();
    }
    return 0;
}

/* An image that the medium gives back otherwise than it was written: its record is not given up. */
static void test_damage_on_the_way_home(void)
{
    struct store s;
    struct pms_error error;
    struct pms_janchor anchor;
    bool twins;
    damaged_fd = new_file();
    format(damaged_fd, 0);
    store_open(&s, damaged_fd, 0);
    uint64_t room;
    /* reading an anchor sets its window, which the writer looks at */
    struct pms_ring ring = s.journal->ring;
    /* header, images */
    damaged_at = (off_t)(pms_ring_place(&ring, s.journal->tail, &room) + PMS_PAGE + 100);
    struct pms_run run = {.page = DATA0_PAGE, .pages = 2};
    store_write(&s, &run, 1, 7);
    caller = pthread_self();
    pms_persist_hook = damage_hook;
    MUST(pms_journal_commit(s.journal, &(struct pms_change){.tx = 1, .runs = &run, .run_count = 1},
                            &error) == PMS_OK);
    for (int i = 0; i < 2; i++) {
        MUST(pms_journal_drain(s.journal, &error) == PMS_E_CORRUPT);
        MUST(pms_anchor_read(&ring, &anchor, &twins, &error) == PMS_OK && anchor.tx == 0);
    }
    flip_byte(); /* read better at the next attempt */
    while (pms_journal_drain(s.journal, &error) != PMS_OK)
        MUST(error.status == PMS_E_CORRUPT); /* what an attempt before found is told once */
    MUST(pms_anchor_read(&ring, &anchor, &twins, &error) == PMS_OK && anchor.tx == 1);
    store_close(&s);
    close(damaged_fd);
}

static void test_anchors_at_rest(void) { test_anchors(false); }

static void test_anchors_with_records(void) { test_anchors(true); }

int main(void)
{
    TEST(test_torn);
    TEST(test_torn_home);
    TEST(test_newer_image_beyond_batch);
    TEST(test_damage_on_the_way_home);
    TEST(test_anchors_at_rest);
    TEST(test_anchors_with_records);
    TEST(test_hostile);
    return test_summary();
}
