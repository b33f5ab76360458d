/* Failure model (i), exhaustively: SIGKILL at every persistence primitive of every operation, in
 * every domain that runs here; then SIGKILL at every primitive of the recovery that follows. The
 * recovered state has to be the last acknowledged commit or the one in flight, whole; the check
 * has to be clean; a further transaction has to work; opening again changes nothing.
 *
 * PMS_CRASH_STEP=1 kills at every primitive and takes minutes; the default is every 7th, from
 * another start for each workload. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checksum.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define COMMITS_MAX 64

static char path[256], base_path[300];
static int domain;

struct shared {                    /* between the parent and the children it loses */
    _Atomic uint32_t acknowledged; /* commits that returned */
    uint32_t digests;              /* known states: before the workload, after each commit */
    uint32_t digest[COMMITS_MAX];
    uint64_t primitives;
};
static struct shared *shared;

/* ---- state as a number ---- */

static uint32_t digest_object(struct pms_pool *pool, const struct pms_object *o, uint32_t crc)
{
    crc = pms_crc32c(crc, o->meta, o->meta_bytes);
    crc = pms_crc32c(crc, &o->kind, sizeof o->kind);
    bool array = o->kind == PMS_OBJECT_ARRAY && o->data;
    return array ? pms_crc32c(crc, pool->map.user + o->data, o->data_bytes) : crc;
}

static uint32_t digest_list(struct pms_pool *pool, uint64_t list, uint32_t crc)
{
    struct pms_object o;
    struct pms_error e;
    for (uint64_t i = 0; pms_sequence_get(pool, list, NULL, 0, i, 0, &o, &e) == PMS_OK; i++)
        crc = digest_object(pool, &o, crc);
    return crc;
}

static uint32_t digest_directory(struct pms_pool *pool, uint64_t dir, uint32_t crc)
{
    uint64_t node = 0;
    struct pms_error e;
    for (;;) {
        struct pms_object o;
        if (pms_object_next(pool, dir, &node, &o, &e) != PMS_OK || node == 0)
            return crc;
        crc = pms_crc32c(crc, o.name, o.name_bytes);
        crc = digest_object(pool, &o, crc);
        if (o.kind == PMS_OBJECT_GROUP)
            crc = digest_directory(pool, o.data, crc);
        if (o.kind == PMS_OBJECT_LIST)
            crc = digest_list(pool, o.data, crc);
    }
}

static uint32_t digest(struct pms_pool *pool) { return digest_directory(pool, 0, 0); }

/* ---- the store ---- */

static struct pms_pool *open_store(int mode, const char *at)
{
    struct pms_options o = {.size = 1 << 20, .mode = mode, .domain = domain, .hot = 1};
    struct pms_pool *pool = NULL;
    struct pms_error e;
    if (pms_pool_open(at, &o, &pool, &e) != PMS_OK)
        printf("open %s: %d %d %s\n", at, e.status, e.sys_errno, e.what);
    return pool;
}

static uint32_t *data_of(struct pms_pool *pool, const char *name)
{
    struct pms_object o;
    struct pms_error e;
    if (pms_object_find(pool, 0, name, (uint32_t)strlen(name), &o, &e) != PMS_OK)
        abort();
    return (uint32_t *)(void *)(pool->map.user + o.data);
}

static void put_array(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t n,
                      uint32_t fill)
{
    struct pms_error e;
    uint64_t data;
    if (pms_object_put_array(pool, dir, name, (uint32_t)strlen(name), "f", 1, 4ull * n,
                             PMS_FILL_PATTERN, &fill, 4, 0, &data, &e) != PMS_OK)
        abort();
}

static void put_value(struct pms_pool *pool, const char *name, const char *value)
{
    struct pms_error e;
    if (pms_object_put_value(pool, 0, name, (uint32_t)strlen(name), value, (uint32_t)strlen(value),
                             &e) != PMS_OK)
        abort();
}

static void del(struct pms_pool *pool, const char *name)
{
    struct pms_error e;
    if (pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e) != PMS_OK)
        abort();
}

