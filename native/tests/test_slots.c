/* Slots at the level of the engine: two blocks, and a byte beside a group's name that says which
 * is current. Kills at every primitive, snapshots of the version that is being replaced, room
 * that is used again. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "crash/debug.h"
#include "log/idle.h"
#include "one_store.h"
#include "commit/pool_state.h"
#include "commit/pair.h"
#include "objects/pms.h"
#include "slot_pair.h"
#include "log/snapshot.h"
#include "test.h"
#include "flush/chunks.h"

#define STEPS 6

/* slot, captured array and name together; and before it one that is taken back */
static void step(int value)
{
    struct pms_object o;
    struct pair p;
    CHECK(find(&p));
    flip(&p, 0xee, true);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(find(&p));
    flip(&p, value, true);
    CHECK(ok(pms_object_find(pool, 0, "beside", 6, &o, &e)));
    memset(memory(o.data), value, 5000);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(open_next("w")));
    memset(memory(p.slot[!p.current]), 0xdd, BYTES); /* scratch: must never be seen */
}

static bool all(const unsigned char *at, uint64_t n, int value)
{
    for (uint64_t i = 0; i < n; i++)
        if (at[i] != value)
            return false;
    return true;
}

static int state(void) /* the step that the store holds, or -1 if it is no whole one */
{
    static struct pms_check_report r;
    struct pms_object o;
    struct pair p;
    if (!find(&p))
        return 0; /* not made yet */
    int value = memory(p.slot[p.current])[0];
    bool whole = all(memory(p.slot[p.current]), BYTES, value) &&
                 ok(pms_object_find(pool, 0, "beside", 6, &o, &e)) &&
                 all(memory(o.data), 5000, value) && ok(pms_check(pool, &r, &e)) &&
                 r.problem_count == 0;
    return whole ? value : -1;
}

static void kills(void)
{
    _Atomic int *done = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bool killed = true;
    uint64_t points = 0;
    const char *asked = getenv("PMS_CRASH_STEP");
    uint64_t stride = asked ? (uint64_t)atoi(asked) : 3;
    for (uint64_t n = 1; killed; n += stride, points++) {
        int ws;
        if (!open_store(PMS_MODE_TRUNCATE))
            abort();
        make_pair();
        close_store();
        *done = 0;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) {
            test_checks_failed = 0;
            if (!open_store(PMS_MODE_READ_WRITE))
                _exit(9);
            pms_debug_kill_at(n);
            for (int i = 1; i <= STEPS; i++) {
                step(i);
                *done = i;
            }
            _exit(test_checks_failed != 0);
        }
        waitpid(pid, &ws, 0);
        killed = WIFSIGNALED(ws);
        CHECK(killed ? WTERMSIG(ws) == SIGKILL : WEXITSTATUS(ws) == 0);
        for (int again = 0; again < 2; again++) { /* what recovery leaves needs none */
            CHECK(open_store(PMS_MODE_READ_WRITE));
            int found = state();
            CHECK(found == *done || found == *done + 1);
            close_store();
        }
        CHECK(open_store(PMS_MODE_READ_WRITE));
        step(77);
        CHECK(state() == 77);
        close_store();
    }
    printf("  domain %d: killed at %llu primitives\n", domain, (unsigned long long)points - 1);
    munmap((void *)done, 4096);
}

static void snapshots_keep_what_is_replaced(void)
{
    static unsigned char copy[BYTES];
    struct pms_snapshot *s;
    struct pair p;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    make_pair();
    step(1);
    CHECK(find(&p));
    uint64_t pinned = p.slot[p.current];
    CHECK(ok(pms_snapshot_begin(pool, 64u << 20, -1, &s, &e)));
    for (int i = 2; i < 6; i++)
        step(i);
    CHECK(ok(pms_snapshot_take(s, pinned, BYTES, copy, 0, &e)));
    CHECK(all(copy, BYTES, 1));
    pms_snapshot_end(pool, s);
    CHECK(state() == 5);
    close_store();
}

/* A flip back to the version before, without `next`: an open snapshot may need that version, and
 * a step may go in place into it. */
