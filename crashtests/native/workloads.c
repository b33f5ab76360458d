/* Workloads of a few calls each, and the table of all. */
#include "workload.h"

#include <stdio.h>
#include <string.h>

/* A copy of these bytes. */
static void array_of(struct wl *w, const char *name, const void *src, uint64_t bytes)
{
    uint64_t data;
    if (!w->failed)
        wl_done(w, pms_object_put_array(w->pool, 0, name, (uint32_t)strlen(name), "f", 1, bytes,
                                        PMS_FILL_COPY, src, bytes, 0, &data, &w->error));
}

static void write_small(struct wl *w)
{
    wl_data(w, "keep", NULL)[3] = 99;
    wl_commit(w);
}

/* the same line in two transactions: the log of each is whole while it is needed */
static void write_twice(struct wl *w)
{
    wl_data(w, "keep", NULL)[0] = 1;
    wl_commit(w);
    wl_data(w, "keep", NULL)[0] = 2;
    wl_data(w, "keep", NULL)[1] = 2;
    wl_commit(w);
}

static void write_all(struct wl *w)
{
    uint64_t n;
    uint32_t *large = wl_data(w, "large", &n);
    for (uint32_t i = 0; i < n; i++)
        large[i] = i;
    memset(wl_data(w, "medium", NULL), 7, 12000);
    wl_data(w, "keep", NULL)[0] = 5;
    wl_value(w, 0, "value", "two", 3);
    wl_commit(w);
}

static void write_nothing(struct wl *w)
{
    (void)wl_data(w, "keep", NULL);
    wl_commit(w);
    wl_rollback(w);
    wl_commit(w);
}

static void uncommitted(struct wl *w) /* written, and never committed: close rolls back */
{
    memset(wl_data(w, "medium", NULL), 9, 4000);
    wl_value(w, 0, "value", "never", 5);
    wl_array(w, 0, "never", 3000, 1);
}

static void hot(struct wl *w)
{
    for (uint32_t i = 0; i < 10; i++) {
        wl_data(w, "keep", NULL)[i] = i + 100;
        wl_value(w, 0, "value", i % 2 ? "odd" : "evn", 3);
        wl_commit(w);
    }
}

static void hot_and_back(struct wl *w) /* hot ranges under a roll back, and one that cools */
{
    for (uint32_t i = 0; i < 6; i++) {
        wl_data(w, "keep", NULL)[i] = i + 100;
        wl_data(w, "medium", NULL)[i] = i;
        wl_commit(w);
    }
    wl_data(w, "keep", NULL)[2] = 1;
    wl_data(w, "medium", NULL)[2] = 1;
    wl_rollback(w);
    wl_data(w, "medium", NULL)[3] = 4;
    wl_commit(w);
}

static void declared(struct wl *w)
{
    wl_declare(w, (const char *const[]){"medium", "keep"}, 2);
    memset(wl_data(w, "medium", NULL), 1, 12000);
    memset(wl_data(w, "keep", NULL), 2, 64);
    wl_commit(w);
}

static void scattered(struct wl *w) /* small writes, each declared */
{
    for (uint32_t i = 0; i < 12; i++)
        wl_write(w, "large", i * 1537, i);
    wl_write(w, "keep", 3, 8);
    wl_commit(w);
    wl_write(w, "keep", 3, 9);
    wl_rollback(w);
    wl_write(w, "keep", 4, 9);
    /* beside what was declared */
    wl_data(w, "keep", NULL)[5] = 10;
    wl_rollback(w);
    wl_write(w, "keep", 4, 11);
    wl_data(w, "keep", NULL)[5] = 12;
    wl_commit(w);
}

static void values(struct wl *w)
{
    char text[6000];
    memset(text, 'x', sizeof text);
    wl_value(w, 0, "value", "a", 1);
    wl_value(w, 0, "new", "b", 1);
    wl_commit(w);
    wl_value(w, 0, "value", text, sizeof text);
    wl_commit(w);
    wl_value(w, 0, "value", "c", 1);
    wl_remove(w, 0, "new");
    wl_commit(w);
}

static void allocate(struct wl *w)
{
    wl_array(w, 0, "n1", 10, 11);
    wl_commit(w);
    wl_array(w, 0, "n2", 9000, 12);
    wl_commit(w);
}

