/* The undo log: what a reader takes from it (I1), there and back, and what a roll back refuses. */
#include "undo_bench.h"

#define ENTRY_MAX (2ull << 20) /* of an entry's pre-image: docs/FORMAT.md */

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

/* ---- a log without a store around it: a planned file in memory, both views, no heap ---- */

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

int main(void)
{
    TEST(a_whole_log_is_taken);
    TEST(a_damaged_entry_ends_the_log);
    TEST(a_wrong_field_ends_the_log);
    TEST(an_older_tail_is_not_taken);
    TEST(a_reader_may_stop);
    TEST(every_length_comes_back);
    TEST(ranges_cross_extents);
    TEST(gathered_entries_are_all_there);
    TEST(newest_goes_back_first);
    TEST(targets_are_checked);
    return test_summary();
}
