/* The layers under everything else: status, the lock, the seam to the medium. */
#include "random_bytes.h"

#define GUARD 0xcc

static bool all_are(const unsigned char *p, unsigned char value, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] != value)
            return false;
    return true;
}

/* Fills kind with what this CPU can execute; returns how many. */
static size_t flush_kinds(enum pms_flush kind[5])
{
    size_t n = 0;
    kind[n++] = PMS_FLUSH_NONE;
#if defined(__x86_64__)
    for (enum pms_flush k = PMS_FLUSH_CLFLUSH; k <= pms_persist_best_flush(); k++)
        kind[n++] = k;
#else
    kind[n++] = pms_persist_best_flush();
#endif
    return n;
}

/* ---- status ---- */

static void test_fail_fills_the_error(void)
{
    struct pms_error e;
    memset(&e, 0xff, sizeof e);
    CHECK(pms_fail(&e, PMS_E_INVALID, "size %d of %s", 7, "it") == PMS_E_INVALID);
    CHECK(e.status == PMS_E_INVALID && e.sys_errno == 0 && e.offset == 0 && e.needed == 0 &&
          e.available == 0 && e.holder == 0);
    CHECK(strcmp(e.what, "size 7 of it") == 0);
    CHECK(pms_fail(&e, PMS_E_CORRUPT, "%0300d", 1) == PMS_E_CORRUPT);
    CHECK(strlen(e.what) == sizeof e.what - 1);
    CHECK(pms_fail(NULL, PMS_E_BUSY, "nobody listens") == PMS_E_BUSY);
}

static void test_fail_errno_tells_full_from_broken(void)
{
    static const int full[] = {ENOSPC, EDQUOT, EFBIG};
    struct pms_error e;
    for (size_t i = 0; i < sizeof full / sizeof full[0]; i++) {
        errno = full[i];
        CHECK(pms_fail_errno(&e, "100 % full") == PMS_E_FULL);
        CHECK(e.status == PMS_E_FULL && e.sys_errno == full[i]);
        CHECK(strcmp(e.what, "100 % full") == 0); /* not a format */
    }
    errno = EIO;
    CHECK(pms_fail_errno(&e, "sync") == PMS_E_OS && e.sys_errno == EIO);
    errno = EIO;
    CHECK(pms_fail_errno(NULL, "sync") == PMS_E_OS);
}

static void test_broken_invariant_aborts(void)
{
    int end[2], status = 0;
    CHECK(pipe(end) == 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        dup2(end[1], STDERR_FILENO);
        pms_assert_failed("a == b", "some.c", 4021);
    }
    close(end[1]);
    char text[512];
    ssize_t n, got = 0;
    while ((n = read(end[0], text + got, sizeof text - 1 - (size_t)got)) > 0)
        got += n;
    text[got] = '\0';
    close(end[0]);
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) &&
          WTERMSIG(status) == SIGABRT);
    CHECK(strstr(text, "a == b") && strstr(text, "some.c:4021"));
}

/* ---- lock ---- */

#define LOCK_ROUNDS 100000u

/* plain fields: TSan judges the lock too */
struct counted {
    struct pms_lock lock;
    uint64_t count;
    bool inside;
    bool broken;
};

static void *count_under_lock(void *arg)
{
    struct counted *c = arg;
    for (unsigned i = 0; i < LOCK_ROUNDS; i++) {
        pms_lock_acquire(&c->lock);
        c->broken |= c->inside;
        c->inside = true;
        c->count++;
        if (i % 1000 == 0)
            usleep(20); /* the others spin in vain and wait in the kernel */
        c->inside = false;
        pms_lock_release(&c->lock);
    }
    return NULL;
}

static void test_lock_excludes(void)
{
    struct counted c = {0};
    pthread_t thread[LOCKERS];
    for (int i = 0; i < LOCKERS; i++)
        CHECK(pthread_create(&thread[i], NULL, count_under_lock, &c) == 0);
    for (int i = 0; i < LOCKERS; i++)
        pthread_join(thread[i], NULL);
    CHECK(c.count == (uint64_t)LOCKERS * LOCK_ROUNDS && !c.broken);
    CHECK(atomic_load(&c.lock.word) == 0);
}

