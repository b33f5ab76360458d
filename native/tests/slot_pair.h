/* A pair of slots, "w", in a test's one store, and a captured array beside it. */
#ifndef PMS_TESTS_SLOT_PAIR_H
#define PMS_TESTS_SLOT_PAIR_H

#include <string.h>

#include "one_store.h"

#define BYTES (96u << 10) /* of a slot: an extent of its own */

struct pair {
    uint64_t slot[2];
    int current;
};

static bool find(struct pair *p)
{
    struct pms_slot_pair found;
    int status = pms_slot_find(pool, 0, "w", 1, &found, &e);
    CHECK(status == PMS_OK || status == PMS_E_NOT_FOUND);
    *p = (struct pair){{found.data[0], found.data[1]}, (int)found.current};
    return status == PMS_OK;
}

static void make_pair(void)
{
    uint64_t group, data;
    CHECK(ok(pms_object_group(pool, 0, "w", 1, 1, &group, &e)));
    for (int i = 0; i < 2; i++)
        CHECK(ok(pms_object_put_array(pool, group, i ? "1" : "0", 1, "m", 1, BYTES, PMS_FILL_ZERO,
                                      NULL, 0, 0, &data, &e)));
    CHECK(ok(pms_object_describe_group(pool, 0, "w", 1, "\x81\xa5slots", 8, &e)));
    CHECK(ok(pms_object_put_array(pool, 0, "beside", 6, "m", 1, 5000, PMS_FILL_ZERO, NULL, 0, 0,
                                  &data, &e)));
    CHECK(ok(pms_commit(pool, &e)));
}

static void flip(struct pair *p, int value, bool write)
{
    CHECK(ok(open_next("w")));
    if (write)
        memset(memory(p->slot[!p->current]), value, BYTES);
    CHECK(ok(pms_slot_flip(pool, 0, "w", 1, NULL, &e)));
    p->current = !p->current;
}

#endif
