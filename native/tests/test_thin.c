/* The log's room on the disk (FORMAT.md, I5): none for slots before they are captured, and all of
 * it for everything else. While the disk is full the file must not get a block more: a store into a
 * hole would be a SIGBUS there. */
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "thin_store.h"

/* ---- the stories ---- */

static void slots_take_no_log(void)
{
    open_with(PMS_MODE_TRUNCATE, SIZE, 0);
    uint64_t before = allocated();
    CHECK(!(pool->super.features_incompat & PMS_FEATURE_THIN));
    CHECK(ok(make_slots("w", SLOT)));
    CHECK(ok(pms_commit(pool, &e)) && find());
    CHECK(pool->super.features_incompat & PMS_FEATURE_THIN);
    for (int i = 1; i < 4; i++) {
        step(i);
        CHECK(ok(pms_commit(pool, &e)));
    }
    CHECK(allocated() < before + (domain == PMS_DOMAIN_FILE ? SLOT : 0) + SLACK);
    CHECK(all(slot(pair.current), SLOT, 3) && all(slot(!pair.current), SLOT, 2));
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    CHECK(find() && all(slot(pair.current), SLOT, 3));
    CHECK(allocated() < before + (domain == PMS_DOMAIN_FILE ? SLOT : 0) + SLACK);
    close_store();
}

static void ordinary_blocks_take_theirs_at_once(void)
{
    uint64_t data;
    made();
    uint64_t before = allocated();
    CHECK(ok(put_array("more", 4 * MIB, &data)));
    CHECK(domain == PMS_DOMAIN_FILE || allocated() + SLACK >= before + 4 * MIB);
    CHECK(ok(pms_commit(pool, &e)));
    disk_is_full();
    memset(memory(data), 1, 4 * MIB);
    memset(memory(beside), 1, BESIDE);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(all(memory(data), 4 * MIB, 0) && all(memory(beside), BESIDE, 0));
    memset(memory(data), 2, 4 * MIB);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    close_store();
}

/* In memory it comes on huge pages: asked for like any other room, and there like any other. */
static void much_of_a_log_is_made_at_once(void)
{
    uint64_t data;
    open_with(PMS_MODE_TRUNCATE, 96 * MIB, 0);
    disk_is_full();
    CHECK(put_array("much", 36 * MIB, &data) == PMS_E_FULL);
    CHECK(ok(pms_rollback(pool, &e)));
    disk_has_room();
    uint64_t before = allocated();
    CHECK(ok(put_array("much", 36 * MIB, &data)));
    CHECK(domain == PMS_DOMAIN_FILE || allocated() + SLACK >= before + 36 * MIB);
    CHECK(allocated() <= before + 36 * MIB + SLACK + (domain == PMS_DOMAIN_FILE ? 16 * MIB : 0));
    CHECK(ok(pms_commit(pool, &e)));
    disk_is_full();
    memset(memory(data), 1, 36 * MIB);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(all(memory(data), 36 * MIB, 0));
    memset(memory(data), 2, 36 * MIB);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    CHECK(all(memory(data), 36 * MIB, 2));
    close_store();
}

