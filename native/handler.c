#include "handler.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "capture.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static _Atomic(struct pms_capture *) store[PMS_MAX_STORES];
static _Atomic uint32_t inside[PMS_MAX_STORES]; /* handlers that look at store[i] now */
static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous; /* written under install_lock before our handler is in place */
static _Atomic int chained_thread; /* whose real fault we last passed on */

static void say(const char *text)
{
    ssize_t ignored = write(STDERR_FILENO, text, strlen(text));
    (void)ignored;
}

static int thread_id(void) { return (int)syscall(SYS_gettid); }

/* A fault that a store does not accept kills the process in the end: say why first. */
static void explain(const struct pms_capture *c)
{
    if (atomic_load(&c->forked))
        say("pmstore: write to an array of a store that the parent process opened: a forked child may only read it\n");
    else if (c->read_only)
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
    return (uintptr_t)info->si_addr != uc->uc_mcontext.pc; /* an instruction fetch is none; a read counts as one */
#else
    (void)context;
    return true;
#endif
}

/* A thread may be kept waiting between its fault and this handler, until the store that the page belonged to has closed and made it private: its
 * store has a place now, and no handler to ask. (Linux 5.14; before, such a fault is passed on.) */
static bool has_become_writable(const siginfo_t *info, const void *context)
{
    uintptr_t page = (uintptr_t)info->si_addr & ~(uintptr_t)(PMS_PAGE - 1);
    return is_write(info, context) && syscall(SYS_madvise, page, (size_t)PMS_PAGE, MADV_POPULATE_WRITE) == 0;
}

/* true: the store may be tried again. */
static bool offer(struct pms_capture *c, const siginfo_t *info, const void *context)
{
    const unsigned char *addr = info->si_addr;
    if (addr < c->map->user || addr >= c->map->user + c->map->reserve || !is_write(info, context))
        return false;
    if (!atomic_load(&c->forked) && !c->read_only && pms_capture_fault(c, pms_map_offset(c->map, addr)))
        return true;
    explain(c);
    return false;
}

static void die_by(int sig)
{
    struct sigaction dfl;
    memset(&dfl, 0, sizeof dfl);
    dfl.sa_handler = SIG_DFL;
    sigaction(sig, &dfl, NULL); /* the instruction is tried again, and ends the process as if we had not been here */
}

static void chain(int sig, siginfo_t *info, void *context)
{
    bool sent = info->si_code <= 0; /* by raise or kill, not by the CPU */
    if (sent && atomic_load(&chained_thread) == thread_id()) {
        die_by(sig); /* a handler like faulthandler's reported the fault and now raises it to end the process */
        raise(sig);
        return;
    }
    if (!sent)
        atomic_store(&chained_thread, thread_id());
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(sig, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(sig);
    } else {
        die_by(sig);
        if (sent)
            raise(sig);
    }
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
    int saved = errno;
    bool handled = false;
    for (uint32_t i = 0; i < PMS_MAX_STORES && !handled && info->si_code > 0; i++) {
        if (!atomic_load_explicit(&store[i], memory_order_relaxed))
            continue;
        atomic_fetch_add(&inside[i], 1);
        struct pms_capture *c = atomic_load(&store[i]);
        handled = c && offer(c, info, context);
        atomic_fetch_sub(&inside[i], 1);
    }
    if (!handled && !has_become_writable(info, context))
        chain(sig, info, context);
    else if (atomic_load_explicit(&chained_thread, memory_order_relaxed))
        atomic_store(&chained_thread, 0); /* what we passed on earlier was survived */
    errno = saved;
}

void pms_handler_install(void)
{
    struct sigaction now, ours;
    if (sigaction(SIGSEGV, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault)
        return;
    pthread_mutex_lock(&install_lock);
    sigaction(SIGSEGV, NULL, &now);
    if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_fault) {
        previous = now;
        memset(&ours, 0, sizeof ours);
        ours.sa_sigaction = on_fault;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigfillset(&ours.sa_mask);
        sigaction(SIGSEGV, &ours, NULL);
    }
    pthread_mutex_unlock(&install_lock);
}

bool pms_handler_register(struct pms_capture *c)
{
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        struct pms_capture *none = NULL;
        if (atomic_compare_exchange_strong(&store[i], &none, c)) {
            pms_handler_install();
            return true;
        }
    }
    return false;
}

void pms_handler_unregister(struct pms_capture *c)
{
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        struct pms_capture *mine = c;
        if (!atomic_compare_exchange_strong(&store[i], &mine, NULL))
            continue;
        while (atomic_load(&inside[i]) != 0)
            sched_yield();
    }
}

void pms_handler_after_fork_in_child(void (*fn)(struct pms_capture *c))
{
    pthread_mutex_init(&install_lock, NULL); /* another thread may have held it */
    for (uint32_t i = 0; i < PMS_MAX_STORES; i++) {
        struct pms_capture *c = atomic_load(&store[i]);
        atomic_store(&inside[i], 0); /* threads that were inside did not come with us */
        if (c)
            fn(c);
    }
}
