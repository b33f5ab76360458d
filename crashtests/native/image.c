#include "explorer.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "harness.h"
#include "seen.h"

uint64_t image_mix(uint64_t off, uint64_t value, uint64_t salt)
{
    uint64_t z = off * 0x9e3779b97f4a7c15ull ^ (value + salt) * 0xd6e8feb86659fd93ull;
    z = (z ^ z >> 32) * 0xd6e8feb86659fd93ull;
    return z ^ z >> 29;
}

void image_put(struct explorer *x, uint64_t off, uint64_t value)
{
    uint64_t *at = word_at(x->img, off);
    if (*at == value)
        return;
    x->hash[0] += image_mix(off, value, 1) - image_mix(off, *at, 1);
    x->hash[1] += image_mix(off, value, 0x5bd1e995) - image_mix(off, *at, 0x5bd1e995);
    x->used[off / PMS_PAGE] = true;
    *at = value;
}

void image_try_word(struct explorer *x, uint64_t off, uint64_t value)
{
    if (*word_at(x->img, off) == value)
        return;
    if (x->undo_count == x->undo_room) {
        x->undo_room = x->undo_room ? 2 * x->undo_room : 4096;
        x->undo = realloc(x->undo, x->undo_room * sizeof *x->undo);
    }
    x->undo[x->undo_count++] = (struct undo){off, *word_at(x->img, off)};
    image_put(x, off, value);
}

void image_take_back(struct explorer *x)
{
    while (x->undo_count) {
        struct undo u = x->undo[--x->undo_count];
        image_put(x, u.off, u.value);
    }
}

void image_put_bytes(struct explorer *x, uint64_t off, const unsigned char *from, uint64_t bytes)
{
    for (uint64_t at = off; at < off + bytes;) {
        uint64_t base = at & ~7ull, value = *word_at(x->img, base);
        for (; at < off + bytes && at < base + 8; at++)
            ((unsigned char *)&value)[at - base] = from[at - off];
        image_put(x, base, value);
    }
}

/* ---- asking the oracle ---- */

static struct promise promise_now(const struct explorer *x)
{
    if (x->fixed)
        return *x->fixed;
    struct promise p = {{x->board->state[x->acked], 0}, 1};
    if (x->begun > x->acked && x->begun < atomic_load(&x->board->states))
        p.digest[p.count++] = x->board->state[x->begun];
    return p;
}

/* Most of a store is zeros, and stays a hole: neither this nor the oracle reads all of the file
 * for each image. */
static void write_scratch(struct explorer *x, uint64_t bytes)
{
    static bool left[TRACE_MAX_FILE / PMS_PAGE]; /* by the image before */
    enum { HOLE, STALE, USED } what;
    bool ok = ftruncate(x->scratch_fd, (off_t)bytes) == 0 && trace_find_data(x->scratch_fd, left);
    for (uint64_t at = 0, end; ok && at < bytes; at = end) {
        what = x->used[at / PMS_PAGE] ? USED : left[at / PMS_PAGE] ? STALE : HOLE;
        for (end = at; end < bytes && (x->used[end / PMS_PAGE] ? USED
                                       : left[end / PMS_PAGE]  ? STALE
                                                               : HOLE) == what;
             end += PMS_PAGE)
            ;
        uint64_t n = (end < bytes ? end : bytes) - at;
        if (what == USED)
            ok = pwrite(x->scratch_fd, x->img + at, n, (off_t)at) == (ssize_t)n;
        else if (what == STALE)
            ok = fallocate(x->scratch_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at,
                           (off_t)n) == 0;
    }
    if (!ok) {
        perror(x->scratch_path);
        exit(2);
    }
}

