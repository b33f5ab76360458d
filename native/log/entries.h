/* The entries of the undo log: a range's pre-image each, appended before the range is stored to.
 *
 * I1 an entry is valid iff its tag is anchor.tx + 1, its seq is next and its checksum holds; the
 * log is the longest valid prefix, where an extent's end may come early (the next entry is then
 * the first of the next extent).
 * I2 no target is stored to, or made writable, before its entry and every lower seq are durable. */
#ifndef PMS_LOG_ENTRIES_H
#define PMS_LOG_ENTRIES_H

#include "log/undo.h"

/* Appends pre-images of [off, off+len), split where an extent ends; large ones by all cores. Not
 * fenced. Copied, then checksummed: checksum and pre-image agree whatever the copy holds. A torn
 * entry would hide every later one (I1, I2).
 * REQUIRES: the log lock. Async-signal-safe. */
void pms_undo_append(struct pms_undo *u, uint64_t off, uint64_t len);

/* As above, with the pre-images that the file has at home: the pages have been written since.
 * Returns errno; *done: so many bytes were appended. */
int pms_undo_append_home(struct pms_undo *u, uint64_t off, uint64_t len, uint64_t *done);

/* Between the two, pre-images of what is appended are not copied yet: gathered copies all of
 * them, by all cores. Worth it from PMS_UNDO_PARALLEL bytes on. REQUIRES: the log lock, held
 * from one to the other; no fence and no store to a target between them (I2). */
#define PMS_UNDO_PARALLEL (4u << 20)
void pms_undo_gather(struct pms_undo *u);
void pms_undo_gathered(struct pms_undo *u);
void pms_undo_after_fork_in_child(void);

void pms_undo_fence_locked(struct pms_undo *u);
void pms_undo_fenced(struct pms_undo *u); /* the caller has executed the fence */

/* Pages that stay writable while a transaction is committed (hot ranges) may be stored to
 * meanwhile. So their pre-images for the next transaction are copied before anything of this one
 * is made durable, and the copy is the truth: it is what this transaction commits, and whatever
 * differs from it afterwards is the next one's.
 *
 * copy_ahead appends such an entry at the beginning of the next transaction's log; not fenced.
 * Returns where the image lies. take_ahead, once that transaction has begun, makes the entry one
 * of its own: first of all, in the order of the copies. Or they are dropped, where the commit
 * failed: else what that transaction appends one day could end just before one of them, and they
 * would follow as if they were its own. (Recovery never uses a tag again that may have copies.)
 * REQUIRES: the log lock from the first copy until all are taken or dropped.
 * CRASH: an entry of the next tag: it counts from the moment when the anchor does (I1). */
struct pms_ahead {
    uint64_t at;
    uint32_t seq;
}; /* where the next copy goes; {0} at first */
uint64_t pms_undo_copy_ahead(struct pms_undo *u, struct pms_ahead *next, uint64_t off,
                             uint64_t len);
void pms_undo_take_ahead(struct pms_undo *u, uint64_t off, uint64_t len);
void pms_undo_drop_ahead(struct pms_undo *u, uint64_t image, uint64_t len); /* image: as returned */

/* How many entries the running transaction has. */
static inline uint32_t pms_undo_entries(const struct pms_undo *u) { return u->log.seq; }

/* A pre-image, by where it lies from the log's base. */
static inline const unsigned char *pms_undo_image(const struct pms_undo *u, uint64_t pos)
{
    return u->log.base + pos;
}

/* Walks the valid prefix of the log of transaction tag (I1), oldest first; fn gets each entry
 * and its pre-image. Stops with fn's non-zero result. Reads only. */
int pms_undo_scan(const struct pms_undo *u, uint64_t tag,
                  int (*fn)(void *ctx, const struct pms_entry *entry, const void *image),
                  void *ctx);

/* Puts the valid prefix of transaction tag back, newest first, into dst_base + target (written
 * back, not fenced). Returns the number of entries, or -1 if an entry's target is no place for
 * one (then nothing was stored). */
int64_t pms_undo_apply(struct pms_undo *u, uint64_t tag, unsigned char *dst_base,
                       const struct pms_superblock *super, uint64_t *bytes);

/* in the log, header included */
uint64_t pms_undo_entry_bytes(uint64_t len);

/* Whether what apply would put back belongs where it says, and could be captured in one
 * transaction, as it was. */
bool pms_undo_sound(const struct pms_undo *u, uint64_t tag, const struct pms_superblock *super);

/* Whether the user's pages are what the running transaction's entries say: only those that were
 * captured as whole pages, each of which has one entry; the engine's own granules nobody else
 * stores to. REQUIRES: the log lock; they are protected. */
bool pms_undo_is_applied(const struct pms_undo *u);

#endif
