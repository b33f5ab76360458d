/* A store in anonymous memory, with one directory. */
#ifndef PMS_TESTS_DIRECTORY_STORE_H
#define PMS_TESTS_DIRECTORY_STORE_H

#include "test.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/checksum.h"
#include "log/entries.h"
#include "names/directory_table.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 10u
#else
#define SLOWER 1u
#endif

/* ---- a store in anonymous memory, with one directory ---- */

struct store {
    struct pms_superblock super;
    struct pms_persist persist;
    struct pms_map map;
    struct pms_undo undo;
    struct pms_heap *heap;
    struct pms_dir_ctx ctx;
    struct pms_error error;
    uint64_t tag;
    uint64_t dir;
};

static inline uint64_t pages_of(uint64_t bytes) { return (bytes + PMS_PAGE - 1) / PMS_PAGE; }

static inline void commit(struct store *s)
{
    pms_heap_committed(s->heap, false);
    pms_undo_begin(&s->undo, ++s->tag);
}

static inline void rollback(struct store *s)
{
    uint64_t bytes;
    CHECK(pms_undo_apply(&s->undo, s->tag, s->map.engine, &s->super, &bytes) >= 0);
    pms_undo_begin(&s->undo, ++s->tag);
    CHECK(pms_heap_rebuild(s->heap, &s->error) == PMS_OK);
}

static inline void store_open(struct store *s, uint64_t pages)
{
    memset(s, 0, sizeof *s);
    struct pms_segment *g = &s->super.segment[s->super.segment_count++];
    g->table_off = PMS_OFF_SEGMENTS;
    g->log_off = g->table_off + pages_of(pages * sizeof(struct pms_pte)) * PMS_PAGE;
    g->log_bytes = (2 * pages + 64) * PMS_PAGE;
    g->data_off = (g->log_off + g->log_bytes + PMS_HUGE - 1) / PMS_HUGE * PMS_HUGE;
    g->data_pages = pages;
    s->super.file_bytes = g->data_off + pages * PMS_PAGE;
    int fd = memfd_create("directory", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)s->super.file_bytes) == 0);
    CHECK(pms_map_open(&s->map, fd, s->super.file_bytes, s->super.file_bytes + (1u << 30),
                       PMS_MAP_SHARED, &s->persist, &s->error) == PMS_OK);
    uint64_t word = pages | (uint64_t)PMS_KIND_FREE << 44;
    struct pms_pte free_pages = {word | (uint64_t)pms_check16(g->data_off / PMS_PAGE, word) << 48,
                                 0};
    memcpy(pms_map_at(&s->map, g->table_off), &free_pages, sizeof free_pages);
    CHECK(pms_undo_open(&s->undo, &s->map, false, &s->error) == PMS_OK);
    pms_undo_set_extents(&s->undo, &s->super);
    CHECK(pms_heap_open(&s->heap, &s->undo, &s->super, &s->error) == PMS_OK);
    s->ctx = (struct pms_dir_ctx){&s->undo, s->heap, 0x5eed5eed5eed5eedull};
    pms_undo_begin(&s->undo, ++s->tag);
    CHECK(pms_dir_create(&s->ctx, &s->dir, &s->error) == PMS_OK);
}

static inline void store_close(struct store *s)
{
    int fd = s->map.fd;
    pms_heap_close(s->heap);
    pms_undo_close(&s->undo);
    pms_map_close(&s->map);
    close(fd);
}

static uint64_t random_state = 88172645463325252ull;

static inline uint64_t rnd(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (random_state >> 11) % n;
}

static inline uint64_t live_blocks(const struct store *s)
{
    struct pms_heap_stats st;
    pms_heap_stats(s->heap, &st);
    return st.blocks;
}

static inline uint64_t user_block(struct store *s, uint64_t bytes) /* 0: no room */
{
    uint64_t off = 0;
    return pms_heap_alloc(s->heap, bytes, PMS_OWNER_USER, &off, NULL) == PMS_OK ? off : 0;
}

static inline int put(struct store *s, const char *name, const void *meta, uint32_t bytes)
{
    return pms_dir_put(&s->ctx, s->dir, name, (uint32_t)strlen(name), PMS_OBJECT_VALUE, meta, bytes,
                       0, 0, &s->error);
}

static inline int find(struct store *s, const char *name, struct pms_object *o)
{
    return pms_dir_find(&s->ctx, s->dir, name, (uint32_t)strlen(name), o, &s->error);
}

static inline int drop(struct store *s, const char *name)
{
    return pms_dir_remove(&s->ctx, s->dir, name, (uint32_t)strlen(name), &s->error);
}

static inline int count_owner(void *arg, uint64_t off, const struct pms_object *object)
{
    (void)off;
    (void)object;
    ++*(uint64_t *)arg;
    return 0;
}

static inline int check(struct store *s, uint64_t *owned)
{
    *owned = 0;
    return pms_dir_check(&s->ctx, s->dir, count_owner, owned, &s->error);
}

static inline void check_sound(struct store *s)
{
    uint64_t owned;
    CHECK(check(s, &owned) == PMS_OK);
    CHECK(owned == live_blocks(s));
}

struct sum {
    const struct store *s;
    uint32_t crc;
};

#endif
