/* Views that outlive their store: what they show is theirs, whatever becomes of the file, and who
 * opens the file waits until that is so. Another process, forked before any thread was, opens it
 * and writes over everything. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "one_store.h"

#define MIB (1ull << 20)
#define LARGE (24 * MIB) /* a thread copies it */
#define LITTLE (64ull << 10)
#define TINY 80ull
#define TINIES 40u
#define SECONDS 60
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define WAITS_NOT true
#else
#define WAITS_NOT (domain != domains[0])
#endif
#define SPREAD 700u /* more than a closed store may have mappings for */

static int other = -1; /* the socket to the other process */

/* ---- a store with blocks of all sizes ---- */

struct view {
    uint64_t off, bytes;
    unsigned char *at;
};
static struct view large, little, tiny[TINIES];

static uint64_t make(const char *name, uint64_t bytes, unsigned char content)
{
    uint64_t data = 0;
    CHECK(ok(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                  PMS_FILL_PATTERN, &content, 1, 0, &data, &e)));
    return data;
}

static struct view look(const char *name, uint64_t bytes)
{
    struct pms_object o = {0};
    CHECK(ok(pms_object_get(pool, 0, name, (uint32_t)strlen(name), &o, &e)));
    return (struct view){o.data, bytes, memory(o.data)};
}

static const char *tiny_name(unsigned i)
{
    static char name[16];
    snprintf(name, sizeof name, "t%u", i);
    return name;
}

static void look_all(void)
{
    large = look("large", LARGE);
    little = look("little", LITTLE);
    for (unsigned i = 0; i < TINIES; i++)
        tiny[i] = look(tiny_name(i), TINY);
}

static void make_all(unsigned char content)
{
    make("large", LARGE, content);
    make("little", LITTLE, content);
    for (unsigned i = 0; i < TINIES; i++)
        make(tiny_name(i), TINY, content);
    CHECK(ok(pms_commit(pool, &e)));
}

static bool all_are(const struct view *v, unsigned char content)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < v->bytes; i++)
        wrong += v->at[i] != content;
    return wrong == 0;
}

static void check_all(unsigned char content)
{
    CHECK(all_are(&large, content));
    CHECK(all_are(&little, content));
    for (unsigned i = 0; i < TINIES; i++)
        CHECK(all_are(&tiny[i], content));
}

static void set_all(unsigned char content)
{
    memset(large.at, content, LARGE);
    memset(little.at, content, LITTLE);
    for (unsigned i = 0; i < TINIES; i++)
        memset(tiny[i].at, content, TINY);
}

static void shut(void) { CHECK(ok(pms_pool_close(pool, 0, &e))); }

static void let_go(void)
{
    pms_unpin(pool, large.off);
    pms_unpin(pool, little.off);
    for (unsigned i = 0; i < TINIES; i++)
        pms_unpin(pool, tiny[i].off);
}

/* Made before, and looked at: nothing of it was ever stored to in this session. */
static void open_seen(unsigned char content)
{
    CHECK(open_store(PMS_MODE_TRUNCATE));
    make_all(content);
    close_store();
    CHECK(open_store(PMS_MODE_READ_WRITE));
    look_all();
    check_all(content);
}

/* ---- the other process ---- */

static void rewrite(unsigned char content)
{
    struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain, .hot = 1};
    int status = pms_pool_open(path, &o, &pool, &e);
    if (status == PMS_OK && !pool->opened.info.clean)
        status = PMS_E_UNCLEAN;
    if (status == PMS_OK) {
        look_all();
        set_all(content);
        status = pms_pool_close(pool, 1, &e);
        let_go();
        pms_pool_release(pool);
    }
    unsigned char answer = (unsigned char)status;
    if (send(other, &answer, 1, 0) != 1)
        _exit(1);
}

static void serve(void)
{
    unsigned char asked[2];
    while (recv(other, asked, sizeof asked, MSG_WAITALL) == sizeof asked) {
        domain = asked[0];
        rewrite(asked[1]);
    }
    _exit(0);
}

