#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "seam/holder.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/process.h"
#include "base/thread.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define UNSHARE 2u /* CLOSE_RANGE_UNSHARE */
#define STACK_BYTES (128u << 10)

struct call {
    void (*fn)(struct call *call);
    const char *path;
    struct stat *st;
    int fd, flags, result, error;
    bool done;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER, answered = PTHREAD_COND_INITIALIZER;
static struct call *pending; /* one at a time */
static bool running;
static bool own_table;

static void *run(void *arg)
{
    (void)arg;
    pthread_setname_np(pthread_self(), "pms-lock");
    pthread_mutex_lock(&mutex);
    /* an empty one: nothing of the program's is kept open in it */
    own_table = syscall(SYS_close_range, 0u, ~0u, UNSHARE) == 0;
    for (;;) {
        while (!pending)
            pthread_cond_wait(&asked, &mutex);
        struct call *call = pending;
        pending = NULL;
        call->fn(call);
        call->error = errno;
        call->done = true;
        pthread_cond_broadcast(&answered);
    }
    return NULL;
}

/* REQUIRES: mutex. */
static int start(void)
{
    int err = pms_thread_start(NULL, (struct pms_thread_kind){STACK_BYTES, false}, run, NULL);
    running = err == 0;
    return err;
}

static int ask(struct call *call)
{
    pthread_mutex_lock(&mutex);
    int err = running ? 0 : start();
    while (!err && pending)
        pthread_cond_wait(&answered, &mutex);
    if (!err) {
        pending = call;
        pthread_cond_signal(&asked);
        while (!call->done)
            pthread_cond_wait(&answered, &mutex);
    }
    pthread_mutex_unlock(&mutex);
    errno = err ? err : call->error;
    return err ? -1 : call->result;
}

static void do_open(struct call *c)
{
    do
        c->result = own_table ? open(c->path, c->flags | O_CLOEXEC)
                              : pms_process_open(c->path, c->flags, 0);
    while (c->result < 0 && errno == EINTR);
}

static void do_close(struct call *c)
{
    flock(c->fd, LOCK_UN); /* a child forked just now has not closed its copy, where there is one */
    if (own_table)
        close(c->fd);
    else
        pms_process_close(c->fd);
}

static void do_stat(struct call *c) { c->result = fstat(c->fd, c->st); }
static void do_lock(struct call *c) { c->result = flock(c->fd, c->flags | LOCK_NB); }

int pms_holder_open(const char *path, int flags)
{
    return ask(&(struct call){.fn = do_open, .path = path, .flags = flags});
}
int pms_holder_stat(int fd, struct stat *st)
{
    return ask(&(struct call){.fn = do_stat, .fd = fd, .st = st});
}
int pms_holder_lock(int fd, int how)
{
    return ask(&(struct call){.fn = do_lock, .fd = fd, .flags = how});
}

void pms_holder_close(int fd)
{
    if (fd >= 0)
        ask(&(struct call){.fn = do_close, .fd = fd});
}

void pms_holder_after_fork_in_child(void)
{
    /* other threads may have held it, and the holder did not come with us */
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&asked, NULL);
    pthread_cond_init(&answered, NULL);
    pending = NULL;
    running = false;
}
