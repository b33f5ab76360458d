/* Readers beside a writer, in one process: each version that is shown is whole; nothing is left of
 * either. */
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "equal_items.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define VERSIONS 60
#else
#define VERSIONS 400
#endif

static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
static _Atomic bool stop;

static struct pms_pool *open_as(int mode, int domain, bool keep)
{
    struct pms_options o = {.size = 1u << 20,
                            .mode = mode,
                            .domain = domain,
                            .hot = 1,
                            .beside = mode == PMS_MODE_READ,
                            .keep = keep};
    struct pms_pool *p = NULL;
    struct pms_error e = {0};
    if (pms_pool_open(path, &o, &p, &e) != PMS_OK)
        printf("open: %d errno %d %s\n", e.status, e.sys_errno, e.what);
    return p;
}

/* All of its items, if they are one number; (uint64_t)-1: they are not; -2: lost. */
static uint64_t get(struct pms_pool *p, const char *name)
{
    struct pms_object o;
    struct pms_error e = {0};
    int status = pms_object_get(p, 0, name, (uint32_t)strlen(name), &o, &e);
    if (status == PMS_E_LOST)
        return (uint64_t)-2;
    CHECK(status == PMS_OK);
    const uint64_t *at = array(p, o.data);
    uint64_t value = at[0];
    for (uint64_t i = 0; i < o.data_bytes / 8; i++)
        if (at[i] != value)
            value = (uint64_t)-1;
    pms_unpin(p, o.data);
    return value;
}

static void *write_versions(void *arg)
{
    struct pms_pool *p = arg;
    struct pms_error e;
    struct pms_object o;
    uint64_t state = 1;
    for (uint64_t n = 2; !atomic_load(&stop); n++) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        if (state >> 60 == 0) /* another block, now and then a larger one, and growth */
            put(p, "a", ITEMS + (state >> 40) % (50 * ITEMS), n);
        CHECK(pms_object_get(p, 0, "a", 1, &o, &e) == PMS_OK);
        uint64_t *at = array(p, o.data);
        for (uint64_t i = 0; i < o.data_bytes / 8; i++)
            at[i] = n;
        pms_unpin(p, o.data);
        put(p, "b", 20, n);
        if (state >> 61 == 1)
            CHECK(pms_rollback(p, &e) == PMS_OK);
        else
            CHECK(pms_commit(p, &e) == PMS_OK);
    }
    return NULL;
}

/* PMS_VERSIONS=350000: a million checks. */
static void each_version_is_whole(void)
{
    const char *asked = getenv("PMS_VERSIONS");
    int versions = asked ? atoi(asked) : VERSIONS;
    for (size_t d = 0; d < sizeof domains / sizeof *domains; d++) {
        struct pms_pool *writer = open_as(PMS_MODE_TRUNCATE, domains[d], false);
        struct pms_error e;
        put(writer, "a", ITEMS, 1);
        put(writer, "b", 20, 1);
        CHECK(pms_commit(writer, &e) == PMS_OK);
        pthread_t thread;
        atomic_store(&stop, false);
        pthread_create(&thread, NULL, write_versions, writer);
        uint64_t newest = 0, lost = 0, epoch = 0;
        for (int i = 0; i < versions; i++) {
            struct pms_pool *reader = open_as(PMS_MODE_READ, PMS_DOMAIN_AUTO, i % 2);
            CHECK(reader && pms_epoch(reader) >= epoch);
            epoch = pms_epoch(reader);
            uint64_t b = get(reader, "b"), a = get(reader, "a");
            CHECK(b != (uint64_t)-1 && a != (uint64_t)-1);
            bool both = a != (uint64_t)-2 && b != (uint64_t)-2;
            CHECK(!both || a == b);
            CHECK(!both || a >= newest);
            lost += !both;
            newest = both ? a : newest;
            pms_pool_release(reader);
        }
        CHECK(lost < (uint64_t)versions && newest > 1);
        atomic_store(&stop, true);
        pthread_join(thread, NULL);
        pms_pool_release(writer);
    }
}

static bool is_bare(struct pms_pool *p, uint64_t off)
{
    pms_undo_lock(&p->undo);
    const struct pms_dirty *d = pms_dirty_first(&p->undo.dirty);
    while (d < pms_dirty_end(&p->undo.dirty) &&
           (d->kind != PMS_DIRTY_BARE || off < d->off || off >= d->off + d->len))
        d++;
    bool bare = d < pms_dirty_end(&p->undo.dirty);
    pms_undo_unlock(&p->undo);
    return bare;
}

