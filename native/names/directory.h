/* Names to objects. See layout.h for the bytes. All changes go through stores.h, so they commit,
 * roll back and recover with everything else (I4). Every offset read from the medium is checked
 * before it is followed.
 *
 * A directory is named by the offset of its header block; the root's is in struct pms_root. */
#ifndef PMS_NAMES_DIRECTORY_H
#define PMS_NAMES_DIRECTORY_H

#include "heap/heap.h"

struct pms_dir_ctx {
    struct pms_undo *undo;
    struct pms_heap *heap;
    uint64_t hash_seed;
};

struct pms_object { /* as found; pointers are into the engine's view: valid until the next change */
    uint64_t node;
    uint64_t data;
    uint64_t data_bytes;
    uint32_t kind;
    uint32_t name_bytes;
    uint32_t meta_bytes;
    const unsigned char *name;
    const unsigned char *meta;
};

/* A new empty directory. ERRORS: PMS_E_FULL. */
int pms_dir_create(const struct pms_dir_ctx *ctx, uint64_t *dir, struct pms_error *error);

/* ERRORS: PMS_E_NOT_FOUND, PMS_E_CORRUPT. */
int pms_dir_find(const struct pms_dir_ctx *ctx, uint64_t dir, const void *name, uint32_t name_bytes,
                 struct pms_object *object, struct pms_error *error);

/* Binds name to an object: kind, meta and data as given (data: 0 or a live block, which the
 * directory then owns). Replaces what was there: its node is reused if kind, and room for meta,
 * allow; its data block is freed unless it is `data`. At most one of the two versions is ever
 * visible, to anybody. The node's place in the order is kept on replacement.
 * ERRORS: PMS_E_FULL: nothing changed; PMS_E_CORRUPT; PMS_E_EXISTS: a group or a list, which is
 * to be removed first; PMS_E_INVALID (name empty or longer than PMS_NAME_MAX). */
int pms_dir_put(const struct pms_dir_ctx *ctx, uint64_t dir, const void *name, uint32_t name_bytes,
                uint32_t kind, const void *meta, uint32_t meta_bytes, uint64_t data,
                uint64_t data_bytes, struct pms_error *error);

/* Removes the name, frees its node and its data block (not what a group or list contains: the
 * caller empties it first).
 * ERRORS: PMS_E_NOT_FOUND, PMS_E_CORRUPT. Needs no new room: deleting works when full. */
int pms_dir_remove(const struct pms_dir_ctx *ctx, uint64_t dir, const void *name,
                   uint32_t name_bytes, struct pms_error *error);

/* Order of insertion. *node = 0 to start; afterwards the node found, or 0 at the end. What is
 * found has a name by which pms_dir_find finds it.  ERRORS: PMS_E_CORRUPT. */
int pms_dir_next(const struct pms_dir_ctx *ctx, uint64_t dir, uint64_t *node,
                 struct pms_object *object, struct pms_error *error);

/* ERRORS: PMS_E_CORRUPT. */
int pms_dir_count(const struct pms_dir_ctx *ctx, uint64_t dir, uint64_t *count,
                  struct pms_error *error);

/* Checks header, table, list and nodes of one directory against each other; calls fn for header,
 * table and each node and data block, but those of groups and lists (fn(ctx, off) counts
 * ownership). Reads only. ERRORS: PMS_E_CORRUPT with the rule; fn's non-zero result. */
int pms_dir_check(const struct pms_dir_ctx *ctx, uint64_t dir,
                  int (*fn)(void *arg, uint64_t off, const struct pms_object *object), void *arg,
                  struct pms_error *error);

#endif