static void commit(struct pms_pool *pool)
{
    struct pms_error e;
    if (pms_commit(pool, &e) != PMS_OK)
        abort();
    atomic_fetch_add(&shared->acknowledged, 1);
    if (!pms_persist_hook && shared->digests < COMMITS_MAX) /* the dry run */
        shared->digest[shared->digests++] = digest(pool);
}

static void make_base(void)
{
    struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE, base_path);
    struct pms_error e;
    uint64_t group;
    put_array(pool, 0, "small", 16, 1);
    put_array(pool, 0, "medium", 3000, 2);
    put_array(pool, 0, "large", 40000, 3);
    put_value(pool, "value", "one");
    pms_object_group(pool, 0, "group", 5, 1, &group, &e);
    put_array(pool, group, "x", 100, 4);
    pms_commit(pool, &e);
    pms_pool_close(pool, 0, &e);
    pms_pool_release(pool);
}

/* ---- workloads: any number of commits ---- */

static void write_small(struct pms_pool *p)
{
    data_of(p, "small")[3] = 99;
    commit(p);
}

static void write_all(struct pms_pool *p)
{
    for (uint32_t i = 0; i < 40000; i++)
        data_of(p, "large")[i] = i;
    memset(data_of(p, "medium"), 7, 12000);
    data_of(p, "small")[0] = 5;
    put_value(p, "value", "two");
    commit(p);
}

static void hot_loop(struct pms_pool *p)
{
    for (uint32_t i = 0; i < 12; i++) {
        data_of(p, "small")[i] = i + 100;
        put_value(p, "value", i % 2 ? "odd" : "even");
        commit(p);
    }
}

static void declared(struct pms_pool *p)
{
    struct pms_error e;
    struct pms_range r[2] = {{(uint64_t)(uintptr_t)data_of(p, "medium"), 12000},
                             {(uint64_t)(uintptr_t)data_of(p, "small"), 64}};
    pms_will_write(p, r, 2, &e);
    memset(data_of(p, "medium"), 1, 12000);
    memset(data_of(p, "small"), 2, 64);
    commit(p);
}

