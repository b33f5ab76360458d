#include "live/sight.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/pages.h"
#include "base/quiet.h"
#include "heap/super.h"

/* What came instead of an answer. */
static int lose(struct pms_sight *v, enum pms_heard heard, struct pms_error *error)
{
    static const char *const why[] = {
        [PMS_HEARD_LOSS] = "an answer was lost",
        [PMS_HEARD_NOTHING] = "it does not answer readers now",
        [PMS_HEARD_SIGNAL] = "waiting for the process that writes to the store",
        [PMS_HEARD_END] = "the process that writes to the store has ended",
        [PMS_HEARD_REFUSAL] = "the process that writes to the store has gone on",
        [PMS_HEARD_NONSENSE] = "the process that writes to the store answers with something else",
        [PMS_HEARD_STRANGER] = "another user's process answers readers in its place",
        [PMS_HEARD_CLOSED] = "the program has closed the connection to the store's writer",
    };
    errno = EINTR;
    v->interrupted = heard == PMS_HEARD_SIGNAL;
    if (v->interrupted)
        return pms_fail_errno(error, why[heard]);
    v->lost = true;
    /* stopped, it may be: another open would wait as long, and end here too */
    v->silent = heard == PMS_HEARD_NOTHING;
    bool locked = v->silent || heard == PMS_HEARD_STRANGER;
    return pms_fail(error, locked ? PMS_E_LOCKED : PMS_E_LOST, "%s", why[heard]);
}

static int lost_before(const struct pms_sight *v, struct pms_error *error)
{
    return pms_fail(error, v->silent ? PMS_E_LOCKED : PMS_E_LOST, "%s",
                    v->silent ? "it does not answer readers now" : "it was lost before");
}

/* ---- pages of the writer ---- */

int pms_sight_connect(struct pms_sight *v, int fd, const struct pms_session *session,
                      struct pms_error *error)
{
    int status = pms_client_open(&v->client, fd, session, error);
    if (status == PMS_OK)
        v->of = PMS_SIGHT_OF_WRITER;
    return status;
}

int pms_sight_pin(struct pms_sight *v, bool keep, struct pms_superblock *super,
                  struct pms_error *error)
{
    struct pms_question q = {.op = PMS_WIRE_PIN, .keep = keep};
    struct iovec to = {super, sizeof *super};
    pms_client_begin(&v->client, 0);
    enum pms_heard heard = pms_client_ask(&v->client, &q, &to, 1);
    return heard == PMS_HEARD_ANSWER ? pms_super_check(super, error) : lose(v, heard, error);
}

struct fetching { /* of what is asked for together */
    struct pms_sight *v;
    const struct pms_map *map;
    struct pms_question q;
    struct iovec to[PMS_WIRE_RANGES];
    uint64_t bytes, done;
};

/* Into private memory that may be written. */
static enum pms_heard fetch_now(struct fetching *f)
{
    if (!f->q.count)
        return PMS_HEARD_ANSWER;
    enum pms_heard heard = pms_client_ask(&f->v->client, &f->q, f->to, f->q.count);
    if (heard == PMS_HEARD_ANSWER)
        f->done += f->bytes;
    f->q.count = 0;
    f->bytes = 0;
    return heard;
}

static enum pms_heard fetch(struct fetching *f, const struct pms_part *range)
{
    enum pms_heard heard = PMS_HEARD_ANSWER;
    for (uint64_t at = 0, n; at < range->bytes && heard == PMS_HEARD_ANSWER; at += n) {
        uint64_t left = range->bytes - at, room = PMS_WIRE_ANSWER - f->bytes;
        n = left < room ? left : room;
        f->q.range[f->q.count] = (struct pms_part){range->off + at, n};
        f->to[f->q.count++] = (struct iovec){f->map->user + range->off + at, n};
        f->bytes += n;
        if (f->bytes == PMS_WIRE_ANSWER || f->q.count == PMS_WIRE_RANGES)
            heard = fetch_now(f);
    }
    return heard;
}

/* done: so many bytes of the ranges have come. The others are asked for again. */
static int fetch_all(struct pms_sight *v, const struct pms_map *map, const struct pms_part *range,
                     uint32_t count, uint64_t *done, struct pms_error *error)
{
    struct fetching f = {.v = v, .map = map, .q = {.op = PMS_WIRE_READ}};
    enum pms_heard heard = PMS_HEARD_ANSWER;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++)
        bytes += range[i].bytes;
    v->interrupted = false;
    pms_client_begin(&v->client, bytes);
    for (uint32_t i = 0; i < count && heard == PMS_HEARD_ANSWER; i++)
        heard = fetch(&f, &range[i]);
    if (heard == PMS_HEARD_ANSWER)
        heard = fetch_now(&f);
    *done = f.done;
    return heard == PMS_HEARD_ANSWER ? PMS_OK : lose(v, heard, error);
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
    if (is_untouched(v))
        return PMS_OK;
    v->lost = true;
    return pms_fail(error, PMS_E_LOST, "somebody has opened the store for writing since");
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

/* They are not: a signal came before they were. done: but for so many bytes of them. */
static void set_missing(struct pms_sight *v, const struct pms_part *range, uint32_t count,
                        uint64_t done)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t skip = range[i].bytes < done ? range[i].bytes : done;
        done -= skip;
        uint64_t page = (range[i].off + skip) / PMS_PAGE,
                 end = (range[i].off + range[i].bytes) / PMS_PAGE;
        for (; page < end; page++)
            v->loaded[page / 64] &= ~(1ull << (page % 64));
    }
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
    if (v->lost)
        return lost_before(v, error);
    uint64_t done = 0;
    set_writable(m, true);
    int status = v->of == PMS_SIGHT_OF_WRITER
                     ? fetch_all(v, m->map, m->range, m->count, &done, error)
                     : copy(v, m->map, m->range, m->count, error);
    set_writable(m, false);
    if (status != PMS_OK && !v->lost)
        set_missing(v, m->range, m->count, done);
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
                status = load(&m, error);
        }
    }
    return status == PMS_OK ? load(&m, error) : status;
}

bool pms_sight_is_old(struct pms_sight *v, uint64_t epoch)
{
    struct pms_question q = {.op = PMS_WIRE_EPOCH};
    uint64_t newest = epoch;
    struct iovec to = {&newest, sizeof newest};
    if (v->of == PMS_SIGHT_NONE)
        return false;
    if (v->of == PMS_SIGHT_OF_FILE)
        return v->lost || !is_untouched(v);
    pms_client_begin(&v->client, 0);
    return v->lost || v->interrupted ||
           pms_client_ask(&v->client, &q, &to, 1) != PMS_HEARD_ANSWER || newest != epoch;
}

void pms_sight_close(struct pms_sight *v)
{
    if (v->of == PMS_SIGHT_OF_WRITER)
        pms_client_close(&v->client);
    pms_unreserve(v->loaded, (v->pages + 63) / 64 * sizeof *v->loaded);
    v->loaded = NULL;
    v->lost = true;
}
