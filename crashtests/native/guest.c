/* What runs in the virtual machine: a store whose state is known from the number of its last
 * commit, changed for ever, until somebody pulls the plug. See crashtests/vm.py.
 *
 *     guest run PATH DOMAIN COMMITS [DEVICE OFFSET]   checks what is there, then commits; 0: for
 *                                                     ever
 *     guest check PATH DOMAIN ACKNOWLEDGED            checks what is there, and commits twice
 *                                                     more
 *
 * Each commit is acknowledged by a line on standard output, and by its number in the sector of
 * DEVICE at OFFSET, past all caches. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "workload.h"

#define WIDE 16000u /* a quarter of it is written by each commit: large captures */
#define RING 8u     /* arrays of many sizes, replaced in turn */
#define NAMES 5u    /* the last so many values are there */
#define SECTOR 512

static struct board board;
static struct wl w = {.board = &board};

static _Noreturn void die(const char *what)
{
    printf("BROKEN %s%s%s\n", what, *w.error.what ? ": " : "", w.error.what);
    fflush(stdout);
    exit(1);
}

static uint32_t ring_length(uint32_t n) { return 100 + n * 397 % 3000; }

/* Commit n: the state is a function of n alone. */
static void commit_number(uint32_t n)
{
    char name[16];
    uint64_t group = wl_group(&w, 0, "names");
    const char *const declared[] = {"wide"};
    if (n % 3 == 0) { /* what a roll back leaves is the state before it */
        wl_write(&w, "hot", 5, ~0u);
        wl_array(&w, 0, "junk", 500, 7);
        memset(wl_data(&w, "wide", NULL), 0xff, WIDE * 4);
        wl_rollback(&w);
    }
    wl_begin(&w);
    uint32_t *hot = wl_data(&w, "hot", NULL);
    for (unsigned i = 0; i < 64; i++)
        hot[i] = n;
    if (n % 2)
        wl_declare(&w, declared, 1);
    uint32_t *wide = wl_data(&w, "wide", NULL) + n % 4 * (WIDE / 4);
    for (unsigned i = 0; i < WIDE / 4; i++)
        wide[i] = n;
    snprintf(name, sizeof name, "ring-%u", n % RING);
    wl_array(&w, 0, name, ring_length(n), n);
    snprintf(name, sizeof name, "%u", n);
    wl_value(&w, group, name, name, (uint32_t)strlen(name));
    if (n > NAMES) {
        snprintf(name, sizeof name, "%u", n - NAMES);
        wl_remove(&w, group, name);
    }
    wl_end(&w, true);
    if (w.failed)
        die("a commit failed");
}

static void expect(const char *name, uint32_t from, uint32_t count, uint32_t length, uint32_t value)
{
    uint64_t n;
    const uint32_t *p = wl_data(&w, name, &n);
    if (w.failed || n != length)
        die(name);
    for (uint32_t i = from; i < from + count; i++)
        if (p[i] != value) {
            printf("%s[%u] is %u, not %u\n", name, i, p[i], value);
            die("mixed state");
        }
}

static uint32_t entries(uint64_t directory)
{
    uint64_t node = 0;
    uint32_t count = 0;
    struct pms_object o;
    for (;;) {
        if (pms_object_next(w.pool, directory, &node, &o, &w.error) != PMS_OK)
            die("the directory");
        if (!node)
            return count;
        count++;
    }
}

/* Everything is of the commit that `hot` is of. Returns its number. */
static uint32_t check(void)
{
    static struct pms_check_report report;
    if (pms_check(w.pool, &report, &w.error) != PMS_OK || report.problem_count)
        die(report.problem_count ? report.problem[0] : "check");
    uint32_t n = wl_data(&w, "hot", NULL)[0];
    char name[16];
    expect("hot", 0, 64, 64, n);
    for (uint32_t last = n < 4 ? 0 : n - 3; last <= n; last++)
        expect("wide", last % 4 * (WIDE / 4), WIDE / 4, WIDE, last);
    for (uint32_t last = n < RING ? 1 : n - RING + 1; last <= n; last++) {
        snprintf(name, sizeof name, "ring-%u", last % RING);
        expect(name, 0, ring_length(last), ring_length(last), last);
    }
    uint64_t group = wl_group(&w, 0, "names");
    for (uint32_t last = n < NAMES ? 1 : n - NAMES + 1; last <= n; last++) {
        struct pms_object o;
        uint32_t bytes = (uint32_t)snprintf(name, sizeof name, "%u", last);
        if (pms_object_find(w.pool, group, name, bytes, &o, &w.error) != PMS_OK ||
            o.meta_bytes != bytes || memcmp(o.meta, name, bytes) != 0)
            die("a value");
    }
    if (entries(group) != (n < NAMES ? n : NAMES) || entries(0) != 3 + (n < RING ? n : RING))
        die("a name too many or too few");
    return n;
}

static void open_store(const char *path, int domain)
{
    bool there = access(path, F_OK) == 0;
    w.pool = wl_open(path, domain, PMS_MODE_APPEND, &w.error);
    if (!w.pool)
        die("open");
    struct pms_object o;
    if (there && pms_object_find(w.pool, 0, "hot", 3, &o, &w.error) == PMS_OK)
        return;
    wl_array(&w, 0, "hot", 64, 0); /* it went down before the first commit */
    wl_array(&w, 0, "wide", WIDE, 0);
    wl_group(&w, 0, "names");
    wl_commit(&w);
    if (w.failed)
        die("making it");
}

static void acknowledge(uint32_t n, int device, off_t offset)
{
    _Alignas(SECTOR) static char sector[SECTOR];
    snprintf(sector, sizeof sector, "acknowledged %u", n);
    if (device >= 0 && pwrite(device, sector, SECTOR, offset) != SECTOR)
        die("the device");
    printf("ack %u\n", n);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    if (argc < 5)
        return 2;
    bool run = strcmp(argv[1], "run") == 0;
    int device = run && argc > 6 ? open(argv[5], O_WRONLY | O_DIRECT) : -1;
    if (argc > 6 && device < 0)
        die("no device");
    printf("opening\n");
    fflush(stdout);
    open_store(argv[2], atoi(argv[3]));
    uint32_t n = check(), more = run ? (uint32_t)atol(argv[4]) : 2;
    if (!run && n < (uint32_t)atol(argv[4]))
        die("an acknowledged commit is lost");
    const struct pms_info *info = &w.pool->opened.info;
    printf("found %u domain %d map_sync %d undone %lu replayed %lu unclean %lu\n", n, info->domain,
           info->sync_mapping, (unsigned long)info->undone_entries,
           (unsigned long)info->replayed_records, (unsigned long)info->unclean_opens);
    for (uint32_t i = 1; !more || i <= more; i++) {
        commit_number(n + i);
        if (run)
            acknowledge(n + i, device, argc > 6 ? atol(argv[6]) : 0);
    }
    if (check() != n + more)
        die("commits after recovery");
    if (pms_pool_close(w.pool, 0, &w.error) != PMS_OK)
        die("close");
    printf("closed\n");
    return 0;
}
