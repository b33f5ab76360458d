/* The held version, by crash points: SIGKILL, or a power failure, at every persistence primitive of
 * commits that hold, of going back, of release, of reopening; then of what follows at the next
 * open. The recovered state is that of the last step that returned or of the one in flight; the
 * version before it is held where it has to be, and going back to it gives that version, whole.
 * Once held for the store, once for a job: then it is switched on after each open, and what would
 * let go of it is refused until it is allowed.
 *
 * PMS_CRASH_STEP=1 fails at every primitive and takes hours with all stories; the default is every
 * 41st, from another start for each story. Of other steps it takes five times as long ones, as
 * there are so many stories: 29, as under the sanitizers, is every 151st. */
#ifndef PMS_TESTS_HOLD_STORIES_H
#define PMS_TESTS_HOLD_STORIES_H

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commit/landing.h"
#include "crash/power.h"
#include "hold_fixture.h"

#define STEPS_MAX 32

static char base_path[300];
static bool power, job;

enum kind {
    COMMIT, /* what it writes, committed: what was held before may be gone as soon as it begins */
    WORK,   /* writes, not committed: nothing else changes */
    LOSING, /* the same, but opens slots: what is held may go */
    RELEASE,
    BACK,
    REOPEN, /* closed without release, and opened again */
    UNDO,   /* what is pending is rolled back */
    /* in a job COMMIT and LOSING allow first that what is held goes */
};

struct step {
    enum kind kind;
    void (*write)(struct pms_pool *pool);
};

/* ---- what is written ---- */

static void small(struct pms_pool *p) { bytes_of(p, "small")[3]++; }
static void beside(struct pms_pool *p) { bytes_of(p, "beside")[5] += 3; }
static void large(struct pms_pool *p)
{
    memset(bytes_of(p, "large"), bytes_of(p, "large")[0] + 1, 160000);
}
static void part(struct pms_pool *p) { memset(bytes_of(p, "large") + 8192, 77, 4096); }
static void next_part(struct pms_pool *p) { memset(bytes_of(p, "large") + 4096, 78, 8192); }
static void value(struct pms_pool *p) { put_value(p, "value", has(p, "new") ? "odd" : "even"); }
static void free_medium(struct pms_pool *p) { del(p, "medium"), del(p, "small"); }
static void free_large(struct pms_pool *p) { del(p, "large"); }
static void free_slots(struct pms_pool *p) { del(p, "w"); }
static void make(struct pms_pool *p)
{
    put_array(p, "n1", 12000, 11);
    put_array(p, "n2", 160000, 12);
    put_array(p, "n3", 64, 13);
    put_value(p, "new", "a longer value than the one before");
}
static void free_made(struct pms_pool *p) { del(p, "n1"), del(p, "n2"), del(p, "n3"); }
static void greedy(struct pms_pool *p) /* whatever is free */
{
    char name[16];
    for (uint8_t i = 0; i < 24; i++) {
        snprintf(name, sizeof name, "g%d", i);
        put_array(p, name, i % 3 ? 64 : 12000, i);
    }
}
static void huge(struct pms_pool *p)
{
    put_array(p, "huge", 3000000, 21);
    bytes_of(p, "huge")[2999999] = 1;
}
static void in_huge(struct pms_pool *p) { memset(bytes_of(p, "huge") + 5000, 7, 100000); }
/* Blocks up to where the page table of what was grown has its last page, which is no whole one. */
static void to_the_end(struct pms_pool *p)
{
    const struct pms_segment *s = &p->super.segment[1];
    uint64_t entries = PMS_PAGE / sizeof(struct pms_pte), left = s->data_pages % entries;
    uint64_t last = s->data_off + (s->data_pages - left) * PMS_PAGE, at = 0;
    char name[16];
    PMS_ASSERT(left > 40);
    for (int i = 0; at + 160000 < last; i++) {
        snprintf(name, sizeof name, "end%d", i);
        at = put_array(p, name, 160000, 22);
    }
}
static void turn(struct pms_pool *p)
{
    static uint8_t version;
    fill_next(p, ++version);
    flip(p);
    small(p);
}
static void noise(struct pms_pool *p) { fill_next(p, 0xee); }
/* the next version is copied into its slot by the commit, as a mirror's */
static void land(struct pms_pool *p)
{
    static unsigned char mirrored[SLOT_BYTES];
    static char meta[8] = "\x81\xa5slots";
    struct pms_slot_pair slots;
    struct pms_error e;
    MUST(pms_slot_find(p, 0, "w", 1, &slots, &e));
    uint32_t next = !slots.current;
    memset(mirrored, mirrored[0] + 1, sizeof mirrored);
    meta[7] = (char)next;
    struct pms_land_copy copy = {.data = slots.data[next], .bytes = SLOT_BYTES, .src = mirrored};
    struct pms_land_flip turned = {.data = slots.data[next],
                                   .name = "w",
                                   .meta = meta,
                                   .name_bytes = 1,
                                   .meta_bytes = sizeof meta};
    struct pms_landing *l = pms_landing_new(&copy, 1, &turned, 1, -1, &e);
    MUST(l ? pms_landing_arm(p, l, &e) : e.status);
    pms_landing_free(l);
}
static void whole_huge(struct pms_pool *p)
{
    memset(bytes_of(p, "huge"), bytes_of(p, "huge")[0] + 1, 3000000);
}
/* what it frees is used again at once, where the slot that follows lets go of it */
static void turn_and_free(struct pms_pool *p) { turn(p), del(p, "large"); }
static void many_names(struct pms_pool *p)
{
    char name[16];
    for (int i = 0; i < 70; i++) { /* the table grows */
        snprintf(name, sizeof name, "name%d", i);
        put_value(p, name, "v");
    }
}

