#include "images.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LINE 64u
#define SECTOR 512u
#define NT_WORDS_MAX 10u /* of a line's non-temporal words the last so many are a subset each; earlier ones came */
#define GARBAGE 3u       /* options of a sector beside its versions: noise, a torn mixture, zeros */

/* ---- images seen ---- */

struct key { _Atomic uint64_t a, b; };
static struct key *seen;
static uint64_t seen_room;
#define SEEN_ALONE (1ll << 30) /* bytes of a table that nobody gave */

void seen_open(const char *path)
{
    struct stat st = {.st_size = SEEN_ALONE};
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (path && (fd < 0 || fstat(fd, &st) != 0)) {
        perror(path);
        exit(2);
    }
    seen_room = (uint64_t)st.st_size / sizeof *seen;
    seen = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | (path ? 0 : MAP_ANONYMOUS | MAP_NORESERVE), fd, 0);
    if (path)
        close(fd);
}

/* Inserts; true: it was not there. Other processes do the same. */
static bool seen_first(uint64_t a, uint64_t b)
{
    if (!a)
        a = 1;
    if (!b)
        b = 1;
    for (uint64_t i = a % seen_room, tries = 0; tries < seen_room; i = (i + 1) % seen_room, tries++) {
        uint64_t empty = 0;
        if (atomic_compare_exchange_strong(&seen[i].a, &empty, a)) {
            atomic_store(&seen[i].b, b);
            return true;
        }
        if (empty != a)
            continue;
        uint64_t other;
        while (!(other = atomic_load(&seen[i].b)))
            ;
        if (other == b)
            return false;
    }
    fprintf(stderr, "the table of images is full\n");
    exit(2);
}

/* ---- chance ---- */

uint64_t campaign_draw(struct campaign *c, uint64_t n)
{
    uint64_t z = c->rng += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (z ^ z >> 31) % n;
}

void campaign_progress(struct campaign *c, bool last)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    uint64_t ms = (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
    if (!last && ms < c->reported_ms + 300)
        return;
    c->reported_ms = ms;
    printf("{\"progress\": %lu}\n", (unsigned long)c->tally.images);
    fflush(stdout);
}

/* ---- the image under construction ---- */

struct pend { uint64_t value; uint8_t word, kind, thread; }; /* kind: 0 stored, 1 non-temporal, 2 written to the file */

struct unit { /* a line or a sector with something that is not durable yet */
    struct pend *pend;
    uint32_t count, room;
    uint32_t flushed;  /* the first so many have their write-back started, */
    uint16_t flusher;  /* by this thread */
    bool listed;
};

struct undo { uint64_t off, value; };

struct explorer {
    struct campaign *c;
    const struct trace *t;
    unsigned char *img;     /* what is durable; while an image is tried: that image */
    bool *used;             /* pages of it that may be other than zeros */
    unsigned char *now;     /* all stores so far */
    uint64_t bytes, now_bytes; /* size of the file: durable, now */
    uint64_t hash[2];
    struct unit *unit;
    uint64_t *active;       /* unit numbers */
    uint64_t active_count;
    unsigned char **version; /* sectors: contents, indexed by pend.value */
    uint64_t versions, versions_room;
    struct undo *undo;
    uint64_t undo_count, undo_room;
    uint32_t unit_bytes;
    const struct board *board;
    const struct promise *fixed;
    uint32_t acked, begun;
    int depth;
    int scratch_fd;
    char scratch_path[256];
    uint64_t event;         /* where the walk is */
    uint64_t windows_left, budget_end;
    uint64_t *option;       /* of each active unit, while an image is tried */
};

static uint64_t mix(uint64_t off, uint64_t value, uint64_t salt)
{
    uint64_t z = off * 0x9e3779b97f4a7c15ull ^ (value + salt) * 0xd6e8feb86659fd93ull;
    z = (z ^ z >> 32) * 0xd6e8feb86659fd93ull;
    return z ^ z >> 29;
}

static uint64_t *word_at(unsigned char *p, uint64_t off) { return (uint64_t *)(void *)(p + off); }

