#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* struct ucred */
#endif
#include "live/client.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "base/process.h"
#include "base/status.h"

#define SECOND_NS 1000000000ll
#define PATIENCE_NS (10 * SECOND_NS) /* a writer that does not answer for so long is stopped */
#define LEAST_RATE (4ll << 20)       /* bytes in a second, that it answers at least */
#define LOST_NS SECOND_NS            /* an answer of which nothing came for so long was lost */
#define SLICE_MS 50                  /* so often it is looked whether the writer is there */
#define AFTER_SIGNAL_NS                                                         \
    (SECOND_NS / 2) /* an answer comes sooner: what a timer's signals interrupt \
                       is not begun again and again */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND_NS + t.tv_nsec;
}

/* The descriptor is still ours: a program may have closed all that it does not know. */
static bool is_ours(const struct pms_client *c)
{
    struct stat st;
    return c->socket >= 0 && fstat(c->socket, &st) == 0 && S_ISSOCK(st.st_mode) &&
           st.st_ino == c->socket_inode;
}

static bool is_there(const struct pms_client *c)
{
    int fd = pms_process_socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK);
    bool refused = fd >= 0 &&
                   connect(fd, (const struct sockaddr *)&c->writer, c->writer_bytes) != 0 &&
                   errno == ECONNREFUSED;
    pms_process_close(fd);
    return !refused;
}

