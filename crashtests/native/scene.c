#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

struct board *board;

static void failure(struct campaign *c, const char *how, uint64_t n, const char *message,
                    const char *image)
{
    c->tally.failures++;
    printf("{\"failure\": {\"workload\": \"%s\", \"domain\": %d, \"how\": \"%s\", \"n\": %lu, "
           "\"message\": \"%s\", \"image\": \"%s\"}}\n",
           c->workload, c->domain, how, (unsigned long)n, message, image);
    fflush(stdout);
}

void plain_failure(struct campaign *c, const char *how, uint64_t n, const char *message)
{
    failure(c, how, n, message, "");
}

void judge(struct campaign *c, const struct question *q, const char *how, uint64_t n)
{
    char kept[400] = "";
    uint64_t bytes = 0;
    /* the judge opens it for writing */
    unsigned char *found = c->keep ? file_read(q->path, &bytes) : NULL;
    struct verdict v = oracle_ask(c->oracle, q);
    if (!v.ok && found) {
        snprintf(kept, sizeof kept, "%s/%s-%s-%d-%lu.pm", c->keep, how, c->workload, c->domain,
                 (unsigned long)n);
        file_write(kept, found, bytes);
    }
    if (!v.ok)
        failure(c, how, n, v.message, kept);
    free(found);
}

static const struct workload *find_workload(const char *name)
{
    for (unsigned i = 0; i < wl_count; i++)
        if (strcmp(wl_table[i].name, name) == 0) {
            oracle_allows_leaks = wl_table[i].leaks;
            return &wl_table[i];
        }
    fprintf(stderr, "no workload %s\n", name);
    exit(2);
}

static unsigned char *make_base(const char *path, int domain, uint64_t *bytes)
{
    pid_t child; /* the engine's threads stay out of this process */
    if (child_here(&child)) {
        wl_make_base(path, domain);
        fflush(stdout);
        leave(0);
    }
    int status = child_wait(child);
    if (status != 0) {
        printf("{\"failure\": {\"how\": \"base\", \"message\": \"making the base store failed "
               "(%d)\"}}\n",
               status);
        exit(1);
    }
    return file_read(path, bytes);
}

void scene_set(struct options *o, struct scene *s)
{
    struct campaign *c = &o->campaign;
    snprintf(s->path, sizeof s->path, "%s-store", c->scratch);
    s->workload = o->trace ? NULL : find_workload(o->workload);
    s->base = o->trace ? file_read(o->base, &s->bytes) : make_base(s->path, c->domain, &s->bytes);
    s->trace = o->trace ? trace_at(o->trace, false) : trace_new();
}

void scene_end(struct scene *s)
{
    unlink(s->path);
    free(s->base);
}

bool scene_record(struct campaign *c, struct scene *s)
{
    const struct trace *t = s->trace;
    pid_t child;
    if (child_here(&child)) {
        struct wl result;
        trace_start(s->trace, s->path, c->domain != PMS_DOMAIN_FILE);
        wl_run(s->workload, s->path, c->domain, board, true, &result);
        trace_stop();
        if (result.failed)
            fprintf(stderr, "%s: %s\n", s->workload->name, result.error.what);
        leave(result.failed);
    }
    int status = child_wait(child);
    if (status == 0 && !t->overflow)
        return true;
    char message[100];
    snprintf(message, sizeof message,
             t->overflow ? "the trace is too long" : "the recorded run ended with status %x",
             status);
    plain_failure(c, "recording", 0, message);
    return false;
}

/* ---- of a trace that another program has made of itself ---- */

/* The digest of the store in this file, whose trace has n commits more than the base store.
 * False: it does not open, or is another commit. */
static bool know_state(const char *path, int domain, uint32_t n)
{
    pid_t child;
    if (child_here(&child)) {
        struct pms_error error;
        struct pms_pool *pool = wl_open(path, domain, PMS_MODE_READ_WRITE, &error);
        if (pool && n == 0)
            atomic_store(&board->primitives, pms_epoch(pool));
        if (pool)
            board->state[n] = wl_digest(pool);
        leave(!pool || pms_epoch(pool) != atomic_load(&board->primitives) + n);
    }
    return child_wait(child) == 0;
}

/* Of a trace that another program has made of itself: its states are what the file holds when
 * all stores before an acknowledgement are made. */
bool scene_know(struct options *o, struct scene *s)
{
    struct campaign *c = &o->campaign;
    const struct trace *t = s->trace;
    unsigned char *now = calloc(1, TRACE_MAX_FILE);
    uint64_t bytes = t->base_bytes;
    uint32_t n = 0, commits = 0;
    oracle_knows_history = false; /* of a commit policy, say */
    memcpy(now, s->base, bytes);
    file_write(s->path, now, bytes);
    bool known = !t->overflow && know_state(s->path, c->domain, n++);
    for (uint64_t i = 0; known && i < t->events; i++) {
        const struct tr_event *e = &t->event[i];
        if (e->kind == TR_SIZE)
            bytes = e->bytes;
        else if (e->kind <= TR_USER || e->kind == TR_PWRITE)
            memcpy(now + e->off, t->data + e->data, e->bytes);
        if (e->kind != TR_ACK)
            continue;
        commits++;
        file_write(s->path, now, bytes);
        if (o->states) {
            char kept[300];
            snprintf(kept, sizeof kept, "%s-%lu.pm", o->states, (unsigned long)e->bytes);
            file_write(kept, now, bytes);
        }
        known = e->bytes == n && n < STATES_MAX && know_state(s->path, c->domain, n);
        n++;
    }
    atomic_store(&board->states, n);
    atomic_store(&board->acked, commits);
    if (!known || !commits)
        plain_failure(c, "recording", n,
                      "the recorded program's file is not the state that it acknowledged");
    free(now);
    return known && commits;
}