#define STORIES 15
static const struct {
    const char *name;
    struct step step[STEPS_MAX];
} story[STORIES] = {
    {"in place",
     {{COMMIT, small},
      {WORK, large},
      {COMMIT, large},
      {BACK, 0},
      {COMMIT, large},
      {COMMIT, small},
      {WORK, large},
      {BACK, 0},
      {COMMIT, value},
      {-1, 0}}},
    {"the same page, and its neighbours",
     {{COMMIT, part},
      {COMMIT, next_part},
      {WORK, part},
      {REOPEN, 0},
      {WORK, next_part},
      {BACK, 0},
      {COMMIT, part},
      {REOPEN, 0},
      {REOPEN, 0},
      {BACK, 0},
      {-1, 0}}},
    {"hot ranges",
     {{COMMIT, small},
      {COMMIT, small},
      {COMMIT, small},
      {COMMIT, beside},
      {COMMIT, small},
      {WORK, small},
      {BACK, 0},
      {COMMIT, small},
      {COMMIT, small},
      {COMMIT, small},
      {WORK, beside},
      {UNDO, 0},
      {WORK, small},
      {BACK, 0},
      {-1, 0}}},
    {"undone in between",
     {{COMMIT, large},
      {WORK, large},
      {UNDO, 0},
      {WORK, make},
      {UNDO, 0},
      {WORK, part},
      {REOPEN, 0},
      {WORK, make},
      {BACK, 0},
      {-1, 0}}},
    {"frees",
     {{COMMIT, free_medium},
      {WORK, greedy},
      {BACK, 0},
      {COMMIT, free_large},
      {WORK, make},
      {UNDO, 0},
      {WORK, greedy},
      {REOPEN, 0},
      {WORK, make},
      {BACK, 0},
      {COMMIT, free_medium},
      {COMMIT, make},
      {WORK, greedy},
      {BACK, 0},
      {-1, 0}}},
    {"frees of what was made",
     {{COMMIT, make},
      {COMMIT, free_made},
      {WORK, greedy},
      {REOPEN, 0},
      {WORK, greedy},
      {BACK, 0},
      {COMMIT, free_made},
      {RELEASE, 0},
      {COMMIT, greedy},
      {-1, 0}}},
    {"growth",
     {{COMMIT, huge},
      {BACK, 0},
      {COMMIT, huge},
      {COMMIT, in_huge},
      {WORK, large},
      {BACK, 0},
      {COMMIT, small},
      {-1, 0}}},
    {"to the end of what was grown",
     {{COMMIT, huge},
      {COMMIT, to_the_end},
      {REOPEN, 0},
      {WORK, in_huge},
      {BACK, 0},
      {COMMIT, to_the_end},
      {COMMIT, small},
      {REOPEN, 0},
      {BACK, 0},
      {-1, 0}}},
    {"all of it, again and again", /* in domain file more than the ring has room for */
     {{COMMIT, huge},
      {COMMIT, whole_huge},
      {COMMIT, whole_huge},
      {BACK, 0},
      {COMMIT, whole_huge},
      {WORK, whole_huge},
      {REOPEN, 0},
      {WORK, whole_huge},
      {BACK, 0},
      {-1, 0}}},
    {"round the ring",
     {{COMMIT, large}, {COMMIT, large}, {COMMIT, large}, {COMMIT, large}, {COMMIT, large},
      {COMMIT, large}, {COMMIT, large}, {COMMIT, large}, {COMMIT, large}, {COMMIT, large},
      {COMMIT, large}, {COMMIT, large}, {COMMIT, large}, {COMMIT, large}, {COMMIT, large},
      {REOPEN, 0},     {WORK, part},    {BACK, 0},       {COMMIT, large}, {COMMIT, large},
      {REOPEN, 0},     {COMMIT, large}, {COMMIT, small}, {BACK, 0},       {-1, 0}}},
    {"let go, and used again at once",
     {{COMMIT, turn_and_free},
      {LOSING, noise},
      {COMMIT, make},
      {COMMIT, free_made},
      {COMMIT, turn},
      {LOSING, turn},
      {COMMIT, make},
      {BACK, 0},
      {-1, 0}}},
    {"slots",
     {{COMMIT, turn},
      {WORK, small},
      {BACK, 0},
      {COMMIT, turn},
      {COMMIT, turn},
      {REOPEN, 0},
      {WORK, small},
      {BACK, 0},
      {COMMIT, turn},
      {LOSING, noise},
      {COMMIT, turn},
      {REOPEN, 0},
      {LOSING, noise},
      {-1, 0}}},
    {"mirrors",
     {{COMMIT, land},
      {WORK, small},
      {BACK, 0},
      {COMMIT, land},
      {COMMIT, land},
      {REOPEN, 0},
      {COMMIT, land},
      {COMMIT, small},
      {BACK, 0},
      {-1, 0}}},
    {"slots are freed",
     {{COMMIT, turn},
      {COMMIT, free_slots},
      {WORK, greedy},
      {REOPEN, 0},
      {WORK, make},
      {BACK, 0},
      {COMMIT, turn},
      {-1, 0}}},
    {"released",
     {{COMMIT, many_names},
      {RELEASE, 0},
      {WORK, small},
      {COMMIT, large},
      {RELEASE, 0},
      {COMMIT, make},
      {BACK, 0},
      {-1, 0}}},
};

