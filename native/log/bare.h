/* Bare captures, domain file: the pre-image of a page that was never writable in this session is
 * what the file has at home, and the log need not have a copy. The dirty list says which pages
 * these are (PMS_DIRTY_BARE); the log has no entries of them.
 *
 * I9 while a page is bare its home has the bytes of the last commit: nothing is written home of a
 * live page before a commit of it is durable, and with that commit it is bare no more.
 *
 * Nobody's capture is bare while a snapshot is open, which reads pre-images from the log, nor in a
 * store that holds versions, whose log outlives its commit. Nor are hot ranges, nor what the engine
 * captures: they lie in pages that were written before. A page that was written in this session is
 * home only when the journal's thread has written it, and a roll back may neither wait for that nor
 * fail: so it is copied.
 *
 * Who needs pre-images, and what each does about bare pages:
 *
 *   roll back        drops the pages from memory: they are the file's again, and their next
 *                    capture is bare too. Nothing is read, so it cannot fail. A disk that later
 *                    fails to give the page back ends its reader with SIGBUS
 *   second capture   finds them prepared. After the commit they are the process's own, and copied
 *   snapshot         one that is opened in the transaction first has them filled (below). A read
 *                    that fails refuses the snapshot
 *   pms_written      reads them from home to compare. A read that fails is an error
 *   commit, journal  write pages, not pre-images
 *   fork child       is given a copy before home changes (journal/readers.h). What the parent
 *                    drops is the parent's alone
 *   recovery         meets none: a log in memory dies with its process */
#ifndef PMS_LOG_BARE_H
#define PMS_LOG_BARE_H

#include "log/undo.h"

/* The first part of whole pages that are to be captured: so many bytes are captured alike, bare or
 * not. REQUIRES: the log lock. */
uint64_t pms_bare_part(const struct pms_undo *u, uint64_t off, uint64_t len, bool *bare);

/* Captures a part that is bare: nothing is copied. REQUIRES: the log lock, still protected. */
void pms_bare_capture(struct pms_undo *u, uint64_t off, uint64_t len);

/* Rolls all of them back: the pages are the file's again, as if they had never been captured.
 * REQUIRES: the log lock; all of them are protected. */
void pms_bare_give_back(struct pms_undo *u);

/* Makes ordinary captures of some of them, a millisecond's worth: the log gets their pre-images,
 * read from home. Not fenced. *more: others are bare still. Returns errno; those that are bare then
 * can be rolled back as ever. The list of what is pending stays as it is: nothing was stored.
 * REQUIRES: the log lock. */
int pms_bare_fill(struct pms_undo *u, bool *more);

/* Calls fn with the pre-images that the log lacks of those in [from, to), piece by piece, as they
 * are read from home. Returns fn's first non-zero answer, which is to be positive, or -errno.
 * REQUIRES: the log lock. */
int pms_bare_scan(const struct pms_undo *u, uint64_t from, uint64_t to,
                  int (*fn)(void *ctx, uint64_t target, uint64_t len, const unsigned char *image),
                  void *ctx);

#endif
