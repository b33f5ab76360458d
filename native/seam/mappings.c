#include "seam/mappings.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/process.h"

#define USUAL_LIMIT 65530
#define REACH_FIRST (64ull << 10) /* doubled as often as: */
#define REACH_DOUBLED 6
/* times the stores that a process may have open: still less than the last quarter */
#define SHARE_LEAST 192

static _Atomic int64_t used;
static _Atomic int64_t limit = USUAL_LIMIT;
static _Atomic bool set_by_test;

void pms_mappings_read_limit(void)
{
    char text[32];
    if (atomic_load(&set_by_test))
        return;
    (void)pms_process_read("/proc/sys/vm/max_map_count", text, sizeof text);
    int64_t found = strtoll(text, NULL, 10);
    atomic_store(&limit, found > 0 ? found : USUAL_LIMIT);
}

void pms_mappings_set_limit(uint64_t to)
{
    atomic_store(&set_by_test, to != 0);
    atomic_store(&limit, (int64_t)to);
    pms_mappings_read_limit();
}

void pms_mappings_add(int64_t count)
{
    if (count)
        atomic_fetch_add_explicit(&used, count, memory_order_relaxed);
}

int64_t pms_mappings_used(void) { return atomic_load_explicit(&used, memory_order_relaxed); }

uint64_t pms_mappings_reach(void)
{
    int64_t most = atomic_load_explicit(&limit, memory_order_relaxed),
            over = pms_mappings_used() - most / 2;
    if (over < 0)
        return 0;
    int64_t doubled = over * REACH_DOUBLED / (most / 4 + 1);
    return REACH_FIRST << (doubled < REACH_DOUBLED ? doubled : REACH_DOUBLED);
}

bool pms_mappings_spent(int64_t own)
{
    return own >= SHARE_LEAST &&
           pms_mappings_used() >= atomic_load_explicit(&limit, memory_order_relaxed) / 4 * 3;
}