static uint32_t entries_of(struct pms_pool *p)
{
    pms_undo_lock(&p->undo);
    uint32_t entries = (uint32_t)pms_undo_entries(&p->undo);
    pms_undo_unlock(&p->undo);
    return entries;
}

/* A first large write of a page leaves its pre-image in the file alone (log/bare.h). */
static void a_reader_comes_in_the_middle_of_a_first_write(void)
{
    const uint64_t items = 512u << 10;
    struct pms_error e;
    struct pms_object o;
    struct pms_pool *writer = open_as(PMS_MODE_TRUNCATE, PMS_DOMAIN_FILE, false);
    put(writer, "a", items, 1);
    CHECK(pms_pool_close(writer, 1, &e) == PMS_OK);
    pms_pool_release(writer);
    writer = open_as(PMS_MODE_READ_WRITE, PMS_DOMAIN_FILE, false);
    CHECK(pms_object_find(writer, 0, "a", 1, &o, &e) == PMS_OK);
    struct pms_range half = {(uint64_t)(uintptr_t)array(writer, o.data), items / 2 * 8};
    CHECK(pms_will_write(writer, &half, 1, &e) == PMS_OK && is_bare(writer, o.data));
    for (uint64_t i = 0; i < items / 2; i++)
        array(writer, o.data)[i] = 2;
    for (uint64_t version = 1; version < 4; version++) {
        struct pms_pool *reader = open_as(PMS_MODE_READ, 0, false);
        CHECK(reader && get(reader, "a") == version);
        if (reader)
            pms_pool_release(reader);
        for (uint64_t i = 0; i < items; i++)
            array(writer, o.data)[i] = version + 1;
        CHECK(pms_commit(writer, &e) == PMS_OK);
    }
    CHECK(pms_pool_close(writer, 0, &e) == PMS_OK);
    pms_pool_release(writer);
}

static void *open_reader(void *reader)
{
    *(struct pms_pool **)reader = open_as(PMS_MODE_READ, 0, false);
    return NULL;
}

/* Whoever needs the log lock many times waits long. */
static void *hold_the_lock(void *pool)
{
    struct pms_undo *u = &((struct pms_pool *)pool)->undo;
    while (!atomic_load(&stop)) {
        pms_undo_lock(u);
        usleep(5000);
        pms_undo_unlock(u);
        usleep(50);
    }
    return NULL;
}

static bool has(struct pms_pool *p, const char *name)
{
    struct pms_object o;
    struct pms_error e;
    return pms_object_find(p, 0, name, (uint32_t)strlen(name), &o, &e) == PMS_OK;
}

/* It knows what was grown between its question and its version: the pre-images that are read for it
 * come a MiB at a time, and the store grows meanwhile. */
static void a_reader_comes_in_the_middle_of_a_growth(void)
{
    const uint64_t items = 8u << 20;
    struct pms_error e;
    struct pms_object o;
    struct pms_pool *reader = NULL, *writer = open_as(PMS_MODE_TRUNCATE, PMS_DOMAIN_FILE, false);
    put(writer, "a", items, 1);
    CHECK(pms_pool_close(writer, 1, &e) == PMS_OK);
    pms_pool_release(writer);
    writer = open_as(PMS_MODE_READ_WRITE, PMS_DOMAIN_FILE, false);
    CHECK(pms_object_find(writer, 0, "a", 1, &o, &e) == PMS_OK);
    struct pms_range all = {(uint64_t)(uintptr_t)array(writer, o.data), items * 8};
    CHECK(pms_will_write(writer, &all, 1, &e) == PMS_OK && is_bare(writer, o.data));
    uint32_t segments = writer->super.segment_count, before = entries_of(writer);
    pthread_t asks, holds;
    atomic_store(&stop, false);
    CHECK(pthread_create(&holds, NULL, hold_the_lock, writer) == 0);
    CHECK(pthread_create(&asks, NULL, open_reader, &reader) == 0);
    while (entries_of(writer) == before)
        usleep(100);
    put(writer, "b", items, 2);
    CHECK(writer->super.segment_count > segments && pms_commit(writer, &e) == PMS_OK);
    atomic_store(&stop, true);
    pthread_join(asks, NULL);
    pthread_join(holds, NULL);
    bool grown = reader && pms_epoch(reader) == pms_epoch(writer);
    CHECK(reader && get(reader, "a") == 1 && has(reader, "b") == grown);
    CHECK(!grown || get(reader, "b") == 2);
    pms_pool_release(writer);
    if (reader)
        pms_pool_release(reader);
}

