/* Pages of the file become the process's own: a range that will be written all over is copied at
 * once, and nothing that was stored is lost. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "seam/map.h"
#include "seam/mappings.h"
#include "test.h"

#define PAGES 2048u /* 8 MiB: several pieces */
#define BYTES ((uint64_t)PAGES * PMS_PAGE)

static char path[256];
static struct pms_persist persist;
static struct pms_map map;
static struct pms_error e;

static unsigned char of_file(uint64_t page) { return (unsigned char)(1 + page % 250); }

static void open_map(enum pms_map_how how)
{
    static unsigned char page[PMS_PAGE];
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    for (uint64_t i = 0; i < PAGES; i++) {
        memset(page, of_file(i), sizeof page);
        CHECK(pwrite(fd, page, sizeof page, (off_t)(i * PMS_PAGE)) == PMS_PAGE);
    }
    CHECK(pms_map_open(&map, fd, BYTES, BYTES, how, &persist, &e) == PMS_OK);
}

static void close_map(void)
{
    close(map.fd);
    pms_map_close(&map);
}

static const void *watched;
static int times;

/* The engine's. */
int munmap(void *at, size_t bytes)
{
    times += at == watched;
    return (int)syscall(SYS_munmap, at, bytes);
}

/* Twice would be what somebody else has mapped there since. */
static void each_view_is_unmapped_once(void)
{
    static const enum pms_map_how how[] = {PMS_MAP_SHARED, PMS_MAP_PRIVATE};
    for (int i = 0; i < 4; i++) {
        open_map(how[i % 2]);
        const void *views[] = {map.user, map.home};
        CHECK(views[1] != views[0] && map.home[5 * PMS_PAGE] == of_file(5));
        times = 0;
        watched = views[i / 2];
        pms_map_forgo_engine(&map);
        close_map();
        CHECK(times == 1);
        watched = NULL;
    }
}

static bool take(uint64_t first, uint64_t pages)
{
    bool any = pms_map_take(&map, first * PMS_PAGE, pages * PMS_PAGE);
    if (any)
        pms_map_copy_ahead(&map, first * PMS_PAGE, pages * PMS_PAGE);
    return any;
}

static void store(uint64_t page, unsigned char value)
{
    CHECK(pms_map_unprotect(&map, page * PMS_PAGE, PMS_PAGE) == 0);
    map.user[page * PMS_PAGE] = value;
    CHECK(pms_map_protect(&map, page * PMS_PAGE, PMS_PAGE) == 0);
}

static uint64_t read_all(void)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < PAGES; i++)
        sum += *(volatile unsigned char *)(map.user + i * PMS_PAGE);
    return sum;
}

static long faults(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_minflt + u.ru_majflt;
}

static void what_was_read_is_copied_at_once(void)
{
    for (int read_before = 0; read_before < 2; read_before++) {
        open_map(PMS_MAP_PRIVATE);
        uint64_t sum = read_before ? read_all() : 0;
        CHECK(take(1, PAGES - 2));
        CHECK(pms_map_all_writable(&map, PMS_PAGE, BYTES - 2 * PMS_PAGE) &&
              !pms_map_all_writable(&map, 0, PMS_PAGE));
        long before = faults();
        for (uint64_t i = 1; i < PAGES - 1; i++) {
            CHECK(map.user[i * PMS_PAGE + 1] == of_file(i));
            map.user[i * PMS_PAGE] = 255;
        }
        long after = faults();
        CHECK(after >= before && (!read_before || sum > 0));
/* whose shadow memory faults too */
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
        CHECK(after - before < 32);
#endif
        for (uint64_t i = 0; i < PAGES; i++)
            CHECK(map.user[i * PMS_PAGE] == (i == 0 || i == PAGES - 1 ? of_file(i) : 255));
        close_map();
    }
}

/* A page here and there, runs, the first and the last, at the edges of the words of the bitmap. */
static void what_was_stored_stays(void)
{
    static const uint64_t stored[] = {0,   1,   63,  64,   65,   127,  200, 201,
                                      202, 203, 640, 1023, 1024, 2046, 2047};
    for (int rounds = 0; rounds < 2; rounds++) {
        open_map(PMS_MAP_PRIVATE);
        CHECK(read_all() > 0);
        for (size_t i = 0; i < sizeof stored / sizeof stored[0]; i++)
            store(stored[i], 255);
        for (int round = 0; round <= rounds; round++) { /* the second time everything is own */
            CHECK(take(0, PAGES) == (round == 0));
            for (uint64_t p = 0; p < PAGES; p++) {
                bool was = false;
                for (size_t i = 0; i < sizeof stored / sizeof stored[0]; i++)
                    was = was || stored[i] == p;
                CHECK(map.user[p * PMS_PAGE] == (was     ? 255
                                                 : round ? 254
                                                         : of_file(p)) &&
                      map.user[p * PMS_PAGE + 1] == of_file(p));
                if (!was)
                    map.user[p * PMS_PAGE] = 254;
            }
            CHECK(pms_map_protect(&map, 0, BYTES) == 0);
        }
        close_map();
    }
}

/* Writable, and not stored to yet, when the range around it is taken. */
static void what_is_writable_is_left_alone(void)
{
    open_map(PMS_MAP_PRIVATE);
    CHECK(pms_map_unprotect(&map, 300 * PMS_PAGE, 8 * PMS_PAGE) == 0);
    map.user[300 * PMS_PAGE] = 255;
    take(100, 900);
    CHECK(map.user[300 * PMS_PAGE] == 255 && map.user[301 * PMS_PAGE] == of_file(301) &&
          map.user[999 * PMS_PAGE] == of_file(999));
    close_map();
}

