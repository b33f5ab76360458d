/* Objects of a store: names, values, arrays, groups. Each function is one step that commits,
 * rolls back and recovers whole. */
#include <stddef.h>
#include <string.h>

#include "objects/object.h"
#include "commit/gate.h"
#include "commit/txblock.h"
#include "store/grow.h"
#include "names/list.h"

#define MORE_FOR_NAMES (1u << 20) /* growth step when a directory finds no room */

static uint64_t directory_of(struct pms_pool *pool, uint64_t dir)
{
    return dir ? dir : pms_pool_root(pool)->directory;
}

/* ---- paths ---- */

/* The first name of the path, and the rest behind it; false if it is the last one. */
static bool split(const char *path, uint32_t path_bytes, uint32_t *first_bytes)
{
    const char *end = memchr(path, 0, path_bytes);
    *first_bytes = end ? (uint32_t)(end - path) : path_bytes;
    return end != NULL;
}

int pms_object_step_down(struct pms_pool *pool, uint64_t *dir, const char **path,
                         uint32_t *path_bytes, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object o;
    uint32_t first;
    *dir = directory_of(pool, *dir);
    while (split(*path, *path_bytes, &first)) {
        int status = pms_dir_find(&dirs, *dir, *path, first, &o, error);
        if (status == PMS_OK && o.kind != PMS_OBJECT_GROUP)
            status = pms_fail(error, PMS_E_NOT_FOUND, "a group on the way is not there");
        if (status != PMS_OK)
            return status;
        *dir = o.data;
        *path += first + 1;
        *path_bytes -= first + 1;
    }
    return PMS_OK;
}

/* ---- reading ---- */

/* REQUIRES: the operation lock. */
static int find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                struct pms_object *object, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    int status = pms_object_step_down(pool, &dir, &path, &path_bytes, error);
    return status == PMS_OK ? pms_dir_find(&dirs, dir, path, path_bytes, object, error) : status;
}

int pms_object_pin(struct pms_pool *pool, const struct pms_object *object, struct pms_error *error)
{
    if (object->kind != PMS_OBJECT_ARRAY || !object->data)
        return PMS_OK;
    struct pms_part range = {object->data, object->data_bytes};
    int status = pms_heap_pin(pool->heap, object->data, error);
    if (status != PMS_OK)
        return status;
    status = pms_sight_load(&pool->sight, &pool->undo, &pool->map, &range, 1, error);
    if (status == PMS_OK)
        pool->refs++;
    else
        pms_heap_unpin(pool->heap, object->data);
    return status;
}

int pms_object_load(struct pms_pool *pool, uint64_t data, uint64_t data_bytes,
                    struct pms_error *error)
{
    struct pms_part range = {data, data_bytes};
    struct pms_block block;
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    if (!pms_heap_find(pool->heap, data, &block) || block.bytes < data_bytes)
        status = pms_fail(error, PMS_E_INVALID, "no array of so many bytes is there");
    else
        status = pms_sight_load(&pool->sight, &pool->undo, &pool->map, &range, 1, error);
    pms_pool_leave(pool);
    return status;
}

static int find_and(bool pin, struct pms_pool *pool, uint64_t dir, const char *path,
                    uint32_t path_bytes, struct pms_object *object, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = find(pool, dir, path, path_bytes, object, error);
    if (status == PMS_OK && pin)
        status = pms_object_pin(pool, object, error);
    pms_pool_leave(pool);
    return status;
}

int pms_object_find(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                    struct pms_object *object, struct pms_error *error)
{
    return find_and(false, pool, dir, path, path_bytes, object, error);
}

int pms_object_get(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                   struct pms_object *object, struct pms_error *error)
{
    return find_and(true, pool, dir, path, path_bytes, object, error);
}

int pms_object_next(struct pms_pool *pool, uint64_t dir, uint64_t *node, struct pms_object *object,
                    struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    status = pms_dir_next(&dirs, directory_of(pool, dir), node, object, error);
    pms_pool_leave(pool);
    return status;
}

