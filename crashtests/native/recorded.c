/* In the engine that Python loads for crash tests: its process records itself. The crash program
 * maps the same file. */
#include <stdio.h>
#include <stdlib.h>

#include "objects/pms.h"
#include "trace.h"

#define SEEN_OUTSIDE __attribute__((visibility("default")))

void pms_trace_begin(const char *into, const char *store, int domain);
void pms_trace_mark(int kind, uint64_t number);
void pms_trace_end(void);

SEEN_OUTSIDE void pms_trace_begin(const char *into, const char *store, int domain)
{
    trace_start(trace_at(into, true), store, domain != PMS_DOMAIN_FILE);
}

SEEN_OUTSIDE void pms_trace_mark(int kind, uint64_t number)
{
    trace_mark((enum tr_kind)kind, number);
}
SEEN_OUTSIDE void pms_trace_end(void) { trace_stop(); }
