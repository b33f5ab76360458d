#include "base/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/lock.h"

/* Used again, and never freed: whoever has seen one may look at it at any time. */
struct pms_thread_record {
    _Atomic int64_t number; /* 0: of no thread */
    struct pms_thread_record *next_free;
};

__thread struct pms_thread pms_thread_own;
static _Atomic int64_t thread_numbers;
static struct pms_thread_record *free_records;
static struct pms_lock records_lock;
static pthread_key_t record_key;
static bool have_key;
static pthread_once_t record_once = PTHREAD_ONCE_INIT;

static void end_thread(void *record)
{
    struct pms_thread_record *r = record;
    pms_thread_own = (struct pms_thread){0};
    atomic_store(&r->number, 0);
    pms_lock_acquire(&records_lock);
    r->next_free = free_records;
    free_records = r;
    pms_lock_release(&records_lock);
}

static void make_key(void) { have_key = pthread_key_create(&record_key, end_thread) == 0; }

static struct pms_thread_record *new_record(void)
{
    pthread_once(&record_once, make_key);
    if (!have_key)
        return NULL;
    pms_lock_acquire(&records_lock);
    struct pms_thread_record *r = free_records;
    if (r)
        free_records = r->next_free;
    pms_lock_release(&records_lock);
    if (!r)
        r = calloc(1, sizeof *r);
    if (r && pthread_setspecific(record_key, r) != 0) {
        free(r);
        r = NULL;
    }
    return r;
}

void pms_thread_number(void)
{
    struct pms_thread *me = &pms_thread_own;
    me->id = (int64_t)syscall(SYS_gettid);
    me->number = atomic_fetch_add(&thread_numbers, 1) + 1;
    me->record = new_record();
    if (me->record)
        atomic_store(&me->record->number, me->number);
}

bool pms_thread_has_ended(const struct pms_thread *t)
{
    if (t->record)
        return atomic_load(&t->record->number) != t->number;
    return syscall(SYS_tgkill, getpid(), t->id, 0) != 0 && errno == ESRCH;
}

int pms_thread_start(pthread_t *thread, struct pms_thread_kind kind, void *(*run)(void *arg),
                     void *arg)
{
    pthread_t detached;
    pthread_attr_t attr;
    sigset_t blocked, before;
    pthread_attr_init(&attr);
    if (!thread)
        pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (kind.stack_bytes)
        pthread_attr_setstacksize(&attr, kind.stack_bytes);
    sigfillset(&blocked);
    if (kind.own_faults) {
        sigdelset(&blocked, SIGSEGV);
        sigdelset(&blocked, SIGBUS);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before); /* inherited */
    int err = pthread_create(thread ? thread : &detached, &attr, run, arg);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    return err == EAGAIN ? ENOMEM : err;
}

void pms_thread_after_fork_in_child(void)
{
    pms_thread_own.number = 0;           /* the child's only thread is another than its parent's */
    atomic_store(&records_lock.word, 0); /* who held it did not come with us */
}
