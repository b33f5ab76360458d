/* The calls that every look-up and every assignment of a value makes, without cffi's price for
 * structs: names and items to objects, values to names and lists. Each is one call of the
 * engine, the GIL given up around it. */
#include "_binding.h"

#define FEW 16

static PyTypeObject *FoundType;
static PyObject *missing; /* what a look-up gives where nothing is: no value is it */

static PyStructSequence_Field found_fields[] = {
    {"kind", "of object: enum pms_object_kind"},
    {"data", "offset of its block (0: none), or the directory of a group, or the list"},
    {"data_bytes", "of the block"},
    {"meta", "the value, or the description of an array"},
    {"node", "offset of what holds the name, or the item"},
    {"memory", "of an array that was found to be used: its block, pinned; else None"},
    {NULL, NULL},
};
static PyStructSequence_Desc found_desc = {
    "pmstore._engine._binding.Found",
    "One object of a directory or a list, copied out of the engine.",
    found_fields,
    6,
};

int binding_add_found(PyObject *module)
{
    if (!FoundType)
        FoundType = PyStructSequence_NewType(&found_desc);
    if (!missing && !(missing = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type)))
        return -1;
    return FoundType && PyModule_AddObjectRef(module, "MISSING", missing) == 0
               ? PyModule_AddType(module, FoundType)
               : -1;
}

/* memory: NULL, or a reference that goes into it. */
static PyObject *new_found(const struct pms_object *object, Memory *memory)
{
    /* What is in the engine's view is copied first: a new sequence may collect garbage, and so
     * run Python code. */
    PyObject *meta = PyBytes_FromStringAndSize((const char *)object->meta, object->meta_bytes);
    PyObject *field[] = {
        PyLong_FromUnsignedLong(object->kind),
        PyLong_FromUnsignedLongLong(object->data),
        PyLong_FromUnsignedLongLong(object->data_bytes),
        meta,
        PyLong_FromUnsignedLongLong(object->node),
        memory ? (PyObject *)memory : Py_NewRef(Py_None),
    };
    PyObject *result = PyStructSequence_New(FoundType);
    int whole = result != NULL;
    for (int i = 0; i < 6; i++) {
        whole = whole && field[i];
        if (result)
            PyStructSequence_SetItem(result, i, field[i]);
        else
            Py_XDECREF(field[i]);
    }
    if (!whole)
        Py_CLEAR(result);
    return result;
}

PyObject *binding_epoch(Handle *h, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(binding_engine.epoch(h->pool));
}

PyObject *binding_depth(Handle *h, PyObject *unused)
{
    (void)unused;
    return PyLong_FromLong(binding_engine.depth(h->pool));
}

PyObject *binding_rollbacks(Handle *h, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(binding_engine.rollbacks(h->pool));
}

/* ---- arguments ---- */

static int count_is(Py_ssize_t count, Py_ssize_t expected, const char *signature)
{
    if (count == expected)
        return 1;
    PyErr_SetString(PyExc_TypeError, signature);
    return 0;
}

/* Numbers that the engine gave out: any 64 bits, which it checks. -1 is all ones. */
static int number(PyObject *object, uint64_t *out)
{
    *out = PyLong_AsUnsignedLongLongMask(object);
    return !PyErr_Occurred();
}

static int bytes(PyObject *object, const char **at, uint32_t *length)
{
    char *start;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &start, &size) < 0)
        return 0;
    if ((uint64_t)size > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a name or a value of more than 4 GiB");
        return 0;
    }
    *at = start;
    *length = (uint32_t)size;
    return 1;
}

/* ---- finding ---- */

/* A path from a directory on, or one of a list with an index, or one of slots with which of
 * them. */
struct asked {
    enum { OBJECT, ITEM, SLOT } kind;
    uint64_t directory;
    const char *path;
    uint32_t path_bytes;
    uint64_t number;
};

static int ask_once(Handle *h, const struct asked *a, int pin, struct pms_object *object,
                    struct pms_error *error)
{
    int status;
    Py_BEGIN_ALLOW_THREADS if (a->kind == ITEM) status = binding_engine.item(
        h->pool, a->directory, a->path, a->path_bytes, a->number, pin, object, error);
    else if (a->kind == SLOT)
        status = binding_engine.slot(h->pool, a->directory, a->path, a->path_bytes,
                                     (enum pms_slot_which)a->number, object, error);
    else status = (pin ? binding_engine.get : binding_engine.find)(h->pool, a->directory, a->path,
                                                                   a->path_bytes, object, error);
    Py_END_ALLOW_THREADS return status;
}

/* pin: in the step in which it is found. A reader that waits for the store's writer comes back
 * where a signal came, so that its handler runs. -1 with an exception set: the handler raised it.
 */