static void test_futex_wait_returns(void)
{
    _Atomic uint32_t word = 1;
    CHECK(pms_futex_wait(&word, 2, -1) == EAGAIN);
    CHECK(pms_futex_wait(&word, 1, 1000000) == ETIMEDOUT);
    CHECK(pms_futex_wait(&word, 1, 0) == ETIMEDOUT);
    pms_futex_wake(&word, 1); /* nobody waits */
}

/* ---- memory ---- */

static uint64_t lines_of(const void *addr, size_t n)
{
    uintptr_t first = (uintptr_t)addr / LINE, last = ((uintptr_t)addr + n - 1) / LINE;
    return n ? last - first + 1 : 0;
}

/* One copy, copy with crc, and zero of n bytes; what lies around them stays. */
static void check_copies(enum pms_flush flush, unsigned char *dst, const unsigned char *src,
                         size_t n)
{
    struct pms_persist p = {.flush = flush};
    uint32_t crc = (uint32_t)n * 2654435761u;
    memset(dst - LINE, GUARD, n + 2 * LINE);
    pms_persist_copy(&p, dst, src, n);
    CHECK(memcmp(dst, src, n) == 0);
    CHECK(flush == PMS_FLUSH_NONE || p.lines == lines_of(dst, n));
    memset(dst, GUARD, n);
    CHECK(pms_persist_copy_crc(&p, dst, src, n, crc, (unsigned char[PMS_CRC_BLOCK]){0}) ==
          pms_crc32c_portable(crc, src, n));
    CHECK(memcmp(dst, src, n) == 0);
    CHECK(all_are(dst - LINE, GUARD, LINE) && all_are(dst + n, GUARD, LINE));
    pms_persist_zero(&p, dst, n);
    CHECK(all_are(dst, 0, n));
    CHECK(all_are(dst - LINE, GUARD, LINE) && all_are(dst + n, GUARD, LINE));
    pms_persist_fence(&p);
    CHECK(p.fences == 1 && p.syncs == 0);
}

static void test_copies_of_every_size(void)
{
    unsigned char *src = random_bytes(16384), *dst = aligned(16384);
    enum pms_flush kind[5];
    for (size_t k = 0, kinds = flush_kinds(kind); k < kinds; k++)
        for (size_t n = 0; n <= 9000; n += n < 700 ? 1 : SLOWER) {
            check_copies(kind[k], dst + LINE, src, n);
            check_copies(kind[k], dst + LINE + random_below(LINE), src + random_below(LINE), n);
        }
    free(src);
    free(dst);
}

static void test_copies_of_large_sizes(void)
{
    const size_t size[] = {(256u << 10) - 1, 256u << 10, (256u << 10) + 1, 3 * MIB, 3 * MIB + 17};
    unsigned char *src = random_bytes(3 * MIB + 256), *dst = aligned(3 * MIB + 512);
    enum pms_flush kind[5];
    for (size_t k = 0, kinds = flush_kinds(kind); k < kinds; k++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
            check_copies(kind[k], dst + LINE, src, size[i]);
            check_copies(kind[k], dst + LINE + 1 + random_below(LINE - 1),
                         src + 1 + random_below(LINE - 1), size[i]);
        }
    free(src);
    free(dst);
}

static void test_stores(void)
{
    struct pms_persist p = {.flush = pms_persist_best_flush()};
    uint64_t word[4] = {0};
    pms_persist_store8(&p, &word[1], 0x0123456789abcdefull);
    CHECK(word[0] == 0 && word[1] == 0x0123456789abcdefull && word[2] == 0);
    pms_persist_store(&p, word, "abcdefghijkl", 12);
    CHECK(memcmp(word, "abcdefghijkl", 12) == 0 && word[2] == 0);
    CHECK(p.lines == 0 && p.fences == 0); /* neither is written back */
}

