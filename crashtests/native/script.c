/* Workloads that are lists of operations: drawn from a seed, or given on the command line
 * (crashtests/mixtures.py has Hypothesis make and shrink them). An operation is a letter and two
 * numbers; one that makes no sense where it stands does nothing. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "workload.h"

#define NAMES 6u
#define LIST_MAX 200u

uint64_t wl_mixture_seed = 1;
const char *wl_script_text = "";

struct script {
    struct wl *w;
    struct wl_flush flush;
    bool flushing;
    bool flipped[2];        /* in this transaction: the other slot holds what is committed */
    struct pms_object view; /* of an array that may be gone; no data: none */
};

static bool there(struct wl *w, const char *name)
{
    struct pms_object o;
    struct pms_error e;
    return !w->failed &&
           pms_object_find(w->pool, 0, name, (uint32_t)strlen(name), &o, &e) == PMS_OK;
}

static void numbered(char name[8], char letter, uint32_t n)
{
    snprintf(name, 8, "%c%u", letter, n % NAMES);
}

static void edit_list(struct wl *w, uint32_t a, uint32_t b)
{
    uint64_t list = wl_list(w, "items"), count = 0;
    if (!w->failed)
        wl_done(w, pms_sequence_count(w->pool, list, NULL, 0, &count, &w->error));
    uint64_t at = a % (count + 1), remove = b % 4 < count - at ? b % 4 : count - at;
    uint32_t add = count > LIST_MAX ? 0 : b / 4 % 9;
    wl_splice(w, list, at, remove, 1, add, a);
}

static void next_version(struct script *s, uint32_t a, uint32_t b, bool flip)
{
    struct wl *w = s->w;
    char name[8];
    a %= 2;
    numbered(name, 's', a);
    if (!there(w, name)) {
        wl_make_pair(w, name, a ? 30 : PAIR_WORDS);
    } else if (s->flipped[a]) {
        memset(wl_current(w, name), (int)b, a ? 100 : 4 * PAIR_WORDS / 3);
    } else {
        wl_fill_next(w, name, a ? 30 : PAIR_WORDS, b);
        if (flip)
            wl_flip(w, name);
        s->flipped[a] = flip;
    }
}

static void group(struct wl *w, uint32_t a, uint32_t b)
{
    char name[8];
    numbered(name, 'g', a % 3);
    if (b % 3 == 0 && there(w, name))
        wl_remove(w, 0, name);
    else
        wl_array(w, wl_group(w, 0, name), b % 2 ? "x" : "y", 1 + b % 900, b);
}

static void flush(struct script *s)
{
    if (s->flushing)
        wl_flush_end(s->w, &s->flush);
    else
        wl_flush_begin(s->w, &s->flush);
    s->flushing = !s->flushing;
}

static void drop_view(struct script *s)
{
    if (s->view.data && !s->w->failed)
        pms_unpin(s->w->pool, s->view.data);
    s->view.data = 0;
}

/* Has a view of an array, stores to it whether it is there or not, and drops it. */
static void view(struct script *s, const char *name, uint32_t a, uint32_t b)
{
    struct wl *w = s->w;
    if (!s->view.data && there(w, name))
        wl_done(w, pms_object_get(w->pool, 0, name, (uint32_t)strlen(name), &s->view, &w->error));
    else if (s->view.data && b % 4)
        memset(w->pool->map.user + s->view.data + a % s->view.data_bytes, (int)b, 1);
    else
        drop_view(s);
}

static void reopen(struct script *s)
{
    drop_view(s);
    wl_reopen(s->w);
    /* what has changed since a snapshot is known in the same opening only */
    s->flush.complete = false;
}

static void end_of_transaction(struct script *s, char op)
{
    struct wl *w = s->w;
    int depth = w->failed ? 0 : pms_txblock_depth(w->pool);
    if (op == 'b' && depth < 3)
        wl_begin(w);
    else if (op == 'b')
        return;
    else if (depth)
        wl_end(w, op != 'r' || depth > 1); /* only the outermost block is undone */
    else if (op == 'r')
        wl_rollback(w);
    else if (op == 'o' && !s->flushing)
        reopen(s);
    else
        wl_commit(w);
    if (depth == 0 || (depth == 1 && op != 'b')) /* a block within one ends nothing */
        s->flipped[0] = s->flipped[1] = false;
}

