#include "live/sight.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <unistd.h>

#include "base/pages.h"
#include "base/process.h"
#include "base/quiet.h"
#include "heap/super.h"
#include "live/wire.h"

#define ANSWER_SECONDS 10 /* a writer that does not say anything for so long is stopped */

static int lose(struct pms_sight *v, struct pms_error *error, const char *why)
{
    v->lost = true;
    /* stopped, it may be: another open would wait as long, and end here too */
    return pms_fail(error, v->silent ? PMS_E_LOCKED : PMS_E_LOST, "%s",
                    v->silent ? "it does not answer readers now" : why);
}

/* ---- talking to the writer ---- */

/* The descriptor is still ours: a program may have closed all that it does not know. */
static bool is_ours(const struct pms_sight *v)
{
    struct stat st;
    return v->socket >= 0 && fstat(v->socket, &st) == 0 && S_ISSOCK(st.st_mode) &&
           st.st_ino == v->socket_inode;
}

static bool send_all(const struct pms_sight *v, const void *data, size_t bytes, int with_fd)
{
    union {
        struct cmsghdr head;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    memset(&control, 0, sizeof control);
    struct iovec from = {(void *)(uintptr_t)data, bytes};
    struct msghdr m = {.msg_iov = &from, .msg_iovlen = 1};
    if (with_fd >= 0) {
        m.msg_control = &control;
        m.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof with_fd);
        memcpy(CMSG_DATA(c), &with_fd, sizeof with_fd);
    }
    while (from.iov_len) {
        ssize_t n = sendmsg(v->socket, &m, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        from.iov_base = (char *)from.iov_base + n;
        from.iov_len -= (size_t)n;
        m.msg_control = NULL;
        m.msg_controllen = 0;
    }
    return true;
}

static bool receive_all(struct pms_sight *v, void *to, uint64_t bytes)
{
    for (unsigned char *at = to; bytes;) {
        ssize_t n = recv(v->socket, at, (size_t)bytes, MSG_WAITALL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            v->silent = n < 0 && errno == EAGAIN;
            return false;
        }
        at += n;
        bytes -= (uint64_t)n;
    }
    return true;
}

/* The head of an answer. */
static int receive_head(struct pms_sight *v, uint64_t most, uint64_t *bytes,
                        struct pms_error *error)
{
    struct pms_answer a;
    if (!receive_all(v, &a, sizeof a))
        return lose(v, error, "the process that writes to the store has ended");
    if (a.magic != PMS_WIRE_MAGIC || (a.status == PMS_OK && (a.bytes == 0 || a.bytes > most)))
        return lose(v, error, "the process that writes to the store answers with something else");
    if (a.status != PMS_OK)
        return lose(v, error, "the process that writes to the store has gone on");
    *bytes = a.bytes;
    return PMS_OK;
}

static int ask(struct pms_sight *v, const struct pms_question *q, const struct pms_part *range,
               int with_fd, struct pms_error *error)
{
    if (v->lost)
        return lose(v, error, "it was lost before");
    if (!is_ours(v))
        return lose(v, error, "the program has closed the connection to the store's writer");
    if (!send_all(v, q, sizeof *q, with_fd) ||
        (q->count && !send_all(v, range, q->count * sizeof *range, -1)))
        return lose(v, error, "the process that writes to the store has ended");
    return PMS_OK;
}

/* Whoever may write the store, as far as the system tells: its owner, root, or this user. */
static bool is_trusted(int fd, uint32_t owner)
{
    struct ucred peer;
    socklen_t bytes = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
           (peer.uid == 0 || peer.uid == owner || peer.uid == geteuid());
}

int pms_sight_connect(struct pms_sight *v, int fd, const struct pms_session *session,
                      struct pms_error *error)
{
    struct stat st;
    struct sockaddr_un address;
    struct timeval patience = {ANSWER_SECONDS, 0};
    if (fstat(fd, &st) != 0)
        return pms_fail_errno(error, "looking at the store's file");
    socklen_t bytes = pms_wire_address(&address, st.st_dev, st.st_ino, session->opened_ns);
    v->socket = pms_process_socket(AF_UNIX, SOCK_STREAM);
    if (v->socket < 0)
        return pms_fail_errno(error, "making a socket to ask the store's writer");
    (void)setsockopt(v->socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    (void)setsockopt(v->socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    struct stat own;
    bool there = connect(v->socket, (const struct sockaddr *)&address, bytes) == 0;
    v->silent = !there && errno == EAGAIN; /* so many wait before us */
    there = there && fstat(v->socket, &own) == 0;
    if (!there || !is_trusted(v->socket, st.st_uid)) {
        pms_process_close(v->socket);
        v->socket = -1;
        return pms_fail(error, PMS_E_LOCKED, "%s",
                        there ? "another user's process answers readers in its place"
                              : "it does not answer readers");
    }
    v->socket_inode = own.st_ino;
    v->of = PMS_SIGHT_OF_WRITER;
    v->fd = fd;
    return PMS_OK;
}

int pms_sight_pin(struct pms_sight *v, bool keep, struct pms_superblock *super,
                  struct pms_error *error)
{
    struct pms_question q = {PMS_WIRE_MAGIC, PMS_WIRE_PIN, keep, 0};
    uint64_t bytes = 0;
    int status = ask(v, &q, NULL, v->fd, error);
    if (status == PMS_OK)
        status = receive_head(v, sizeof *super, &bytes, error);
    if (status == PMS_OK && (bytes != sizeof *super || !receive_all(v, super, bytes)))
        status = lose(v, error, "the process that writes to the store has ended");
    return status == PMS_OK ? pms_super_check(super, error) : status;
}

/* Into private memory that may be written. */
static int fetch(struct pms_sight *v, const struct pms_map *map, const struct pms_part *range,
                 uint32_t count, struct pms_error *error)
{
    struct pms_question q = {PMS_WIRE_MAGIC, PMS_WIRE_READ, 0, count};
    int status = ask(v, &q, range, -1, error);
    for (uint32_t i = 0; i < count && status == PMS_OK; i++)
        for (uint64_t done = 0, bytes = 0; done < range[i].bytes && status == PMS_OK;
             done += bytes) {
            status = receive_head(v, range[i].bytes - done, &bytes, error);
            if (status == PMS_OK && !receive_all(v, map->user + range[i].off + done, bytes))
                status = lose(v, error, "the process that writes to the store has ended");
        }
    return status;
}

/* ---- pages of the file ---- */

static bool is_untouched(const struct pms_sight *v)
{
    struct pms_session now;
    return pms_session_read(v->fd, &now, NULL) == PMS_OK &&
           now.generation == v->session.generation && now.nonce == v->session.nonce;
}

/* Own copies of pages that may be written: by a store of what is there, where the system does not
 * do it all at once. Whether that was true still is to be looked at. */
static int copy(struct pms_sight *v, struct pms_map *map, const struct pms_part *range,
                uint32_t count, struct pms_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        pms_map_copy_ahead(map, range[i].off, range[i].bytes);
        for (uint64_t at = 0; at < range[i].bytes; at += PMS_PAGE) {
            volatile unsigned char *page = map->user + range[i].off + at;
            *page = *page;
        }
    }
    pms_full_fence(); /* the copies, before the record is read */
    return is_untouched(v) ? PMS_OK
                           : lose(v, error, "somebody has opened the store for writing since");
}

/* ---- what is loaded ---- */

int pms_sight_begin(struct pms_sight *v, struct pms_map *map, struct pms_error *error)
{
    v->pages = map->bytes / PMS_PAGE;
    v->loaded = pms_reserve((v->pages + 63) / 64 * sizeof *v->loaded);
    if (!v->loaded)
        return pms_fail_errno(error, "reserving memory for a reader");
    errno = pms_map_hide(map);
    return errno ? pms_fail_errno(error, "preparing memory for a reader") : PMS_OK;
}

static bool is_loaded(const struct pms_sight *v, uint64_t page)
{
    return v->loaded[page / 64] >> (page % 64) & 1;
}

/* As many pages from *page on as are not there, up to `end`. 0 bytes: none. */
static struct pms_part next_missing(const struct pms_sight *v, uint64_t *page, uint64_t end)
{
    while (*page < end && is_loaded(v, *page))
        ++*page;
    uint64_t first = *page;
    while (*page < end && !is_loaded(v, *page))
        ++*page;
    return (struct pms_part){first * PMS_PAGE, (*page - first) * PMS_PAGE};
}

/* Before they are: no page is asked for twice, and if they can not be had the sight is lost. */
static void set_loaded(struct pms_sight *v, const struct pms_part *range)
{
    for (uint64_t page = range->off / PMS_PAGE, end = page + range->bytes / PMS_PAGE; page < end;
         page++)
        v->loaded[page / 64] |= 1ull << (page % 64);
}

#define LOOK_BYTES (256ull << 20) /* less is not asked about */

/* The number behind that text at the beginning of a line. UINT64_MAX: there is none. */
static uint64_t number_in(const char *path, const char *text)
{
    FILE *file = fopen(path, "re");
    char line[128], *end = NULL;
    uint64_t found = UINT64_MAX;
    size_t n = strlen(text);
    while (file && found == UINT64_MAX && fgets(line, sizeof line, file))
        if (strncmp(line, text, n) == 0) {
            uint64_t number = strtoull(line + n, &end, 10);
            found = end > line + n ? number : UINT64_MAX;
        }
    if (file)
        fclose(file);
    return found;
}

/* What the control group of a container leaves. UINT64_MAX: it sets no bound. */
static uint64_t left_in_group(void)
{
    uint64_t most = number_in("/sys/fs/cgroup/memory.max", ""),
             used = number_in("/sys/fs/cgroup/memory.current", ""),
             cached = number_in("/sys/fs/cgroup/memory.stat", "inactive_file ");
    if (most == UINT64_MAX || used == UINT64_MAX)
        return UINT64_MAX;
    if (cached != UINT64_MAX)
        used -= cached < used ? cached : used; /* it is given up for what a process asks for */
    return most > used ? most - used : 1;      /* 0 tells nothing */
}

static uint64_t available_bytes(void)
{
    uint64_t kib = number_in("/proc/meminfo", "MemAvailable:"), group = left_in_group();
    uint64_t machine = kib < UINT64_MAX >> 10 ? kib << 10 : UINT64_MAX;
    return machine < group ? machine : group;
}

/* Else the system would end the process in the middle of the copy. */
static int check_memory(uint64_t bytes, struct pms_error *error)
{
    uint64_t available = bytes < LOOK_BYTES ? UINT64_MAX : available_bytes();
    if (bytes <= available)
        return PMS_OK;
    errno = ENOMEM;
    int status = pms_fail_errno(error, "a reader beside writers copies what it reads, and there "
                                       "is no memory for it: with lock=True nothing is copied");
    if (error) {
        error->needed = bytes;
        error->available = available;
    }
    return status;
}

struct missing { /* ranges that are not there, until they are loaded together */
    struct pms_sight *v;
    struct pms_undo *undo;
    struct pms_map *map;
    struct pms_part range[PMS_WIRE_RANGES];
    uint32_t count;
};

static void set_writable(const struct missing *m, bool on)
{
    pms_undo_lock(m->undo);
    for (uint32_t i = 0; i < m->count; i++)
        if (on)
            pms_map_unprotect_surely(m->map, m->range[i].off, m->range[i].bytes);
        else if (pms_map_protect(m->map, m->range[i].off, m->range[i].bytes) != 0)
            pms_map_protect(m->map, 0, m->map->bytes); /* one mapping: can not run out */
    pms_undo_unlock(m->undo);
}

static int load(struct missing *m, struct pms_error *error)
{
    struct pms_sight *v = m->v;
    if (!m->count)
        return PMS_OK;
    set_writable(m, true);
    int status = v->of == PMS_SIGHT_OF_WRITER ? fetch(v, m->map, m->range, m->count, error)
                                              : copy(v, m->map, m->range, m->count, error);
    set_writable(m, false);
    m->count = 0;
    return status;
}

int pms_sight_load(struct pms_sight *v, struct pms_undo *u, struct pms_map *map,
                   const struct pms_part *range, uint64_t count, struct pms_error *error)
{
    struct missing m = {.v = v, .undo = u, .map = map};
    int status = PMS_OK;
    if (v->of == PMS_SIGHT_NONE)
        return PMS_OK;
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < count; i++)
        bytes += range[i].bytes;
    status = check_memory(bytes, error);
    for (uint64_t i = 0; i < count && status == PMS_OK; i++) {
        uint64_t page = range[i].off / PMS_PAGE,
                 end = pms_page_up(range[i].off + range[i].bytes) / PMS_PAGE;
        PMS_ASSERT(end <= v->pages);
        while (page < end && status == PMS_OK) {
            m.range[m.count] = next_missing(v, &page, end);
            set_loaded(v, &m.range[m.count]);
            m.count += m.range[m.count].bytes > 0;
            if (m.count == PMS_WIRE_RANGES)
                status = v->lost ? lose(v, error, "it was lost before") : load(&m, error);
        }
    }
    if (status != PMS_OK || !m.count)
        return status;
    return v->lost ? lose(v, error, "it was lost before") : load(&m, error);
}

bool pms_sight_is_old(struct pms_sight *v, uint64_t epoch)
{
    struct pms_question q = {PMS_WIRE_MAGIC, PMS_WIRE_EPOCH, 0, 0};
    uint64_t bytes, newest = epoch;
    if (v->of == PMS_SIGHT_NONE)
        return false;
    if (v->of == PMS_SIGHT_OF_FILE)
        return v->lost || !is_untouched(v);
    return ask(v, &q, NULL, -1, NULL) != PMS_OK ||
           receive_head(v, sizeof newest, &bytes, NULL) != PMS_OK || bytes != sizeof newest ||
           !receive_all(v, &newest, bytes) || newest != epoch;
}

void pms_sight_close(struct pms_sight *v)
{
    if (v->of == PMS_SIGHT_OF_WRITER && is_ours(v))
        pms_process_close(v->socket);
    pms_unreserve(v->loaded, (v->pages + 63) / 64 * sizeof *v->loaded);
    v->loaded = NULL;
    v->lost = true;
    v->socket = -1;
}
