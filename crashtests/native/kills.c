/* SIGKILL at each primitive. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "harness.h"

static _Atomic uint64_t primitives, kill_at;

static int count_and_kill(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)primitive, (void)addr, (void)bytes;
    if (atomic_fetch_add(&primitives, 1) + 1 == atomic_load(&kill_at))
        raise(SIGKILL);
    return 0;
}

/* True if the child ended by itself. */
static bool killed_run(struct campaign *c, const struct scene *s, uint64_t n, bool recovery_only)
{
    pid_t child;
    if (child_here(&child)) {
        struct wl result = {0};
        struct pms_error e;
        atomic_store(&kill_at, n);
        pms_persist_hook = count_and_kill;
        if (recovery_only)
            result.failed = wl_open(s->path, c->domain, PMS_MODE_READ_WRITE, &e) == NULL;
        else
            wl_run(s->workload, s->path, c->domain, board, false, &result);
        leave(result.failed);
    }
    int status = child_wait(child);
    if (WIFSIGNALED(status) ? WTERMSIG(status) != SIGKILL : WEXITSTATUS(status) != 0)
        plain_failure(c, recovery_only ? "kill in recovery" : "kill", n,
                      "the run failed by itself");
    return WIFEXITED(status);
}

static void ask_after_kill(struct campaign *c, const char *path, uint64_t n)
{
    struct question q = {.domain = c->domain, .thorough = n % 8 == 0, .allowed_count = 1};
    uint32_t acked = atomic_load(&board->acked), begun = atomic_load(&board->begun);
    q.allowed[0] = board->state[acked];
    if (begun > acked && begun < board->states)
        q.allowed[q.allowed_count++] = board->state[begun];
    snprintf(q.path, sizeof q.path, "%s", path);
    judge(c, &q, "kill", n);
}

void kills_run(struct options *o)
{
    struct campaign *c = &o->campaign;
    struct scene s;
    uint64_t crashed_bytes, trials = 0, nested = 0, step = o->step ? o->step : 1;
    scene_set(o, &s);
    c->oracle = oracle_new();
    if (scene_record(c, &s)) {
        if (o->most && s.trace->events / o->most > step)
            step = s.trace->events / o->most;
        for (uint64_t n = 1 + c->seed % step; c->tally.failures < c->stop_after; n += step) {
            atomic_store(&board->acked, 0);
            atomic_store(&board->begun, 0);
            file_write(s.path, s.base, s.bytes);
            bool ended = killed_run(c, &s, n, false);
            trials++;
            unsigned char *crashed = trials % 11 == 3 && !ended ? file_read(s.path, &crashed_bytes)
                                                                : NULL;
            ask_after_kill(c, s.path, n);
            for (uint64_t m = 1; crashed && c->tally.failures < c->stop_after;
                 m += step, nested++) {
                file_write(s.path, crashed, crashed_bytes);
                bool recovered = killed_run(c, &s, m, true);
                ask_after_kill(c, s.path, n);
                if (recovered)
                    break;
            }
            free(crashed);
            c->tally.images = trials + nested;
            campaign_progress(c, false);
            if (ended)
                break;
        }
    }
    oracle_free(c->oracle);
    scene_end(&s);
    printf("{\"result\": {\"trials\": %lu, \"nested\": %lu, \"failures\": %lu}}\n",
           (unsigned long)(trials + nested), (unsigned long)nested,
           (unsigned long)c->tally.failures);
}
