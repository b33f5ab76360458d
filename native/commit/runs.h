/* Domain file: the pages whose images a commit writes.
 *
 * A fault captures more than the page that is stored to, because it cannot know how much will be.
 * A page that it captured, and that is as its pre-image in the log, is as the last commit made it:
 * who stores in a private view captures whole pages first, so the pre-image was taken before
 * anything of this transaction lay there. Its image is left out. Other pages are written whether
 * they changed or not:
 *
 *   astray    its pre-image is what memory had, and home has something else (map.h): a view that
 *             outlived its block shows it, and the place may be given to a new block
 *   declared  as the user said: a device may store there past the page tables
 *   hot       others may store to it meanwhile, and its image is a copy
 *   bare      its pre-image is at home, and would have to be read
 *   fresh     it has none
 *
 * Where anything lies in the spill, nothing is compared: it would have to be read
 * from there. */
#ifndef PMS_COMMIT_RUNS_H
#define PMS_COMMIT_RUNS_H

#include "commit/pool_state.h"

/* ERRORS: PMS_E_OS (no memory). */
int pms_runs_open(struct pms_pool *pool, struct pms_error *error);
void pms_runs_close(struct pms_pool *pool);

/* Fills pool->tx.runs, ascending and disjoint, and returns their number. REQUIRES: the log lock;
 * what the transaction made writable is protected, but for hot ranges. */
uint32_t pms_runs_gather(struct pms_pool *pool);

#endif
