#include "seam/map.h"

#include "seam/footer.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/pages.h"
#include "seam/bits.h"
#include "seam/mappings.h"
#include "seam/memory.h"
#include "seam/spill.h"

#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif
#ifndef MAP_SYNC
#define MAP_SYNC 0x080000
#endif

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* likewise: */
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; an error before */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define BITMAPS 5u              /* writable, own, astray, spilled, frozen */
#define APART_MAX 1024u         /* of the 65,530 mappings that a process may have */
#define NO_ADVICE 0x7fff        /* of madvise: no system has it */
#define PARTED_APART 2          /* mappings that one of them makes */
#define TAKE_LEAST (256u << 10) /* less is taken by its first stores */
#define COPY_PIECE (1u << 20)   /* of one core */
#define MORE_SHARE 4u           /* a transaction may take one part in so many beyond the share */

/* Sets aside bytes of address space aligned to PMS_HUGE, so that an extent aligned in the file
 * is aligned in memory. */
static unsigned char *reserve_aligned(uint64_t bytes)
{
    size_t total = (size_t)bytes + PMS_HUGE;
    unsigned char *raw = mmap(NULL, total, PROT_NONE, PMS_RESERVED, -1, 0);
    if (raw == MAP_FAILED)
        return NULL;
    size_t lead = (size_t)(-(uintptr_t)raw & (PMS_HUGE - 1));
    if (lead)
        munmap(raw, lead);
    munmap(raw + lead + bytes, PMS_HUGE - lead);
    return raw + lead;
}

static int map_range(struct pms_map *m, unsigned char *base, uint64_t from, uint64_t to, int prot,
                     int flags)
{
    return pms_persist_map(m->persist, base + from, (size_t)(to - from), prot, flags, m->fd, from);
}

/* Private views. The kernel joins mappings only if their own pages are of one origin (its
 * anon_vma), which a mapping gets at the first store into it, and its parts inherit. Parts that
 * were stored to one by one would stay mappings of their own for ever, whatever their
 * protection. So the first store, of what is there, is made before there are parts. Where that
 * may not be, nothing is lost but mappings. Returns errno if the view could not be protected
 * again: then it is of no use. */
static int make_one_origin(struct pms_map *m, uint64_t from, uint64_t to)
{
    volatile unsigned char *first = m->user + from;
    if (mprotect(m->user + from, (size_t)(to - from), PROT_READ | PROT_WRITE) != 0)
        return 0;
    *first = *first;
    (void)madvise(m->user + from, PMS_PAGE, MADV_DONTNEED); /* the file's again */
    return mprotect(m->user + from, (size_t)(to - from), PROT_READ) != 0 ? errno : 0;
}

static int map_views(struct pms_map *m, uint64_t from, uint64_t to)
{
    int flags = m->sync     ? MAP_SHARED_VALIDATE | MAP_SYNC
                : m->shared ? MAP_SHARED
                            : MAP_PRIVATE | MAP_NORESERVE | (m->fd < 0 ? MAP_ANONYMOUS : 0);
    int err = map_range(m, m->user, from, to, PROT_READ, flags);
    if (!err && m->shared)
        err = map_range(m, m->engine, from, to, PROT_READ | PROT_WRITE, flags);
    if (!err && !m->shared && to > from)
        err = make_one_origin(m, from, to);
    /* not through the seam: nothing is stored there */
    if (!err && !m->shared && m->home && to > from &&
        mmap(m->home + from, (size_t)(to - from), PROT_READ, MAP_SHARED | MAP_FIXED, m->fd,
             (off_t)from) == MAP_FAILED)
        err = errno;
    return err;
}

static void unmap_second_view(struct pms_map *m)
{
    if (m->home)
        munmap(m->home, (size_t)m->reserve);
    m->engine = m->user;
    m->home = NULL;
}

static void unmap_views(struct pms_map *m)
{
    unmap_second_view(m);
    if (m->user)
        munmap(m->user, (size_t)m->reserve);
    m->user = m->engine = NULL;
}

/* Address space for the user's view and for the other one, if there is another. */
static bool reserve_both(struct pms_map *m)
{
    m->user = m->engine = reserve_aligned(m->reserve);
    if (!m->user || (m->fd < 0 && !m->shared))
        return m->user;
    m->home = reserve_aligned(m->reserve);
    if (m->shared)
        m->engine = m->home;
    return m->home;
}