/* ---- between the parent and the children it loses ---- */

struct shared {
    _Atomic uint32_t returned; /* steps */
    uint32_t state[STEPS_MAX + 1],
        held[STEPS_MAX + 1]; /* digests, before and after each; 0: none */
    /* what was let go, but not durably yet: domain file, when a slot was opened */
    uint32_t lingers[STEPS_MAX + 1];
};
static struct shared *shared;

/* ---- failing ---- */

static _Atomic uint64_t seen, fail_at;

static int count_and_fail(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    if (power)
        pms_power_note(primitive, addr, bytes);
    if (atomic_fetch_add(&seen, 1) + 1 == atomic_load(&fail_at)) {
        if (power)
            pms_power_fail();
        kill(getpid(), SIGKILL);
    }
    return 0;
}

static void arm(uint64_t n)
{
    if (power && !pms_power_start(open(path, O_RDWR | O_CLOEXEC), n * 2654435761u + 1))
        _exit(1);
    atomic_store(&seen, 0);
    atomic_store(&fail_at, n);
    pms_persist_hook = count_and_fail;
}

static void copy_file(const char *from, const char *to)
{
    int in = open(from, O_RDONLY), out = open(to, O_RDWR | O_CREAT | O_TRUNC, 0600);
    struct stat st;
    fstat(in, &st);
    void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, in, 0);
    for (ssize_t done = 0; done < st.st_size;)
        done += pwrite(out, (char *)p + done, (size_t)(st.st_size - done), done);
    munmap(p, (size_t)st.st_size);
    close(in);
    close(out);
}

static bool survives(void (*fn)(uint64_t n, unsigned w), uint64_t n, unsigned w)
{
    int ws;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        test_checks_failed = 0;
        fn(n, w);
        fflush(stdout);
        _exit(0);
    }
    waitpid(pid, &ws, 0);
    CHECK(WIFEXITED(ws) ? WEXITSTATUS(ws) == 0 : WTERMSIG(ws) == SIGKILL);
    return WIFEXITED(ws);
}

/* ---- the story ---- */

static struct pms_pool *open_held(void)
{
    struct pms_error e;
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, !job);
    if (p && job)
        MUST(pms_hold_for_job(p, &e));
    return p;
}

static struct pms_pool *take(struct pms_pool *p, const struct step *s)
{
    struct pms_error e;
    if (s->kind == COMMIT || s->kind == LOSING)
        MUST(pms_allow(p, &e));
    if (s->write)
        s->write(p);
    if (s->kind == COMMIT)
        commit(p);
    if (s->kind == BACK)
        back(p);
    if ((s->kind == RELEASE && pms_release(p, &e) != PMS_OK) ||
        (s->kind == UNDO && pms_rollback(p, &e) != PMS_OK))
        abort();
    if (s->kind == REOPEN) {
        shut(p, 0);
        p = open_held();
    }
    return p;
}