int pms_object_count(struct pms_pool *pool, uint64_t dir, uint64_t *count, struct pms_error *error)
{
    int status = pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    status = pms_dir_count(&dirs, directory_of(pool, dir), count, error);
    pms_pool_leave(pool);
    return status;
}

/* ---- names ---- */

/* Puts, the file grown if need be. A put that finds no room has changed nothing. */
static int put(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
               uint32_t kind, const void *meta, uint32_t meta_bytes, uint64_t data,
               uint64_t data_bytes, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    int status = pms_dir_put(&dirs, dir, name, name_bytes, kind, meta, meta_bytes, data, data_bytes,
                             error);
    for (uint64_t room = MORE_FOR_NAMES + 2ull * meta_bytes; status == PMS_E_FULL; room *= 4) {
        /* the table of a large directory doubles: that may take more than one step */
        status = pms_pool_grow(pool, room, error);
        if (status != PMS_OK)
            return status;
        status = pms_dir_put(&dirs, dir, name, name_bytes, kind, meta, meta_bytes, data, data_bytes,
                             error);
    }
    return status;
}

/* ---- containers ---- */

typedef int create_fn(const struct pms_dir_ctx *ctx, uint64_t *header, struct pms_error *error);

/* Takes a new container back that found no name: born in this transaction, as if it had not
 * been. */
static void drop_new(struct pms_pool *pool, uint32_t kind, uint64_t at)
{
    const struct pms_dir_header *header = pms_map_at(&pool->map, at);
    if (kind == PMS_OBJECT_GROUP)
        pms_heap_free(pool->heap, header->table, NULL);
    pms_heap_free(pool->heap, at, NULL);
}

static int container(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                     uint32_t kind, bool create, uint64_t *out, struct pms_error *error)
{
    create_fn *new_one = kind == PMS_OBJECT_GROUP ? pms_dir_create : pms_list_create;
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object o;
    int status = pms_dir_find(&dirs, dir, name, name_bytes, &o, error);
    if (status == PMS_OK) {
        *out = o.data;
        return o.kind == kind ? PMS_OK
                              : pms_fail(error, PMS_E_EXISTS,
                                         "the name is in use, for an object of another kind");
    }
    if (status != PMS_E_NOT_FOUND || !create)
        return status;
    status = new_one(&dirs, out, error);
    if (status == PMS_E_FULL && (status = pms_pool_grow(pool, MORE_FOR_NAMES, error)) == PMS_OK)
        status = new_one(&dirs, out, error);
    if (status != PMS_OK)
        return status;
    status = put(pool, dir, name, name_bytes, kind, "", 0, *out, PMS_LINE, error);
    if (status != PMS_OK)
        drop_new(pool, kind, *out);
    return status;
}

/* Removes what a directory lists first, if that has nothing in it: *inside is 0 then, and else
 * the group to empty before. */
static int remove_first(const struct pms_dir_ctx *dirs, uint64_t dir, const struct pms_object *o,
                        uint64_t *inside, struct pms_error *error)
{
    uint64_t count = 0;
    int status = PMS_OK;
    *inside = 0;
    if (o->kind == PMS_OBJECT_GROUP)
        status = pms_dir_count(dirs, o->data, &count, error);
    else if (o->kind == PMS_OBJECT_LIST)
        status = pms_list_clear(dirs, o->data, error);
    if (status == PMS_OK && count) {
        *inside = o->data;
        return PMS_OK;
    }
    return status == PMS_OK ? pms_dir_remove(dirs, dir, o->name, o->name_bytes, error) : status;
}

/* Empties a directory, groups in it first. No recursion, and no more than the depth that a store
 * has: a hostile tree must not eat the stack. Each object is met once, each group once more when
 * it is empty. */
