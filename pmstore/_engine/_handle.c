/* Handle: opens a pool and owns it. The last reference closes it (roll back) and releases it. Its
 * methods on objects are in _objects.c, on transaction blocks in _transaction.c. */
#include "_binding.h"

#include <structmember.h>

static PyTypeObject *HandleType;

/* Handle(path, options, lock_timeout, fail, ranges): path as bytes, options = address of a
 * struct pms_options. */
static PyObject *handle_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    const char *path;
    unsigned long long options_at;
    PyObject *seconds, *fail, *ranges;
    if (kwargs && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Handle takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "yKOOO", &path, &options_at, &seconds, &fail, &ranges))
        return NULL;
    int64_t timeout = binding_timeout_ns(seconds);
    if (timeout == -2)
        return NULL;
    if (!binding_engine.open) {
        PyErr_SetString(PyExc_SystemError, "pmstore._engine._binding.bind was not called");
        return NULL;
    }
    Handle *h = (Handle *)type->tp_alloc(type, 0);
    if (!h)
        return NULL;
    h->fail = Py_NewRef(fail);
    h->ranges = Py_NewRef(ranges);
    h->process = binding_process;
    h->closed = 1; /* until there is a pool */
    if (!(h->memories = PyDict_New())) {
        Py_DECREF(h);
        return NULL;
    }

    struct pms_options options = *(const struct pms_options *)(uintptr_t)options_at;
    int64_t deadline = timeout > 0 ? binding_now_ns() + timeout : 0;
    for (;;) {
        struct pms_error error = {0};
        int64_t left = timeout < 0 ? SLICE_NS : timeout == 0 ? 0 : deadline - binding_now_ns();
        options.lock_timeout_ns = left < 0 ? 0 : left < SLICE_NS ? left : SLICE_NS;
        struct pms_pool *pool = NULL;
        int status;
        Py_BEGIN_ALLOW_THREADS status = binding_engine.open(path, &options, &pool, &error);
        Py_END_ALLOW_THREADS if (status == PMS_OK)
        {
            h->pool = pool;
            h->closed = 0;
            return (PyObject *)h;
        }
        bool again = (status == PMS_E_LOCKED && (timeout < 0 || left > 0)) ||
                     ((status == PMS_E_OS || status == PMS_E_STATE || status == PMS_E_LOCKED) &&
                      error.sys_errno == EINTR);
        if (!again) {
            binding_raise(h, status, &error);
            break;
        }
        if (PyErr_CheckSignals() < 0)
            break;
    }
    Py_DECREF(h);
    return NULL;
}

static int handle_traverse(Handle *h, visitproc visit, void *arg)
{
    Py_VISIT(h->hook);
    Py_VISIT(h->lock);
    Py_VISIT(h->take_in);
    Py_VISIT(Py_TYPE(h));
    Py_VISIT(h->fail);
    Py_VISIT(h->ranges);
    return 0;
}

static int handle_clear(Handle *h)
{
    Py_CLEAR(h->hook);
    Py_CLEAR(h->lock);
    Py_CLEAR(h->take_in);
    Py_CLEAR(h->fail);
    Py_CLEAR(h->ranges);
    return 0;
}

static void handle_dealloc(Handle *h)
{
    PyTypeObject *type = Py_TYPE(h);
    PyObject_GC_UnTrack(h);
    if (h->weak)
        PyObject_ClearWeakRefs((PyObject *)h);
    if (h->pool)
        binding_drop_memories(h);
    if (h->pool && h->process == binding_process) {
        int was_open = !h->closed;
        struct pms_error error = {0};
        int status;
        Py_BEGIN_ALLOW_THREADS status = was_open ? binding_engine.close(h->pool, 0, &error)
                                                 : PMS_OK;
        binding_engine.release(h->pool);
        Py_END_ALLOW_THREADS if (was_open)
        { /* as the io module does for files */
            PyObject *type_, *value, *trace;
            PyErr_Fetch(&type_, &value, &trace);
            if (PyErr_WarnEx(
                    PyExc_ResourceWarning,
                    status == PMS_OK
                        ? "a pmstore.Store was never closed; what was not committed is rolled back"
                        : "a pmstore.Store was never closed, and closing it now failed",
                    1) < 0)
                PyErr_WriteUnraisable(NULL);
            PyErr_Restore(type_, value, trace);
        }
    }
    handle_clear(h);
    Py_CLEAR(h->memories);
    type->tp_free(h);
    Py_DECREF(type);
}

/* What was raised first is what the user must see; what came after it is reported beside it. */
static void keep_first(PyObject **first)
{
    if (!PyErr_Occurred())
        return;
    if (first[0])
        PyErr_WriteUnraisable(NULL);
    else
        PyErr_Fetch(&first[0], &first[1], &first[2]);
}