/* Tries the reservation asked for, then halves of it, down to what must be mapped. */
static int reserve_views(struct pms_map *m, uint64_t bytes, uint64_t reserve)
{
    reserve = pms_huge_up(reserve);
    uint64_t least = pms_huge_up(bytes);
    for (;;) {
        m->reserve = reserve;
        void *bits = reserve_both(m) ? pms_reserve(BITMAPS * pms_bits_room(reserve)) : NULL;
        if (bits) {
            m->writable = bits;
            m->own = (void *)((char *)bits + pms_bits_room(reserve));
            m->astray = (void *)((char *)bits + 2 * pms_bits_room(reserve));
            m->spilled = (void *)((char *)bits + 3 * pms_bits_room(reserve));
            m->frozen = (void *)((char *)bits + 4 * pms_bits_room(reserve));
            return 0;
        }
        unmap_views(m);
        if (reserve == least)
            return ENOMEM;
        reserve = pms_huge_down(reserve / 2);
        if (reserve < least)
            reserve = least;
    }
}

int pms_map_open(struct pms_map *m, int fd, uint64_t bytes, uint64_t reserve, enum pms_map_how how,
                 struct pms_persist *persist, struct pms_error *error)
{
    memset(m, 0, sizeof *m);
    pms_mappings_read_limit();
    m->fd = fd;
    m->spill.fd = m->spill.log_fd = m->spill.folder = -1;
    m->persist = persist;
    m->shared = how != PMS_MAP_PRIVATE;
    m->sync = how == PMS_MAP_SYNC;
    PMS_ASSERT(bytes % PMS_PAGE == 0);
    errno = reserve_views(m, bytes, reserve > bytes ? reserve : bytes);
    if (errno)
        return pms_fail_errno(error, "reserving address space for the store");
    int err = map_views(m, 0, bytes);
    if (err) {
        pms_map_close(m);
        errno = err;
        if (how == PMS_MAP_SYNC && (err == EOPNOTSUPP || err == EINVAL))
            return pms_fail(error, PMS_E_UNSUPPORTED,
                            "the file system has no MAP_SYNC (domain dax needs fsdax)");
        return pms_fail_errno(error, "mapping the store");
    }
    m->bytes = bytes;
    return PMS_OK;
}

int pms_map_grow(struct pms_map *m, uint64_t bytes, struct pms_error *error)
{
    PMS_ASSERT(bytes % PMS_PAGE == 0);
    if (bytes <= m->bytes) /* mapped by an attempt that failed later */
        return PMS_OK;
    if (bytes > m->reserve) {
        int status = pms_fail(
            error, PMS_E_FULL,
            "the address space set aside at open is used up: close and open again");
        if (error) {
            error->needed = bytes;
            error->available = m->reserve;
        }
        return status;
    }
    errno = map_views(m, m->bytes, bytes);
    if (errno)
        return pms_fail_errno(error, "mapping the store's new part");
    m->bytes = bytes;
    return PMS_OK;
}

void pms_map_close(struct pms_map *m)
{
    pms_mappings_add(-m->parted - m->spill.parted - PARTED_APART * (int64_t)m->apart);
    m->parted = m->spill.parted = m->apart = 0;
    if (m->writable)
        munmap((void *)m->writable, BITMAPS * pms_bits_room(m->reserve));
    unmap_views(m);
    pms_footer_close(m);
    m->writable = m->own = m->astray = m->spilled = m->frozen = NULL;
    m->bytes = 0;
}

/* ---- protection ---- */

int pms_map_hide(struct pms_map *m)
{
    return mprotect(m->user, (size_t)m->bytes, PROT_NONE) == 0 ? 0 : errno;
}

/* Counts the mappings that begin in a range or right behind it, as its pages become writable or
 * protected. */
static void count_parts(struct pms_map *m, uint64_t off, uint64_t bytes, bool on)
{
    int64_t parts = pms_bits_edges(m->writable, m->reserve / PMS_PAGE, off, bytes, on);
    m->parted += parts;
    pms_mappings_add(parts);
}