/* All changes of the image go through here, so that its hash is always known. */
static void put(struct explorer *x, uint64_t off, uint64_t value)
{
    uint64_t *at = word_at(x->img, off);
    if (*at == value)
        return;
    x->hash[0] += mix(off, value, 1) - mix(off, *at, 1);
    x->hash[1] += mix(off, value, 0x5bd1e995) - mix(off, *at, 0x5bd1e995);
    x->used[off / PMS_PAGE] = true;
    *at = value;
}

static void put_trying(struct explorer *x, uint64_t off, uint64_t value)
{
    if (*word_at(x->img, off) == value)
        return;
    if (x->undo_count == x->undo_room) {
        x->undo_room = x->undo_room ? 2 * x->undo_room : 4096;
        x->undo = realloc(x->undo, x->undo_room * sizeof *x->undo);
    }
    x->undo[x->undo_count++] = (struct undo){off, *word_at(x->img, off)};
    put(x, off, value);
}

static void take_back(struct explorer *x)
{
    while (x->undo_count) {
        struct undo u = x->undo[--x->undo_count];
        put(x, u.off, u.value);
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

/* Most of a store is zeros, and stays a hole: neither this nor the oracle reads all of the file for each image. */
static void write_scratch(struct explorer *x, uint64_t bytes)
{
    static bool left[TRACE_MAX_FILE / PMS_PAGE]; /* by the image before */
    enum { HOLE, STALE, USED } what;
    bool ok = ftruncate(x->scratch_fd, (off_t)bytes) == 0 && trace_find_data(x->scratch_fd, left);
    for (uint64_t at = 0, end; ok && at < bytes; at = end) {
        what = x->used[at / PMS_PAGE] ? USED : left[at / PMS_PAGE] ? STALE : HOLE;
        for (end = at; end < bytes && (x->used[end / PMS_PAGE] ? USED : left[end / PMS_PAGE] ? STALE : HOLE) == what; end += PMS_PAGE)
            ;
        uint64_t n = (end < bytes ? end : bytes) - at;
        if (what == USED)
            ok = pwrite(x->scratch_fd, x->img + at, n, (off_t)at) == (ssize_t)n;
        else if (what == STALE)
            ok = fallocate(x->scratch_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)n) == 0;
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
        snprintf(kept, sizeof kept, "%s/model%d-%s-%d-%lu.pm", c->keep, (int)c->model, c->workload, c->domain,
                 (unsigned long)c->tally.failures);
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
    printf("{\"failure\": {\"model\": %d, \"workload\": \"%s\", \"domain\": %d, \"depth\": %d, \"event\": %lu, \"acked\": %u, "
           "\"begun\": %u, \"how\": \"%s\", \"message\": \"",
           (int)c->model, c->workload, c->domain, c->depth - x->depth, (unsigned long)x->event, x->acked, x->begun, how);
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
            printf("%s[%lu, %lu]", shown++ ? ", " : "", (unsigned long)(x->active[i] * x->unit_bytes), (unsigned long)x->option[i]);
    printf("]}}\n");
    fflush(stdout);
}

static void crash_recovery(struct explorer *x, uint64_t bytes, uint32_t digest);

static bool over(const struct explorer *x)
{
    return x->c->tally.failures >= x->c->stop_after;
}

/* The image under construction, as it is: to the oracle, unless it was there before. */
static void try_image(struct explorer *x, uint64_t bytes, const char *how)
{
    struct campaign *c = x->c;
    struct promise p = promise_now(x);
    uint64_t a = x->hash[0] + mix(bytes, 7, 7), b = x->hash[1] + mix(bytes, 9, 9);
    uint64_t promised = mix(p.digest[0], p.count > 1 ? p.digest[1] : 0, 3);
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
    struct question q = {.domain = c->domain, .allowed = {p.digest[0], p.digest[1]}, .allowed_count = p.count, .hostile = hostile,
                         .thorough = (a & 15) == 0};
    snprintf(q.path, sizeof q.path, "%s", x->scratch_path);
    struct verdict v = oracle_ask(c->oracle, &q);
    if (!v.ok)
        report(x, &v, bytes, how);
    else if (x->depth > 0 && c->nested_every && !hostile && (a >> 8) % c->nested_every == 0)
        crash_recovery(x, bytes, v.digest);
    campaign_progress(c, false);
}

/* Records the recovery of the image under construction, and crashes that. It has to end in the state that the undisturbed one made. */
static void crash_recovery(struct explorer *x, uint64_t bytes, uint32_t digest)
{
    static struct trace *trace[8];
    struct campaign *c = x->c;
    if (!trace[x->depth])
        trace[x->depth] = trace_new();
    struct trace *t = trace[x->depth];
    write_scratch(x, bytes);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct pms_error e;
        trace_start(t, x->scratch_path, c->domain != PMS_DOMAIN_FILE);
        struct pms_pool *pool = wl_open(x->scratch_path, c->domain, PMS_MODE_READ_WRITE, &e);
        trace_stop();
        leave(pool ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        struct verdict v = {.message = "recovery works once and fails the next time"};
        report(x, &v, bytes, "recorded recovery");
        return;
    }
    c->tally.nested++;
    struct promise p = {{digest, 0}, 1};
    images_explore(c, t, x->img, x->used, NULL, &p, x->depth - 1);
}

/* ---- units: lines and sectors ---- */

static struct unit *touch(struct explorer *x, uint64_t number)
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

static uint64_t options_of(const struct explorer *x, const struct unit *u)
{
    if (x->unit_bytes == SECTOR)
        return u->count + 1 + GARBAGE;
    uint32_t stored, loose;
    split_of(u, &stored, &loose);
    return (uint64_t)(stored + 1) << loose;
}

static uint64_t everything(const struct explorer *x, const struct unit *u)
{
    return x->unit_bytes == SECTOR ? u->count : options_of(x, u) - 1;
}

/* Options of a line: prefix of its stores << number of loose words | which of those arrived. 0: nothing. */
static void apply_line(struct explorer *x, uint64_t number, uint64_t option)
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
            put_trying(x, number * LINE + p->word * 8u, p->value);
    }
}

