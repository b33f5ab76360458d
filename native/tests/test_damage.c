/* A flipped bit in the head of a store, where the bytes around it still make sense: only the
 * checksum can tell. */
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commit/pool_state.h"
#include "objects/pms.h"
#include "heap/super.h"
#include "test.h"

static char path[256];

static struct pms_pool *open_store(int mode, struct pms_error *e)
{
    struct pms_options o = {.size = 2u << 20, .mode = mode, .domain = PMS_DOMAIN_PROCESS, .hot = 1};
    struct pms_pool *pool = NULL;
    return pms_pool_open(path, &o, &pool, e) == PMS_OK ? pool : NULL;
}

static void make_store(void)
{
    struct pms_error e;
    struct pms_pool *pool = open_store(PMS_MODE_TRUNCATE, &e);
    if (!pool || pms_object_put_value(pool, 0, "name", 4, "value", 5, &e) != PMS_OK ||
        pms_commit(pool, &e) != PMS_OK || pms_pool_close(pool, 0, &e) != PMS_OK)
        abort();
    pms_pool_release(pool);
}

static void flip(uint64_t off, unsigned bit)
{
    unsigned char byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (pread(fd, &byte, 1, (off_t)off) != 1)
        abort();
    byte ^= (unsigned char)(1u << bit);
    if (pwrite(fd, &byte, 1, (off_t)off) != 1)
        abort();
    close(fd);
}

/* PMS_OK: it opens and finds what is in it. */
static int found(void)
{
    struct pms_error e;
    struct pms_object o;
    struct pms_pool *pool = open_store(PMS_MODE_READ_WRITE, &e);
    if (!pool)
        return e.status;
    int status = pms_object_find(pool, 0, "name", 4, &o, &e);
    pms_pool_release(pool);
    return status;
}

static void either_copy_of_the_superblock_serves(void)
{
    /* with another one names are not found */
    uint64_t seed = offsetof(struct pms_superblock, hash_seed);
    for (uint64_t copy = 0; copy < 2; copy++) {
        make_store();
        flip(PMS_OFF_SUPER(copy) + seed, 3);
        CHECK(found() == PMS_OK);
        flip(PMS_OFF_SUPER(!copy) + seed, 3);
        CHECK(found() == PMS_E_CORRUPT);
    }
}

static void the_anchor_is_checked(void)
{
    make_store();
    CHECK(found() == PMS_OK);
    for (unsigned bit = 0; bit < PMS_TX_BITS; bit += 5) {
        make_store();
        flip(PMS_OFF_ANCHOR + bit / 8, bit % 8);
        CHECK(found() == PMS_E_CORRUPT);
    }
}

int main(void)
{
    const char *folder = getenv("PMS_TEST_DIR");
    snprintf(path, sizeof path, "%s/pms-test-damage-%ld", folder ? folder : "/dev/shm",
             (long)getpid());
    TEST(either_copy_of_the_superblock_serves);
    TEST(the_anchor_is_checked);
    unlink(path);
    return test_summary();
}
