#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "live/server.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "base/process.h"
#include "base/thread.h"
#include "live/visitor.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define UNSHARE 2u /* CLOSE_RANGE_UNSHARE */
#define STACK_BYTES (128u << 10)
#define DOORS_MAX 1024u
#define A_TURN 16         /* questions, before an attendant looks whether it is still needed */
#define OFFER_SECONDS 2   /* most that an open waits until its readers are answered */
#define SLEEP_MS 10000    /* the bell may not ring, where its caller has no descriptor left */
#define SLEEP_BESIDE 1000 /* an attendant's, who then looks whether its readers are there */

/* ---- doors ---- */

/* Where a store's readers ask. It is made by who offers the store, opened, and freed in the end, by
 * the porter. While it has an attendant that one alone uses what is the attendant's. */
struct pms_door {
    struct pms_door *next; /* under `mutex` */
    struct sockaddr_un address;
    socklen_t address_bytes;
    uint8_t secret[PMS_WIRE_KEY];
    int fd;                       /* of the threads' table. -1: not open */
    bool tried;                   /* under `mutex`: to open it */
    bool attended;                /* under `mutex`: it has an attendant */
    bool withdrawn;               /* under `mutex`: nobody but the threads know it any more */
    bool shut;                    /* the porter's: its attendant was told so */
    unsigned char *out;           /* the attendant's: room for an answer */
    pthread_mutex_t lock;         /* held over nothing that waits for another process */
    struct pms_served *store;     /* under `lock`. NULL: withdrawn */
    struct pms_visitors visitors; /* under `lock`. Some only while it has an attendant */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; /* a door was opened, or the porter has begun */
static enum { NOT_STARTED, STARTING, RUNNING, CANNOT } state;
static struct pms_door *doors;
static struct pms_sender bell; /* who knows its key and sends something to it wakes the porter */
static uint8_t bell_key[PMS_WIRE_KEY];

/* ---- sockets ---- */

/* A socket that takes what begins with the key. -1: there is none. */
static int listen_at(const struct pms_sender *at, const uint8_t key[PMS_WIRE_KEY])
{
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || (pms_wire_guard(fd, key) &&
                   bind(fd, (const struct sockaddr *)&at->address, at->bytes) == 0))
        return fd;
    close(fd);
    return -1;
}

static bool is_gone(const struct pms_sender *who)
{
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool gone = fd >= 0 && connect(fd, (const struct sockaddr *)&who->address, who->bytes) != 0 &&
                errno == ECONNREFUSED;
    if (fd >= 0)
        close(fd);
    return gone;
}

/* By a socket of its own: what a reader does not take counts against the socket that sent it, and
 * is in no other reader's way. */
static bool say(const struct pms_sender *who, struct iovec *what, size_t count)
{
    struct msghdr m = {.msg_name = (void *)(uintptr_t)&who->address,
                       .msg_namelen = who->bytes,
                       .msg_iov = what,
                       .msg_iovlen = count};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool said = fd >= 0 && sendmsg(fd, &m, 0) >= 0;
    if (fd >= 0)
        close(fd);
    return said;
}

/* A head and bytes behind it, in pieces. Where one does not go out the rest stays. */
static void answer_to(const struct pms_sender *who, unsigned char *out, size_t bytes)
{
    struct pms_answer head;
    memcpy(&head, out, sizeof head);
    for (size_t at = sizeof head, n; at < bytes || head.part == 0; at += n, head.part++) {
        n = bytes - at < PMS_WIRE_PIECE ? bytes - at : PMS_WIRE_PIECE;
        struct iovec what[2] = {{&head, sizeof head}, {out + at, n}};
        if (!say(who, what, 2))
            return;
    }
}

static void ring(void)
{
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    (void)!sendto(fd, bell_key, sizeof bell_key, 0, (const struct sockaddr *)&bell.address,
                  bell.bytes);
    close(fd);
}

/* ---- an attendant ---- */