static void what_was_read_stays(void)
{
    struct pms_error e;
    struct pms_object o;
    struct pms_pool *writer = open_as(PMS_MODE_TRUNCATE, PMS_DOMAIN_PROCESS, false);
    put(writer, "a", ITEMS, 1);
    put(writer, "b", ITEMS, 1);
    CHECK(pms_commit(writer, &e) == PMS_OK);
    struct pms_pool *reader = open_as(PMS_MODE_READ, PMS_DOMAIN_AUTO, false);
    CHECK(pms_object_get(reader, 0, "a", 1, &o, &e) == PMS_OK);
    const uint64_t *a = array(reader, o.data);
    int old = 1;
    CHECK(pms_is_old(reader, &old, &e) == PMS_OK && !old);
    put(writer, "a", ITEMS, 2);
    CHECK(pms_is_old(reader, &old, &e) == PMS_OK && !old);
    CHECK(pms_commit(writer, &e) == PMS_OK);
    CHECK(pms_is_old(reader, &old, &e) == PMS_OK && old);
    CHECK(a[0] == 1 && a[ITEMS - 1] == 1);
    pms_pool_release(writer);
    struct pms_object other;
    CHECK(pms_object_get(reader, 0, "b", 1, &other, &e) == PMS_E_LOST);
    CHECK(pms_is_old(reader, &old, &e) == PMS_OK && old);
    CHECK(a[0] == 1 && a[ITEMS - 1] == 1);
    CHECK(pms_pool_close(reader, 0, &e) == PMS_OK);
    CHECK(a[0] == 1 && a[ITEMS - 1] == 1);
    pms_unpin(reader, o.data);
    pms_pool_release(reader);
}

static void can_be_read(void)
{
    struct pms_pool *reader = open_as(PMS_MODE_READ, PMS_DOMAIN_AUTO, false);
    CHECK(reader && get(reader, "a") == 1);
    if (reader)
        pms_pool_release(reader);
}

/* Its log is overwritten before the store is open for writing: who reads the file is told. */
static void another_domain_is_noticed(void)
{
    struct pms_error e;
    int old = 0;
    struct pms_pool *writer = open_as(PMS_MODE_TRUNCATE, PMS_DOMAIN_PROCESS, false);
    put(writer, "a", ITEMS, 1);
    CHECK(pms_commit(writer, &e) == PMS_OK);
    pms_pool_release(writer);
    struct pms_pool *reader = open_as(PMS_MODE_READ, PMS_DOMAIN_AUTO, false);
    CHECK(pms_is_old(reader, &old, &e) == PMS_OK && !old);
    struct pms_options o = {
        .max_size = PMS_PAGE, .mode = PMS_MODE_READ_WRITE, .domain = PMS_DOMAIN_FILE};
    CHECK(pms_pool_open(path, &o, &writer, &e) == PMS_E_INVALID); /* after the log is another */
    CHECK(pms_is_old(reader, &old, &e) == PMS_OK && old);
    CHECK(get(reader, "a") == (uint64_t)-2);
    pms_pool_release(reader);
    can_be_read();
}

#ifndef __SANITIZE_THREAD__
static void nothing_is_left(void)
{
    int before = open("/dev/null", O_RDONLY);
    close(before);
    for (int i = 0; i < 20; i++) {
        struct pms_pool *writer = open_as(PMS_MODE_TRUNCATE, PMS_DOMAIN_PROCESS, false);
        struct pms_error e;
        put(writer, "a", 20, 1);
        put(writer, "b", 20, 1);
        CHECK(pms_commit(writer, &e) == PMS_OK);
        struct pms_pool *reader = open_as(PMS_MODE_READ, PMS_DOMAIN_AUTO, false);
        CHECK(get(reader, "a") == 1);
        if (i % 2)
            pms_pool_release(writer);
        pms_pool_release(reader);
        if (i % 2 == 0)
            pms_pool_release(writer);
    }
    int after = open("/dev/null", O_RDONLY);
    close(after);
    CHECK(after == before);
}
#endif

int main(void)
{
    snprintf(path, sizeof path, "/dev/shm/pms-test-beside-%ld", (long)getpid());
    TEST(a_reader_comes_in_the_middle_of_a_first_write);
    TEST(a_reader_comes_in_the_middle_of_a_growth);
    TEST(what_was_read_stays);
#ifndef __SANITIZE_THREAD__ /* there the thread that answers has no table of its own */
    TEST(nothing_is_left);
#endif
    TEST(another_domain_is_noticed);
    TEST(each_version_is_whole);
    unlink(path);
    return test_summary();
}
