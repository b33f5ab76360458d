#include "explorer.h"

#include <stdlib.h>

struct unit *unit_touch(struct explorer *x, uint64_t number)
{
    struct unit *u = &x->unit[number];
    if (!u->listed) {
        u->listed = true;
        x->active[x->active_count++] = number;
    }
    if (u->count == u->room) {
        u->room = u->room ? 2 * u->room : 8;
        u->pend = realloc(u->pend, u->room * sizeof *u->pend);
    }
    return u;
}

void units_compact(struct explorer *x)
{
    uint64_t left = 0;
    for (uint64_t i = 0; i < x->active_count; i++) {
        struct unit *u = &x->unit[x->active[i]];
        if (u->count)
            x->active[left++] = x->active[i];
        else
            u->listed = false;
    }
    x->active_count = left;
}

static uint64_t options_of(const struct explorer *x, const struct unit *u)
{
    return x->units->options(x, u);
}

static uint64_t everything(const struct explorer *x, const struct unit *u)
{
    return x->units->everything(x, u);
}

static void apply(struct explorer *x, uint64_t i, uint64_t option)
{
    x->option[i] = option;
    if (option)
        x->units->apply(x, x->active[i], option);
}

/* ---- the images of one window ---- */

enum choice { NONE, ALL };

static void choose_each(struct explorer *x, enum choice what)
{
    for (uint64_t i = 0; i < x->active_count; i++)
        apply(x, i, what == NONE ? 0 : everything(x, &x->unit[x->active[i]]));
}

static void finish_image(struct explorer *x, const char *how)
{
    uint64_t bytes = x->bytes;
    if (x->now_bytes != x->bytes && campaign_draw(x->c, 2))
        bytes = x->now_bytes;
    image_ask(x, bytes, how);
    image_take_back(x);
}

static bool spent(const struct explorer *x)
{
    return x->c->tally.images >= x->budget_end || over(x);
}

static void exhaust(struct explorer *x)
{
    uint64_t *o = calloc(x->active_count + 1, sizeof *o);
    for (bool more = true; more && !over(x);) {
        for (uint64_t i = 0; i < x->active_count; i++)
            apply(x, i, o[i]);
        finish_image(x, "every combination");
        more = false;
        for (uint64_t i = 0; i < x->active_count && !more; i++) {
            more = ++o[i] < options_of(x, &x->unit[x->active[i]]);
            if (!more)
                o[i] = 0;
        }
    }
    free(o);
}

/* One unit differs from all the others. */
static void one_differs(struct explorer *x, enum choice others, uint64_t i, uint64_t option,
                        const char *how)
{
    choose_each(x, NONE);
    for (uint64_t k = 0; k < x->active_count; k++)
        apply(x, k, k == i ? option : others == NONE ? 0 : everything(x, &x->unit[x->active[k]]));
    finish_image(x, how);
}

static void in_order(struct explorer *x, uint64_t n, bool backward)
{
    for (uint64_t k = 0; k < x->active_count; k++) {
        bool in = backward ? k >= x->active_count - n : k < n;
        apply(x, k, in ? everything(x, &x->unit[x->active[k]]) : 0);
    }
    finish_image(x, backward ? "the last units" : "the first units");
}

static void random_image(struct explorer *x)
{
    static const uint32_t share[] = {1, 3, 8, 13, 15}; /* of 16 */
    uint32_t some = share[campaign_draw(x->c, 5)], whole = share[campaign_draw(x->c, 5)];
    for (uint64_t k = 0; k < x->active_count; k++) {
        const struct unit *u = &x->unit[x->active[k]];
        uint64_t option = 0;
        if (campaign_draw(x->c, 16) < some)
            option = campaign_draw(x->c, 16) < whole ? everything(x, u)
                                                     : campaign_draw(x->c, options_of(x, u));
        apply(x, k, option);
    }
    finish_image(x, "sample");
}

static void families(struct explorer *x)
{
    uint64_t n = x->active_count,
             limit = x->budget_end > x->c->tally.images ? x->budget_end - x->c->tally.images : 0;
    /* a quarter of the budget for each of the first families */
    uint64_t stride = n > limit / 4 ? n / (limit / 4 + 1) + 1 : 1;
    uint64_t shift = campaign_draw(x->c, stride);
    choose_each(x, NONE);
    finish_image(x, "none");
    choose_each(x, ALL);
    finish_image(x, "all");
    for (uint64_t i = shift; i < n && !spent(x); i += stride) {
        uint64_t options = options_of(x, &x->unit[x->active[i]]),
                 full = everything(x, &x->unit[x->active[i]]);
        one_differs(x, ALL, i, 0, "all but one");
        one_differs(x, NONE, i, full, "one alone");
        in_order(x, i + 1, false);
        in_order(x, i + 1, true);
        if (options > 2) { /* one of its inner states, or garbage */
            one_differs(x, ALL, i, 1 + campaign_draw(x->c, options - 1), "one in part");
            one_differs(x, NONE, i, 1 + campaign_draw(x->c, options - 1), "one in part, alone");
        }
    }
    for (uint64_t i = 0; i < n && n <= 24 && !spent(x); i++)
        for (uint64_t k = i + 1; k < n && !spent(x); k++) {
            for (uint64_t m = 0; m < n; m++)
                apply(x, m, m == i || m == k ? 0 : everything(x, &x->unit[x->active[m]]));
            finish_image(x, "all but two");
        }
    for (uint64_t tries = 0; !spent(x) && tries < 4 * limit + 16; tries++)
        random_image(x);
}

void window_crash(struct explorer *x)
{
    uint64_t combinations = 1, end = x->c->budget;
    if (over(x))
        return;
    for (uint64_t i = 0; i < x->active_count && combinations <= EXHAUSTIVE; i++)
        combinations *= options_of(x, &x->unit[x->active[i]]);
    uint64_t left = end > x->c->tally.images ? end - x->c->tally.images : 0;
    uint64_t share = x->windows_left ? left / x->windows_left : left, floor = x->fixed ? 3 : 8;
    /* too many windows: some of them */
    if (share < floor && x->windows_left > 1 &&
        campaign_draw(x->c, floor * x->windows_left) >= left) {
        x->windows_left--;
        return;
    }
    x->option = calloc(x->active_count + 1, sizeof *x->option);
    x->budget_end = x->c->tally.images + (share > floor ? share : floor);
    x->c->tally.windows++;
    if (combinations <= EXHAUSTIVE && combinations <= 2 * share + 4 * floor) {
        x->c->tally.exhaustive++;
        exhaust(x);
    } else {
        families(x);
    }
    if (x->windows_left)
        x->windows_left--;
    free(x->option);
    x->option = NULL;
}
