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
 *                         durable (power.c) */
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
    _Atomic uint64_t domain; /* of that store */
    _Atomic uint64_t power;  /* 1: the process died with a simulated power failure */
    char path[4024];         /* of that store, as the program named it; absolute if it was */
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

/* The next two only if pms_debug_board. The file of a store that is being opened: the first one
 * is watched. */
struct pms_pool;
void pms_debug_file(const struct pms_pool *pool, int fd);

/* A commit returns. */
void pms_debug_acknowledge(const struct pms_pool *pool, uint64_t commits, int domain);

#endif
