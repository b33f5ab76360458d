#include "journal/readers.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

/* a child hands its memory over before it does anything else: so long all are waited for */
#define ANSWER_MS 5000
#define ENTRIES 512u /* of the page map, read at once */
#define IN_MEMORY (1ull << 63)
#define SWAPPED (1ull << 62)
#define OF_A_FILE (1ull << 61)

struct pms_reader {
    struct pms_reader *next;
    int channel;       /* what the child hands over comes through it; -1: it came */
    int child_end;     /* between before and after the fork, else -1 */
    int mem, page_map; /* the child's, or -1 */
    uint64_t bytes;    /* mapped at the fork */
};

/* What is handed over: the child's memory and its page map. */
union rights {
    struct cmsghdr header;
    char room[CMSG_SPACE(2 * sizeof(int))];
};

void pms_readers_open(struct pms_readers *r)
{
    pthread_mutex_init(&r->lock, NULL);
    r->first = NULL;
    atomic_store(&r->count, 0);
}

static void close_all(const struct pms_reader *c)
{
    const int fds[] = {c->channel, c->child_end, c->mem, c->page_map};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++)
        if (fds[i] >= 0)
            close(fds[i]);
}

static void drop(struct pms_readers *r, struct pms_reader **at)
{
    struct pms_reader *gone = *at;
    *at = gone->next;
    close_all(gone);
    free(gone);
    atomic_fetch_sub(&r->count, 1);
}

void pms_readers_close(struct pms_readers *r)
{
    while (r->first)
        drop(r, &r->first);
    pthread_mutex_destroy(&r->lock);
}

/* ---- a fork ---- */

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* Whether something is there, by then: 1, 0, or -1 with errno. */
static int poll_until(struct pollfd *waiting, int64_t until)
{
    for (;;) {
        int64_t now = until ? now_ms() : 0;
        int n = poll(waiting, 1, until > now ? (int)(until - now) : 0);
        if (n >= 0 || errno != EINTR)
            return n;
    }
}

/* Waits for what the child hands over, until then; 0: not at all. 1: it is there; 0: there is no
 * child, or it will not read; -1 with errno. */
static int hear(struct pms_reader *c, int64_t until)
{
    struct pollfd waiting = {.fd = c->channel, .events = POLLIN};
    if (c->channel < 0)
        return 1;
    int n = poll_until(&waiting, until);
    if (n < 0)
        return -1;
    if (n == 0) {
        errno = ETIMEDOUT;
        return -1;
    }
    char byte;
    union rights rights = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = rights.room,
                             .msg_controllen = sizeof rights.room};
    ssize_t got = recvmsg(c->channel, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    const struct cmsghdr *header = got == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    if (!header || header->cmsg_len != CMSG_LEN(2 * sizeof(int)))
        return 0;
    int fds[2];
    memcpy(fds, CMSG_DATA(header), sizeof fds);
    c->mem = fds[0];
    c->page_map = fds[1];
    close(c->channel);
    c->channel = -1;
    return 1;
}

static bool alive(const struct pms_reader *c)
{
    uint64_t entry;
    return c->page_map < 0 || pms_persist_read(c->page_map, &entry, sizeof entry, 0) != 0;
}

/* Children that are gone give their descriptors back. */
static void prune(struct pms_readers *r)
{
    for (struct pms_reader **at = &r->first; *at;) {
        int heard = hear(*at, 0);
        if (heard == 0 || (heard > 0 && !alive(*at)))
            drop(r, at);
        else
            at = &(*at)->next;
    }
}

void pms_readers_before_fork(struct pms_readers *r, const struct pms_map *map)
{
    int ends[2];
    pthread_mutex_lock(&r->lock);
    prune(r);
    struct pms_reader *c = malloc(sizeof *c);
    if (!c || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
        free(c);
        return; /* a child finds no channel, and does not read */
    }
    *c = (struct pms_reader){.next = r->first,
                             .channel = ends[0],
                             .child_end = ends[1],
                             .mem = -1,
                             .page_map = -1,
                             .bytes = map->bytes};
    r->first = c;
    atomic_fetch_add(&r->count, 1);
}

void pms_readers_after_fork(struct pms_readers *r)
{
    if (r->first && r->first->child_end >= 0) {
        /* now the child has the only one: its death, or a fork that failed, is the channel's end */
        close(r->first->child_end);
        r->first->child_end = -1;
    }
    pthread_mutex_unlock(&r->lock);
}

static uint64_t entry_of(int page_map, const unsigned char *at)
{
    uint64_t entry = 0;
    (void)pms_persist_read(page_map, &entry, sizeof entry, (uintptr_t)at / PMS_PAGE * sizeof entry);
    return entry;
}

/* 1: the page at the address is private from now on; 0: it is not there, or nobody is; -1: it
 * cannot be made. */
static int take_page(int mem, const unsigned char *at)
{
    char byte;
    if (pms_persist_read(mem, &byte, 1, (uintptr_t)at) != 1)
        return 0;
    ssize_t n;
    do
        n = pwrite(mem, &byte, 1, (off_t)(uintptr_t)at);
    while (n < 0 && errno == EINTR);
    return n == 1 ? 1 : n == 0 ? 0 : -1;
}

