/* System calls of the engine that fail: each of them is wrapped by the linker (--wrap), so the
 * engine is the real one. */
#ifndef CRASH_FAULTS_H
#define CRASH_FAULTS_H

#include "workload.h"

enum fault_call {
    FAULT_NONE = 0,
    FAULT_PWRITEV,
    FAULT_PWRITE,
    FAULT_PREADV,
    FAULT_PREAD,
    FAULT_FDATASYNC,
    FAULT_FSYNC,
    FAULT_POSIX_FALLOCATE,
    FAULT_FALLOCATE,
    FAULT_FTRUNCATE,
    FAULT_MPROTECT,
    FAULT_MMAP,
    FAULT_MUNMAP,
    FAULT_MADVISE,
    FAULT_OPEN,
    FAULT_CLOSE,
    FAULT_FSTAT,
    FAULT_FLOCK,
};

struct fault {
    uint64_t nth;     /* call that fails; 0: none does */
    bool lasting;     /* and so do all later ones of its kind, until the error is dealt with */
    bool interrupted; /* each call that can be gives EINTR first, and reads and writes are short */
};

struct fault_result {
    enum fault_call call; /* that failed; FAULT_NONE: there are fewer calls than n */
    int error;            /* with which */
    bool of_store;        /* a sync of the store's file, not in an open */
    bool closing;
    bool in_background; /* on the thread that writes the journal home, which may try again */
    /* digest of the state whose commit gave an error, where that may be durable nevertheless */
    uint32_t in_flight;
    char broken[240]; /* a rule that the failed operation broke */
};

const char *faults_name(enum fault_call call);

/* Runs the workload with that fault. After an error that leaves the store usable, a transaction has
 * to work in the same process. A store whose sync failed is not marked as closed. */
void faults_run(const struct workload *w, const char *path, int domain, struct board *board,
                struct fault fault, struct fault_result *result);

/* Runs the workload, leaves something uncommitted, and does not close the store. */
void faults_leave_open(const struct workload *w, const char *path, int domain, struct board *board);

/* What is done with such a store: it is opened, written and closed. */
extern const struct workload faults_recovery;

#endif