static int ask(Handle *h, const struct asked *a, int pin, struct pms_object *object,
               struct pms_error *error)
{
    int status;
    while ((status = ask_once(h, a, pin, object, error)) == PMS_E_OS && error->sys_errno == EINTR)
        if (PyErr_CheckSignals() < 0)
            return -1;
    return status;
}

static int has_block(const struct pms_object *object)
{
    return object->kind == PMS_OBJECT_ARRAY && object->data;
}

/* DESCRIBED: always a Found. USED: the object that lives over it, if there is one. LOOKED_UP: also
 * a plain value; `missing` instead of None. */
enum as { DESCRIBED, USED, LOOKED_UP };

/* What is asked for, as it is wanted: else a Found that has its memory; None. A block
 * that has a Memory is pinned already, so that it cannot have become another one's; without one,
 * what is asked for is found and pinned in one step of the engine. */
static PyObject *answer(Handle *h, const struct asked *a, enum as as)
{
    struct pms_object object;
    struct pms_error error = {0};
    unsigned char own[PLAIN_BYTES];
    Memory *memory = NULL;
    int pinned = a->kind == SLOT, status = ask(h, a, pinned, &object, &error);
    if (status == PMS_OK && has_block(&object) && !pinned) {
        memory = binding_memory(h, object.data);
        if (!memory) {
            if (PyErr_Occurred())
                return NULL;
            status = ask(h, a, pinned = 1, &object, &error);
        }
    }
    if (status == PMS_OK && pinned && has_block(&object) &&
        !(memory = binding_new_memory(h, &object)))
        return NULL;
    if (status < 0)
        return NULL;
    if (status == PMS_E_NOT_FOUND)
        return Py_NewRef(as == LOOKED_UP ? missing : Py_None);
    if (status != PMS_OK)
        return binding_raise(h, status, &error);
    if (as == LOOKED_UP && object.kind == PMS_OBJECT_VALUE && object.meta_bytes <= sizeof own) {
        /* a copy: what is decoded are objects, whose making may run a finalizer, which may close
         * the store */
        object.meta = memcpy(own, object.meta, object.meta_bytes);
        PyObject *value = binding_plain_value(object.meta, object.meta_bytes);
        if (value || PyErr_Occurred())
            return value;
    }
    PyObject *made = memory && as != DESCRIBED ? binding_object(memory, &object) : NULL;
    if (!made)
        return new_found(&object, memory);
    Py_DECREF(memory);
    return made;
}

static PyObject *answer_of_one_state(Handle *h, const struct asked *a, enum as as)
{
    PyObject *result = NULL;
    uint64_t before;
    do {
        Py_XDECREF(result);
        before = binding_engine.put_backs(h->pool);
        result = answer(h, a, as);
        /* Another thread's block may be rolled back (its commit failed, say) while the bytes are
         * copied: then they are nobody's. */
    } while (result && binding_engine.put_backs(h->pool) != before);
    return result;
}

/* next(directory, node). The name is copied here, too: between two bytecodes a signal handler
 * may close the store, and unmap it. */
PyObject *binding_next(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    uint64_t directory, after, before;
    if (!count_is(count, 2, "next(directory, node)") || !number(args[0], &directory) ||
        !number(args[1], &after))
        return NULL;
    PyObject *result = NULL;
    do {
        struct pms_object object;
        struct pms_error error = {0};
        uint64_t node = after;
        int status;
        Py_XDECREF(result);
        before = binding_engine.put_backs(h->pool);
        Py_BEGIN_ALLOW_THREADS status = binding_engine.next(h->pool, directory, &node, &object,
                                                            &error);
        Py_END_ALLOW_THREADS if (status != PMS_OK) return binding_raise(h, status, &error);
        if (!node)
            Py_RETURN_NONE;
        PyObject *name = PyBytes_FromStringAndSize((const char *)object.name, object.name_bytes),
                 *found = name ? new_found(&object, NULL) : NULL;
        result = found ? PyTuple_Pack(2, name, found) : NULL;
        Py_XDECREF(name);
        Py_XDECREF(found);
    } while (result && binding_engine.put_backs(h->pool) != before); /* as in binding_find */
    return result;
}

/* find(directory, path): a description only, which holds until the next change. */
PyObject *binding_find(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    struct asked a = {.kind = OBJECT};
    PyObject *result = NULL;
    uint64_t before;
    if (!count_is(count, 2, "find(directory, path)") || !number(args[0], &a.directory) ||
        !bytes(args[1], &a.path, &a.path_bytes))
        return NULL;
    do {
        struct pms_object object;
        struct pms_error error = {0};
        Py_XDECREF(result);
        before = binding_engine.put_backs(h->pool);
        int status = ask(h, &a, 0, &object, &error);
        if (status < 0)
            result = NULL;
        else if (status == PMS_OK)
            result = new_found(&object, NULL);
        else
            result = status == PMS_E_NOT_FOUND ? Py_NewRef(Py_None)
                                               : binding_raise(h, status, &error);
    } while (result && binding_engine.put_backs(h->pool) != before); /* as above */
    return result;
}

