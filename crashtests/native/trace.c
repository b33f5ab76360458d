#include "trace.h"

#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/layout.h"
#include "base/lock.h"

#define EVENTS_MAX (4ull << 20)
#define DATA_MAX (1ull << 30)
#define VIEWS 64
#define THREADS 64
#define SKIP_SITES 2 /* the hook itself */

bool (*trace_may_run)(void);
void (*trace_before)(bool starter, enum pms_primitive primitive);

struct view {
    uintptr_t addr;
    uint64_t bytes;
};
struct pending { /* announced by a thread, done when its next event comes */
    enum tr_kind kind;
    uint64_t off, bytes;
    uintptr_t addr;
    void *site[TRACE_SITES];
    bool active;
    bool home; /* by the thread that writes images home */
};

static struct trace *tr;
static struct pms_lock lock;
static struct view view[VIEWS];
static uint32_t views;
static struct pending pending[THREADS];
static _Atomic uint32_t threads;
static __thread uint32_t me; /* slot + 1 */
static __thread bool inside;
static uint32_t starter;
static int fd = -1;
static unsigned char *live, *shadow;
static uint64_t file_bytes;
static bool memory; /* byte-addressable: stores into the mapping reach the medium */

static void *region(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return p;
}

struct trace *trace_new(void)
{
    struct trace *t = region(PMS_PAGE);
    t->event = region(EVENTS_MAX * sizeof *t->event);
    t->data = region(DATA_MAX);
    return t;
}

struct trace *trace_at(const char *path, bool create)
{
    uint64_t events = EVENTS_MAX * sizeof(struct tr_event), bytes = PMS_PAGE + events + DATA_MAX;
    int file = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0600);
    unsigned char *p = MAP_FAILED;
    if (file >= 0 && (!create || ftruncate(file, (off_t)bytes) == 0))
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                 (create ? MAP_SHARED : MAP_PRIVATE) | MAP_NORESERVE, file, 0);
    if (p == MAP_FAILED) {
        perror(path);
        leave(2);
    }
    close(file);
    struct trace *t = (void *)p;
    t->event = (void *)(p + PMS_PAGE); /* as this process sees them: others read the same trace */
    t->data = p + PMS_PAGE + events;
    return t;
}

bool trace_find_data(int file, bool *page)
{
    off_t from, to = 0;
    memset(page, 0, TRACE_MAX_FILE / PMS_PAGE);
    while ((from = lseek(file, to, SEEK_DATA)) >= 0 && from < (off_t)TRACE_MAX_FILE &&
           (to = lseek(file, from, SEEK_HOLE)) >= 0)
        for (off_t at = from; at < to && at < (off_t)TRACE_MAX_FILE; at += PMS_PAGE)
            page[at / PMS_PAGE] = true;
    return from >= 0 || errno == ENXIO; /* no data beyond */
}

static uint32_t slot(void)
{
    if (!me)
        me = atomic_fetch_add(&threads, 1) + 1;
    if (me > THREADS)
        abort();
    return me - 1;
}

/* The thread that writes images home: native/journal/home.c says its name. */
static bool writes_home(void)
{
    static __thread int known; /* 1: no, 2: yes */
    char name[16] = "";
    if (!known) {
        pthread_getname_np(pthread_self(), name, sizeof name);
        known = 1 + (strcmp(name, "pms-journal") == 0);
    }
    return known == 2;
}

static struct tr_event *emit(enum tr_kind kind, uint32_t thread, uint64_t off, uint64_t bytes,
                             void *const *site)
{
    static struct tr_event lost;
    if (tr->events == EVENTS_MAX) {
        tr->overflow = true;
        return &lost;
    }
    struct tr_event *e = &tr->event[tr->events++];
    *e = (struct tr_event){
        .kind = (uint16_t)kind, .thread = (uint16_t)thread, .off = off, .bytes = bytes};
    if (site)
        memcpy(e->site, site, sizeof e->site);
    return e;
}

/* Copies live bytes once: the trace and the shadow hold the same, whoever races. */
static void take(enum tr_kind kind, uint32_t thread, uint64_t off, uint64_t bytes,
                 void *const *site)
{
    if (tr->data_bytes + bytes > DATA_MAX) {
        tr->overflow = true;
        return;
    }
    struct tr_event *e = emit(kind, thread, off, bytes, site);
    e->data = tr->data_bytes;
    memcpy(tr->data + e->data, live + off, bytes);
    memcpy(shadow + off, tr->data + e->data, bytes);
    tr->data_bytes += bytes;
}