static void a_slot_written_in_place_takes_its_own(void)
{
    made();
    step(1);
    CHECK(ok(pms_commit(pool, &e)));
    for (int i = 0; i < 3; i++) { /* the same room each time */
        memset(slot(pair.current), 0x55, SLOT);
        CHECK(ok(pms_rollback(pool, &e)) && find());
        CHECK(all(slot(pair.current), SLOT, 1));
        CHECK(pool->undo.charge.of_slots == 0);
    }
    memset(slot(pair.current), 0x56, SLOT);
    CHECK(pool->undo.charge.of_slots >= SLOT);
    uint64_t before = allocated();
    CHECK(ok(pms_commit(pool, &e)));
    step(2);
    CHECK(ok(pms_commit(pool, &e)));
    memset(slot(pair.current), 0x57, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(allocated() <= before + SLACK + (domain == PMS_DOMAIN_FILE ? 16 * MIB : 0));
    CHECK(all(slot(pair.current), SLOT, 0x57));
    close_store();
}

static void declared_writes_are_refused_by_a_full_disk(void)
{
    made();
    step(1);
    CHECK(ok(pms_commit(pool, &e)));
    disk_is_full();
    CHECK(declare(pair.data[pair.current], SLOT) == PMS_E_FULL && e.needed >= SLOT);
    CHECK(!pms_map_all_writable(&pool->map, pair.data[pair.current], PMS_PAGE));
    CHECK(!pms_undo_page_prepared(&pool->undo, pair.data[pair.current] / PMS_PAGE));
    CHECK(pool->undo.charge.of_slots == 0);
    memset(memory(beside), 7, BESIDE); /* all others go on */
    CHECK(ok(declare(beside, BESIDE)));
    step(2);
    CHECK(ok(pms_commit(pool, &e)));
    step(3);
    CHECK(ok(pms_rollback(pool, &e)) && find());
    CHECK(all(slot(pair.current), SLOT, 2) && all(memory(beside), BESIDE, 7));
    disk_has_room();
    CHECK(ok(declare(pair.data[pair.current], SLOT)));
    memset(slot(pair.current), 4, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    close_store();
}

/* What slots were captured takes none of the ordinary blocks' room. */
static void ordinary_stores_never_fail_after_captures(void)
{
    made();
    step(1);
    CHECK(ok(pms_commit(pool, &e)));
    memset(slot(pair.current), 9, SLOT / 2);
    disk_is_full();
    memset(memory(beside), 8, BESIDE);
    CHECK(ok(declare(beside, BESIDE)));
    CHECK(ok(pms_rollback(pool, &e)) && find());
    CHECK(all(slot(pair.current), SLOT, 1) && all(memory(beside), BESIDE, 0));
    CHECK(ok(declare(pair.data[pair.current], SLOT / 2))); /* that room is there for ever */
    memset(slot(pair.current), 9, SLOT / 2);
    memset(memory(beside), 8, BESIDE);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    CHECK(all(slot(pair.current), SLOT / 2, 9) && all(memory(beside), BESIDE, 8));
    close_store();
}

static void current_is_written_while_next_is_open(void)
{
    made();
    step(1);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(open_next("w")));
    memset(slot(!pair.current), 2, SLOT);
    memset(slot(pair.current), 3, SLOT);
    CHECK(pool->undo.charge.of_slots >= SLOT && pool->undo.charge.of_slots < 2 * SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(all(slot(pair.current), SLOT, 3));
    memset(slot(pair.current), 4, SLOT);
    CHECK(ok(pms_slot_flip(pool, 0, "w", 1, NULL, &e)) && find());
    CHECK(ok(pms_rollback(pool, &e)) && find());
    CHECK(all(slot(pair.current), SLOT, 3));
    close_store();
}

/* Whoever says so when they are made has the room from the beginning, whatever is made later. */
static void slots_to_be_written_in_place_have_theirs(void)
{
    uint64_t data;
    open_with(PMS_MODE_TRUNCATE, SIZE, 0);
    CHECK(ok(make_slots_for("w", SLOT, 1)) && ok(pms_commit(pool, &e)) && find());
    CHECK(pair.in_place && !(pool->super.features_incompat & PMS_FEATURE_THIN));
    CHECK(ok(put_array("later", MIB, &data)) && ok(make_slots("thin", MIB)));
    CHECK(ok(pms_commit(pool, &e)));
    disk_is_full();
    for (int i = 1; i < 4; i++) {
        memset(slot(pair.current), i, SLOT);
        memset(memory(data), i, MIB);
        CHECK(ok(pms_commit(pool, &e)));
        step(i + 10);
        memset(slot(!pair.current), i, SLOT); /* the version before: rolled back */
        CHECK(ok(pms_rollback(pool, &e)) && find());
        CHECK(all(slot(pair.current), SLOT, i));
    }
    disk_has_room();
    struct pms_slot_pair thin;
    CHECK(ok(pms_slot_find(pool, 0, "thin", 4, &thin, &e)) && !thin.in_place);
    close_store();
}

/* A view of a pair that is gone. */
static void a_removed_slot_is_captured_too(void)
{
    made();
    step(1);
    CHECK(ok(pms_commit(pool, &e)));
    struct pms_object o;
    CHECK(ok(pms_slot_get(pool, 0, "w", 1, PMS_SLOT_CURRENT, &o, &e))); /* pinned */
    unsigned char *view = slot(pair.current);
    CHECK(ok(pms_object_remove(pool, 0, "w", 1, &e)));
    memset(view, 2, SLOT);
    CHECK(pool->undo.charge.of_slots >= SLOT);
    CHECK(ok(pms_rollback(pool, &e)) && find());
    CHECK(all(slot(pair.current), SLOT, 1));
    CHECK(ok(pms_object_remove(pool, 0, "w", 1, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    uint64_t ordinary = pool->undo.charge.ordinary;
    memset(view, 3, SLOT);
    CHECK(pool->undo.charge.of_slots >= SLOT && pool->undo.charge.ordinary == ordinary);
    CHECK(ok(pms_commit(pool, &e)));
    pms_unpin(pool, pair.data[pair.current]);
    close_store();
}

/* Nor do views of other blocks that are gone need more than these had. */
static void a_removed_block_has_its_log_still(void)
{
    struct pms_object o;
    made();
    CHECK(ok(pms_object_get(pool, 0, "beside", 6, &o, &e))); /* pinned */
    CHECK(ok(pms_object_remove(pool, 0, "beside", 6, &e)));
    CHECK(ok(pms_commit(pool, &e)));
    disk_is_full();
    memset(memory(beside), 2, BESIDE);
    CHECK(pool->undo.charge.of_slots == 0);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    pms_unpin(pool, beside);
    close_store();
}

/* Rolled back, while a view lives: no log is charged for it, as before. */
static void a_slot_that_never_was_takes_no_log(void)
{
    open_with(PMS_MODE_TRUNCATE, SIZE, 0);
    CHECK(ok(make_slots("w", SLOT)) && find());
    struct pms_object o;
    CHECK(ok(pms_slot_get(pool, 0, "w", 1, PMS_SLOT_CURRENT, &o, &e))); /* pinned */
    disk_is_full();
    CHECK(ok(pms_rollback(pool, &e)));
    disk_has_room();
    pms_unpin(pool, o.data);
    struct pms_heap_stats h;
    pms_heap_stats(pool->heap, &h);
    CHECK(h.slot_need == 0);
    close_store();
}

static void an_undeclared_store_ends_with_the_last_commit(void)
{
    made();
    step(1);
    CHECK(ok(pms_commit(pool, &e)));
    close_store();
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, 2);
        open_with(PMS_MODE_READ_WRITE, 0, 0);
        if (!find())
            _exit(9);
        memset(memory(beside), 9, BESIDE);
        disk_is_full();
        memset(slot(pair.current), 9, SLOT);
        _exit(8);
    }
    int ws;
    waitpid(pid, &ws, 0);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    CHECK(WIFSIGNALED(ws) || (WEXITSTATUS(ws) != 8 && WEXITSTATUS(ws) != 9));
#else
    CHECK(WIFSIGNALED(ws) && WTERMSIG(ws) == SIGSEGV);
#endif
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    CHECK(find() && all(slot(pair.current), SLOT, 1) && all(memory(beside), BESIDE, 0));
    close_store();
}

static void new_blocks_are_refused_by_a_full_disk(void)
{
    uint64_t data;
    made();
    int refused = 0;
    disk_is_full();
    for (int i = 0; i < 40 && !refused; i++) { /* steps are backed ahead */
        char name[3] = {'n', (char)('0' + i), 0};
        refused = put_array(name, 500000, &data);
    }
    CHECK(refused == PMS_E_FULL);
    blocks_before += PMS_PAGE; /* of the footer, for a growth that was refused */
    CHECK(ok(pms_commit(pool, &e)));
    memset(memory(beside), 3, BESIDE);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    CHECK(ok(put_array("more", 500000, &data)));
    CHECK(ok(pms_commit(pool, &e)));
    close_store();
}

/* Copied by a program that leaves holes. */
/* As `cp --sparse=always` does it over a file that is there: it stays the same file. */
static void put_back_sparse(void)
{
    static unsigned char page[PMS_PAGE], none[PMS_PAGE];
    char from[300];
    struct stat st;
    snprintf(from, sizeof from, "%s.from", path);
    int file = open(path, O_RDWR), kept = open(from, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(file >= 0 && kept >= 0 && fstat(file, &st) == 0);
    for (int back = 0; back < 2; back++) {
        int in = back ? kept : file, out = back ? file : kept;
        CHECK(ftruncate(out, 0) == 0 && ftruncate(out, st.st_size) == 0);
        for (off_t at = 0; pread(in, page, sizeof page, at) == (ssize_t)sizeof page; at += PMS_PAGE)
            if (memcmp(page, none, sizeof page) != 0)
                CHECK(pwrite(out, page, sizeof page, at) == (ssize_t)sizeof page);
    }
    close(kept);
    close(file);
    unlink(from);
}

static struct pms_object found;

static void stores_find_their_room(void)
{
    uint64_t data;
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    CHECK(find() && ok(put_array("more", BESIDE, &data)) && ok(pms_commit(pool, &e)));
    disk_is_full();
    memset(memory(beside), 5, BESIDE);
    memset(memory(data), 6, BESIDE);
    step(2);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    close_store();
}

static void a_copy_put_back_in_place_is_filled(void)
{
    made();
    close_store();
    uint64_t before = allocated();
    put_back_sparse();
    CHECK(allocated() + MIB < before);
    stores_find_their_room();
}

/* How often an open asks the system for room. */
static int asked_by_open(void)
{
    asked = 0;
    pms_persist_hook = refuse;
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    pms_persist_hook = NULL;
    return asked;
}

/* With more of its log backed than it had when it was opened. */
static void leave_open(void)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        int before = test_checks_failed;
        made();
        CHECK(ok(declare(pair.data[pair.current], SLOT)));
        _exit(test_checks_failed != before);
    }
    int ws;
    CHECK(waitpid(pid, &ws, 0) == pid && WIFEXITED(ws) && WEXITSTATUS(ws) == 0);
}

static void a_store_left_open_says_what_is_backed(void)
{
    leave_open();
    int n = asked_by_open();
    CHECK(!pool->session.born_ns || n == 0);
    CHECK(find() && ok(pms_object_find(pool, 0, "beside", 6, &found, &e)));
    beside = found.data;
    close_store();
    stores_find_their_room();
    leave_open();
    put_back_sparse();
    CHECK(asked_by_open() >= 2);
    CHECK(ok(pms_object_find(pool, 0, "beside", 6, &found, &e)));
    beside = found.data;
    close_store();
    stores_find_their_room();
}

/* One page is, on a file system that has no blocks of its own in a file. */
static void what_is_missing_is_noticed(void)
{
    if (getenv("PMS_TEST_DIR"))
        return;
    made();
    close_store();
    uint64_t before = allocated();
    CHECK(asked_by_open() == 0 || !pool->session.born_ns);
    close_store();
    int file = open(path, O_RDWR);
    CHECK(fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)beside, PMS_PAGE) ==
          0);
    close(file);
    CHECK(allocated() == before - PMS_PAGE);
    CHECK(asked_by_open() >= 2);
    CHECK(allocated() == before);
    close_store();
}

