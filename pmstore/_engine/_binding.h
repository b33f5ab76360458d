/* What the C files of pmstore._engine._binding share: the handle of an open store, and the
 * engine's functions, whose addresses `bind` is given. */
#ifndef PMSTORE_BINDING_H
#define PMSTORE_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "objects/pms.h"

struct binding_engine {
    int (*open)(const char *, const struct pms_options *, struct pms_pool **, struct pms_error *);
    int (*close)(struct pms_pool *, int, struct pms_error *);
    void (*release)(struct pms_pool *);
    int (*enter)(struct pms_pool *, uint64_t, int, int64_t, struct pms_entered *,
                 struct pms_error *);
    int (*commit_pending)(struct pms_pool *, const struct pms_entered *, struct pms_error *);
    int (*leave)(struct pms_pool *, const struct pms_entered *, enum pms_how, struct pms_error *);
    int (*wait)(struct pms_pool *, int64_t, struct pms_error *);
    int (*depth)(struct pms_pool *);
    void (*set_tasks)(enum pms_whose (*)(const _Atomic uint64_t *));
    int (*will_write)(struct pms_pool *, const struct pms_range *, uint64_t, struct pms_error *);
    int (*get)(struct pms_pool *, uint64_t, const char *, uint32_t, struct pms_object *,
               struct pms_error *);
    void (*unpin)(struct pms_pool *, uint64_t);
    uint64_t (*rollbacks)(const struct pms_pool *);
    int (*find)(struct pms_pool *, uint64_t, const char *, uint32_t, struct pms_object *,
                struct pms_error *);
    int (*next)(struct pms_pool *, uint64_t, uint64_t *, struct pms_object *, struct pms_error *);
    int (*item)(struct pms_pool *, uint64_t, const char *, uint32_t, uint64_t, int,
                struct pms_object *, struct pms_error *);
    int (*put_value)(struct pms_pool *, uint64_t, const char *, uint32_t, const char *, uint32_t,
                     struct pms_error *);
    int (*flip)(struct pms_pool *, uint64_t, const char *, uint32_t, struct pms_slot_turn *,
                struct pms_error *);
    uint64_t (*epoch)(struct pms_pool *);
    int (*splice)(struct pms_pool *, uint64_t, const char *, uint32_t, uint64_t, uint64_t, uint64_t,
                  const struct pms_new_item *, uint64_t, struct pms_error *);
    uint64_t (*put_backs)(const struct pms_pool *);
    int (*slot)(struct pms_pool *, uint64_t, const char *, uint32_t, enum pms_slot_which,
                struct pms_object *, struct pms_error *);
    int (*commit)(struct pms_pool *, struct pms_error *);
    int (*written)(struct pms_pool *, const struct pms_range *, uint64_t, int32_t *,
                   struct pms_error *);
};
extern struct binding_engine binding_engine;

struct Memory;

typedef struct {
    PyObject_HEAD struct pms_pool *pool;
    PyObject *fail; /* fail(address of a struct pms_error): raises */
    /* ranges(object) -> [(address, bytes), ...], for what has no buffer: tensors */
    PyObject *ranges;
    PyObject *hook; /* NULL or hook(when): see enum when */
    /* NULL or the store's: held while a block is rolled back, so that what another thread found
     * is still there */
    PyObject *lock;
    /* NULL or take_in(memories): brings back what left its memory, or raises: see _memory.c */
    PyObject *take_in;
    PyObject *memories;      /* offset of a block -> address of its Memory, while that lives */
    struct Memory *given;    /* those whose objects are to be looked at before a commit */
    unsigned long long base; /* address of the heap */
    PyObject *weak;
    pid_t process;
    char closed, read_only;
} Handle;

bool binding_is_here(const Handle *h); /* false in a fork child, where the store is the parent's */

/* Raises what the error says of the call that returned the status. Always NULL. */
PyObject *binding_raise(Handle *h, int status, const struct pms_error *error);

/* In a fork child the store is the parent's: destructors there must not touch it, not even its
 * locks. This process: */
extern pid_t binding_process;
void binding_know_process(void);

/* Python runs its signal handlers between two of these waits. */
#define SLICE_NS 50000000ll

int64_t binding_now_ns(void);

/* Seconds (None or negative: for ever = -1) to nanoseconds. Returns -2 with an exception set if
 * it is not a time. */
int64_t binding_timeout_ns(PyObject *seconds);

/* The lock, taken, to be given to binding_let_go; NULL if there is none, or with an exception
 * set. Whoever holds it waits for no block. */
PyObject *binding_take_lock(Handle *h);
void binding_let_go(PyObject *lock);

/* Addresses that are declared to be written. */
#define FEW_RANGES 16
struct ranges {
    struct pms_range *at;
    uint64_t count, room;
    struct pms_range few[FEW_RANGES]; /* the usual case needs no memory */
};
void binding_ranges_init(struct ranges *r);
void binding_ranges_free(struct ranges *r);
/* writes: a sequence of arrays and tensors; one array alone is taken as such. Returns -1 with an
 * exception set. */
int binding_ranges_add_all(struct ranges *r, Handle *h, PyObject *writes);

int binding_ranges_add(struct ranges *r, uint64_t addr, uint64_t bytes);

PyObject *binding_will_write(Handle *h, PyObject *writes);
PyObject *binding_written(Handle *h, PyObject *arrays);
PyObject *binding_writes(Handle *h, PyObject *const *args, Py_ssize_t count);
int binding_add_writes(PyObject *module);