/* Counts those that take memory, too. */
static void set_own(struct pms_map *m, uint64_t off, uint64_t bytes, bool on)
{
    uint64_t first = off / PMS_PAGE, last = (off + bytes - 1) / PMS_PAGE;
    int64_t pages = 0;
    for (uint64_t w = first / 64; w <= last / 64; w++) {
        uint64_t mask = pms_bits_mask(first, last, w),
                 before = on ? atomic_fetch_or_explicit(&m->own[w], mask, memory_order_acq_rel)
                             : atomic_fetch_and_explicit(&m->own[w], ~mask, memory_order_acq_rel);
        uint64_t lies_there = atomic_load_explicit(&m->spilled[w], memory_order_relaxed);
        pages += __builtin_popcountll((on ? ~before : before) & mask & ~lies_there);
    }
    if (pages)
        atomic_fetch_add_explicit(&m->own_pages, on ? pages : -pages, memory_order_relaxed);
}

/* A bit of `writable` is on only while its page is writable for sure: set after the system call,
 * cleared before it. One of `own` is off only as long as its page never was, or what was stored
 * there is gone: set before. */
int pms_map_unprotect(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    PMS_ASSERT(off % PMS_PAGE == 0 && bytes % PMS_PAGE == 0 && bytes > 0 &&
               off + bytes <= m->bytes);
    if (!m->shared)
        set_own(m, off, bytes, true);
    int err = pms_persist_protect(m->persist, m->user + off, (size_t)bytes, PROT_READ | PROT_WRITE);
    if (!err) {
        count_parts(m, off, bytes, true);
        pms_bits_set(m->writable, off, bytes, true);
    }
    return err;
}

int pms_map_protect(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    PMS_ASSERT(off % PMS_PAGE == 0 && bytes % PMS_PAGE == 0 && bytes > 0 &&
               off + bytes <= m->bytes);
    count_parts(m, off, bytes, false);
    pms_bits_set(m->writable, off, bytes, false);
    return pms_persist_protect(m->persist, m->user + off, (size_t)bytes, PROT_READ);
}

void pms_map_unprotect_surely(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    if (pms_map_all_writable(m, off, bytes))
        return;
    int err = pms_mappings_spent(m->parted) ? ENOMEM : pms_map_unprotect(m, off, bytes);
    if (err == ENOMEM) {
        err = pms_map_protect(m, 0, m->bytes);
        if (!err)
            err = pms_map_unprotect(m, off, bytes);
    }
    PMS_ASSERT(err == 0 && "mprotect failed: the process has too many mappings (vm.max_map_count)");
}

bool pms_map_all_writable(const struct pms_map *m, uint64_t off, uint64_t bytes)
{
    uint64_t first = off / PMS_PAGE, last = (off + bytes - 1) / PMS_PAGE;
    for (uint64_t w = first / 64; w <= last / 64; w++) {
        uint64_t mask = pms_bits_mask(first, last, w);
        if ((atomic_load_explicit(&m->writable[w], memory_order_acquire) & mask) != mask)
            return false;
    }
    return true;
}

/* ---- pages of the file become the process's ----
 *
 * The first store into a page of a private view has the kernel put a copy in its place. Where
 * the page was read before, other cores may still know the old one: each that runs a thread of
 * this process is interrupted, once a page. The first training step after an open, which writes
 * everything, spent most of its time on that: of 1 GB, on two cores of a virtual machine, 4 s.
 * So what a range shows of the file is given up first, all at once, and its pages are copied
 * where none is. */

bool pms_map_foreign(const struct pms_map *m, uint64_t off, uint64_t bytes, uint64_t *run)
{
    uint64_t page = off / PMS_PAGE, end = page + bytes / PMS_PAGE;
    bool foreign = !m->shared && pms_bits_next(m->own, page, page + 1, false) == page;
    *run = m->shared ? bytes : (pms_bits_next(m->own, page, end, foreign) - page) * PMS_PAGE;
    return foreign;
}

/* What shows them something else than the file is taken away. surely: also of pages that are locked
 * in memory, with their mapping. Returns errno. */