static void hear(struct pms_door *d)
{
    struct pms_question q;
    struct pms_sender who;
    for (int i = 0; i < A_TURN; i++) {
        who.bytes = sizeof who.address;
        ssize_t n = recvfrom(d->fd, &q, sizeof q, MSG_TRUNC, (struct sockaddr *)&who.address,
                             &who.bytes);
        if (n < 0)
            return;
        pthread_mutex_lock(&d->lock);
        size_t bytes =
            d->store ? pms_visitors_answer(&d->visitors, d->store, &q, (size_t)n, &who, d->out) : 0;
        pthread_mutex_unlock(&d->lock);
        if (bytes)
            answer_to(&who, d->out, bytes);
    }
}

static bool look_after(struct pms_door *d)
{
    pthread_mutex_lock(&d->lock);
    pms_visitors_look(&d->visitors, is_gone);
    bool visited = d->visitors.count > 0;
    pthread_mutex_unlock(&d->lock);
    return visited;
}

static bool is_withdrawn(struct pms_door *d)
{
    pthread_mutex_lock(&mutex);
    bool withdrawn = d->withdrawn;
    pthread_mutex_unlock(&mutex);
    return withdrawn;
}

/* Until nobody asks any more. Then the door is the porter's again, and may be gone. */
static void *attend(void *arg)
{
    struct pms_door *d = arg;
    pthread_setname_np(pthread_self(), "pms-read");
    for (bool needed = true; needed && !is_withdrawn(d);) {
        struct pollfd wait = {d->fd, POLLIN, 0};
        bool visited = look_after(d);
        bool asked = poll(&wait, 1, SLEEP_BESIDE) > 0;
        if (asked)
            hear(d);
        needed = asked || visited;
    }
    free(d->out);
    pthread_mutex_lock(&mutex);
    d->attended = false;
    pthread_mutex_unlock(&mutex);
    ring();
    return NULL;
}

/* ---- the porter ---- */

static int bell_fd;

/* The first question of somebody. Where there is no thread for it nobody is answered: who asked
 * asks again. */
static void call_attendant(struct pms_door *d)
{
    d->out = malloc(sizeof(struct pms_answer) + PMS_WIRE_ANSWER);
    pthread_mutex_lock(&mutex);
    d->attended = true;
    pthread_mutex_unlock(&mutex);
    if (d->out &&
        pms_thread_start(NULL, (struct pms_thread_kind){STACK_BYTES, false}, attend, d) == 0)
        return;
    free(d->out);
    pthread_mutex_lock(&mutex);
    d->attended = false;
    pthread_mutex_unlock(&mutex);
    char byte;
    for (int i = 0; i < A_TURN && recv(d->fd, &byte, 1, 0) >= 0; i++)
        ;
}

/* Takes out those that were withdrawn and have no attendant; the others' are woken. REQUIRES:
 * mutex. */
static struct pms_door *take_withdrawn(void)
{
    struct pms_door *gone = NULL;
    for (struct pms_door **at = &doors, *d; (d = *at);) {
        if (d->withdrawn && d->attended && !d->shut)
            d->shut = shutdown(d->fd, SHUT_RDWR) == 0;
        if (d->withdrawn && !d->attended) {
            *at = d->next;
            d->next = gone;
            gone = d;
        } else {
            at = &d->next;
        }
    }
    return gone;
}

static void free_doors(struct pms_door *d)
{
    for (struct pms_door *next; d; d = next) {
        next = d->next;
        if (d->fd >= 0)
            close(d->fd);
        pthread_mutex_destroy(&d->lock);
        free(d);
    }
}

/* Opens and closes doors. Those that are open and have no attendant are told. */
static uint32_t set_doors(struct pms_door **waiting)
{
    uint32_t n = 0, open = 0;
    pthread_mutex_lock(&mutex);
    struct pms_door *gone = take_withdrawn();
    for (struct pms_door *d = doors; d; d = d->next) {
        if (!d->tried && open < DOORS_MAX)
            d->fd = listen_at(&(struct pms_sender){d->address, d->address_bytes}, d->secret);
        d->tried = true;
        open += d->fd >= 0;
        if (d->fd >= 0 && !d->attended)
            waiting[n++] = d;
    }
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    free_doors(gone); /* nobody waits for it here */
    return n;
}

static void silence_bell(void)
{
    char byte;
    for (int i = 0; i < A_TURN && recv(bell_fd, &byte, 1, 0) >= 0; i++)
        ;
}