static pid_t start_other(void)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        abort();
    pid_t child = fork();
    other = ends[child == 0];
    close(ends[child != 0]);
    if (child == 0)
        serve();
    return child;
}

/* The other process opens the store, which is clean, and writes over everything. */
static void others_rewrite(unsigned char content)
{
    unsigned char ask[2] = {(unsigned char)domain, content}, answer = 255;
    CHECK(send(other, ask, sizeof ask, 0) == sizeof ask);
    CHECK(recv(other, &answer, 1, MSG_WAITALL) == 1);
    CHECK(answer == PMS_OK);
}

/* ---- what the system says ---- */

/* Private memory of this process, in bytes. */
static uint64_t private_bytes(void)
{
    char line[256];
    uint64_t kib = 0, got;
    FILE *f = fopen("/proc/self/smaps_rollup", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "Anonymous: %lu kB", &got) == 1)
            kib = got;
    if (f)
        fclose(f);
    return kib * 1024;
}

static unsigned mappings(void)
{
    char line[512];
    unsigned n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    while (f && fgets(line, sizeof line, f))
        n++;
    if (f)
        fclose(f);
    return n;
}

static bool is_locked(void)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    bool locked = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0;
    close(fd);
    return locked;
}

static bool is_mapped(const void *at)
{
    unsigned char resident;
    return mincore((void *)(uintptr_t)at, PMS_PAGE, &resident) == 0;
}

/* Whether the system may read there: a wild pointer finds something. */
static bool is_readable(const void *at)
{
    int ends[2];
    CHECK(pipe(ends) == 0);
    bool readable = write(ends[1], at, 1) == 1;
    close(ends[0]);
    close(ends[1]);
    return readable;
}

static bool is_unlocked(const void *unused)
{
    (void)unused;
    return !is_locked();
}
static bool is_unmapped(const void *at) { return !is_mapped(at); }
static bool is_unreadable(const void *at) { return !is_readable(at); }

static bool becomes(bool (*so)(const void *at), const void *at)
{
    time_t end = time(NULL) + SECONDS;
    while (!so(at)) {
        if (time(NULL) > end)
            return false;
        usleep(1000);
    }
    return true;
}

/* ---- stories ---- */

static void views_stay(void)
{
    open_seen(1);
    shut();
    check_all(1);
    others_rewrite(2);
    check_all(1);
    let_go();
    pms_pool_release(pool);
}

static void views_of_all_kinds_of_pages_stay(void)
{
    open_seen(1);
    memset(large.at, 7, LARGE / 2); /* stored to and committed */
    CHECK(ok(pms_commit(pool, &e)));
    large.at[LARGE - 1] = 9; /* captured, and undone */
    little.at[5] = 9;
    struct pms_range declared = {(uint64_t)(uintptr_t)large.at + 3 * LARGE / 4, 64u << 10};
    CHECK(ok(pms_will_write(pool, &declared, 1, &e))); /* captured, and never stored to */
    shut();
    others_rewrite(2);
    large.at += LARGE / 2;
    large.bytes -= LARGE / 2;
    check_all(1);
    large.at -= LARGE / 2;
    large.bytes = LARGE / 2;
    CHECK(all_are(&large, 7));
    let_go();
    pms_pool_release(pool);
}

static void views_are_their_owners_alone(void)
{
    open_seen(1);
    shut();
    set_all(5);
    struct view l = large, s = little;
    struct pms_pool *before = pool;
    CHECK(open_store(PMS_MODE_READ_WRITE)); /* at once: it waits */
    CHECK(pool->opened.info.clean);
    look_all();
    check_all(1);
    set_all(3);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(all_are(&l, 5) && all_are(&s, 5));
    let_go();
    close_store();
    pool = before;
    CHECK(all_are(&l, 5) && all_are(&s, 5));
    let_go(); /* the same offsets */
    pms_pool_release(pool);
}

