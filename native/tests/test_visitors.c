/* What is said to a writer by who is no reader of its store, or a bad one: strangers are not heard,
 * what no reader asks for has no answer, and none is in another's way. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "equal_items.h"
#include "live/wire.h"

static struct pms_pool *open_as(int mode)
{
    struct pms_options o = {.size = 1u << 20,
                            .mode = mode,
                            .domain = PMS_DOMAIN_AUTO,
                            .hot = 1,
                            .beside = mode == PMS_MODE_READ};
    struct pms_pool *p = NULL;
    struct pms_error e = {0};
    if (pms_pool_open(path, &o, &p, &e) != PMS_OK)
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
    return p;
}

struct asker {
    int fd;
    struct sockaddr_un writer;
    socklen_t writer_bytes;
    struct pms_question q; /* a good one, of which parts are changed */
};

static struct asker new_asker(const struct pms_pool *writer)
{
    struct asker a = {.fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)};
    const struct pms_served *s = &writer->served;
    struct sockaddr_un any = {.sun_family = AF_UNIX};
    struct timeval most = {20, 0};
    CHECK(bind(a.fd, (const struct sockaddr *)&any, sizeof any.sun_family) == 0);
    CHECK(setsockopt(a.fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most) == 0);
    a.writer_bytes = pms_wire_address(&a.writer, s->device, s->inode, s->opened_ns);
    memcpy(a.q.secret, s->secret, PMS_WIRE_KEY);
    memset(a.q.reader, 7, PMS_WIRE_KEY);
    a.q.magic = PMS_WIRE_MAGIC;
    a.q.op = PMS_WIRE_EPOCH;
    return a;
}

static void say(const struct asker *a, const void *data, size_t bytes, int with_fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec from = {(void *)(uintptr_t)data, bytes};
    struct msghdr m = {.msg_name = (void *)(uintptr_t)&a->writer,
                       .msg_namelen = a->writer_bytes,
                       .msg_iov = &from,
                       .msg_iovlen = 1};
    if (with_fd >= 0) {
        m.msg_control = &control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof with_fd);
        memcpy(CMSG_DATA(c), &with_fd, sizeof with_fd);
    }
    (void)!sendmsg(a->fd, &m, 0);
}

static void ask(struct asker *a)
{
    a->q.serial++;
    say(a, &a->q, PMS_WIRE_HEAD + a->q.count * sizeof a->q.range[0], -1);
}

/* The next answer, to a question that was asked just now. */
static struct pms_answer hear(const struct asker *a)
{
    static unsigned char room[sizeof(struct pms_answer) + PMS_WIRE_PIECE];
    struct pms_answer head = {0};
    ssize_t n = recv(a->fd, room, sizeof room, 0);
    CHECK(n >= (ssize_t)sizeof head);
    memcpy(&head, room, sizeof head);
    CHECK(head.bytes == (uint64_t)n - sizeof head);
    CHECK(memcmp(head.reader, a->q.reader, PMS_WIRE_KEY) == 0);
    return head;
}

/* What was asked before has no answer: the first one that comes is to this. */
static bool was_sent_away(struct asker *a)
{
    struct asker good = *a;
    good.q.op = PMS_WIRE_EPOCH;
    good.q.magic = PMS_WIRE_MAGIC;
    good.q.count = 0;
    ask(&good);
    a->q.serial = good.q.serial;
    struct pms_answer got = hear(&good);
    return got.serial == good.q.serial && got.status == PMS_OK && got.bytes == 8;
}

static struct pms_pool *new_writer(void)
{
    struct pms_error e;
    struct pms_pool *writer = open_as(PMS_MODE_TRUNCATE);
    put(writer, "a", ITEMS, 1);
    put(writer, "b", 20, 1);
    CHECK(pms_commit(writer, &e) == PMS_OK);
    return writer;
}

static void can_be_read(void)
{
    struct pms_pool *reader = open_as(PMS_MODE_READ);
    struct pms_object o;
    struct pms_error e;
    CHECK(reader && pms_object_get(reader, 0, "a", 1, &o, &e) == PMS_OK);
    if (!reader)
        return;
    CHECK(*array(reader, o.data) == 1);
    pms_unpin(reader, o.data);
    pms_pool_release(reader);
}

