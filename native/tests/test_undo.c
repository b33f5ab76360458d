/* The undo log: what a reader takes from it (I1), the order of primitives around every store
 * (I2, I3), what roll back puts back and refuses, and that everything live fits (I5). */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checksum.h"
#include "commit/pool_state.h"
#include "store/store.h"
#include "declared.h"
#include "test.h"

#define MIB (1ull << 20)
#define ENTRY_MAX (2ull << 20) /* of an entry's pre-image: docs/FORMAT.md */

static uint64_t random_state = 0x2545f4914f6cdd1dull;

static uint64_t random64(void) /* xorshift64*: the same sequence in every run */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 2685821657736338717ull;
}

static void scramble(unsigned char *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        p[i] = (unsigned char)(random64() >> 56);
}

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

/* ---- a log without a store around it: a planned file in memory, both views, no heap ---- */

struct bench {
    int fd;
    struct pms_persist persist;
    struct pms_superblock super;
    struct pms_map map;
    struct pms_undo undo;
};

static void bench_open(struct bench *b, uint64_t file_bytes, uint64_t growth)
{
    struct pms_error e;
    memset(b, 0, sizeof *b);
    b->persist.flush = pms_persist_best_flush();
    b->fd = memfd_create("undo", MFD_CLOEXEC);
    bool good = pms_super_plan(&b->super, file_bytes, 0, PMS_DOMAIN_EMULATED, 0, &e) == PMS_OK &&
                (!growth || pms_super_plan_growth(&b->super, growth, &e) == PMS_OK) &&
                ftruncate(b->fd, (off_t)b->super.file_bytes) == 0 &&
                pms_map_open(&b->map, b->fd, b->super.file_bytes, 0, PMS_MAP_SHARED, &b->persist,
                             &e) == PMS_OK &&
                pms_undo_open(&b->undo, &b->map, false, &e) == PMS_OK;
    if (!good)
        abort();
    pms_undo_set_extents(&b->undo, &b->super);
    pms_undo_begin(&b->undo, 1);
}

static void bench_close(struct bench *b)
{
    pms_undo_close(&b->undo);
    pms_map_close(&b->map);
    close(b->fd);
}

static unsigned char *at(const struct bench *b, uint64_t off) { return pms_map_at(&b->map, off); }
static uint64_t data_of(const struct bench *b) { return b->super.segment[0].data_off; }

/* Room for a handful of entries in each extent, so that a log of ten crosses three times. */
static void small_extents(struct bench *b)
{
    static const uint64_t bytes[] = {512, 320, 640, 8192};
    uint64_t off = PMS_OFF_FASTLOG(b->undo.tag & 1);
    for (uint32_t i = 0; i < 4; i++) {
        b->undo.log.extent[i] = (struct pms_log_extent){off, bytes[i]};
        off += bytes[i] + 1024; /* apart: nothing may run from one into the next */
    }
    b->undo.log.extent_count = 4;
}

/* ---- what a reader takes ---- */

#define TAKEN_MAX 4096
struct taken {
    uint32_t count;
    uint64_t bytes;
    struct pms_entry entry[TAKEN_MAX];
    uint64_t image[TAKEN_MAX]; /* from the log's base */
    const struct pms_undo *undo;
};

static int take(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct taken *t = ctx;
    if (t->count < TAKEN_MAX) {
        t->entry[t->count] = *entry;
        t->image[t->count] = (uint64_t)((const unsigned char *)image - t->undo->log.base);
    }
    t->bytes += entry->len;
    t->count++;
    return 0;
}

static const struct taken *scan(const struct bench *b, uint64_t tag)
{
    static struct taken t;
    t.count = 0;
    t.bytes = 0;
    t.undo = &b->undo;
    CHECK(pms_undo_scan(&b->undo, tag, take, &t) == 0);
    return &t;
}

static uint64_t header_of(const struct taken *t, uint32_t i)
{
    return t->image[i] - (t->entry[i].len <= 32 ? sizeof(struct pms_entry) : PMS_LINE);
}

static const uint64_t lengths[] = {1, 8, 31, 32, 33, 64, 65, 100, 200, 32, 7, 129};
#define LENGTHS (sizeof lengths / sizeof lengths[0])

/* A dozen entries over four small extents. */
static void write_dozen(struct bench *b, uint64_t tag)
{
    scramble(at(b, data_of(b)), 64 * 1024);
    pms_undo_begin(&b->undo, tag);
    small_extents(b);
    for (uint64_t i = 0; i < LENGTHS; i++)
        pms_undo_append(&b->undo, data_of(b) + i * PMS_PAGE + i, lengths[i]);
    pms_undo_fence_locked(&b->undo);
}

static void a_whole_log_is_taken(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    write_dozen(&b, 5);
    const struct taken *t = scan(&b, 5);
    CHECK(t->count == LENGTHS && b.undo.log.at_extent == 3);
    uint32_t seen = 0; /* extents with an entry at their start */
    for (uint32_t i = 0; i < t->count; i++) {
        const struct pms_entry *e = &t->entry[i];
        uint64_t target = data_of(&b) + i * PMS_PAGE + i;
        CHECK(e->tag == 5 && e->seq == i && e->len == lengths[i] && e->target == target &&
              header_of(t, i) % PMS_LINE == 0);
        CHECK(memcmp(at(&b, t->image[i]), at(&b, target), e->len) == 0);
        seen += header_of(t, i) == b.undo.log.extent[seen].off;
    }
    CHECK(seen == 4);
    bench_close(&b);
}