static int show_file(struct pms_map *m, uint64_t off, uint64_t bytes, bool surely)
{
    for (uint64_t page = off / PMS_PAGE, end = page + bytes / PMS_PAGE, to; page < end; page = to) {
        bool spilled = pms_map_is_spilled(m, page);
        to = pms_bits_next(m->spilled, page, end, !spilled);
        uint64_t at = page * PMS_PAGE, n = (to - page) * PMS_PAGE;
        int err = 0;
        if (spilled)
            /* not of those that take memory, before they are not there any more */
            set_own(m, at, n, false);
        if (spilled)
            err = pms_spill_back(m, at, n);
        else if (madvise(m->user + at, (size_t)n, MADV_DONTNEED) != 0)
            err = surely ? map_range(m, m->user, at, at + n, PROT_READ, MAP_PRIVATE | MAP_NORESERVE)
                         : errno;
        set_own(m, at, n, err != 0);
        if (err)
            return err;
    }
    return 0;
}

void pms_map_disown(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    PMS_ASSERT(!m->shared && !pms_map_all_writable(m, off, PMS_PAGE));
    int err = show_file(m, off, bytes, true);
    PMS_ASSERT(err == 0);
}

bool pms_map_give_back(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    PMS_ASSERT(!m->shared && !pms_map_all_writable(m, off, PMS_PAGE));
    return show_file(m, off, bytes, false) == 0;
}

uint64_t pms_map_next_own(const struct pms_map *m, uint64_t page, uint64_t end)
{
    return pms_bits_next(m->own, page, end, true);
}

uint64_t pms_map_own_bytes(const struct pms_map *m)
{
    return (uint64_t)atomic_load_explicit(&m->own_pages, memory_order_relaxed) * PMS_PAGE;
}

static void tell(struct pms_map *m, int64_t bytes)
{
    pms_memory_add(bytes - atomic_exchange(&m->told, bytes));
}

void pms_map_tell(struct pms_map *m) { tell(m, (int64_t)pms_map_own_bytes(m)); }
void pms_map_untell(struct pms_map *m) { tell(m, 0); }

bool pms_map_is_short(struct pms_map *m, uint64_t beside, uint64_t bytes)
{
    uint64_t share = pms_memory_share();
    if (!atomic_load(&m->spill.on) || share == UINT64_MAX || pms_mappings_reach())
        return false;
    pms_map_tell(m);
    return pms_memory_own() + beside + bytes > share + share / MORE_SHARE;
}

bool pms_map_is_spilled(const struct pms_map *m, uint64_t page)
{
    return pms_bits_has(m->spilled, page);
}

void pms_map_set_astray(struct pms_map *m, uint64_t off, uint64_t bytes, bool on)
{
    if (m->shared || (!on && !m->any_astray))
        return;
    m->any_astray = true;
    pms_bits_set(m->astray, off, bytes, on);
}

bool pms_map_is_astray(const struct pms_map *m, uint64_t page)
{
    return pms_bits_has(m->astray, page);
}

int pms_map_read_home(const struct pms_map *m, uint64_t off, uint64_t bytes, void *into)
{
    uint64_t first = pms_page_down(off), end = pms_page_up(off + bytes);
    int err = 0;
    do /* what cannot be read would end the process */
        err = madvise(m->home + first, (size_t)(end - first), MADV_POPULATE_READ) == 0 ? 0 : errno;
    while (err == EINTR || err == EAGAIN);
    if (err && err != EINVAL) /* that is a system which cannot */
        return EIO;
    memcpy(into, m->home + off, (size_t)bytes);
    return 0;
}

bool pms_map_take(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    bool any = false;
    uint64_t end = (off + bytes) / PMS_PAGE;
    for (uint64_t page = off / PMS_PAGE; !m->shared && bytes >= TAKE_LEAST && page < end;) {
        uint64_t from = pms_bits_next(m->own, page, end, false),
                 to = pms_bits_next(m->own, from, end, true);
        if (to > from) /* nobody can have stored there: nothing is lost */
            any = madvise(m->user + from * PMS_PAGE, (size_t)((to - from) * PMS_PAGE),
                          MADV_DONTNEED) == 0 ||
                  any;
        page = to;
    }
    pms_map_unprotect_surely(m, off, bytes);
    return any;
}

struct range {
    unsigned char *at;
    uint64_t bytes;
};

static void copy_piece(void *ctx, size_t i)
{
    const struct range *r = ctx;
    uint64_t from = i * (uint64_t)COPY_PIECE,
             n = r->bytes - from < COPY_PIECE ? r->bytes - from : COPY_PIECE;
    (void)madvise(r->at + from, (size_t)n, MADV_POPULATE_WRITE); /* else the stores do it */
}

