/* One job of the crash tests: one workload in one domain under one failure model. crashtests/__main__.py runs many of these.
 *
 *   crash images --model N --workload W --domain D --seed S --budget B --seen FILE --scratch PREFIX [--keep DIR] ...
 *   crash images --trace FILE --base FILE ...       what another program has recorded of itself (recorded.c)
 *   crash kill   --workload W --domain D --step N ...
 *   crash list
 *
 * One JSON object a line on standard output; exit code 1 if anything failed. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "images.h"
#include "faults.h"

struct options {
    const char *mode, *workload, *seen, *trace, *base, *states;
    uint64_t step, most; /* every step-th primitive, but at most about so many */
    struct campaign campaign;
};

static struct board *board;

static void *shared_memory(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return p;
}

static unsigned char *read_file(const char *path, uint64_t *bytes)
{
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        perror(path);
        exit(2);
    }
    unsigned char *p = malloc((size_t)st.st_size);
    *bytes = (uint64_t)st.st_size;
    if (!p || pread(fd, p, *bytes, 0) != st.st_size)
        exit(2);
    close(fd);
    return p;
}

/* Zeros stay holes: most of a store is zeros. */
static void write_file(const char *path, const unsigned char *from, uint64_t bytes)
{
    static const unsigned char zeros[PMS_PAGE];
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    bool ok = fd >= 0 && ftruncate(fd, (off_t)bytes) == 0;
    for (uint64_t at = 0; ok && at < bytes; at += PMS_PAGE) {
        uint64_t n = bytes - at < PMS_PAGE ? bytes - at : PMS_PAGE;
        if (memcmp(from + at, zeros, n) != 0)
            ok = pwrite(fd, from + at, n, (off_t)at) == (ssize_t)n;
    }
    if (!ok) {
        perror(path);
        exit(2);
    }
    close(fd);
}

/* Children keep quiet, die with us and leave no core. */
static void in_child(void)
{
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

static unsigned char *make_base(const char *path, int domain, uint64_t *bytes)
{
    fflush(stdout);
    pid_t child = fork(); /* the engine's threads stay out of this process */
    if (child == 0) {
        in_child();
        wl_make_base(path, domain);
        fflush(stdout);
        leave(0);
    }
    int status;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        printf("{\"failure\": {\"how\": \"base\", \"message\": \"making the base store failed (%d)\"}}\n", status);
        exit(1);
    }
    return read_file(path, bytes);
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

static void plain_failure(struct campaign *c, const char *how, uint64_t n, const char *message)
{
    c->tally.failures++;
    printf("{\"failure\": {\"workload\": \"%s\", \"domain\": %d, \"how\": \"%s\", \"n\": %lu, \"message\": \"%s\"}}\n", c->workload,
           c->domain, how, (unsigned long)n, message);
    fflush(stdout);
}

/* Runs the workload in a child under the recorder. */
static bool record(struct campaign *c, const struct workload *w, const char *path, struct trace *t)
{
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct wl result;
        in_child();
        trace_start(t, path, c->domain != PMS_DOMAIN_FILE);
        wl_run(w, path, c->domain, board, true, &result);
        trace_stop();
        if (result.failed)
            fprintf(stderr, "%s: %s\n", w->name, result.error.what);
        leave(result.failed);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && !t->overflow)
        return true;
    char message[100];
    snprintf(message, sizeof message, t->overflow ? "the trace is too long" : "the recorded run ended with status %x", status);
    plain_failure(c, "recording", 0, message);
    return false;
}

/* One recorded run of an engine that is built with the detector. */
static void run_detector(struct options *o)
{
    struct campaign *c = &o->campaign;
    char path[256];
    uint64_t bytes;
    snprintf(path, sizeof path, "%s-store", c->scratch);
    free(make_base(path, c->domain, &bytes));
    struct trace *t = trace_new();
    if (record(c, find_workload(o->workload), path, t) && t->rogue) {
        c->tally.failures++;
        printf("{\"failure\": {\"workload\": \"%s\", \"how\": \"detector\", \"message\": \"%lu stores past the seam\", \"sites\": [\"%p\"]}}\n",
               c->workload, (unsigned long)t->rogue, t->rogue_site);
    }
    unlink(path);
    printf("{\"result\": {\"stores\": %lu, \"failures\": %lu}}\n", (unsigned long)t->engine_stores,
           (unsigned long)c->tally.failures);
}