static void test_flush_and_fence_counters(void)
{
    unsigned char *m = aligned(4096);
    enum pms_flush kind[5];
    memset(m, 1, 4096);
    for (size_t k = 0, kinds = flush_kinds(kind); k < kinds; k++) {
        struct pms_persist p = {.flush = kind[k]};
        bool none = kind[k] == PMS_FLUSH_NONE;
        pms_persist_flush(&p, m, 0);
        CHECK(p.lines == 0);
        pms_persist_flush(&p, m + 63, 2); /* two lines */
        CHECK(p.lines == (none ? 0 : 2));
        pms_persist_flush(&p, m, 4096);
        CHECK(p.lines == (none ? 0 : 66));
        for (int i = 0; i < 5; i++)
            pms_persist_fence(&p);
        CHECK(p.fences == 5 && p.syncs == 0 && p.flush == kind[k]);
        CHECK(all_are(m, 1, 4096));
    }
    free(m);
}

static void test_best_flush(void) { CHECK(pms_persist_best_flush() != PMS_FLUSH_NONE); }

/* ---- the hook ---- */

#define SEEN_MAX 32

struct seen {
    enum pms_primitive primitive;
    uintptr_t addr;
    size_t bytes;
};
static struct seen seen[SEEN_MAX];
static size_t seen_count;
static int hook_answer;
/* memory that must still be GUARD when its primitive is announced */
static const unsigned char *watched;

static int spy(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    if (seen_count < SEEN_MAX)
        seen[seen_count++] = (struct seen){primitive, addr, bytes};
    if (watched && (primitive == PMS_PRIM_STORE || primitive == PMS_PRIM_COPY))
        CHECK(*watched == GUARD);
    return hook_answer;
}

static void spy_start(int answer)
{
    seen_count = 0;
    hook_answer = answer;
    pms_persist_hook = spy;
}

static bool saw(size_t i, enum pms_primitive primitive, const void *addr, size_t bytes)
{
    return i < seen_count && seen[i].primitive == primitive && seen[i].addr == (uintptr_t)addr &&
           seen[i].bytes == bytes;
}

static void test_hook_sees_memory_primitives_first(void)
{
    struct pms_persist p = {.flush = pms_persist_best_flush()};
    unsigned char *m = aligned(8192), *src = random_bytes(8192);
    memset(m, GUARD, 8192);
    *src = 1;
    watched = m;
    spy_start(EIO); /* ignored: memory operations cannot fail */
    pms_persist_copy(&p, m, src, 10);
    CHECK(seen_count == 2 && saw(0, PMS_PRIM_STORE, m, 10) && saw(1, PMS_PRIM_FLUSH, m, 10) &&
          *m == 1);
    watched = NULL;
    spy_start(EIO);
    pms_persist_store8(&p, (uint64_t *)(void *)m, 5);
    pms_persist_store(&p, m, src, 100);
    pms_persist_flush(&p, m, 100);
    pms_persist_fence(&p);
    CHECK(seen_count == 4 && saw(0, PMS_PRIM_STORE, m, 8) && saw(1, PMS_PRIM_STORE, m, 100));
    CHECK(saw(2, PMS_PRIM_FLUSH, m, 100) && saw(3, PMS_PRIM_FENCE, NULL, 0) &&
          memcmp(m, src, 100) == 0);
    m[0] = GUARD;
    watched = m;
    spy_start(EIO);
    pms_persist_copy(&p, m, src, 8192);
    CHECK(seen_count > 0 && seen[0].addr == (uintptr_t)m && seen[0].bytes == 8192 &&
          memcmp(m, src, 8192) == 0);
    CHECK(seen[0].primitive == PMS_PRIM_COPY || seen[0].primitive == PMS_PRIM_STORE);
    watched = NULL;
    pms_persist_hook = NULL;
    free(m);
    free(src);
}

