/* Inside the list module: what list.c, list_edit.c and list_check.c share. These check what they
 * return. */
#ifndef PMS_NAMES_LIST_TREE_H
#define PMS_NAMES_LIST_TREE_H

#include "names/list.h"

struct pms_list_place { /* the way from the root to an index */
    struct {
        uint64_t off;
        const struct pms_list_node *node;
        /* entry of the node that the way goes through; in the leaf: of the item, or `used` past
         * the end */
        uint32_t at;
    } step[PMS_LIST_LEVELS]; /* by level: [0] is the leaf */
};

static inline uint32_t pms_list_room(unsigned level)
{
    return level ? PMS_LIST_CHILDREN : PMS_LIST_ITEMS;
}

int pms_list_corrupt(struct pms_error *error, uint64_t off, const char *rule);

/* ERRORS: PMS_E_CORRUPT. */
int pms_list_load(const struct pms_dir_ctx *ctx, uint64_t list, struct pms_list_header *header,
                  struct pms_error *error);
int pms_list_node(const struct pms_dir_ctx *ctx, uint64_t off, unsigned level,
                  const struct pms_list_node **node, struct pms_error *error);

/* REQUIRES: the list has items, index <= count. */
int pms_list_locate(const struct pms_dir_ctx *ctx, const struct pms_list_header *header,
                    uint64_t index, struct pms_list_place *place, struct pms_error *error);

#endif