static void release(struct wl *w)
{
    wl_remove(w, 0, "medium");
    wl_commit(w);
    wl_remove(w, 0, "large");
    wl_commit(w);
}

/* under the same name; freed space is used again one transaction later */
static void replace(struct wl *w)
{
    wl_array(w, 0, "medium", 3100, 13);
    wl_data(w, "medium", NULL)[0] = 1;
    wl_commit(w);
    wl_array(w, 0, "medium", 3000, 14);
    wl_data(w, "medium", NULL)[2999] = 1;
    wl_commit(w);
    wl_array(w, 0, "other", 3000, 15);
    wl_commit(w);
}

static void groups(struct wl *w)
{
    uint64_t h = wl_group(w, wl_group(w, 0, "g"), "h");
    wl_array(w, h, "deep", 700, 1);
    wl_commit(w);
    wl_remove(w, 0, "g");
    wl_remove(w, 0, "group");
    wl_commit(w);
}

static void many_names(struct wl *w) /* the directory's table grows */
{
    char name[16];
    for (int i = 0; i < 70; i++) {
        snprintf(name, sizeof name, "name%d", i);
        wl_value(w, 0, name, "v", 1);
    }
    wl_commit(w);
    for (int i = 0; i < 70; i += 2) {
        snprintf(name, sizeof name, "name%d", i);
        wl_remove(w, 0, name);
    }
    wl_commit(w);
}

static void grow(struct wl *w)
{
    wl_data(w, "keep", NULL)[1] = 1;
    wl_array(w, 0, "huge", 120000, 9);
    wl_data(w, "huge", NULL)[99999] = 1;
    wl_commit(w);
    wl_data(w, "huge", NULL)[5] = 6;
    wl_commit(w);
}

/* of pages: longer than what the journal's recovery replays at a time */
static void long_run(struct wl *w)
{
    wl_array(w, 0, "huge", 300000, 9);
    wl_commit(w);
    memset(wl_data(w, "huge", NULL), 5, 1200000);
    wl_commit(w);
}

static void roll_back(struct wl *w)
{
    wl_begin(w);
    memset(wl_data(w, "large", NULL), 9, 60000);
    wl_array(w, 0, "gone", 3000, 1);
    wl_remove(w, 0, "value");
    wl_end(w, false);
    wl_data(w, "keep", NULL)[2] = 77;
    wl_commit(w);
}

/* more entries than a roll back without memory takes at a time */
static void long_back(struct wl *w)
{
    for (uint32_t i = 0; i < 300; i++)
        wl_write(w, "large", i * 61, i);
    wl_rollback(w);
    wl_data(w, "keep", NULL)[2] = 77;
    wl_commit(w);
}

static void nested(struct wl *w)
{
    wl_data(w, "keep", NULL)[5] = 1; /* pending: entering the block commits it */
    wl_begin(w);
    wl_data(w, "keep", NULL)[6] = 1;
    wl_begin(w);
    wl_value(w, 0, "value", "inner", 5);
    wl_end(w, true);
    wl_data(w, "medium", NULL)[7] = 1;
    wl_end(w, true);
}

static void reopen(struct wl *w) /* closed with something pending, and opened again */
{
    for (uint32_t i = 0; i < 3; i++) {
        wl_data(w, "keep", NULL)[i] = i + 7;
        wl_array(w, 0, "again", 200 + i, i);
        wl_commit(w);
        memset(wl_data(w, "medium", NULL), 9, 4000);
        wl_reopen(w);
    }
}

static void born_and_gone(struct wl *w) /* born and freed in one transaction, again and again */
{
    for (uint32_t i = 0; i < 8; i++)
        wl_array(w, 0, "short", 40 + i, i);
    wl_remove(w, 0, "short");
    wl_array(w, 0, "last", 20, 5);
    wl_commit(w);
}

/* in a page with committed blocks, of which nothing else changes */
static void born_beside(struct wl *w)
{
    for (uint32_t i = 0; i < 3; i++) {
        char name[2] = {(char)('p' + i), 0}, text[400];
        memset(text, 'y', sizeof text);
        if (i == 2)
            array_of(w, name, text, sizeof text);
        else
            wl_array(w, 0, name, 100, i);
        wl_commit(w);
    }
}