/* get(directory, path, describe) */
PyObject *binding_get(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    struct asked a = {.kind = OBJECT};
    if (!count_is(count, 3, "get(directory, path, describe)") || !number(args[0], &a.directory) ||
        !bytes(args[1], &a.path, &a.path_bytes))
        return NULL;
    return answer_of_one_state(h, &a, args[2] == Py_True ? DESCRIBED : USED);
}

/* item(directory, path, index, describe) */
PyObject *binding_item(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    struct asked a = {.kind = ITEM};
    if (!count_is(count, 4, "item(directory, path, index, describe)") ||
        !number(args[0], &a.directory) || !bytes(args[1], &a.path, &a.path_bytes) ||
        !number(args[2], &a.number))
        return NULL;
    return answer_of_one_state(h, &a, args[3] == Py_True ? DESCRIBED : USED);
}

/* slot(directory, path, which) */
PyObject *binding_slot(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    struct asked a = {.kind = SLOT};
    if (!count_is(count, 3, "slot(directory, path, which)") || !number(args[0], &a.directory) ||
        !bytes(args[1], &a.path, &a.path_bytes) || !number(args[2], &a.number))
        return NULL;
    return answer_of_one_state(h, &a, USED);
}

/* Of a name behind a prefix; one that is not plain becomes a path by a call: a new reference, which
 * keeps it. NULL with an exception set. */
static PyObject *path_of(PyObject *const *args, struct plain_path *plain, const char **path,
                         uint32_t *path_bytes)
{
    *path = plain->at;
    if (binding_plain_path(args[0], args[1], plain)) {
        *path_bytes = plain->bytes;
        return Py_NewRef(Py_None);
    }
    PyObject *made = PyObject_CallOneArg(args[2], args[1]);
    if (made && !bytes(made, path, path_bytes))
        Py_CLEAR(made);
    return made;
}

/* look_up(prefix, name, path): the value itself if it is plain. path(name): of one that is not. */
PyObject *binding_look_up(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    struct asked a = {.kind = OBJECT};
    struct plain_path plain;
    if (!count_is(count, 3, "look_up(prefix, name, path)"))
        return NULL;
    PyObject *kept = path_of(args, &plain, &a.path, &a.path_bytes);
    PyObject *result = kept ? answer_of_one_state(h, &a, LOOKED_UP) : NULL;
    Py_XDECREF(kept);
    return result;
}

/* look_up_item(path, index) */
PyObject *binding_look_up_item(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    struct asked a = {.kind = ITEM};
    if (!count_is(count, 2, "look_up_item(path, index)") ||
        !bytes(args[0], &a.path, &a.path_bytes) || !number(args[1], &a.number))
        return NULL;
    return answer_of_one_state(h, &a, LOOKED_UP);
}

/* ---- writing ---- */

/* put_value(directory, path, value) */
PyObject *binding_put_value(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    uint64_t directory;
    const char *path, *value;
    uint32_t path_bytes, value_bytes;
    if (!count_is(count, 3, "put_value(directory, path, value)") || !number(args[0], &directory) ||
        !bytes(args[1], &path, &path_bytes) || !bytes(args[2], &value, &value_bytes))
        return NULL;
    struct pms_error error = {0};
    int status;
    Py_BEGIN_ALLOW_THREADS status = binding_engine.put_value(h->pool, directory, path, path_bytes,
                                                             value, value_bytes, &error);
    Py_END_ALLOW_THREADS return status == PMS_OK ? Py_NewRef(Py_None)
                                                 : binding_raise(h, status, &error);
}

/* put_plain(prefix, name, path, value): whether it is done, as the value is plain. */
PyObject *binding_put_plain(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    struct plain_path plain;
    const char *path;
    uint32_t path_bytes;
    char *value;
    size_t value_bytes;
    if (!count_is(count, 4, "put_plain(prefix, name, path, value)"))
        return NULL;
    PyObject *kept = path_of(args, &plain, &path, &path_bytes);
    int known = kept ? binding_encode_plain(args[3], &value, &value_bytes) : -1;
    if (known <= 0 || value_bytes > UINT32_MAX) {
        if (known > 0)
            PyMem_Free(value);
        Py_XDECREF(kept);
        return known < 0 ? NULL : Py_NewRef(Py_False);
    }
    struct pms_error error = {0};
    int status;
    Py_BEGIN_ALLOW_THREADS status = binding_engine.put_value(h->pool, 0, path, path_bytes, value,
                                                             (uint32_t)value_bytes, &error);
    Py_END_ALLOW_THREADS PyMem_Free(value);
    Py_DECREF(kept);
    return status == PMS_OK ? Py_NewRef(Py_True) : binding_raise(h, status, &error);
}