static int holds_for(bool held)
{
    return !held ? PMS_HELD_NOT : job ? PMS_HELD_FOR_JOB : PMS_HELD_FOR_STORE;
}

/* What the states have to be: learned without a failure. */
static void learn(struct pms_pool *p, const struct step *s, uint32_t i)
{
    uint32_t *state = shared->state, *held = shared->held;
    state[i + 1] = s->kind == WORK || s->kind == LOSING ? state[i] : digest(p);
    held[i + 1] = s->kind == COMMIT                                            ? state[i]
                  : s->kind == RELEASE || s->kind == BACK || s->kind == LOSING ? 0
                                                                               : held[i];
    bool stays = s->kind == WORK || s->kind == UNDO;
    uint32_t lingers = shared->lingers[i];
    shared->lingers[i + 1] = domain != PMS_DOMAIN_FILE      ? 0
                             : s->kind == LOSING && held[i] ? held[i]
                             : stays                        ? lingers
                                                            : 0;
    if (s->kind == BACK)
        CHECK(state[i + 1] == held[i]);
    if (s->kind == REOPEN || s->kind == UNDO)
        CHECK(state[i + 1] == state[i]);
    CHECK(pms_holds(p) == holds_for(held[i + 1] != 0));
}

static void child_acts(uint64_t n, unsigned w)
{
    if (n)
        arm(n); /* opening included, and switching on */
    struct pms_pool *p = open_held();
    if (!p)
        _exit(1);
    if (!n)
        shared->state[0] = digest(p);
    for (uint32_t i = 0; story[w].step[i].kind != (enum kind) - 1; i++) {
        const struct step *s = &story[w].step[i];
        p = take(p, s);
        if (!n)
            learn(p, s, i);
        atomic_store(&shared->returned, i + 1);
    }
    shut(p, 0);
    if (test_checks_failed)
        _exit(1);
}

/* Whether a failure while step i was under way may have ended what was held before it. */
static bool may_lose(const struct step *s)
{
    return s->kind == COMMIT || s->kind == LOSING || s->kind == RELEASE;
}

/* All doors by which it could go are shut, and nothing changes at them. */
static void check_doubt(struct pms_pool *p)
{
    struct pms_error e;
    struct pms_entered entry;
    uint32_t d = digest(p);
    if (has(p, "w")) /* one of its slots may be part of what is held */
        CHECK(pms_slot_flip(p, 0, "w", 1, NULL, &e) == PMS_E_INDOUBT && pms_rollback(p, &e) == 0);
    CHECK(pms_commit(p, &e) == PMS_OK); /* nothing is pending */
    CHECK(pms_txblock_enter(p, 0, 1, 0, &entry, &e) == PMS_E_INDOUBT);
    put_value(p, "value", "in doubt");
    CHECK(pms_commit(p, &e) == PMS_E_INDOUBT);
    CHECK(pms_rollback(p, &e) == PMS_OK && digest(p) == d && pms_in_doubt(p));
}

static void child_verifies(uint64_t n, unsigned w)
{
    static struct pms_check_report r;
    struct pms_error e;
    uint32_t k = atomic_load(&shared->returned);
    const struct step *under_way = &story[w].step[k];
    bool over = under_way->kind == (enum kind) - 1;
    struct pms_pool *reader = open_as(PMS_MODE_READ, 0);
    uint32_t shown = reader ? digest(reader) : 0;
    int told = reader ? pms_holds(reader) : 0, doubted = reader && pms_in_doubt(reader);
    if (reader)
        shut(reader, 0);
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, !job);
    if (!p || !reader)
        _exit(1);
    int holds = pms_holds(p);
    CHECK(holds == holds_for(holds) && doubted == (job && holds) && pms_in_doubt(p) == doubted);
    if (pms_in_doubt(p))
        check_doubt(p);
    uint32_t d = digest(p), before = 0;
    CHECK(shown == d && told == holds);
    CHECK(pms_check(p, &r, &e) == PMS_OK && r.problem_count == 0);
    greedy(p); /* it takes nothing that is held */
    if (holds) {
        back(p);
        before = digest(p);
    } else {
        CHECK(pms_back(p, &e) == PMS_E_STATE && pms_rollback(p, &e) == PMS_OK && digest(p) == d);
    }
    bool was = d == shared->state[k] &&
               (holds ? before == shared->held[k] || before == shared->lingers[k]
                      : !shared->held[k] || (!over && may_lose(under_way)));
    bool is = !over && d == shared->state[k + 1] && before == shared->held[k + 1];
    CHECK(was || is);
    if (!was && !is)
        printf(
            "  %s domain %d power %d primitive %lu: %u steps, state %x held %x; was %x %x, is %x %x\n",
            story[w].name, domain, power, (unsigned long)n, k, d, before, shared->state[k],
            shared->held[k], shared->state[k + 1], shared->held[k + 1]);
    CHECK(!pms_holds(p) && !pms_in_doubt(p));
    if (job)
        MUST(pms_hold_for_job(p, &e));
    CHECK(pms_check(p, &r, &e) == PMS_OK && r.problem_count == 0);
    if (r.problem_count)
        printf("  %s: %s\n", story[w].name, r.problem[0]);
    d = digest(p);
    greedy(p);
    put_value(p, "after", "crash");
    commit(p);
    CHECK(pms_in_doubt(p) == job);
    back(p);
    CHECK(digest(p) == d);
    shut(p, 0);
    if (test_checks_failed)
        _exit(1);
}

