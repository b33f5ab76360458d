#include "crash/debug.h"

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "seam/persist.h"
#include "crash/power.h"

#define MAX_BOARD (1u << 22)

struct pms_debug_board *pms_debug_board;

static _Atomic uint64_t seen, kill_at;
static pid_t owner;
static bool power;
static const struct pms_pool *watched; /* the first store opened: never followed */
static dev_t device;
static ino_t inode;

static int count_and_kill(enum pms_primitive primitive, uintptr_t addr, size_t bytes)
{
    if (getpid() != owner) /* a fork child */
        return 0;
    uint64_t n = atomic_fetch_add(&seen, 1) + 1;
    if (pms_debug_board)
        atomic_store(&pms_debug_board->primitives, n);
    bool last = n == atomic_load(&kill_at);
    if (power && last) {
        pms_power_fail();
        atomic_store(&pms_debug_board->power, 1);
    } else if (power) {
        pms_power_note(primitive, addr, bytes);
    }
    if (last) {
        if (pms_debug_board)
            atomic_store(&pms_debug_board->killed, 1);
        kill(owner, SIGKILL);
    }
    return 0;
}

void pms_debug_kill_at(uint64_t n)
{
    owner = getpid();
    atomic_store(&seen, 0);
    atomic_store(&kill_at, n);
    pms_persist_hook = count_and_kill;
}

uint64_t pms_debug_primitives(void) { return atomic_load(&seen); }

/* ---- for programs that are run by `pmstore crashtest` ---- */

/* secure_getenv: not in a program that runs with rights of its own (setuid). */
static uint64_t board_pages(int fd) /* 0: it is no board */
{
    const char *token = secure_getenv("PMSTORE_CRASH_TOKEN");
    struct pms_debug_board found;
    struct stat st;
    bool is = token && strlen(token) == sizeof found.token && fstat(fd, &st) == 0 &&
              S_ISREG(st.st_mode) && st.st_size > 0 && st.st_size <= (off_t)MAX_BOARD &&
              st.st_size % (off_t)sizeof found == 0 && st.st_uid == geteuid() &&
              pread(fd, &found, sizeof found, 0) == (ssize_t)sizeof found &&
              memcmp(found.magic, PMS_DEBUG_MAGIC, sizeof found.magic) == 0 &&
              memcmp(found.token, token, sizeof found.token) == 0;
    return is ? (uint64_t)st.st_size / sizeof found : 0;
}

static struct pms_debug_board *own_page(struct pms_debug_board *board, uint64_t pages)
{
    for (uint64_t i = 1; i < pages; i++) {
        uint64_t nobody = 0;
        if (atomic_compare_exchange_strong(&board[i].owner, &nobody, (uint64_t)getpid()))
            return &board[i];
    }
    return pages == 1 ? board : NULL;
}

static uint64_t ordered(struct pms_debug_board *board, const char *path)
{
    if (strncmp(board->path, path, sizeof board->path) != 0)
        return 0;
    return atomic_exchange(&board->kill_at, 0); /* by one process alone */
}

static struct pms_debug_board *map_board(const char *path, uint64_t *pages)
{
    int fd = open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    *pages = board_pages(fd);
    void *board = *pages ? mmap(NULL, *pages * sizeof *pms_debug_board, PROT_READ | PROT_WRITE,
                                MAP_SHARED, fd, 0)
                         : MAP_FAILED;
    close(fd);
    return board == MAP_FAILED ? NULL : board;
}

void pms_debug_opened(const char *path)
{
    static atomic_flag once = ATOMIC_FLAG_INIT;
    const char *board = secure_getenv("PMSTORE_CRASH_BOARD"), *at = getenv("PMSTORE_CRASH_AT");
    if (!board || atomic_flag_test_and_set(&once))
        return;
    uint64_t pages, order = at ? strtoull(at, NULL, 10) : 0;
    struct pms_debug_board *shared = map_board(board, &pages);
    pms_debug_board = shared ? own_page(shared, pages) : NULL;
    if (!pms_debug_board)
        return;
    snprintf(pms_debug_board->path, sizeof pms_debug_board->path, "%s", path);
    pms_debug_kill_at(pages > 1 ? ordered(shared, path) : order);
}

void pms_debug_file(const struct pms_pool *pool, int fd)
{
    const char *seed = getenv("PMSTORE_CRASH_POWER");
    struct stat st;
    if (fstat(fd, &st) != 0)
        return;
    if (!watched) {
        power = seed && pms_power_start(fd, strtoull(seed, NULL, 10));
        device = st.st_dev;
        inode = st.st_ino;
    }
    if (device == st.st_dev && inode == st.st_ino) /* also when it is opened again */
        watched = pool;
}

void pms_debug_acknowledge(const struct pms_pool *pool, uint64_t commits, int domain)
{
    if (pool != watched)
        return;
    atomic_store(&pms_debug_board->domain, (uint64_t)domain);
    atomic_store(&pms_debug_board->acknowledged, commits);
}

void pms_debug_agreed(const struct pms_pool *pool, uint64_t commits)
{
    if (pool == watched)
        atomic_store(&pms_debug_board->agreed, commits);
}
