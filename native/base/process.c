#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

struct kept {
    struct kept *next;
    int fd;
};

/* no fork while the list and the open descriptors differ */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
static struct kept *list;
static _Atomic uint64_t generation = 1;
static struct pms_fork_hooks hooks;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void before_fork(void)
{
    pthread_mutex_lock(&gate);
    hooks.before();
}

static void after_fork(void)
{
    hooks.in_parent();
    pthread_mutex_unlock(&gate);
}

static void in_child(void)
{
    atomic_fetch_add(&generation, 1);
    for (struct kept *k = list; k; k = k->next)
        close(k->fd);
    list = NULL; /* not freed: the allocator's lock is not ours to count on */
    pthread_mutex_unlock(&gate);
    hooks.in_child();
}

static void install(void) { pthread_atfork(before_fork, after_fork, in_child); }

void pms_process_prepare(const struct pms_fork_hooks *h)
{
    pthread_mutex_lock(&gate); /* another thread, which prepared before, may fork now */
    hooks = *h;                /* the same each time */
    pthread_mutex_unlock(&gate);
    pthread_once(&once, install);
}

struct wanted {
    const char *path; /* NULL: a socket */
    int flags, domain, type;
    mode_t mode;
};

static int keep(const struct wanted *w)
{
    struct kept *k = malloc(sizeof *k);
    if (!k)
        return -1;
    pthread_mutex_lock(&gate);
    do
        k->fd = w->path ? open(w->path, w->flags | O_CLOEXEC, w->mode)
                        : socket(w->domain, w->type | SOCK_CLOEXEC, 0);
    while (k->fd < 0 && errno == EINTR);
    int fd = k->fd, err = errno;
    if (fd >= 0) {
        k->next = list;
        list = k;
    }
    pthread_mutex_unlock(&gate);
    if (fd < 0)
        free(k);
    errno = err;
    return fd;
}

int pms_process_open(const char *path, int flags, mode_t mode)
{
    return keep(&(struct wanted){.path = path, .flags = flags, .mode = mode});
}

int pms_process_socket(int domain, int type)
{
    return keep(&(struct wanted){.domain = domain, .type = type});
}

void pms_process_close(int fd)
{
    if (fd < 0)
        return;
    pthread_mutex_lock(&gate);
    struct kept **at = &list, *k = NULL;
    while (*at && (*at)->fd != fd)
        at = &(*at)->next;
    if (*at) {
        k = *at;
        *at = k->next;
    }
    close(fd);
    pthread_mutex_unlock(&gate);
    free(k);
}

ssize_t pms_process_read(const char *path, char *text, size_t room)
{
    int fd;
    ssize_t n = -1;
    do
        fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    do
        n = fd < 0 ? -1 : read(fd, text, room - 1);
    while (n < 0 && fd >= 0 && errno == EINTR);
    int err = errno;
    if (fd >= 0)
        close(fd);
    errno = err;
    text[n > 0 ? n : 0] = 0;
    return n;
}

uint64_t pms_process_generation(void)
{
    return atomic_load_explicit(&generation, memory_order_relaxed);
}
