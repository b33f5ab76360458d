/* Page tables for what is allocated, made in the background after an open: else the first touch
 * of each page of a new mapping costs several times the copying of it. Reads alone: nothing is
 * stored to, nothing is unprotected. */
#ifndef PMS_STORE_POPULATE_H
#define PMS_STORE_POPULATE_H

struct pms_pool;

/* Starts the thread, if there is enough to do and memory for it. Never fails: without it first
 * touches are slower. */
void pms_populate_start(struct pms_pool *pool);

/* Ends it, soon, and waits for that. REQUIRES: the operation lock. */
void pms_populate_stop(struct pms_pool *pool);

#endif