/* The digest of the store in this file, whose trace has n commits more than the base store. False: it does not open, or is another commit. */
static bool know_state(const char *path, int domain, uint32_t n)
{
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct pms_error error;
        in_child();
        struct pms_pool *pool = wl_open(path, domain, PMS_MODE_READ_WRITE, &error);
        if (pool && n == 0)
            atomic_store(&board->primitives, pms_epoch(pool));
        if (pool)
            board->state[n] = wl_digest(pool);
        leave(!pool || pms_epoch(pool) != atomic_load(&board->primitives) + n);
    }
    waitpid(child, &status, 0);
    return status == 0;
}

/* Of a trace that another program has made of itself: its states are what the file holds when all stores before an acknowledgement are made. */
static bool know_states(struct options *o, const struct trace *t, const char *path, const unsigned char *base)
{
    struct campaign *c = &o->campaign;
    unsigned char *now = calloc(1, TRACE_MAX_FILE);
    uint64_t bytes = t->base_bytes;
    uint32_t n = 0, commits = 0;
    memcpy(now, base, bytes);
    write_file(path, now, bytes);
    bool known = !t->overflow && know_state(path, c->domain, n++);
    for (uint64_t i = 0; known && i < t->events; i++) {
        const struct tr_event *e = &t->event[i];
        if (e->kind == TR_SIZE)
            bytes = e->bytes;
        else if (e->kind <= TR_USER || e->kind == TR_PWRITE)
            memcpy(now + e->off, t->data + e->data, e->bytes);
        if (e->kind != TR_ACK)
            continue;
        commits++;
        write_file(path, now, bytes);
        if (o->states) {
            char kept[300];
            snprintf(kept, sizeof kept, "%s-%lu.pm", o->states, (unsigned long)e->bytes);
            write_file(kept, now, bytes);
        }
        known = e->bytes == n && n < STATES_MAX && know_state(path, c->domain, n);
        n++;
    }
    atomic_store(&board->states, n);
    atomic_store(&board->acked, commits);
    if (!known || !commits)
        plain_failure(c, "recording", n, "the recorded program's file is not the state that it acknowledged");
    free(now);
    return known && commits;
}

static void run_images(struct options *o)
{
    struct campaign *c = &o->campaign;
    const struct workload *w = o->trace ? NULL : find_workload(o->workload);
    char path[256];
    uint64_t bytes;
    snprintf(path, sizeof path, "%s-store", c->scratch);
    unsigned char *base = o->trace ? read_file(o->base, &bytes) : make_base(path, c->domain, &bytes);
    struct trace *t = o->trace ? trace_at(o->trace, false) : trace_new();
    seen_open(o->seen);
    if (o->trace ? know_states(o, t, path, base) : record(c, w, path, t)) {
        c->oracle = oracle_new();
        images_explore(c, t, base, NULL, board, NULL, c->depth);
        oracle_free(c->oracle);
    }
    unlink(path);
    printf("{\"result\": {\"images\": %lu, \"distinct\": %lu, \"skipped\": %lu, \"failures\": %lu, \"windows\": %lu, \"exhaustive\": "
           "%lu, \"nested\": %lu, \"nested_images\": %lu, \"events\": %lu, \"commits\": %u}}\n",
           (unsigned long)c->tally.images, (unsigned long)c->tally.distinct, (unsigned long)c->tally.skipped,
           (unsigned long)c->tally.failures, (unsigned long)c->tally.windows, (unsigned long)c->tally.exhaustive,
           (unsigned long)c->tally.nested, (unsigned long)c->tally.nested_images, (unsigned long)t->events, board->acked);
}

/* ---- SIGKILL at each primitive ---- */

static _Atomic uint64_t primitives, kill_at;

static int count_and_kill(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)primitive, (void)addr, (void)bytes;
    if (atomic_fetch_add(&primitives, 1) + 1 == atomic_load(&kill_at))
        raise(SIGKILL);
    return 0;
}