static void a_sparse_copy_is_filled_where_it_has_to_be(void)
{
    char from[300];
    static unsigned char page[PMS_PAGE], none[PMS_PAGE];
    made();
    step(1);
    CHECK(ok(pms_commit(pool, &e)));
    close_store();
    uint64_t before = allocated();
    snprintf(from, sizeof from, "%s.from", path);
    CHECK(rename(path, from) == 0);
    int in = open(from, O_RDONLY), out = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
    struct stat st;
    CHECK(in >= 0 && out >= 0 && fstat(in, &st) == 0 && ftruncate(out, st.st_size) == 0);
    for (off_t at = 0; pread(in, page, sizeof page, at) == (ssize_t)sizeof page; at += PMS_PAGE)
        if (memcmp(page, none, sizeof page) != 0)
            CHECK(pwrite(out, page, sizeof page, at) == (ssize_t)sizeof page);
    close(in);
    close(out);
    unlink(from);
    CHECK(allocated() + MIB < before);
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    CHECK(find());
    disk_is_full();
    memset(memory(beside), 5, BESIDE);
    step(2);
    memset(slot(pair.current), 3, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    CHECK(allocated() <= before + SLACK);
    close_store();
}

static void what_is_known_to_be_backed_is_not_asked_for(void)
{
    made();
    close_store();
    asked = 0;
    pms_persist_hook = refuse;
    CHECK(open_store(PMS_MODE_READ_WRITE));
    pms_persist_hook = NULL;
    /* where the file system tells when a file was made */
    CHECK(!pool->session.born_ns || asked <= (domain == PMS_DOMAIN_FILE));
    close_store();
}

static void growth_backs_the_new_page_table(void)
{
    uint64_t data;
    made();
    CHECK(ok(make_slots("more", 12 * MIB)));
    CHECK(pool->super.segment_count >= 2);
    struct pms_heap_stats h;
    pms_heap_stats(pool->heap, &h);
    CHECK(pool->undo.charge.ordinary >= h.log_need - h.slot_need);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(put_array("third", 2 * MIB, &data)));
    CHECK(ok(pms_commit(pool, &e)));
    disk_is_full();
    memset(memory(data), 1, 2 * MIB);
    memset(memory(beside), 1, BESIDE);
    CHECK(ok(pms_rollback(pool, &e)));
    memset(memory(data), 2, 2 * MIB);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    struct pms_object o;
    struct pms_slot_pair more;
    CHECK(ok(pms_slot_find(pool, 0, "more", 4, &more, &e)));
    memset(memory(more.data[more.current]), 6, 12 * MIB); /* over the logs of both segments */
    memset(slot(pair.current), 6, SLOT);
    memset(memory(beside), 6, BESIDE);
    CHECK(ok(pms_rollback(pool, &e)));
    CHECK(all(memory(more.data[more.current]), 12 * MIB, 0) && find() &&
          all(slot(pair.current), SLOT, 0) && all(memory(beside), BESIDE, 0));
    memset(memory(more.data[more.current]), 7, 12 * MIB);
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(ok(pms_object_find(pool, 0, "third", 5, &o, &e)) && all(memory(o.data), 2 * MIB, 2));
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0, 0);
    CHECK(ok(pms_slot_find(pool, 0, "more", 4, &more, &e)));
    CHECK(all(memory(more.data[more.current]), 12 * MIB, 7));
    close_store();
}

