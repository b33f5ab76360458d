
#include "commit/handler.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static _Atomic(struct pms_watched *) store[PMS_MAX_STORES];
static _Atomic uint32_t inside[PMS_MAX_STORES]; /* handlers that look at store[i] now */
static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
/* Whom a fault that is not ours is passed on to, the newest last: who had the signal each time
 * when our handler was put first. One that was put before ours meanwhile keeps ours as its own
 * predecessor, so ours may be called again by the handler that it has just called: then it goes
 * on with the one below, or the two would call each other until the stack is used up. */
#define PREDECESSORS_MAX 8u
/* written under install_lock before our handler is in place */
static struct sigaction predecessor[PREDECESSORS_MAX];
static _Atomic uint32_t predecessors;

/* The fault that this thread is passing on. A new one has another context, or the same place for
 * it on a stack that is not deeper. */
struct passing {
    const void *context;
    const char *frame;
    uint32_t below; /* the predecessor that has it now */
};
/* no memory is allocated for it in a handler */
static __thread struct passing passing __attribute__((tls_model("initial-exec")));
static _Atomic int chained_thread; /* whose real fault we last passed on */

static void say(const char *text)
{
    ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    (void)ignored;
}

static int thread_id(void) { return (int)syscall(SYS_gettid); }

/* A fault that a store does not accept kills the process in the end: say why first. */
static void explain(const struct pms_watched *w)
{
    if (atomic_load(&w->forked))
        say("pmstore: write to an array of a store that the parent process opened: a forked child may only read it\n");
    else if (w->full)
        say("pmstore: write to slots, not declared, while the disk is full (or has failed): no room "
            "to undo it; the store is as at its last commit (a declared write raises "
            "StoreFullError)\n");
    else if (w->read_only)
        say("pmstore: write to an array of a store opened with mode=\"r\"\n");
    else
        say("pmstore: write to memory of the store that is not part of an array\n");
}

