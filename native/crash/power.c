/* A shadow of the file holds what is durable: what was written back before a fence (lines), or
 * written before a sync (sectors). At the failure each line or sector that differs from it is
 * kept or lost, as drawn; a sector in flight may also be noise. Stores that raced a fence or a
 * sync in another thread count as durable: the model errs on the mild side. A write or copy that
 * one overtook is durable after the next. */
#include "crash/power.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/pages.h"

#define WINDOW (1ull << 38) /* address space for a file and its shadow */
#define LINE 64u
#define SECTOR 512u
#define VIEWS 32u
#define THREADS 64u

struct view {
    uintptr_t addr;
    uint64_t bytes;
};

static int fd = -1;
static unsigned char *file, *shadow;
static uint64_t *flushing; /* a bit a line: its write-back has begun */
static uint64_t first_flushing = UINT64_MAX, end_flushing; /* lines */
static struct view view[VIEWS];
static uint32_t views;
static bool by_lines; /* a byte-addressable domain */
static uint64_t chance;
/* Of each thread, the last write or copy it announced: the hook comes before, so that another
 * thread's fence or sync may find nothing of it. */
static struct {
    uint64_t off, bytes;
} under_way[THREADS];
static uint32_t threads;
static _Thread_local uint32_t me; /* from 1 */
static atomic_flag busy = ATOMIC_FLAG_INIT;

static uint64_t file_bytes(void)
{
    struct stat st;
    return fstat(fd, &st) == 0 && (uint64_t)st.st_size < WINDOW ? (uint64_t)st.st_size : 0;
}

bool pms_power_start(int store_fd, uint64_t seed)
{
    chance = seed;
    shadow = pms_reserve(WINDOW);
    flushing = pms_reserve(WINDOW / LINE / 8);
    file = mmap(NULL, WINDOW, PROT_READ, MAP_SHARED, store_fd, 0);
    if (!shadow || !flushing || file == MAP_FAILED)
        return false;
    fd = fcntl(store_fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0)
        return false;
    memcpy(shadow, file, file_bytes());
    return true;
}

static bool watches(int other) /* it is that file */
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && fstat(other, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

static void mark(uint64_t off, uint64_t bytes)
{
    uint64_t n = off / LINE, end = (off + bytes + LINE - 1) / LINE;
    if (n < first_flushing)
        first_flushing = n;
    if (end > end_flushing)
        end_flushing = end;
    for (; n < end; n++)
        flushing[n / 64] |= 1ull << n % 64;
}

static bool in_view(uintptr_t addr, uint64_t *off)
{
    for (uint32_t i = views; i-- > 0;)
        if (addr >= view[i].addr && addr < view[i].addr + view[i].bytes) {
            *off = addr - view[i].addr;
            return true;
        }
    return false;
}

static void begin(uint64_t off, uint64_t bytes)
{
    mark(off, bytes);
    if (me <= THREADS) {
        under_way[me - 1].off = off;
        under_way[me - 1].bytes = bytes;
    }
}

static void marked_is_durable(void)
{
    uint64_t end = file_bytes() / LINE < end_flushing ? file_bytes() / LINE : end_flushing;
    for (uint64_t n = first_flushing; n < end; n++) {
        if (n % 64 == 0 && flushing[n / 64] == 0) {
            n += 63;
            continue;
        }
        if (flushing[n / 64] >> n % 64 & 1) {
            memcpy(shadow + n * LINE, file + n * LINE, LINE);
            flushing[n / 64] &= ~(1ull << n % 64);
        }
    }
    first_flushing = UINT64_MAX;
    end_flushing = 0;
    for (uint32_t t = 0; t < threads && t < THREADS; t++)
        if (under_way[t].bytes)
            mark(under_way[t].off, under_way[t].bytes);
}

static void note_view(uintptr_t addr, uint64_t bytes)
{
    for (uint32_t i = 0; i < views; i++)
        if (view[i].addr + view[i].bytes == addr) { /* growth */
            view[i].bytes += bytes;
            return;
        }
    if (views == VIEWS)
        memmove(view, view + 1, --views * sizeof *view);
    view[views++] = (struct view){addr, bytes};
}

static void note(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    uint64_t off;
    if (!me)
        me = ++threads;
    if (me <= THREADS && primitive != PMS_PRIM_FLUSH) /* which may be of a part of the copy */
        under_way[me - 1].bytes = 0;
    switch (primitive) {
    case PMS_PRIM_MAP:
        if (watches(pms_persist_hook_fd))
            note_view(addr, bytes);
        break;
    case PMS_PRIM_FLUSH:
        by_lines = true;
        if (in_view(addr, &off))
            mark(off, bytes);
        break;
    case PMS_PRIM_COPY:
        if (in_view(addr, &off))
            begin(off, bytes);
        break;
    case PMS_PRIM_FENCE:
        if (by_lines)
            marked_is_durable();
        break;
    case PMS_PRIM_PWRITE:
        if (watches(pms_persist_hook_fd))
            begin(addr, bytes);
        break;
    case PMS_PRIM_SYNC:
        if (!watches(pms_persist_hook_fd))
            break;
        if (by_lines)
            mark(0, file_bytes());
        marked_is_durable();
        break;
    case PMS_PRIM_STORE:
    case PMS_PRIM_PROTECT:
    case PMS_PRIM_ALLOCATE: break;
    }
}

static void take_turn(void)
{
    while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire))
        ;
}

void pms_power_note(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    take_turn();
    note(primitive, addr, bytes);
    atomic_flag_clear_explicit(&busy, memory_order_release);
}

static uint64_t draw(uint64_t n)
{
    uint64_t z = chance += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (z ^ z >> 31) % n;
}

/* Written, not stored through a shared mapping: a page of one that changes while another thread
 * writes it past the page cache makes the kernel fail the next sync of whoever opens the file
 * afterwards. */
static void put(uint64_t page, const unsigned char *bytes, uint64_t end)
{
    ssize_t ignored = pwrite(fd, bytes, end - page < PMS_PAGE ? end - page : PMS_PAGE, (off_t)page);
    (void)ignored;
}

/* The turn is kept: no other thread changes what is durable before the caller dies. */
void pms_power_fail(void)
{
    static unsigned char left[PMS_PAGE];
    take_turn();
    uint64_t unit = by_lines ? LINE : SECTOR, end = file_bytes(), kept = draw(5);
    for (uint64_t page = 0; page < end; page += PMS_PAGE) {
        if (memcmp(file + page, shadow + page, PMS_PAGE) == 0)
            continue;
        memcpy(left, file + page, PMS_PAGE);
        for (uint64_t at = 0; at < PMS_PAGE; at += unit) {
            const unsigned char *durable = shadow + page + at;
            if (memcmp(left + at, durable, unit) == 0 || draw(4) < kept)
                continue;
            if (!by_lines && draw(16) == 0)
                memset(left + at, (int)draw(256), unit);
            else
                memcpy(left + at, durable, unit);
        }
        put(page, left, end);
    }
}