static void apply_sector(struct explorer *x, uint64_t number, uint64_t option)
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
            value = mix(off + i, noise, 11);
        else if (option == u->count + 2) /* torn: the new one up to a word, the durable one after it */
            memcpy(&value, i / 8 <= torn ? last + i : x->img + off + i, 8);
        else
            value = 0;
        put_trying(x, off + i, value);
    }
}

static void apply(struct explorer *x, uint64_t i, uint64_t option)
{
    x->option[i] = option;
    if (!option)
        return;
    if (x->unit_bytes == SECTOR)
        apply_sector(x, x->active[i], option);
    else
        apply_line(x, x->active[i], option);
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
    try_image(x, bytes, how);
    take_back(x);
}

static bool spent(const struct explorer *x) { return x->c->tally.images >= x->budget_end || over(x); }

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
static void one_differs(struct explorer *x, enum choice others, uint64_t i, uint64_t option, const char *how)
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
            option = campaign_draw(x->c, 16) < whole ? everything(x, u) : campaign_draw(x->c, options_of(x, u));
        apply(x, k, option);
    }
    finish_image(x, "sample");
}

static void families(struct explorer *x)
{
    uint64_t n = x->active_count, limit = x->budget_end > x->c->tally.images ? x->budget_end - x->c->tally.images : 0;
    uint64_t stride = n > limit / 4 ? n / (limit / 4 + 1) + 1 : 1; /* a quarter of the budget for each of the first families */
    uint64_t shift = campaign_draw(x->c, stride);
    choose_each(x, NONE);
    finish_image(x, "none");
    choose_each(x, ALL);
    finish_image(x, "all");
    for (uint64_t i = shift; i < n && !spent(x); i += stride) {
        uint64_t options = options_of(x, &x->unit[x->active[i]]), full = everything(x, &x->unit[x->active[i]]);
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

static void crash_here(struct explorer *x)
{
    uint64_t combinations = 1, end = x->c->budget;
    if (over(x))
        return;
    for (uint64_t i = 0; i < x->active_count && combinations <= EXHAUSTIVE; i++)
        combinations *= options_of(x, &x->unit[x->active[i]]);
    uint64_t left = end > x->c->tally.images ? end - x->c->tally.images : 0;
    uint64_t share = x->windows_left ? left / x->windows_left : left, floor = x->fixed ? 3 : 8;
    if (share < floor && x->windows_left > 1 && campaign_draw(x->c, floor * x->windows_left) >= left) { /* too many windows: some of them */
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

/* ---- walking the trace: lines ---- */

static void settle(struct explorer *x, uint64_t number, uint32_t upto, int thread, bool all)
{
    struct unit *u = &x->unit[number];
    uint32_t left = 0;
    for (uint32_t i = 0; i < u->count; i++) {
        const struct pend *p = &u->pend[i];
        bool durable = all || i < upto || (p->kind == 1 && p->thread == thread);
        if (!durable) {
            u->pend[left++] = *p;
            continue;
        }
        put(x, number * LINE + p->word * 8u, p->value);
        uint32_t kept = 0; /* what was stored to the word before it cannot come after it */
        for (uint32_t k = 0; k < left; k++)
            if (u->pend[k].word != p->word)
                u->pend[kept++] = u->pend[k];
        left = kept;
    }
    u->count = left;
    u->flushed = 0;
}

static void compact(struct explorer *x)
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
        u = touch(x, off / LINE);
        u->pend[u->count++] = (struct pend){*word_at(x->now, off), (uint8_t)(off % LINE / 8), kind, (uint8_t)e->thread};
    }
}

static void fence(struct explorer *x, int thread)
{
    for (uint64_t i = 0; i < x->active_count; i++) {
        const struct unit *u = &x->unit[x->active[i]];
        settle(x, x->active[i], u->flusher == thread ? u->flushed : 0, thread, false);
    }
    compact(x);
}

static void set_size(struct explorer *x) { x->bytes = x->now_bytes; }

static void walk_line_event(struct explorer *x, const struct tr_event *e)
{
    switch (e->kind) {
    case TR_STORE: case TR_COPY: case TR_USER: case TR_PWRITE:
        store_words(x, e);
        break;
    case TR_FLUSH:
        for (uint64_t n = e->off / LINE; n * LINE < e->off + e->bytes; n++) {
            struct unit *u = &x->unit[n];
            if (u->count) {
                u->flushed = u->count;
                u->flusher = e->thread;
            }
        }
        break;
    case TR_FENCE:
        crash_here(x);
        fence(x, e->thread);
        break;
    case TR_SYNC: /* on fsdax it writes back the lines of all dirty pages too */
        crash_here(x);
        for (uint64_t i = 0; i < x->active_count; i++)
            settle(x, x->active[i], 0, 0, true);
        compact(x);
        set_size(x);
        break;
    default:
        break;
    }
}

/* ---- sectors ---- */

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

static void drop_versions(struct explorer *x)
{
    while (x->versions)
        free(x->version[--x->versions]);
}

static void walk_sector_event(struct explorer *x, const struct tr_event *e)
{
    if (e->kind == TR_PWRITE || e->kind == TR_STORE || e->kind == TR_COPY || e->kind == TR_USER) {
        memcpy(x->now + e->off, x->t->data + e->data, e->bytes);
        for (uint64_t n = e->off / SECTOR; n * SECTOR < e->off + e->bytes; n++) {
            struct unit *u = touch(x, n);
            u->pend[u->count++].value = keep_version(x, x->now + n * SECTOR);
        }
    } else if (e->kind == TR_SYNC) {
        crash_here(x);
        for (uint64_t i = 0; i < x->active_count; i++) {
            uint64_t off = x->active[i] * SECTOR;
            for (uint64_t k = 0; k < SECTOR; k += 8)
                put(x, off + k, *word_at(x->now, off + k));
            x->unit[x->active[i]].count = 0;
        }
        compact(x);
        drop_versions(x);
        set_size(x);
    }
}

/* ---- prefixes, and damage on top of them ---- */

static void put_bytes(struct explorer *x, uint64_t off, const unsigned char *from, uint64_t bytes)
{
    for (uint64_t at = off; at < off + bytes;) {
        uint64_t base = at & ~7ull, value = *word_at(x->img, base);
        for (; at < off + bytes && at < base + 8; at++)
            ((unsigned char *)&value)[at - base] = from[at - off];
        put(x, base, value);
    }
}

static bool is_store(const struct tr_event *e) { return e->kind <= TR_USER || e->kind == TR_PWRITE; }

static uint64_t stored_bytes(const struct trace *t)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < t->events; i++)
        if (is_store(&t->event[i]))
            sum += t->event[i].bytes;
    return sum;
}