static void small_ranges_and_shared_views_only_become_writable(void)
{
    static const enum pms_map_how hows[] = {PMS_MAP_PRIVATE, PMS_MAP_SHARED};
    for (int i = 0; i < 2; i++) {
        open_map(hows[i]);
        CHECK(!take(10, 4));
        CHECK(pms_map_all_writable(&map, 10 * PMS_PAGE, 4 * PMS_PAGE) &&
              !pms_map_all_writable(&map, 14 * PMS_PAGE, PMS_PAGE));
        map.user[10 * PMS_PAGE] = 255;
        CHECK(take(0, PAGES) == (hows[i] == PMS_MAP_PRIVATE));
        CHECK(map.user[10 * PMS_PAGE] == 255 && map.user[11 * PMS_PAGE] == of_file(11));
        map.user[11 * PMS_PAGE] = 255;
        unsigned char got = 0;
        CHECK(pread(map.fd, &got, 1, 11 * PMS_PAGE) == 1 &&
              got == (hows[i] == PMS_MAP_SHARED ? 255 : of_file(11)));
        close_map();
    }
}

/* As the system tells it, of the user's view. */
static int64_t mappings_of_view(void)
{
    char line[512];
    unsigned long from, to;
    int64_t n = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    CHECK(file != NULL);
    while (file && fgets(line, sizeof line, file))
        n += sscanf(line, "%lx-%lx", &from, &to) == 2 && (unsigned char *)from < map.user + BYTES &&
             (unsigned char *)to > map.user;
    fclose(file);
    return n;
}

/* Changes here and there, stores or not: the count is the system's, and what is protected is one
 * mapping again. */
static void mappings_are_counted(void)
{
    static const enum pms_map_how hows[] = {PMS_MAP_PRIVATE, PMS_MAP_SHARED};
    uint64_t seed = 1;
    for (int i = 0; i < 2; i++) {
        open_map(hows[i]);
        CHECK(mappings_of_view() == 1 && pms_mappings_used() == 0);
        for (int step = 0; step < 1500; step++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            uint64_t first = step % 100 == 0 ? 0 : seed >> 33 & (PAGES - 1),
                     pages = 1 + (seed >> 50) % (step % 7 == 0 ? 300 : 3);
            pages = step % 100 == 50 || pages > PAGES - first ? PAGES - first : pages;
            if ((seed >> 60) % 3 == 0) {
                CHECK(pms_map_protect(&map, first * PMS_PAGE, pages * PMS_PAGE) == 0);
            } else {
                CHECK(pms_map_unprotect(&map, first * PMS_PAGE, pages * PMS_PAGE) == 0);
                map.user[first * PMS_PAGE] = of_file(first);
            }
            bool first_too = map.writable[0] & 1;
            /* at either end of the view nothing is parted */
            bool last_too = map.writable[PAGES / 64 - 1] >> 63;
            CHECK(mappings_of_view() == map.parted + 1 - first_too - last_too);
            CHECK(pms_mappings_used() == map.parted);
        }
        CHECK(pms_map_protect(&map, 0, BYTES) == 0 && mappings_of_view() == 1 && map.parted == 0);
        for (uint64_t page = 1; page < PAGES; page += 2)
            store(page, 255); /* each alone */
        CHECK(mappings_of_view() == 1);
        for (uint64_t page = 0; page < PAGES; page++)
            CHECK(map.user[page * PMS_PAGE] == (page % 2 ? 255 : of_file(page)));
        close_map();
        CHECK(pms_mappings_used() == 0);
    }
}

/* As where a disk cannot read a sector: a file that ends before what is mapped of it. */
static void make_unreadable(uint64_t page)
{
    char other[sizeof path + 8];
    snprintf(other, sizeof other, "%s-empty", path);
    int fd = open(other, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK(mmap(map.user + page * PMS_PAGE, PMS_PAGE, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_FIXED, fd, 0) != MAP_FAILED);
    close(fd);
    unlink(other);
}

static void what_cannot_be_read_is_passed_over_alone(void)
{
    const uint64_t bad[] = {0, 5, 6, 300, 511, PAGES - 2}, count = sizeof bad / sizeof bad[0];
    static unsigned char others[PMS_PAGE];
    open_map(PMS_MAP_SHARED);
    CHECK(pms_map_part(&map, 0, BYTES) == 0);
    for (uint64_t i = 0; i < count; i++)
        make_unreadable(bad[i]);
    CHECK(pms_map_own(&map, 0, BYTES) == 0);
    memset(others, 255, sizeof others);
    for (uint64_t page = 0; page < PAGES; page++)
        CHECK(pwrite(map.fd, others, sizeof others, (off_t)(page * PMS_PAGE)) == PMS_PAGE);
    uint64_t next = 0;
    for (uint64_t page = 0; page < PAGES; page++)
        if (next < count && bad[next] == page)
            next++;
        else
            CHECK(map.user[page * PMS_PAGE] == of_file(page));
    close_map();
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-map-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    pms_parallel_start();
    TEST(each_view_is_unmapped_once);
    TEST(what_was_read_is_copied_at_once);
    TEST(what_was_stored_stays);
    TEST(what_is_writable_is_left_alone);
    TEST(small_ranges_and_shared_views_only_become_writable);
    TEST(mappings_are_counted);
    TEST(what_cannot_be_read_is_passed_over_alone);
    unlink(path);
    return test_summary();
}
