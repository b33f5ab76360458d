/* Inside the directory module: what directory.c, directory_table.c and directory_check.c share.
 *
 * The home of a hash is its top bits, so a table read in order yields its names nearly in order
 * of hash, whatever its size: a new table is written front to back, in memory that does not
 * depend on its size. */
#ifndef PMS_NAMES_DIRECTORY_TABLE_H
#define PMS_NAMES_DIRECTORY_TABLE_H

#include "names/directory.h"

#define PMS_DIR_SLOTS_MIN 64u

struct pms_dir_view { /* a directory whose header and table were checked */
    uint64_t dir;
    struct pms_dir_header h; /* a copy */
    const struct pms_dir_slot *slot;
};

struct pms_dir_place {
    uint64_t index; /* of the name's slot, or of the slot that takes a new name */
    uint64_t node;  /* 0: not found */
    bool deleted;   /* not found, and the slot was in use before */
};

static inline uint64_t pms_dir_home(uint64_t hash, uint64_t slots)
{
    return hash >> (64 - (unsigned)__builtin_ctzll(slots));
}

static inline uint64_t pms_dir_used_max(uint64_t slots) { return slots / 4 * 3; }

static inline const unsigned char *pms_dir_name(const struct pms_node *node)
{
    return (const unsigned char *)(node + 1);
}

int pms_dir_corrupt(struct pms_error *error, uint64_t off, const char *rule);

/* A name is 1 to PMS_NAME_MAX bytes of well-formed UTF-8 without NUL and without '/', which
 * separates names in a path. */
bool pms_dir_name_valid(const unsigned char *name, uint64_t bytes);

/* The live block of the engine (or the user) that starts at off and has room for bytes. */
bool pms_dir_block(const struct pms_dir_ctx *ctx, uint64_t off, uint64_t bytes,
                   enum pms_owner owner, struct pms_block *block);

/* These check what they return. ERRORS: PMS_E_CORRUPT. */
int pms_dir_load(const struct pms_dir_ctx *ctx, uint64_t dir, struct pms_dir_view *view,
                 struct pms_error *error);
int pms_dir_node(const struct pms_dir_ctx *ctx, uint64_t off, const struct pms_node **node,
                 struct pms_error *error);
int pms_dir_object(const struct pms_dir_ctx *ctx, uint64_t off, struct pms_object *object,
                   struct pms_error *error);

/* Where name is, or where it would go. Looks at each slot once at most. */
int pms_dir_probe(const struct pms_dir_ctx *ctx, const struct pms_dir_view *view, uint64_t hash,
                  const void *name, uint32_t name_bytes, struct pms_dir_place *place,
                  struct pms_error *error);

/* The object's name is one, its node has the name's hash, and a look-up of the name leads to
 * this very node: what a walk hands out can be found again, and no name is handed out twice.
 * ERRORS: PMS_E_CORRUPT that tells the name. */
int pms_dir_named(const struct pms_dir_ctx *ctx, const struct pms_dir_view *view,
                  const struct pms_object *object, struct pms_error *error);

/* Writes a new table with room for one name more and turns *view to it: the medium's header
 * still has the old one.
 * ERRORS: PMS_E_FULL, PMS_E_CORRUPT: nothing changed. */
int pms_dir_rebuild(const struct pms_dir_ctx *ctx, struct pms_dir_view *view,
                    struct pms_error *error);

#endif
