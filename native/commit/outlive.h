/* Views that outlive their store.
 *
 * A close makes what live views lie on private to the process, at the same addresses: from then on
 * nothing that is stored there reaches the file. That copies nothing. A page that nobody has stored
 * to is still the file's, and shows what others write there; so the file stays locked until it is
 * copied (unlock.h). Each view gives its memory back when it dies. */
#ifndef PMS_COMMIT_OUTLIVE_H
#define PMS_COMMIT_OUTLIVE_H

#include <stdbool.h>
#include <stdint.h>

struct pms_pool;

/* No thread stores into the file from here on, and every view can be stored to. REQUIRES: the
 * operation lock; the last transaction is over. */
void pms_outlive_part(struct pms_pool *pool);

/* A view of a closed store is gone: what is nobody's any more is given back. REQUIRES: the
 * operation lock. */
void pms_outlive_unpin(struct pms_pool *pool, uint64_t data);

/* Copies the next pieces of what lives, some milliseconds long. true: there are more. REQUIRES: the
 * operation lock. ERRORS: *err ENOMEM: some of them are still the file's. */
bool pms_outlive_copy(struct pms_pool *pool, int *err);

/* Then: gives back what is no view's. */
void pms_outlive_forgo(struct pms_pool *pool);

/* And at last: from here on the last view unmaps everything. REQUIRES: the operation lock. */
void pms_outlive_end(struct pms_pool *pool);

#endif
