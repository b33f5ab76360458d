#include "explorer.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- the walk ---- */

static uint64_t stored_bytes(const struct trace *t)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < t->events; i++)
        if (is_store(&t->event[i]))
            sum += t->event[i].bytes;
    return sum;
}

static uint64_t count_windows(const struct explorer *x)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < x->t->events; i++) {
        uint16_t kind = x->t->event[i].kind;
        n += kind == TR_SYNC || kind == TR_BEGIN || kind == TR_ACK ||
             (kind == TR_FENCE && x->unit_bytes == LINE);
    }
    return n + 1;
}

static void walk(struct explorer *x)
{
    struct campaign *c = x->c;
    uint64_t total = stored_bytes(x->t),
             budget = c->budget > c->tally.images ? c->budget - c->tally.images : 1;
    uint64_t every = total / budget + 1, points = 0, damage = budget / 40 + 1;
    x->windows_left = count_windows(x);
    for (x->event = 0; x->event < x->t->events && !over(x); x->event++) {
        const struct tr_event *e = &x->t->event[x->event];
        if (e->kind == TR_SIZE)
            x->now_bytes = e->bytes;
        switch (c->model) {
        case MODEL_PREFIX: prefix_walk(x, e, every); break;
        case MODEL_DAMAGE:
            if (is_store(e))
                image_put_bytes(x, e->off, x->t->data + e->data, e->bytes);
            else if (e->kind == TR_SIZE)
                x->bytes = x->now_bytes;
            if (x->event * 40 / x->t->events != points || x->event == 0) {
                points = x->event * 40 / x->t->events;
                damage_here(x, damage);
            }
            break;
        case MODEL_LINES: lines_walk(x, e); break;
        case MODEL_SECTORS: sectors_walk(x, e); break;
        }
        if (e->kind == TR_BEGIN || e->kind == TR_ACK) { /* what is promised changes here */
            if (c->model == MODEL_LINES || c->model == MODEL_SECTORS)
                window_crash(x);
            if (e->kind == TR_BEGIN)
                x->begun = (uint32_t)e->bytes;
            else
                x->acked = (uint32_t)e->bytes;
            if (c->model == MODEL_PREFIX)
                image_ask(x, x->bytes, "prefix at a mark");
            else if (c->model != MODEL_DAMAGE)
                window_crash(x);
        }
    }
    if (c->model == MODEL_LINES || c->model == MODEL_SECTORS)
        window_crash(x);
}

static unsigned char *blank(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return p;
}

static void start_from(struct explorer *x, const unsigned char *base, const bool *used)
{
    for (uint64_t page = 0; page * PMS_PAGE < x->t->base_bytes; page++) {
        if (used && !used[page])
            continue;
        for (uint64_t off = page * PMS_PAGE; off < (page + 1) * PMS_PAGE && off < x->t->base_bytes;
             off += 8) {
            uint64_t value = *(const uint64_t *)(const void *)(base + off);
            if (!value)
                continue;
            x->used[page] = true;
            *word_at(x->img, off) = *word_at(x->now, off) = value;
            x->hash[0] += image_mix(off, value, 1) - image_mix(off, 0, 1);
            x->hash[1] += image_mix(off, value, 0x5bd1e995) - image_mix(off, 0, 0x5bd1e995);
        }
    }
}

void images_explore(struct campaign *c, const struct trace *t, const unsigned char *base,
                    const bool *used, const struct board *board, const struct promise *fixed,
                    int depth)
{
    struct explorer x = {.c = c,
                         .t = t,
                         .board = board,
                         .fixed = fixed,
                         .depth = depth,
                         .bytes = t->base_bytes,
                         .now_bytes = t->base_bytes,
                         .explore = images_explore};
    if (c->model == MODEL_SECTORS)
        sectors_begin(&x);
    else
        lines_begin(&x);
    uint64_t units = TRACE_MAX_FILE / x.unit_bytes, unit_room = units * sizeof *x.unit,
             active_room = units * sizeof *x.active;
    uint64_t budget = c->budget;
    if (fixed) { /* a recovery: a share of what is left */
        uint64_t share = c->nested_every + 4;
        c->budget = c->tally.images + share;
    }
    x.img = blank(TRACE_MAX_FILE);
    x.now = blank(TRACE_MAX_FILE);
    x.unit = (void *)blank(unit_room);
    x.active = (void *)blank(active_room);
    x.used = (void *)blank(TRACE_MAX_FILE / PMS_PAGE * sizeof *x.used);
    start_from(&x, base, used);
    snprintf(x.scratch_path, sizeof x.scratch_path, "%s-image%d", c->scratch, depth);
    x.scratch_fd = open(x.scratch_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (x.scratch_fd < 0) {
        perror(x.scratch_path);
        exit(2);
    }
    walk(&x);
    c->budget = budget;
    sectors_end(&x);
    free(x.version);
    free(x.undo);
    /* beyond, all is untouched */
    uint64_t reached = (x.now_bytes > x.bytes ? x.now_bytes : x.bytes) / x.unit_bytes + 1;
    for (uint64_t i = 0; i < reached && i < units; i++)
        if (x.unit[i].room)
            free(x.unit[i].pend);
    munmap(x.img, TRACE_MAX_FILE);
    munmap(x.now, TRACE_MAX_FILE);
    munmap(x.unit, unit_room);
    munmap(x.active, active_room);
    munmap(x.used, TRACE_MAX_FILE / PMS_PAGE * sizeof *x.used);
    close(x.scratch_fd);
    unlink(x.scratch_path);
}
