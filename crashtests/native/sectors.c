#include "explorer.h"

#include <stdlib.h>
#include <string.h>

#define GARBAGE 3u /* options beside the versions: noise, a torn mixture, zeros */

/* 0: nothing arrived; u->count: all of it did; beyond: torn, or none of it. */
static uint64_t options(const struct explorer *x, const struct unit *u)
{
    return u->count + 1 + (is_mapping_on_disk(x) ? 0 : GARBAGE);
}

static uint64_t everything(const struct explorer *x, const struct unit *u)
{
    (void)x;
    return u->count;
}

static void apply(struct explorer *x, uint64_t number, uint64_t option)
{
    const struct unit *u = &x->unit[number];
    uint64_t off = number * SECTOR;
    if (option == 0)
        return;
    const unsigned char *last = x->version[u->pend[u->count - 1].value];
    uint64_t noise = x->c->seed + off * 31 + x->event, torn = campaign_draw(x->c, SECTOR / 8);
    for (uint64_t i = 0; i < SECTOR; i += 8) {
        uint64_t value;
        if (option <= u->count)
            memcpy(&value, x->version[u->pend[option - 1].value] + i, 8);
        else if (option == u->count + 1)
            value = image_mix(off + i, noise, 11);
        /* torn: the new one up to a word, the durable one after it */
        else if (option == u->count + 2)
            memcpy(&value, i / 8 <= torn ? last + i : x->img + off + i, 8);
        else
            value = 0;
        image_try_word(x, off + i, value);
    }
}

void sectors_begin(struct explorer *x)
{
    static const struct unit_model sectors = {options, everything, apply};
    x->unit_bytes = SECTOR;
    x->units = &sectors;
}

static uint64_t keep_version(struct explorer *x, const unsigned char *content)
{
    if (x->versions == x->versions_room) {
        x->versions_room = x->versions_room ? 2 * x->versions_room : 1024;
        x->version = realloc(x->version, x->versions_room * sizeof *x->version);
    }
    x->version[x->versions] = malloc(SECTOR);
    memcpy(x->version[x->versions], content, SECTOR);
    return x->versions++;
}

void sectors_end(struct explorer *x)
{
    while (x->versions)
        free(x->version[--x->versions]);
}

void sectors_walk(struct explorer *x, const struct tr_event *e)
{
    if (e->kind == TR_PWRITE || e->kind == TR_STORE || e->kind == TR_COPY || e->kind == TR_USER) {
        memcpy(x->now + e->off, x->t->data + e->data, e->bytes);
        for (uint64_t n = e->off / SECTOR; n * SECTOR < e->off + e->bytes; n++) {
            struct unit *u = unit_touch(x, n);
            u->pend[u->count++].value = keep_version(x, x->now + n * SECTOR);
        }
    } else if (e->kind == TR_SYNC) {
        window_crash(x);
        for (uint64_t i = 0; i < x->active_count; i++) {
            uint64_t off = x->active[i] * SECTOR;
            for (uint64_t k = 0; k < SECTOR; k += 8)
                image_put(x, off + k, *word_at(x->now, off + k));
            x->unit[x->active[i]].count = 0;
        }
        units_compact(x);
        sectors_end(x);
        x->bytes = x->now_bytes;
    }
}
