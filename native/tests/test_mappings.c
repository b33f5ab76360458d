/* The process keeps a quarter of its mappings, wherever stores are written to: scattered pages,
 * between which others lie that may be captured too, or that may not, in two stores at once.
 * What was written is what is read, committed and rolled back. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "seam/mappings.h"
#include "commit/pool_state.h"
#include "objects/pms.h"
#include "test.h"

#define LIMIT 2000
#define BLOCKS 4000u
/* of two stores: hot ranges, and pages of the engine's */
#define LEFT (2 * 2 * PMS_HOT_RANGES + 40)
#define MOST (LIMIT / 4 * 3 + 2) /* whoever comes to three quarters parts one mapping more */

static const int domains[] = {PMS_DOMAIN_PROCESS, PMS_DOMAIN_EMULATED, PMS_DOMAIN_FILE};
static char path[256];
static int domain;
static struct pms_error e;
static struct pms_pool *store[2];
static unsigned char *block[2][BLOCKS];
static uint32_t order[BLOCKS];
static uint64_t seed;

static uint32_t draw(uint32_t n)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(seed >> 33) % n;
}

static struct pms_pool *new_store(int number)
{
    struct pms_pool *pool = NULL;
    char name[300];
    struct pms_options o = {
        .size = 48u << 20, .mode = PMS_MODE_TRUNCATE, .domain = domain, .hot = 1};
    snprintf(name, sizeof name, "%s.%d", path, number);
    CHECK(pms_pool_open(name, &o, &pool, &e) == PMS_OK);
    unlink(name);
    return pool;
}

/* Blocks of a page each, every one full of its number. holes: of three only two stay. */
static void fill_stores(bool holes)
{
    for (int s = 0; s < 2; s++) {
        struct pms_pool *pool = store[s] = new_store(s);
        for (uint32_t i = 0; i < BLOCKS; i++) {
            char name[12];
            uint64_t at = 0;
            uint32_t n = (uint32_t)snprintf(name, sizeof name, "%u", i);
            CHECK(pms_object_put_array(pool, 0, name, n, "m", 1, PMS_PAGE, PMS_FILL_PATTERN, &i,
                                       sizeof i, 1, &at, &e) == PMS_OK);
            block[s][i] = pool->map.user + at;
        }
        CHECK(pms_commit(pool, &e) == PMS_OK);
        for (uint32_t i = 0; holes && i < BLOCKS; i += 3) {
            char name[12];
            uint32_t n = (uint32_t)snprintf(name, sizeof name, "%u", i);
            CHECK(pms_object_remove(pool, 0, name, n, &e) == PMS_OK);
            block[s][i] = NULL;
        }
        CHECK(pms_commit(pool, &e) == PMS_OK);
    }
}

static void check_content(uint32_t add)
{
    uint64_t wrong = 0;
    for (int s = 0; s < 2; s++)
        for (uint32_t i = 0; i < BLOCKS; i++)
            for (uint32_t k = 0; block[s][i] && k < PMS_PAGE; k += k < 16 ? 4 : 340) {
                uint32_t found;
                memcpy(&found, block[s][i] + k, sizeof found);
                wrong += found != i + (k == 8 && i % 2 ? add : 0);
            }
    CHECK(wrong == 0);
}

/* Every second block, in this order. */
static int64_t write_stores(uint32_t add)
{
    int64_t most = 0;
    for (uint32_t n = 0; n < BLOCKS; n++)
        for (int s = 0; s < 2; s++) {
            uint32_t i = order[n], value = i + add;
            if (!block[s][i] || i % 2 == 0)
                continue;
            memcpy(block[s][i] + 8, &value, sizeof value);
            most = pms_mappings_used() > most ? pms_mappings_used() : most;
        }
    return most;
}

static void scattered_writes(bool holes, bool random)
{
    CHECK(pms_mappings_used() == 0);
    fill_stores(holes);
    for (uint32_t i = 0; i < BLOCKS; i++)
        order[i] = BLOCKS - 1 - i;
    for (uint32_t i = BLOCKS - 1; random && i > 0; i--) {
        uint32_t other = draw(i + 1), x = order[i];
        order[i] = order[other];
        order[other] = x;
    }
    for (uint32_t round = 1; round < 4; round++) {
        int64_t most = write_stores(round);
        CHECK(most >= LIMIT / 2 && most <= MOST);
        check_content(round);
        most = write_stores(round); /* what was protected meanwhile, prepared as it is */
        CHECK(most <= MOST);
        check_content(round);
        for (int s = 0; s < 2; s++)
            CHECK((round == 2 ? pms_rollback(store[s], &e) : pms_commit(store[s], &e)) == PMS_OK);
        check_content(round == 2 ? 1 : round);
        CHECK(pms_mappings_used() <= LEFT);
    }
    for (int s = 0; s < 2; s++) {
        struct pms_check_report report;
        CHECK(pms_check(store[s], &report, &e) == PMS_OK && report.problem_count == 0);
        CHECK(pms_pool_close(store[s], 0, &e) == PMS_OK);
        pms_pool_release(store[s]);
    }
    CHECK(pms_mappings_used() == 0);
}

static void every_second_page(void) { scattered_writes(false, false); }
static void pages_in_any_order(void) { scattered_writes(false, true); }
static void between_what_is_free(void) { scattered_writes(true, false); }
static void between_what_is_free_in_any_order(void) { scattered_writes(true, true); }

static void the_limit_is_the_systems(void)
{
    long long found = 0;
    FILE *file = fopen("/proc/sys/vm/max_map_count", "r");
    CHECK(file && fscanf(file, "%lld", &found) == 1 && found > 0);
    fclose(file);
    pms_mappings_set_limit(0);
    pms_mappings_add(found / 4 * 3 - 1);
    CHECK(!pms_mappings_spent(1000) && pms_mappings_reach() > 0);
    pms_mappings_add(1);
    /* a store that has made few gives up none */
    CHECK(pms_mappings_spent(1000) && !pms_mappings_spent(100));
    pms_mappings_add(-(found / 4 * 3));
    CHECK(pms_mappings_reach() == 0 && pms_mappings_used() == 0);
    pms_mappings_add(found / 2 - 1);
    CHECK(pms_mappings_reach() == 0);
    pms_mappings_add(-(found / 2 - 1));
}

int main(void)
{
    snprintf(path, sizeof path, "/dev/shm/pms-test-mappings-%d", (int)getpid());
    TEST(the_limit_is_the_systems);
    pms_mappings_set_limit(LIMIT);
    for (unsigned i = 0; i < sizeof domains / sizeof *domains; i++) {
        domain = domains[i];
        TEST(every_second_page);
        TEST(pages_in_any_order);
        TEST(between_what_is_free);
        TEST(between_what_is_free_in_any_order);
    }
    return test_summary();
}