static void walk_prefix_event(struct explorer *x, const struct tr_event *e, uint64_t every)
{
    if (e->kind == TR_SIZE) {
        x->bytes = x->now_bytes;
        return;
    }
    if (!is_store(e)) {
        if (e->kind == TR_BEGIN || e->kind == TR_ACK)
            try_image(x, x->bytes, "prefix at a mark");
        return;
    }
    const unsigned char *from = x->t->data + e->data;
    for (uint64_t done = 0; done < e->bytes && !over(x);) {
        uint64_t step = e->word ? 8 : every < 2 ? 1 : 1 + campaign_draw(x->c, 2 * every - 1); /* on average every */
        if (done + step > e->bytes)
            step = e->bytes - done;
        put_bytes(x, e->off + done, from + done, step);
        done += step;
        if (x->c->tally.images < x->c->budget)
            try_image(x, x->bytes, "prefix");
    }
}

static uint64_t damaged_place(struct explorer *x)
{
    struct campaign *c = x->c;
    uint64_t head = PMS_OFF_SEGMENTS + 8 * PMS_PAGE;
    switch (campaign_draw(c, 8)) {
    case 0: return campaign_draw(c, 8 * PMS_PAGE);                    /* fixed pages */
    case 1: return campaign_draw(c, 8) * PMS_PAGE + campaign_draw(c, 128); /* their beginnings */
    case 2: return campaign_draw(c, x->bytes);
    case 3: return PMS_OFF_FASTLOG(campaign_draw(c, 2)) + campaign_draw(c, 2048);
    case 4: return PMS_OFF_SEGMENTS + campaign_draw(c, PMS_PAGE);     /* page table */
    default: break;
    }
    for (int i = 0; i < 200; i++) { /* a byte that is not zero: it means something */
        uint64_t at = campaign_draw(c, campaign_draw(c, 2) ? x->bytes : head);
        if (x->img[at])
            return at;
    }
    return campaign_draw(c, x->bytes);
}

