
#include "store/populate.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/thread.h"
#include "commit/pool_state.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* Linux 5.14; an error before */
#endif

#define LEAST_BYTES (4ull << 20) /* less is touched in no time */
#define STEP_BYTES (1ull << 20)  /* page faults of other threads may wait for one step */
#define AHEAD_BYTES (8ull << 20)
#define SMALL_BYTES (512ull << 10)
/* of one request: the system cuts it to what the disk reads ahead, and does not say so */
#define ASK_BYTES (128ull << 10)
#define MEMORY_SHARE 2 /* of the machine's free memory at most one part in so many */
#define BACKGROUND_NICE 10
#define RETRY_NS 1000000l

static bool stopped(struct pms_pool *pool)
{
    return atomic_load_explicit(&pool->populate.stop, memory_order_relaxed);
}

/* Takes the operation lock, unless it is time to stop: who holds it may be waiting for this
 * thread. */
static bool enter(struct pms_pool *pool)
{
    while (!stopped(pool)) {
        if (pthread_mutex_trylock(&pool->gate.lock) == 0)
            return true;
        nanosleep(&(struct timespec){0, RETRY_NS}, NULL);
    }
    return false;
}

static bool is_engines(const struct pms_block *extent)
{
    return extent->kind == PMS_KIND_META_LARGE || extent->kind == PMS_KIND_META_SLAB;
}

/* Brings an extent into memory, and maps it. Not data that may be written in a private view:
 * they are copied then, which is dearer where the file's pages were mapped before (map.c). The
 * disk is asked for a little more than what is waited for, and no more: what the program reads
 * itself meanwhile, an attach for one, waits behind that. false: the system does not know how,
 * or the file ends early. */
static bool populate(struct pms_pool *pool, const struct pms_block *extent)
{
    unsigned char *view = (is_engines(extent) ? pool->map.engine : pool->map.user) + extent->off;
    bool map = is_engines(extent) || pool->map.shared || pool->opened.read_only;
    for (uint64_t done = 0, asked = 0; done < extent->bytes && !stopped(pool); done += STEP_BYTES) {
        uint64_t n = extent->bytes - done < STEP_BYTES ? extent->bytes - done : STEP_BYTES;
        uint64_t ahead = is_engines(extent) || extent->bytes - done < STEP_BYTES + AHEAD_BYTES
                             ? extent->bytes
                             : done + STEP_BYTES + AHEAD_BYTES;
        /* not where it is mapped alone: nothing is read around yet */
        for (; asked < ahead && !stopped(pool); asked += ASK_BYTES)
            (void)madvise(view + asked, ahead - asked < ASK_BYTES ? ahead - asked : ASK_BYTES,
                          MADV_WILLNEED);
        uint64_t from = map ? done : done + n - PMS_PAGE;
        if (madvise(view + from, done + n - from, MADV_POPULATE_READ) != 0)
            return false;
        atomic_fetch_add_explicit(&pool->populate.bytes, n, memory_order_relaxed);
    }
    return true;
}

/* The engine's own first: names are looked up right after an open, and should not wait for
 * megabytes of data; nor should what lies in small blocks, which an attach reads here and there. */
enum { ENGINES, SMALL, LARGE, TURNS };

static int turn_of(const struct pms_block *extent)
{
    return is_engines(extent) ? ENGINES : extent->bytes < SMALL_BYTES ? SMALL : LARGE;
}

static void populate_all(struct pms_pool *pool, int turn)
{
    struct pms_block extent = {0};
    for (bool more = true; more && enter(pool);) {
        more = pms_heap_next_used(pool->heap, (extent.off + extent.bytes) / PMS_PAGE, &extent);
        pthread_mutex_unlock(&pool->gate.lock);
        if (more && turn_of(&extent) == turn)
            more = populate(pool, &extent);
    }
}

static void *run(void *arg)
{
    struct pms_pool *pool = arg;
    pthread_setname_np(pthread_self(), "pms-populate");
    setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), BACKGROUND_NICE);
    for (int turn = 0; turn < TURNS; turn++) {
        if (turn == LARGE && enter(pool)) {
            pms_map_read_around(&pool->map, true);
            pthread_mutex_unlock(&pool->gate.lock);
        }
        populate_all(pool, turn);
    }
    atomic_store(&pool->populate.done, true);
    return NULL;
}

void pms_populate_start(struct pms_pool *pool)
{
    struct pms_heap_stats h;
    long free_pages = sysconf(_SC_AVPHYS_PAGES);
    pms_heap_stats(pool->heap, &h);
    if (h.used_bytes < LEAST_BYTES || free_pages <= 0 ||
        h.used_bytes / PMS_PAGE > (uint64_t)free_pages / MEMORY_SHARE)
        return;
    pool->populate.running = pms_thread_start(&pool->populate.thread, (struct pms_thread_kind){0},
                                              run, pool) == 0;
}

void pms_populate_stop(struct pms_pool *pool)
{
    if (!pool->populate.running)
        return;
    atomic_store(&pool->populate.stop, true);
    pthread_join(pool->populate.thread, NULL);
    pool->populate.running = false;
}
