/* A system call fails: the nth, for every nth; of a workload on a store that was closed, and of the
 * recovery of what the workload leaves when it dies. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "faults.h"
#include "harness.h"

/* What is done, again and again, to one store. */
struct course {
    struct campaign *c;
    const struct scene *scene;
    const struct workload *workload;
    const unsigned char *base;
    uint64_t bytes;
    const struct board *undisturbed; /* what came of it without a fault */
    struct fault_result *result;
};

static void set_out(const struct course *k)
{
    memset(board, 0, sizeof *board);
    memset(k->result, 0, sizeof *k->result);
    file_write(k->scene->path, k->base, k->bytes);
}

static bool faulty_run(const struct course *k, struct fault fault)
{
    pid_t child;
    if (child_here(&child)) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        faults_run(k->workload, k->scene->path, k->c->domain, board, fault, k->result);
        leave(0);
    }
    int status = child_wait(child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    /* A store that cannot protect its pages any more stops, rather than to go on without
     * capture. */
    if (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && k->result->call == FAULT_MPROTECT))
        plain_failure(k->c, faults_name(k->result->call), fault.nth,
                      "the process died of a failed system call");
    return false;
}

/* Returns whether there was such a call. */
static bool trial(const struct course *k, struct fault fault)
{
    struct campaign *c = k->c;
    set_out(k);
    bool lived = faulty_run(k, fault);
    const char *how = fault.interrupted ? "interrupted" : faults_name(k->result->call);
    c->tally.images++;
    campaign_progress(c, false);
    if (lived && k->result->broken[0])
        plain_failure(c, how, fault.nth, k->result->broken);
    uint32_t acked = board->acked;
    bool opened = atomic_load(&board->opened);
    struct question q = {.domain = c->domain,
                         .allowed = {opened ? board->state[acked] : k->undisturbed->state[0]},
                         .allowed_count = 1,
                         .thorough = true};
    /* A commit that failed at its sync, or died, may have become durable all the same: as it is
     * shown now, or as it would have been with what is taken back when a commit fails (the flips
     * of a landing). */
    if (k->result->in_flight) {
        q.allowed[q.allowed_count++] = k->result->in_flight;
        q.allowed[q.allowed_count++] = k->undisturbed->state[board->begun];
    }
    if (fault.interrupted && acked != k->undisturbed->acked)
        plain_failure(c, how, 0, "a call that was interrupted was not made again");
    snprintf(q.path, sizeof q.path, "%s", k->scene->path);
    judge(c, &q, how, fault.nth);
    return k->result->call != FAULT_NONE;
}

/* step: of the calls. every: each fault alone, and lasting; else these by turns. */
static void follow(const struct course *k, uint64_t step)
{
    struct campaign *c = k->c;
    bool every = step == 1, more = true;
    (void)trial(k, (struct fault){.interrupted = true});
    for (uint64_t n = 1 + c->seed % step; more && c->tally.failures < c->stop_after; n += step) {
        bool lasting = (n / step + c->seed) % 2;
        more = trial(k, (struct fault){.nth = n, .lasting = lasting});
        if (every && more)
            (void)trial(k, (struct fault){.nth = n, .lasting = !lasting});
    }
}

/* As the workload leaves it, when it dies with something uncommitted. */
static unsigned char *left_open(const struct course *k, uint64_t *bytes)
{
    pid_t child;
    set_out(k);
    if (child_here(&child)) {
        faults_leave_open(k->workload, k->scene->path, k->c->domain, board);
        leave(0);
    }
    bool left = child_wait(child) == 0 && atomic_load(&board->opened);
    if (!left)
        plain_failure(k->c, "recovery", 0, "the workload that leaves a store to recover failed");
    return left ? file_read(k->scene->path, bytes) : NULL;
}

/* What the run comes to if nothing fails. */
static bool run_undisturbed(const struct course *k, struct board *undisturbed)
{
    set_out(k);
    bool lived = faulty_run(k, (struct fault){0}) && !k->result->broken[0];
    *undisturbed = *board;
    return lived;
}

void failing_run(struct options *o)
{
    struct campaign *c = &o->campaign;
    struct scene s;
    uint64_t step = o->step ? o->step : 1;
    scene_set(o, &s);
    struct board *undisturbed = shared_memory(sizeof *undisturbed);
    struct course k = {.c = c,
                       .scene = &s,
                       .workload = s.workload,
                       .base = s.base,
                       .bytes = s.bytes,
                       .undisturbed = undisturbed,
                       .result = shared_memory(sizeof *k.result)};
    c->oracle = oracle_new();
    if (!scene_record(c, &s))
        c->stop_after = 0;
    *undisturbed = *board;
    if (c->tally.failures < c->stop_after)
        follow(&k, step);
    unsigned char *left = c->tally.failures < c->stop_after ? left_open(&k, &k.bytes) : NULL;
    k.base = left;
    k.workload = &faults_recovery;
    if (left && run_undisturbed(&k, undisturbed))
        follow(&k, step);
    free(left);
    oracle_free(c->oracle);
    scene_end(&s);
    printf("{\"result\": {\"trials\": %lu, \"failures\": %lu}}\n", (unsigned long)c->tally.images,
           (unsigned long)c->tally.failures);
}