static int empty_directory(struct pms_pool *pool, uint64_t top, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    uint64_t way[PMS_GROUPS_MAX] = {top}, depth = 0;
    for (;;) {
        uint64_t node = 0, inside = 0;
        struct pms_object o;
        int status = pms_dir_next(&dirs, way[depth], &node, &o, error);
        if (status == PMS_OK && node)
            status = remove_first(&dirs, way[depth], &o, &inside, error);
        if (status != PMS_OK)
            return status;
        if (inside && depth + 1 == PMS_GROUPS_MAX)
            return pms_fail(error, PMS_E_CORRUPT,
                            "groups are in each other, or in more than %u others",
                            PMS_GROUPS_MAX - 1);
        if (inside)
            way[++depth] = inside;
        else if (!node && depth-- == 0)
            return PMS_OK;
    }
}

static int remove_object(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                         struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object o;
    int status = pms_dir_find(&dirs, dir, name, name_bytes, &o, error);
    if (status == PMS_OK && o.kind == PMS_OBJECT_GROUP)
        status = empty_directory(pool, o.data, error);
    else if (status == PMS_OK && o.kind == PMS_OBJECT_LIST)
        status = pms_list_clear(&dirs, o.data, error);
    return status == PMS_OK ? pms_dir_remove(&dirs, dir, name, name_bytes, error) : status;
}

/* The outermost of the groups that were made on the way to a name; name is NULL if there are
 * none. */
struct made {
    uint64_t dir;
    const char *name;
    uint32_t name_bytes;
};

/* Goes down a path as pms_object_step_down does, and makes the groups that are missing. What is
 * below slots is theirs. */
static int make_way(struct pms_pool *pool, uint64_t *dir, const char **path, uint32_t *path_bytes,
                    struct made *made, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object o;
    uint32_t first;
    *made = (struct made){0};
    *dir = directory_of(pool, *dir);
    while (split(*path, *path_bytes, &first)) {
        int status = pms_dir_find(&dirs, *dir, *path, first, &o, error);
        if (status == PMS_OK && (o.kind != PMS_OBJECT_GROUP || o.meta_bytes))
            return pms_fail(error, PMS_E_EXISTS,
                            "a name on the way is in use, for something else than a group");
        if (status == PMS_E_NOT_FOUND) {
            status = container(pool, *dir, *path, first, PMS_OBJECT_GROUP, true, &o.data, error);
            if (status == PMS_OK && !made->name)
                *made = (struct made){*dir, *path, first};
        }
        if (status != PMS_OK)
            return status;
        *dir = o.data;
        *path += first + 1;
        *path_bytes -= first + 1;
    }
    return PMS_OK;
}

/* As if they had not been made: what they were made for has failed. Needs no room. */
static void unmake(struct pms_pool *pool, const struct made *made)
{
    if (made->name)
        remove_object(pool, made->dir, made->name, made->name_bytes, NULL);
}

/* ---- writing ---- */

/* What is there, or zeros. Asked before room is taken for an array: what holds others is not
 * replaced (see pms_dir_put). */
static int refuse_holder(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                         struct pms_object *old, struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    int status = pms_dir_find(&dirs, dir, name, name_bytes, old, error);
    if (status == PMS_OK && (old->kind == PMS_OBJECT_GROUP || old->kind == PMS_OBJECT_LIST))
        return pms_fail(error, PMS_E_EXISTS, "the name is in use, for a group or a list");
    if (status != PMS_E_NOT_FOUND)
        return status;
    *old = (struct pms_object){0};
    return PMS_OK;
}

int pms_object_put_value(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                         const char *meta, uint32_t meta_bytes, struct pms_error *error)
{
    struct made made;
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = make_way(pool, &dir, &path, &path_bytes, &made, error);
    if (status == PMS_OK)
        status = put(pool, dir, path, path_bytes, PMS_OBJECT_VALUE, meta, meta_bytes, 0, 0, error);
    if (status != PMS_OK)
        unmake(pool, &made);
    pms_pool_leave(pool);
    return status;
}

/* Whether what is to be copied in is the array that is there: an assignment of an object to its
 * own place writes nothing. */