static void a_store_that_holds_has_all_its_log(void)
{
    open_with(PMS_MODE_TRUNCATE, SIZE, 1);
    CHECK(ok(make_slots("w", SLOT)) && find());
    CHECK(ok(pms_commit(pool, &e)));
    CHECK(allocated() >= pool->super.file_bytes);
    disk_is_full();
    memset(slot(pair.current), 1, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    memset(slot(pair.current), 2, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    close_store();
    made();
    CHECK(allocated() < pool->super.file_bytes);
    close_store();
    open_with(PMS_MODE_READ_WRITE, 0, 1); /* made without */
    CHECK(allocated() >= pool->super.file_bytes && find());
    disk_is_full();
    memset(slot(pair.current), 1, SLOT);
    CHECK(ok(pms_commit(pool, &e)));
    disk_has_room();
    close_store();
}

/* The mark without the bit that announces it is damage. */
static void a_mark_is_announced(void)
{
    made();
    struct pms_superblock super = pool->super;
    super.features_incompat &= ~PMS_FEATURE_THIN;
    CHECK(ok(pms_super_write_both(pool->opened.fd, &pool->persist, &super, &e)));
    close_store();
    struct pms_options o = {.mode = PMS_MODE_READ_WRITE, .domain = domain, .hot = 1};
    CHECK(pms_pool_open(path, &o, &pool, &e) == PMS_E_CORRUPT);
    unlink(path);
}

/* Domain file: of two flips in a row the second one may not go straight home before the first one
 * is there, and its images need not have room in the ring. */
static void flips_need_no_ring(void)
{
    open_with(PMS_MODE_TRUNCATE, 120 * MIB, 0);
    CHECK(ok(make_slots("w", 24 * MIB)));
    CHECK(ok(pms_commit(pool, &e)) && find());
    disk_is_full();
    for (int i = 1; i < 4; i++) {
        CHECK(ok(open_next("w")));
        memset(slot(!pair.current), i, 24 * MIB);
        CHECK(ok(pms_slot_flip(pool, 0, "w", 1, NULL, &e)) && find());
        CHECK(ok(pms_commit(pool, &e)));
    }
    disk_has_room();
    CHECK(all(slot(pair.current), 24 * MIB, 3));
    close_store();
}

int main(void)
{
    snprintf(path, sizeof path, "%s/pms-test-thin-%ld",
             getenv("PMS_TEST_DIR") ? getenv("PMS_TEST_DIR") : "/dev/shm", (long)getpid());
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        domain = domains[i];
        TEST(slots_take_no_log);
        TEST(ordinary_blocks_take_theirs_at_once);
        TEST(much_of_a_log_is_made_at_once);
        TEST(a_slot_written_in_place_takes_its_own);
        TEST(declared_writes_are_refused_by_a_full_disk);
        TEST(ordinary_stores_never_fail_after_captures);
        TEST(current_is_written_while_next_is_open);
        TEST(slots_to_be_written_in_place_have_theirs);
        TEST(a_removed_slot_is_captured_too);
        TEST(a_removed_block_has_its_log_still);
        TEST(a_slot_that_never_was_takes_no_log);
        TEST(an_undeclared_store_ends_with_the_last_commit);
        TEST(new_blocks_are_refused_by_a_full_disk);
        TEST(a_sparse_copy_is_filled_where_it_has_to_be);
        TEST(a_copy_put_back_in_place_is_filled);
        TEST(a_store_left_open_says_what_is_backed);
        TEST(what_is_missing_is_noticed);
        TEST(what_is_known_to_be_backed_is_not_asked_for);
        TEST(growth_backs_the_new_page_table);
        TEST(a_store_that_holds_has_all_its_log);
        TEST(a_mark_is_announced);
        TEST(flips_need_no_ring);
    }
    unlink(path);
    return test_summary();
}
