#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "live/server.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/pages.h"
#include "base/thread.h"
#include "live/wire.h"
#include "log/snapshot.h"

#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define UNSHARE 2u /* CLOSE_RANGE_UNSHARE */
#define STACK_BYTES (128u << 10)
#define STORES_MAX 1024u
#define READERS_MAX 256u
#define BACKLOG 64
/* what is kept for a reader that did not ask for more: a poll a second costs a commit of anything
 * not more than a few per cent of that second */
#define BOUND_SHARE 4u
#define BOUND_MIN (4ull << 20)
#define BOUND_MAX (64ull << 20)
/* a reader that says nothing for so long needs no snapshot: it may ask for the same again */
#define IDLE_MS 10000
#define IDLE_KEPT_MS 60000

/* ---- one reader ---- of the thread alone ---- */

struct reader {
    int fd;
    struct pms_served *store;
    bool may_read;
    struct pms_snapshot *snapshot; /* or NULL: none was asked for, or it was idle */
    uint64_t tag;                  /* of the one that was asked for; 0: none */
    bool keep;
    int64_t heard_ms;
    /* the question, as far as it has come */
    struct {
        struct pms_question head;
        struct pms_part range[PMS_WIRE_RANGES];
    } in;
    size_t in_bytes;
    /* what of it is still to be answered */
    uint32_t range;
    uint64_t range_done;
    bool answering;
    /* the answer that is on its way */
    unsigned char *out; /* an answer's head and PMS_WIRE_PIECE bytes */
    size_t out_bytes, out_sent;
};

static struct reader *reader[READERS_MAX]; /* the thread's alone */
static uint32_t readers;

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void unpin(struct reader *r)
{
    if (r->snapshot)
        pms_snapshot_close(r->snapshot);
    r->snapshot = NULL;
}

static void part_with(uint32_t i)
{
    struct reader *r = reader[i];
    unpin(r);
    close(r->fd);
    free(r->out);
    free(r);
    reader[i] = reader[--readers];
}

/* It may come again. Those who have not shown that they may read the store are nobody's, and go
 * first. */
static uint32_t longest_silent(void)
{
    uint32_t found = 0;
    for (uint32_t i = 1; i < readers; i++) {
        const struct reader *r = reader[i], *other = reader[found];
        if (r->may_read == other->may_read ? r->heard_ms < other->heard_ms : !r->may_read)
            found = i;
    }
    return found;
}

static void welcome(struct pms_served *store)
{
    int fd = accept4(store->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    /* a place is left for descriptors that readers send: else nobody could show that he may read */
    int spare = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 0);
    bool full = spare < 0 && (errno == EMFILE || errno == ENFILE); /* who waits is asked again */
    if (spare >= 0)
        close(spare);
    if (readers && (full || readers == READERS_MAX))
        part_with(longest_silent());
    if (fd < 0)
        return;
    struct reader *r = calloc(1, sizeof *r);
    if (!r) {
        close(fd); /* it tries again */
        return;
    }
    r->fd = fd;
    r->store = store;
    r->heard_ms = now_ms();
    reader[readers++] = r;
}

/* ---- pinning ---- */

static uint64_t bound(const struct pms_superblock *super, bool keep)
{
    uint64_t state = 0;
    for (uint32_t i = 0; i < super->segment_count; i++)
        state += super->segment[i].data_pages * PMS_PAGE;
    uint64_t share = state / BOUND_SHARE;
    share = share < BOUND_MIN ? BOUND_MIN : share > BOUND_MAX ? BOUND_MAX : share;
    return keep ? state : share;
}

/* A snapshot of the last commit, with the superblock that knows all of it. */
static int pin(struct reader *r, struct pms_superblock *super)
{
    struct pms_undo *u = r->store->undo;
    for (;;) {
        pms_undo_lock(u);
        *super = *r->store->super;
        pms_undo_unlock(u);
        int status = pms_snapshot_open(u, super, bound(super, r->keep), 0, &r->snapshot, NULL);
        if (status != PMS_OK)
            return status;
        pms_undo_lock(u);
        bool grown = r->store->super->generation != super->generation;
        pms_undo_unlock(u);
        if (!grown)
            return PMS_OK;
        unpin(r);
    }
}