static void values(struct pms_pool *p)
{
    put_value(p, "value", "a");
    put_value(p, "new", "b");
    commit(p);
    char text[6000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    put_value(p, "value", text);
    commit(p);
    del(p, "new");
    commit(p);
}

static void arrays(struct pms_pool *p)
{
    put_array(p, 0, "n1", 10, 11);
    put_array(p, 0, "n2", 20000, 12);
    commit(p);
    put_array(p, 0, "n1", 50, 13);
    data_of(p, "n1")[0] = 1;
    commit(p);
    del(p, "n2");
    del(p, "medium");
    commit(p);
    put_array(p, 0, "n3", 20000, 14);
    commit(p);
}

static void groups(struct pms_pool *p)
{
    struct pms_error e;
    uint64_t g, h;
    pms_object_group(p, 0, "g", 1, 1, &g, &e);
    pms_object_group(p, g, "h", 1, 1, &h, &e);
    put_array(p, h, "deep", 700, 1);
    commit(p);
    del(p, "g");
    del(p, "group");
    commit(p);
}

static void many_names(struct pms_pool *p)
{
    char name[16];
    for (int i = 0; i < 70; i++) { /* the table grows */
        snprintf(name, sizeof name, "name%d", i);
        put_value(p, name, "v");
    }
    commit(p);
    for (int i = 0; i < 70; i += 2) {
        snprintf(name, sizeof name, "name%d", i);
        del(p, name);
    }
    commit(p);
}

static void grow(struct pms_pool *p)
{
    data_of(p, "small")[1] = 1;
    put_array(p, 0, "huge", 400000, 9);
    data_of(p, "huge")[399999] = 1;
    commit(p);
    data_of(p, "huge")[5] = 6;
    commit(p);
}

static void roll_back(struct pms_pool *p)
{
    struct pms_error e;
    pms_begin(p, -1, &e);
    memset(data_of(p, "large"), 9, 160000);
    put_array(p, 0, "gone", 5000, 1);
    del(p, "value");
    pms_begin(p, -1, &e);
    data_of(p, "small")[2] = 8;
    pms_end(p, 1, &e);
    pms_end(p, 0, &e);
    data_of(p, "small")[2] = 77;
    commit(p);
}

static void splice_list(struct pms_pool *p, uint64_t list, uint64_t at, uint64_t remove,
                        uint64_t count)
{
    static const uint32_t words[50] = {1, 2, 3};
    struct pms_new_item items[64];
    struct pms_error e;
    for (uint64_t i = 0; i < count; i++)
        items[i] =
            i % 9
                ? (struct pms_new_item){.meta = "value", .meta_bytes = 5, .kind = PMS_OBJECT_VALUE}
                : (struct pms_new_item){"f",          1, sizeof words, words, PMS_OBJECT_ARRAY,
                                        PMS_FILL_COPY};
    if (pms_sequence_splice(p, list, NULL, 0, at, remove, 1, items, count, &e) != PMS_OK)
        abort();
}

static void lists(struct pms_pool *p)
{
    struct pms_error e;
    uint64_t list;
    pms_object_list(p, 0, "list", 4, 1, &list, &e);
    for (int i = 0; i < 4; i++)
        splice_list(p, list, 0, 0, 60); /* a leaf splits */
    commit(p);
    splice_list(p, list, 100, 3, 2);
    splice_list(p, list, 238, 0, 1);
    commit(p);
    splice_list(p, list, 5, 200, 0); /* leaves join */
    commit(p);
    del(p, "list");
    commit(p);
}

static const struct {
    const char *name;
    void (*run)(struct pms_pool *pool);
} workload[] = {
    {"write_small", write_small}, {"write_all", write_all},   {"hot_loop", hot_loop},
    {"declared", declared},       {"values", values},         {"arrays", arrays},
    {"groups", groups},           {"many_names", many_names}, {"grow", grow},
    {"roll_back", roll_back},     {"lists", lists},
};

/* ---- killing ---- */

static _Atomic uint64_t seen, kill_at;

static int count_and_kill(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)primitive, (void)addr, (void)bytes;
    if (atomic_fetch_add(&seen, 1) + 1 == atomic_load(&kill_at))
        kill(getpid(), SIGKILL);
    return 0;
}

static void arm(uint64_t n)
{
    atomic_store(&seen, 0);
    atomic_store(&kill_at, n);
    pms_persist_hook = count_and_kill;
}

static void copy_file(const char *from, const char *to)
{
    int in = open(from, O_RDONLY), out = open(to, O_RDWR | O_CREAT | O_TRUNC, 0600);
    struct stat st;
    fstat(in, &st);
    off_t at = 0;
    while (at < st.st_size)
        if (copy_file_range(in, &at, out, NULL, (size_t)(st.st_size - at), 0) <= 0)
            break;
    if (at < st.st_size) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, in, 0);
        for (ssize_t done = 0; done < st.st_size;)
            done += pwrite(out, (char *)p + done, (size_t)(st.st_size - done), done);
        munmap(p, (size_t)st.st_size);
    }
    close(in);
    close(out);
}

/* Runs fn in a child; true if it ended by itself. */
static bool survives(void (*fn)(uint64_t arg, unsigned w), uint64_t arg, unsigned w)
{
    int ws;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        fn(arg, w);
        fflush(stdout);
        _exit(0);
    }
    waitpid(pid, &ws, 0);
    CHECK(WIFEXITED(ws) ? WEXITSTATUS(ws) == 0 : WTERMSIG(ws) == SIGKILL);
    return WIFEXITED(ws);
}

static void child_works(uint64_t n, unsigned w)
{
    if (n)
        arm(n); /* opening included */
    struct pms_pool *pool = open_store(PMS_MODE_READ_WRITE, path);
    if (!pool)
        _exit(1);
    if (!n)
        shared->digest[shared->digests++] = digest(pool);
    workload[w].run(pool);
    struct pms_error e;
    if (pms_pool_close(pool, 0, &e) != PMS_OK)
        _exit(1);
}