/* True if the child ended by itself. */
static bool killed_run(struct campaign *c, const struct workload *w, const char *path, uint64_t n, bool recovery_only)
{
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct wl result = {0};
        struct pms_error e;
        in_child();
        atomic_store(&kill_at, n);
        pms_persist_hook = count_and_kill;
        if (recovery_only)
            result.failed = wl_open(path, c->domain, PMS_MODE_READ_WRITE, &e) == NULL;
        else
            wl_run(w, path, c->domain, board, false, &result);
        leave(result.failed);
    }
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status) ? WTERMSIG(status) != SIGKILL : WEXITSTATUS(status) != 0)
        plain_failure(c, recovery_only ? "kill in recovery" : "kill", n, "the run failed by itself");
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
    struct verdict v = oracle_ask(c->oracle, &q);
    if (!v.ok)
        plain_failure(c, "kill", n, v.message);
}

static void run_kills(struct options *o)
{
    struct campaign *c = &o->campaign;
    const struct workload *w = find_workload(o->workload);
    char path[256];
    uint64_t bytes, crashed_bytes, trials = 0, nested = 0, step = o->step ? o->step : 1;
    snprintf(path, sizeof path, "%s-store", c->scratch);
    unsigned char *base = make_base(path, c->domain, &bytes);
    struct trace *t = trace_new();
    c->oracle = oracle_new();
    if (record(c, w, path, t)) {
        if (o->most && t->events / o->most > step)
            step = t->events / o->most;
        for (uint64_t n = 1 + c->seed % step; c->tally.failures < c->stop_after; n += step) {
            atomic_store(&board->acked, 0);
            atomic_store(&board->begun, 0);
            write_file(path, base, bytes);
            bool ended = killed_run(c, w, path, n, false);
            trials++;
            unsigned char *crashed = trials % 11 == 3 && !ended ? read_file(path, &crashed_bytes) : NULL;
            ask_after_kill(c, path, n);
            for (uint64_t m = 1; crashed && c->tally.failures < c->stop_after; m += step, nested++) {
                write_file(path, crashed, crashed_bytes);
                bool recovered = killed_run(c, w, path, m, true);
                ask_after_kill(c, path, n);
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
    unlink(path);
    printf("{\"result\": {\"trials\": %lu, \"nested\": %lu, \"failures\": %lu}}\n", (unsigned long)(trials + nested),
           (unsigned long)nested, (unsigned long)c->tally.failures);
}

/* ---- a system call fails ---- */

static bool faulty_run(struct campaign *c, const struct workload *w, const char *path, uint64_t n, struct fault_result *result)
{
    int status;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        in_child();
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        faults_run(w, path, c->domain, board, n, result);
        leave(0);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    /* A store that cannot protect its pages any more stops, rather than to go on without capture. */
    if (!(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && result->call == FAULT_MPROTECT))
        plain_failure(c, faults_name(result->call), n, "the process died of a failed system call");
    return false;
}

static void run_faults(struct options *o)
{
    struct campaign *c = &o->campaign;
    const struct workload *w = find_workload(o->workload);
    struct fault_result *result = shared_memory(sizeof *result);
    char path[256];
    uint64_t bytes, trials = 0, step = o->step ? o->step : 1;
    snprintf(path, sizeof path, "%s-store", c->scratch);
    unsigned char *base = make_base(path, c->domain, &bytes);
    struct trace *t = trace_new();
    struct board *undisturbed = shared_memory(sizeof *undisturbed);
    c->oracle = oracle_new();
    if (!record(c, w, path, t))
        c->stop_after = 0;
    *undisturbed = *board;
    for (uint64_t n = 1 + c->seed % step; c->tally.failures < c->stop_after; n += step) {
        memset(board, 0, sizeof *board);
        memset(result, 0, sizeof *result);
        write_file(path, base, bytes);
        bool lived = faulty_run(c, w, path, n, result);
        trials++;
        c->tally.images = trials;
        campaign_progress(c, false);
        if (lived && result->broken[0])
            plain_failure(c, faults_name(result->call), n, result->broken);
        if (atomic_load(&board->opened)) {
            uint32_t acked = board->acked;
            struct question q = {.domain = c->domain, .allowed = {board->state[acked]}, .allowed_count = 1, .thorough = true};
            /* A commit that failed at its sync, or died, may have become durable all the same: as it is shown now, or as it would have been with
             * what is taken back when a commit fails (the flips of a landing). */
            if (result->in_flight) {
                q.allowed[q.allowed_count++] = result->in_flight;
                q.allowed[q.allowed_count++] = undisturbed->state[board->begun];
            }
            snprintf(q.path, sizeof q.path, "%s", path);
            struct verdict v = oracle_ask(c->oracle, &q);
            if (!v.ok)
                plain_failure(c, faults_name(result->call), n, v.message);
        }
        if (!result->call)
            break;
    }
    oracle_free(c->oracle);
    unlink(path);
    printf("{\"result\": {\"trials\": %lu, \"failures\": %lu}}\n", (unsigned long)trials, (unsigned long)c->tally.failures);
}

/* ---- nothing random in a store: the same seed makes the same images ---- */

pid_t __wrap_getpid(void);
ssize_t __wrap_getrandom(void *buffer, size_t n, unsigned flags);
int __real_clock_gettime(clockid_t clock, struct timespec *t);
int __wrap_clock_gettime(clockid_t clock, struct timespec *t);

pid_t __wrap_getpid(void) { return 4711; }

ssize_t __wrap_getrandom(void *buffer, size_t n, unsigned flags)
{
    (void)flags;
    memset(buffer, 0x5a, n);
    return (ssize_t)n;
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *t)
{
    if (clock != CLOCK_REALTIME)
        return __real_clock_gettime(clock, t);
    *t = (struct timespec){1700000000, 0};
    return 0;
}

/* ---- the command line ---- */

static uint64_t number(const char *text) { return strtoull(text, NULL, 10); }

static void parse(struct options *o, int argc, char **argv)
{
    struct campaign *c = &o->campaign;
    o->mode = argc > 1 ? argv[1] : "";
    for (int i = 2; i + 1 < argc; i += 2) {
        const char *key = argv[i], *value = argv[i + 1];
        if (strcmp(key, "--model") == 0) c->model = (enum model)number(value);
        else if (strcmp(key, "--workload") == 0) o->workload = c->workload = value;
        else if (strcmp(key, "--domain") == 0) c->domain = (int)number(value);
        else if (strcmp(key, "--seed") == 0) c->seed = number(value);
        else if (strcmp(key, "--budget") == 0) c->budget = number(value);
        else if (strcmp(key, "--seen") == 0) o->seen = value;
        else if (strcmp(key, "--scratch") == 0) snprintf(c->scratch, sizeof c->scratch, "%s", value);
        else if (strcmp(key, "--keep") == 0) c->keep = value;
        else if (strcmp(key, "--trace") == 0) o->trace = value;
        else if (strcmp(key, "--base") == 0) o->base = value;
        else if (strcmp(key, "--states") == 0) o->states = value;
        else if (strcmp(key, "--script") == 0) wl_script_text = value;
        else if (strcmp(key, "--step") == 0) o->step = number(value);
        else if (strcmp(key, "--most") == 0) o->most = number(value);
        else if (strcmp(key, "--stop-after") == 0) c->stop_after = number(value);
        else if (strcmp(key, "--nested-every") == 0) c->nested_every = (uint32_t)number(value);
        else if (strcmp(key, "--depth") == 0) c->depth = (int)number(value);
        else {
            fprintf(stderr, "no option %s\n", key);
            exit(2);
        }
    }
}

int main(int argc, char **argv)
{
    struct options o = {.campaign = {.model = MODEL_LINES, .domain = PMS_DOMAIN_EMULATED, .seed = 1, .budget = 1000, .stop_after = 5,
                                     .nested_every = 40, .depth = 2, .workload = "", .scratch = "/dev/shm/pms-crash"}};
    parse(&o, argc, argv);
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
        run_kills(&o);
    else if (strcmp(o.mode, "detect") == 0)
        run_detector(&o);
    else if (strcmp(o.mode, "fault") == 0)
        run_faults(&o);
    else
        return 2;
    return o.campaign.tally.failures != 0;
}