/* The torn entry: every bit of every entry, one at a time. What was captured before it counts;
 * what comes after it, whole and in place as it may be, does not: its target was never stored
 * to, or the damage would have been fenced. */
static void a_damaged_entry_ends_the_log(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    write_dozen(&b, 5);
    struct taken whole = *scan(&b, 5);
    CHECK(whole.count == LENGTHS);
    for (uint32_t i = 0; i < LENGTHS; i++) {
        uint64_t head = header_of(&whole, i);
        for (uint64_t bit = 0; bit < 8 * (sizeof(struct pms_entry) + lengths[i]); bit++) {
            uint64_t byte = bit / 8;
            uint64_t off = byte < sizeof(struct pms_entry)
                               ? head + byte
                               : whole.image[i] + byte - sizeof(struct pms_entry);
            *at(&b, off) ^= (unsigned char)(1u << bit % 8);
            CHECK(scan(&b, 5)->count == i);
            *at(&b, off) ^= (unsigned char)(1u << bit % 8);
        }
        unsigned char line[PMS_LINE]; /* a line that never arrived */
        memcpy(line, at(&b, head), PMS_LINE);
        memset(at(&b, head), 0, PMS_LINE);
        CHECK(scan(&b, 5)->count == i);
        memcpy(at(&b, head), line, PMS_LINE);
    }
    CHECK(scan(&b, 5)->count == LENGTHS);
    bench_close(&b);
}

static void seal(const struct bench *b, uint64_t pos, uint64_t image)
{
    struct pms_entry e;
    memcpy(&e, at(b, pos), sizeof e);
    e.crc = pms_crc32c(pms_crc32c(0, &e, 28), at(b, image), e.len <= ENTRY_MAX ? e.len : 0);
    memcpy(at(b, pos), &e, sizeof e);
}

/* Rules that a checksum does not replace: entries that are right but for one field. */
static void a_wrong_field_ends_the_log(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    for (int field = 0; field < 8; field++) {
        /* the same fast log each time, over an older transaction's entries */
        write_dozen(&b, 5 + 2 * (uint64_t)field);
        uint64_t tag = b.undo.tag;
        struct taken t = *scan(&b, tag);
        CHECK(t.count == LENGTHS);
        struct pms_entry e = t.entry[3];
        switch (field) {
        case 0: e.tag -= 2; break;
        case 1: e.tag += 2; break;
        case 2: e.seq++; break; /* a later entry in its place */
        case 3: e.seq--; break;
        case 4: e.len = 0; break;
        case 5: e.len = ENTRY_MAX + 1; break;
        case 6: e.reserved = 1; break;
        default: e.len = 512; break; /* beyond its extent's end */
        }
        memcpy(at(&b, header_of(&t, 3)), &e, sizeof e);
        seal(&b, header_of(&t, 3), header_of(&t, 3) + (e.len <= 32 ? sizeof e : PMS_LINE));
        CHECK(scan(&b, tag)->count == 3);
    }
    /* other transactions: nothing */
    CHECK(scan(&b, b.undo.tag + 2)->count == 0 && scan(&b, b.undo.tag - 2)->count == 0);
    CHECK(scan(&b, b.undo.tag + 1)->count == 0);
    bench_close(&b);
}

/* Entries written under an older tag lie behind the newer ones: the log ends where they begin. */
static void an_older_tail_is_not_taken(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    write_dozen(&b, 5);
    pms_undo_begin(&b.undo, 7);
    small_extents(&b);
    for (uint32_t n = 1; n <= 4; n++) {
        pms_undo_append(&b.undo, data_of(&b), lengths[n - 1]); /* exactly over the old ones */
        CHECK(scan(&b, 7)->count == n);
        CHECK(scan(&b, 5)->count == 0);
    }
    bench_close(&b);
}

static int stop_at_third(void *ctx, const struct pms_entry *entry, const void *image)
{
    (void)image;
    *(uint32_t *)ctx = entry->seq;
    return entry->seq == 2 ? -77 : 0;
}

static void a_reader_may_stop(void)
{
    struct bench b;
    uint32_t last = 99;
    bench_open(&b, MIB, 0);
    write_dozen(&b, 5);
    CHECK(pms_undo_scan(&b.undo, 5, stop_at_third, &last) == -77 && last == 2);
    bench_close(&b);
}

/* ---- there and back ---- */

static unsigned char *copy_of(const struct bench *b, uint64_t off, uint64_t n)
{
    unsigned char *p = malloc(n);
    if (!p)
        abort();
    return memcpy(p, at(b, off), n);
}

/* Captures [off, off+len), overwrites it, and puts it back; the neighbours stay as they are.
 * Returns the number of entries. */
static int64_t round_trip(struct bench *b, uint64_t off, uint64_t len)
{
    uint64_t tag = b->undo.tag, bytes = 0;
    unsigned char *before = copy_of(b, off - PMS_LINE, len + 2 * PMS_LINE);
    pms_undo_append(&b->undo, off, len);
    pms_undo_fence_locked(&b->undo);
    uint64_t n = scan(b, tag)->count;
    CHECK(scan(b, tag)->bytes == len);
    memset(at(b, off), 0xee, len);
    int64_t applied = pms_undo_apply(&b->undo, tag, b->map.engine, &b->super, &bytes);
    CHECK(applied == (int64_t)n && bytes == len);
    CHECK(memcmp(at(b, off - PMS_LINE), before, len + 2 * PMS_LINE) == 0);
    /* again: the same end */
    CHECK(pms_undo_apply(&b->undo, tag, b->map.engine, &b->super, &bytes) == applied);
    CHECK(memcmp(at(b, off - PMS_LINE), before, len + 2 * PMS_LINE) == 0);
    free(before);
    return applied;
}

