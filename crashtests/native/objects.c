/* Workloads of lists, slots and the history. */
#include <string.h>

#include "workload.h"

/* ---- lists ---- */

uint64_t wl_list(struct wl *w, const char *name)
{
    uint64_t list = 0;
    if (!w->failed)
        wl_done(w, pms_object_list(w->pool, 0, name, (uint32_t)strlen(name), 1, &list, &w->error));
    return list;
}

void wl_splice(struct wl *w, uint64_t list, uint64_t at, uint64_t remove, uint64_t step,
               uint32_t add, uint32_t value)
{
    static uint32_t content[64][40];
    struct pms_new_item item[64];
    for (uint32_t i = 0; i < add && i < 64; i++) {
        for (uint32_t k = 0; k < 40; k++)
            content[i][k] = value + i;
        bool array = (value + i) % 3 == 0;
        item[i] = (struct pms_new_item){.meta = content[i],
                                        .meta_bytes = 4,
                                        .kind = array ? PMS_OBJECT_ARRAY : PMS_OBJECT_VALUE,
                                        .fill = PMS_FILL_COPY,
                                        .src = content[i],
                                        .data_bytes = array ? sizeof content[i] : 0};
    }
    if (!w->failed)
        wl_done(
            w, pms_sequence_splice(w->pool, list, NULL, 0, at, remove, step, item, add, &w->error));
}

void wl_list_edits(struct wl *w)
{
    uint64_t list = wl_list(w, "items");
    wl_splice(w, list, 0, 0, 1, 20, 1);
    wl_commit(w);
    wl_splice(w, list, 20, 0, 1, 1, 50); /* append */
    wl_commit(w);
    wl_splice(w, list, 3, 0, 1, 2, 60);  /* insert */
    wl_splice(w, list, 10, 1, 1, 1, 70); /* replace */
    wl_commit(w);
    wl_splice(w, list, 0, 5, 2, 0, 0); /* every other one of ten */
    wl_commit(w);
    wl_splice(w, list, 2, 3, 1, 0, 0);
    wl_splice(w, list, 0, 0, 1, 4, 80);
    wl_rollback(w);
    list = wl_list(w, "items");
    wl_splice(w, list, 1, 1, 1, 3, 90);
    wl_commit(w);
    wl_remove(w, 0, "items");
    wl_commit(w);
}

void wl_list_splits(struct wl *w) /* nodes split, and join again */
{
    uint64_t list = wl_list(w, "long");
    for (uint32_t i = 0; i < 5; i++)
        wl_splice(w, list, i * 60, 0, 1, 60, i * 100);
    wl_commit(w);
    wl_splice(w, list, 70, 0, 1, 60, 1000); /* splits a leaf in the middle */
    wl_commit(w);
    wl_splice(w, list, 20, 200, 1, 0, 0); /* joins what is left */
    wl_commit(w);
    wl_splice(w, list, 0, 0, 1, 50, 2000);
    wl_commit(w);
}

/* ---- slots ---- */

void wl_make_pair(struct wl *w, const char *name, uint32_t words)
{
    static const char meta[8] = "\x81\xa5slots";
    uint64_t group = wl_group(w, 0, name);
    wl_array(w, group, "0", words, 1);
    wl_array(w, group, "1", words, 2);
    if (!w->failed)
        wl_done(w, pms_object_describe_group(w->pool, 0, name, (uint32_t)strlen(name), meta,
                                             sizeof meta, &w->error));
}

/* The idle one is filled with value; its data is returned. */
uint32_t *wl_fill_next(struct wl *w, const char *name, uint32_t words, uint32_t value)
{
    static uint32_t nowhere[PAIR_WORDS];
    struct pms_object next = {0};
    if (!w->failed)
        wl_done(w, pms_slot_get(w->pool, 0, name, (uint32_t)strlen(name), PMS_SLOT_NEXT, &next,
                                &w->error));
    uint32_t *at = nowhere;
    if (!w->failed) {
        at = (uint32_t *)(void *)(w->pool->map.user + next.data);
        pms_unpin(w->pool, next.data);
    }
    for (uint32_t i = 0; i < words; i++)
        at[i] = value + i;
    return at;
}