/* Waits until no other thread is in a block. Returns -1 with an exception set. */
static int wait_for_blocks(Handle *h, int64_t deadline)
{
    for (;;) {
        struct pms_error error = {0};
        int64_t left = deadline - binding_now_ns();
        int status;
        Py_BEGIN_ALLOW_THREADS status = binding_engine.wait(h->pool,
                                                            left < 0          ? 0
                                                            : left < SLICE_NS ? left
                                                                              : SLICE_NS,
                                                            &error);
        Py_END_ALLOW_THREADS if (status == PMS_OK || status == PMS_E_CLOSED) return 0;
        if (status == PMS_E_BUSY && left > 0) {
            if (PyErr_CheckSignals() < 0)
                return -1;
            continue;
        }
        if (status == PMS_E_BUSY)
            snprintf(error.what, sizeof error.what, "%s", BLOCK_OPEN_AT_CLOSE);
        binding_raise(h, status, &error);
        return -1;
    }
}

/* close(commit, wait_seconds, asking, ending): waits for a block of another thread if it is to
 * commit, calls asking (nothing is committed if it raises, or answers False) and ending, and
 * closes, whatever was raised: no interrupt leaves half of a store behind. */
static PyObject *handle_close(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "close(commit, wait_seconds, asking, ending)");
        return NULL;
    }
    int commit = PyObject_IsTrue(args[0]), status;
    int64_t timeout = binding_timeout_ns(args[1]);
    if (commit < 0 || timeout < 0)
        return NULL;
    if (h->closed)
        Py_RETURN_NONE;
    /* a fork child's copy: there is nothing here to close */
    bool ours = h->process == binding_process;
    commit = commit && ours;
    int64_t deadline = commit ? binding_now_ns() + timeout : 0;
    PyObject *first[3] = {NULL, NULL, NULL}, *result;
    struct pms_error error = {0};
    if (commit && wait_for_blocks(h, deadline) < 0)
        commit = 0;
    keep_first(first);
    if (commit) {
        result = PyObject_CallNoArgs(args[2]);
        commit = result != NULL && result != Py_False;
        Py_XDECREF(result);
        keep_first(first);
    }
    result = PyObject_CallNoArgs(args[3]);
    Py_XDECREF(result);
    keep_first(first);
    status = PMS_OK;
    while (ours) {
        PyObject *lock = binding_take_lock(h); /* nobody is reading what goes now */
        keep_first(first);
        Py_BEGIN_ALLOW_THREADS status = binding_engine.close(h->pool, commit, &error);
        Py_END_ALLOW_THREADS binding_let_go(lock);
        if (status != PMS_E_BUSY)
            break;
        if (wait_for_blocks(h, deadline) < 0) { /* one was entered since */
            commit = 0;
            keep_first(first);
        }
    }
    /* whatever it says: a close that fails has closed, and reports what could not be made
     * durable */
    h->closed = ours;
    if (status != PMS_OK)
        binding_raise(h, status, &error);
    keep_first(first);
    if (!first[0])
        Py_RETURN_NONE;
    PyErr_Restore(first[0], first[1], first[2]);
    return NULL;
}

/* A commit outside of blocks, with what left its memory taken back in before. */
static PyObject *handle_commit(Handle *h, PyObject *unused)
{
    (void)unused;
    if (binding_take_in(h) < 0)
        return NULL;
    struct pms_error error = {0};
    int status;
    Py_BEGIN_ALLOW_THREADS status = binding_engine.commit(h->pool, &error);
    Py_END_ALLOW_THREADS if (status != PMS_OK) return binding_raise(h, status, &error);
    Py_RETURN_NONE;
}

/* ---- Handle, the type ---- */

static PyObject *handle_get_pool(Handle *h, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong((unsigned long long)(uintptr_t)h->pool);
}

static PyObject *handle_get_closed(Handle *h, void *unused)
{
    (void)unused;
    return PyBool_FromLong(h->closed);
}