/* The one that was given back as idle, if nothing was committed since. */
static int pin_again(struct reader *r)
{
    struct pms_superblock super;
    int status = r->tag ? pin(r, &super) : PMS_E_STATE;
    if (status == PMS_OK && pms_snapshot_tag(r->snapshot) != r->tag) {
        unpin(r);
        r->tag = 0;
        status = PMS_E_STATE;
    }
    return status;
}

/* ---- answering ---- */

/* The answer that goes out next, of bytes that lie behind its head already. */
static void answer(struct reader *r, int status, size_t bytes)
{
    struct pms_answer head = {PMS_WIRE_MAGIC, status, status == PMS_OK ? bytes : 0};
    memcpy(r->out, &head, sizeof head);
    r->out_bytes = sizeof head + (size_t)head.bytes;
    r->out_sent = 0;
    if (status != PMS_OK)
        r->answering = false;
}

static void answer_pin(struct reader *r)
{
    struct pms_superblock super;
    unpin(r);
    r->keep = r->in.head.keep != 0;
    r->tag = 0;
    int status = pin(r, &super);
    if (status == PMS_OK) {
        r->tag = pms_snapshot_tag(r->snapshot);
        memcpy(r->out + sizeof(struct pms_answer), &super, sizeof super);
    }
    r->answering = false;
    answer(r, status, sizeof super);
}

static void answer_epoch(struct reader *r)
{
    uint64_t epoch = atomic_load(r->store->epoch);
    memcpy(r->out + sizeof(struct pms_answer), &epoch, sizeof epoch);
    r->answering = false;
    answer(r, PMS_OK, sizeof epoch);
}

/* The next piece of the range that it is at. What was sent is not kept for it any longer. */
static void answer_read(struct reader *r)
{
    const struct pms_part *x = &r->in.range[r->range];
    uint64_t off = x->off + r->range_done, left = x->bytes - r->range_done;
    uint64_t bytes = left < PMS_WIRE_PIECE ? left : PMS_WIRE_PIECE;
    int status = r->snapshot ? PMS_OK : pin_again(r);
    if (status == PMS_OK)
        status = pms_snapshot_read(r->snapshot, off, bytes, r->out + sizeof(struct pms_answer),
                                   NULL);
    if (status == PMS_OK)
        pms_snapshot_release(r->snapshot, off, bytes);
    r->range_done += bytes;
    if (r->range_done == x->bytes) {
        r->range++;
        r->range_done = 0;
    }
    r->answering = r->range < r->in.head.count;
    answer(r, status, bytes);
}

static bool make_answer(struct reader *r)
{
    if (!r->out)
        r->out = malloc(sizeof(struct pms_answer) + PMS_WIRE_PIECE);
    if (!r->out)
        return false;
    if (r->in.head.op == PMS_WIRE_PIN)
        answer_pin(r);
    else if (r->in.head.op == PMS_WIRE_EPOCH)
        answer_epoch(r);
    else
        answer_read(r);
    return true;
}

/* ---- asking ---- */

/* Takes what has come, and a descriptor that came with it. < 0: it is gone, or not a reader. */
static ssize_t take_in(struct reader *r, size_t wanted)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec to = {(char *)&r->in + r->in_bytes, wanted - r->in_bytes};
    /* for one descriptor: with its padding there would be room for another */
    struct msghdr m = {.msg_iov = &to,
                       .msg_iovlen = 1,
                       .msg_control = &control,
                       .msg_controllen = CMSG_LEN(sizeof(int))};
    ssize_t n = recvmsg(r->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        int fd;
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS ||
            c->cmsg_len != CMSG_LEN(sizeof fd))
            return -1; /* several do not come: the system closes those that there is no room for */
        memcpy(&fd, CMSG_DATA(c), sizeof fd);
        r->may_read |= pms_wire_may_read(fd, r->store->device, r->store->inode);
        close(fd);
    }
    if (n == 0)
        return -1;
    r->in_bytes += (size_t)n;
    return n;
}

