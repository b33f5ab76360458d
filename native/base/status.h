/* Status codes and error details of the engine.
 *
 * Every fallible function returns enum pms_status and fills the struct pms_error it is given, with
 * the same status; what is in it after PMS_OK means nothing. The binding checks that they agree.
 * The Python layer turns a status into an exception in one place (pmstore/_engine/failures.py). */
#ifndef PMS_BASE_STATUS_H
#define PMS_BASE_STATUS_H

#include <stdbool.h>
#include <stdint.h>

enum pms_status {
    PMS_OK = 0,
    PMS_E_OS = 1,      /* a system call failed: sys_errno */
    PMS_E_LOCKED = 2,  /* another open holds the store's lock */
    PMS_E_FULL = 3,    /* no room for the data or for its log: needed, available */
    PMS_E_CORRUPT = 4, /* the file breaks a rule of docs/FORMAT.md: offset */
    /* magic is right, version or feature bits are not ours: found in needed */
    PMS_E_VERSION = 5,
    PMS_E_NOT_A_STORE = 6, /* no magic: some other file, or an empty one */
    /* the machine restarted, or may have, under a store that only survives its process */
    PMS_E_UNCLEAN = 7,
    /* the call is not allowed now (commit in a block, no block to leave, ...) */
    PMS_E_STATE = 8,
    PMS_E_BUSY = 9,      /* another thread's block is open: holder = its thread id */
    PMS_E_FORKED = 10,   /* the store belongs to the parent process */
    PMS_E_READONLY = 11, /* opened for reading, or made read-only by a failed sync */
    PMS_E_CLOSED = 12,
    PMS_E_EXISTS = 13,
    PMS_E_NOT_FOUND = 14,
    PMS_E_INVALID = 15,     /* an argument is out of range */
    PMS_E_UNSUPPORTED = 16, /* the domain asked for is not to be had here */
    PMS_E_INDOUBT = 18,     /* the last commit may not be one of all ranks: see commit/hold.h */
    PMS_E_COPIED = 17,      /* a copy of a store that was open, or that nobody closed */
    PMS_E_LOST = 19, /* what a reader sees beside a writer can not be had any more: live/sight.h */
};

struct pms_error {
    int32_t status;     /* enum pms_status */
    int32_t sys_errno;  /* of the failing system call, or 0 */
    uint64_t offset;    /* where in the file, where that says something */
    uint64_t needed;    /* bytes */
    uint64_t available; /* bytes */
    int64_t holder;     /* thread id */
    char what[160];     /* what was being done, or which rule is broken; ASCII, NUL-terminated */
};

/* Fills *error (which may be NULL) and returns status. what is a printf format without user
 * data. */
int pms_fail(struct pms_error *error, enum pms_status status, const char *what, ...)
    __attribute__((format(printf, 3, 4)));

/* As pms_fail with PMS_E_OS and the current errno (ENOSPC, EDQUOT and EFBIG become PMS_E_FULL). */
int pms_fail_errno(struct pms_error *error, const char *what);

/* it sees one file at a time: told that these never return PMS_OK */
#if defined(__clang_analyzer__)
#define pms_fail(error, status, ...) ((void)pms_fail(error, status, __VA_ARGS__), (int)(status))
#define pms_fail_errno(error, what) ((void)pms_fail_errno(error, what), (int)PMS_E_OS)
#endif

/* The one assertion family: on in every build, because a store that goes on after a broken
 * invariant destroys data. Prints the invariant to stderr and aborts; recovery then finds the
 * last commit. */
#define PMS_ASSERT(cond)                                  \
    do {                                                  \
        if (__builtin_expect(!(cond), 0))                 \
            pms_assert_failed(#cond, __FILE__, __LINE__); \
    } while (0)
_Noreturn void pms_assert_failed(const char *cond, const char *file, int line);

#endif