static PyGetSetDef handle_getset[] = {
    {"pool", (getter)handle_get_pool, NULL, "Address of the struct pms_pool.", NULL},
    {"closed", (getter)handle_get_closed, NULL, "True after close.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef handle_members[] = {
    {"hook", T_OBJECT, offsetof(Handle, hook), 0,
     "None, or called with 0, 1 and 2 before and after what a block commits."},
    {"take_in", T_OBJECT, offsetof(Handle, take_in), 0,
     "None, or called with the Memories whose objects may have left them."},
    {"base", T_ULONGLONG, offsetof(Handle, base), 0, "Address of the heap."},
    {"read_only", T_BOOL, offsetof(Handle, read_only), 0, "Whether the store is open for reading."},
    {"lock", T_OBJECT, offsetof(Handle, lock), 0, "None, or held while a block is rolled back."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Handle, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef handle_methods[] = {
    {"close", (PyCFunction)(void (*)(void))handle_close, METH_FASTCALL,
     "close(commit, wait_seconds, asking, ending): ends what is pending and unlocks. Idempotent."},
    {"commit", (PyCFunction)handle_commit, METH_NOARGS,
     "Everything written so far becomes the state that survives."},
    {"take_in_moved", (PyCFunction)binding_take_in_all, METH_NOARGS,
     "Before a commit: brings back what left its memory, or raises."},
    {"will_write", (PyCFunction)binding_will_write, METH_O,
     "will_write(arrays): captures them now."},
    {"writes", (PyCFunction)(void (*)(void))binding_writes, METH_FASTCALL,
     "writes(parameters, of each a list of arrays) -> Writes, for will_write: the arrays of those "
     "that have a gradient then"},
    {"written", (PyCFunction)binding_written, METH_O,
     "written(arrays) -> whether a byte of them is another than in the last commit"},
    {"transaction", (PyCFunction)(void (*)(void))binding_transaction, METH_FASTCALL,
     "transaction(writes, timeout) -> Transaction"},
    {"epoch", (PyCFunction)binding_epoch, METH_NOARGS, "Number of commits."},
    {"block_depth", (PyCFunction)binding_depth, METH_NOARGS,
     "Of the calling thread's transaction block; 0: it is in none."},
    {"rollbacks", (PyCFunction)binding_rollbacks, METH_NOARGS,
     "Changes when what was found before is to be forgotten."},
    {"find", (PyCFunction)(void (*)(void))binding_find, METH_FASTCALL,
     "find(directory, path) -> Found or None: a description, which holds until the next change"},
    {"get", (PyCFunction)(void (*)(void))binding_get, METH_FASTCALL,
     "get(directory, path, describe) -> the array or tensor that lives over the object's block, or "
     "(describe: always) a Found with its memory; None"},
    {"next", (PyCFunction)(void (*)(void))binding_next, METH_FASTCALL,
     "next(directory, node) -> (name, Found) or None. node 0: the first"},
    {"item", (PyCFunction)(void (*)(void))binding_item, METH_FASTCALL,
     "item(directory, path of a list, index, describe): as get"},
    {"slot", (PyCFunction)(void (*)(void))binding_slot, METH_FASTCALL,
     "slot(directory, path of slots, enum pms_slot_which): as get"},
    {"look_up", (PyCFunction)(void (*)(void))binding_look_up, METH_FASTCALL,
     "look_up(prefix, name, path) -> a plain value; else as get, describe=False; MISSING"},
    {"look_up_item", (PyCFunction)(void (*)(void))binding_look_up_item, METH_FASTCALL,
     "look_up_item(path of a list, index): as look_up"},
    {"put_plain", (PyCFunction)(void (*)(void))binding_put_plain, METH_FASTCALL,
     "put_plain(prefix, name, path, value) -> whether the value is plain, and is stored"},
    {"put_value", (PyCFunction)(void (*)(void))binding_put_value, METH_FASTCALL,
     "put_value(directory, path, value)"},
    {"flip", (PyCFunction)(void (*)(void))binding_flip, METH_FASTCALL,
     "flip(directory, path, turn) -> whether slots are there. turn: when they were flipped last; set."},
    {"flipped", (PyCFunction)binding_flipped, METH_O,
     "flipped(turn) -> whether that flip is not committed yet"},
    {"splice", (PyCFunction)(void (*)(void))binding_splice, METH_FASTCALL,
     "splice(directory, path of a list, index, remove, step, new): replaces items by new ones; index -1 is the end."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_new, handle_new},
    {Py_tp_dealloc, handle_dealloc},
    {Py_tp_traverse, handle_traverse},
    {Py_tp_clear, handle_clear},
    {Py_tp_methods, handle_methods},
    {Py_tp_getset, handle_getset},
    {Py_tp_members, handle_members},
    {Py_tp_doc, "Handle(path, options, lock_timeout, fail, ranges): an open pool."},
    {0, NULL},
};
static PyType_Spec handle_spec = {
    .name = "pmstore._engine._binding.Handle",
    .basicsize = sizeof(Handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = handle_slots,
};

int binding_add_handle(PyObject *module)
{
    if (!HandleType)
        HandleType = (PyTypeObject *)PyType_FromModuleAndSpec(module, &handle_spec, NULL);
    return HandleType ? PyModule_AddType(module, HandleType) : -1;
}