/* As after a crash: goes back at once, if it can, and dies on the way. */
static void child_goes_back(uint64_t n, unsigned w)
{
    struct pms_error e;
    (void)w;
    arm(n);
    struct pms_pool *p = open_held();
    if (!p)
        _exit(1);
    if (pms_holds(p))
        pms_back(p, &e);
    _exit(0);
}

/* After it: where it came from, still held, or where it went. */
static void child_has_gone(uint64_t state, unsigned held)
{
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
    if (!p)
        _exit(1);
    bool holds = pms_holds(p);
    uint32_t d = digest(p);
    if (holds)
        back(p);
    CHECK(holds ? d == (uint32_t)state && digest(p) == held : d == held || (!held && d == state));
    shut(p, 1);
    if (test_checks_failed)
        _exit(1);
}

static uint64_t failures, double_failures;

static void go_back_everywhere(const char *crashed, uint64_t step, uint64_t n, unsigned w)
{
    copy_file(path, crashed);
    struct pms_pool *p = open_as(PMS_MODE_READ_WRITE, 1);
    uint32_t state = digest(p), held = 0;
    if (pms_holds(p)) {
        back(p);
        held = digest(p);
    }
    shut(p, 0);
    for (uint64_t m = 1 + n % step;; m += step) {
        copy_file(crashed, path);
        bool done = survives(child_goes_back, m, w);
        double_failures += !done;
        CHECK(survives(child_has_gone, state, held));
        if (done)
            break;
    }
    copy_file(crashed, path);
}

static uint64_t step_of_stories(void)
{
    const char *asked = getenv("PMS_CRASH_STEP");
    uint64_t step = asked ? strtoull(asked, NULL, 10) : 7;
    return step > 1 ? 5 * step + 6 : 1;
}

static void fail_everywhere(unsigned w)
{
    char crashed[300];
    memset(shared, 0, sizeof *shared);
    snprintf(crashed, sizeof crashed, "%s.crashed", path);
    copy_file(base_path, path);
    CHECK(survives(child_acts, 0, w));
    uint64_t step = step_of_stories(), trial = 0;
    for (uint64_t n = 1 + w % step;; n += step, trial++) {
        atomic_store(&shared->returned, 0);
        copy_file(base_path, path);
        bool done = survives(child_acts, n, w);
        failures += !done;
        if (trial % 7 == 1 && !done)
            go_back_everywhere(crashed, step, n, w);
        CHECK(survives(child_verifies, n, w));
        if (done || test_checks_failed > 10)
            break;
    }
    unlink(crashed);
}

static unsigned current;
static void fail_current(void) { fail_everywhere(current); }

struct model {
    int domain;
    bool power, job;
};

static int tell_stories(const char *name, const struct model *model, size_t count,
                        void (*of_the_log)(void))
{
    const char *dir = getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm";
    snprintf(path, sizeof path, "%s/pms-%s-%ld", dir, name, (long)getpid());
    snprintf(base_path, sizeof base_path, "%s.base", path);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (size_t i = 0; i < count; i++) {
        domain = model[i].domain;
        power = model[i].power;
        job = model[i].job;
        make_store(!job);
        copy_file(path, base_path);
        if (of_the_log && !power && !job)
            TEST(of_the_log);
        for (current = 0; current < STORIES && !test_failed; current++) {
            printf("domain %d%s%s, %s: ", domain, power ? ", power failures" : "",
                   job ? ", for a job" : "", story[current].name);
            TEST(fail_current);
        }
    }
    unlink(path);
    unlink(base_path);
    printf("%lu failures, %lu double failures\n", (unsigned long)failures,
           (unsigned long)double_failures);
    return test_summary();
}

#endif
