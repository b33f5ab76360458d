/* Stores with slots whose log is a hole until they are captured, and a disk that is full. */
#ifndef PMS_TESTS_THIN_STORE_H
#define PMS_TESTS_THIN_STORE_H

#include <errno.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "one_store.h"

#define MIB (1ull << 20)
/* in domain file the journal's first ring has room for less */
#define SLOT (domain == PMS_DOMAIN_FILE ? 10 * MIB : 3 * MIB)
#define SIZE (domain == PMS_DOMAIN_FILE ? 64 * MIB : 24 * MIB)
#define BESIDE (600u << 10)
#define SLACK (2 * MIB + MIB / 2) /* a step of the backing, and what is beside the slots */

static struct pms_slot_pair pair;

static inline bool find(void) { return ok(pms_slot_find(pool, 0, "w", 1, &pair, &e)); }
static inline unsigned char *slot(uint32_t which) { return memory(pair.data[which]); }

static inline uint64_t allocated(void)
{
    struct stat st;
    CHECK(stat(path, &st) == 0);
    return (uint64_t)st.st_blocks * 512;
}

static inline bool all(const unsigned char *at, uint64_t n, int value)
{
    for (uint64_t i = 0; i < n; i += 509)
        if (at[i] != value)
            return false;
    return true;
}

static inline int make_slots_for(const char *name, uint64_t bytes, int in_place)
{
    return pms_object_make_slots(pool, 0, name, (uint32_t)strlen(name), "\x81\xa5slots", 8, "m", 1,
                                 bytes, in_place, &e);
}
static inline int make_slots(const char *name, uint64_t bytes)
{
    return make_slots_for(name, bytes, 0);
}

static inline int put_array(const char *name, uint64_t bytes, uint64_t *data)
{
    return pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes, PMS_FILL_ZERO,
                                NULL, 0, 0, data, &e);
}

static inline void open_with(int mode, uint64_t size, int hold)
{
    struct pms_options o = {.size = size, .mode = mode, .domain = domain, .hot = 1, .hold = hold};
    if (!ok(pms_pool_open(path, &o, &pool, &e)))
        abort();
}

static uint64_t beside;

static inline void made(void)
{
    open_with(PMS_MODE_TRUNCATE, SIZE, 0);
    CHECK(ok(put_array("beside", BESIDE, &beside)));
    CHECK(ok(make_slots("w", SLOT)));
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(find());
}

static inline void step(int value)
{
    CHECK(ok(open_next("w")));
    memset(slot(!pair.current), value, SLOT);
    CHECK(ok(pms_slot_flip(pool, 0, "w", 1, NULL, &e)));
    CHECK(find());
}

static inline int declare(uint64_t off, uint64_t bytes)
{
    struct pms_range r = {(uint64_t)(uintptr_t)memory(off), bytes};
    return pms_will_write(pool, &r, 1, &e);
}

/* ---- a disk that is full ---- */

static _Atomic bool full;
static _Atomic int asked, fail_at;

static int refuse(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)addr;
    if (primitive != PMS_PRIM_ALLOCATE || !bytes)
        return 0;
    int n = ++asked;
    return full || n == fail_at ? ENOSPC : 0;
}

static uint64_t blocks_before;

static inline void disk_is_full(void)
{
    blocks_before = allocated();
    full = true;
    pms_persist_hook = refuse;
}

static inline void disk_has_room(void)
{
    pms_persist_hook = NULL;
    full = false;
    CHECK(allocated() <= blocks_before);
}

#endif
