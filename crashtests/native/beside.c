/* Workloads of what goes on beside transactions: flushes to a tier, mirrors that land, a fork,
 * repair. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "commit/gate.h"
#include "store/grow.h"
#include "base/checksum.h"
#include "commit/landing.h"
#include "trace.h"
#include "workload.h"

/* ---- flushes: the snapshot of a commit goes to a file, page by page, and is a store there that
 * holds just that commit ---- */

static bool to_write(const struct wl_flush *f, uint64_t page)
{
    return f->state[page] == (PMS_CHUNK_LIVE | PMS_CHUNK_CHANGED);
}

void wl_flush_begin(struct wl *w, struct wl_flush *f)
{
    struct pms_transfer transfer = {0};
    f->next = 0;
    f->promised = w->board->state[atomic_load(&w->board->acked)];
    if (w->failed)
        return;
    if (!f->fd) {
        snprintf(f->path, sizeof f->path, "%s-flushed", w->pool->opened.path);
        do
            f->fd = open(f->path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        while (f->fd < 0 && errno == EINTR);
    }
    if (f->fd < 0) {
        f->fd = 0;
        wl_done(w, pms_fail_errno(&w->error, "opening the file to flush to"));
        return;
    }
    /* after that only what has changed is written */
    uint64_t since = f->complete ? f->info.tag : 0;
    f->complete = false;
    wl_done(w, pms_snapshot_begin(w->pool, 0, -1, &f->snapshot, &w->error));
    if (!w->failed)
        wl_done(w, pms_snapshot_info(f->snapshot, &f->info, &w->error));
    f->pages = f->info.file_bytes / PMS_PAGE;
    if (!w->failed)
        wl_done(w,
                pms_snapshot_chunks(f->snapshot, since, PMS_PAGE, f->state, f->pages, &w->error));
    f->left = f->all = 0;
    for (uint64_t i = 0; i < f->pages && !w->failed; i++)
        f->all += to_write(f, i);
    f->left = f->all;
    if (!w->failed)
        wl_done(w, pms_restore_allocate(f->fd, f->info.file_bytes, &transfer, &w->error));
}

void wl_flush_some(struct wl *w, struct wl_flush *f, uint32_t done, uint32_t of)
{
    struct pms_transfer transfer = {0};
    unsigned char page[PMS_PAGE];
    uint64_t read = 0;
    uint32_t crc;
    for (; f->snapshot && !w->failed && f->next < f->pages; f->next++) {
        if (!to_write(f, f->next))
            continue;
        /* of what is to be written, not of the file: most of that is free */
        if (f->left <= f->all - f->all * done / of)
            return;
        f->left--;
        wl_done(w, pms_snapshot_write(f->snapshot, f->fd, PMS_PAGE, &f->next, 1, f->next * PMS_PAGE,
                                      &crc, NULL, NULL, &transfer, &w->error));
        struct iovec into = {page, PMS_PAGE};
        if (!w->failed)
            errno = pms_persist_preadv(NULL, f->fd, &into, 1, f->next * PMS_PAGE, &read);
        if (!w->failed && errno)
            wl_done(w, pms_fail_errno(&w->error, "reading what was flushed"));
        if (!w->failed && (read != PMS_PAGE || pms_crc32c(0, page, PMS_PAGE) != crc))
            wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT,
                                "the checksum is of another page than the one that was flushed"));
    }
}

static void compare(struct wl *w, const struct wl_flush *f)
{
    static struct pms_check_report report;
    struct pms_error e = {0};
    wl_done(w, pms_restore_seal(f->fd, f->info.super, (int)w->pool->opened.domain, &w->error));
    if (w->failed)
        return;
    struct pms_pool *flushed = wl_open(f->path, PMS_DOMAIN_AUTO, PMS_MODE_READ, &w->error);
    if (!flushed) {
        wl_done(w, w->error.status);
        return;
    }
    bool whole = wl_digest(flushed) == f->promised && pms_check(flushed, &report, &e) == PMS_OK &&
                 report.problem_count == 0;
    pms_pool_release(flushed);
    if (!whole)
        wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT,
                            "what was flushed is not the commit that it was begun at"));
}