/* Emits the runs of changed bytes of [off, off+bytes). */
static void differ(enum tr_kind kind, uint32_t thread, uint64_t off, uint64_t bytes,
                   void *const *site)
{
    uint64_t end = off + bytes < file_bytes ? off + bytes : file_bytes;
    while (off < end) {
        uint64_t block = PMS_PAGE - off % PMS_PAGE < end - off ? PMS_PAGE - off % PMS_PAGE
                                                               : end - off;
        if (memcmp(live + off, shadow + off, block) == 0) {
            off += block;
            continue;
        }
        for (uint64_t stop = off + block; off < stop;) {
            if (live[off] == shadow[off]) {
                off++;
                continue;
            }
            /* a run ends where 8 bytes in a row are as they were */
            uint64_t to = off + 1, same = 0;
            while (to + same < stop && same < 8)
                if (live[to + same] == shadow[to + same])
                    same++;
                else
                    to += same + 1, same = 0;
            take(kind, thread, off, to - off, site);
            off = to + same;
        }
    }
}

static void complete(uint32_t t, bool done)
{
    struct pending *p = &pending[t];
    if (!p->active)
        return;
    if (p->kind == TR_SIZE) {
        struct stat st;
        fstat(fd, &st);
        if ((uint64_t)st.st_size != file_bytes && (uint64_t)st.st_size <= TRACE_MAX_FILE) {
            file_bytes = (uint64_t)st.st_size;
            emit(TR_SIZE, t, 0, file_bytes, p->site);
        }
    } else if (p->kind == TR_PWRITE) {
        if (done && p->off + p->bytes <= file_bytes)
            take(TR_PWRITE, t, p->off, p->bytes, p->site);
        else
            differ(TR_PWRITE, t, p->off, p->bytes, p->site);
    } else if (p->kind == TR_COPY) {
        /* whole lines are non-temporal, what is beside them is stored and flushed */
        uint64_t end = p->off + p->bytes, first = (p->off + 63) & ~63ull, last = end & ~63ull;
        if (first > end)
            first = last = end;
        differ(TR_STORE, t, p->off, first - p->off, p->site);
        /* also what is stored as it was: it comes after what was stored there before */
        if (done && last > first)
            take(TR_COPY, t, first, last - first, p->site);
        else
            differ(TR_COPY, t, first, last - first, p->site);
        differ(TR_STORE, t, last, end - last, p->site);
    } else {
        uint64_t first = tr->events;
        if (done)
            take(p->kind, t, p->off, p->bytes, p->site);
        else
            differ(p->kind, t, p->off, p->bytes, p->site);
        if (p->kind == TR_STORE && p->bytes == 8 && p->off % 8 == 0)
            for (; first < tr->events; first++)
                tr->event[first].word = 1;
    }
    p->active = !done;
}

/* joined: whoever wrote beside this thread has come back to it, as before a commit's sync. */
static void complete_all(uint32_t me_slot, bool joined)
{
    uint32_t n = atomic_load(&threads);
    for (uint32_t t = 0; t < n && t < THREADS; t++)
        complete(t, t == me_slot || (joined && pending[t].kind == TR_PWRITE && !pending[t].home));
}

static void map_view(uintptr_t addr, uint64_t bytes)
{
    for (uint32_t i = 0; i < views; i++)
        /* growth; an alias with the same end means the same place */
        if (view[i].addr + view[i].bytes == addr) {
            view[i].bytes += bytes;
            return;
        }
    if (views == VIEWS)
        memmove(view, view + 1, --views * sizeof *view);
    view[views++] = (struct view){addr, bytes};
}

void trace_unmap(uintptr_t addr, uint64_t bytes)
{
    uint32_t kept = 0;
    if (!tr || inside)
        return;
    pms_lock_acquire(&lock);
    for (uint32_t i = 0; i < views; i++)
        if (view[i].addr < addr || view[i].addr >= addr + bytes)
            view[kept++] = view[i];
    views = kept;
    pms_lock_release(&lock);
}

static bool offset_of(uintptr_t addr, uint64_t *off)
{
    for (uint32_t i = views; i-- > 0;)
        if (addr >= view[i].addr && addr < view[i].addr + view[i].bytes) {
            *off = addr - view[i].addr;
            return true;
        }
    return false;
}

static void all_user(uint32_t t)
{
    if (memory)
        differ(TR_USER, t, 0, file_bytes, NULL);
}

static void sites(void **site)
{
    void *raw[TRACE_SITES + SKIP_SITES];
    int n = backtrace(raw, TRACE_SITES + SKIP_SITES);
    for (int i = 0; i < TRACE_SITES; i++)
        site[i] = i + SKIP_SITES < n ? raw[i + SKIP_SITES] : NULL;
}

static void announce(uint32_t t, enum tr_kind kind, uintptr_t addr, uint64_t off, uint64_t bytes,
                     void *const *site)
{
    struct pending *p = &pending[t];
    p->kind = kind;
    p->addr = addr;
    p->off = off;
    p->bytes = bytes;
    p->active = true;
    p->home = writes_home();
    memcpy(p->site, site, sizeof p->site);
}

static bool is_store_file(int other)
{
    struct stat a, b;
    return fstat(fd, &a) == 0 && fstat(other, &b) == 0 && a.st_dev == b.st_dev &&
           a.st_ino == b.st_ino;
}