static void report(struct explorer *x, const struct verdict *v, uint64_t bytes, const char *how)
{
    struct campaign *c = x->c;
    char kept[400] = "";
    c->tally.failures++;
    if (c->keep) {
        snprintf(kept, sizeof kept, "%s/model%d-%s-%d-%lu.pm", c->keep, (int)c->model, c->workload,
                 c->domain, (unsigned long)c->tally.failures);
        int fd = open(kept, O_RDWR | O_CREAT | O_TRUNC, 0600);
        for (uint64_t at = 0; fd >= 0 && at < bytes;) {
            ssize_t n = write(fd, x->img + at, bytes - at);
            if (n <= 0)
                break;
            at += (uint64_t)n;
        }
        if (fd >= 0)
            close(fd);
    }
    printf("{\"failure\": {\"model\": %d, \"workload\": \"%s\", \"domain\": %d, \"depth\": %d, "
           "\"event\": %lu, \"acked\": %u, "
           "\"begun\": %u, \"how\": \"%s\", \"message\": \"",
           (int)c->model, c->workload, c->domain, c->depth - x->depth, (unsigned long)x->event,
           x->acked, x->begun, how);
    for (const char *p = v->message; *p; p++)
        putchar(*p == '"' || *p == '\\' || *p < ' ' ? '\'' : *p);
    printf("\", \"image\": \"%s\", \"sites\": [", kept);
    const struct tr_event *e = &x->t->event[x->event < x->t->events ? x->event : x->t->events - 1];
    for (int i = 0; i < TRACE_SITES; i++)
        printf("%s\"%p\"", i ? ", " : "", e->site[i]);
    printf("], \"units\": [");
    uint64_t shown = 0;
    for (uint64_t i = 0; x->option && i < x->active_count && shown < 40; i++)
        if (x->option[i])
            printf("%s[%lu, %lu]", shown++ ? ", " : "",
                   (unsigned long)(x->active[i] * x->unit_bytes), (unsigned long)x->option[i]);
    printf("]}}\n");
    fflush(stdout);
}

static void crash_recovery(struct explorer *x, uint64_t bytes, uint32_t digest);

void image_ask(struct explorer *x, uint64_t bytes, const char *how)
{
    struct campaign *c = x->c;
    struct promise p = promise_now(x);
    uint64_t a = x->hash[0] + image_mix(bytes, 7, 7), b = x->hash[1] + image_mix(bytes, 9, 9);
    uint64_t promised = image_mix(p.digest[0], p.count > 1 ? p.digest[1] : 0, 3);
    if (over(x))
        return;
    bool hostile = c->model == MODEL_DAMAGE;
    if (!seen_first(a ^ promised ^ c->salt, b + promised)) {
        c->tally.skipped++;
        return;
    }
    c->tally.distinct += seen_first(~a, ~b); /* among those of all workloads of one table */
    c->tally.images++;
    c->tally.nested_images += x->depth < c->depth;
    write_scratch(x, bytes);
    struct question q = {.domain = c->domain,
                         .allowed = {p.digest[0], p.digest[1]},
                         .allowed_count = p.count,
                         .hostile = hostile,
                         .restarted = is_mapping_on_disk(x),
                         .thorough = (a & 15) == 0};
    snprintf(q.path, sizeof q.path, "%s", x->scratch_path);
    struct verdict v = oracle_ask(c->oracle, &q);
    if (!v.ok)
        report(x, &v, bytes, how);
    else if (x->depth > 0 && c->nested_every && !hostile && !q.restarted &&
             (a >> 8) % c->nested_every == 0)
        crash_recovery(x, bytes, v.digest);
    campaign_progress(c, false);
}

/* Records the recovery of the image under construction, and crashes that. It has to end in the
 * state that the undisturbed one made. */
static void crash_recovery(struct explorer *x, uint64_t bytes, uint32_t digest)
{
    static struct trace *trace[8];
    struct campaign *c = x->c;
    if (!trace[x->depth])
        trace[x->depth] = trace_new();
    struct trace *t = trace[x->depth];
    write_scratch(x, bytes);
    pid_t child;
    if (child_here(&child)) {
        struct pms_error e;
        trace_start(t, x->scratch_path, c->domain != PMS_DOMAIN_FILE);
        struct pms_pool *pool = wl_open(x->scratch_path, c->domain, PMS_MODE_READ_WRITE, &e);
        trace_stop();
        leave(pool ? 0 : 1);
    }
    if (child_wait(child) != 0) {
        struct verdict v = {.message = "recovery works once and fails the next time"};
        report(x, &v, bytes, "recorded recovery");
        return;
    }
    c->tally.nested++;
    struct promise p = {{digest, 0}, 1};
    x->explore(c, t, x->img, x->used, NULL, &p, x->depth - 1);
}
