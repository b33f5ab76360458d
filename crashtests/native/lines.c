#include "explorer.h"

#include <string.h>

/* of a line's non-temporal words the last so many are a subset each; earlier ones came */
#define NT_WORDS_MAX 10u

static void split_of(const struct unit *u, uint32_t *stored, uint32_t *loose)
{
    *stored = *loose = 0;
    for (uint32_t i = 0; i < u->count; i++)
        if (u->pend[i].kind == 0)
            ++*stored;
        else
            ++*loose;
    if (*loose > NT_WORDS_MAX)
        *loose = NT_WORDS_MAX;
}

/* 0: nothing arrived; the last one: all of it did. */
static uint64_t options(const struct explorer *x, const struct unit *u)
{
    (void)x;
    uint32_t stored, loose;
    split_of(u, &stored, &loose);
    return (uint64_t)(stored + 1) << loose;
}

static uint64_t everything(const struct explorer *x, const struct unit *u)
{
    return options(x, u) - 1;
}

/* Options of a line: prefix of its stores << number of loose words | which of those arrived. 0:
 * nothing. */
static void apply(struct explorer *x, uint64_t number, uint64_t option)
{
    const struct unit *u = &x->unit[number];
    uint32_t stored, loose, all_loose = 0, s = 0, l = 0;
    split_of(u, &stored, &loose);
    for (uint32_t i = 0; i < u->count; i++)
        all_loose += u->pend[i].kind != 0;
    uint64_t prefix = option >> loose;
    for (uint32_t i = 0; i < u->count; i++) {
        const struct pend *p = &u->pend[i];
        bool take;
        if (p->kind == 0) {
            take = s++ < prefix;
        } else {
            uint32_t old = all_loose - loose;
            take = l < old ? option != 0 : (option >> (l - old) & 1) != 0;
            l++;
        }
        if (take)
            image_try_word(x, number * LINE + p->word * 8u, p->value);
    }
}

void lines_begin(struct explorer *x)
{
    static const struct unit_model lines = {options, everything, apply};
    x->unit_bytes = LINE;
    x->units = &lines;
}

/* ---- the walk ---- */

/* What this thread's fence makes durable: what it wrote back, whoever stored it, and its own
 * non-temporal stores. */
static void settle(struct explorer *x, uint64_t number, int thread, bool all)
{
    struct unit *u = &x->unit[number];
    uint32_t left = 0;
    for (uint32_t i = 0; i < u->count; i++) {
        const struct pend p = u->pend[i];
        bool durable = all || (p.flushers >> thread & 1) != 0 ||
                       (p.kind == 1 && p.thread == thread);
        if (!durable) {
            u->pend[left++] = p;
            continue;
        }
        image_put(x, number * LINE + p.word * 8u, p.value);
        uint32_t kept = 0; /* what was stored to the word before it cannot come after it */
        for (uint32_t k = 0; k < left; k++)
            if (u->pend[k].word != p.word)
                u->pend[kept++] = u->pend[k];
        left = kept;
    }
    u->count = left;
}

static void store_words(struct explorer *x, const struct tr_event *e)
{
    memcpy(x->now + e->off, x->t->data + e->data, e->bytes);
    uint8_t kind = e->kind == TR_COPY ? 1 : e->kind == TR_PWRITE ? 2 : 0;
    for (uint64_t off = e->off & ~7ull; off < e->off + e->bytes; off += 8) {
        struct unit *u = &x->unit[off / LINE];
        bool known = false;
        for (uint32_t i = 0; i < u->count && !known; i++)
            known = u->pend[i].word == off % LINE / 8;
        if (!known && *word_at(x->img, off) == *word_at(x->now, off))
            continue; /* durable already, and nothing in between */
        u = unit_touch(x, off / LINE);
        u->pend[u->count++] = (struct pend){*word_at(x->now, off), 0, (uint8_t)(off % LINE / 8),
                                            kind, (uint8_t)e->thread};
    }
}

static void fence(struct explorer *x, int thread)
{
    for (uint64_t i = 0; i < x->active_count; i++)
        settle(x, x->active[i], thread, false);
    units_compact(x);
}

void lines_walk(struct explorer *x, const struct tr_event *e)
{
    switch (e->kind) {
    case TR_STORE:
    case TR_COPY:
    case TR_USER:
    case TR_PWRITE: store_words(x, e); break;
    case TR_FLUSH:
        for (uint64_t n = e->off / LINE; n * LINE < e->off + e->bytes; n++) {
            struct unit *u = &x->unit[n];
            for (uint32_t i = 0; i < u->count; i++)
                u->pend[i].flushers |= 1ull << e->thread;
        }
        break;
    case TR_FENCE:
        window_crash(x);
        fence(x, e->thread);
        break;
    case TR_SYNC: /* on fsdax it writes back the lines of all dirty pages too */
        window_crash(x);
        for (uint64_t i = 0; i < x->active_count; i++)
            settle(x, x->active[i], 0, true);
        units_compact(x);
        x->bytes = x->now_bytes;
        break;
    default: break;
    }
}