static bool is_itself(struct pms_pool *pool, const struct pms_object *old, const char *meta,
                      uint32_t meta_bytes, uint64_t data_bytes, const void *src)
{
    return old->kind == PMS_OBJECT_ARRAY && old->data && old->data_bytes == data_bytes &&
           old->meta_bytes == meta_bytes && memcmp(old->meta, meta, meta_bytes) == 0 &&
           src == pool->map.user + old->data;
}

static int put_array(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                     const char *meta, uint32_t meta_bytes, uint64_t data_bytes, int how,
                     const void *src, uint64_t src_bytes, int must_be_new, uint64_t *data,
                     struct pms_error *error)
{
    struct pms_object old;
    int status = refuse_holder(pool, dir, name, name_bytes, &old, error);
    *data = 0;
    if (status == PMS_OK && must_be_new && old.kind)
        status = pms_fail(error, PMS_E_EXISTS, "the name is in use");
    if (status != PMS_OK)
        return status;
    if (how == PMS_FILL_COPY && is_itself(pool, &old, meta, meta_bytes, data_bytes, src)) {
        *data = old.data;
        return PMS_OK;
    }
    status = pms_pool_new_data(pool, data_bytes, how, src, src_bytes, data, error);
    if (status != PMS_OK)
        return status;
    status = put(pool, dir, name, name_bytes, PMS_OBJECT_ARRAY, meta, meta_bytes, *data, data_bytes,
                 error);
    if (status != PMS_OK && *data) {
        /* born in this transaction: as if it had not been */
        pms_heap_free(pool->heap, *data, NULL);
        *data = 0;
    }
    return status;
}

int pms_object_put_array(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                         const char *meta, uint32_t meta_bytes, uint64_t data_bytes, int how,
                         const void *src, uint64_t src_bytes, int must_be_new, uint64_t *data,
                         struct pms_error *error)
{
    int with = how & ~PMS_FILL_OF_SLOT;
    bool needs_src = with == PMS_FILL_COPY || with == PMS_FILL_PATTERN;
    if ((needs_src && data_bytes && (!src || !src_bytes)) ||
        (with == PMS_FILL_COPY && src_bytes < data_bytes))
        return pms_fail(error, PMS_E_INVALID, "fill without bytes to fill with");
    struct made made;
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = make_way(pool, &dir, &path, &path_bytes, &made, error);
    if (status == PMS_OK)
        status = put_array(pool, dir, path, path_bytes, meta, meta_bytes, data_bytes, how, src,
                           src_bytes, must_be_new, data, error);
    if (status != PMS_OK)
        unmake(pool, &made);
    pms_pool_leave(pool);
    return status;
}

static int open_container(struct pms_pool *pool, uint64_t dir, const char *path,
                          uint32_t path_bytes, uint32_t kind, bool create, uint64_t *out,
                          struct pms_error *error)
{
    struct made made = {0};
    int status = create ? pms_pool_enter_write(pool, error) : pms_pool_enter(pool, error);
    if (status != PMS_OK)
        return status;
    status = create ? make_way(pool, &dir, &path, &path_bytes, &made, error)
                    : pms_object_step_down(pool, &dir, &path, &path_bytes, error);
    if (status == PMS_OK)
        status = container(pool, dir, path, path_bytes, kind, create, out, error);
    if (status != PMS_OK)
        unmake(pool, &made);
    pms_pool_leave(pool);
    return status;
}

int pms_object_group(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                     int create, uint64_t *out, struct pms_error *error)
{
    return open_container(pool, dir, name, name_bytes, PMS_OBJECT_GROUP, create, out, error);
}

/* REQUIRES: the operation lock. */
static int describe_group(struct pms_pool *pool, uint64_t dir, const char *name,
                          uint32_t name_bytes, const char *meta, uint32_t meta_bytes,
                          struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object o;
    int status = pms_dir_find(&dirs, dir, name, name_bytes, &o, error);
    if (status == PMS_OK && o.kind != PMS_OBJECT_GROUP)
        status = pms_fail(error, PMS_E_EXISTS, "the name is in use, for an object of another kind");
    if (status == PMS_OK)
        status = put(pool, dir, name, name_bytes, PMS_OBJECT_GROUP, meta, meta_bytes, o.data,
                     o.data_bytes, error);
    return status;
}

