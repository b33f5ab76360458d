/* Workloads of new blocks whose content goes straight home, and of pages that are stored to and are
 * as they were. */
#include <stdlib.h>
#include <string.h>

#include "flush/bring.h"
#include "journal/journal.h"
#include "workload.h"

#define PAGE_WORDS (PMS_PAGE / 4u)
#define LEAST (16u * PAGE_WORDS) /* goes home */

/* ---- new blocks ---- */

#define ARRAYS 2u

struct brought {
    const char *name[ARRAYS];
    uint32_t words[ARRAYS];
};

/* whole pages; a last one in part, which makes it a run of its own */
static const struct brought two = {{"b1", "b2"}, {LEAST, LEAST + PAGE_WORDS + 77}};

static void fill(uint32_t *at, uint32_t words, uint32_t seed)
{
    for (uint32_t i = 0; i < words; i++)
        at[i] = seed * 0x9e3779b9u + i * 0x85ebca6bu;
}

static void make(struct wl *w, const struct brought *b, struct pms_bring *bring)
{
    for (uint32_t i = 0; i < ARRAYS && !w->failed; i++) {
        const char *name = b->name[i];
        bring[i].bytes = 4ull * b->words[i];
        wl_done(w, pms_object_put_array(w->pool, 0, name, (uint32_t)strlen(name), "f", 1,
                                        bring[i].bytes, PMS_FILL_NONE, NULL, 0, 0, &bring[i].data,
                                        &w->error));
    }
}

/* As a checkpoint is written: what does not go home is stored. */
static void carry(struct wl *w, const struct brought *b, struct pms_bring *bring, uint32_t seed)
{
    uint32_t *source[ARRAYS], crc[ARRAYS][4];
    for (uint32_t i = 0; i < ARRAYS; i++) {
        source[i] = malloc(4ull * b->words[i]);
        fill(source[i], b->words[i], seed + i);
        bring[i].src = source[i];
        bring[i].crc = crc[i];
    }
    if (!w->failed)
        wl_done(w, pms_bring_home(w->pool, bring, ARRAYS, &w->error));
    for (uint32_t i = 0; i < ARRAYS; i++) {
        if (!w->failed && !bring[i].brought)
            memcpy(w->pool->map.user + bring[i].data, source[i], bring[i].bytes);
        free(source[i]);
    }
}

static void bring(struct wl *w, const struct brought *b, uint32_t seed)
{
    struct pms_bring home[ARRAYS] = {0};
    make(w, b, home);
    carry(w, b, home, seed);
}

void wl_bring(struct wl *w, uint32_t seed) { bring(w, &two, seed); }

/* one save after another; stored to afterwards; brought twice; rolled back; into what is committed,
 * which is stored to then */
void wl_brought(struct wl *w)
{
    struct pms_bring home[ARRAYS] = {0};
    bring(w, &two, 1);
    wl_commit(w);
    bring(w, &two, 2);
    wl_data(w, "b2", NULL)[LEAST / 2] = 7;
    wl_commit(w);
    make(w, &two, home);
    carry(w, &two, home, 3);
    wl_data(w, "keep", NULL)[3] = 4;
    carry(w, &two, home, 4);
    wl_commit(w);
    bring(w, &two, 5);
    wl_rollback(w);
    bring(w, &two, 6);
    memset(wl_data(w, "b1", NULL), 7, 4 * LEAST);
    wl_commit(w);
    wl_data(w, "keep", NULL)[3] = 7;
    wl_commit(w);
    const unsigned char *base = w->failed ? NULL : w->pool->map.user;
    for (uint32_t i = 0; base && i < ARRAYS; i++)
        home[i].data = (uint64_t)((unsigned char *)wl_data(w, two.name[i], NULL) - base);
    carry(w, &two, home, 7);
    wl_commit(w);
}

static void still_holds(struct wl *w, const struct brought *b, uint32_t seed)
{
    for (uint32_t i = 0; i < ARRAYS; i++) {
        uint32_t *source = malloc(4ull * b->words[i]);
        fill(source, b->words[i], seed + i);
        if (!w->failed && memcmp(wl_data(w, b->name[i], NULL), source, 4ull * b->words[i]) != 0)
            wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT, "an older image lies on a new block"));
        free(source);
    }
}

static void write_images_home(struct wl *w)
{
    if (!w->failed && w->pool->journal)
        wl_done(w, pms_journal_drain(w->pool->journal, &w->error));
}