static void every_length_comes_back(void)
{
    struct bench b;
    bench_open(&b, 40 * MIB, 0);
    uint64_t data = data_of(&b) + PMS_PAGE;
    scramble(at(&b, data), 12 * MIB);
    for (uint64_t len = 1; len <= 100; len++) {
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        CHECK(round_trip(&b, data + len % 7, len) == 1);
        CHECK(b.undo.log.at == (len <= 32 ? PMS_LINE : PMS_LINE + round_up(len, PMS_LINE)));
    }
    static const struct {
        uint64_t len;
        int64_t entries;
    } large[] = {
        {4095, 1},        {4096, 1},           {4097, 1},
        {100 << 10, 1},   {2 * MIB, 2}, /* 31 pages fit the fast log; the rest, in the segment's */
        {2 * MIB + 1, 2}, {3 * MIB + 17, 3},   {4 * MIB - 1, 3},
        {4 * MIB, 3},     {9 * MIB + 4096, 6}, {11 * MIB + 7, 7}, /* by all cores */
    };
    pms_parallel_start();
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        int64_t n = round_trip(&b, data + (i % 2 ? 0 : 64), large[i].len);
        CHECK(n == large[i].entries);
        if (n != large[i].entries)
            printf("  %llu bytes: %lld entries\n", (unsigned long long)large[i].len, (long long)n);
    }
    /* with no fast log before it an entry takes its 2 MiB */
    pms_undo_begin(&b.undo, b.undo.tag + 1);
    b.undo.log.at_extent = 1;
    b.undo.log.at = 0;
    pms_undo_append(&b.undo, data, 2 * MIB);
    CHECK(b.undo.log.seq == 1 && b.undo.log.at == PMS_LINE + 2 * MIB);
    bench_close(&b);
}

/* A range longer than what is left of an extent is split at whole pages; a page that does not
 * fit goes to the next extent. */
static void ranges_cross_extents(void)
{
    struct bench b;
    bench_open(&b, MIB, 8 * MIB);
    uint64_t data = b.super.segment[1].data_off + PMS_PAGE;
    scramble(at(&b, data), 3 * MIB);
    for (uint64_t lead = 0; lead < 40; lead += 3) { /* entries before, to shift the crossing */
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        for (uint64_t i = 0; i < lead; i++)
            pms_undo_append(&b.undo, data + 2 * MIB + i * 8192, 4096 - 64 * (lead % 3));
        uint64_t tag = b.undo.tag, bytes;
        unsigned char *before = copy_of(&b, data, 3 * MIB);
        /* the rest of the fast log, all of segment 0's, some of segment 1's */
        pms_undo_append(&b.undo, data, MIB);
        CHECK(b.undo.log.at_extent == 2);
        const struct taken *t = scan(&b, tag);
        uint32_t extents = 0;
        for (uint32_t i = 0; i < t->count; i++)
            for (uint32_t x = 0; x < 3; x++)
                extents |= header_of(t, i) == b.undo.log.extent[x].off ? 1u << x : 0;
        CHECK(t->count == b.undo.log.seq && extents == 7);
        memset(at(&b, data), 0x11, 3 * MIB);
        memcpy(at(&b, data + MIB), before + MIB, 2 * MIB);
        CHECK(pms_undo_apply(&b.undo, tag, b.map.engine, &b.super, &bytes) ==
              (int64_t)b.undo.log.seq);
        CHECK(memcmp(at(&b, data), before, 3 * MIB) == 0);
        free(before);
    }
    bench_close(&b);
}

/* Gathered entries are copied together, in more batches than one; the log is the same as
 * without. */
static void gathered_entries_are_all_there(void)
{
    static const struct {
        uint64_t ranges, len;
    } shape[] = {{1, 64}, {3, MIB}, {1300, 4096 - 64}, {2, 5 * MIB}};
    struct bench b;
    bench_open(&b, 24 * MIB, 0);
    uint64_t data = data_of(&b);
    pms_parallel_start();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
        uint64_t step = (shape[i].len + PMS_PAGE - 1) / PMS_PAGE * PMS_PAGE,
                 all = shape[i].ranges * step, bytes;
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        scramble(at(&b, data), all);
        unsigned char *before = copy_of(&b, data, all);
        pms_undo_gather(&b.undo);
        for (uint64_t r = 0; r < shape[i].ranges; r++)
            pms_undo_append(&b.undo, data + r * step, shape[i].len);
        pms_undo_gathered(&b.undo);
        pms_undo_fence_locked(&b.undo);
        const struct taken *t = scan(&b, b.undo.tag);
        CHECK(t->count == b.undo.log.seq && t->bytes == shape[i].ranges * shape[i].len);
        for (uint64_t r = 0; r < shape[i].ranges; r++)
            memset(at(&b, data + r * step), 0x11, shape[i].len);
        CHECK(pms_undo_apply(&b.undo, b.undo.tag, b.map.engine, &b.super, &bytes) ==
              (int64_t)b.undo.log.seq);
        CHECK(memcmp(at(&b, data), before, all) == 0);
        free(before);
    }
    bench_close(&b);
}