static bool is_sound(const struct reader *r)
{
    uint64_t pages = r->store->undo->map->reserve / PMS_PAGE;
    for (uint32_t i = 0; i < r->in.head.count; i++) {
        const struct pms_part *x = &r->in.range[i];
        if (x->off % PMS_PAGE || x->bytes % PMS_PAGE || !x->bytes || x->off / PMS_PAGE >= pages ||
            x->bytes / PMS_PAGE > pages - x->off / PMS_PAGE)
            return false;
    }
    return true;
}

/* false: it is gone, or asks what no reader does. */
static bool listen_to(struct reader *r)
{
    size_t wanted = sizeof r->in.head;
    if (r->in_bytes < wanted && take_in(r, wanted) < 0)
        return false;
    if (r->in_bytes < wanted)
        return true;
    const struct pms_question *q = &r->in.head;
    bool read = q->op == PMS_WIRE_READ;
    if (q->magic != PMS_WIRE_MAGIC || !r->may_read || q->op < PMS_WIRE_PIN ||
        q->op > PMS_WIRE_EPOCH || q->count > PMS_WIRE_RANGES || read != (q->count > 0))
        return false;
    wanted += q->count * sizeof r->in.range[0];
    if (r->in_bytes < wanted && take_in(r, wanted) < 0)
        return false;
    if (r->in_bytes < wanted)
        return true;
    if (!is_sound(r))
        return false;
    r->in_bytes = 0;
    r->range = 0;
    r->range_done = 0;
    r->answering = true;
    r->heard_ms = now_ms();
    return true;
}

/* As much as it takes now. false: it is gone. */
static bool talk_to(struct reader *r)
{
    if (r->out_sent == r->out_bytes && (!r->answering || !make_answer(r)))
        return !r->answering;
    ssize_t n = send(r->fd, r->out + r->out_sent, r->out_bytes - r->out_sent,
                     MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0)
        return errno == EAGAIN || errno == EINTR;
    r->out_sent += (size_t)n;
    r->heard_ms = now_ms();
    return true;
}

static bool has_to_say(const struct reader *r)
{
    return r->answering || r->out_sent < r->out_bytes;
}

static void let_idle_go(void)
{
    int64_t now = now_ms();
    for (uint32_t i = 0; i < readers; i++)
        if (now - reader[i]->heard_ms > (reader[i]->keep ? IDLE_KEPT_MS : IDLE_MS))
            unpin(reader[i]);
}

/* ---- the thread ---- */

