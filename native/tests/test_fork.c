/* Forks at any moment of what other threads do: no child keeps the lock, waits for a thread that
 * did not come with it, or writes. */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define MIB (1u << 20)
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FORKS 40
#else
#define FORKS 400
#endif

static char path[256], other_path[300];
static _Atomic bool stop;
static struct pms_pool *_Atomic pool;   /* open, opening or closing */
static struct pms_pool *released[2000]; /* each holds on to address space */
static uint32_t released_count;

static struct pms_pool *open_store(const char *at, int mode)
{
    struct pms_options o = {.size = 2 * MIB,
                            .mode = mode,
                            .domain = PMS_DOMAIN_PROCESS,
                            .hot = 1,
                            .lock_timeout_ns = -1};
    struct pms_error e;
    struct pms_pool *p = NULL;
    if (pms_pool_open(at, &o, &p, &e) != PMS_OK) {
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
        abort();
    }
    return p;
}

static bool has_open(const char *name)
{
    char link[64], target[512];
    for (int fd = 0; fd < 256; fd++) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, target, sizeof target - 1);
        if (n <= 0)
            continue;
        target[n] = '\0';
        if (strcmp(target, name) == 0)
            return true;
    }
    return false;
}

static void *open_and_close(void *arg)
{
    (void)arg;
    struct pms_error e;
    for (uint32_t i = 0; !atomic_load(&stop) && i < sizeof released / sizeof *released; i++) {
        struct pms_pool *p = open_store(path, PMS_MODE_APPEND);
        atomic_store(&pool, p);
        pms_pool_close(p, 1, &e);
        released[released_count++] = p; /* a child may look at it */
    }
    return NULL;
}

static void children_of_a_process_that_opens_and_closes(void)
{
    pthread_t thread;
    struct pms_error e;
    atomic_store(&stop, false);
    pms_pool_release(open_store(path, PMS_MODE_TRUNCATE));
    CHECK(pthread_create(&thread, NULL, open_and_close, NULL) == 0);
    int kept = 0, hung = 0, wrong = 0;
#ifdef __SANITIZE_ADDRESS__
    /* this allocator's locks stay held in a child, so no child may open a store */
    while (!atomic_load(&pool))
        sched_yield();
#endif
    for (int i = 0; i < FORKS; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(120);
            struct pms_pool *p = atomic_load(&pool);
            int answer = p ? pms_commit(p, &e) : PMS_E_FORKED;
            pms_epoch(p ? p : open_store(other_path, PMS_MODE_TRUNCATE));
            _exit(has_open(path) ? 1 : answer != PMS_E_FORKED ? 2 : 0);
        }
        int ws = 0;
        CHECK(waitpid(child, &ws, 0) == child);
        kept += WIFEXITED(ws) && WEXITSTATUS(ws) == 1;
        wrong += WIFEXITED(ws) && WEXITSTATUS(ws) > 1;
        hung += WIFSIGNALED(ws);
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    for (uint32_t i = 0; i < released_count; i++)
        pms_pool_release(released[i]);
    printf("  %d forks beside %u openings\n", FORKS, released_count);
    CHECK(released_count > 0);
    CHECK(kept == 0);
    CHECK(wrong == 0);
    CHECK(hung == 0);
}

/* ---- a child has stores of its own ---- */

static unsigned char *array(struct pms_pool *p, uint64_t bytes)
{
    struct pms_error e;
    uint64_t data = 0;
    CHECK(pms_object_put_array(p, 0, "a", 1, "m", 1, bytes, PMS_FILL_ZERO, NULL, 0, 0, &data, &e) ==
          PMS_OK);
    CHECK(pms_commit(p, &e) == PMS_OK);
    return p->map.user + data;
}

static void declare(struct pms_pool *p, unsigned char *a, uint64_t bytes)
{
    struct pms_error e;
    struct pms_range r = {(uint64_t)(uintptr_t)a, bytes};
    CHECK(pms_will_write(p, &r, 1, &e) == PMS_OK);
}

static struct pms_pool *captured;
static unsigned char *captured_at;

static bool stops;

/* In a child, before anything of the engine's. */
static void stop_there(void)
{
    if (stops)
        raise(SIGSTOP);
}

#define STOPPED 6

static _Atomic int64_t granted_ms; /* to what children hand over: that is waited for, at most */

