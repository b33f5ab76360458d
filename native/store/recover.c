
#include "store/recover.h"
#include "log/held.h"
#include "seam/footer.h"
#include "store/session.h"

#include <errno.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif
#ifndef MAP_SYNC
#define MAP_SYNC 0x080000
#endif

/* Nobody commits that often: at a million a second it takes four years. Beyond it the id's 48
 * bits would run out one day. */
#define TX_PLAUSIBLE (1ull << 47)

static bool on_memory_file_system(int fd)
{
    struct statfs fs;
    return fstatfs(fd, &fs) == 0 && (fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC);
}

static bool maps_sync(int fd)
{
    void *p = mmap(NULL, PMS_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
    if (p == MAP_FAILED)
        return false;
    munmap(p, PMS_PAGE);
    return true;
}

enum pms_domain pms_domain_choose(int fd, enum pms_domain asked, enum pms_domain made_with)
{
    if (asked != PMS_DOMAIN_AUTO)
        return asked;
    if (made_with != PMS_DOMAIN_AUTO)
        return made_with;
    if (maps_sync(fd))
        return PMS_DOMAIN_DAX;
    return on_memory_file_system(fd) ? PMS_DOMAIN_PROCESS : PMS_DOMAIN_FILE;
}

/* ---- the undo log ---- */

struct difference {
    const struct pms_map *map;
    uint64_t seen, entries, bytes;
};

/* Entries captured ahead of a transaction that then wrote nothing are valid too: they do not
 * count as something undone. */
static int count_difference(void *ctx, const struct pms_entry *entry, const void *image)
{
    struct difference *d = ctx;
    d->seen++;
    bool inside = entry->target < d->map->bytes && entry->len <= d->map->bytes - entry->target;
    if (inside && memcmp(d->map->engine + entry->target, image, entry->len) != 0) {
        d->entries++;
        d->bytes += entry->len;
    }
    return 0;
}

static int read_anchor(const struct pms_map *map, uint64_t *tx, struct pms_error *error)
{
    uint64_t word;
    memcpy(&word, map->engine + PMS_OFF_ANCHOR, sizeof word);
    if (pms_anchor_unpack(word, tx) && *tx < TX_PLAUSIBLE)
        return PMS_OK;
    if (error)
        error->offset = PMS_OFF_ANCHOR;
    return pms_fail(error, PMS_E_CORRUPT, "the anchor's check bits are wrong");
}

/* Undoes the unfinished transaction in the mapping given. */
static int undo_in(struct pms_pool *pool, struct pms_map *map, uint64_t *entries,
                   struct pms_error *error)
{
    struct pms_undo undo;
    int status = read_anchor(map, &pool->tx.last, error);
    if (status == PMS_OK)
        status = pms_undo_open(&undo, map, false, error);
    if (status != PMS_OK)
        return status;
    pms_undo_set_extents(&undo, &pool->super);
    pms_undo_begin(&undo, pool->tx.last + 1);
    struct pms_held held;
    pool->hold = (struct pms_holding){.before = true};
    if (pms_held_find(&undo, pool->tx.last, &held)) {
        pool->hold.tag = held.tag;
        pool->hold.held = held.held;
        pool->hold.in_doubt = held.held == PMS_HELD_FOR_JOB;
    }
    bool held_sound = !pool->hold.tag || pms_undo_sound(&undo, held.tag, &pool->super);
    struct difference d = {.map = map};
    pms_undo_scan(&undo, pool->tx.last + 1, count_difference, &d);
    status = pms_session_check_copy(pool, pool->tx.last + 1,
                                    d.seen < PMS_FOOTER_ALL ? d.seen : PMS_FOOTER_ALL - 1, error);
    int64_t n = status == PMS_OK && held_sound
                    ? pms_undo_apply(&undo, pool->tx.last + 1, map->engine, &pool->super, NULL)
                    : 0;
    if (status == PMS_OK && n >= 0 && held_sound && pool->opened.before && pool->hold.tag)
        n = pms_undo_apply(&undo, pool->hold.tag, map->engine, &pool->super, NULL) < 0 ? -1 : n;
    pms_undo_close(&undo);
    if (status != PMS_OK)
        return status;
    if (n < 0 || !held_sound)
        return pms_fail(error, PMS_E_CORRUPT, "an undo log entry belongs to no place in the store");
    pool->opened.info.undone_entries = d.entries;
    pool->opened.info.undone_bytes = d.bytes;
    *entries = (uint64_t)n;
    return PMS_OK;
}

/* Before and after the anchor gives the log up. The mapping here is not MAP_SYNC: on fsdax a
 * page that was never written before is there for good only after a sync. */
static int settle(struct pms_pool *pool, struct pms_error *error)
{
    /* pre-images home before the anchor; the anchor before the log is written again */
    pms_persist_fence(&pool->persist);
    return pool->opened.info.undone_entries
               ? pms_persist_sync(&pool->persist, pool->opened.fd, "syncing what was undone", error)
               : PMS_OK;
}

static int undo_mapped(struct pms_pool *pool, struct pms_map *map, struct pms_error *error)
{
    uint64_t entries = 0, *anchor = pms_map_at(map, PMS_OFF_ANCHOR);
    int status = undo_in(pool, map, &entries, error);
    /* The session of a held log goes on: what was appended in vain must not count one day. */
    if (status != PMS_OK || (entries == 0 && !pool->hold.tag))
        return status;
    status = settle(pool, error);
    if (status != PMS_OK)
        return status;
    /* By two: a commit cut off before its F3 may have left entries captured ahead, under the tag
     * after the one undone here. No transaction may ever run under that tag: they would follow
     * its own first entries as if they were its. And the held version keeps its half of the log. */
    pool->tx.last += 2;
    pms_persist_store8(&pool->persist, anchor, pms_anchor_pack(pool->tx.last));
    pms_persist_flush(&pool->persist, anchor, sizeof *anchor);
    return settle(pool, error);
}

static int undo_file(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_map map;
    int status = pms_map_open(&map, pool->opened.fd, pool->super.file_bytes, 0, PMS_MAP_SHARED,
                              &pool->persist, error);
    if (status != PMS_OK)
        return status;
    /* With the write-back of the domain that crashed: the one asked for now may have none. */
    enum pms_flush after = pool->persist.flush;
    if (after == PMS_FLUSH_NONE)
        pool->persist.flush = pms_domain_flush((enum pms_domain)pool->session.domain);
    status = undo_mapped(pool, &map, error);
    pool->persist.flush = after;
    pms_map_close(&map);
    return status;
}

/* ---- both ---- */

static bool in_place(enum pms_domain d) { return d != PMS_DOMAIN_FILE; }

/* The log that was not in force learns the last transaction. Not in force until the session
 * record says so. It lies where the other one does: a reader beside us may be reading that, so the
 * record is written as it is, and is another one then (live/sight.h). */
static int hand_over(struct pms_pool *pool, struct pms_error *error)
{
    struct pms_persist *p = &pool->persist;
    int status = pms_session_write(pool->opened.fd, p, &pool->session, error);
    if (status != PMS_OK)
        return status;
    if (!in_place(pool->opened.domain))
        return pms_journal_format(pool->opened.fd, p, &pool->super, pool->tx.last, error);
    uint64_t word = pms_anchor_pack(pool->tx.last);
    errno = pms_persist_pwrite(p, pool->opened.fd, &word, sizeof word, PMS_OFF_ANCHOR);
    if (errno)
        return pms_fail_errno(error, "writing the anchor");
    /* the anchor, before the session record puts it in force */
    return pms_persist_sync(p, pool->opened.fd, "syncing the anchor", error);
}

/* A copy's home may be of a later moment than its journal. */
static bool home_may_be_before(const void *ctx, uint64_t tx)
{
    const struct pms_pool *pool = ctx;
    return pool->super.features_incompat & PMS_FEATURE_HOLD &&
           pms_session_is_before(pool, tx - 1, PMS_FOOTER_ALL);
}

static int replay(struct pms_pool *pool, unsigned char *into, struct pms_error *error)
{
    struct pms_journal_recovery r = {0};
    struct pms_journal_asked asked = {.into = into,
                                      .before = pool->opened.before,
                                      .closed = pool->session.state == PMS_SESSION_CLEAN,
                                      .may_hold = home_may_be_before,
                                      .ctx = pool};
    int status = pms_journal_recover(pool->opened.fd, &pool->persist, &pool->super, &asked, &r,
                                     error);
    pool->tx.last = r.tx;
    pool->hold = (struct pms_holding){.tag = r.held ? r.tx : 0,
                                      .held = r.held,
                                      .before = true,
                                      .in_doubt = r.held == PMS_HELD_FOR_JOB};
    pool->opened.info.replayed_records = r.records;
    pool->opened.info.replayed_bytes = r.bytes;
    pool->opened.info.torn = r.torn;
    struct pms_error torn; /* if that is why it is damaged */
    if (status == PMS_E_CORRUPT &&
        pms_session_check_copy(pool, r.tx, PMS_FOOTER_ALL, &torn) != PMS_OK) {
        if (error)
            *error = torn;
        return PMS_E_COPIED;
    }
    if (status == PMS_OK && r.tx >= TX_PLAUSIBLE)
        status = pms_fail(error, PMS_E_CORRUPT, "the journal's transaction id is out of range");
    return status == PMS_OK ? pms_session_check_copy(pool, r.tx, PMS_FOOTER_ALL, error) : status;
}

int pms_recover_file(struct pms_pool *pool, struct pms_error *error)
{
    bool was_in_place = in_place((enum pms_domain)pool->session.domain);
    int status = was_in_place ? undo_file(pool, error) : replay(pool, NULL, error);
    if (status == PMS_OK && pool->hold.tag && was_in_place != in_place(pool->opened.domain))
        status = pms_fail(error, PMS_E_STATE,
                          "the version before the last commit is held in another domain: open it "
                          "in that one, or run pmstore resolve");
    if (status != PMS_OK || was_in_place == in_place(pool->opened.domain))
        return status;
    /* data, before the other log takes over */
    status = pms_persist_sync(&pool->persist, pool->opened.fd, "syncing the store", error);
    return status != PMS_OK ? status : hand_over(pool, error);
}

int pms_recover_view(struct pms_pool *pool, struct pms_error *error)
{
    uint64_t entries;
    int status = in_place((enum pms_domain)pool->session.domain)
                     ? undo_in(pool, &pool->map, &entries, error)
                     : replay(pool, pool->map.user, error);
    if (status == PMS_OK && pool->opened.before && !pool->hold.tag)
        return pms_fail(error, PMS_E_STATE, "no version before the last commit is held");
    return status;
}