static bool is_write(const siginfo_t *info, const void *context)
{
    if (info->si_code != SEGV_ACCERR)
        return false;
#if defined(__x86_64__)
    const ucontext_t *uc = context;
    return (uc->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#elif defined(__aarch64__)
    const ucontext_t *uc = context;
    /* an instruction fetch is none; a read counts as one */
    return (uintptr_t)info->si_addr != uc->uc_mcontext.pc;
#else
    (void)context;
    return true;
#endif
}

/* A thread may be kept waiting between its fault and this handler, until the store that the page
 * belonged to has closed and made it private: its store has a place now, and no handler to ask.
 * (Linux 5.14; before, such a fault is passed on, as under an emulator.) */
static bool has_become_writable(const siginfo_t *info, const void *context)
{
    uintptr_t page = (uintptr_t)info->si_addr & ~(uintptr_t)(PMS_PAGE - 1);
    return is_write(info, context) && !pms_map_takes_any_advice() &&
           syscall(SYS_madvise, page, (size_t)PMS_PAGE, MADV_POPULATE_WRITE) == 0;
}

/* true: the store may be tried again. aloud: else says why not. */
static bool offer(struct pms_watched *w, const siginfo_t *info, const void *context, bool aloud)
{
    const unsigned char *addr = info->si_addr;
    if (addr < w->map->user || addr >= w->map->user + w->map->reserve)
        return false;
    if (atomic_load(&w->unreadable) && aloud) {
        say("pmstore: use of an array of a store (domain file) that another process opened: only "
            "its own fork children may read it, where the system lets them (/proc/self/mem); open "
            "it here with mode=\"r\", or pass copies\n");
        return false;
    }
    if (!is_write(info, context))
        return false;
    if (!atomic_load(&w->forked) && !w->read_only && w->fault(w, pms_map_offset(w->map, addr)))
        return true;
    if (aloud)
        explain(w);
    return false;
}

static void die_by(int sig)
{
    struct sigaction dfl;
    memset(&dfl, 0, sizeof dfl);
    dfl.sa_handler = SIG_DFL;
    /* the instruction is tried again, and ends the process as if we had not been here */
    sigaction(sig, &dfl, NULL);
}

static bool passed_on_before(const void *context, const char *frame)
{
    return passing.context == context && frame < passing.frame;
}

static void call(const struct sigaction *next, int sig, siginfo_t *info, void *context)
{
    if (next && (next->sa_flags & SA_SIGINFO)) {
        next->sa_sigaction(sig, info, context);
    } else if (next && next->sa_handler != SIG_DFL && next->sa_handler != SIG_IGN) {
        next->sa_handler(sig);
    } else {
        die_by(sig);
        if (info->si_code <= 0)
            raise(sig);
    }
}

static void chain(int sig, siginfo_t *info, void *context, const char *frame)
{
    bool sent = info->si_code <= 0; /* by raise or kill, not by the CPU */
    if (sent && atomic_load(&chained_thread) == thread_id()) {
        /* a handler like faulthandler's reported the fault and now raises it to end the process */
        die_by(sig);
        raise(sig);
        return;
    }
    if (!sent)
        atomic_store(&chained_thread, thread_id());
    struct passing before = passing;
    uint32_t below = passed_on_before(context, frame) ? before.below : atomic_load(&predecessors);
    passing = (struct passing){context, frame, below ? below - 1 : 0};
    call(below ? &predecessor[below - 1] : NULL, sig, info, context);
    passing = before;
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
    int saved = errno;
    bool handled = false;
    const char *frame = __builtin_frame_address(0);
    for (uint32_t i = 0; i < PMS_MAX_STORES && !handled && info->si_code > 0; i++) {
        if (!atomic_load_explicit(&store[i], memory_order_relaxed))
            continue;
        atomic_fetch_add(&inside[i], 1);
        struct pms_watched *w = atomic_load(&store[i]);
        handled = w && offer(w, info, context, !passed_on_before(context, frame));
        atomic_fetch_sub(&inside[i], 1);
    }
    if (!handled && !has_become_writable(info, context))
        chain(sig, info, context, frame);
    else if (atomic_load_explicit(&chained_thread, memory_order_relaxed))
        atomic_store(&chained_thread, 0); /* what we passed on earlier was survived */
    errno = saved;
}

static bool same_handler(const struct sigaction *a, const struct sigaction *b)
{
    return a->sa_sigaction == b->sa_sigaction &&
           (a->sa_flags & SA_SIGINFO) == (b->sa_flags & SA_SIGINFO);
}

/* One that was there before moves up. More than there is place for take the place of the newest.
 * REQUIRES: install_lock. */
static void remember(const struct sigaction *now)
{
    uint32_t count = atomic_load(&predecessors), at = 0;
    while (at < count && !same_handler(&predecessor[at], now))
        at++;
    if (at == PREDECESSORS_MAX)
        at--;
    for (; at + 1 < count; at++)
        predecessor[at] = predecessor[at + 1];
    predecessor[at] = *now;
    if (at == count)
        atomic_store(&predecessors, count + 1);
}

void pms_handler_install(void)
{
    struct sigaction now, ours;
    if (sigaction(SIGSEGV, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) &&
        now.sa_sigaction == on_fault)
        return;
    pthread_mutex_lock(&install_lock);
    sigaction(SIGSEGV, NULL, &now);
    if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_fault) {
        remember(&now);
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_fault;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigfillset(&ours.sa_mask);
        sigaction(SIGSEGV, &ours, NULL);
    }
    pthread_mutex_unlock(&install_lock);
}

bool pms_handler_register(struct pms_watched *w)
{
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        struct pms_watched *none = NULL;
        if (atomic_compare_exchange_strong(&store[i], &none, w)) {
            pms_handler_install();
            return true;
        }
    }
    return false;
}

void pms_handler_unregister(struct pms_watched *w)
{
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        struct pms_watched *mine = w;
        if (!atomic_compare_exchange_strong(&store[i], &mine, NULL))
            continue;
        while (atomic_load(&inside[i]) != 0)
            sched_yield();
    }
}

static struct pms_watched *forking[PMS_MAX_STORES]; /* one fork at a time: process.c */

void pms_handler_before_fork(void (*fn)(struct pms_watched *w))
{
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        atomic_fetch_add(&inside[i], 1);
        forking[i] = atomic_load(&store[i]);
        if (forking[i])
            fn(forking[i]);
        else
            atomic_fetch_sub(&inside[i], 1);
    }
}

void pms_handler_after_fork(void (*fn)(struct pms_watched *w))
{
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        if (!forking[i])
            continue;
        fn(forking[i]);
        atomic_fetch_sub(&inside[i], 1);
    }
}

void pms_handler_after_fork_in_child(void (*fn)(struct pms_watched *w, bool prepared))
{
    pthread_mutex_init(&install_lock, NULL); /* another thread may have held it */
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        struct pms_watched *w = atomic_load(&store[i]);
        atomic_store(&inside[i], 0); /* threads that were inside did not come with us */
        if (w)
            fn(w, w == forking[i]);
    }
}
