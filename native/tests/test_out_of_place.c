/* One sector damaged, or bytes where nobody expects them: nothing acknowledged is lost without
 * an error, and nothing ends the process. */
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checksum.h"
#include "one_store.h"

#define COMMITS 50

static void value(int i)
{
    char name[8];
    int n = snprintf(name, sizeof name, "n%02d", i);
    CHECK(ok(pms_object_put_value(pool, 0, name, (uint32_t)n, "abc", 3, &e)) &&
          ok(pms_commit(pool, &e)));
}

static void name_store(const char *what)
{
    const char *folder = getenv("PMS_TEST_DIR");
    snprintf(path, sizeof path, "%s/pms-test-out-of-place-%ld-%s", folder ? folder : "/dev/shm",
             (long)getpid(), what);
}

/* REQUIRES: no store was opened in this process yet: it has one thread. */
static void killed(const char *what, void (*work)(void))
{
    int status;
    name_store(what);
    pid_t child = fork();
    if (child == 0) {
        work();
        if (test_checks_failed)
            _exit(1);
        kill(getpid(), SIGKILL);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) &&
          WTERMSIG(status) == SIGKILL);
}

/* ---- a first session's record ---- */

static void many_commits(void)
{
    CHECK(open_store(PMS_MODE_TRUNCATE));
    for (int i = 0; i < COMMITS; i++)
        value(i);
}

static void the_other_copy_of_a_session_says_that_it_was_open(void)
{
    struct pms_session s[2];
    uint64_t count = 0;
    name_store("session");
    int fd = open(path, O_RDWR);
    for (uint64_t k = 0; k < 2; k++)
        CHECK(pread(fd, &s[k], sizeof s[k], (off_t)PMS_OFF_SESSION(k)) == sizeof s[k]);
    uint64_t newest = s[1].generation > s[0].generation;
    s[newest].pid ^= 1; /* a flipped bit */
    CHECK(pwrite(fd, &s[newest], sizeof s[0], (off_t)PMS_OFF_SESSION(newest)) == sizeof s[0]);
    close(fd);
    CHECK(open_store(PMS_MODE_READ));
    CHECK(!pool->opened.info.clean);
    CHECK(ok(pms_object_count(pool, 0, &count, &e)));
    CHECK(count == COMMITS);
    close_store();
    unlink(path);
}

/* ---- records of another store's journal, as data ---- */

#define PAGES 16u

