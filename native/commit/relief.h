/* Domain file: pages are given back to the file where memory is short.
 *
 * A page that was stored to is the process's own from then on, and its memory is nobody else's: a
 * store that was written all over takes as much memory as it is large. Once a commit's image of the
 * page is home, and synced, the file has the same bytes: then the page may be the file's again. It
 * is read from there when somebody looks, and its next capture is bare (log/bare.h). That costs
 * more than to keep it. So it happens only while the stores of this process have more such pages
 * than their share of memory (seam/memory.h), to what was committed longest ago, and at one place:
 * behind a commit, under the operation lock and, for some megabytes at a time, the log lock. Not to
 *
 *   what the running transaction has captured, or bore, hot ranges too: memory alone has it
 *   idle slots: they are stored to without capture
 *   what is astray: rolled back without a pre-image, or of a slot that is gone (map.h)
 *   what is not home: the version that is held, what the journal's thread has not got to
 *
 * I10 a page is given back only while home has the bytes that it shows, and no image of it waits.
 *
 * If that is not enough, the journal's thread is told to hurry, and is waited for while the stores
 * have more than their share. The log's memory, of which a large transaction took as much, goes
 * too.
 *
 * Large blocks that the running transaction bore, and slots that it flipped, were dead at the last
 * commit. They go straight home whenever more of them were born than there is memory for, before
 * the commit that makes them count, and are given back at once: what is stored to again is written
 * again by the commit. What a transaction captures stays in memory, and its log. */
#ifndef PMS_COMMIT_RELIEF_H
#define PMS_COMMIT_RELIEF_H

#include "commit/pool_state.h"

/* REQUIRES: the operation lock; a commit has just succeeded. */
void pms_relief_look(struct pms_pool *pool);
static inline void pms_relief_after_commit(struct pms_pool *pool)
{
    if (pool->journal && pms_journal_written(pool->journal) >= pool->relief.look_at)
        pms_relief_look(pool);
}

/* Bytes were born in the running transaction, and are filled. REQUIRES: the operation lock. */
void pms_relief_look_at_born(struct pms_pool *pool);
static inline void pms_relief_born(struct pms_pool *pool, uint64_t bytes)
{
    pool->relief.born += bytes;
    if (pool->journal && pool->relief.born > pool->relief.most)
        pms_relief_look_at_born(pool);
}

/* At open, and at close: the store has no pages of its own, or none any more. */
void pms_relief_begin(struct pms_pool *pool);
void pms_relief_end(struct pms_pool *pool);

#endif