static void views_of_a_reader_stay(void)
{
    struct pms_options o = {.mode = PMS_MODE_READ, .hot = 1};
    open_seen(1);
    let_go();
    close_store();
    CHECK(ok(pms_pool_open(path, &o, &pool, &e)));
    look_all();
    shut();
    others_rewrite(2);
    check_all(1);
    let_go();
    pms_pool_release(pool);
}

struct storer {
    pthread_t thread;
    _Atomic bool *stop;
    unsigned char *at;
    uint64_t bytes;
    uint64_t lost;
    _Atomic uint64_t rounds;
};

/* Each word has what was stored last: no other thread stores there. (The mapping is replaced
 * beneath it, which ThreadSanitizer would take for a store.) */
__attribute__((no_sanitize("thread"))) static uint64_t store_once(volatile uint64_t *word,
                                                                  uint64_t *last, uint64_t n,
                                                                  uint64_t k)
{
    uint64_t lost = 0;
    for (uint64_t i = 0; i < n; i++) {
        lost += k > 0 && word[i * 509] != last[i];
        word[i * 509] = last[i] = k << 20 | i;
    }
    return lost;
}

static void *store_on(void *arg)
{
    struct storer *s = arg;
    uint64_t n = s->bytes / 8 / 509, *last = calloc(n, 8);
    if (!last)
        abort();
    for (uint64_t k = 0; !atomic_load(s->stop) || k < 2; k++, s->rounds++)
        s->lost += store_once((volatile uint64_t *)(void *)s->at, last, n, k);
    free(last);
    return NULL;
}

static void no_store_beside_a_close_is_lost(void)
{
    for (int round = 0; round < 4; round++) {
        _Atomic bool stop = false;
        struct storer s[2];
        open_seen(1);
        for (int i = 0; i < 2; i++) {
            s[i] = (struct storer){
                .stop = &stop, .at = i ? large.at + LARGE / 2 : large.at, .bytes = LARGE / 2};
            CHECK(pthread_create(&s[i].thread, NULL, store_on, &s[i]) == 0);
        }
        usleep((unsigned)round * 1500);
        /* what they stored so far is undone, and what they store afterwards is theirs */
        while (round % 2 && atomic_load(&s[0].rounds) + atomic_load(&s[1].rounds) == 0)
            sched_yield();
        CHECK(ok(pms_pool_close(pool, 1, &e)));
        others_rewrite(2);
        atomic_store(&stop, true);
        uint64_t lost = 0;
        for (int i = 0; i < 2; i++) {
            pthread_join(s[i].thread, NULL);
            lost += s[i].lost;
        }
        CHECK(lost == 0);
        CHECK(all_are(&little, 1));
        let_go();
        pms_pool_release(pool);
        /* and nothing of it came into the file */
        CHECK(open_store(PMS_MODE_READ_WRITE));
        look_all();
        check_all(2);
        let_go();
        close_store();
    }
}

static void views_give_their_memory_back(void)
{
    open_seen(1);
    uint64_t before = private_bytes();
    shut();
    CHECK(becomes(is_unlocked, NULL));
    uint64_t after = private_bytes();
    pms_unpin(pool, large.off);
    uint64_t given_back = after - private_bytes();
#ifndef __SANITIZE_THREAD__ /* it gives memory of its own back, for each mapping that goes */
    CHECK(after >= before + LARGE * 9 / 10);
    CHECK(after <= before + LARGE + 8 * MIB); /* and no second one */
    CHECK(given_back >= LARGE * 9 / 10);
#endif
    (void)before;
    (void)given_back;
    CHECK(is_mapped(little.at));
    memset(little.at, 3, LITTLE);
    for (unsigned i = 0; i < TINIES; i++)
        memset(tiny[i].at, 3, TINY);
    for (unsigned i = 0; i < TINIES; i += 2) /* neighbours on a page stay */
        pms_unpin(pool, tiny[i].off);
    CHECK(all_are(&little, 3));
    for (unsigned i = 1; i < TINIES; i += 2)
        CHECK(all_are(&tiny[i], 3));
    for (unsigned i = 1; i < TINIES; i += 2)
        pms_unpin(pool, tiny[i].off);
    pms_unpin(pool, little.off);
    CHECK(becomes(is_unmapped, little.at)); /* though the handle is still there */
    CHECK(pms_commit(pool, &e) == PMS_E_CLOSED);
    pms_pool_release(pool);
}