static void turn(void)
{
    static struct pollfd wait[DOORS_MAX + 1]; /* not the thread's small stack */
    static struct pms_door *waiting[DOORS_MAX];
    uint32_t n = set_doors(waiting);
    for (uint32_t i = 0; i < n; i++)
        wait[i] = (struct pollfd){waiting[i]->fd, POLLIN, 0};
    wait[n] = (struct pollfd){bell_fd, POLLIN, 0};
    if (poll(wait, n + 1, SLEEP_MS) <= 0)
        return;
    for (uint32_t i = 0; i < n; i++)
        if (wait[i].revents)
            call_attendant(waiting[i]);
    if (wait[n].revents)
        silence_bell();
}

/* It holds none of the program's open, and takes none of its numbers. Attendants share it. */
static bool own_descriptors(void)
{
#ifdef __SANITIZE_THREAD__ /* which takes one number in two tables for one descriptor */
    return true;
#else
    return syscall(SYS_close_range, 0u, ~0u, UNSHARE) == 0;
#endif
}

static bool hang_bell(void)
{
    bell.address = (struct sockaddr_un){.sun_family = AF_UNIX}; /* the system finds a name */
    bell.bytes = sizeof bell.address.sun_family;
    if (getrandom(bell_key, sizeof bell_key, 0) != sizeof bell_key)
        return false;
    bell_fd = listen_at(&bell, bell_key);
    bell.bytes = sizeof bell.address;
    return bell_fd >= 0 && getsockname(bell_fd, (struct sockaddr *)&bell.address, &bell.bytes) == 0;
}

static void *run(void *arg)
{
    (void)arg;
    pthread_setname_np(pthread_self(), "pms-read");
    pthread_mutex_lock(&mutex);
    bool ready = own_descriptors() && hang_bell();
    state = ready ? RUNNING : CANNOT;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    while (ready)
        turn();
    return NULL;
}

/* ---- the program ---- */

/* REQUIRES: mutex. */
static void start(void)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&changed, &attr);
    pthread_condattr_destroy(&attr);
    state = STARTING;
    if (pms_thread_start(NULL, (struct pms_thread_kind){STACK_BYTES, false}, run, NULL) != 0)
        state = CANNOT;
}

static struct pms_door *new_door(struct pms_served *s)
{
    struct pms_door *d = calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->address_bytes = pms_wire_address(&d->address, s->device, s->inode, s->opened_ns);
    memcpy(d->secret, s->secret, sizeof d->secret);
    d->fd = -1;
    d->store = s;
    pthread_mutex_init(&d->lock, NULL);
    return d;
}

/* So that who opens a store and tells somebody can count on it. The porter may be held up: then
 * the door is opened when it comes to it. REQUIRES: mutex. */
static void wait_until_tried(const struct pms_door *d)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += OFFER_SECONDS;
    bool rung = false;
    while (!d->tried && (state == RUNNING || state == STARTING)) {
        if (state == RUNNING && !rung)
            ring();
        rung = state == RUNNING;
        if (pthread_cond_timedwait(&changed, &mutex, &until) != 0)
            return;
    }
}

void pms_serve(struct pms_served *s)
{
    s->process = pms_process_generation();
    s->door = new_door(s);
    if (!s->door)
        return;
    pthread_mutex_lock(&mutex);
    if (state == NOT_STARTED)
        start();
    s->door->next = doors;
    doors = s->door;
    wait_until_tried(s->door);
    pthread_mutex_unlock(&mutex);
}

void pms_serve_no_more(struct pms_served *s)
{
    struct pms_door *d = s->door;
    if (!d || s->process != pms_process_generation())
        return;
    s->door = NULL;
    pthread_mutex_lock(&d->lock);
    pms_visitors_close(&d->visitors);
    d->store = NULL;
    pthread_mutex_unlock(&d->lock);
    pthread_mutex_lock(&mutex);
    d->withdrawn = true;
    if (state == RUNNING)
        ring();
    else if (state == CANNOT)
        free_doors(take_withdrawn());
    pthread_mutex_unlock(&mutex);
}

void pms_serve_after_fork_in_child(void)
{
    /* other threads may have held it, and the porter did not come with us */
    pthread_mutex_init(&mutex, NULL);
    state = NOT_STARTED;
    doors = NULL;
}