/* The oldest pre-image of a byte is the true one. */
static void newest_goes_back_first(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    uint64_t page = data_of(&b) + 4 * PMS_PAGE, tag = b.undo.tag;
    scramble(at(&b, page), PMS_PAGE);
    unsigned char *before = copy_of(&b, page, PMS_PAGE);
    /* captures the granules with what was there */
    pms_undo_store(&b.undo, page + 100, "BBBBBBBB", 8);
    /* as a fault does: the page, with the B's in it */
    pms_undo_append(&b.undo, page, PMS_PAGE);
    pms_undo_set_prepared(&b.undo, page, PMS_PAGE);
    pms_undo_fence_locked(&b.undo);
    pms_undo_store(&b.undo, page + 96, "CCCCCCCCCCCCCCCC", 16);
    memset(at(&b, page + 2000), 0xdd, 100);
    struct taken t = *scan(&b, tag);
    CHECK(t.count == 2 && t.entry[0].len == PMS_GRANULE && t.entry[1].len == PMS_PAGE);
    CHECK(memcmp(at(&b, t.image[0]), before + 96, PMS_GRANULE) == 0);
    CHECK(memcmp(at(&b, t.image[1] + 100), "BBBBBBBB", 8) == 0);
    CHECK(pms_undo_apply(&b.undo, tag, b.map.engine, &b.super, NULL) == 2);
    CHECK(memcmp(at(&b, page), before, PMS_PAGE) == 0);
    free(before);
    bench_close(&b);
}

/* ---- what roll back refuses ---- */

/* Writes an entry as an enemy would: well formed in all but its target. */
static void forge(const struct bench *b, uint64_t pos, uint32_t seq, uint64_t target, uint32_t len)
{
    struct pms_entry e = {b->undo.tag, target, seq, len, 0, 0};
    uint64_t image = pos + (len <= 32 ? sizeof e : PMS_LINE);
    memcpy(at(b, pos), &e, sizeof e);
    memset(at(b, image), 0x66, len);
    seal(b, pos, image);
}

/* One good entry, then the one asked for. */
static int64_t apply_forged(struct bench *b, uint64_t target, uint32_t len)
{
    uint64_t log = b->undo.log.extent[0].off, bytes, good = data_of(b) + 64;
    memset(at(b, good), 0x22, 8);
    forge(b, log, 0, good, 8);
    forge(b, log + PMS_LINE, 1, target, len);
    CHECK(scan(b, b->undo.tag)->count == 2);
    int64_t n = pms_undo_apply(&b->undo, b->undo.tag, b->map.engine, &b->super, &bytes);
    CHECK(*at(b, good) == (n < 0 ? 0x22 : 0x66)); /* all of them, or none */
    return n;
}

static void targets_are_checked(void)
{
    struct bench b;
    bench_open(&b, MIB, 8 * MIB);
    const struct pms_segment *s = b.super.segment;
    uint64_t table_bytes = (s[0].data_pages * sizeof(struct pms_pte) + PMS_GRANULE - 1) /
                           PMS_GRANULE * PMS_GRANULE;
    uint64_t table_end = s[0].table_off + table_bytes, end = b.super.file_bytes;
    uint64_t data_end = s[0].data_off + s[0].data_pages * PMS_PAGE;
    const struct {
        uint64_t target;
        uint32_t len;
    } bad[] = {
        {0, 8},
        {PMS_PAGE - 8, 8},
        {PMS_OFF_SUPER(1), 64},
        {PMS_OFF_ANCHOR, 8},
        {PMS_OFF_JANCHOR(0), 8},
        {PMS_OFF_JANCHOR(1), 512},
        {PMS_OFF_SESSION(0), 8},
        {PMS_OFF_SESSION(1), 32},
        {PMS_OFF_ROOT - 1, 2},
        {PMS_OFF_ROOT - 8, 8},
        {PMS_OFF_ROOT + PMS_PAGE - 1, 2},
        {PMS_OFF_ROOT, PMS_PAGE + 1},
        {PMS_OFF_FASTLOG(0), 8},
        {PMS_OFF_FASTLOG(1), 8},
        {PMS_OFF_SEGMENTS - 1, 1},
        {s[0].table_off - 1, 2},
        {table_end - 1, 2},
        {table_end, 1},
        {s[0].log_off, 8},
        {s[1].log_off, 64},
        {s[0].data_off - 1, 2},
        {s[0].data_off - 1, 1},
        {data_end - 1, 2},
        {s[1].table_off - 1, 2},
        {s[1].data_off - 8, 8},
        {end - 7, 8},
        {end, 1},
        {end + PMS_PAGE, 8},
        {~0ull, 1},
        {~0ull - 7, 8},
        {~0ull - 6, 8},
        {1ull << 63, 64},
        {(1ull << 63) | s[0].data_off, 8},
        {~0ull - 63, 65},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK(apply_forged(&b, bad[i].target, bad[i].len) == -1);
        /* Not a byte of it was stored, wherever that lies in the file. The forged image itself
         * is in a fast log. */
        bool in_log = bad[i].target >= PMS_OFF_FASTLOG(0) && bad[i].target < PMS_OFF_SEGMENTS;
        if (!in_log && bad[i].target < end)
            CHECK(*at(&b, bad[i].target) != 0x66);
    }
    const struct {
        uint64_t target;
        uint32_t len;
    } good[] = {
        {PMS_OFF_ROOT, 8},    {PMS_OFF_ROOT, PMS_PAGE}, {PMS_OFF_ROOT + PMS_PAGE - 1, 1},
        {s[0].table_off, 16}, {table_end - 32, 32},     {s[0].data_off, 1},
        {data_end - 1, 1},    {s[1].table_off, 32},     {s[1].data_off, 4096},
        {end - 8, 8},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        CHECK(apply_forged(&b, good[i].target, good[i].len) == 2);
        CHECK(*at(&b, good[i].target) == 0x66);
    }
    bench_close(&b);
}

