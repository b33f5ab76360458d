/* Lists: sequences of values and arrays, by position. See layout.h for the bytes. All changes go
 * through stores.h, so they commit, roll back and recover with everything else (I4). Every offset
 * read from the medium is checked before it is followed.
 *
 * A list is named by the offset of its header block. A million items are four levels: a lookup
 * looks at four nodes, an append writes an entry and a count a level. Two neighbours under one
 * parent hold more than half a node between them, so the tree stays low. */
#ifndef PMS_NAMES_LIST_H
#define PMS_NAMES_LIST_H

#include "names/directory.h"

/* A new empty list. ERRORS: PMS_E_FULL. */
int pms_list_create(const struct pms_dir_ctx *ctx, uint64_t *list, struct pms_error *error);

/* ERRORS: PMS_E_CORRUPT. */
int pms_list_count(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t *count,
                   struct pms_error *error);

/* The item at index; object->node is its offset, and it has no name. ERRORS: PMS_E_NOT_FOUND
 * (index past the end), PMS_E_CORRUPT. */
int pms_list_get(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index,
                 struct pms_object *object, struct pms_error *error);

/* The item at off, checked. ERRORS: PMS_E_CORRUPT. */
int pms_list_item(const struct pms_dir_ctx *ctx, uint64_t off, struct pms_object *object,
                  struct pms_error *error);

/* An item that is in no list yet. data: 0 or a live block of the user's, which the item then
 * owns. ERRORS: PMS_E_FULL. */
int pms_list_new_item(const struct pms_dir_ctx *ctx, uint32_t kind, const void *meta,
                      uint32_t meta_bytes, uint64_t data, uint64_t data_bytes, uint64_t *item,
                      struct pms_error *error);

/* Frees an item that is in no list (any more), and its data. ERRORS: PMS_E_CORRUPT. */
int pms_list_free_item(const struct pms_dir_ctx *ctx, uint64_t item, struct pms_error *error);

/* Puts the item before what is at index (count: at the end). ERRORS: PMS_E_FULL, PMS_E_CORRUPT:
 * nothing changed. */
int pms_list_insert(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index, uint64_t item,
                    struct pms_error *error);

/* Puts the item in the place of the one at index, *old, which the caller frees. REQUIRES: index
 * < count. ERRORS: PMS_E_CORRUPT. */
int pms_list_replace(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index, uint64_t item,
                     uint64_t *old, struct pms_error *error);

/* Takes the item at index out: *old, which the caller frees. Needs no new room. REQUIRES: index
 * < count. ERRORS: PMS_E_CORRUPT. */
int pms_list_remove(const struct pms_dir_ctx *ctx, uint64_t list, uint64_t index, uint64_t *old,
                    struct pms_error *error);

/* Removes and frees all items. Needs no new room. ERRORS: PMS_E_CORRUPT. */
int pms_list_clear(const struct pms_dir_ctx *ctx, uint64_t list, struct pms_error *error);

/* Checks the tree and every item; calls fn for the header and each node (object NULL), each item
 * and its data block. Reads only.
 * ERRORS: PMS_E_CORRUPT with the rule; fn's non-zero result. */
int pms_list_check(const struct pms_dir_ctx *ctx, uint64_t list,
                   int (*fn)(void *arg, uint64_t off, const struct pms_object *object), void *arg,
                   struct pms_error *error);

#endif
