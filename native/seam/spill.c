#include "seam/spill.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "seam/bits.h"
#include "seam/mappings.h"
#include "seam/memory.h"

#define SEND_SHARE 16u /* of the share: so much may wait to be written to the disk */

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

void pms_spill_forget(struct pms_map *m)
{
    if (m->spill.fd >= 0)
        close(m->spill.fd);
    m->spill.fd = -1;
    m->spill.unsent = 0;
}

void pms_spill_end(struct pms_map *m)
{
    if (!atomic_exchange(&m->spill.on, false))
        return;
    pms_spill_forget(m);
    close(m->spill.folder);
    m->spill.folder = -1;
}

/* Room on the disk first: what cannot be written later would end the process. */
static bool reach(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    struct pms_spill *s = &m->spill;
    if (!atomic_load(&s->on) || s->forking)
        return false;
    if (s->fd < 0)
        s->fd = openat(s->folder, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    return s->fd >= 0 && pms_persist_reserve(m->persist, s->fd, off, bytes) == 0;
}

/* Starts writing what waits, and waits for what was started before: memory that is not on the disk
 * cannot be given up. */
static void send(struct pms_spill *s, uint64_t bytes)
{
    s->unsent += bytes;
    if (s->unsent < pms_memory_share() / SEND_SHARE)
        return;
    (void)sync_file_range(s->fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE);
    s->unsent = 0;
}

/* ---- going there ---- */

bool pms_spill_wanted(struct pms_map *m, uint64_t beside, uint64_t bytes)
{
    uint64_t share = pms_memory_share();
    if (!atomic_load(&m->spill.on) || share == UINT64_MAX || pms_mappings_reach())
        return false;
    pms_map_tell(m);
    return pms_memory_own() + beside + bytes > share + share / 2;
}

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
    if (madvise(m->user + off, (size_t)bytes, MADV_DONTNEED) != 0 || !reach(m, off, bytes))
        return false;
    int fd = m->spill.fd;
    /* what the file has they show; through its own view they are read without a place for each */
    int err = pms_persist_pwrite(m->persist, fd, m->home + off, (size_t)bytes, off);
    (void)madvise(m->home + off, (size_t)bytes, MADV_DONTNEED);
    if (err || mmap(m->user + off, (size_t)bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd,
                    (off_t)off) == MAP_FAILED)
        return false;
    count(m, off, bytes, true);
    send(&m->spill, bytes);
    return true;
}

bool pms_spill_memory(struct pms_map *m, unsigned char *base, uint64_t off, uint64_t bytes)
{
    if (!reach(m, off, bytes) ||
        mmap(base + off, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, m->spill.fd,
             (off_t)off) == MAP_FAILED)
        return false;
    send(&m->spill, bytes);
    return true;
}

/* ---- coming back ---- */

int pms_spill_back(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    if (mmap(m->user + off, (size_t)bytes, PROT_READ, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
             m->fd, (off_t)off) == MAP_FAILED)
        return errno;
    count(m, off, bytes, false);
    return 0;
}

/* Pages from `page` on that lie there, are not private yet, and are protected alike. */
static uint64_t run_end(const struct pms_map *m, uint64_t page, uint64_t end)
{
    bool writable = pms_bits_has(m->writable, page);
    end = pms_bits_next(m->spilled, page, end, false);
    end = pms_bits_next(m->frozen, page, end, true);
    return pms_bits_next(m->writable, page, end, !writable);
}

/* What the one mapping shows the other does, too: so others may store there meanwhile. */
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
        int protection = PROT_READ | (pms_bits_has(m->writable, page) ? PROT_WRITE : 0);
        if (mmap(m->user + off, (size_t)bytes, protection, MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED,
                 m->spill.fd, (off_t)off) == MAP_FAILED)
            return errno;
        pms_bits_set(m->frozen, off, bytes, true);
    }
    pms_spill_forget(m);
    return 0;
}

void pms_spill_before_fork(struct pms_map *m)
{
    m->spill.forking = true;
    m->spill.shown = pms_spill_freeze(m) != 0;
}

void pms_spill_after_fork(struct pms_map *m) { m->spill.forking = false; }
