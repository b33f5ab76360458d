/* Workloads of several threads in one transaction. */
#include "threads.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "trace.h"
#include "workload.h"

/* ---- as chance has it ---- */

struct writer {
    uint32_t *at;
    uint32_t n, value;
};
static void *write_range(void *arg)
{
    const struct writer *me = arg;
    for (uint32_t i = 0; i < me->n; i++)
        me->at[i] = me->value + i;
    return NULL;
}

void wl_threads(struct wl *w) /* some of them write the same pages */
{
    uint32_t *large = wl_data(w, "large", NULL), *medium = wl_data(w, "medium", NULL);
    if (w->failed)
        return;
    for (uint32_t round = 0; round < 2; round++) {
        pthread_t t[3];
        struct writer job[3] = {
            {large, 3000, round}, {large + 3000, 3000, 7 + round}, {medium, 900, round}};
        for (int i = 0; i < 3; i++)
            pthread_create(&t[i], NULL, write_range, &job[i]);
        wl_value(w, 0, "value", "during", 6);
        for (int i = 0; i < 3; i++)
            pthread_join(t[i], NULL);
        wl_commit(w);
    }
}

/* ---- a second thread that does what it is told, while the first one waits ---- */

struct second {
    pthread_t thread;
    sem_t go, done;
    void (*what)(void *arg); /* NULL: the end */
    void *arg;
};

static void wait_for(sem_t *s)
{
    while (sem_wait(s) != 0) {
    }
}

static void *second_thread(void *arg)
{
    struct second *s = arg;
    for (wait_for(&s->go); s->what; wait_for(&s->go)) {
        s->what(s->arg);
        sem_post(&s->done);
    }
    return NULL;
}

static void second_start(struct second *s)
{
    sem_init(&s->go, 0, 0);
    sem_init(&s->done, 0, 0);
    pthread_create(&s->thread, NULL, second_thread, s);
}

static void second_does(struct second *s, void (*what)(void *arg), void *arg)
{
    s->what = what;
    s->arg = arg;
    sem_post(&s->go);
    wait_for(&s->done);
}

static void second_end(struct second *s)
{
    s->what = NULL;
    sem_post(&s->go);
    pthread_join(s->thread, NULL);
}

/* ---- faults between any two holds of the log lock ---- */

#define TARGETS 36u
#define TARGET_WORDS 1100u /* more than a page */
/* of them in a transaction: none is written often enough to become hot */
#define EACH 12u

struct between {
    struct wl *w;
    struct second second;
    pthread_t editor;
    uint32_t *target[TARGETS];
    uint32_t next, left, value;
};
static struct between *between;

void (*threads_released)(const struct pms_lock *lock); /* wraps.c */

static void store_one(void *arg)
{
    struct between *b = arg;
    b->target[b->next % TARGETS][5] = b->value;
}

static void fault_now(const struct pms_lock *lock)
{
    struct between *b = between;
    if (!b || !b->left || lock != &b->w->pool->undo.lock ||
        !pthread_equal(pthread_self(), b->editor))
        return;
    b->left--;
    second_does(&b->second, store_one, b);
    b->next++;
}

static void allow_faults(struct between *b, uint32_t value)
{
    b->value = value;
    b->left = EACH;
    between = b;
}

static void commit_without(struct between *b, bool back)
{
    between = NULL; /* a store while a transaction ends may land on either side */
    if (back)
        wl_rollback(b->w);
    wl_commit(b->w);
}

/* Whenever the engine lets go of the log lock in the middle of an edit, another thread's store
 * is captured: its entry comes after those of the edit so far, and is fenced by that thread. */
