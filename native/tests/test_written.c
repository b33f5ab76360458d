/* Whether ranges are other than in the last commit. */
#include <stdlib.h>
#include <unistd.h>

#include "declared.h"
#include "one_store.h"

#define SMALL 64u
#define LARGE (5u << 20) /* several entries of the log */

static uint64_t put(const char *name, uint64_t bytes)
{
    uint64_t data = 0;
    CHECK(ok(pms_object_put_array(pool, 0, name, (uint32_t)strlen(name), "m", 1, bytes,
                                  PMS_FILL_ZERO, NULL, 0, 1, &data, &e)));
    return data;
}

static bool written(uint64_t off, uint64_t bytes)
{
    struct pms_range r = {(uint64_t)(uintptr_t)memory(off), bytes};
    int32_t answer = -1;
    CHECK(ok(pms_written(pool, &r, 1, &answer, &e)));
    CHECK(answer == 0 || answer == 1);
    return answer == 1;
}

static void commit(void) { CHECK(ok(pms_commit(pool, &e))); }

static void small_ones(uint64_t a, uint64_t b)
{
    CHECK(a / PMS_PAGE == b / PMS_PAGE); /* side by side, captured together */
    memory(a)[3] = 1;
    CHECK(written(a, SMALL) && !written(b, SMALL));
    CHECK(written(a + 3, 1) && !written(a, 3) && !written(a + 4, SMALL - 4));
    memory(a)[3] = 0; /* as it was */
    CHECK(!written(a, SMALL));
    memory(b)[0] = 2;
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(!written(b, SMALL));
    for (int i = 1; i < 12; i++) { /* the page becomes hot: it stays writable */
        memory(b)[0] = (unsigned char)i;
        CHECK(written(b, SMALL) && !written(a, SMALL));
        commit();
        CHECK(!written(b, SMALL));
    }
    memory(a)[0] = 1;
    CHECK(written(a, SMALL) && !written(b, SMALL));
    commit();
}

static void large_one(uint64_t c, uint64_t a)
{
    unsigned char *bytes = calloc(1, LARGE);
    CHECK(bytes && ok(declared_write(pool, memory(c), bytes, LARGE, &e)));
    free(bytes);
    CHECK(!written(c, LARGE)); /* captured, and the same */
    memory(c)[LARGE - 1] = 1;
    CHECK(written(c, LARGE) && written(c + LARGE - 1, 1) && !written(c, LARGE - 1));
    CHECK(!written(a, SMALL));
    commit();
    CHECK(!written(c, LARGE));
}

static void refused(uint64_t a)
{
    int32_t answer = 7;
    struct pms_range outside = {(uint64_t)(uintptr_t)memory(a) + (1ull << 50), 8}, below = {8, 8},
                     endless = {(uint64_t)(uintptr_t)memory(a), UINT64_MAX};
    CHECK(pms_written(pool, &outside, 1, &answer, &e) == PMS_E_INVALID);
    CHECK(pms_written(pool, &below, 1, &answer, &e) == PMS_E_INVALID);
    CHECK(pms_written(pool, &endless, 1, &answer, &e) == PMS_E_INVALID);
    CHECK(answer == 7);
    CHECK(ok(pms_written(pool, NULL, 0, &answer, &e)) && answer == 0);
    memory(a)[0]++;
    CHECK(ok(pms_written(pool, NULL, 0, &answer, &e)) && answer == 1);
    commit();
    uint64_t d = put("d", SMALL);
    CHECK(d && ok(pms_written(pool, NULL, 0, &answer, &e)) && answer == 1);
}

int main(void)
{
    snprintf(path, sizeof path, "/dev/shm/pms_test_written_%d.pm", (int)getpid());
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        unlink(path);
        CHECK(open_store(PMS_MODE_APPEND));
        uint64_t a = put("a", SMALL), b = put("b", SMALL), c = put("c", LARGE);
        commit();
        CHECK(!written(a, SMALL) && !written(c, LARGE));
        small_ones(a, b);
        large_one(c, a);
        refused(a);
        close_store();
    }
    unlink(path);
    puts("written: ok");
    return 0;
}