int pms_object_describe_group(struct pms_pool *pool, uint64_t dir, const char *path,
                              uint32_t path_bytes, const char *meta, uint32_t meta_bytes,
                              struct pms_error *error)
{
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = pms_object_step_down(pool, &dir, &path, &path_bytes, error);
    if (status == PMS_OK)
        status = describe_group(pool, dir, path, path_bytes, meta, meta_bytes, error);
    pms_pool_leave(pool);
    return status;
}

/* REQUIRES: the operation lock; nothing has the name. */
static int make_slots(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                      const char *about, uint32_t about_bytes, const char *meta,
                      uint32_t meta_bytes, uint64_t data_bytes, int in_place,
                      struct pms_error *error)
{
    uint64_t group, data;
    int fill = in_place ? PMS_FILL_ZERO : PMS_FILL_ZERO | PMS_FILL_OF_SLOT;
    int status = container(pool, dir, name, name_bytes, PMS_OBJECT_GROUP, true, &group, error);
    if (status != PMS_OK)
        return status;
    for (int i = 0; status == PMS_OK && i < 2; i++)
        status = put_array(pool, group, i ? "1" : "0", 1, meta, meta_bytes, data_bytes, fill, NULL,
                           0, 1, &data, error);
    if (status == PMS_OK)
        status = describe_group(pool, dir, name, name_bytes, about, about_bytes, error);
    if (status != PMS_OK)
        unmake(pool, &(struct made){dir, name, name_bytes});
    return status;
}

int pms_object_make_slots(struct pms_pool *pool, uint64_t dir, const char *path,
                          uint32_t path_bytes, const char *about, uint32_t about_bytes,
                          const char *meta, uint32_t meta_bytes, uint64_t data_bytes, int in_place,
                          struct pms_error *error)
{
    struct pms_dir_ctx dirs = pms_pool_dirs(pool);
    struct pms_object old;
    struct made made;
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    status = make_way(pool, &dir, &path, &path_bytes, &made, error);
    if (status == PMS_OK) {
        status = pms_dir_find(&dirs, dir, path, path_bytes, &old, error);
        if (status == PMS_OK)
            status = pms_fail(error, PMS_E_EXISTS, "the name is in use");
        else if (status == PMS_E_NOT_FOUND)
            status = make_slots(pool, dir, path, path_bytes, about, about_bytes, meta, meta_bytes,
                                data_bytes, in_place, error);
    }
    if (status != PMS_OK)
        unmake(pool, &made);
    pms_pool_leave(pool);
    return status;
}

int pms_object_list(struct pms_pool *pool, uint64_t dir, const char *name, uint32_t name_bytes,
                    int create, uint64_t *out, struct pms_error *error)
{
    return open_container(pool, dir, name, name_bytes, PMS_OBJECT_LIST, create, out, error);
}

int pms_object_remove(struct pms_pool *pool, uint64_t dir, const char *path, uint32_t path_bytes,
                      struct pms_error *error)
{
    struct pms_object above = {0};
    const char *last = path;
    uint32_t last_bytes = path_bytes;
    int status = pms_pool_enter_write(pool, error);
    if (status != PMS_OK)
        return status;
    uint64_t at = dir;
    status = pms_object_step_down(pool, &at, &last, &last_bytes, error);
    if (status == PMS_OK && last != path) /* what is below slots is theirs */
        status = find(pool, dir, path, (uint32_t)(last - path) - 1, &above, error);
    if (status == PMS_OK && above.meta_bytes)
        status = pms_fail(error, PMS_E_EXISTS, "names below slots are their own");
    if (status == PMS_OK)
        status = remove_object(pool, at, last, last_bytes, error);
    pms_pool_leave(pool);
    return status;
}