static void test_hook_fails_file_operations(void)
{
    struct pms_persist p = {0};
    struct pms_error e;
    int fd = memfd_create("hook", MFD_CLOEXEC);
    struct iovec two[2] = {{(void *)(uintptr_t)"ab", 2}, {(void *)(uintptr_t)"cde", 3}};
    unsigned char *page = aligned(4096);
    spy_start(ENOSPC);
    CHECK(pms_persist_pwrite(&p, fd, "abc", 3, 7) == ENOSPC);
    CHECK(pms_persist_pwritev(&p, fd, two, 2, 9) == ENOSPC);
    CHECK(pms_persist_sync(&p, fd, "syncing", &e) == PMS_E_OS && e.sys_errno == ENOSPC);
    CHECK(pms_persist_allocate(&p, fd, 0, 4096) == ENOSPC);
    CHECK(pms_persist_reserve(&p, fd, 0, 4096) == ENOSPC);
    CHECK(pms_persist_truncate(&p, fd, 4096) == ENOSPC);
    CHECK(pms_persist_protect(&p, page, 4096, PROT_READ) == ENOSPC);
    pms_persist_hook = NULL;
    CHECK(seen_count == 7 && saw(4, PMS_PRIM_ALLOCATE, (void *)0, 4096));
    CHECK(saw(0, PMS_PRIM_PWRITE, (void *)7, 3) && saw(1, PMS_PRIM_PWRITE, (void *)9, 5));
    CHECK(seen[2].primitive == PMS_PRIM_SYNC && saw(3, PMS_PRIM_ALLOCATE, (void *)0, 4096));
    CHECK(seen[5].primitive == PMS_PRIM_ALLOCATE && saw(6, PMS_PRIM_PROTECT, page, 4096));
    CHECK(lseek(fd, 0, SEEK_END) == 0 && p.syncs == 0); /* none of them was done */
    *page = 1;
    free(page);
    close(fd);
}

/* ---- files ---- */

/* A kernel that is stingy: of two calls one is interrupted, and the other writes part of the
 * first range alone. These stand before the C library's, for the engine too. */
static bool stingy;
static unsigned calls, interrupted;

static bool interrupt(void)
{
    bool now = stingy && calls++ % 2 == 0;
    interrupted += now;
    if (now)
        errno = EINTR;
    return now;
}

ssize_t pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
    if (interrupt())
        return -1;
    if (stingy)
        return pwrite(fd, iov->iov_base, iov->iov_len < 5 ? iov->iov_len : 5, offset);
    return syscall(SYS_pwritev, fd, iov, count, offset, 0);
}

int fdatasync(int fd) { return interrupt() ? -1 : (int)syscall(SYS_fdatasync, fd); }

int fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    return interrupt() ? -1 : (int)syscall(SYS_fallocate, fd, mode, offset, bytes);
}

int ftruncate(int fd, off_t bytes)
{
    return interrupt() ? -1 : (int)syscall(SYS_ftruncate, fd, bytes);
}

static void test_file_operations_are_continued(void)
{
    struct pms_persist p = {0};
    int fd = memfd_create("stingy", MFD_CLOEXEC);
    unsigned char *data = random_bytes(64), *back = aligned(128);
    struct iovec part[] = {{data, 0},      {data, 13},      {data + 13, 5}, {data, 0},
                           {data + 18, 1}, {data + 19, 45}, {data, 0}};
    stingy = true;
    calls = interrupted = 0;
    CHECK(pms_persist_pwritev(&p, fd, part, sizeof part / sizeof part[0], 3) == 0 &&
          interrupted > 10);
    interrupted = 0;
    CHECK(pms_persist_pwrite(&p, fd, data, 64, 67) == 0 && interrupted > 10);
    calls = interrupted = 0;
    CHECK(pms_persist_sync(&p, fd, "syncing", NULL) == 0 && interrupted == 1 && p.syncs == 1);
    CHECK(pread(fd, back, 128, 3) == 128 && memcmp(back, data, 64) == 0 &&
          memcmp(back + 64, data, 64) == 0);
    CHECK(pms_persist_truncate(&p, fd, 10) == 0 && interrupted == 2 &&
          lseek(fd, 0, SEEK_END) == 10);
    calls = interrupted = 0;
    CHECK(pms_persist_reserve(&p, fd, 0, 4096) == 0 && interrupted == 1 &&
          lseek(fd, 0, SEEK_END) == 4096);
    stingy = false;
    free(data);
    free(back);
    close(fd);
}