/* ---- the order of primitives ---- */

#define TRACE_MAX 4096
struct step {
    enum pms_primitive primitive;
    uintptr_t addr;
    size_t bytes;
};
static struct step trace[TRACE_MAX];
static _Atomic uint32_t steps; /* workers of a parallel copy record too */

static int record(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    uint32_t at = atomic_fetch_add(&steps, 1);
    if (at < TRACE_MAX)
        trace[at] = (struct step){primitive, addr, bytes};
    return 0;
}

static void trace_start(void)
{
    steps = 0;
    pms_persist_hook = record;
}

/* A user's store, while the hook watches. The compiler sees nobody who could look at the hook
 * meanwhile. */
static void poke(unsigned char *addr, unsigned char value)
{
    trace_start();
    __asm__ volatile("" : : : "memory");
    *(volatile unsigned char *)addr = value;
    __asm__ volatile("" : : : "memory");
    pms_persist_hook = NULL;
}

static bool touches(const struct step *s, const unsigned char *from, uint64_t bytes)
{
    uintptr_t begin = (uintptr_t)from;
    return s->addr < begin + bytes && s->addr + s->bytes > begin;
}

static bool in_log(const struct step *s, const struct pms_undo *u)
{
    for (uint32_t i = 0; i < u->log.extent_count; i++)
        if (touches(s, u->log.base + u->log.extent[i].off, u->log.extent[i].bytes))
            return true;
    return false;
}

static bool is_store(const struct step *s)
{
    return s->primitive == PMS_PRIM_STORE || s->primitive == PMS_PRIM_COPY;
}

static uint32_t count_of(enum pms_primitive primitive)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < steps; i++)
        n += trace[i].primitive == primitive;
    return n;
}

/* I2, on what was traced: every store to the log is followed by a fence before the step at
 * `until`. */
static void check_fenced_before(const struct pms_undo *u, uint32_t until)
{
    bool unfenced = false, any = false;
    for (uint32_t i = 0; i < until; i++) {
        if (trace[i].primitive == PMS_PRIM_FENCE)
            unfenced = false;
        if (is_store(&trace[i]) && in_log(&trace[i], u))
            unfenced = any = true;
    }
    CHECK(any && !unfenced);
}

/* The first step from `from` on that stores into, or changes the protection of, a range; `steps`
 * if there is none. */
static uint32_t first_change(uint32_t from, const unsigned char *addr, uint64_t bytes)
{
    uint32_t i = from;
    while (i < steps && !((is_store(&trace[i]) || trace[i].primitive == PMS_PRIM_PROTECT) &&
                          touches(&trace[i], addr, bytes)))
        i++;
    return i;
}

static void a_store_comes_after_its_entry(void)
{
    static const uint64_t size[] = {1, 8, 31, 32, 33, 100, 4096, 10000};
    struct bench b;
    unsigned char src[10000];
    bench_open(&b, MIB, 0);
    memset(src, 0x77, sizeof src);
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        uint64_t off = data_of(&b) + i * 16384 + 5;
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        trace_start();
        pms_undo_store(&b.undo, off, src, size[i]);
        pms_persist_hook = NULL;
        uint32_t changed = first_change(0, at(&b, off), size[i]);
        CHECK(changed == steps - 1); /* the last step, and the only one there */
        check_fenced_before(&b.undo, changed);
        CHECK(count_of(PMS_PRIM_FENCE) == 1);
        CHECK(memcmp(at(&b, off), src, size[i]) == 0);
    }
    bench_close(&b);
}

/* What a crash right before the store to the target would find: the pre-image, durable by then.
 * Looks from inside the hook. */
static struct {
    const struct bench *b;
    uint64_t off, len;
    const unsigned char *before;
    uint32_t looked, good;
} witness;

static int covers_witness(void *ctx, const struct pms_entry *e, const void *image)
{
    (void)ctx;
    uint64_t in = witness.off - e->target;
    bool all = e->target <= witness.off && witness.off + witness.len <= e->target + e->len;
    return all && memcmp((const unsigned char *)image + in, witness.before, witness.len) == 0;
}

static int look_in_log(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    struct step s = {primitive, addr, bytes};
    if (is_store(&s) && touches(&s, at(witness.b, witness.off), witness.len)) {
        witness.looked++;
        witness.good += pms_undo_scan(&witness.b->undo, witness.b->undo.tag, covers_witness,
                                      NULL) == 1;
    }
    return 0;
}

static void the_log_has_it_when_the_store_comes(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    scramble(at(&b, data_of(&b)), 16 * PMS_PAGE);
    for (uint64_t i = 0; i < 200; i++) {
        uint64_t off = data_of(&b) + random64() % (15 * PMS_PAGE), len = 1 + random64() % 700;
        unsigned char *before = copy_of(&b, off, len), src[700];
        memset(src, (int)i, sizeof src);
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        witness.b = &b;
        witness.off = off;
        witness.len = len;
        witness.before = before;
        pms_persist_hook = look_in_log;
        pms_undo_store(&b.undo, off, src, len);
        pms_persist_hook = NULL;
        free(before);
    }
    CHECK(witness.looked == 200 && witness.good == 200);
    bench_close(&b);
}