static void on_primitive(uint32_t t, enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    uint64_t off = 0;
    void *site[TRACE_SITES];
    bool inside_copy = primitive == PMS_PRIM_FLUSH && pending[t].active &&
                       pending[t].kind == TR_COPY && addr >= pending[t].addr &&
                       addr < pending[t].addr + pending[t].bytes;
    bool of_file = primitive == PMS_PRIM_PWRITE || primitive == PMS_PRIM_SYNC ||
                   primitive == PMS_PRIM_ALLOCATE;
    if ((of_file || primitive == PMS_PRIM_MAP) && !is_store_file(pms_persist_hook_fd))
        return; /* a tier's */
    sites(site);
    if (inside_copy) { /* head or tail of a copy that is not aligned */
        take(TR_STORE, t, pending[t].off + (addr - pending[t].addr), bytes, site);
    } else {
        complete_all(t, primitive == PMS_PRIM_SYNC && !writes_home());
    }
    switch (primitive) {
    case PMS_PRIM_STORE:
    case PMS_PRIM_COPY:
        if (offset_of(addr, &off) && memory)
            announce(t, primitive == PMS_PRIM_STORE ? TR_STORE : TR_COPY, addr, off, bytes, site);
        break;
    case PMS_PRIM_FLUSH:
        if (offset_of(addr, &off) && memory) {
            differ(TR_USER, t, off & ~63ull, (bytes + (off & 63) + 63) & ~63ull, NULL);
            emit(TR_FLUSH, t, off, bytes, site);
        }
        break;
    case PMS_PRIM_FENCE:
        if (memory) {
            all_user(t);
            emit(TR_FENCE, t, 0, 0, site);
        }
        break;
    case PMS_PRIM_PWRITE: announce(t, TR_PWRITE, 0, addr, bytes, site); break;
    case PMS_PRIM_SYNC:
        all_user(t);
        emit(TR_SYNC, t, 0, 0, site);
        break;
    case PMS_PRIM_ALLOCATE: announce(t, TR_SIZE, 0, addr, bytes, site); break;
    case PMS_PRIM_MAP: map_view(addr, bytes); break;
    case PMS_PRIM_PROTECT: all_user(t); break;
    }
}

static int hook(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    if (!tr || inside)
        return 0;
    uint32_t t = slot();
    if (trace_before)
        trace_before(t == starter, primitive);
    if (writes_home() && trace_may_run && !memory &&
        (primitive == PMS_PRIM_PWRITE || primitive == PMS_PRIM_SYNC))
        while (!trace_may_run())
            usleep(50);
    inside = true;
    pms_lock_acquire(&lock);
    on_primitive(t, primitive, addr, bytes);
    pms_lock_release(&lock);
    inside = false;
    return 0;
}

static void forget(void) { pms_persist_hook = NULL; } /* a child's doings are not the store's */

void trace_start(struct trace *t, const char *path, bool in_place)
{
    pthread_atfork(NULL, NULL, forget); /* before the engine's own */
    void *warm[2];
    backtrace(warm, 2); /* loads the unwinder: not in a signal handler */
    struct stat st;
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0 || (uint64_t)st.st_size > TRACE_MAX_FILE) {
        perror(path);
        leave(2);
    }
    live = mmap(NULL, TRACE_MAX_FILE, PROT_READ, MAP_SHARED, fd, 0);
    shadow = mmap(NULL, TRACE_MAX_FILE, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    file_bytes = (uint64_t)st.st_size;
    memcpy(shadow, live, file_bytes);
    t->events = t->data_bytes = t->rogue = t->engine_stores = 0;
    t->overflow = false;
    t->base_bytes = file_bytes;
    memory = in_place;
    tr = t;
    starter = slot();
    pms_persist_hook = hook;
}

void trace_mark(enum tr_kind kind, uint64_t number)
{
    if (!tr)
        return;
    pms_lock_acquire(&lock);
    complete_all(slot(), false);
    all_user(slot());
    emit(kind, slot(), 0, number, NULL);
    pms_lock_release(&lock);
}

void trace_stop(void)
{
    if (!tr)
        return;
    pms_persist_hook = NULL;
    pms_lock_acquire(&lock);
    complete_all(slot(), false);
    all_user(slot());
    tr = NULL;
    pms_lock_release(&lock);
}

bool trace_running(void) { return tr != NULL; }

static bool announced(uintptr_t addr, uint64_t bytes)
{
    if (!me || !pending[me - 1].active)
        return false;
    const struct pending *p = &pending[me - 1];
    return addr >= p->addr && addr + bytes <= p->addr + p->bytes;
}

void trace_store(const void *at, uint64_t bytes, void *site)
{
    uintptr_t addr = (uintptr_t)at;
    uint64_t off;
    if (!tr || inside || !memory || !offset_of(addr, &off))
        return;
    atomic_fetch_add(&tr->engine_stores, 1);
    if (!announced(addr, bytes) && atomic_fetch_add(&tr->rogue, 1) == 0)
        tr->rogue_site = site;
}