/* Who cannot read the file does not know what lies in it: what he sends is in nobody's queue. */
static void strangers_are_not_heard(void)
{
    struct pms_pool *writer = new_writer();
    struct asker a = new_asker(writer);
    int null = open("/dev/null", O_RDONLY);
    uint8_t good[PMS_WIRE_KEY];
    memcpy(good, a.q.secret, sizeof good);
    for (uint32_t i = 0; i < 8 * PMS_WIRE_KEY; i++) {
        memcpy(a.q.secret, good, sizeof good);
        a.q.secret[i / 8] ^= (uint8_t)(1u << i % 8);
        say(&a, &a.q, PMS_WIRE_HEAD, i % 2 ? null : -1);
    }
    for (size_t n = 0; n < PMS_WIRE_KEY; n++) /* too short for a key */
        say(&a, good, n, null);
    /* more than any queue holds: were they queued, a call would wait */
    memset(a.q.secret, 0, sizeof a.q.secret);
    for (uint32_t i = 0; i < 5000; i++)
        say(&a, &a.q, PMS_WIRE_HEAD, -1);
    memcpy(a.q.secret, good, sizeof good);
    CHECK(was_sent_away(&a));
    can_be_read();
    close(null);
    close(a.fd);
    pms_pool_release(writer);
}

static void what_no_reader_asks_has_no_answer(void)
{
    struct pms_pool *writer = new_writer();
    struct asker a = new_asker(writer);
    const struct pms_question good = a.q;
    static const struct {
        uint32_t magic, op, count;
    } bad[] = {
        {0, PMS_WIRE_PIN, 0},
        {PMS_WIRE_MAGIC, 0, 0},
        {PMS_WIRE_MAGIC, 5, 0},
        {PMS_WIRE_MAGIC, PMS_WIRE_PIN, 1},
        {PMS_WIRE_MAGIC, PMS_WIRE_READ, 0},
        {PMS_WIRE_MAGIC, PMS_WIRE_READ, PMS_WIRE_RANGES + 1},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        a.q = good;
        a.q.magic = bad[i].magic;
        a.q.op = bad[i].op;
        a.q.count = bad[i].count;
        say(&a, &a.q, sizeof a.q, -1);
        say(&a, &a.q, PMS_WIRE_HEAD + (bad[i].count % 2) * sizeof a.q.range[0], -1);
        a.q = good;
        CHECK(was_sent_away(&a));
    }
    static const struct pms_part parts[] = {{1, PMS_PAGE},
                                            {0, 1},
                                            {0, 0},
                                            {0, ~0xfffull},
                                            {1ull << 63, PMS_PAGE},
                                            {PMS_PAGE, PMS_WIRE_ANSWER + PMS_PAGE}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        a.q = good;
        a.q.op = PMS_WIRE_READ;
        a.q.count = 2;
        a.q.range[0] = (struct pms_part){PMS_PAGE, PMS_PAGE};
        a.q.range[1] = parts[i];
        ask(&a);
        CHECK(was_sent_away(&a));
    }
    for (size_t n = 0; n < PMS_WIRE_HEAD; n++) { /* half of something */
        a.q = good;
        a.q.op = PMS_WIRE_PIN;
        say(&a, &a.q, n, -1);
    }
    CHECK(was_sent_away(&a));
    can_be_read();
    close(a.fd);
    pms_pool_release(writer);
}

