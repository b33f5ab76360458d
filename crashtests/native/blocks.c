/* Workloads of the allocator: blocks of all sizes come and go, and views hold some of them. */
#include <stdio.h>
#include <string.h>

#include "workload.h"

static uint64_t draw(uint64_t *state, uint64_t n)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (*state >> 33) % n;
}

static bool there(struct wl *w, const char *name)
{
    struct pms_object o;
    struct pms_error e;
    return !w->failed &&
           pms_object_find(w->pool, 0, name, (uint32_t)strlen(name), &o, &e) == PMS_OK;
}

/* holes of all sizes, between blocks of all classes; some rounds are rolled back */
void wl_churn(struct wl *w)
{
    uint64_t state = wl_mixture_seed;
    for (uint32_t round = 0; round < 12; round++) {
        for (uint32_t i = 0; i < 30; i++) {
            char name[8];
            snprintf(name, sizeof name, "c%u", (unsigned)draw(&state, 90));
            uint32_t words = (uint32_t)(1 + draw(&state, 1ull << draw(&state, 14)));
            if (there(w, name) && draw(&state, 3))
                wl_remove(w, 0, name);
            else
                wl_array(w, 0, name, words, round);
        }
        if (round % 4 == 2)
            wl_rollback(w);
        else
            wl_commit(w);
    }
    for (uint32_t i = 0; i < 90; i++) { /* and all goes: the holes become one */
        char name[8];
        snprintf(name, sizeof name, "c%u", i);
        if (there(w, name))
            wl_remove(w, 0, name);
    }
    wl_commit(w);
}

#define PINS 50u

static uint64_t pin(struct wl *w, const char *name)
{
    struct pms_object o = {0};
    if (!w->failed)
        wl_done(w, pms_object_get(w->pool, 0, name, (uint32_t)strlen(name), &o, &w->error));
    return o.data;
}

static void still_holds(struct wl *w, uint64_t data, uint32_t value)
{
    if (data && !w->failed && *(const uint32_t *)(const void *)(w->pool->map.user + data) != value)
        wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT, "a block that a view holds was used again"));
}

/* views outlive their objects: over commits and roll backs nobody gets their blocks */
void wl_pins(struct wl *w)
{
    uint64_t held[PINS + 2] = {0};
    char name[8];
    for (uint32_t i = 0; i < PINS; i++) {
        snprintf(name, sizeof name, "p%u", i);
        wl_array(w, 0, name, i % 9 == 8 ? 3000 : 40 + i % 3, i);
    }
    wl_commit(w);
    for (uint32_t i = 0; i < PINS; i++) {
        snprintf(name, sizeof name, "p%u", i);
        held[i] = pin(w, name);
        if (i % 5)
            wl_remove(w, 0, name);
    }
    wl_array(w, 0, "born", 41, 70); /* and these are gone before anybody commits */
    held[PINS] = pin(w, "born");
    wl_remove(w, 0, "born");
    wl_array(w, 0, "large born", 3000, 71);
    held[PINS + 1] = pin(w, "large born");
    wl_remove(w, 0, "large born");
    wl_commit(w);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 20; i++) {
            snprintf(name, sizeof name, "q%u", i);
            wl_array(w, 0, name, i % 9 == 8 ? 3000 : 40 + i % 3, 1000 + i);
        }
        for (uint32_t i = 0; i < PINS; i++)
            still_holds(w, held[i], i);
        if (round == 1)
            wl_rollback(w);
        else
            wl_commit(w);
        for (uint32_t i = round; i < PINS + 2 && !w->failed; i += 3) {
            still_holds(w, held[i], i < PINS ? i : 20 + i);
            pms_unpin(w->pool, held[i]);
            held[i] = 0;
        }
    }
    wl_array(w, 0, "after", 3000, 1);
    wl_commit(w);
}