static void stored_views_need_no_second_memory(void)
{
    open_seen(1);
    memset(large.at, 2, LARGE);
    CHECK(ok(pms_commit(pool, &e)));
    uint64_t before = private_bytes();
    shut();
    CHECK(becomes(is_unlocked, NULL));
    if (domain == PMS_DOMAIN_FILE)
        CHECK(private_bytes() < before + LARGE / 4);
    CHECK(all_are(&large, 2));
    let_go();
    pms_pool_release(pool);
}

static void nothing_else_is_seen(void)
{
    CHECK(open_store(PMS_MODE_TRUNCATE));
    make_all(1);
    make("between", MIB, 1);
    make("last", MIB, 1);
    CHECK(ok(pms_commit(pool, &e)));
    struct view last = look("last", MIB), between = look("between", MIB);
    pms_unpin(pool, between.off);
    CHECK(is_readable(between.at));
    shut();
    CHECK(becomes(is_unreadable, between.at));
    CHECK(all_are(&last, 1));
    CHECK(becomes(is_unlocked, NULL));
    pms_unpin(pool, last.off);
    pms_pool_release(pool);
}

static void a_view_that_dies_is_not_copied(void)
{
    open_seen(1);
    shut();
    let_go(); /* whatever the thread is at */
    CHECK(becomes(is_unlocked, NULL));
    CHECK(becomes(is_unmapped, large.at));
    pms_pool_release(pool);
}

static void the_exit_copies_nothing(void)
{
    open_seen(1);
    uint64_t before = private_bytes();
    pms_unlock_exiting();
    shut();
    CHECK(is_locked());
    CHECK(private_bytes() < before + LARGE / 2);
    set_all(3);
    if (WAITS_NOT) /* it is waited for once */
        pms_unlock_hurry();
    others_rewrite(2); /* a program that goes on for all that: they wait */
    check_all(3);
    let_go();
    pms_pool_release(pool);
}

/* Its process dies with a view that was never copied. */
static void a_kill_after_the_close_leaves_it_clean(void)
{
    for (int round = 0; round < 4; round++) {
        open_seen(1);
        let_go();
        close_store();
        pid_t child = fork();
        if (child == 0) {
            alarm(SECONDS);
            if (!open_store(PMS_MODE_READ_WRITE))
                _exit(1);
            look_all();
            set_all(4);
            pms_unlock_exiting();
            if (pms_pool_close(pool, round % 2, &e) != PMS_OK)
                _exit(2);
            set_all(9); /* as a thread does that nobody stops */
            if (round / 2 == 0)
                kill(getpid(), SIGKILL);
            _exit(0);
        }
        int ws = 0;
        CHECK(waitpid(child, &ws, 0) == child);
        CHECK(round / 2 ? WIFEXITED(ws) && WEXITSTATUS(ws) == 0
                        : WIFSIGNALED(ws) && WTERMSIG(ws) == SIGKILL);
        CHECK(!is_locked());
        CHECK(open_store(PMS_MODE_READ_WRITE));
        CHECK(pool->opened.info.clean && pool->opened.info.undone_entries == 0);
        look_all();
        check_all(round % 2 ? 4 : 1);
        let_go();
        close_store();
    }
}