/* Whether this system does what is counted on: with the first two pages, which are the
 * superblock's and never captured. */
static bool works(int mem, int page_map, const struct pms_map *map)
{
    (void)*(volatile unsigned char *)(map->user + PMS_PAGE);
    return take_page(mem, map->user) == 1 &&
           (entry_of(page_map, map->user) & (IN_MEMORY | OF_A_FILE)) == IN_MEMORY &&
           (entry_of(page_map, map->user + PMS_PAGE) & (IN_MEMORY | OF_A_FILE)) ==
               (IN_MEMORY | OF_A_FILE);
}

static bool hand_over(int channel, int mem, int page_map)
{
    int fds[2] = {mem, page_map};
    char byte = 0;
    union rights rights = {0};
    struct iovec iov = {&byte, 1};
    struct msghdr message = {.msg_iov = &iov,
                             .msg_iovlen = 1,
                             .msg_control = rights.room,
                             .msg_controllen = sizeof rights.room};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fds);
    memcpy(CMSG_DATA(header), fds, sizeof fds);
    return sendmsg(channel, &message, MSG_NOSIGNAL) == 1;
}

static int open_own(const char *path, int flags)
{
    int fd;
    do
        fd = open(path, flags | O_CLOEXEC);
    while (fd < 0 && errno == EINTR);
    return fd;
}

/* Nothing is freed: the allocator's lock is not ours to count on. */
bool pms_readers_in_child(struct pms_readers *r, const struct pms_map *map)
{
    int channel = r->first ? r->first->child_end : -1;
    bool ok = false;
    if (channel >= 0) {
        int mem = open_own("/proc/self/mem", O_RDWR),
            page_map = open_own("/proc/self/pagemap", O_RDONLY);
        ok = mem >= 0 && page_map >= 0 && works(mem, page_map, map) &&
             hand_over(channel, mem, page_map);
        if (mem >= 0)
            close(mem);
        if (page_map >= 0)
            close(page_map);
    }
    for (const struct pms_reader *c = r->first; c; c = c->next)
        close_all(c);
    r->first = NULL;
    return ok;
}

/* ---- a page that is about to change ---- */

enum kept { KEPT, GONE, FAILED };

static enum kept keep_pages(const struct pms_reader *c, const struct pms_map *map, uint64_t page,
                            uint64_t end)
{
    uint64_t entry[ENTRIES];
    uint64_t first = (uintptr_t)map->user / PMS_PAGE;
    for (uint64_t n; page < end; page += n) {
        n = end - page < ENTRIES ? end - page : ENTRIES;
        ssize_t got = pms_persist_read(c->page_map, entry, n * sizeof *entry,
                                       (first + page) * sizeof *entry);
        if (got == 0)
            return GONE;
        if (got != (ssize_t)(n * sizeof *entry))
            return FAILED;
        for (uint64_t i = 0; i < n; i++) {
            bool private = (entry[i] & (IN_MEMORY | SWAPPED)) && !(entry[i] & OF_A_FILE);
            if (!private && take_page(c->mem, map->user + (page + i) * PMS_PAGE) < 0)
                return FAILED;
        }
    }
    return KEPT;
}

/* A child that has not come to it by then (it was stopped) finds its channel shut, and does not
 * read; what it sent before is heard. *until: 0, before the first one is waited for. */
static int hear_or_shut(struct pms_reader *c, int64_t *until)
{
    int heard = hear(c, 0);
    if (heard >= 0 || errno != ETIMEDOUT)
        return heard;
    *until = *until ? *until : now_ms() + ANSWER_MS;
    heard = hear(c, *until);
    if (heard >= 0 || errno != ETIMEDOUT || shutdown(c->channel, SHUT_RD) != 0)
        return heard;
    return hear(c, 0);
}

static enum kept keep(struct pms_reader *c, const struct pms_map *map, uint64_t page,
                      uint64_t pages, int64_t *until)
{
    uint64_t limit = c->bytes / PMS_PAGE, end = page + pages < limit ? page + pages : limit;
    int heard = hear_or_shut(c, until);
    return heard < 0 ? FAILED : heard == 0 ? GONE : keep_pages(c, map, page, end);
}

int pms_readers_keep(struct pms_readers *r, const struct pms_map *map, uint64_t page,
                     uint64_t pages, struct pms_error *error)
{
    int status = PMS_OK;
    int64_t until = 0;
    if (atomic_load(&r->count) == 0)
        return PMS_OK;
    pthread_mutex_lock(&r->lock);
    for (struct pms_reader **at = &r->first; *at && status == PMS_OK;) {
        enum kept kept = keep(*at, map, page, pages, &until);
        if (kept == FAILED)
            status = pms_fail_errno(error, "keeping pages as a fork child sees them");
        else if (kept == GONE)
            drop(r, at);
        else
            at = &(*at)->next;
    }
    pthread_mutex_unlock(&r->lock);
    return status;
}