static void a_flip_back_under_a_snapshot(void)
{
    static unsigned char copy[BYTES];
    struct pms_snapshot *s;
    struct pair p;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    make_pair();
    CHECK(find(&p));
    flip(&p, 1, true);
    CHECK(ok(pms_commit(pool, &e)));
    uint64_t pinned = p.slot[p.current];
    CHECK(ok(pms_snapshot_begin(pool, 64u << 20, -1, &s, &e)));
    flip(&p, 2, true);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(pms_slot_flip(pool, 0, "w", 1, NULL, &e)));
    memset(memory(pinned), 3, BYTES); /* in place: the committed version is the other one */
    CHECK(ok(pms_snapshot_take(s, pinned, BYTES, copy, 0, &e)));
    CHECK(all(copy, BYTES, 1));
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(pms_snapshot_take(s, pinned, BYTES, copy, 0, &e)));
    CHECK(all(copy, BYTES, 1) && all(memory(pinned), BYTES, 3));
    pms_snapshot_end(pool, s);
    close_store();
}

static void nothing_is_logged_for_the_idle_slot(void)
{
    struct pms_stats before, after;
    struct pair p;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    make_pair();
    CHECK(find(&p));
    CHECK(ok(pms_pool_stats(pool, &before, &e)));
    for (int i = 1; i < 10; i++) {
        flip(&p, i, true);
        CHECK(ok(pms_commit(pool, &e)));
    }
    CHECK(ok(pms_pool_stats(pool, &after, &e)));
    CHECK(after.captured_bytes - before.captured_bytes < 9 * 1024);
    flip(&p, 0, false); /* back to the version before */
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(all(memory(p.slot[p.current]), BYTES, 8));
    close_store();
}

