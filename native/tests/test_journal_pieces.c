/* Commits of domain file that are cut into pieces: some megabytes, by several threads. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>

#define LOG0 400u /* pages */
#define LOG1 320u
#define DATA0 800u
#define DATA1 40u
#define EXTENT_PAGES 70u

#include "journal/state.h"
#include "journal_fixture.h"

static unsigned char image[FILE_BYTES];

/* A program that died here finds transaction tx, whatever the disk was asked for at the end. */
static void check_recovery(int fd, uint64_t tx)
{
    int copy = new_file();
    load_file(fd, image);
    store_file(copy, image);
    MUST(recover_tx(copy, image) == tx);
    MUST(same_state(image, tx));
    close(copy);
}

static bool is_cut(const struct step *step)
{
    uint64_t pages = 0;
    for (uint32_t i = 0; i < step->count; i++)
        pages += step->runs[i].pages;
    return pages * PMS_PAGE > PMS_JOURNAL_CHUNK;
}

/* Images and what goes straight home, of all sizes; the ring's end lies in each of the pieces at
 * some time. */
static void test_commits(void)
{
    uint32_t cut = 0;
    for (uint32_t seed = 0; seed < 12; seed++) {
        struct store s;
        struct pms_error error;
        int fd = new_file();
        plan_steps(14, seed, seed % 2 ? 700 : 60, seed % 3 ? 0 : 4);
        format(fd, 0);
        store_open(&s, fd, 0);
        while (s.tx < tx_count) {
            cut += is_cut(&steps[s.tx + 1]);
            MUST(store_step(&s, &error) == PMS_OK);
            check_recovery(fd, s.tx);
            if (steps[s.tx].drain)
                MUST(pms_journal_drain(s.journal, &error) == PMS_OK);
        }
        store_close(&s);
        load_file(fd, image);
        MUST(same_state(image, tx_count));
        close(fd);
    }
    CHECK(cut > 40);
}

static _Atomic int fail_after; /* writes of commits until the one that fails; 0: none */
static int fail_hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    (void)bytes;
    if (primitive != PMS_PRIM_PWRITE || is_writer() || atomic_load(&fail_after) == 0)
        return 0;
    return atomic_fetch_sub(&fail_after, 1) == 1 ? EIO : 0;
}

/* Whichever piece fails: the commit does not count, and the next try does. */
static void test_a_piece_that_fails(void)
{
    for (int nth = 1; nth <= 24; nth++) {
        struct store s;
        struct pms_error error;
        int fd = new_file(), failures = 0;
        plan_steps(8, 50 + (uint32_t)nth, 700, 0);
        format(fd, 0);
        store_open(&s, fd, 0);
        pms_persist_hook = fail_hook;
        atomic_store(&fail_after, nth);
        while (s.tx < tx_count) {
            if (store_step(&s, &error) != PMS_OK)
                MUST(++failures == 1 && error.sys_errno == EIO);
            check_recovery(fd, s.tx);
        }
        pms_persist_hook = NULL;
        store_close(&s);
        MUST(failures == 1);
        close(fd);
    }
}

int main(void)
{
    TEST(test_commits);
    TEST(test_a_piece_that_fails);
    return test_summary();
}