void wl_flush_end(struct wl *w, struct wl_flush *f)
{
    wl_flush_some(w, f, 1, 1);
    if (f->snapshot)
        pms_snapshot_end(w->pool, f->snapshot);
    f->complete = f->snapshot && !w->failed;
    f->snapshot = NULL;
    if (f->complete && w->keep_states)
        compare(w, f);
}

void wl_flush_close(struct wl *w, struct wl_flush *f)
{
    wl_flush_end(w, f);
    if (f->fd > 0) {
        (void)close(f->fd);
        unlink(f->path);
    }
    f->fd = 0;
}

/* transactions of all kinds under a flush; then of what has changed since, and a roll back under
 * that */
void wl_flush(struct wl *w)
{
    struct wl_flush f = {0};
    wl_array(w, 0, "beside", 40, 1);
    wl_array(w, 0, "spare", 3000, 1);
    wl_array(w, 0, "extent", 30000, 1);
    wl_commit(w);
    wl_flush_begin(w, &f);
    for (uint32_t step = 0; step < 3; step++) {
        char name[2] = {(char)('p' + step), 0};
        /* what these were at first is free at the next commit, used again, and flushed yet */
        wl_array(w, 0, "beside", 40, 100 + step);
        wl_array(w, 0, "spare", 3000, 100 + step);
        wl_array(w, 0, "extent", 30000, 100 + step);
        memset(wl_data(w, "medium", NULL) + 100 * step, (int)step + 1, 3000);
        wl_array(w, 0, "fresh", 3000, step);
        wl_array(w, 0, name, 40, step); /* born in a page with others */
        wl_commit(w);
        wl_flush_some(w, &f, step + 1, 4);
    }
    wl_flush_end(w, &f);
    for (uint32_t round = 0; round < 2; round++) {
        wl_flush_begin(w, &f);
        wl_array(w, 0, round ? "x" : "y", 30, round); /* all that changes in its page */
        wl_write(w, "large", 5000, round);
        wl_flush_some(w, &f, 1, 2);
        if (round)
            wl_commit(w);
        else
            wl_rollback(w);
        wl_flush_end(w, &f);
    }
    wl_array(w, 0, "z", 30, 7);
    wl_commit(w);
    wl_flush_begin(w, &f);
    wl_flush_close(w, &f);
}

/* flips under a flush: what it reads is kept before a step writes there */
void wl_slots_flush(struct wl *w)
{
    struct wl_flush f = {0};
    wl_make_pair(w, "pair", PAIR_WORDS);
    wl_commit(w);
    for (uint32_t round = 0; round < 2; round++) {
        wl_flush_begin(w, &f);
        for (uint32_t step = 0; step < 3; step++) {
            wl_fill_next(w, "pair", PAIR_WORDS, round * 100 + step);
            wl_flush_some(w, &f, step + 1, 4);
            wl_flip(w, "pair");
            if (step == 1)
                wl_rollback(w);
            wl_commit(w);
        }
        wl_flush_end(w, &f);
    }
    wl_flush_begin(w, &f);
    wl_fill_next(w, "pair", PAIR_WORDS, 300);
    wl_flip(w, "pair");
    wl_commit(w);
    wl_flip(w, "pair"); /* back to the version that is being flushed, and a step in place */
    memset(wl_current(w, "pair"), 7, 4 * PAIR_WORDS);
    wl_flush_some(w, &f, 1, 2);
    wl_commit(w);
    wl_flush_close(w, &f);
}