static void commits_of_foreign_records(void)
{
    uint64_t data;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    CHECK(ok(pms_object_put_array(pool, 0, "a", 1, "m", 1, PAGES * PMS_PAGE, PMS_FILL_ZERO, NULL, 0,
                                  0, &data, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    unsigned char *a = memory(data);
    /* the ring is written over and over: old images lie behind the last record */
    for (int i = 0; i < 400; i++) {
        for (size_t p = 0; p < PAGES; p++) {
            struct pms_record r = {
                .magic = PMS_RECORD_MAGIC, .tx = 100000, .bytes = PMS_PAGE, .chain = (uint32_t)i};
            r.crc = pms_crc32c(0, &r, sizeof r);
            memcpy(a + p * PMS_PAGE, &r, sizeof r);
        }
        CHECK(ok(pms_commit(pool, &e)));
    }
}

static void records_of_another_store_are_only_data(void)
{
    name_store("foreign");
    bool opened = open_store(PMS_MODE_READ);
    CHECK(opened);
    if (opened)
        close_store();
    unlink(path);
}

/* ---- entries of an undo log, as data ---- */

#define UPLOAD (2u << 20)
#define MIDDLE (256u << 10)

static uint64_t put_zeros(const char *name, uint64_t bytes)
{
    uint64_t at = 0;
    CHECK(ok(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                  PMS_FILL_ZERO, NULL, 0, 0, &at, &e)));
    return at;
}

static void overwrite(uint64_t at, int content, uint64_t bytes)
{
    struct pms_range r = {(uint64_t)(uintptr_t)memory(at), bytes};
    CHECK(ok(pms_will_write(pool, &r, 1, &e)));
    memset(memory(at), content, bytes);
}

/* Bytes from outside are lines of an undo log, for a transaction to come. Overwritten, they are
 * pre-images; and when that log is gone they lie where the entries of the next but one go.
 * Returns the number of the entry that would have to follow. */
static uint32_t entries_as_data(uint32_t seq)
{
    struct {
        struct pms_entry head;
        unsigned char image[PMS_LINE - sizeof(struct pms_entry)];
    } line = {0};
    static_assert(sizeof line == PMS_LINE, "as in the log");
    CHECK(open_store(PMS_MODE_TRUNCATE));
    uint64_t upload = put_zeros("upload", UPLOAD), middle = put_zeros("middle", MIDDLE),
             victim = put_zeros("victim", 64u << 10);
    CHECK(ok(pms_commit(pool, &e)));
    line.head = (struct pms_entry){
        .tag = pool->undo.tag + 2, .target = victim, .seq = seq, .len = 8};
    memset(line.image, 0xee, 8);
    line.head.crc = pms_crc32c(pms_crc32c(0, &line.head, 28), line.image, 8);
    overwrite(upload, 0, UPLOAD);
    for (uint64_t at = 0; at < UPLOAD; at += PMS_LINE)
        memcpy(memory(upload) + at, &line, sizeof line);
    CHECK(ok(pms_commit(pool, &e)));
    overwrite(upload, 0, UPLOAD);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(pool->undo.tag == line.head.tag);
    overwrite(middle, 5, MIDDLE);
    uint32_t next = pool->undo.log.seq;
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(memory(victim)[0] == 0);
    close_store();
    return next;
}

static void entries_of_a_log_are_only_data(void)
{
    static const int all[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    for (int i = 0; i < 3; i++) {
        name_store("entries");
        domain = all[i];
        uint32_t next = entries_as_data(UINT32_MAX);
        CHECK(entries_as_data(next) == next);
        unlink(path);
    }
}

/* ---- the size of a slot ---- */

#define SLOT (96u << 10)

static uint64_t node_of_second;

static void a_pair(void)
{
    uint64_t group, data;
    struct pms_object o;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    CHECK(ok(pms_object_group(pool, 0, "w", 1, 1, &group, &e)));
    for (int k = 0; k < 2; k++)
        CHECK(ok(pms_object_put_array(pool, group, k ? "1" : "0", 1, "m", 1, SLOT, PMS_FILL_ZERO,
                                      NULL, 0, 0, &data, &e)));
    CHECK(ok(pms_object_describe_group(pool, 0, "w", 1, "\x81\xa5slots", 8, &e)) &&
          ok(pms_commit(pool, &e)));
    CHECK(ok(pms_object_find(pool, group, "1", 1, &o, &e)));
    node_of_second = o.node;
}

static void slots_of_two_sizes_are_corrupt(void)
{
    static const uint64_t sizes[] = {0, SLOT - PMS_PAGE, SLOT / 2};
    for (int i = 0; i < 3; i++) {
        name_store("slots");
        a_pair();
        close_store();
        int fd = open(path, O_RDWR);
        CHECK(pwrite(fd, &sizes[i], 8,
                     (off_t)(node_of_second + offsetof(struct pms_node, data_bytes))) == 8);
        close(fd);
        CHECK(open_store(PMS_MODE_READ_WRITE));
        CHECK(pms_slot_flip(pool, 0, "w", 1, NULL, &e) == PMS_E_CORRUPT);
        close_store();
        unlink(path);
    }
}

int main(void)
{
    domain = PMS_DOMAIN_FILE;
    killed("session", many_commits);
    killed("foreign", commits_of_foreign_records);
    TEST(the_other_copy_of_a_session_says_that_it_was_open);
    TEST(records_of_another_store_are_only_data);
    TEST(entries_of_a_log_are_only_data);
    domain = PMS_DOMAIN_PROCESS;
    TEST(slots_of_two_sizes_are_corrupt);
    return test_summary();
}