static void step(struct script *s, char op, uint32_t a, uint32_t b)
{
    static char text[200];
    struct wl *w = s->w;
    char name[8];
    memset(text, 't', sizeof text);
    numbered(name, 'm', a);
    switch (op) {
    case 'a': wl_array(w, 0, name, 1 + b % 2500, a); break;
    case 'd':
        if (there(w, name))
            wl_remove(w, 0, name);
        break;
    case 'v': wl_value(w, 0, a % 2 ? "value" : "other", text, b % sizeof text); break;
    case 'w': wl_data(w, "large", NULL)[a % 20000] = b; break;
    case 'm': memset(wl_data(w, "medium", NULL) + a % 2000, (int)a, b % 4000); break;
    case 'e': wl_write(w, "large", a % 20000, b); break;
    case 'k': wl_data(w, "keep", NULL)[a % 14] = b; break;
    case 'D':
        wl_declare(w, (const char *const[]){"medium"}, 1);
        wl_data(w, "medium", NULL)[a % 3000] = b;
        break;
    case 'u':
        if (a % 4 == 0)
            wl_store_same(w, "large");
        else
            wl_store_back(w, a % 4 == 1 ? "large" : "medium", b % 3);
        break;
    case 'h': wl_bring(w, b); break;
    case 'p': view(s, name, a, b); break;
    case 'l': edit_list(w, a, b); break;
    case 's': next_version(s, a, b, true); break;
    case 'S': next_version(s, a, b, false); break;
    case 'g': group(w, a, b); break;
    case 'f': flush(s); break;
    case 'c':
    case 'r':
    case 'b':
    case 'B':
    case 'o': end_of_transaction(s, op); break;
    default: break;
    }
    if (s->flushing)
        wl_flush_some(w, &s->flush, 1, 2);
}

static void finish(struct script *s)
{
    while (!s->w->failed && pms_txblock_depth(s->w->pool))
        wl_end(s->w, true);
    wl_commit(s->w);
    drop_view(s);
    wl_flush_close(s->w, &s->flush);
}

/* ---- drawn ---- */

static uint64_t draw(uint64_t *s, uint64_t n)
{
    *s ^= *s << 13;
    *s ^= *s >> 7;
    *s ^= *s << 17;
    return (*s >> 11) % n;
}

static void mixture_of(struct wl *w, uint64_t seed)
{
    static const char ops[] = "aaaadvvwwmmeekkDDlllsssSguuuhpppfcccccccrbBo";
    struct script s = {.w = w};
    uint64_t state = seed * 0x9e3779b97f4a7c15ull | 1;
    for (uint32_t i = 0; i < 50 && !w->failed; i++) {
        char op = ops[draw(&state, sizeof ops - 1)];
        uint32_t a = (uint32_t)draw(&state, 20000);
        step(&s, op, a, (uint32_t)draw(&state, 20000));
    }
    finish(&s);
}

void wl_mixture_1(struct wl *w) { mixture_of(w, wl_mixture_seed); }
void wl_mixture_2(struct wl *w) { mixture_of(w, wl_mixture_seed + 1000003); }
void wl_mixture_3(struct wl *w) { mixture_of(w, wl_mixture_seed + 2000003); }

/* ---- given: "a1,300 c0,0 ..." ---- */

void wl_script(struct wl *w)
{
    struct script s = {.w = w};
    for (const char *p = wl_script_text; *p && !w->failed;) {
        char op = *p++, *end;
        uint32_t a = (uint32_t)strtoul(p, &end, 10),
                 b = *end == ',' ? (uint32_t)strtoul(end + 1, &end, 10) : 0;
        step(&s, op, a, b);
        for (p = end; *p && !isalpha((unsigned char)*p); p++) {
        }
    }
    finish(&s);
}