void wl_flip(struct wl *w, const char *name)
{
    if (!w->failed)
        wl_done(w, pms_slot_flip(w->pool, 0, name, (uint32_t)strlen(name), NULL, &w->error));
}

uint32_t *wl_current(struct wl *w, const char *name)
{
    static uint32_t nowhere[PAIR_WORDS];
    struct pms_slot_pair pair = {0};
    if (!w->failed)
        wl_done(w, pms_slot_find(w->pool, 0, name, (uint32_t)strlen(name), &pair, &w->error));
    return w->failed ? nowhere : (uint32_t *)(void *)(w->pool->map.user + pair.data[pair.current]);
}

static void next_version(struct wl *w, const char *name, uint32_t value)
{
    wl_fill_next(w, name, PAIR_WORDS, value);
    wl_flip(w, name);
}

static void in_place(struct wl *w, const char *name, uint32_t value) /* captured, like anything */
{
    uint32_t *at = wl_current(w, name);
    for (uint32_t i = 0; i < PAIR_WORDS; i += 61)
        at[i] = value + i;
}

/* Flips of several objects and captured writes take effect together; steps in place after a
 * flip; versions that are taken back, or scribbled and never named; a flip back to the version
 * before. */
void wl_slots(struct wl *w)
{
    wl_make_pair(w, "p", PAIR_WORDS);
    wl_make_pair(w, "q", PAIR_WORDS);
    wl_commit(w);
    for (uint32_t step = 1; step <= 3; step++) {
        next_version(w, "p", step * 1000);
        next_version(w, "q", step * 2000);
        wl_data(w, "keep", NULL)[step] = step;
        wl_commit(w);
        wl_fill_next(w, "p", PAIR_WORDS, 0xdead0000);
    }
    next_version(w, "q", 77);
    wl_rollback(w);
    next_version(w, "p", 5000);
    in_place(w, "p", 6000);
    wl_data(w, "medium", NULL)[5] = 6;
    wl_commit(w);
    wl_flip(w, "p");
    in_place(w, "q", 7000);
    wl_commit(w);
    next_version(w, "q", 8000);
    wl_remove(w, 0, "p");
    wl_commit(w);
    next_version(w, "q", 9000); /* never committed */
}

void wl_slots_flip(struct wl *w)
{
    wl_make_pair(w, "pair", PAIR_WORDS);
    wl_commit(w);
    for (uint32_t step = 0; step < 4; step++) {
        wl_fill_next(w, "pair", PAIR_WORDS, step * 7);
        wl_flip(w, "pair");
        wl_commit(w);
    }
    wl_data(w, "keep", NULL)[1] = 1; /* and a transaction that does not flip */
    wl_commit(w);
}

/* flips that are rolled back; half an idle slot, left over commits */
void wl_slots_back(struct wl *w)
{
    wl_make_pair(w, "pair", PAIR_WORDS);
    wl_commit(w);
    wl_fill_next(w, "pair", PAIR_WORDS, 5);
    wl_flip(w, "pair");
    wl_rollback(w);
    wl_fill_next(w, "pair", PAIR_WORDS / 2, 6);
    wl_data(w, "keep", NULL)[1] = 1;
    wl_commit(w);
    wl_fill_next(w, "pair", PAIR_WORDS, 7);
    wl_rollback(w);
    wl_begin(w);
    wl_fill_next(w, "pair", PAIR_WORDS, 8);
    wl_flip(w, "pair");
    wl_end(w, true);
    wl_fill_next(w, "pair", PAIR_WORDS, 9); /* never published */
}

/* two pairs and other writes in one transaction; every third step in place */
void wl_slots_beside(struct wl *w)
{
    wl_make_pair(w, "a", PAIR_WORDS);
    wl_make_pair(w, "b", PAIR_WORDS);
    wl_commit(w);
    for (uint32_t step = 0; step < 6; step++) {
        if (step % 3 == 2) {
            wl_current(w, "a")[step] = step;
            memset(wl_current(w, "b") + 2000, (int)step, 9000);
        } else {
            wl_fill_next(w, "a", PAIR_WORDS, step);
            wl_flip(w, "a");
            wl_fill_next(w, "b", PAIR_WORDS, step * 3);
            wl_flip(w, "b");
        }
        wl_data(w, "keep", NULL)[0] = step;
        wl_array(w, 0, "born", 200 + 50 * step, step);
        wl_commit(w);
    }
}

