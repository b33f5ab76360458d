/* Aligned memory, and bytes in an order that is the same in every run. */
#ifndef PMS_TESTS_RANDOM_BYTES_H
#define PMS_TESTS_RANDOM_BYTES_H

#define _GNU_SOURCE /* memfd_create */
#include "test.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/checksum.h"
#include "base/lock.h"
#include "seam/persist.h"
#include "base/status.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 10u
#else
#define SLOWER 1u
#endif

#define LINE 64u
#define MIB (1u << 20)

static uint64_t random_state = 88172645463325252ull;

static inline uint64_t random64(void) /* xorshift64*: the same sequence in every run */
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return random_state * 2685821657736338717ull;
}

static inline size_t random_below(size_t n) { return (size_t)(random64() % n); }

static inline unsigned char *aligned(size_t bytes)
{
    unsigned char *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!p)
        abort();
    return p;
}

static inline unsigned char *random_bytes(size_t bytes)
{
    unsigned char *p = aligned(bytes);
    for (size_t i = 0; i < bytes; i++)
        p[i] = (unsigned char)(random64() >> 56);
    return p;
}

#define LOCKERS 4

#endif
