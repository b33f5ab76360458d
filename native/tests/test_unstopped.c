/* Stores that no page protection stops: a device, or a system call, that writes into pages which
 * it was given before they were protected (O_DIRECT, io_uring, RDMA). Here another mapping of
 * the file does it, or, where the store's own is private, /proc/self/mem. They go on while
 * pre-images are taken and commits written. Whatever they do to the bytes they write, the rest
 * of the store is whole: no torn entry hides a later one, no torn record loses a commit that was
 * acknowledged. */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "one_store.h"

#define LARGE (6ull << 20) /* copied by all cores */
#define MIDDLE (96ull << 10)
#define SMALL 4096ull
#define ROUNDS 12u

static char copy_path[280];

struct device {
    pthread_t thread;
    _Atomic bool stop, begun;
    uint64_t address, file_off, bytes, written;
};

static void *write_on(void *arg)
{
    struct device *d = arg;
    bool in_place = domain != PMS_DOMAIN_FILE;
    int fd = open(in_place ? path : "/proc/self/mem", O_RDWR | O_CLOEXEC);
    unsigned char *alias =
        in_place ? mmap(NULL, d->bytes, PROT_WRITE, MAP_SHARED, fd, (off_t)d->file_off) : NULL;
    if (fd < 0 || alias == MAP_FAILED)
        abort();
    for (uint64_t n = 1; !atomic_load(&d->stop); n++) {
        uint64_t off = n * 2654435761u % (d->bytes / 512) * 512;
        if (alias)
            *(volatile uint64_t *)(void *)(alias + off) = n;
        else if (pwrite(fd, &n, sizeof n, (off_t)(d->address + off)) != (ssize_t)sizeof n)
            break;
        d->written++;
        atomic_store(&d->begun, true);
    }
    atomic_store(&d->begun, true);
    if (alias)
        munmap(alias, d->bytes);
    close(fd);
    return NULL;
}

static void device_start(struct device *d, uint64_t data, uint64_t bytes)
{
    *d = (struct device){
        .address = (uint64_t)(uintptr_t)memory(data), .file_off = data, .bytes = bytes};
    if (pthread_create(&d->thread, NULL, write_on, d) != 0)
        abort();
    while (!atomic_load(&d->begun))
        usleep(100);
}

static void device_stop(struct device *d)
{
    atomic_store(&d->stop, true);
    pthread_join(d->thread, NULL);
    CHECK(d->written > 0);
}

static uint64_t put(const char *name, uint64_t bytes)
{
    uint64_t data;
    CHECK(ok(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                  PMS_FILL_ZERO, NULL, 0, 0, &data, &e)));
    return data;
}

/* What a machine that stops now leaves, of a process that died. */
static void copy_file(void)
{
    static unsigned char buffer[1 << 20];
    int from = open(path, O_RDONLY | O_CLOEXEC),
        to = open(copy_path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ssize_t n;
    CHECK(from >= 0 && to >= 0);
    while ((n = read(from, buffer, sizeof buffer)) > 0)
        CHECK(write(to, buffer, (size_t)n) == n);
    close(from);
    close(to);
}

/* The array that nobody but us wrote is as of the last commit, and the number of commits is the
 * one that was acknowledged. */
static void check_copy(uint64_t epoch, uint64_t quiet, unsigned char content)
{
    struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain, .force = 1};
    struct pms_pool *was = pool;
    pool = NULL;
    if (ok(pms_pool_open(copy_path, &o, &pool, &e))) {
        const unsigned char *found = memory(quiet);
        CHECK(pms_epoch(pool) == epoch);
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < MIDDLE; i++)
            wrong += found[i] != content;
        CHECK(wrong == 0);
        close_store();
    } else {
        CHECK(!"the copy opens");
    }
    pool = was;
    unlink(copy_path);
}

/* Captured before the quiet array, in the same transaction: a torn entry of the one would hide
 * the other's. */
static void pre_images_hold(uint64_t bytes)
{
    struct device d;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    uint64_t busy = put("busy", bytes), quiet = put("quiet", MIDDLE);
    CHECK(ok(pms_commit(pool, &e)));
    uint64_t epoch = pms_epoch(pool);
    device_start(&d, busy, bytes);
    for (unsigned i = 0; i < ROUNDS; i++) {
        const struct pms_range all = {(uint64_t)(uintptr_t)memory(busy), bytes};
        CHECK(ok(pms_will_write(pool, &all, 1, &e)));
        memset(memory(quiet), 0x11, MIDDLE);
        copy_file();
        check_copy(epoch, quiet, 0);
        CHECK(ok(pms_rollback(pool, &e)));
        CHECK(memory(quiet)[0] == 0 && memory(quiet)[MIDDLE - 1] == 0);
    }
    device_stop(&d);
    close_store();
}

/* What a commit writes is what it checksummed: acknowledged, it is there, and those after it. */
static void commits_hold(uint64_t bytes)
{
    struct device d;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    uint64_t busy = put("busy", bytes), quiet = put("quiet", MIDDLE);
    CHECK(ok(pms_commit(pool, &e)));
    memset(memory(busy), 1, bytes);
    CHECK(ok(pms_commit(pool, &e)));
    device_start(&d, busy, bytes);
    for (unsigned i = 0; i < ROUNDS; i++) {
        memset(memory(busy), (int)i, bytes);
        memset(memory(quiet), (int)i, MIDDLE);
        CHECK(ok(pms_commit(pool, &e)));
        copy_file();
        check_copy(pms_epoch(pool), quiet, (unsigned char)i);
    }
    device_stop(&d);
    close_store();
}

static void all(void (*test)(uint64_t bytes))
{
    for (unsigned i = 0; i < sizeof domains / sizeof *domains; i++) {
        domain = domains[i];
        test(LARGE);
        test(MIDDLE);
        test(SMALL);
    }
}

static void a_pre_image_is_what_was_checksummed(void) { all(pre_images_hold); }
static void a_commit_is_what_was_checksummed(void) { all(commits_hold); }

int main(void)
{
    const char *folder = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-unstopped-%ld", folder, (long)getpid());
    snprintf(copy_path, sizeof copy_path, "%s.copy", path);
    TEST(a_pre_image_is_what_was_checksummed);
    TEST(a_commit_is_what_was_checksummed);
    unlink(path);
    return test_summary();
}