/* When slots were flipped last, as the engine has it: a bytearray, so that the engine's answer
 * has its place before it is asked. */
static int turn_of(PyObject *object, struct pms_slot_turn *turn)
{
    if (!PyByteArray_Check(object) || PyByteArray_GET_SIZE(object) != sizeof *turn) {
        PyErr_Format(PyExc_TypeError, "when slots were flipped is a bytearray of %zu bytes",
                     sizeof *turn);
        return 0;
    }
    memcpy(turn, PyByteArray_AS_STRING(object), sizeof *turn);
    return 1;
}

/* flip(directory, path, turn). No bytecode runs between the flip and the note of it: whoever is
 * interrupted knows that it was done. */
PyObject *binding_flip(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    uint64_t directory;
    const char *path;
    uint32_t path_bytes;
    struct pms_slot_turn turn;
    if (!count_is(count, 3, "flip(directory, path, turn)") || !number(args[0], &directory) ||
        !bytes(args[1], &path, &path_bytes) || !turn_of(args[2], &turn))
        return NULL;
    struct pms_error error = {0};
    int status;
    Py_BEGIN_ALLOW_THREADS status = binding_engine.flip(h->pool, directory, path, path_bytes, &turn,
                                                        &error);
    Py_END_ALLOW_THREADS if (status == PMS_E_NOT_FOUND) Py_RETURN_FALSE;
    if (status != PMS_OK)
        return binding_raise(h, status, &error);
    memcpy(PyByteArray_AS_STRING(args[2]), &turn, sizeof turn);
    Py_RETURN_TRUE;
}

/* flipped(turn): whether that is not committed yet, nor rolled back. */
PyObject *binding_flipped(Handle *h, PyObject *object)
{
    struct pms_slot_turn turn;
    uint64_t epoch;
    if (!turn_of(object, &turn))
        return NULL;
    if (turn.rollbacks != binding_engine.rollbacks(h->pool))
        Py_RETURN_FALSE;
    Py_BEGIN_ALLOW_THREADS epoch = binding_engine.epoch(h->pool);
    Py_END_ALLOW_THREADS return PyBool_FromLong(turn.epoch == epoch);
}

/* One of (kind, meta, data_bytes, address, ...). */
static int new_item(PyObject *from, struct pms_new_item *item)
{
    uint64_t kind, address;
    const char *meta;
    uint32_t meta_bytes;
    if (!PyTuple_Check(from) || PyTuple_GET_SIZE(from) < 4) {
        PyErr_SetString(PyExc_TypeError, "an item is (kind, meta, data_bytes, address)");
        return 0;
    }
    if (!number(PyTuple_GET_ITEM(from, 0), &kind) ||
        !bytes(PyTuple_GET_ITEM(from, 1), &meta, &meta_bytes) ||
        !number(PyTuple_GET_ITEM(from, 2), &item->data_bytes) ||
        !number(PyTuple_GET_ITEM(from, 3), &address))
        return 0;
    item->kind = (uint32_t)kind;
    item->meta = meta;
    item->meta_bytes = meta_bytes;
    item->src = (const void *)(uintptr_t)address;
    item->fill = item->data_bytes ? PMS_FILL_COPY : PMS_FILL_NONE;
    return 1;
}

/* splice(directory, path of a list, index, remove, step, new): index -1 is the end. */
PyObject *binding_splice(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    const char *path;
    uint32_t path_bytes;
    uint64_t directory, index, remove, step;
    if (!count_is(count, 6, "splice(directory, path, index, remove, step, new)") ||
        !number(args[0], &directory) || !bytes(args[1], &path, &path_bytes) ||
        !number(args[2], &index) || !number(args[3], &remove) || !number(args[4], &step))
        return NULL;
    /* the items stay what they are while the GIL is given up */
    PyObject *new = PySequence_Tuple(args[5]);
    if (!new)
        return NULL;
    struct pms_new_item few[FEW], *item = few;
    uint64_t n = (uint64_t)PyTuple_GET_SIZE(new), i = 0;
    PyObject *result = NULL;
    if (n > FEW && !(item = PyMem_New(struct pms_new_item, n)))
        PyErr_NoMemory();
    else
        while (i < n && new_item(PyTuple_GET_ITEM(new, i), &item[i]))
            i++;
    if (item && i == n) {
        struct pms_error error = {0};
        int status;
        Py_BEGIN_ALLOW_THREADS status = binding_engine.splice(h->pool, directory, path, path_bytes,
                                                              index, remove, step, item, n, &error);
        Py_END_ALLOW_THREADS result = status == PMS_OK ? Py_NewRef(Py_None)
                                                       : binding_raise(h, status, &error);
    }
    if (item != few)
        PyMem_Free(item);
    Py_DECREF(new);
    return result;
}