static const struct pms_undo *lock_of;
static uint32_t unfenced_steps, free_steps;

static int record_lock(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    unfenced_steps += lock_of->log.unfenced;
    free_steps += atomic_load(&lock_of->lock.word) == 0;
    return record(primitive, addr, bytes);
}

/* With one fence, and the log lock held throughout: an entry of another thread, fenced for that
 * thread's core alone, must not come to lie above one that is not durable yet. */
static void several_stores_share_a_fence(void)
{
    static const char text[] = "0123456789012345678901234567890123456789";
    struct pms_store store[5];
    struct bench b;
    bench_open(&b, MIB, 0);
    uint64_t data = data_of(&b), fences = b.persist.fences;
    for (uint64_t i = 0; i < 5; i++)
        store[i] = (struct pms_store){data + i * 200, text, 40};
    lock_of = &b.undo;
    trace_start();
    pms_persist_hook = record_lock;
    pms_undo_store_all(&b.undo, store, 5);
    pms_persist_hook = NULL;
    CHECK(b.persist.fences == fences + 1 && count_of(PMS_PRIM_FENCE) == 1 && !b.undo.log.unfenced);
    CHECK(unfenced_steps > 0 && free_steps == 0);
    /* no target before the fence */
    check_fenced_before(&b.undo, first_change(0, at(&b, data), PMS_PAGE));
    for (uint64_t i = 0; i < 5; i++)
        CHECK(memcmp(at(&b, data + i * 200), text, 40) == 0);
    pms_undo_store_all(&b.undo, store, 5); /* nothing new: no fence */
    CHECK(b.persist.fences == fences + 1 && b.undo.log.seq == 5);
    bench_close(&b);
}

static void a_granule_is_captured_once(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    uint64_t off = data_of(&b) + 64, captured = b.undo.log.captured_bytes;
    pms_undo_store(&b.undo, off, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + PMS_GRANULE && b.undo.log.seq == 1);
    uint64_t fences = b.persist.fences;
    for (int i = 0; i < 10; i++)
        pms_undo_store(&b.undo, off + (uint64_t)i, "x", 1);
    CHECK(b.undo.log.captured_bytes == captured + PMS_GRANULE && b.persist.fences == fences);
    /* one of four is there */
    pms_undo_store(&b.undo, off - 32,
                   "0123456789012345678901234567890123456789012345678901234567890123456789", 70);
    CHECK(b.undo.log.captured_bytes == captured + 3 * PMS_GRANULE && b.undo.log.seq == 3 &&
          b.persist.fences == fences + 1);
    pms_undo_set_prepared(&b.undo, off & ~4095ull, PMS_PAGE); /* its page is captured whole */
    pms_undo_store(&b.undo, off + 1000, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + 3 * PMS_GRANULE);
    /* dead before: no pre-image, also of what comes after */
    pms_undo_store_fresh(&b.undo, off + 8192, "abc", 3);
    pms_undo_store(&b.undo, off + 8193, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + 3 * PMS_GRANULE);
    pms_undo_begin(&b.undo, b.undo.tag + 1); /* the next transaction starts afresh */
    pms_undo_store(&b.undo, off, "abc", 3);
    pms_undo_store(&b.undo, off + 1000, "abc", 3);
    pms_undo_store(&b.undo, off + 8192, "abc", 3);
    CHECK(b.undo.log.captured_bytes == captured + 6 * PMS_GRANULE && b.undo.log.seq == 3);
    bench_close(&b);
}

/* How fn ends, in a child. */
static int wait_status(void (*fn)(struct bench *b), struct bench *b)
{
    int ws = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        close(STDERR_FILENO);

        fn(b);
        _exit(0);
    }
    waitpid(pid, &ws, 0);
    return ws;
}

/* Stores that break I2 or I3 end the process before they reach the medium. */
static bool dies(void (*fn)(struct bench *b), struct bench *b)
{
    int ws = wait_status(fn, b);
    return WIFSIGNALED(ws) && WTERMSIG(ws) == SIGABRT;
}

static void write_unprepared(struct bench *b)
{
    pms_undo_write_locked(&b->undo, data_of(b), "a", 1);
}

static void write_unfenced(struct bench *b)
{
    pms_undo_prepare_locked(&b->undo, data_of(b), 1);
    pms_undo_write_locked(&b->undo, data_of(b), "a", 1);
}

static void unlock_unfenced(struct bench *b)
{
    pms_undo_lock(&b->undo);
    pms_undo_append(&b->undo, data_of(b), 1);
    pms_undo_unlock(&b->undo);
}

/* a tag is used once */
static void begin_again(struct bench *b) { pms_undo_begin(&b->undo, b->undo.tag); }

static void broken_order_is_fatal(void)
{
    struct bench b;
    bench_open(&b, MIB, 0);
    *at(&b, data_of(&b)) = 'z';
    CHECK(dies(write_unprepared, &b));
    CHECK(dies(write_unfenced, &b));
    CHECK(dies(unlock_unfenced, &b));
    CHECK(dies(begin_again, &b));
    CHECK(*at(&b, data_of(&b)) == 'z');
    bench_close(&b);
}

/* ---- I5: everything fits ---- */