static void test_writes_land(void)
{
    enum { PARTS = 3 * IOV_MAX + 5 }; /* more than one pwritev takes; some are empty */
    struct pms_persist p = {0};
    int fd = memfd_create("writes", MFD_CLOEXEC);
    unsigned char *data = random_bytes(8 * PARTS), *back = aligned(8 * PARTS);
    struct iovec *iov = calloc(PARTS, sizeof *iov);
    size_t total = 0;
    for (size_t i = 0; i < PARTS; i++) {
        iov[i] = (struct iovec){data + total, i % 9};
        total += i % 9;
    }
    CHECK(pms_persist_pwritev(&p, fd, iov, PARTS, 4099) == 0);
    CHECK(pread(fd, back, total, 4099) == (ssize_t)total && memcmp(back, data, total) == 0);
    CHECK(pms_persist_pwrite(&p, fd, data, 4000, 1) == 0);
    CHECK(pread(fd, back, 4000, 1) == 4000 && memcmp(back, data, 4000) == 0);
    CHECK(pms_persist_pwritev(&p, fd, iov, 0, 0) == 0 &&
          pms_persist_pwrite(&p, fd, data, 0, 0) == 0);
    CHECK(pms_persist_sync(&p, fd, "syncing", NULL) == 0 && p.syncs == 1);
    free(iov);
    free(data);
    free(back);
    close(fd);
}

/* A file may not grow past the limit: the kernel writes up to it, and what is tried again meets
 * EFBIG. */
static void test_short_write_ends_in_the_error(void)
{
    struct pms_persist p = {0};
    struct rlimit before;
    char path[] = "/tmp/pms_test_persist_XXXXXX";
    int fd = mkstemp(path);
    unsigned char *data = random_bytes(8192), *back = aligned(8192);
    CHECK(fd >= 0 && unlink(path) == 0 && getrlimit(RLIMIT_FSIZE, &before) == 0);
    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &(struct rlimit){5000, before.rlim_max}) == 0);
    int err = pms_persist_pwrite(&p, fd, data, 8192, 0);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0); /* before stdout, a file perhaps, is written to */
    signal(SIGXFSZ, SIG_DFL);
    CHECK(err == EFBIG);
    CHECK(pread(fd, back, 8192, 0) == 5000 && memcmp(back, data, 5000) == 0);
    free(data);
    free(back);
    close(fd);
}

static void test_file_errors_are_returned(void)
{
    struct pms_persist p = {0};
    struct pms_error e;
    int fd = memfd_create("errors", MFD_CLOEXEC);
    CHECK(pms_persist_allocate(&p, fd, 4096, 8192) == 0 && lseek(fd, 0, SEEK_END) == 12288);
    CHECK(pms_persist_reserve(&p, fd, 4096, 12288) == 0 && lseek(fd, 0, SEEK_END) == 16384);
    CHECK(pms_persist_truncate(&p, fd, 100) == 0 && lseek(fd, 0, SEEK_END) == 100);
    close(fd);
    errno = 0;
    CHECK(pms_persist_allocate(&p, -1, 0, 4096) == EBADF); /* posix_fallocate sets no errno */
    CHECK(pms_persist_reserve(&p, -1, 0, 4096) == EBADF);
    CHECK(pms_persist_truncate(&p, -1, 0) == EBADF);
    CHECK(pms_persist_pwrite(&p, -1, "a", 1, 0) == EBADF);
    CHECK(pms_persist_sync(&p, -1, "syncing", &e) == PMS_E_OS && e.sys_errno == EBADF);
    CHECK(p.failed_syncs == 1);
    CHECK(pms_persist_protect(&p, (void *)1, 4096, PROT_READ) == EINVAL); /* not a page's address */
}

int main(void)
{
    TEST(test_fail_fills_the_error);
    TEST(test_fail_errno_tells_full_from_broken);
    TEST(test_broken_invariant_aborts);
    TEST(test_lock_excludes);
    TEST(test_futex_wait_returns);
    TEST(test_copies_of_every_size);
    TEST(test_copies_of_large_sizes);
    TEST(test_stores);
    TEST(test_flush_and_fence_counters);
    TEST(test_best_flush);
    TEST(test_hook_sees_memory_primitives_first);
    TEST(test_hook_fails_file_operations);
    TEST(test_writes_land);
    TEST(test_file_operations_are_continued);
    TEST(test_short_write_ends_in_the_error);
    TEST(test_file_errors_are_returned);
    return test_summary();
}
