/* The history record outlives roll backs, closes and kills: SIGKILL at every primitive leaves
 * the last acknowledged record or the one in flight; a damaged copy leaves the other. */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define WRITES 9u

static char path[256];
static int domain;
static _Atomic uint32_t *acknowledged; /* shared with the children */
static _Atomic uint64_t seen, kill_at;

static struct pms_pool *open_store(int mode)
{
    struct pms_options o = {.size = 1 << 20, .mode = mode, .domain = domain, .hot = 1};
    struct pms_pool *pool = NULL;
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK)
        printf("open: %d %s\n", e.status, e.what);
    return pool;
}

static void close_store(struct pms_pool *pool)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 1, &e) == PMS_OK);
    pms_pool_release(pool);
}

static uint32_t read_number(struct pms_pool *pool)
{
    unsigned char record[PMS_HISTORY_BYTES];
    struct pms_error e;
    uint32_t n, last;
    CHECK(pms_history_read(pool, record, &e) == PMS_OK);
    memcpy(&n, record, sizeof n);
    memcpy(&last, record + sizeof record - sizeof last, sizeof last);
    CHECK(n == last); /* whole */
    return n;
}

static int write_number(struct pms_pool *pool, uint32_t n)
{
    unsigned char record[PMS_HISTORY_BYTES];
    struct pms_error e;
    memset(record, (int)n, sizeof record);
    memcpy(record, &n, sizeof n);
    memcpy(record + sizeof record - sizeof n, &n, sizeof n);
    return pms_history_write(pool, record, sizeof record, &e);
}

static void put(struct pms_pool *pool, const char *value)
{
    struct pms_error e;
    CHECK(pms_object_put_value(pool, 0, "v", 1, value, 1, &e) == PMS_OK);
}

/* ---- what rolls back and what does not ---- */

static void outside_transactions(void)
{
    struct pms_error e;
    struct pms_object o;
    struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE);
    CHECK(read_number(pool) == 0);
    put(pool, "1");
    CHECK(pms_commit(pool, &e) == PMS_OK);
    put(pool, "2");
    CHECK(write_number(pool, 5) == PMS_OK);
    CHECK(pms_rollback(pool, &e) == PMS_OK);
    CHECK(pms_object_find(pool, 0, "v", 1, &o, &e) == PMS_OK && o.meta[0] == '1');
    CHECK(read_number(pool) == 5);
    CHECK(pms_begin(pool, 0, &e) == PMS_OK); /* in a block too */
    CHECK(write_number(pool, 6) == PMS_OK);
    CHECK(pms_end(pool, 0, &e) == PMS_OK);
    close_store(pool);
    pool = open_store(PMS_MODE_READ_WRITE);
    CHECK(read_number(pool) == 6);
    CHECK(pms_history_write(pool, "", PMS_HISTORY_BYTES + 1, &e) == PMS_E_INVALID);
    CHECK(pms_history_write(pool, NULL, 0, &e) == PMS_OK && read_number(pool) == 0);
    close_store(pool);
    pool = open_store(PMS_MODE_READ);
    CHECK(write_number(pool, 7) == PMS_E_READONLY && read_number(pool) == 0);
    close_store(pool);
}

/* ---- kills ---- */

static int count_and_kill(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)primitive, (void)addr, (void)bytes;
    if (atomic_fetch_add(&seen, 1) + 1 == atomic_load(&kill_at))
        kill(getpid(), SIGKILL);
    return 0;
}

static void child_writes(uint64_t n)
{
    struct pms_error e;
    struct pms_pool *pool = open_store(PMS_MODE_READ_WRITE);
    uint32_t from = read_number(pool);
    atomic_store(&kill_at, n);
    pms_persist_hook = count_and_kill;
    for (uint32_t i = from + 1; i <= from + WRITES; i++) {
        put(pool, "3");
        CHECK(write_number(pool, i) == PMS_OK);
        atomic_store(acknowledged, i);
        CHECK((i % 2 ? pms_commit : pms_rollback)(pool, &e) == PMS_OK);
    }
    close_store(pool);
    _exit(test_checks_failed != 0);
}

static void kill_everywhere(void)
{
    close_store(open_store(PMS_MODE_TRUNCATE));
    atomic_store(acknowledged, 0);
    bool ended = false;
    for (uint64_t n = 1; !ended; n++) {
        int status;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0)
            child_writes(n);
        waitpid(pid, &status, 0);
        ended = WIFEXITED(status);
        CHECK(ended ? WEXITSTATUS(status) == 0 : WTERMSIG(status) == SIGKILL);
        /* alternately leaves it unclean for the next child */
        struct pms_pool *pool = open_store(PMS_MODE_READ_WRITE);
        uint32_t found = read_number(pool), known = atomic_load(acknowledged);
        CHECK(found == known || found == known + 1);
        CHECK(ended ? pool->opened.info.clean : !pool->opened.info.clean);
        atomic_store(acknowledged, found);
        close_store(pool);
    }
}

/* ---- damage ---- */

static void one_copy_damaged(void)
{
    for (uint64_t copy = 0; copy < 2; copy++) {
        struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE);
        for (uint32_t i = 1; i <= 4; i++)
            CHECK(write_number(pool, i) == PMS_OK);
        uint64_t newest = pool->session.generation & 1;
        bool synced = !pool->session_unsynced;
        int fd = open(path, O_RDWR);
        unsigned char garbage[512];
        memset(garbage, 0xa5, sizeof garbage);
        CHECK(pwrite(fd, garbage, sizeof garbage, (off_t)(PMS_OFF_SESSION(copy))) == 512);
        struct pms_session s;
        struct pms_error e;
        /* as an open after a crash of the machine would find it */
        CHECK(pms_session_read(fd, &s, &e) == PMS_OK);
        uint32_t n;
        memcpy(&n, s.history, sizeof n);
        if (copy != newest)
            CHECK(n == 4);
        else
            CHECK(n == (synced ? 3 : 0) && s.state == PMS_SESSION_DIRTY);
        close(fd);
        close_store(pool); /* writes the clean mark over one of the copies */
        pool = open_store(PMS_MODE_READ_WRITE);
        CHECK(read_number(pool) == 4 && pool->opened.info.clean);
        close_store(pool);
    }
}

static int fail_next_pwrite(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr, (void)bytes;
    return primitive == PMS_PRIM_PWRITE ? 5 /* EIO */ : 0;
}

static void failing_disk(void)
{
    struct pms_error e;
    struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE);
    CHECK(write_number(pool, 1) == PMS_OK);
    pms_persist_hook = fail_next_pwrite;
    CHECK(write_number(pool, 2) == PMS_E_OS);
    pms_persist_hook = NULL;
    CHECK(read_number(pool) == 1);          /* what was not written is not shown */
    CHECK(write_number(pool, 3) == PMS_OK); /* nothing was lost: it was refused */
    CHECK(read_number(pool) == 3 && pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

int main(void)
{
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    const char *dir = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-history-%ld", dir, (long)getpid());
    acknowledged = mmap(NULL, sizeof *acknowledged, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (unsigned i = 0; i < 3; i++) {
        domain = domains[i];
        TEST(outside_transactions);
        TEST(kill_everywhere);
        TEST(one_copy_damaged);
        TEST(failing_disk);
    }
    unlink(path);
    return test_summary();
}