/* Every data page on its own, and every granule of the page tables on its own, in an order given
 * by `way`. */
static void capture_everything(struct bench *b, int way)
{
    pms_undo_begin(&b->undo, b->undo.tag + 1);
    if (way & 1) { /* the fast log is a bonus: not counted on */
        b->undo.log.at_extent = 1;
        b->undo.log.at = 0;
    }
    pms_undo_prepare_locked(&b->undo, PMS_OFF_ROOT, PMS_GRANULE);
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t i = 0; i < b->super.segment_count; i++) {
            const struct pms_segment *s = &b->super.segment[i];
            if ((pass == 0) == ((way & 2) != 0))
                for (uint64_t at_byte = 0; at_byte < s->data_pages * sizeof(struct pms_pte);
                     at_byte += PMS_GRANULE)
                    pms_undo_append(&b->undo, s->table_off + at_byte, PMS_GRANULE);
            else
                for (uint64_t page = 0; page < s->data_pages; page++)
                    pms_undo_append(&b->undo, s->data_off + page * PMS_PAGE, PMS_PAGE);
        }
    pms_undo_fence_locked(&b->undo);
}

static void worst_case_fits(void)
{
    static const struct {
        uint64_t file, growth;
    } size[] = {{MIB, 0}, {MIB + 4096 * 3, 0}, {9 * MIB, 0}, {40 * MIB, 0}, {MIB, 3 * MIB}};
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
        struct bench b;
        bench_open(&b, size[i].file, size[i].growth);
        uint64_t need = 0;
        for (uint32_t s = 0; s < b.super.segment_count; s++)
            need += b.super.segment[s].data_pages *
                    (PMS_PAGE + PMS_LINE + sizeof(struct pms_pte) * PMS_LINE / PMS_GRANULE);
        CHECK(pms_undo_capacity(&b.undo) >= need);
        for (int way = 0; way < 4; way++) {
            capture_everything(&b, way); /* an assertion of take_place's would end us */
            CHECK(b.undo.log.at_extent < b.undo.log.extent_count);
        }
        uint64_t data = b.super.segment[0].data_pages * PMS_PAGE;
        pms_undo_begin(&b.undo, b.undo.tag + 1);
        /* in one piece, by all cores where it is large */
        pms_undo_append(&b.undo, data_of(&b), data);
        CHECK(scan(&b, b.undo.tag)->bytes == data);
        bench_close(&b);
    }
}

/* ---- in a store ---- */

static char path[256];

static struct pms_pool *store(int domain, uint64_t size, uint64_t max_size)
{
    struct pms_options o = {
        .size = size, .max_size = max_size, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    struct pms_pool *pool = NULL;
    struct pms_error e;
    if (pms_pool_open(path, &o, &pool, &e) != PMS_OK) {
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
        abort();
    }
    return pool;
}

static void shut(struct pms_pool *pool)
{
    struct pms_error e;
    CHECK(pms_pool_close(pool, 0, &e) == PMS_OK);
    pms_pool_release(pool);
}

static unsigned char *array(struct pms_pool *pool, const char *name, uint64_t bytes)
{
    struct pms_error e;
    uint64_t data = 0;
    int status = pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                      PMS_FILL_ZERO, NULL, 0, 1, &data, &e);
    return status == PMS_OK ? pool->map.user + data : NULL;
}

static void a_fault_opens_its_page_after_the_entry(void)
{
    static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
    static const uint64_t size[] = {64, 5000, 100000, 10 << 20};
    struct pms_error e;
    for (size_t d = 0; d < 3; d++) {
        struct pms_pool *pool = store(domains[d], 32 * MIB, 0);
        unsigned char *a[4];
        char name[] = "a";
        for (size_t i = 0; i < 4; i++, name[0]++)
            a[i] = array(pool, name, size[i]);
        CHECK(pms_commit(pool, &e) == PMS_OK);
        for (size_t i = 0; i < 4; i++) {
            unsigned char *page = pool->map.user +
                                  ((uint64_t)(a[i] + size[i] / 2 - pool->map.user) & ~4095ull);
            poke(a[i] + size[i] / 2, 1);
            uint32_t opened = first_change(0, page, PMS_PAGE);
            CHECK(steps < TRACE_MAX && opened < steps &&
                  trace[opened].primitive == PMS_PRIM_PROTECT);
            /* no other page before */
            CHECK(first_change(0, pool->map.user, pool->map.bytes) == opened);
            check_fenced_before(&pool->undo, opened);
            CHECK(count_of(PMS_PRIM_FENCE) == 1 && count_of(PMS_PRIM_PROTECT) == 1);
            poke(a[i] + size[i] / 2, 2); /* captured: no more steps */
            CHECK(steps == 0);
        }
        struct pms_range both[2] = {{(uint64_t)(uintptr_t)(a[2] + 40960), 10},
                                    {(uint64_t)(uintptr_t)a[3], 9 << 20}};
        CHECK(pms_commit(pool, &e) == PMS_OK);
        trace_start();
        CHECK(pms_will_write(pool, both, 2, &e) == PMS_OK);
        pms_persist_hook = NULL;
        uint32_t opened = first_change(0, pool->map.user, pool->map.bytes);
        CHECK(opened < steps && trace[opened].primitive == PMS_PRIM_PROTECT);
        check_fenced_before(&pool->undo, opened);
        for (uint32_t i = opened; i < steps; i++) /* both captured before either opens */
            CHECK(!in_log(&trace[i], &pool->undo) && trace[i].primitive != PMS_PRIM_FENCE);
        shut(pool);
    }
}