static void damage_here(struct explorer *x, uint64_t count)
{
    struct campaign *c = x->c;
    for (uint64_t i = 0; i < count && !over(x); i++) {
        uint64_t bytes = x->bytes, at = damaged_place(x), word = at & ~7ull, sector = at & ~511ull;
        const char *how = "flipped bit";
        switch (campaign_draw(c, 10)) {
        case 0:
            bytes = campaign_draw(c, x->bytes / SECTOR + 1) * SECTOR;
            how = "truncated";
            break;
        case 1:
            for (uint64_t k = 0; k < SECTOR; k += 8)
                put_trying(x, sector + k, mix(sector + k, c->rng, 5));
            how = "garbage";
            break;
        case 2: {
            uint64_t other = damaged_place(x) & ~511ull;
            for (uint64_t k = 0; k < SECTOR; k += 8)
                put_trying(x, sector + k, *word_at(x->img, other + k));
            how = "a sector of another place";
            break;
        }
        case 3:
            put_trying(x, word, campaign_draw(c, 2) ? x->bytes + campaign_draw(c, PMS_PAGE) : ~0ull << campaign_draw(c, 64));
            how = "a large number";
            break;
        case 4:
            for (int k = 0; k < 4; k++) {
                uint64_t w = damaged_place(x) & ~7ull;
                put_trying(x, w, *word_at(x->img, w) ^ 1ull << campaign_draw(c, 64));
            }
            how = "several flipped bits";
            break;
        default:
            put_trying(x, word, *word_at(x->img, word) ^ 1ull << (at % 8 * 8 + campaign_draw(c, 8)));
        }
        try_image(x, bytes, how);
        take_back(x);
    }
}