int poll(struct pollfd *fds, nfds_t count, int timeout_ms)
{
    int type = 0;
    const struct pollfd *asked = fds;
    __asm__("" : "+r"(asked)); /* the library declares them as written alone */
    socklen_t bytes = sizeof type;
    struct timespec t = {timeout_ms / 1000, timeout_ms % 1000 * 1000000};
    if (count == 1 && timeout_ms > 0 &&
        getsockopt(asked->fd, SOL_SOCKET, SO_TYPE, &type, &bytes) == 0 && type == SOCK_SEQPACKET)
        atomic_fetch_add(&granted_ms, timeout_ms);
    return ppoll(fds, count, timeout_ms < 0 ? NULL : &t, NULL);
}

/* They have not handed their memory over: pages go home without them, and they must not read. All
 * of them hold that up for as long as one. */
static void children_that_are_stopped_hold_nothing_up(void)
{
    struct pms_options o = {
        .size = 8 * MIB, .mode = PMS_MODE_TRUNCATE, .domain = PMS_DOMAIN_FILE, .hot = 1};
    struct pms_error e;
    struct pms_pool *p = NULL;
    uint64_t at;
    int ws;
    CHECK(pms_pool_open(path, &o, &p, &e) == PMS_OK);
    CHECK(pms_object_put_array(p, 0, "a", 1, "m", 1, MIB, PMS_FILL_ZERO, NULL, 0, 0, &at, &e) ==
              PMS_OK &&
          pms_pool_close(p, 1, &e) == PMS_OK);
    pms_pool_release(p);
    o.mode = PMS_MODE_READ_WRITE;
    CHECK(pms_pool_open(path, &o, &p, &e) == PMS_OK);
    stops = true;
    pid_t child[STOPPED];
    for (int i = 0; i < STOPPED; i++) {
        child[i] = fork();
        if (child[i] == 0)
            _exit(atomic_load(&p->capture.watched.unreadable) != 1);
        CHECK(waitpid(child[i], &ws, WUNTRACED) == child[i] && WIFSTOPPED(ws));
    }
    stops = false;
    declare(p, p->map.user + at, MIB);
    memset(p->map.user + at, 1, MIB);
    CHECK(pms_commit(p, &e) == PMS_OK && pms_journal_drain(p->journal, &e) == PMS_OK);
    int64_t granted = atomic_load(&granted_ms);
    CHECK(granted >= 4000 && granted < 6000);
    for (int i = 0; i < STOPPED; i++) {
        CHECK(kill(child[i], SIGCONT) == 0);
        CHECK(waitpid(child[i], &ws, 0) == child[i] && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
    }
    CHECK(pms_pool_close(p, 0, &e) == PMS_OK);
    pms_pool_release(p);
}

static void *capture_all_the_time(void *arg)
{
    (void)arg;
    struct pms_error e;
    while (!atomic_load(&stop)) {
        declare(captured, captured_at, 16 * MIB);
        captured_at[0]++;
        CHECK(pms_commit(captured, &e) == PMS_OK);
    }
    return NULL;
}

static void a_child_captures_in_its_own_store(void)
{
    pthread_t thread;
    atomic_store(&stop, false);
    captured = open_store(path, PMS_MODE_TRUNCATE);
    captured_at = array(captured, 16 * MIB);
    CHECK(pthread_create(&thread, NULL, capture_all_the_time, NULL) == 0);
    int failed = 0;
    for (int i = 0; i < FORKS / 10; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(120);
            struct pms_pool *own = open_store(other_path, PMS_MODE_TRUNCATE);
            declare(own, array(own, 8 * MIB), 8 * MIB); /* large: by all cores */
            pms_pool_release(own);
            _exit(0);
        }
        int ws = 0;
        CHECK(waitpid(child, &ws, 0) == child);
        failed += !WIFEXITED(ws) || WEXITSTATUS(ws) != 0;
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    pms_pool_release(captured);
    CHECK(failed == 0);
}

int main(void)
{
    pthread_atfork(NULL, NULL, stop_there); /* before the engine's */
    const char *folder = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-fork-%ld", folder, (long)getpid());
    snprintf(other_path, sizeof other_path, "%s-other", path);
    TEST(children_of_a_process_that_opens_and_closes);
    TEST(a_child_captures_in_its_own_store);
    TEST(children_that_are_stopped_hold_nothing_up);
    unlink(path);
    unlink(other_path);
    return test_summary();
}
