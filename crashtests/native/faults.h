/* System calls of the engine that fail: each of them is wrapped by the linker (--wrap), so the
 * engine is the real one. */
#ifndef CRASH_FAULTS_H
#define CRASH_FAULTS_H

#include "workload.h"

enum fault_call {
    FAULT_NONE = 0,
    FAULT_PWRITEV,
    FAULT_FDATASYNC,
    FAULT_FALLOCATE,
    FAULT_FTRUNCATE,
    FAULT_MPROTECT,
    FAULT_MMAP,
};

struct fault_result {
    enum fault_call call; /* that failed; FAULT_NONE: there are fewer calls than n */
    /* digest of the state whose commit gave an error, where that may be durable nevertheless */
    uint32_t in_flight;
    char broken[120]; /* a rule that the failed operation broke */
};

const char *faults_name(enum fault_call call);

/* Runs the workload with its nth wrapped call failing (ENOSPC, EIO or ENOMEM, as fits); before
 * that, every third write is short. After an error that leaves the store usable, a transaction
 * has to work in the same process. */
void faults_run(const struct workload *w, const char *path, int domain, struct board *board,
                uint64_t n, struct fault_result *result);

#endif