/* With an address that the system finds, and deaf to all who do not know the key. */
static bool listen_with(struct pms_client *c)
{
    const struct sockaddr_un any = {.sun_family = AF_UNIX};
    struct timeval slice = {.tv_usec = SLICE_MS * 1000};
    struct stat own;
    int on = 1;
    c->socket = pms_process_socket(AF_UNIX, SOCK_DGRAM);
    bool good = c->socket >= 0 && getrandom(c->key, sizeof c->key, 0) == sizeof c->key &&
                pms_wire_guard(c->socket, c->key) &&
                setsockopt(c->socket, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0 &&
                setsockopt(c->socket, SOL_SOCKET, SO_SNDTIMEO, &slice, sizeof slice) == 0 &&
                bind(c->socket, (const struct sockaddr *)&any, sizeof any.sun_family) == 0 &&
                fstat(c->socket, &own) == 0;
    c->socket_inode = good ? own.st_ino : 0;
    return good;
}

int pms_client_open(struct pms_client *c, int fd, const struct pms_session *session,
                    struct pms_error *error)
{
    struct stat st;
    *c = (struct pms_client){.socket = -1};
    if (fstat(fd, &st) != 0)
        return pms_fail_errno(error, "looking at the store's file");
    c->owner = st.st_uid;
    c->writer_bytes = pms_wire_address(&c->writer, st.st_dev, st.st_ino, session->opened_ns);
    memcpy(c->secret, session->secret, sizeof c->secret);
    if (!is_there(c))
        return pms_fail(error, PMS_E_LOCKED, "it does not answer readers");
    if (listen_with(c))
        return PMS_OK;
    int status = pms_fail_errno(error, "making a socket to ask the store's writer");
    pms_client_close(c);
    return status;
}

void pms_client_begin(struct pms_client *c, uint64_t bytes)
{
    c->signal_ns = 0;
    c->until_ns = now_ns() + PATIENCE_NS + (int64_t)(bytes / LEAST_RATE) * SECOND_NS;
}

/* ---- waiting ---- */

/* Before each wait, which takes a slice at most. PMS_HEARD_ANSWER: it may be waited. */
static enum pms_heard look_at_clock(const struct pms_client *c)
{
    int64_t now = now_ns();
    if (c->signal_ns && now - c->signal_ns > AFTER_SIGNAL_NS)
        return PMS_HEARD_SIGNAL;
    return now >= c->until_ns ? PMS_HEARD_NOTHING : PMS_HEARD_ANSWER;
}

static void note_signal(struct pms_client *c)
{
    if (!c->signal_ns)
        c->signal_ns = now_ns();
}

static enum pms_heard say(struct pms_client *c, const struct pms_question *q)
{
    size_t bytes = PMS_WIRE_HEAD + q->count * sizeof q->range[0];
    enum pms_heard heard;
    while ((heard = look_at_clock(c)) == PMS_HEARD_ANSWER) {
        if (sendto(c->socket, q, bytes, 0, (const struct sockaddr *)&c->writer, c->writer_bytes) >=
            0)
            return PMS_HEARD_ANSWER;
        if (errno == EINTR)
            note_signal(c);
        else if (errno != EAGAIN) /* so many wait before us */
            return PMS_HEARD_END;
    }
    return heard;
}

/* Until something is there. */
static enum pms_heard wait_for_any(struct pms_client *c)
{
    int64_t lost = now_ns() + LOST_NS;
    enum pms_heard heard;
    while ((heard = look_at_clock(c)) == PMS_HEARD_ANSWER) {
        struct pollfd wait = {c->socket, POLLIN, 0};
        int n = poll(&wait, 1, SLICE_MS);
        if (n > 0)
            return PMS_HEARD_ANSWER;
        if (n < 0)
            note_signal(c);
        else if (!is_there(c))
            return PMS_HEARD_END;
        else if (now_ns() >= lost)
            return PMS_HEARD_LOSS;
    }
    return heard;
}

/* ---- answers ---- */

/* Who may write the store, as far as the system tells: its owner, root, or this user. */
static bool is_trusted(const struct pms_client *c, struct msghdr *m)
{
    struct ucred who;
    struct cmsghdr *h = CMSG_FIRSTHDR(m);
    if (!h || h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_CREDENTIALS ||
        h->cmsg_len != CMSG_LEN(sizeof who))
        return false;
    memcpy(&who, CMSG_DATA(h), sizeof who);
    return who.uid == 0 || who.uid == c->owner || who.uid == geteuid();
}

/* The head of what has come, which stays. A descriptor that came with it is not taken, and not
 * closed either, for nobody knows how long that takes: the socket is left as it is. */
static enum pms_heard peek(struct pms_client *c, struct pms_answer *a)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct iovec to = {a, sizeof *a};
    struct msghdr m = {
        .msg_iov = &to, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n = recvmsg(c->socket, &m, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0)
        return PMS_HEARD_END;
    if (m.msg_flags & MSG_CTRUNC) {
        c->socket = -1;
        return PMS_HEARD_NONSENSE;
    }
    if (!is_trusted(c, &m))
        return PMS_HEARD_STRANGER;
    return n == sizeof *a && a->magic == PMS_WIRE_MAGIC ? PMS_HEARD_ANSWER : PMS_HEARD_NONSENSE;
}

/* Bytes [from, from + bytes) of what goes there. */
static enum pms_heard take(struct pms_client *c, const struct iovec *to, uint32_t count,
                           size_t from, size_t bytes)
{
    struct pms_answer head;
    struct iovec into[1 + PMS_WIRE_RANGES] = {{&head, sizeof head}};
    struct msghdr m = {.msg_iov = into, .msg_iovlen = 1};
    size_t left = bytes;
    for (uint32_t i = 0; i < count && left; i++) {
        size_t skip = from < to[i].iov_len ? from : to[i].iov_len, n = to[i].iov_len - skip;
        n = n < left ? n : left;
        from -= skip;
        left -= n;
        if (n)
            into[m.msg_iovlen++] = (struct iovec){(char *)to[i].iov_base + skip, n};
    }
    ssize_t n = recvmsg(c->socket, &m, MSG_DONTWAIT | MSG_TRUNC);
    return n == (ssize_t)(sizeof head + bytes) ? PMS_HEARD_ANSWER : PMS_HEARD_NONSENSE;
}

/* The head of what belongs to the last question. */
static enum pms_heard next_head(struct pms_client *c, struct pms_answer *a)
{
    for (;;) {
        enum pms_heard heard = wait_for_any(c);
        if (heard == PMS_HEARD_ANSWER)
            heard = peek(c, a);
        if (heard != PMS_HEARD_ANSWER || a->serial == c->serial)
            return heard;
        (void)!recv(c->socket, a, sizeof *a, MSG_DONTWAIT); /* to a question that was given up */
    }
}

static enum pms_heard receive(struct pms_client *c, const struct iovec *to, uint32_t count)
{
    struct pms_answer a;
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += to[i].iov_len;
    for (size_t at = 0, n; at < bytes; at += n) {
        enum pms_heard heard = next_head(c, &a);
        if (heard != PMS_HEARD_ANSWER)
            return heard;
        if (a.status != PMS_OK)
            return PMS_HEARD_REFUSAL;
        if (a.bytes != bytes)
            return PMS_HEARD_NONSENSE;
        if (a.part != at / PMS_WIRE_PIECE)
            return PMS_HEARD_LOSS;
        n = bytes - at < PMS_WIRE_PIECE ? bytes - at : PMS_WIRE_PIECE;
        heard = take(c, to, count, at, n);
        if (heard != PMS_HEARD_ANSWER)
            return heard;
    }
    c->taken = c->serial;
    return PMS_HEARD_ANSWER;
}

static void fill(struct pms_client *c, struct pms_question *q)
{
    memcpy(q->secret, c->secret, sizeof q->secret);
    memcpy(q->reader, c->key, sizeof q->reader);
    q->serial = ++c->serial;
    q->taken = c->taken;
    q->magic = PMS_WIRE_MAGIC;
}

enum pms_heard pms_client_ask(struct pms_client *c, struct pms_question *q, const struct iovec *to,
                              uint32_t count)
{
    if (!is_ours(c))
        return PMS_HEARD_CLOSED;
    enum pms_heard heard;
    do {
        fill(c, q);
        heard = say(c, q);
        if (heard == PMS_HEARD_ANSWER)
            heard = receive(c, to, count);
    } while (heard == PMS_HEARD_LOSS);
    return heard;
}

void pms_client_close(struct pms_client *c)
{
    struct pms_question q = {.op = PMS_WIRE_END};
    if (c->serial && is_ours(c)) {
        fill(c, &q);
        (void)!sendto(c->socket, &q, PMS_WIRE_HEAD, MSG_DONTWAIT,
                      (const struct sockaddr *)&c->writer, c->writer_bytes);
    }
    if (is_ours(c))
        pms_process_close(c->socket);
    c->socket = -1;
}