void pms_map_copy_ahead(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    struct range r = {m->user + off, bytes};
    pms_parallel_for(copy_piece, &r, (size_t)((bytes + COPY_PIECE - 1) / COPY_PIECE));
}

/* ---- after the store ---- */

int pms_map_part(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
    if (m->shared && mmap(m->user + off, (size_t)bytes, PROT_READ | PROT_WRITE, flags, m->fd,
                          (off_t)off) == MAP_FAILED)
        return errno;
    return pms_map_unprotect(m, off, bytes);
}

struct owning {
    unsigned char *at;
    uint64_t bytes;
    _Atomic int error;
};

bool pms_map_takes_any_advice(void)
{
    static _Atomic int known; /* 1: no, 2: yes */
    if (!atomic_load(&known))
        atomic_store(&known, madvise(NULL, 0, NO_ADVICE) == 0 ? 2 : 1);
    return atomic_load(&known) == 2;
}

/* Returns errno; EINVAL: the system cannot. What lies behind a page that cannot be read is not
 * looked at. */
static int own_range(unsigned char *at, uint64_t bytes)
{
    if (pms_map_takes_any_advice())
        return EINVAL;
    int err = 0;
    do
        err = madvise(at, (size_t)bytes, MADV_POPULATE_WRITE) == 0 ? 0 : errno;
    while (err == EINTR || err == EAGAIN);
    return err;
}

static void own_piece(void *ctx, size_t i)
{
    struct owning *o = ctx;
    uint64_t from = i * (uint64_t)COPY_PIECE,
             n = o->bytes - from < COPY_PIECE ? o->bytes - from : COPY_PIECE;
    int err = own_range(o->at + from, n);
    for (uint64_t page = from; err && err != ENOMEM && page < from + n; page += PMS_PAGE)
        if (err == EINVAL)
            /* a store of what is there, also if others store there now */
            (void)atomic_fetch_or((_Atomic unsigned char *)(o->at + page), 0);
        else if (own_range(o->at + page, PMS_PAGE) == ENOMEM)
            err = ENOMEM;
    if (err == ENOMEM)
        atomic_store(&o->error, err);
}

int pms_map_own(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    struct owning o = {m->user + off, bytes, 0};
    pms_parallel_for(own_piece, &o, (size_t)((bytes + COPY_PIECE - 1) / COPY_PIECE));
    return atomic_load(&o.error);
}

void pms_map_release(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    (void)madvise(m->user + off, (size_t)bytes, MADV_DONTNEED);
}

void pms_map_forgo(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    if (mmap(m->user + off, (size_t)bytes, PROT_NONE, PMS_RESERVED | MAP_FIXED, -1, 0) ==
        MAP_FAILED)
        pms_map_release(m, off, bytes); /* no mapping is left: its memory alone */
}

void pms_map_forgo_engine(struct pms_map *m) { unmap_second_view(m); }

void pms_map_prefer_huge(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    uint64_t from = pms_huge_up(off), to = pms_huge_down(off + bytes);
    if (m->shared && to > from)
        (void)madvise(m->user + from, to - from, MADV_COLLAPSE);
}

/* Mappings are joined if they differ in nothing. Blocks of one size side by side differ in the
 * parity of their number, and either way from what nobody set apart. Neither advice changes what
 * is stored or read: whether a dump of the process's memory has the pages (by default it has
 * none of a shared file's), and whether a page that is not in memory is read alone. */
void pms_map_set_apart(struct pms_map *m, uint64_t off, uint64_t bytes)
{
    bool odd = off / bytes % 2;
    if (!m->shared || m->apart == APART_MAX || pms_mappings_reach())
        return;
    m->apart++;
    pms_mappings_add(PARTED_APART);
    /* what lay here before may have had the other one */
    (void)madvise(m->user + off, bytes, odd ? MADV_DODUMP : MADV_NORMAL);
    (void)madvise(m->user + off, bytes, odd ? MADV_RANDOM : MADV_DONTDUMP);
}

void pms_map_read_around(struct pms_map *m, bool on)
{
    (void)madvise(m->engine, (size_t)m->bytes, on ? MADV_NORMAL : MADV_RANDOM);
}
