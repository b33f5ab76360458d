/* A heap without a store around it: in anonymous memory, with a log. */
#ifndef PMS_TESTS_HEAP_STORE_H
#define PMS_TESTS_HEAP_STORE_H

#define _GNU_SOURCE /* memfd_create */
#include "test.h"

#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/checksum.h"
#include "heap/heap.h"
#include "log/entries.h"
#include "log/marks.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 10u
#else
#define SLOWER 1u
#endif

/* ---- a store in anonymous memory ---- */

struct store {
    struct pms_superblock super;
    struct pms_persist persist;
    struct pms_map map;
    struct pms_undo undo;
    struct pms_heap *heap;
    struct pms_error error;
    uint64_t tag;
};

static inline uint64_t pages_of(uint64_t bytes) { return (bytes + PMS_PAGE - 1) / PMS_PAGE; }

static inline uint64_t full_log(uint64_t pages)
{
    return (pages_of(pages * (PMS_PAGE + PMS_LINE + 32)) + 8) * PMS_PAGE;
}

static inline void add_segment(struct store *s, uint64_t pages, uint64_t log_bytes)
{
    struct pms_segment *g = &s->super.segment[s->super.segment_count++];
    g->table_off = s->super.file_bytes;
    g->log_off = g->table_off + pages_of(pages * sizeof(struct pms_pte)) * PMS_PAGE;
    g->log_bytes = log_bytes;
    /* not aligned to PMS_HUGE */
    g->data_off = (g->log_off + g->log_bytes + PMS_HUGE - 1) / PMS_HUGE * PMS_HUGE + PMS_PAGE;
    g->data_pages = pages;
    s->super.file_bytes = g->data_off + pages * PMS_PAGE;
}

static inline void format_segment(struct store *s, uint32_t i)
{
    const struct pms_segment *g = &s->super.segment[i];
    struct pms_pte *pte = pms_map_at(&s->map, g->table_off);
    memset(pte, 0xa5, g->data_pages * sizeof *pte); /* what lies inside an extent is never read */
    uint64_t word = g->data_pages | (uint64_t)PMS_KIND_FREE << 44;
    *pte = (struct pms_pte){word | (uint64_t)pms_check16(g->data_off / PMS_PAGE, word) << 48, 0};
}

static inline void begin(struct store *s) { pms_undo_begin(&s->undo, ++s->tag); }

static inline void store_open(struct store *s, uint64_t pages, uint64_t log_bytes, uint64_t second)
{
    memset(s, 0, sizeof *s);
    s->super.file_bytes = PMS_OFF_SEGMENTS;
    add_segment(s, pages, log_bytes);
    if (second)
        add_segment(s, second, full_log(second));
    int fd = memfd_create("heap", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)s->super.file_bytes) == 0);
    CHECK(pms_map_open(&s->map, fd, s->super.file_bytes, s->super.file_bytes + (512u << 20),
                       PMS_MAP_SHARED, &s->persist, &s->error) == PMS_OK);
    for (uint32_t i = 0; i < s->super.segment_count; i++)
        format_segment(s, i);
    CHECK(pms_undo_open(&s->undo, &s->map, false, &s->error) == PMS_OK);
    pms_undo_set_extents(&s->undo, &s->super);
    CHECK(pms_heap_open(&s->heap, &s->undo, &s->super, &s->error) == PMS_OK);
    begin(s);
}

static inline void store_close(struct store *s)
{
    int fd = s->map.fd;
    pms_heap_close(s->heap);
    pms_undo_close(&s->undo);
    pms_map_close(&s->map);
    close(fd);
}

static inline void commit(struct store *s)
{
    pms_heap_committed(s->heap, false);
    begin(s);
}

static inline void rollback(struct store *s)
{
    uint64_t bytes;
    CHECK(pms_undo_apply(&s->undo, s->tag, s->map.engine, &s->super, &bytes) >= 0);
    begin(s);
    CHECK(pms_heap_rebuild(s->heap, &s->error) == PMS_OK);
}

static inline uint64_t alloc_as(struct store *s, uint64_t bytes, enum pms_owner owner)
{
    uint64_t off = 0;
    CHECK(pms_heap_alloc(s->heap, bytes, owner, &off, &s->error) == PMS_OK);
    CHECK(off % PMS_LINE == 0 && (bytes < PMS_HUGE || off % PMS_HUGE == 0));
    return off;
}

static inline uint64_t alloc(struct store *s, uint64_t bytes)
{
    return alloc_as(s, bytes, PMS_OWNER_USER);
}

static inline void release(struct store *s, uint64_t off)
{
    CHECK(pms_heap_free(s->heap, off, &s->error) == PMS_OK);
}

static inline void pin(struct store *s, uint64_t off)
{
    CHECK(pms_heap_pin(s->heap, off, &s->error) == PMS_OK);
}

static inline struct pms_heap_stats stats(const struct store *s)
{
    struct pms_heap_stats st;
    pms_heap_stats(s->heap, &st);
    return st;
}

static inline int count_block(void *ctx, const struct pms_block *block)
{
    (void)block;
    ++*(uint64_t *)ctx;
    return 0;
}

static inline uint64_t walked(struct store *s)
{
    uint64_t n = 0;
    CHECK(pms_heap_walk(s->heap, count_block, &n, &s->error) == PMS_OK);
    return n;
}

static inline int not_fresh(void *ctx, const struct pms_block *b)
{
    CHECK(!pms_heap_is_fresh(ctx, b->off));
    return 0;
}

/* The running index says what an index made anew from the medium says. REQUIRES: no pins,
 * nothing freed since the commit. */
static inline void check_index(struct store *s)
{
    struct pms_heap *other;
    CHECK(pms_heap_open(&other, &s->undo, &s->super, &s->error) == PMS_OK);
    struct pms_heap_stats a, b;
    pms_heap_stats(s->heap, &a);
    pms_heap_stats(other, &b);
    CHECK(memcmp(&a, &b, sizeof a) == 0);
    CHECK(pms_heap_walk(other, not_fresh, other, &s->error) == PMS_OK);
    pms_heap_close(other);
}

static uint64_t random_state = 88172645463325252ull;

static inline uint64_t rnd(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) % n;
}

/* [2^low, 2^high), 64 steps to each octave */
static inline uint64_t log_uniform(unsigned low_bits, unsigned high_bits)
{
    uint64_t octave = low_bits + rnd(high_bits - low_bits), step = rnd(64);
    uint64_t size = 1ull << octave;
    return size + (uint64_t)((double)size * ((double)step + (double)rnd(100) / 100) / 64);
}

#endif
