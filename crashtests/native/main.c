/* One job of the crash tests: one workload in one domain under one failure model.
 * crashtests/__main__.py runs many of these.
 *
 *   crash images --model N --workload W --domain D --seed S --budget B --seen FILE --scratch
 *   PREFIX [--keep DIR] ...
 *   crash images --trace FILE --base FILE ...       what another program has recorded of itself
 *                                                   (recorded.c)
 *   crash kill   --workload W --domain D --step N ...
 *   crash list
 *
 * One JSON object a line on standard output; exit code 1 if anything failed. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "harness.h"
#include "seen.h"

/* One recorded run of an engine that is built with the detector. */
static void run_detector(struct options *o)
{
    struct campaign *c = &o->campaign;
    struct scene s;
    scene_set(o, &s);
    const struct trace *t = s.trace;
    if (scene_record(c, &s) && t->rogue) {
        c->tally.failures++;
        printf("{\"failure\": {\"workload\": \"%s\", \"how\": \"detector\", \"message\": \"%lu "
               "stores past the seam\", \"sites\": [\"%p\"]}}\n",
               c->workload, (unsigned long)t->rogue, t->rogue_site);
    }
    scene_end(&s);
    printf("{\"result\": {\"stores\": %lu, \"failures\": %lu}}\n", (unsigned long)t->engine_stores,
           (unsigned long)c->tally.failures);
}

static void run_images(struct options *o)
{
    struct campaign *c = &o->campaign;
    struct scene s;
    scene_set(o, &s);
    uint64_t most = s.workload ? s.workload->heavy / (c->model == MODEL_LINES ? 1 : 10) : 0;
    if (most && c->budget > most)
        c->budget = most;
    seen_open(o->seen);
    if (s.workload ? scene_record(c, &s) : scene_know(o, &s)) {
        c->oracle = oracle_new();
        images_explore(c, s.trace, s.base, NULL, board, NULL, c->depth);
        oracle_free(c->oracle);
    }
    scene_end(&s);
    printf("{\"result\": {\"images\": %lu, \"distinct\": %lu, \"skipped\": %lu, \"failures\": "
           "%lu, \"windows\": %lu, \"exhaustive\": "
           "%lu, \"nested\": %lu, \"nested_images\": %lu, \"events\": %lu, \"commits\": %u}}\n",
           (unsigned long)c->tally.images, (unsigned long)c->tally.distinct,
           (unsigned long)c->tally.skipped, (unsigned long)c->tally.failures,
           (unsigned long)c->tally.windows, (unsigned long)c->tally.exhaustive,
           (unsigned long)c->tally.nested, (unsigned long)c->tally.nested_images,
           (unsigned long)s.trace->events, board->acked);
}

/* ---- the command line ---- */

static uint64_t number(const char *text) { return strtoull(text, NULL, 10); }

static void parse(struct options *o, int argc, char **argv)
{
    struct campaign *c = &o->campaign;
    o->mode = argc > 1 ? argv[1] : "";
    for (int i = 2; i + 1 < argc; i += 2) {
        const char *key = argv[i], *value = argv[i + 1];
        if (strcmp(key, "--model") == 0)
            c->model = (enum model)number(value);
        else if (strcmp(key, "--workload") == 0)
            o->workload = c->workload = value;
        else if (strcmp(key, "--domain") == 0)
            c->domain = (int)number(value);
        else if (strcmp(key, "--seed") == 0)
            c->seed = number(value);
        else if (strcmp(key, "--budget") == 0)
            c->budget = number(value);
        else if (strcmp(key, "--seen") == 0)
            o->seen = value;
        else if (strcmp(key, "--scratch") == 0)
            snprintf(c->scratch, sizeof c->scratch, "%s", value);
        else if (strcmp(key, "--keep") == 0)
            c->keep = value;
        else if (strcmp(key, "--trace") == 0)
            o->trace = value;
        else if (strcmp(key, "--base") == 0)
            o->base = value;
        else if (strcmp(key, "--states") == 0)
            o->states = value;
        else if (strcmp(key, "--script") == 0)
            wl_script_text = value;
        else if (strcmp(key, "--step") == 0)
            o->step = number(value);
        else if (strcmp(key, "--most") == 0)
            o->most = number(value);
        else if (strcmp(key, "--stop-after") == 0)
            c->stop_after = number(value);
        else if (strcmp(key, "--nested-every") == 0)
            c->nested_every = (uint32_t)number(value);
        else if (strcmp(key, "--depth") == 0)
            c->depth = (int)number(value);
        else {
            fprintf(stderr, "no option %s\n", key);
            exit(2);
        }
    }
}

static struct options o;

/* Told to end, by a person or because our parent died: nothing new is begun, and what was done
 * is said. */
static void end_early(int sig)
{
    (void)sig;
    o.campaign.stop_after = 0;
}

int main(int argc, char **argv)
{
    o = (struct options){.campaign = {.model = MODEL_LINES,
                                      .domain = PMS_DOMAIN_EMULATED,
                                      .seed = 1,
                                      .budget = 1000,
                                      .stop_after = 5,
                                      .nested_every = 40,
                                      .depth = 2,
                                      .workload = "",
                                      .scratch = "/dev/shm/pms-crash"}};
    parse(&o, argc, argv);
    struct sigaction early = {.sa_handler = end_early, .sa_flags = SA_RESTART};
    sigaction(SIGTERM, &early, NULL);
    sigaction(SIGINT, &early, NULL);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    o.campaign.rng = o.campaign.seed * 0x9e3779b97f4a7c15ull;
    for (const char *p = o.campaign.workload; *p; p++)
        o.campaign.rng = o.campaign.rng * 31 + (unsigned char)*p;
    o.campaign.salt = o.campaign.rng << 1 ^ (uint64_t)o.campaign.domain;
    wl_mixture_seed = o.campaign.seed;
    board = shared_memory(sizeof *board);
    if (strcmp(o.mode, "list") == 0) {
        for (unsigned i = 0; i < wl_count; i++)
            if (strcmp(wl_table[i].name, "script") != 0) /* it is given */
                printf("%s\n", wl_table[i].name);
        return 0;
    }
    if (strcmp(o.mode, "images") == 0)
        run_images(&o);
    else if (strcmp(o.mode, "kill") == 0)
        kills_run(&o);
    else if (strcmp(o.mode, "detect") == 0)
        run_detector(&o);
    else if (strcmp(o.mode, "fault") == 0)
        failing_run(&o);
    else
        return 2;
    return o.campaign.tally.failures != 0;
}