static void a_child_has_views_of_its_own(void)
{
    int go[2];
    for (int round = 0; round < 4; round++) {
        open_seen(1);
        if (round % 2)
            pms_unlock_exiting();
        CHECK(pipe(go) == 0);
        shut();
        pid_t child = fork(); /* while the thread copies */
        if (child == 0) {
            char byte;
            alarm(2 * SECONDS);
            close(go[1]);
            if (read(go[0], &byte, 1) != 1)
                _exit(3);
            int failed = test_checks_failed;
            check_all(1);
            set_all(6);
            pms_unpin(pool, little.off); /* a child's does nothing */
            check_all(6);
            _exit(test_checks_failed != failed);
        }
        set_all(5);
        others_rewrite(2);
        CHECK(write(go[1], "", 1) == 1);
        int ws = 0;
        CHECK(waitpid(child, &ws, 0) == child && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
        check_all(5);
        close(go[0]);
        close(go[1]);
        let_go();
        pms_pool_release(pool);
    }
}

static void on_alarm(int sig) { (void)sig; }

static void signals_come_meanwhile(void)
{
    struct sigaction sa = {.sa_handler = on_alarm}, was; /* no SA_RESTART */
    struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    sigaction(SIGALRM, &sa, &was);
    setitimer(ITIMER_REAL, &often, NULL);
    open_seen(1);
    shut();
    struct pms_pool *before = pool;
    int status;
    while ((status = pms_pool_open(
                path, &(struct pms_options){.mode = PMS_MODE_READ_WRITE, .domain = domain}, &pool,
                &e)) == PMS_E_LOCKED &&
           e.sys_errno == EINTR)
        ;
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &was, NULL);
    if (ok(status))
        close_store();
    pool = before;
    others_rewrite(2);
    check_all(1);
    let_go();
    pms_pool_release(pool);
}

/* ---- threads that hold views ---- */

struct holder {
    pthread_t thread;
    unsigned from, step;
    _Atomic bool *closed;
};

static void *hold_views(void *arg)
{
    struct holder *h = arg;
    while (!atomic_load(h->closed))
        sched_yield();
    for (unsigned i = h->from; i < TINIES; i += h->step) {
        struct view mine = tiny[i];
        CHECK(all_are(&mine, 1));
        memset(mine.at, 8, TINY);
        CHECK(all_are(&mine, 8));
        pms_unpin(pool, mine.off);
    }
    return NULL;
}

static void threads_let_go_while_it_is_copied(void)
{
    struct holder h[4];
    _Atomic bool closed = false;
    open_seen(1);
    for (unsigned i = 0; i < 4; i++) {
        h[i] = (struct holder){.from = i, .step = 4, .closed = &closed};
        CHECK(pthread_create(&h[i].thread, NULL, hold_views, &h[i]) == 0);
    }
    shut();
    atomic_store(&closed, true);
    for (unsigned i = 0; i < 4; i++)
        pthread_join(h[i].thread, NULL);
    others_rewrite(2);
    CHECK(all_are(&large, 1) && all_are(&little, 1));
    pms_unpin(pool, large.off);
    pms_unpin(pool, little.off);
    pms_pool_release(pool);
}

static void many_views_need_few_mappings(void)
{
    static struct view kept[SPREAD];
    char name[32];
    CHECK(open_store(PMS_MODE_TRUNCATE));
    for (unsigned i = 0; i < 2 * SPREAD; i++) {
        snprintf(name, sizeof name, "n%u", i);
        make(name, 100000, (unsigned char)i);
    }
    CHECK(ok(pms_commit(pool, &e)));
    unsigned before = mappings();
    for (unsigned i = 0; i < SPREAD; i++) {
        snprintf(name, sizeof name, "n%u", 2 * i);
        kept[i] = look(name, 100000);
    }
    shut();
    CHECK(becomes(is_unlocked, NULL));
    CHECK(mappings() < before + 600);
    for (unsigned i = 0; i < SPREAD; i++)
        CHECK(all_are(&kept[i], (unsigned char)(2 * i)));
    for (unsigned i = 0; i < SPREAD; i++) {
        pms_unpin(pool, kept[i].off);
        if (i + 1 < SPREAD)
            CHECK(all_are(&kept[i + 1], (unsigned char)(2 * (i + 1))));
    }
    pms_pool_release(pool);
}

