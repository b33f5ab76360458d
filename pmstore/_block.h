/* What the C files of pmstore._block share: the handle of an open store, and the engine's functions, whose addresses `bind` is given. */
#ifndef PMSTORE_BLOCK_H
#define PMSTORE_BLOCK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sys/types.h>

#include "pool.h"

struct block_engine {
    int (*open)(const char *, const struct pms_options *, struct pms_pool **, struct pms_error *);
    int (*close)(struct pms_pool *, int, struct pms_error *);
    void (*release)(struct pms_pool *);
    int (*begin)(struct pms_pool *, int64_t, struct pms_error *);
    int (*end)(struct pms_pool *, int, struct pms_error *);
    int (*will_write)(struct pms_pool *, const struct pms_range *, uint64_t, struct pms_error *);
    int (*pin)(struct pms_pool *, uint64_t, struct pms_error *);
    void (*unpin)(struct pms_pool *, uint64_t);
    uint64_t (*rollbacks)(const struct pms_pool *);
    int (*find)(struct pms_pool *, uint64_t, const char *, uint32_t, struct pms_object *, struct pms_error *);
    int (*item)(struct pms_pool *, uint64_t, uint64_t, struct pms_object *, struct pms_error *);
    int (*put_value)(struct pms_pool *, uint64_t, const char *, uint32_t, const char *, uint32_t, struct pms_error *);
    int (*flip)(struct pms_pool *, uint64_t, const char *, uint32_t, struct pms_slot_turn *, struct pms_error *);
    uint64_t (*epoch)(struct pms_pool *);
    int (*splice)(struct pms_pool *, uint64_t, uint64_t, uint64_t, uint64_t, const struct pms_new_item *, uint64_t, struct pms_error *);
    uint64_t (*put_backs)(const struct pms_pool *);
};
extern struct block_engine block_engine;

typedef struct {
    PyObject_HEAD
    struct pms_pool *pool;
    PyObject *fail;   /* fail(address of a struct pms_error): raises */
    PyObject *ranges; /* ranges(object) -> [(address, bytes), ...], for what has no buffer: tensors */
    PyObject *mirrors; /* NULL or mirrors(when): see enum when */
    PyObject *lock;    /* NULL or the store's: held while a block is rolled back, so that what another thread found is still there */
    PyObject *weak;
    pid_t process;
    char closed;
} Handle;

/* Raises what the error says. Always NULL. */
PyObject *block_raise(Handle *h, const struct pms_error *error);

/* Methods of Handle: see _objects.c. */
PyObject *block_rollbacks(Handle *h, PyObject *unused);
PyObject *block_find(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *block_item(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *block_put_value(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *block_flip(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *block_flipped(Handle *h, PyObject *turn);
PyObject *block_splice(Handle *h, PyObject *const *args, Py_ssize_t count);

/* Adds the type Found to the module. Returns -1 with an exception set. */
int block_add_found(PyObject *module);

#endif
