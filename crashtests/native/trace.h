/* The recorder: what one process did to a store, as the medium saw it.
 *
 * It hooks the engine's seam (persist.h). The hook comes before each primitive and gives an
 * address and a length; the bytes are found by comparing the file with a shadow of it at the
 * next event. So nothing is missed: a store that went past the seam shows as one made by nobody
 * (TR_USER), like the stores of numpy and torch, which are found in the same way at every fence.
 *
 * A trace lies in shared memory: the process that is recorded is a child, and may die. */
#ifndef CRASH_TRACE_H
#define CRASH_TRACE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <unistd.h>

#include "seam/persist.h"

#define TRACE_SITES 4

extern void __gcov_dump(void) __attribute__((weak)); /* where branches are counted */

/* A child's end. */
static inline _Noreturn void leave(int code)
{
    if (__gcov_dump)
        __gcov_dump();
    _exit(code);
}

enum tr_kind {
    TR_STORE = 1, /* changed bytes [off, off+bytes), through the seam */
    TR_COPY = 2,  /* the same, by non-temporal stores */
    TR_USER = 3,  /* the same, by user code */
    TR_FLUSH = 4, /* write-back of [off, off+bytes) begins */
    TR_FENCE = 5,
    TR_PWRITE = 6, /* [off, off+bytes) written to the file, changed or not */
    TR_SYNC = 7,
    TR_SIZE = 8,  /* the file has `bytes` bytes now */
    TR_BEGIN = 9, /* the commit of state `bytes` begins */
    TR_ACK = 10,  /* state `bytes` is committed: acknowledged */
};

struct tr_event {
    uint16_t kind;
    uint16_t thread;
    uint32_t word; /* 1: part of one aligned 8-byte store, whole or not at all */
    uint64_t off, bytes;
    uint64_t data; /* where the new content lies in trace.data */
    void *site[TRACE_SITES];
};

struct trace {
    uint64_t events, data_bytes;
    uint64_t base_bytes; /* size of the file at the start */
    bool overflow;
    /* into the store; those that the seam did not announce. With the detector only */
    _Atomic uint64_t engine_stores, rogue;
    void *rogue_site; /* of the first */
    struct tr_event *event;
    unsigned char *data;
};

#define TRACE_MAX_FILE (64ull << 20)

struct trace *trace_new(void);                         /* shared with children */
struct trace *trace_at(const char *path, bool create); /* shared through a file, with any process */

/* Which pages of a file are no hole (TRACE_MAX_FILE / PMS_PAGE of them). */
bool trace_find_data(int file, bool *page);

/* In the process to be recorded: from now on everything it does to the file is recorded. The
 * file exists. */
void trace_start(struct trace *t, const char *path, bool in_place);
void trace_mark(enum tr_kind kind, uint64_t number);
void trace_stop(void);
bool trace_running(void);

/* Holds a thread that is not the caller back until the other side wants it: set by workloads in
 * domain file. */
extern bool (*trace_may_run)(void);

/* If set: called before each primitive, by its thread. starter: the one that called trace_start. */
extern void (*trace_before)(bool starter, enum pms_primitive primitive);

/* What lay there is no view of the store any more: the engine puts its own things there next. */
void trace_unmap(uintptr_t addr, uint64_t bytes);

/* The engine is about to store: in a build with the detector (detect.c). */
void trace_store(const void *at, uint64_t bytes, void *site);

#endif