/* where other blocks were, whose images wait to be written home, and are before the commit */
void wl_brought_over(struct wl *w)
{
    for (uint32_t round = 0; round < 3; round++) {
        bring(w, &two, 10 * round);
        write_images_home(w);
        wl_commit(w);
        still_holds(w, &two, 10 * round);
        for (uint32_t i = 0; i < ARRAYS; i++)
            memset(wl_data(w, two.name[i], NULL), (int)(i + round + 1), 4ull * two.words[i]);
        wl_commit(w);
        wl_remove(w, 0, "b1");
        wl_remove(w, 0, "b2");
        wl_commit(w);
    }
    bring(w, &two, 50);
    wl_commit(w);
    still_holds(w, &two, 50);
}

/* in a store that grows for it, while a snapshot reads what was there, over a held version and back
 * to it */
void wl_brought_held(struct wl *w)
{
    static const struct brought large = {{"b1", "b2"}, {300u * PAGE_WORDS, LEAST}};
    struct wl_flush f = {0};
    bring(w, &two, 1);
    wl_commit(w);
    wl_flush_begin(w, &f);
    bring(w, &large, 2);
    wl_flush_some(w, &f, 1, 2);
    wl_commit(w);
    wl_flush_close(w, &f);
    wl_reopen_holding(w);
    bring(w, &two, 3);
    wl_data(w, "keep", NULL)[0] = 5;
    wl_commit(w);
    bring(w, &two, 4);
    wl_commit(w);
    wl_back(w);
    bring(w, &two, 5);
    wl_commit(w);
}

/* ---- pages that are as they were ---- */

#define PAGES 12u

void wl_store_same(struct wl *w, const char *name)
{
    uint64_t words = 0;
    volatile uint32_t *at = wl_data(w, name, &words);
    for (uint64_t i = 0; i < words; i += PAGE_WORDS / 2)
        at[i] = at[i];
}

/* each third changes, each third changes and changes back, and the others are stored to */
void wl_store_back(struct wl *w, const char *name, uint32_t value)
{
    uint64_t words;
    volatile uint32_t *at = wl_data(w, name, &words);
    for (uint64_t page = 0; page * PAGE_WORDS < words; page++) {
        volatile uint32_t *word = at + page * PAGE_WORDS + (page * 37 + 5) % 60;
        uint32_t before = *word;
        *word = page % 3 ? before + 1 : value;
        if (page % 3 == 1)
            *word = before;
    }
}

static void store_word(struct wl *w, uint64_t at, uint32_t words, uint32_t word)
{
    for (uint32_t i = 0; !w->failed && i < words; i++)
        ((volatile uint32_t *)(void *)(w->pool->map.user + at))[i] = word;
}

/* A view outlives a roll back and is stored to; then its place goes to an array that becomes as the
 * dead one was. */
static void in_the_place_of_the_dead(struct wl *w)
{
    struct pms_object dead = {0};
    wl_array(w, 0, "place", 4 * LEAST, 1);
    if (!w->failed)
        wl_done(w, pms_object_get(w->pool, 0, "place", 5, &dead, &w->error));
    wl_rollback(w);
    store_word(w, dead.data, 4 * LEAST, 2);
    if (!w->failed)
        pms_unpin(w->pool, dead.data);
    store_word(w, wl_array(w, 0, "place", 4 * LEAST, 3), 4 * LEAST, 1);
    wl_commit(w);
}

/* A page becomes what its neighbour was. */
static void trade_places(struct wl *w)
{
    uint64_t at = wl_array(w, 0, "place", PAGES * PAGE_WORDS, 1);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t page = 0; page < PAGES; page++)
            store_word(w, at + page * PMS_PAGE, PAGE_WORDS, (page + round) % 2);
        wl_commit(w);
    }
}

void wl_unchanged(struct wl *w)
{
    in_the_place_of_the_dead(w);
    trade_places(w);
    wl_array(w, 0, "pages", PAGES * PAGE_WORDS, 1);
    wl_commit(w);
    for (uint32_t round = 0; round < 6; round++) {
        wl_store_back(w, "pages", round);
        if (round % 3 == 1) {
            wl_rollback(w);
            wl_store_same(w, "pages");
        }
        wl_store_back(w, round % 2 ? "medium" : "large", 7 + round);
        wl_commit(w);
        wl_store_same(w, "pages");
        wl_store_same(w, "large");
        if (round == 3)
            wl_reopen_holding(w);
        else
            wl_commit(w);
    }
    wl_store_back(w, "pages", 100);
    wl_commit(w);
    wl_back(w);
    wl_store_same(w, "pages");
    wl_commit(w);
}
