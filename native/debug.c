/* Crash tests: die at a chosen primitive of the seam. */
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "persist.h"
#include "pool.h"

static _Atomic uint64_t seen, kill_at;

static int count_and_kill(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    (void)primitive, (void)addr, (void)bytes;
    uint64_t n = atomic_fetch_add(&seen, 1) + 1;
    if (n == atomic_load(&kill_at))
        kill(getpid(), SIGKILL);
    return 0;
}

void pms_debug_kill_at(uint64_t n)
{
    atomic_store(&seen, 0);
    atomic_store(&kill_at, n);
    pms_persist_hook = count_and_kill;
}

uint64_t pms_debug_primitives(void) { return atomic_load(&seen); }
