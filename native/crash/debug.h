/* For crash tests: dying at a chosen primitive of the seam, and what a power failure there would
 * leave.
 *
 * The environment asks for it in programs that `pmstore crashtest` runs. Nothing of it is heard
 * without a board:
 *   PMSTORE_CRASH_BOARD   a file of one page (struct pms_debug_board) that the process keeps up
 *                         to date while it lives. Whoever starts the process makes it, with the
 *                         magic and a token drawn for it; any other file is left alone
 *   PMSTORE_CRASH_TOKEN   that token
 *   PMSTORE_CRASH_AT      SIGKILL at the nth primitive after the first store is opened
 *   PMSTORE_CRASH_POWER   a seed: just before that, the first store's file loses what is not
 *                         durable (power.c)
 *
 * A board of more pages is a job's: each process takes a page of its own, from the second on, when
 * it opens its first store. The first page is an order to kill, which whoever started the job may
 * write at any time: that one process which next opens the store of that path dies at that
 * primitive. */
#ifndef PMS_CRASH_DEBUG_H
#define PMS_CRASH_DEBUG_H

#include <stdatomic.h>
#include <stdint.h>

#define PMS_DEBUG_MAGIC "PMSBOARD"

struct pms_debug_board {
    char magic[8];
    char token[32];              /* hexadecimal */
    _Atomic uint64_t primitives; /* seen */
    /* number of commits of the first store when its last commit returned */
    _Atomic uint64_t acknowledged;
    _Atomic uint64_t domain;  /* of that store */
    _Atomic uint64_t power;   /* 1: the process died with a simulated power failure */
    _Atomic uint64_t owner;   /* process id, of a page of a job's board; 0: nobody's yet */
    _Atomic uint64_t kill_at; /* of its first page: the order; 0: none, or it was taken */
    _Atomic uint64_t killed;  /* 1: the process killed itself, as it was told to */
    /* number of commits of the first store when all ranks of its job were last known to have the
     * newest of them */
    _Atomic uint64_t agreed;
    char path[3992]; /* of that store, as the program named it; absolute if it was */
};
_Static_assert(sizeof(struct pms_debug_board) == 4096, "one page");

extern struct pms_debug_board *pms_debug_board; /* NULL but in crash tests */

/* SIGKILL this process at the nth persistence primitive from now (0: never). */
void pms_debug_kill_at(uint64_t n);
uint64_t pms_debug_primitives(void); /* seen since the last pms_debug_kill_at */

/* A store is about to be opened: what the environment asks for begins with the first one. The
 * board is read before anything is written to it: a regular file of this user and of one page,
 * no symbolic link, with the magic and the token. */
void pms_debug_opened(const char *path);

/* The rest only if pms_debug_board. The file of a store that is being opened: the first one
 * is watched. */
struct pms_pool;
void pms_debug_file(const struct pms_pool *pool, int fd);

/* A commit returns. */
void pms_debug_acknowledge(const struct pms_pool *pool, uint64_t commits, int domain);

/* Its job has it. */
void pms_debug_agreed(const struct pms_pool *pool, uint64_t commits);

#endif
