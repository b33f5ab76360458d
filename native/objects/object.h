/* Objects of a store: names, values, arrays, groups.
 *
 * A path is one or more names, with a NUL between two; each but the last is
 * that of a group in the one before it, the first in the directory dir (0: the root). What is
 * found by a number holds until the next change; a path is walked in the step that uses it.
 * Calls that put something make the groups that are missing, and take them back if they fail; no
 * path of theirs leads into slots.
 * ERRORS of all: PMS_E_NOT_FOUND; of those that put also PMS_E_EXISTS: a name on the way is no
 * group, or the last one is a group or a list. */
#ifndef PMS_OBJECTS_OBJECT_H
#define PMS_OBJECTS_OBJECT_H

#include "commit/pool.h"
#include "names/directory.h"
#include "objects/data.h"

int pms_object_find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                    struct pms_object *object, struct pms_error *error);
/* As pms_object_find, and the block of an array is pinned in the same step (see pms_unpin): it
 * stays what it was found as, whoever removes its name meanwhile. ERRORS also: PMS_E_OS. */
int pms_object_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                   struct pms_object *object, struct pms_error *error);
int pms_object_next(struct pms_pool *pool, uint64_t dir, uint64_t *node, struct pms_object *object,
                    struct pms_error *error);
int pms_object_count(struct pms_pool *pool, uint64_t dir, uint64_t *count, struct pms_error *error);
/* Before the bytes of an array are read without a pin: a reader beside writers copies them now.
 * ERRORS: PMS_E_LOST, PMS_E_INVALID: no such block. */
int pms_object_load(struct pms_pool *pool, uint64_t data, uint64_t data_bytes,
                    struct pms_error *error);

int pms_object_put_value(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                         const char *meta, uint32_t meta_bytes, struct pms_error *error);

/* Allocates, fills and publishes in one step. fill: see enum; src has src_bytes (COPY:
 * data_bytes of them; PATTERN: repeated). SLOT: zeros, in a block that will often change its
 * protection as a whole. COPY of the very array that is there changes nothing. must_be_new:
 * PMS_E_EXISTS if the name is taken. *data = offset of the block (0 if data_bytes is 0). */
int pms_object_put_array(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                         const char *meta, uint32_t meta_bytes, uint64_t data_bytes, int fill,
                         const void *src, uint64_t src_bytes, int must_be_new, uint64_t *data,
                         struct pms_error *error);

/* A group: *dir = its directory. Opens it if there (PMS_E_EXISTS if the name is another kind of
 * object). */
int pms_object_group(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                     int create, uint64_t *group, struct pms_error *error);
/* Puts a description beside a group's name (it has none when it is made): pms_object_find gives
 * it as meta. */
int pms_object_describe_group(struct pms_pool *pool, uint64_t dir, const char *path,
                              uint32_t path_bytes, const char *meta, uint32_t meta_bytes,
                              struct pms_error *error);
/* The same for a list: *list is for the functions below. It holds until the list is removed, or
 * a roll back. */
int pms_object_list(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                    int create, uint64_t *list, struct pms_error *error);
/* Removes a value, an array, or a group or list with everything in it. */
int pms_object_remove(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                      struct pms_error *error);

/* Makes a pair of arrays of zeros in one step; about: says which one is current; in_place: with log
 * for both, as for any block. ERRORS: PMS_E_EXISTS, PMS_E_FULL: nothing changed. */
int pms_object_make_slots(struct pms_pool *pool, uint64_t dir, const char *path,
                          uint32_t path_bytes, const char *about, uint32_t about_bytes,
                          const char *meta, uint32_t meta_bytes, uint64_t data_bytes, int in_place,
                          struct pms_error *error);

/* ---- inside the engine. REQUIRES: the operation lock. ---- */

/* Goes down a path to its last name: *dir (0: the root) becomes the directory that
 * has it. ERRORS: PMS_E_NOT_FOUND, PMS_E_CORRUPT. */
int pms_object_step_down(struct pms_pool *pool, uint64_t *dir, const char **path,
                         uint32_t *path_bytes, struct pms_error *error);

/* Pins the object's block, if it is an array that has one; pms_unpin takes it back. ERRORS:
 * PMS_E_OS, PMS_E_INVALID. */
int pms_object_pin(struct pms_pool *pool, const struct pms_object *object, struct pms_error *error);

#endif
