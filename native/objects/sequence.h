/* Lists of a store. */
#ifndef PMS_OBJECTS_SEQUENCE_H
#define PMS_OBJECTS_SEQUENCE_H

#include "commit/pool.h"
#include "names/directory.h"

struct pms_new_item {
    const void *meta;
    uint64_t meta_bytes;
    uint64_t data_bytes; /* of an array; 0: it has no block */
    const void *src;     /* COPY: of data_bytes bytes */
    uint32_t kind;       /* PMS_OBJECT_VALUE or PMS_OBJECT_ARRAY */
    uint32_t fill;       /* of the data: enum pms_fill but PATTERN */
};
/* Of the list with that path; without a path, of the list that dir is (pms_object_list). pin: as
 * pms_object_get.
 * ERRORS: PMS_E_NOT_FOUND: no list is there, or the index is past its end. */
int pms_sequence_count(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                       uint64_t *count, struct pms_error *error);
int pms_sequence_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                     uint64_t index, int pin, struct pms_object *object, struct pms_error *error);

#define PMS_LIST_END UINT64_MAX /* the index behind the last item */

/* Replaces `remove` items, at index, index + step, ..., by `count` new ones: append, insert,
 * delete, assignment to an index or a slice, all in one step. What is more than the removed ones
 * goes behind the last (step 1 only).
 * ERRORS: PMS_E_INVALID (past the end); PMS_E_FULL: nothing changed. Without new items it needs
 * no room. */
int pms_sequence_splice(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                        uint64_t index, uint64_t remove, uint64_t step,
                        const struct pms_new_item *items, uint64_t count, struct pms_error *error);

#endif