static void child_recovers(uint64_t n, unsigned w)
{
    (void)w;
    arm(n);
    struct pms_pool *pool = open_store(PMS_MODE_READ_WRITE, path);
    if (!pool)
        _exit(1);
    _exit(0); /* without closing: dies open, as after a crash */
}

static bool state_allowed(uint32_t d, uint32_t acknowledged)
{
    for (uint32_t i = acknowledged; i <= acknowledged + 1 && i < shared->digests; i++)
        if (shared->digest[i] == d)
            return true;
    return false;
}

static void child_verifies(uint64_t n, unsigned w)
{
    static struct pms_check_report r;
    struct pms_error e;
    int asked = domain;
    domain = PMS_DOMAIN_AUTO;
    /* shows the last commit and changes nothing */
    struct pms_pool *reader = open_store(PMS_MODE_READ, path);
    uint32_t shown = reader ? digest(reader) : 0;
    if (reader)
        pms_pool_close(reader, 0, &e);
    domain = asked;
    struct pms_pool *pool = open_store(PMS_MODE_READ_WRITE, path);
    CHECK(reader != NULL && pool != NULL);
    if (!pool || !reader)
        _exit(1);
    uint32_t d = digest(pool), acknowledged = atomic_load(&shared->acknowledged);
    bool good = state_allowed(d, acknowledged) && shown == d;
    CHECK(good);
    CHECK(pms_check(pool, &r, &e) == PMS_OK && r.problem_count == 0);
    if (!good || r.problem_count)
        printf("  %s domain %d primitive %lu, %u acknowledged, shown %x is %x: %s\n",
               workload[w].name, domain, (unsigned long)n, acknowledged, shown, d,
               r.problem_count ? r.problem[0] : "");
    data_of(pool, "small")[15] ^= 1;
    put_value(pool, "after", "crash");
    CHECK(pms_commit(pool, &e) == PMS_OK);
    d = digest(pool);
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pool = open_store(PMS_MODE_READ_WRITE, path);
    CHECK(pool != NULL && digest(pool) == d);
    if (test_checks_failed)
        _exit(1);
}

static uint64_t kills, double_kills;

static void crash_everywhere(unsigned w)
{
    memset(shared, 0, sizeof *shared);
    copy_file(base_path, path);
    survives(child_works, 0, w);
    char crashed[300];
    snprintf(crashed, sizeof crashed, "%s.crashed", path);
    uint64_t step = getenv("PMS_CRASH_STEP") ? strtoull(getenv("PMS_CRASH_STEP"), NULL, 10) : 7,
             trial = 0;
    for (uint64_t n = 1 + w % step;; n += step, trial++) {
        atomic_store(&shared->acknowledged, 0);
        copy_file(base_path, path);
        bool done = survives(child_works, n, w);
        kills += !done;
        if (trial % 7 == 1 && !done) { /* and again, inside recovery, at each of its primitives */
            copy_file(path, crashed);
            for (uint64_t m = 1 + w % step;; m += step) {
                copy_file(crashed, path);
                bool recovered = survives(child_recovers, m, w);
                double_kills += !recovered;
                CHECK(survives(child_verifies, n, w));
                if (recovered)
                    break;
            }
        } else {
            CHECK(survives(child_verifies, n, w));
        }
        if (done || test_checks_failed > 20)
            break;
    }
    unlink(crashed);
}

static unsigned current;
static void crash_current(void) { crash_everywhere(current); }

int main(void)
{
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    const char *dir = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-crash-%ld", dir, (long)getpid());
    snprintf(base_path, sizeof base_path, "%s.base", path);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (unsigned i = 0; i < 3; i++) {
        domain = domains[i];
        make_base();
        for (current = 0; current < sizeof workload / sizeof workload[0]; current++) {
            printf("domain %d, %s: ", domain, workload[current].name);
            TEST(crash_current);
        }
    }
    unlink(path);
    unlink(base_path);
    printf("%lu kills, %lu double kills\n", (unsigned long)kills, (unsigned long)double_kills);
    return test_summary();
}
