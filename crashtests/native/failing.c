/* A system call fails: the nth, for every nth. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "faults.h"
#include "harness.h"

static bool faulty_run(struct campaign *c, const struct scene *s, uint64_t n,
                       struct fault_result *result)
{
    pid_t child;
    if (child_here(&child)) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        faults_run(s->workload, s->path, c->domain, board, n, result);
        leave(0);
    }
    int status = child_wait(child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    /* A store that cannot protect its pages any more stops, rather than to go on without
     * capture. */
    if (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && result->call == FAULT_MPROTECT))
        plain_failure(c, faults_name(result->call), n, "the process died of a failed system call");
    return false;
}

void failing_run(struct options *o)
{
    struct campaign *c = &o->campaign;
    struct fault_result *result = shared_memory(sizeof *result);
    struct scene s;
    uint64_t trials = 0, step = o->step ? o->step : 1;
    scene_set(o, &s);
    struct board *undisturbed = shared_memory(sizeof *undisturbed);
    c->oracle = oracle_new();
    if (!scene_record(c, &s))
        c->stop_after = 0;
    *undisturbed = *board;
    for (uint64_t n = 1 + c->seed % step; c->tally.failures < c->stop_after; n += step) {
        memset(board, 0, sizeof *board);
        memset(result, 0, sizeof *result);
        file_write(s.path, s.base, s.bytes);
        bool lived = faulty_run(c, &s, n, result);
        trials++;
        c->tally.images = trials;
        campaign_progress(c, false);
        if (lived && result->broken[0])
            plain_failure(c, faults_name(result->call), n, result->broken);
        if (atomic_load(&board->opened)) {
            uint32_t acked = board->acked;
            struct question q = {.domain = c->domain,
                                 .allowed = {board->state[acked]},
                                 .allowed_count = 1,
                                 .thorough = true};
            /* A commit that failed at its sync, or died, may have become durable all the same:
             * as it is shown now, or as it would have been with what is taken back when a commit
             * fails (the flips of a landing). */
            if (result->in_flight) {
                q.allowed[q.allowed_count++] = result->in_flight;
                q.allowed[q.allowed_count++] = undisturbed->state[board->begun];
            }
            snprintf(q.path, sizeof q.path, "%s", s.path);
            judge(c, &q, faults_name(result->call), n);
        }
        if (!result->call)
            break;
    }
    oracle_free(c->oracle);
    scene_end(&s);
    printf("{\"result\": {\"trials\": %lu, \"failures\": %lu}}\n", (unsigned long)trials,
           (unsigned long)c->tally.failures);
}