void wl_faults_between(struct wl *w)
{
    static struct between b;
    char name[8];
    b = (struct between){.w = w};
    for (uint32_t i = 0; i < TARGETS; i++) {
        snprintf(name, sizeof name, "t%u", i);
        wl_array(w, 0, name, TARGET_WORDS, i);
    }
    wl_make_pair(w, "pair", PAIR_WORDS);
    wl_splice(w, wl_list(w, "items"), 0, 0, 1, 40, 1);
    wl_commit(w);
    for (uint32_t i = 0; i < TARGETS; i++) {
        snprintf(name, sizeof name, "t%u", i);
        b.target[i] = wl_data(w, name, NULL);
    }
    if (w->failed)
        return;
    b.editor = pthread_self();
    second_start(&b.second);
    threads_released = fault_now;
    for (uint32_t step = 0; step < 10 && !w->failed; step++) {
        allow_faults(&b, step + 1);
        switch (step) {
        case 0: wl_value(w, 0, "value", "other", 5); break;
        case 1: wl_array(w, 0, "new", 40, 7); break;
        case 2: wl_splice(w, wl_list(w, "items"), 7, 2, 1, 3, 50); break;
        case 3: wl_remove(w, 0, "new"); break;
        case 4:
            wl_fill_next(w, "pair", PAIR_WORDS, 9);
            wl_flip(w, "pair");
            break;
        case 5:
            wl_write(w, "large", 6000, 1);
            wl_write(w, "keep", 3, 1);
            break;
        case 6: wl_array(w, wl_group(w, 0, "g"), "y", 3000, 3); break;
        case 7: wl_remove(w, 0, "medium"); break; /* rolled back */
        case 8:
            wl_declare(w, (const char *const[]){"medium", "keep"}, 2);
            memset(wl_data(w, "medium", NULL), 5, 9000);
            break;
        default: wl_array(w, 0, "huge", 120000, 9); break; /* grows */
        }
        commit_without(&b, step == 7);
    }
    threads_released = NULL;
    second_end(&b.second);
}

/* ---- copies by all cores ---- */

#define MEET_MS 2000 /* on a machine of one core there is nobody to wait for */

static _Atomic bool met;

static void meet(bool starter, enum pms_primitive primitive)
{
    if (primitive != PMS_PRIM_COPY)
        return;
    if (!starter)
        atomic_store(&met, true);
    for (int ms = 0; !atomic_load(&met) && ms < MEET_MS; ms++)
        usleep(1000);
    atomic_store(&met, true);
}

/* A pre-image so large that a second core copies a part of it: the caller's first copy waits for
 * one of the other's. */
void wl_all_cores(struct wl *w)
{
    uint32_t words = (PMS_UNDO_PARALLEL + PMS_PAGE) / 4;
    wl_array(w, 0, "wide", words, 7);
    wl_commit(w);
    for (uint32_t round = 0; round < 2; round++) {
        atomic_store(&met, false);
        trace_before = meet;
        wl_declare(w, (const char *const[]){"wide"}, 1);
        trace_before = NULL;
        uint32_t *wide = wl_data(w, "wide", NULL);
        for (uint32_t i = 0; i < words && !w->failed; i += words / 9)
            wide[i] = round + i;
        if (round == 0)
            wl_commit(w);
    }
    wl_rollback(w);
    wl_data(w, "keep", NULL)[1] = 1;
    wl_commit(w);
}

/* ---- one transaction, each operation by the other thread than the one before; commits by
 * either ---- */

static uint64_t turns_list;
static void turn_data(void *w)
{
    wl_data(w, "keep", NULL)[3] += 5;
    memset(wl_data(w, "medium", NULL), 4, 6000);
}
static void turn_value(void *w) { wl_value(w, 0, "value", "by another", 10); }
static void turn_small(void *w) { wl_array(w, 0, "small", 90, 5); }
static void turn_extent(void *w)
{
    wl_array(w, 0, "extent", 9000, 6);
    wl_data(w, "extent", NULL)[7] = 1;
}
static void turn_list(void *w) { wl_splice(w, turns_list, 3, 1, 1, 5, 60); }
static void turn_slots(void *w)
{
    wl_fill_next(w, "pair", PAIR_WORDS, 5);
    wl_flip(w, "pair");
}
static void turn_group(void *w) { wl_array(w, wl_group(w, 0, "group"), "z", 300, 3); }
static void turn_write(void *w) { wl_write(w, "large", 900, 3); }
static void turn_remove(void *w) { wl_remove(w, 0, "small"); }
static void turn_commit(void *w) { wl_commit(w); }
static void turn_back(void *w) { wl_rollback(w); }

void wl_turns(struct wl *w)
{
    static void (*const turn[])(void *w) = {
        turn_data,  turn_commit, turn_value, turn_small,  turn_extent, turn_commit,
        turn_list,  turn_commit, turn_slots, turn_commit, turn_group,  turn_remove,
        turn_data,  turn_back,   turn_write, turn_commit, turn_extent, turn_value,
        turn_slots, turn_commit, turn_small, turn_commit,
    };
    struct second second;
    wl_make_pair(w, "pair", PAIR_WORDS);
    turns_list = wl_list(w, "items");
    wl_splice(w, turns_list, 0, 0, 1, 20, 1);
    wl_commit(w);
    second_start(&second);
    for (uint32_t i = 0; i < sizeof turn / sizeof turn[0]; i++)
        if (i % 2)
            turn[i](w);
        else
            second_does(&second, turn[i], w);
    second_end(&second);
}