/* ---- the walk ---- */

static uint64_t count_windows(const struct explorer *x)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < x->t->events; i++) {
        uint16_t kind = x->t->event[i].kind;
        n += kind == TR_SYNC || kind == TR_BEGIN || kind == TR_ACK || (kind == TR_FENCE && x->unit_bytes == LINE);
    }
    return n + 1;
}

static void walk(struct explorer *x)
{
    struct campaign *c = x->c;
    uint64_t total = stored_bytes(x->t), budget = c->budget > c->tally.images ? c->budget - c->tally.images : 1;
    uint64_t every = total / budget + 1, points = 0, damage = budget / 40 + 1;
    x->windows_left = count_windows(x);
    for (x->event = 0; x->event < x->t->events && !over(x); x->event++) {
        const struct tr_event *e = &x->t->event[x->event];
        if (e->kind == TR_SIZE)
            x->now_bytes = e->bytes;
        switch (c->model) {
        case MODEL_PREFIX:
            walk_prefix_event(x, e, every);
            break;
        case MODEL_DAMAGE:
            if (is_store(e))
                put_bytes(x, e->off, x->t->data + e->data, e->bytes);
            else if (e->kind == TR_SIZE)
                x->bytes = x->now_bytes;
            if (x->event * 40 / x->t->events != points || x->event == 0) {
                points = x->event * 40 / x->t->events;
                damage_here(x, damage);
            }
            break;
        case MODEL_LINES:
            walk_line_event(x, e);
            break;
        case MODEL_SECTORS:
            walk_sector_event(x, e);
            break;
        }
        if (e->kind == TR_BEGIN || e->kind == TR_ACK) { /* what is promised changes here */
            if (c->model == MODEL_LINES || c->model == MODEL_SECTORS)
                crash_here(x);
            if (e->kind == TR_BEGIN)
                x->begun = (uint32_t)e->bytes;
            else
                x->acked = (uint32_t)e->bytes;
            if (c->model == MODEL_PREFIX)
                try_image(x, x->bytes, "prefix at a mark");
            else if (c->model != MODEL_DAMAGE)
                crash_here(x);
        }
    }
    if (c->model == MODEL_LINES || c->model == MODEL_SECTORS)
        crash_here(x);
}

static unsigned char *blank(uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
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
        for (uint64_t off = page * PMS_PAGE; off < (page + 1) * PMS_PAGE && off < x->t->base_bytes; off += 8) {
            uint64_t value = *(const uint64_t *)(const void *)(base + off);
            if (!value)
                continue;
            x->used[page] = true;
            *word_at(x->img, off) = *word_at(x->now, off) = value;
            x->hash[0] += mix(off, value, 1) - mix(off, 0, 1);
            x->hash[1] += mix(off, value, 0x5bd1e995) - mix(off, 0, 0x5bd1e995);
        }
    }
}

void images_explore(struct campaign *c, const struct trace *t, const unsigned char *base, const bool *used, const struct board *board,
                    const struct promise *fixed, int depth)
{
    struct explorer x = {.c = c, .t = t, .board = board, .fixed = fixed, .depth = depth, .bytes = t->base_bytes,
                         .now_bytes = t->base_bytes, .unit_bytes = c->model == MODEL_SECTORS ? SECTOR : LINE};
    uint64_t units = TRACE_MAX_FILE / x.unit_bytes, unit_room = units * sizeof *x.unit, active_room = units * sizeof *x.active;
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
    drop_versions(&x);
    free(x.version);
    free(x.undo);
    uint64_t reached = (x.now_bytes > x.bytes ? x.now_bytes : x.bytes) / x.unit_bytes + 1; /* beyond, all is untouched */
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
