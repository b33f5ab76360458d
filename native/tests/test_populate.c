/* What is allocated is brought into memory in the background after an open, and mapped, unless
 * it will be copied at its first store: reading it faults no more. Close, commits and forks do
 * not wait for it. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define MIB (1ull << 20)
#define BYTES (48 * MIB)

static char path[256];
static int domain;
static struct pms_pool *pool;
static unsigned char *array;

static void open_store(int mode)
{
    struct pms_options o = {.size = 128 * MIB,
                            .mode = mode,
                            .domain = mode == PMS_MODE_READ ? PMS_DOMAIN_AUTO : domain,
                            .hot = 1};
    struct pms_error e;
    struct pms_object object;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        abort();
    if (pms_object_find(pool, 0, "a", 1, &object, &e) == PMS_OK)
        array = pool->map.user + object.data;
}

static void close_store(void)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static void make(void)
{
    struct pms_error e;
    uint64_t data;
    open_store(PMS_MODE_TRUNCATE);
    CHECK(!pool->populate.running); /* nothing there yet */
    CHECK(pms_object_put_array(pool, 0, "a", 1, "m", 1, BYTES, PMS_FILL_PATTERN, "ab", 2, 0, &data,
                               &e) == PMS_OK);
    CHECK(pms_commit(pool, &e) == PMS_OK);
    close_store();
}

static bool wait_until_done(void)
{
    for (int i = 0; i < 120000 && !atomic_load(&pool->populate.done); i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    return atomic_load(&pool->populate.done);
}

static long faults(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_minflt + u.ru_majflt;
}

static void reading_faults_no_more(void)
{
    static const int modes[] = {PMS_MODE_READ_WRITE, PMS_MODE_READ};
    make();
    for (int i = 0; i < 2; i++) {
        open_store(modes[i]);
        CHECK(pool->populate.running && wait_until_done());
        uint64_t sum = 0, bytes = atomic_load(&pool->populate.bytes);
        CHECK(bytes >= BYTES && bytes <= 128 * MIB);
        long before = faults();
        for (uint64_t at = 0; at < BYTES; at += PMS_PAGE)
            sum += array[at];
        long after = faults();
        CHECK(sum == BYTES / PMS_PAGE * 'a');
/* whose shadow memory faults too */
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
        bool mapped = pool->map.shared || modes[i] == PMS_MODE_READ;
        /* unpopulated: one for each 16 pages, or each page */
        CHECK(after - before < (long)(BYTES / PMS_PAGE / 64) || !mapped);
#endif
        CHECK(after >= before);
        close_store();
    }
}

static uint64_t pages_in_memory(int fd, uint64_t first, uint64_t pages)
{
    uint64_t there = 0;
    unsigned char *seen = malloc(pages);
    void *view = mmap(NULL, pages * PMS_PAGE, PROT_READ, MAP_SHARED, fd, (off_t)(first * PMS_PAGE));
    CHECK(view != MAP_FAILED && seen && mincore(view, pages * PMS_PAGE, seen) == 0);
    for (uint64_t p = 0; p < pages; p++)
        there += seen[p] & 1;
    munmap(view, pages * PMS_PAGE);
    free(seen);
    return there;
}

/* From a disk, whatever the system reads ahead of one request. A machine short of memory may have
 * dropped some of it again: then once more. */
static void what_is_on_a_disk_comes(void)
{
    char other[256];
    snprintf(other, sizeof other, "%s", path);
    snprintf(path, sizeof path, "/var/tmp/pms-test-populate-%ld", (long)getpid());
    make();
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool came = false;
    for (int attempt = 0; attempt < 10 && !came; attempt++) {
        CHECK(fd >= 0 && fsync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
        open_store(PMS_MODE_READ_WRITE);
        CHECK(pool->populate.running && wait_until_done());
        uint64_t first = ((uint64_t)(array - pool->map.user) + PMS_PAGE - 1) / PMS_PAGE,
                 pages = BYTES / PMS_PAGE - 1;
        /* it was asked for; the last of it may still be coming */
        for (int i = 0; i < 500 && !came; i++) {
            came = pages_in_memory(fd, first, pages) == pages;
            nanosleep(&(struct timespec){0, 10000000}, NULL);
        }
        close_store();
    }
    CHECK(came);
    close(fd);
    unlink(path);
    snprintf(path, sizeof path, "%s", other);
}

static void work_goes_on_beside_it(void)
{
    struct pms_error e;
    make();
    for (int i = 0; i < 40; i++) {
        open_store(PMS_MODE_READ_WRITE);
        if (i % 4 == 1) {
            array[(uint64_t)i * PMS_PAGE]++;
            CHECK(pms_commit(pool, &e) == PMS_OK);
        }
        if (i % 4 == 2) {
            pid_t child = fork();
            if (child == 0) {
                alarm(120);
                _exit(array[1] == 'b' && pms_commit(pool, &e) == PMS_E_FORKED &&
                              pms_pool_close(pool, 1, &e) == PMS_OK
                          ? 0
                          : 1);
            }
            int ws = 0;
            CHECK(waitpid(child, &ws, 0) == child && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
        }
        if (i % 4 == 3)
            CHECK(pms_object_remove(pool, 0, "a", 1, &e) == PMS_OK &&
                  pms_rollback(pool, &e) == PMS_OK);
        close_store();
    }
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-populate-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_FILE};
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(reading_faults_no_more);
        if (domain == PMS_DOMAIN_FILE)
            TEST(what_is_on_a_disk_comes);
        TEST(work_goes_on_beside_it);
    }
    unlink(path);
    return test_summary();
}