/* the ring of domain file goes round; both fast logs are used again */
static void many_commits(struct wl *w)
{
    char text[8];
    for (uint32_t i = 0; i < 24; i++) {
        wl_data(w, i % 3 ? "medium" : "keep", NULL)[i % 13] = i;
        snprintf(text, sizeof text, "%03u", i);
        wl_value(w, 0, i % 2 ? "value" : "counter", text, 3);
        if (i % 5 == 4)
            wl_rollback(w);
        wl_commit(w);
    }
}

/* A log that outgrew the fast log, twice in a row: the second must not end before the first is
 * finished. */
static void long_log(struct wl *w)
{
    for (uint32_t round = 0; round < 2; round++) {
        uint64_t n;
        uint32_t *large = wl_data(w, "large", &n);
        for (uint32_t i = 0; i < n; i += 200)
            large[i] = round * 1000 + i;
        memset(wl_data(w, "medium", NULL), (int)round + 4, 12000);
        wl_array(w, 0, "more", 12000, round);
        wl_data(w, "more", NULL)[0] = 1;
        wl_commit(w);
    }
    wl_data(w, "more", NULL)[1] = 2;
    memset(wl_data(w, "large", NULL), 3, 70000);
    wl_rollback(w);
    wl_data(w, "keep", NULL)[9] = 3;
    wl_commit(w);
}

const struct workload wl_table[] = {
    {"write_small", write_small, false, 0},
    {"write_twice", write_twice, false, 0},
    {"write_all", write_all, false, 0},
    {"write_nothing", write_nothing, false, 0},
    {"uncommitted", uncommitted, false, 0},
    {"hot", hot, false, 0},
    {"hot_and_back", hot_and_back, false, 0},
    {"declared", declared, false, 0},
    {"scattered", scattered, false, 0},
    {"values", values, false, 0},
    {"allocate", allocate, false, 0},
    {"release", release, false, 0},
    {"replace", replace, false, 0},
    {"groups", groups, false, 0},
    {"many_names", many_names, false, 0},
    {"grow", grow, false, 0},
    {"long_run", long_run, false, 0},
    {"roll_back", roll_back, false, 0},
    {"long_back", long_back, false, 0},
    {"nested", nested, false, 0},
    {"born_and_gone", born_and_gone, false, 0},
    {"born_beside", born_beside, false, 0},
    {"threads", wl_threads, false, 0},
    {"faults_between", wl_faults_between, false, 0},
    {"turns", wl_turns, false, 0},
    {"all_cores", wl_all_cores, false, 700},
    {"many_commits", many_commits, false, 0},
    {"long_log", long_log, false, 0},
    {"slots", wl_slots, false, 0},
    {"list_edits", wl_list_edits, false, 0},
    {"list_splits", wl_list_splits, false, 0},
    {"slots_flip", wl_slots_flip, false, 0},
    {"slots_back", wl_slots_back, false, 0},
    {"slots_beside", wl_slots_beside, false, 0},
    {"slots_small", wl_slots_small, false, 0},
    {"slots_freed", wl_slots_freed, false, 0},
    {"history", wl_history, false, 0},
    {"held", wl_held, false, 0},
    {"held_grow", wl_held_grow, false, 0},
    {"flush", wl_flush, false, 0},
    {"slots_flush", wl_slots_flush, false, 0},
    {"grow_beside", wl_grow_beside, false, 0},
    {"grow_between", wl_grow_between, false, 0},
    {"mirrors", wl_mirrors, false, 0},
    {"fork", wl_fork, false, 0},
    {"repair", wl_repair, true, 0},
    {"reopen", reopen, false, 0},
    {"churn", wl_churn, false, 0},
    {"pins", wl_pins, false, 0},
    {"brought", wl_brought, false, 0},
    {"brought_over", wl_brought_over, false, 0},
    {"brought_held", wl_brought_held, false, 0},
    {"unchanged", wl_unchanged, false, 0},
    {"mixture_1", wl_mixture_1, false, 0},
    {"mixture_2", wl_mixture_2, false, 0},
    {"mixture_3", wl_mixture_3, false, 0},
    {"script", wl_script, false, 0},
};
const unsigned wl_count = sizeof wl_table / sizeof wl_table[0];
