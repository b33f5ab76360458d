/* The steps of opening that show the last commit to a reader (open.c): as recovery would make it,
 * in private memory, or as the process that writes tells it. */
#ifndef PMS_STORE_SHOW_H
#define PMS_STORE_SHOW_H

#include "commit/pool_state.h"
#include "store/filelock.h"

/* Chooses whose sight it is: the file's where nobody has it open, else the writer's, and pins it
 * there.  ERRORS: PMS_E_LOCKED: somebody has it open, and does not answer; PMS_E_LOST: try again;
 * PMS_E_CORRUPT, PMS_E_OS. */
int pms_show_choose(struct pms_pool *pool, const struct pms_files *files, bool keep,
                    struct pms_error *error);

/* Once the views are mapped: the root and the page tables. */
int pms_show_begin(struct pms_pool *pool, struct pms_error *error);

/* Once the heap is there: all blocks of the engine's. Nothing of theirs is loaded later. */
int pms_show_names(struct pms_pool *pool, struct pms_error *error);

#endif
