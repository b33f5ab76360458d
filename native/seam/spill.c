#include "seam/spill.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "seam/bits.h"
#include "seam/mappings.h"
#include "seam/memory.h"

#define SEND_SHARE 16u /* one part in so many of the share may wait to be written to the disk */

/* ---- the file ---- */

/* The folder, now: a path is too long for the fault handler's stack. */
void pms_spill_begin(struct pms_map *m)
{
    char link[32], path[PATH_MAX];
    struct pms_spill *s = &m->spill;
    snprintf(link, sizeof link, "/proc/self/fd/%d", m->fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    char *name = strrchr(path, '/');
    if (!name)
        return;
    name[name == path] = 0;
    s->folder = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    atomic_store(&s->on, s->folder >= 0);
}

static void drop(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void pms_spill_forget(struct pms_map *m, bool memory)
{
    if (!pms_spill_bytes(m))
        drop(&m->spill.fd);
    if (memory)
        drop(&m->spill.log_fd);
}

void pms_spill_end(struct pms_map *m)
{
    if (!atomic_exchange(&m->spill.on, false))
        return;
    drop(&m->spill.fd);
    drop(&m->spill.log_fd);
    drop(&m->spill.folder);
}

/* Room on the disk first: what cannot be written later would end the process. */
static bool reach(struct pms_map *m, int *fd, uint64_t off, uint64_t bytes)
{
    struct pms_spill *s = &m->spill;
    if (!atomic_load(&s->on))
        return false;
    if (*fd < 0)
        *fd = openat(s->folder, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    return *fd >= 0 && pms_persist_reserve(m->persist, *fd, off, bytes) == 0;
}

/* Memory that is not on the disk yet cannot be given up by the system: so it is not left to wait
 * for long. */
static void send(struct pms_map *m, uint64_t bytes)
{
    struct pms_spill *s = &m->spill;
    s->unsent += bytes;
    if (s->unsent < pms_memory_share() / SEND_SHARE)
        return;
    s->unsent = 0;
    if (s->fd >= 0)
        (void)pms_persist_send(m->persist, s->fd, true, false);
    if (s->log_fd >= 0)
        (void)pms_persist_send(m->persist, s->log_fd, true, false);
}

bool pms_spill_is_whole(struct pms_map *m)
{
    const struct pms_spill *s = &m->spill;
    bool pages = s->fd < 0 || pms_persist_send(m->persist, s->fd, false, false),
         log = s->log_fd < 0 || pms_persist_send(m->persist, s->log_fd, false, false);
    return pages && log;
}

/* The system call itself: pages come to lie elsewhere while others read them, or even store to
 * them, and show the same bytes. A sanitizer takes mmap for a store. Returns errno. */
static int lay(unsigned char *at, uint64_t bytes, int protection, int flags, int fd, uint64_t off)
{
    return syscall(SYS_mmap, at, (size_t)bytes, protection, flags | MAP_FIXED, fd, (off_t)off) < 0
               ? errno
               : 0;
}

/* ---- going there ---- */

static void count(struct pms_map *m, uint64_t off, uint64_t bytes, bool on)
{
    uint64_t pages = bytes / PMS_PAGE;
    int64_t parts = pms_bits_edges(m->spilled, m->reserve / PMS_PAGE, off, bytes, on);
    m->spill.parted += parts;
    pms_mappings_add(parts);
    pms_bits_set(m->spilled, off, bytes, on);
    pms_bits_set(m->frozen, off, bytes, false);
    atomic_fetch_add(&m->spill.pages, on ? pages : -pages);
}

bool pms_spill_pages(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    /* nobody can have stored there: nothing is lost. Of pages that are locked in memory an error */
    if (madvise(m->user + off, (size_t)bytes, MADV_DONTNEED) != 0 ||
        !reach(m, &m->spill.fd, off, bytes))
        return false;
    int fd = m->spill.fd;
    /* what the file has they show; through its own view they are read without a place for each */
    int err = pms_persist_pwrite(m->persist, fd, m->home + off, (size_t)bytes, off);
    (void)madvise(m->home + off, (size_t)bytes, MADV_DONTNEED);
    if (err)
        return false;
    /* counted, then looked: who forks says so first, and then looks whether any are counted */
    count(m, off, bytes, true);
    if (atomic_load(&m->spill.forking) ||
        lay(m->user + off, bytes, PROT_READ, MAP_SHARED, fd, off) != 0) {
        count(m, off, bytes, false);
        return false;
    }
    send(m, bytes);
    return true;
}

bool pms_spill_memory(struct pms_map *m, unsigned char *base, uint64_t off, uint64_t bytes)
{
    if (!reach(m, &m->spill.log_fd, off, bytes) ||
        lay(base + off, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->spill.log_fd, off) != 0)
        return false;
    send(m, bytes);
    return true;
}

/* ---- coming back ---- */

int pms_spill_back(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    int err = lay(m->user + off, bytes, PROT_READ, MAP_PRIVATE | MAP_NORESERVE, m->fd, off);
    if (!err)
        count(m, off, bytes, false);
    return err;
}

/* Pages from `page` on that lie there, are not private yet, and are protected alike. */
static uint64_t run_end(const struct pms_map *m, uint64_t page, uint64_t end)
{
    bool writable = pms_bits_has(m->writable, page);
    end = pms_bits_next(m->spilled, page, end, false);
    end = pms_bits_next(m->frozen, page, end, true);
    return pms_bits_next(m->writable, page, end, !writable);
}

/* What the one mapping shows the other does, too: so others may store there meanwhile. What was
 * stored before is on the disk then, and nothing is written there any more: nobody will ask. */
int pms_spill_freeze(struct pms_map *m)
{
    uint64_t end = m->bytes / PMS_PAGE, next;
    for (uint64_t page = 0; m->spill.fd >= 0 && pms_spill_bytes(m); page = next) {
        page = pms_bits_next(m->spilled, page, end, true);
        if (page == end)
            break;
        next = page + 1;
        if (pms_bits_has(m->frozen, page))
            continue;
        next = run_end(m, page, end);
        uint64_t off = page * PMS_PAGE, bytes = (next - page) * PMS_PAGE;
        int protection = PROT_READ | (pms_bits_has(m->writable, page) ? PROT_WRITE : 0),
            err = lay(m->user + off, bytes, protection, MAP_PRIVATE | MAP_NORESERVE, m->spill.fd,
                      off);
        if (err)
            return err;
        pms_bits_set(m->frozen, off, bytes, true);
    }
    if (m->spill.fd >= 0)
        (void)pms_persist_send(m->persist, m->spill.fd, true, true);
    drop(&m->spill.fd);
    return 0;
}

void pms_spill_before_fork(struct pms_map *m)
{
    m->spill.shown = false;
    atomic_store(&m->spill.forking, true);
}

void pms_spill_after_fork(struct pms_map *m) { atomic_store(&m->spill.forking, false); }

/* Where the descriptors are the parent's, and keep room on the disk. */
void pms_spill_after_fork_in_child(struct pms_map *m) { pms_spill_end(m); }
