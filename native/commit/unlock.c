#include "commit/unlock.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/thread.h"
#include "commit/outlive.h"
#include "commit/pool_state.h"
#include "commit/refs.h"
#include "heap/index.h"
#include "seam/holder.h"

#define AT_ONCE (8ull << 20)        /* copied by the close itself: some milliseconds */
#define AT_ONCE_VIEW (256ull << 20) /* unmapped by it */
/* A large program may need seconds to end once it says so, and no memory for a copy then. Less than
 * others wait (filelock.c). */
#define GRACE_NS 10000000000ll
#define PAUSE_NS 1000000l
#define AGAIN_NS 100000000l /* where memory is short */
#define STACK_BYTES (128u << 10)

/* Stores whose views may show pages of the file. The lock is taken after an operation lock, and
 * from before a fork to after it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct pms_pool *list;
static _Atomic int64_t quiet_until;

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000ll + t.tv_nsec;
}

/* The program does, and may be gone before a copy is needed. */
static bool exits(void) { return now_ns() < atomic_load(&quiet_until); }
static void pause_for(long ns) { nanosleep(&(struct timespec){0, ns}, NULL); }

void pms_unlock_begin(struct pms_pool *pool)
{
    pthread_mutex_lock(&lock);
    pool->left.after = list;
    list = pool;
    pthread_mutex_unlock(&lock);
}

static void delist(struct pms_pool *pool)
{
    pthread_mutex_lock(&lock);
    struct pms_pool **at = &list;
    while (*at != pool)
        at = &(*at)->left.after;
    *at = pool->left.after;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void say_stuck(struct pms_pool *pool, bool stuck)
{
    pthread_mutex_lock(&lock);
    pool->left.stuck = stuck;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static void unlock_file(struct pms_pool *pool)
{
    delist(pool);
    pms_holder_close(pool->opened.lock_fd);
    pool->opened.lock_fd = -1;
}

static void copy(struct pms_pool *pool)
{
    for (bool more = true; more;) {
        int err = 0;
        while (exits())
            pause_for(PAUSE_NS);
        pthread_mutex_lock(&pool->gate.lock);
        more = pms_outlive_copy(pool, &err);
        pthread_mutex_unlock(&pool->gate.lock);
        say_stuck(pool, err != 0);
        more = more || err;
        pause_for(err ? AGAIN_NS : 1); /* who waits for the operation lock gets it */
    }
}

static void *work(void *arg)
{
    struct pms_pool *pool = arg;
    pthread_setname_np(pthread_self(), "pms-close");
    if (pool->opened.lock_fd >= 0) {
        copy(pool);
        unlock_file(pool);
    }
    pms_outlive_forgo(pool);
    pthread_mutex_lock(&pool->gate.lock);
    pms_outlive_end(pool);
    pthread_mutex_unlock(&pool->gate.lock);
    pms_pool_unref(pool);
    return NULL;
}

static bool start(struct pms_pool *pool)
{
    pool->refs++;
    bool started = pms_thread_start(NULL, (struct pms_thread_kind){STACK_BYTES, false}, work,
                                    pool) == 0;
    pool->refs -= !started;
    return started;
}

static bool is_little(const struct pms_pool *pool)
{
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < pool->left.count && bytes <= AT_ONCE; i++)
        bytes += pool->left.block[i].bytes;
    return bytes <= AT_ONCE;
}

void pms_unlock(struct pms_pool *pool)
{
    /* a reader's lock is shared: who waits for it would not see that it is closed */
    bool at_once = is_little(pool) || (pool->opened.read_only && !exits());
    int err = 0;
    while (at_once && pms_outlive_copy(pool, &err) && !err)
        ;
    if (at_once && !err)
        unlock_file(pool);
    if ((!at_once || err || pool->map.bytes > AT_ONCE_VIEW) && start(pool))
        return;
    while (!at_once && pms_outlive_copy(pool, &err) && !err)
        ;
    if (err) { /* neither memory nor a thread: it stays locked as long as anybody refers to it */
        say_stuck(pool, true);
        pool->left.at_last = unlock_file;
        return;
    }
    if (!at_once)
        unlock_file(pool);
    pms_outlive_forgo(pool);
    pms_outlive_end(pool);
}

/* ---- the end of the program, and forks ---- */

void pms_unlock_exiting(void) { atomic_store(&quiet_until, now_ns() + GRACE_NS); }
void pms_unlock_hurry(void) { atomic_store(&quiet_until, 0); }

static void before_fork(void)
{
    pms_unlock_hurry();
    pthread_mutex_lock(&lock);
    for (struct pms_pool *pool = list; pool;) {
        bool wait = !pool->left.stuck;
        if (wait)
            pthread_cond_wait(&changed, &lock);
        pool = wait ? list : pool->left.after;
    }
}

static void in_parent(void) { pthread_mutex_unlock(&lock); }

static void in_child(void)
{
    for (struct pms_pool *pool = list; pool; pool = pool->left.after)
        pms_map_hide(&pool->map);
    list = NULL;
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
}

static void install(void) { pthread_atfork(before_fork, in_parent, in_child); }

void pms_unlock_prepare_once(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, install);
}