/* growth under a flush and between a step of slots and its flip */
void wl_grow_beside(struct wl *w)
{
    struct wl_flush f = {0};
    wl_make_pair(w, "pair", PAIR_WORDS);
    wl_commit(w);
    wl_flush_begin(w, &f);
    wl_fill_next(w, "pair", PAIR_WORDS, 5);
    wl_array(w, 0, "huge", 120000, 9);
    wl_flush_some(w, &f, 1, 2);
    wl_flip(w, "pair");
    wl_data(w, "huge", NULL)[99999] = 1;
    wl_commit(w);
    wl_flush_end(w, &f);
    wl_data(w, "huge", NULL)[5] = 6;
    wl_commit(w);
    wl_flush_begin(w, &f);
    wl_remove(w, 0, "huge");
    wl_fill_next(w, "pair", PAIR_WORDS, 6);
    wl_flip(w, "pair");
    wl_commit(w);
    wl_flush_close(w, &f);
}

/* growth between two flushes: of the new part there is its page table, as it was formatted */
void wl_grow_between(struct wl *w)
{
    struct wl_flush f = {0};
    wl_flush_begin(w, &f);
    wl_flush_end(w, &f);
    if (!w->failed)
        wl_done(w, pms_pool_grow(w->pool, 1 << 20, &w->error));
    wl_array(w, 0, "late", 10, 7); /* in the old part */
    wl_commit(w);
    wl_flush_begin(w, &f);
    wl_flush_close(w, &f);
}

/* ---- mirrors ---- */

enum how { ARMED, STARTED, ROLLED_BACK, FAILED };

static int started(struct wl *w, void *landing)
{
    int status = pms_landing_start(w->pool, landing, PMS_LANDING_NEW, &w->error);
    if (status != PMS_OK)
        return status;
    pms_landing_wait(landing, PMS_LANDING_DONE, -1);
    return pms_landing_result(landing, &w->error);
}

static void land(struct wl *w, const char *const *name, const uint32_t *words, uint32_t count,
                 uint32_t value, enum how how)
{
    static uint32_t device[2][PAIR_WORDS]; /* the mirrored tensors */
    static char meta[2][8];
    struct pms_land_copy copy[2];
    struct pms_land_flip to[2];
    for (uint32_t i = 0; i < count; i++) {
        struct pms_slot_pair pair = {0};
        if (!w->failed)
            wl_done(
                w, pms_slot_find(w->pool, 0, name[i], (uint32_t)strlen(name[i]), &pair, &w->error));
        for (uint32_t k = 0; k < words[i]; k++)
            device[i][k] = value * (i + 1) + k;
        memcpy(meta[i], "\x81\xa5slots", 7);
        meta[i][7] = (char)!pair.current;
        copy[i] = (struct pms_land_copy){
            .data = pair.data[!pair.current], .bytes = 4ull * words[i], .src = device[i]};
        to[i] = (struct pms_land_flip){.data = copy[i].data,
                                       .name = name[i],
                                       .meta = meta[i],
                                       .name_bytes = (uint32_t)strlen(name[i]),
                                       .meta_bytes = 8};
    }
    if (w->failed)
        return;
    struct pms_landing *l = pms_landing_new(copy, count, to, count, -1, &w->error);
    wl_done(w, l ? PMS_OK : w->error.status);
    if (l && how == STARTED) {
        wl_commit_by(w, started, l);
    } else if (l) {
        wl_done(w, pms_landing_arm(w->pool, l, &w->error));
        if (how == FAILED) {
            struct pms_error e;
            pms_landing_fail(l);
            if (!w->failed && pms_commit(w->pool, &e) != PMS_E_STATE)
                wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT,
                                    "a commit with a landing that failed succeeded"));
        }
        if (how == ROLLED_BACK)
            wl_rollback(w);
        wl_commit(w);
    }
    if (l)
        pms_landing_free(l);
    for (uint32_t i = 0; i < count && !w->failed; i++) {
        bool same = memcmp(wl_current(w, name[i]), device[i], 4ull * words[i]) == 0;
        if (same != (how == ARMED || how == STARTED))
            wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT,
                                "a commit did not bring a mirror along, or a failed one did"));
    }
}