static int parts_nothing(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    return primitive == PMS_PRIM_PROTECT && bytes < pool->map.bytes ? ENOMEM : 0;
}

/* The system cannot make views their owners' own: then nobody else writes the file, for as long as
 * they live. */
static void without_memory_it_stays_locked(void)
{
    open_seen(1);
    pms_persist_hook = parts_nothing;
    shut();
    pms_persist_hook = NULL;
    check_all(1);
    usleep(200000);
    CHECK(is_locked());
    pid_t child = fork(); /* which does not wait for it, and sees nothing */
    if (child == 0)
        _exit(is_readable(large.at));
    int ws = 0;
    CHECK(waitpid(child, &ws, 0) == child && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
    check_all(1);
    let_go();
    CHECK(becomes(is_unlocked, NULL));
    pms_pool_release(pool);
    others_rewrite(2);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they have one of their own \
                                                                     */
static _Atomic bool no_threads;

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    *(void **)&real = dlsym(RTLD_NEXT, "pthread_create");
    return no_threads ? EAGAIN : real(thread, attr, run, arg);
}

/* Nor is there a thread that waits for them: the last reference unlocks, and a fork afterwards
 * knows nothing of a store that is gone. */
static void without_a_thread_it_is_unlocked_at_last(void)
{
    open_seen(1);
    pms_persist_hook = parts_nothing;
    no_threads = true;
    shut();
    pms_persist_hook = NULL;
    no_threads = false;
    check_all(1);
    CHECK(is_locked());
    let_go();
    pms_pool_release(pool);
    CHECK(!is_locked());
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    int ws = 0;
    CHECK(waitpid(child, &ws, 0) == child && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
}
#endif

static void who_is_not_closed_is_not_waited_for(void)
{
    struct pms_options o = {.mode = PMS_MODE_READ, .hot = 1};
    struct pms_pool *second = NULL;
    open_seen(1);
    CHECK(pms_pool_open(path, &(struct pms_options){.mode = PMS_MODE_READ_WRITE}, &second, &e) ==
          PMS_E_LOCKED);
    CHECK(strstr(e.what, "closed") == NULL);
    let_go();
    close_store();
    CHECK(ok(pms_pool_open(path, &o, &pool, &e))); /* a clean file, and a lock that readers share */
    CHECK(pms_pool_open(path, &(struct pms_options){.mode = PMS_MODE_READ_WRITE}, &second, &e) ==
          PMS_E_LOCKED);
    close_store();
}

int main(void)
{
    const char *folder = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-test-outlive-%ld", folder, (long)getpid());
    pid_t child = start_other();
    for (size_t i = 0; i < sizeof domains / sizeof *domains; i++) {
        domain = domains[i];
        TEST(views_stay);
        TEST(views_of_all_kinds_of_pages_stay);
        TEST(views_are_their_owners_alone);
        TEST(views_of_a_reader_stay);
        TEST(no_store_beside_a_close_is_lost);
        TEST(views_give_their_memory_back);
        TEST(stored_views_need_no_second_memory);
        TEST(nothing_else_is_seen);
        TEST(a_view_that_dies_is_not_copied);
        TEST(the_exit_copies_nothing);
        TEST(a_kill_after_the_close_leaves_it_clean);
        TEST(a_child_has_views_of_its_own);
        TEST(signals_come_meanwhile);
        TEST(threads_let_go_while_it_is_copied);
        TEST(many_views_need_few_mappings);
        TEST(without_memory_it_stays_locked);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
        TEST(without_a_thread_it_is_unlocked_at_last);
#endif
        TEST(who_is_not_closed_is_not_waited_for);
    }
    close(other);
    CHECK(waitpid(child, NULL, 0) == child);
    unlink(path);
    return test_summary();
}
