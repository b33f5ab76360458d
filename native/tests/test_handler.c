/* Faults of nobody's pages: one that has got a place meanwhile is tried again, a real one goes
 * to the handler that was there before. */
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commit/capture.h"
#include "commit/handler.h"
#include "test.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static struct sigaction engine;
static unsigned char *page;
static bool closes; /* the store that the page belonged to, before the engine's handler begins */

static void late(int sig, siginfo_t *info, void *context)
{
    if (closes)
        mprotect(page, PMS_PAGE, PROT_READ | PROT_WRITE);
    engine.sa_sigaction(sig, info, context);
}

#define PASSED_ON 3

static void before(int sig) /* faulthandler's would end the process */
{
    (void)sig;
    _exit(PASSED_ON);
}

static int store_in_child(bool closing)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        struct sigaction ours = {.sa_sigaction = late, .sa_flags = SA_SIGINFO};
        signal(SIGSEGV, before);
        closes = closing;
        page = mmap(NULL, PMS_PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        pms_handler_install();
        sigaction(SIGSEGV, NULL, &engine);
        sigaction(SIGSEGV, &ours, NULL);
        *(volatile unsigned char *)page = 7;
        _exit(page[0] == 7 ? 0 : 1);
    }
    waitpid(pid, &status, 0);
    return status;
}

static void a_page_that_was_given_away_is_written(void)
{
    void *any = mmap(NULL, PMS_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (madvise(any, PMS_PAGE, MADV_POPULATE_WRITE) != 0)
        return; /* before Linux 5.14 */
    CHECK(store_in_child(true) == 0);
}

static void a_real_fault_is_passed_on(void)
{
    int status = store_in_child(false);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == PASSED_ON);
}

/* ---- a handler that calls who was there before it, which is ours ---- */

static struct sigaction reporters_own; /* whom it calls */
static int reported;

static void reporter(int sig, siginfo_t *info, void *context)
{
    if (++reported > 2)
        _exit(4); /* we call each other */
    reporters_own.sa_sigaction(sig, info, context);
}

static int fault_past_a_reporter(int installs)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        struct sigaction theirs = {.sa_sigaction = reporter, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        signal(SIGSEGV, before);
        page = mmap(NULL, PMS_PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(page, PMS_PAGE, PROT_NONE);
        pms_handler_install();
        sigaction(SIGSEGV, &theirs, &reporters_own);
        for (int i = 0; i < installs; i++) {
            pms_handler_install(); /* as a block does, later */
            if (i + 1 < installs)
                sigaction(SIGSEGV, &theirs, &reporters_own);
        }
        *(volatile unsigned char *)page;
        _exit(5);
    }
    waitpid(pid, &status, 0);
    return status;
}

static void a_reporter_that_calls_us_back_ends_below(void)
{
    for (int installs = 0; installs < 4; installs++) {
        int status = fault_past_a_reporter(installs);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == PASSED_ON);
    }
}

int main(void)
{
    TEST(a_page_that_was_given_away_is_written);
    TEST(a_real_fault_is_passed_on);
    TEST(a_reporter_that_calls_us_back_ends_below);
    return test_summary();
}