/* More than are remembered, and more than there are descriptors; none takes what it is sent. */
static void many_visitors(void)
{
    struct rlimit before, few;
    struct pms_pool *writer = new_writer();
    struct asker a = new_asker(writer), deaf = new_asker(writer);
    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    few = before;
    few.rlim_cur = 64;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    for (uint32_t i = 0; i < 600; i++) {
        struct asker *who = i % 2 ? &deaf : &a;
        memcpy(who->q.reader, &i, sizeof i);
        who->q.op = PMS_WIRE_PIN;
        ask(who);
        if (who == &a)
            CHECK(hear(&a).status == PMS_OK);
    }
    uint32_t first = 0, last = 598;
    a.q.op = PMS_WIRE_READ;
    a.q.count = 1;
    a.q.range[0] = (struct pms_part){PMS_OFF_ROOT, PMS_PAGE};
    memcpy(a.q.reader, &last, sizeof last);
    ask(&a);
    CHECK(hear(&a).bytes == PMS_PAGE);
    memcpy(a.q.reader, &first, sizeof first);
    ask(&a);
    CHECK(hear(&a).status != PMS_OK); /* it was forgotten, and asks for its pin again */
    can_be_read();
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    close(a.fd);
    close(deaf.fd);
    pms_pool_release(writer);
}

/* What was sent is kept until it is said that it has come: an answer may be lost. */
static void an_answer_may_be_asked_for_again(void)
{
    struct pms_error e;
    struct pms_object o;
    struct pms_pool *writer = new_writer();
    struct asker a = new_asker(writer);
    CHECK(pms_object_get(writer, 0, "a", 1, &o, &e) == PMS_OK);
    a.q.op = PMS_WIRE_PIN;
    a.q.keep = 1;
    ask(&a);
    CHECK(hear(&a).status == PMS_OK);
    for (int i = 0; i < 3; i++) {
        for (uint64_t k = 0; k < ITEMS; k++)
            array(writer, o.data)[k] = 2;
        CHECK(pms_commit(writer, &e) == PMS_OK);
        uint64_t item = 0;
        unsigned char room[sizeof(struct pms_answer) + PMS_PAGE];
        a.q.op = PMS_WIRE_READ;
        a.q.count = 1;
        a.q.range[0] = (struct pms_part){o.data / PMS_PAGE * PMS_PAGE, PMS_PAGE};
        ask(&a);
        CHECK(recv(a.fd, room, sizeof room, 0) == sizeof room);
        memcpy(&item, room + sizeof(struct pms_answer) + o.data % PMS_PAGE, sizeof item);
        CHECK(item == 1);
    }
    pms_unpin(writer, o.data);
    close(a.fd);
    pms_pool_release(writer);
}

/* A first step, or a disk that does not answer: whatever holds the log lock of one store for long,
 * readers of another one are answered. */
static void a_store_that_is_held_up_is_in_no_other_ones_way(void)
{
    struct pms_error e;
    struct pms_pool *held = new_writer();
    strcat(path, "-other");
    struct pms_pool *other = new_writer();
    struct asker of_held = new_asker(held), of_other = new_asker(other);
    pms_undo_lock(&held->undo);
    of_held.q.op = PMS_WIRE_PIN;
    ask(&of_held);
    /* more of them than are answered before it is looked who else asks */
    bool answered = true;
    for (int i = 0; i < 20 && answered; i++) {
        of_other.q.op = i % 2 ? PMS_WIRE_PIN : PMS_WIRE_EPOCH;
        ask(&of_other);
        answered = hear(&of_other).serial == of_other.q.serial;
    }
    CHECK(answered);
    CHECK(recv(of_held.fd, &e, 1, MSG_PEEK | MSG_DONTWAIT) < 0);
    pms_undo_unlock(&held->undo);
    struct pms_answer late = hear(&of_held);
    CHECK(late.serial == of_held.q.serial && late.status == PMS_OK);
    close(of_held.fd);
    close(of_other.fd);
    can_be_read();
    CHECK(pms_pool_close(other, 0, &e) == PMS_OK);
    pms_pool_release(other);
    unlink(path);
    path[strlen(path) - strlen("-other")] = 0;
    can_be_read();
    CHECK(pms_pool_close(held, 0, &e) == PMS_OK);
    pms_pool_release(held);
}

int main(void)
{
    snprintf(path, sizeof path, "/dev/shm/pms-test-visitors-%ld", (long)getpid());
    TEST(strangers_are_not_heard);
    TEST(what_no_reader_asks_has_no_answer);
    TEST(many_visitors);
    TEST(an_answer_may_be_asked_for_again);
    TEST(a_store_that_is_held_up_is_in_no_other_ones_way);
    unlink(path);
    return test_summary();
}