/* in one commit with captured writes; one that fails, and one that is rolled back, between */
void wl_mirrors(struct wl *w)
{
    static const char *const name[] = {"large pair", "small pair"};
    static const uint32_t words[] = {PAIR_WORDS, 20};
    wl_make_pair(w, name[0], words[0]);
    wl_make_pair(w, name[1], words[1]);
    wl_commit(w);
    for (uint32_t step = 0; step < 6; step++) {
        wl_data(w, "keep", NULL)[step] = step + 50;
        /* and stores into what was born: written back by this thread, though another one commits */
        if (step % 2) {
            wl_array(w, 0, "born", 200 + 50 * step, step);
            uint64_t group = wl_group(w, 0, (const char[2]){(char)('0' + step), 0});
            for (uint32_t i = 0; i < 4; i++)
                wl_value(w, group, "value", "0123456789" + i, 6);
        }
        enum how how = step == 2                                  ? ROLLED_BACK
                       : step == 4                                ? FAILED
                       : step % 2 && w->pool && !w->pool->journal ? STARTED
                                                                  : ARMED;
        /* in domain file the recorder takes a second thread for the journal's */
        land(w, name, words, 2, step * 1000, how);
    }
}

/* ---- a fork ---- */

static int child_of(struct wl *w, void (*run)(struct wl *w))
{
    int status = -1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        run(w);
        leave(0);
    }
    waitpid(child, &status, 0);
    return status;
}

static void reads(struct wl *w)
{
    struct pms_error e;
    struct pms_object o;
    const uint32_t *keep = w->fork_data;
    bool refused = pms_commit(w->pool, &e) == PMS_E_FORKED &&
                   pms_object_find(w->pool, 0, "keep", 4, &o, &e) == PMS_E_FORKED;
    if (!refused || keep[1] != 1)
        leave(1);
    pms_pool_release(w->pool);
}

static void writes(struct wl *w)
{
    signal(SIGSEGV, SIG_DFL); /* nobody's handler lets it pass */
    w->fork_data[2] = 0xbad;
}

/* in a transaction: a child that reads, and one that dies of writing; nothing of either reaches
 * the store */
void wl_fork(struct wl *w)
{
    w->fork_data = wl_data(w, "keep", NULL);
    w->fork_data[1] = 1;
    w->fork_data[2] = 2;
    wl_value(w, 0, "value", "uncommitted", 11);
    if (w->failed)
        return;
    int read_status = child_of(w, reads), write_status = child_of(w, writes);
    if (read_status != 0 || !WIFSIGNALED(write_status))
        wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT,
                            "a child could not read (%x), or could write (%x)",
                            (unsigned)read_status, (unsigned)write_status));
    if (w->fork_data[2] != 2)
        wl_done(w, pms_fail(&w->error, PMS_E_CORRUPT, "what a child wrote is in the store"));
    wl_commit(w);
    (void)child_of(w, writes);
    wl_rollback(w);
    wl_data(w, "keep", NULL)[3] = 3;
    wl_commit(w);
}

/* ---- repair ---- */

/* a block that belongs to nobody is found and freed; the superblock is written anew */
void wl_repair(struct wl *w)
{
    static struct pms_check_report report;
    uint64_t off[2];
    for (int i = 0; i < 2 && !w->failed; i++) {
        wl_done(w, pms_pool_enter_write(w->pool, &w->error));
        if (w->failed)
            return;
        wl_done(w, pms_pool_allocate(w->pool, i ? 100 : 40000, PMS_OWNER_USER, &off[i], &w->error));
        pms_pool_leave(w->pool);
    }
    wl_commit(w);
    if (!w->failed)
        wl_done(w, pms_free_leaks(w->pool, &report, &w->error));
    wl_commit(w);
    if (!w->failed)
        wl_done(w, pms_mend_superblock(w->pool, &w->error));
    wl_array(w, 0, "after", 9000, 3); /* where they were */
    wl_commit(w);
}