void wl_slots_small(struct wl *w) /* share their pages: captured */
{
    wl_make_pair(w, "small", 20);
    wl_commit(w);
    for (uint32_t step = 0; step < 5; step++) {
        wl_fill_next(w, "small", 20, step);
        wl_flip(w, "small");
        if (step == 2)
            wl_rollback(w);
        wl_commit(w);
    }
}

void wl_slots_freed(struct wl *w) /* with an idle one that is written; its space is used again */
{
    wl_make_pair(w, "pair", PAIR_WORDS);
    wl_commit(w);
    wl_fill_next(w, "pair", PAIR_WORDS, 5);
    wl_remove(w, 0, "pair");
    wl_rollback(w);
    wl_fill_next(w, "pair", PAIR_WORDS, 6);
    wl_flip(w, "pair");
    wl_commit(w);
    wl_fill_next(w, "pair", PAIR_WORDS, 7);
    wl_remove(w, 0, "pair");
    wl_commit(w);
    wl_array(w, 0, "after", PAIR_WORDS, 3);
    wl_data(w, "after", NULL)[5] = 1;
    wl_commit(w);
    wl_data(w, "after", NULL)[6] = 1;
    wl_rollback(w);
}

/* ---- the history ---- */

bool wl_history_whole(struct pms_pool *pool)
{
    unsigned char record[PMS_HISTORY_BYTES];
    struct pms_error e;
    if (pms_history_read(pool, record, &e) != PMS_OK)
        return false;
    for (uint32_t i = 1; i < sizeof record; i++)
        if (record[i] != record[0])
            return false;
    return true;
}

static void note(struct wl *w, int value)
{
    unsigned char record[PMS_HISTORY_BYTES];
    memset(record, value, sizeof record);
    if (!w->failed)
        wl_done(w, pms_history_write(w->pool, record, sizeof record, &w->error));
}

/* written outside transactions, beside them, and in one that is rolled back */
void wl_history(struct wl *w)
{
    note(w, 1);
    wl_data(w, "keep", NULL)[1] = 1;
    note(w, 2);
    wl_commit(w);
    note(w, 3);
    note(w, 4);
    wl_begin(w);
    wl_data(w, "keep", NULL)[2] = 1;
    note(w, 5);
    wl_end(w, false);
    wl_value(w, 0, "value", "after", 5);
    wl_commit(w);
    note(w, 6);
}

/* ---- held versions ---- */

/* Gone back to, let go of by a commit, by a slot that is opened, and found again by an open. */
void wl_held(struct wl *w)
{
    wl_make_pair(w, "pair", PAIR_WORDS);
    wl_commit(w);
    wl_reopen_holding(w);
    for (uint32_t i = 0; i < 3; i++) {
        wl_data(w, "keep", NULL)[i] = i + 7;
        memset(wl_data(w, "medium", NULL), (int)i + 1, 9000);
        wl_value(w, 0, "value", "held", 4);
        wl_remove(w, 0, i ? "again" : "large");
        wl_array(w, 0, "again", 400 + i, i);
        wl_fill_next(w, "pair", PAIR_WORDS, i);
        wl_flip(w, "pair");
        wl_commit(w);
        if (i == 1)
            wl_reopen_holding(w);
        if (i < 2)
            wl_back(w);
        wl_data(w, "keep", NULL)[4] = i;
        wl_array(w, 0, "again", 90, i);
        wl_commit(w);
    }
}

void wl_held_grow(struct wl *w)
{
    wl_reopen_holding(w);
    wl_array(w, 0, "grown", 300000, 5);
    wl_data(w, "keep", NULL)[0] = 5;
    wl_commit(w);
    memset(wl_data(w, "grown", NULL), 6, 80000);
    wl_data(w, "keep", NULL)[0] = 6;
    wl_commit(w);
    wl_back(w);
    memset(wl_data(w, "grown", NULL), 7, 60000);
    wl_commit(w);
}