struct call { /* of another thread: one at a time */
    int (*fn)(struct pms_served *s);
    struct pms_served *store;
    bool done;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t answered = PTHREAD_COND_INITIALIZER;
static struct call *pending;
static enum { NOT_STARTED, RUNNING, CANNOT } state;
static struct sockaddr_un bell; /* who connects to it wakes the thread */
static socklen_t bell_bytes;
static struct pms_served *served; /* the thread's alone, from here on */
static uint32_t stores;           /* so many */
static int bell_fd;

static int listen_at(const struct sockaddr_un *address, socklen_t bytes)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && bind(fd, (const struct sockaddr *)address, bytes) == 0 &&
        listen(fd, BACKLOG) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

static int add(struct pms_served *s)
{
    struct sockaddr_un address;
    socklen_t bytes = pms_wire_address(&address, s->device, s->inode, s->opened_ns);
    s->listener = stores < STORES_MAX ? listen_at(&address, bytes) : -1;
    if (s->listener < 0)
        return -1;
    s->next = served;
    served = s;
    stores++;
    return 0;
}

static int take_away(struct pms_served *s)
{
    struct pms_served **at = &served;
    while (*at && *at != s)
        at = &(*at)->next;
    if (!*at)
        return -1;
    *at = s->next;
    for (uint32_t i = readers; i-- > 0;)
        if (reader[i]->store == s)
            part_with(i);
    close(s->listener);
    stores--;
    return 0;
}

static void answer_calls(void)
{
    pthread_mutex_lock(&mutex);
    if (pending) {
        pending->store->offered = pending->fn(pending->store) == 0 && pending->fn == add;
        pending->done = true;
        pending = NULL;
        pthread_cond_broadcast(&answered);
    }
    pthread_mutex_unlock(&mutex);
}

static void silence_bell(void)
{
    for (int fd; (fd = accept4(bell_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0;)
        close(fd);
}

static void wait_and_answer(void)
{
    static struct pollfd wait[1 + STORES_MAX + READERS_MAX]; /* not the thread's small stack */
    struct pms_served *store[STORES_MAX];
    nfds_t n = 0, known = readers;
    wait[n++] = (struct pollfd){bell_fd, POLLIN, 0};
    for (struct pms_served *s = served; s; s = s->next) {
        store[n - 1] = s;
        wait[n++] = (struct pollfd){s->listener, POLLIN, 0};
    }
    for (nfds_t i = 0; i < known; i++)
        wait[n++] = (struct pollfd){reader[i]->fd,
                                    (short)(has_to_say(reader[i]) ? POLLOUT : POLLIN), 0};
    /* the bell may not ring, where its caller has no descriptor left */
    if (poll(wait, n, readers ? 1000 : 10000) < 0)
        return;
    for (nfds_t i = known; i-- > 0;) { /* the last one takes the place of one that goes */
        short got = wait[1 + stores + i].revents;
        if (got && !(has_to_say(reader[i]) ? talk_to(reader[i]) : listen_to(reader[i])))
            part_with((uint32_t)i);
    }
    for (nfds_t i = 0; i < stores; i++)
        if (wait[1 + i].revents)
            welcome(store[i]);
    if (wait[0].revents)
        silence_bell();
    let_idle_go();
}

/* It holds none of the program's open, and takes none of its numbers. */
static bool own_descriptors(void)
{
#ifdef __SANITIZE_THREAD__ /* which takes one number in two tables for one descriptor */
    return true;
#else
    return syscall(SYS_close_range, 0u, ~0u, UNSHARE) == 0;
#endif
}

static void *run(void *arg)
{
    (void)arg;
    pthread_setname_np(pthread_self(), "pms-read");
    pthread_mutex_lock(&mutex);
    struct sockaddr_un any = {.sun_family = AF_UNIX}; /* the system finds a name */
    bool ready = own_descriptors() && (bell_fd = listen_at(&any, sizeof any.sun_family)) >= 0;
    bell_bytes = sizeof bell;
    ready = ready && getsockname(bell_fd, (struct sockaddr *)&bell, &bell_bytes) == 0;
    state = ready ? RUNNING : CANNOT;
    pthread_cond_broadcast(&answered);
    pthread_mutex_unlock(&mutex);
    while (ready) {
        answer_calls();
        wait_and_answer();
    }
    return NULL;
}

/* REQUIRES: mutex. */
static void start(void)
{
    if (pms_thread_start(NULL, (struct pms_thread_kind){STACK_BYTES, false}, run, NULL) != 0)
        state = CANNOT;
    while (state == NOT_STARTED)
        pthread_cond_wait(&answered, &mutex);
}

static void ring(void)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    (void)!connect(fd, (const struct sockaddr *)&bell, bell_bytes);
    close(fd);
}

static void ask(int (*fn)(struct pms_served *s), struct pms_served *s)
{
    struct call call = {.fn = fn, .store = s};
    pthread_mutex_lock(&mutex);
    if (state == NOT_STARTED)
        start();
    while (state == RUNNING && pending)
        pthread_cond_wait(&answered, &mutex);
    if (state == RUNNING) {
        pending = &call;
        ring();
        while (!call.done)
            pthread_cond_wait(&answered, &mutex);
    }
    pthread_mutex_unlock(&mutex);
}

void pms_serve(struct pms_served *s)
{
    s->offered = false;
    ask(add, s);
}

void pms_serve_no_more(struct pms_served *s)
{
    if (s->offered)
        ask(take_away, s);
    s->offered = false;
}

void pms_serve_after_fork_in_child(void)
{
    /* other threads may have held it, and the thread did not come with us */
    pthread_mutex_init(&mutex, NULL);
    pthread_cond_init(&answered, NULL);
    pending = NULL;
    state = NOT_STARTED;
    served = NULL;
    stores = readers = 0;
}