/* handle.transaction(writes, timeout_seconds): see _transaction.c. */
PyObject *binding_transaction(Handle *h, PyObject *const *args, Py_ssize_t count);

/* ---- _memory.c ---- */

/* ALTERED: over its memory still, with another shape or dtype, or read-only */
enum where { UNCHANGED, ALTERED, ELSEWHERE };

typedef struct Memory {
    PyObject_HEAD Handle *handle; /* keeps the pool. Borrowed while `kept` */
    uint64_t data;
    void *address;
    Py_ssize_t bytes;
    char read_only;
    char kept;          /* by the handle: see memory_finalize */
    char tensor;        /* the object is one of torch */
    uint8_t code, bits; /* dtype of a tensor, as DLPack has it */
    uint16_t lanes;
    int ndim;
    int64_t *form;    /* shape, then strides, of the object */
    PyObject *object; /* weak reference, or NULL */
    PyObject *meta, *name;
    /* of an array; of a tensor that DLPack has no words for: what `look` said; else NULL */
    PyObject *dtype;
    struct Memory *next, **link; /* in handle->given */
} Memory;

/* The Memory of the block, if there is one: a new reference. NULL, with an exception set or not. */
Memory *binding_memory(Handle *h, uint64_t data);

/* The Memory of an array that the engine has pinned, which takes that pin over. NULL with an
 * exception set. */
Memory *binding_new_memory(Handle *h, const struct pms_object *pinned);

/* What was given out over it and is unchanged, if the description is the same: a new reference,
 * or NULL. */
PyObject *binding_object(const Memory *m, const struct pms_object *as);

/* Before a commit: what left its memory is taken back in. Returns -1 with an exception set. */
int binding_take_in(Handle *h);
PyObject *binding_take_in_all(Handle *h, PyObject *unused);

void binding_drop_memories(Handle *h);
int binding_add_memory(PyObject *module);

/* ---- _exports.c ---- */

PyObject *binding_tell_of_exports(PyObject *module, PyObject *type);

/* ---- _look.c ---- */

PyObject *binding_exchange_with(PyObject *module, PyObject *args);

/* Of DLPack's C exchange (data-apis.org): a struct of torch's that tells where a tensor lies
 * without a call into Python. */
struct dl_tensor {
    void *data;
    int32_t device, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

/* Whether torch has told of a tensor on the CPU. Raises nothing. */
bool binding_dl_look(PyObject *tensor, struct dl_tensor *seen);

/* What `look` says of a tensor that torch does not tell of: a new reference; NULL: it raised. */
PyObject *binding_look(PyObject *tensor);

/* Where the object is that was given out. Raises nothing. */
enum where binding_where(const Memory *m, PyObject *object);

/* Remembers how an array or a tensor looks that is given out. Return -1 with an exception set. */
int binding_note_array(Memory *m, PyObject *array, PyObject *dtype);
int binding_note_tensor(Memory *m, PyObject *tensor);

/* ---- _watch.c, _spent.c, _encode.c ---- */

/* Adds the type Watch to the module. Returns -1 with an exception set. */
int binding_add_watch(PyObject *module);

/* The same for Spent. */
int binding_add_spent(PyObject *module);

/* Whether their bytes are the same; -1: they are not one run of bytes each. one may be a tuple: of
 * those of its items, one behind the other. Raises nothing. */
int binding_same(PyObject *one, PyObject *other);

PyObject *binding_same_bytes(PyObject *module, PyObject *args);
PyObject *binding_encode(PyObject *module, PyObject *args);
PyObject *binding_trained(PyObject *module, PyObject *parameters);

/* What encode makes of a value that has no arrays, in memory of PyMem: 1; 0: it is not plain; -1
 * with an exception set. */
int binding_encode_plain(PyObject *value, char **encoded, size_t *bytes);

/* ---- _plain.c ---- */

struct plain_path {
    char at[1000];
    uint32_t bytes;
};

/* The path of a name behind a prefix (bytes), as the engine takes it; false: the name is not
 * plain. Raises nothing. */
bool binding_plain_path(PyObject *prefix, PyObject *name, struct plain_path *path);

/* The value: a new reference, with read-only lists and dicts. NULL: it is not plain, or with an
 * exception set. encoded: a copy, at most PLAIN_BYTES: to make lists may run finalizers. */
#define PLAIN_BYTES 512
PyObject *binding_plain_value(const void *encoded, size_t bytes);
PyObject *binding_read_only(PyObject *module, PyObject *args);

/* ---- _objects.c: methods of Handle ---- */
PyObject *binding_epoch(Handle *h, PyObject *unused);
PyObject *binding_depth(Handle *h, PyObject *unused);
PyObject *binding_rollbacks(Handle *h, PyObject *unused);
PyObject *binding_find(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_get(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_slot(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_next(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_item(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_put_value(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_look_up(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_look_up_item(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_put_plain(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_flip(Handle *h, PyObject *const *args, Py_ssize_t count);
PyObject *binding_flipped(Handle *h, PyObject *turn);
PyObject *binding_splice(Handle *h, PyObject *const *args, Py_ssize_t count);

/* Adds the type Handle to the module. Returns -1 with an exception set. */
int binding_add_handle(PyObject *module);

/* Adds the type Found to the module. Returns -1 with an exception set. */
int binding_add_found(PyObject *module);

/* The same for Transaction. */
int binding_add_transaction(PyObject *module);

/* For pms_txblock_set_tasks. */
enum pms_whose binding_whose(const _Atomic uint64_t *task);

/* What an error says of a block that a close rolled back: see failures.py. */
#define BLOCK_OPEN_AT_CLOSE "open when the store was closed"

#endif