/* Stored to without a word after a part of it was declared, and the other way round. */
static void roll_back_after_both_kinds_of_write(void)
{
    struct pms_error e;
    struct pms_pool *pool = store(PMS_DOMAIN_EMULATED, 4 * MIB, 0);
    unsigned char *a = array(pool, "a", 8192), before[8192];
    scramble(before, sizeof before);
    CHECK(declared_write(pool, a, before, sizeof before, &e) == PMS_OK &&
          pms_commit(pool, &e) == PMS_OK);
    for (int round = 0; round < 3; round++) {
        CHECK(declared_write(pool, a + 64, "declared", 8, &e) == PMS_OK);
        memset(a, 1, 100); /* over it */
        CHECK(declared_write(pool, a + 64, "declared", 8, &e) == PMS_OK);
        CHECK(memcmp(a + 64, "declared", 8) == 0 && a[0] == 1);
        CHECK(pms_rollback(pool, &e) == PMS_OK);
        CHECK(memcmp(a, before, sizeof before) == 0);
    }
    shut(pool);
}

static void put_value(struct pms_pool *pool, int i, char fill, uint32_t bytes, int expected)
{
    char name[16], value[600];
    struct pms_error e;
    snprintf(name, sizeof name, "v%d", i);
    memset(value, fill, sizeof value);
    CHECK(pms_object_put_value(pool, 0, name, (uint32_t)strlen(name), value, bytes, &e) ==
          expected);
}

/* I5 for the engine's own blocks: in a store full of names every one is changed, and then
 * removed, in one transaction. */
static void a_full_directory_fits(void)
{
    struct pms_error e;
    struct pms_pool *pool = store(PMS_DOMAIN_EMULATED, 2 * MIB, 2 * MIB);
    int n = 0;
    for (;; n++) {
        char name[16];
        snprintf(name, sizeof name, "v%d", n);
        int status = pms_object_put_value(pool, 0, name, (uint32_t)strlen(name), "0123456789", 10,
                                          &e);
        if (status == PMS_E_FULL)
            break;
        CHECK(status == PMS_OK && n < 100000);
        if (status != PMS_OK || n == 100000)
            break;
    }
    CHECK(n > 1000 && pms_commit(pool, &e) == PMS_OK);
    CHECK(pms_begin(pool, 0, &e) == PMS_OK);
    for (int i = n; i-- > 0;) /* from the far end: no two captures join */
        put_value(pool, i, 'x', 10, PMS_OK);
    for (int i = 0; i < n; i++) {
        char name[16];
        /* scattered, where 7919 and n have no common factor */
        snprintf(name, sizeof name, "v%d", i * 7919 % n);
        pms_object_remove(pool, 0, name, (uint32_t)strlen(name), &e);
    }
    CHECK(pms_end(pool, 0, &e) == PMS_OK);
    uint64_t count = 0;
    CHECK(pms_object_count(pool, 0, &count, &e) == PMS_OK && count == (uint64_t)n);
    shut(pool);
}

/* I5 for small declared writes: the log takes each page once. */
static void write_every_granule(struct bench *unused)
{
    (void)unused;
    struct pms_error e;
    struct pms_pool *pool = store(PMS_DOMAIN_EMULATED, 8 * MIB, 8 * MIB);
    unsigned char *a[100];
    int n = 0;
    for (char name[16]; n < 100; n++) {
        snprintf(name, sizeof name, "a%d", n);
        if (!(a[n] = array(pool, name, 200000)))
            break;
    }
    if (pms_commit(pool, &e) != PMS_OK || n == 0)
        _exit(3);
    for (int i = 0; i < n; i++)
        for (uint64_t off = 0; off + 8 <= 200000; off += PMS_GRANULE) {
            int status = declared_write(pool, a[i] + off, "12345678", 8, &e);
            if (status != PMS_OK && status != PMS_E_FULL)
                _exit(4);
        }
    /* and every page without a word: that cannot be refused */
    for (int i = 0; i < n; i++)
        memset(a[i], 9, 200000);
    if (pms_rollback(pool, &e) != PMS_OK || a[0][0] != 0 || a[n - 1][199968] != 0)
        _exit(5);
    pms_pool_close(pool, 0, &e);
    pms_pool_release(pool);
}

static void scattered_declared_writes_fit(void)
{
    CHECK(wait_status(write_every_granule, NULL) == 0);
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-undo-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    TEST(a_whole_log_is_taken);
    TEST(a_damaged_entry_ends_the_log);
    TEST(a_wrong_field_ends_the_log);
    TEST(an_older_tail_is_not_taken);
    TEST(a_reader_may_stop);
    TEST(broken_order_is_fatal);
    TEST(every_length_comes_back);
    TEST(ranges_cross_extents);
    TEST(gathered_entries_are_all_there);
    TEST(newest_goes_back_first);
    TEST(targets_are_checked);
    TEST(a_store_comes_after_its_entry);
    TEST(the_log_has_it_when_the_store_comes);
    TEST(several_stores_share_a_fence);
    TEST(a_granule_is_captured_once);
    TEST(worst_case_fits);
    TEST(a_fault_opens_its_page_after_the_entry);
    TEST(roll_back_after_both_kinds_of_write);
    TEST(a_full_directory_fits);
    TEST(scattered_declared_writes_fit);
    unlink(path);
    return test_summary();
}