static void freed_slots_are_ordinary_room(void)
{
    struct pms_pair_block b;
    struct pair p;
    uint64_t data;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    make_pair();
    step(3);
    CHECK(find(&p));
    CHECK(ok(pms_object_remove(pool, 0, "w", 1, &e)));
    CHECK(!pms_idle_is(&pool->undo, p.slot[0]) && !pms_idle_is(&pool->undo, p.slot[1]));
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(pms_object_put_array(pool, 0, "a", 1, "m", 1, 2 * BYTES, PMS_FILL_ZERO, NULL, 0, 0,
                                  &data, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    memset(memory(data), 9, 2 * BYTES);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(all(memory(data), 2 * BYTES, 0));
    CHECK(pms_pair_block(pool, data + 64, &b, &e) == PMS_E_INVALID &&
          pms_slot_flip(pool, 0, "w", 1, NULL, &e) == PMS_E_NOT_FOUND);
    close_store();
}

/* A slot is marked as a whole; what is written into the current one afterwards is captured, and
 * marked, page by page. */
static void captured_pages_leave_the_mark(void)
{
    struct pms_stats before, after;
    struct pair p;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    struct pms_undo *u = &pool->undo;
    make_pair();
    CHECK(find(&p));
    for (int i = 1; i < 4; i++) {
        flip(&p, i, true);
        CHECK(ok(pms_commit(pool, &e)));
    }
    uint64_t flipped = u->tag - 1, slot = p.slot[p.current], page = slot / PMS_PAGE + 16;
    CHECK(pms_undo_page_changed(u, page) == flipped && pms_undo_page_tag(u, page) == flipped);
    CHECK(ok(pms_pool_stats(pool, &before, &e)));
    memory(slot)[16 * PMS_PAGE] = 0x77; /* of the current one: captured, a part of it */
    CHECK(ok(pms_pool_stats(pool, &after, &e)));
    CHECK(after.captured_bytes - before.captured_bytes >= PMS_PAGE &&
          after.captured_bytes - before.captured_bytes < BYTES);
    CHECK(pms_undo_page_changed(u, page) == u->tag && pms_undo_page_prepared(u, page));
    CHECK(pms_undo_page_changed(u, slot / PMS_PAGE) == flipped &&
          !pms_undo_page_prepared(u, slot / PMS_PAGE));
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(all(memory(slot), BYTES, 3));
    memory(slot)[16 * PMS_PAGE] = 0x78;
    CHECK(ok(pms_commit(pool, &e)));
    for (int i = 4; i < 8; i++) { /* and back to one mark for all */
        flip(&p, i, true);
        CHECK(ok(pms_commit(pool, &e)));
    }
    for (int i = 0; i < 2; i++)
        for (uint64_t at = 0; at < BYTES; at += PMS_PAGE)
            CHECK(pms_undo_page_changed(u, (p.slot[i] + at) / PMS_PAGE) ==
                  u->tag - (i == p.current ? 1 : 2));
    CHECK(all(memory(p.slot[p.current]), BYTES, 7) && all(memory(p.slot[!p.current]), BYTES, 6));
    CHECK(ok(open_next("w")));
    CHECK(ok(pms_object_remove(pool, 0, "w", 1, &e)));
    for (int i = 0; i < 2; i++)
        for (uint64_t at = 0; at < BYTES; at += PMS_PAGE)
            CHECK((u->prepared.page[(p.slot[i] + at) / PMS_PAGE] & PMS_MARK_WHOLE) == 0);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(all(memory(p.slot[p.current]), BYTES, 7));
    memory(p.slot[p.current])[5] = 1; /* captured again, as the removal was taken back */
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(all(memory(p.slot[p.current]), BYTES, 7));
    close_store();
}

/* A slot's last huge page is filled up: it changes its protection with the rest, and nobody
 * writes it back. */
static void what_fills_a_huge_page_up_is_not_written_back(void)
{
    const uint64_t bytes = PMS_HUGE + PMS_HUGE / 2 + PMS_PAGE;
    struct pms_stats before, after;
    struct pms_slot_pair pair;
    struct pms_block b;
    uint64_t group, data;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    CHECK(ok(pms_object_group(pool, 0, "big", 3, 1, &group, &e)));
    for (int i = 0; i < 2; i++)
        CHECK(ok(pms_object_put_array(pool, group, i ? "1" : "0", 1, "m", 1, bytes,
                                      PMS_FILL_ZERO | PMS_FILL_OF_SLOT, NULL, 0, 0, &data, &e)));
    CHECK(ok(pms_object_describe_group(pool, 0, "big", 3, "\x81\xa5slots", 8, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(pms_heap_find(pool->heap, data, &b));
    CHECK(b.bytes == (pool->map.shared ? 2 * PMS_HUGE : bytes));
    for (int i = 1; i < 4; i++) {
        CHECK(ok(pms_slot_find(pool, 0, "big", 3, &pair, &e)));
        CHECK(pair.bytes == bytes);
        CHECK(ok(open_next("big")));
        memset(memory(pair.data[!pair.current]), i, bytes);
        CHECK(ok(pms_pool_stats(pool, &before, &e)));
        CHECK(ok(pms_slot_flip(pool, 0, "big", 3, NULL, &e)));
        CHECK(ok(pms_commit(pool, &e)));
        CHECK(ok(pms_pool_stats(pool, &after, &e)));
        CHECK(domain != PMS_DOMAIN_EMULATED || after.lines - before.lines < bytes / PMS_LINE + 64);
        uint64_t written = after.straight_bytes + after.journal_bytes - before.straight_bytes -
                           before.journal_bytes;
        CHECK(domain != PMS_DOMAIN_FILE || (written >= bytes && written < bytes + 16 * PMS_PAGE));
        for (uint64_t at = 0; at < b.bytes; at += PMS_PAGE)
            CHECK(!pms_map_all_writable(&pool->map, pair.data[!pair.current] + at, PMS_PAGE));
        CHECK(all(memory(pair.data[!pair.current]), bytes, i));
    }
    close_store();
    CHECK(open_store(PMS_MODE_READ_WRITE));
    CHECK(ok(pms_slot_find(pool, 0, "big", 3, &pair, &e)));
    CHECK(all(memory(pair.data[pair.current]), bytes, 3));
    close_store();
}

/* ---- marks of two neighbouring slots ---- */

#define EDGE (96u << 10)

struct turned {
    uint64_t data[2];
    int now;
    const char *name; /* a letter */
};

static struct turned neighbour(const char *name)
{
    struct turned t = {.name = name};
    uint64_t group;
    CHECK(ok(pms_object_group(pool, 0, name, 1, 1, &group, &e)));
    for (int k = 0; k < 2; k++)
        CHECK(ok(pms_object_put_array(pool, group, k ? "1" : "0", 1, "m", 1, EDGE, PMS_FILL_ZERO,
                                      NULL, 0, 0, &t.data[k], &e)));
    CHECK(ok(pms_object_describe_group(pool, 0, name, 1, "\x81\xa5slots", 8, &e)));
    return t;
}

static void turn(struct turned *t, int content)
{
    CHECK(ok(open_next(t->name)));
    memset(memory(t->data[!t->now]), content, EDGE);
    CHECK(ok(pms_slot_flip(pool, 0, t->name, 1, NULL, &e)));
    t->now = !t->now;
}

/* A hot range reaches from the last page of one slot into the first of the next: the pages leave
 * the marks of both. */
static void a_hot_range_over_two_slots(void)
{
    static uint8_t changed[1 << 16];
    struct pms_snapshot *s;
    CHECK(open_store(PMS_MODE_TRUNCATE));
    struct turned p = neighbour("p"), q = neighbour("q");
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(p.data[1] + EDGE == q.data[0]);
    turn(&p, 1), turn(&q, 1);
    CHECK(ok(pms_commit(pool, &e)));
    turn(&q, 2);
    CHECK(ok(pms_commit(pool, &e)));
    unsigned char *edge = memory(q.data[0]);
    for (int i = 0; i < 5; i++) { /* in place, declared, as a step does that updates rows of both */
        uint64_t at = (uint64_t)(uintptr_t)edge;
        struct pms_range r[2] = {{at - PMS_PAGE, PMS_PAGE}, {at, PMS_PAGE}};
        CHECK(ok(pms_will_write(pool, r, 2, &e)));
        memset(edge - PMS_PAGE, 10 + i, 2 * PMS_PAGE);
        CHECK(ok(pms_commit(pool, &e)));
    }
    for (int i = 3; i < 5; i++) {
        turn(&p, i), turn(&q, i);
        CHECK(ok(pms_commit(pool, &e)));
    }
    for (int i = 5; i < 7; i++) {
        memset(edge - PMS_PAGE, i, 64);
        CHECK(ok(pms_commit(pool, &e)));
    }
    CHECK(ok(pms_snapshot_begin(pool, 0, -1, &s, &e)));
    uint64_t since = pms_snapshot_tag(s), chunks = pms_snapshot_super(s)->file_bytes / PMS_PAGE;
    pms_snapshot_end(pool, s);
    for (int i = 7; i < 9; i++) {
        turn(&q, i);
        CHECK(ok(pms_commit(pool, &e)));
    }
    CHECK(ok(pms_snapshot_begin(pool, 0, -1, &s, &e)));
    CHECK(chunks <= sizeof changed);
    pms_snapshot_changed(s, since, PMS_PAGE, changed, chunks);
    int missed = 0;
    for (uint64_t i = 0; i < EDGE / PMS_PAGE; i++)
        missed += !changed[q.data[q.now] / PMS_PAGE + i];
    CHECK(missed == 0);
    pms_snapshot_end(pool, s);
    CHECK(ok(open_next("q")));
    struct pms_range all_of_it = {(uint64_t)(uintptr_t)memory(q.data[!q.now]), EDGE};
    /* nothing to capture: found prepared, every page */
    CHECK(ok(pms_will_write(pool, &all_of_it, 1, &e)));
    close_store();
}

/* Until the transaction is over the idle slot holds the last commit. */
static void a_flipped_pair_is_not_opened_again(void)
{
    struct pms_slot_turn when = {UINT64_MAX, 0};
    CHECK(open_store(PMS_MODE_TRUNCATE));
    struct turned p = neighbour("p");
    CHECK(ok(pms_commit(pool, &e)));
    turn(&p, 1);
    CHECK(open_next("p") == PMS_E_STATE);
    CHECK(pms_slot_flip(pool, 0, "p", 1, NULL, &e) == PMS_E_STATE);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(open_next("p")));
    CHECK(ok(pms_slot_flip(pool, 0, "p", 1, &when, &e)));
    CHECK(when.epoch == pms_epoch(pool) && when.rollbacks == pms_rollbacks(pool));
    struct pms_slot_turn again = when;
    CHECK(pms_slot_flip(pool, 0, "p", 1, &again, &e) == PMS_E_STATE);
    CHECK(again.epoch == when.epoch && again.rollbacks == when.rollbacks); /* nothing was done */
    CHECK(open_next("p") == PMS_E_STATE);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(ok(open_next("p")));
    CHECK(memory(p.data[p.now])[0] == 1);
    close_store();
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-slots-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(nothing_is_logged_for_the_idle_slot);
        TEST(captured_pages_leave_the_mark);
        TEST(what_fills_a_huge_page_up_is_not_written_back);
        TEST(freed_slots_are_ordinary_room);
        TEST(a_hot_range_over_two_slots);
        TEST(a_flipped_pair_is_not_opened_again);
        TEST(snapshots_keep_what_is_replaced);
        TEST(a_flip_back_under_a_snapshot);
        TEST(kills);
    }
    unlink(path);
    return test_summary();
}
