/* pmstore.engine._binding: the parts of the Python layer in which no bytecode may run.
 *
 * A KeyboardInterrupt can arrive between any two bytecodes. Where the engine has acted and
 * Python does not know it yet, it would leave a lock held, a block pinned or a transaction open.
 * So these steps are C functions, after which the engine's state and an object's state always
 * agree:
 *
 *   Handle       opens a pool and owns it: the last reference closes it (roll back) and releases
 *                it
 *   Memory       pins a block and exports it as a buffer: the last reference unpins it
 *   Transaction  _transaction.c: the with statement's two halves
 *
 * _objects.c has the methods that look objects up and store values, _memory.c the Memory and
 * what was given out over it.
 *
 * This module does not link with the engine: `bind` is given the addresses of the functions in
 * pmstore.engine._native, so that there is one engine in the process. A status becomes an
 * exception in failures.py alone: `fail` is its callable.
 *
 * The GIL is given up around every call of the engine that can wait, and the engine never takes
 * it. Supported: the main interpreter of a build with a GIL. A subinterpreter gets an
 * ImportError; a free-threaded build takes its GIL back. */
#include "_binding.h"

#include <structmember.h>

#include <math.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

struct binding_engine binding_engine;

pid_t binding_process;
static void after_fork_in_child(void) { binding_process = getpid(); }

bool binding_is_here(const Handle *h) { return h->process == binding_process; }

int64_t binding_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t binding_timeout_ns(PyObject *seconds)
{
    if (seconds == Py_None)
        return -1;
    double value = PyFloat_AsDouble(seconds);
    if (value == -1.0 && PyErr_Occurred())
        return -2;
    if (isnan(value)) {
        PyErr_SetString(PyExc_ValueError, "a timeout is a number of seconds or None, not nan");
        return -2;
    }
    if (value < 0 || value > 9e9)
        return -1;
    return (int64_t)(value * 1e9);
}

/* ---- Handle ---- */

static PyTypeObject *HandleType;

PyObject *binding_raise(Handle *h, const struct pms_error *error)
{
    PyObject *result = PyObject_CallFunction(h->fail, "K", (unsigned long long)(uintptr_t)error);
    if (result) { /* it always raises */
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "pmstore: a failed call raised nothing");
    }
    return NULL;
}

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
        PyErr_SetString(PyExc_SystemError, "pmstore.engine._binding.bind was not called");
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
            binding_raise(h, &error);
            break;
        }
        if (PyErr_CheckSignals() < 0)
            break;
    }
    Py_DECREF(h);
    return NULL;
}

PyObject *binding_take_lock(Handle *h)
{
    if (!h->lock)
        return NULL;
    PyObject *lock = Py_NewRef(h->lock), *taken = PyObject_CallMethod(lock, "acquire", NULL);
    if (!taken)
        Py_CLEAR(lock);
    Py_XDECREF(taken);
    return lock;
}

void binding_let_go(PyObject *lock)
{
    if (!lock)
        return;
    PyObject *done = PyObject_CallMethod(lock, "release", NULL);
    if (!done)
        PyErr_WriteUnraisable(lock);
    Py_XDECREF(done);
    Py_DECREF(lock);
}

static int handle_traverse(Handle *h, visitproc visit, void *arg)
{
    Py_VISIT(h->mirrors);
    Py_VISIT(h->lock);
    Py_VISIT(h->take_in);
    Py_VISIT(Py_TYPE(h));
    Py_VISIT(h->fail);
    Py_VISIT(h->ranges);
    return 0;
}

static int handle_clear(Handle *h)
{
    Py_CLEAR(h->mirrors);
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
        binding_raise(h, &error);
        return -1;
    }
}

/* close(commit, wait_seconds, asking, ending): waits for a block of another thread if it is to
 * commit, calls asking (whatever it raises, nothing is committed) and ending, and closes,
 * whatever was raised: no interrupt leaves half of a store behind. */
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
        commit = result != NULL;
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
        binding_raise(h, &error);
    keep_first(first);
    if (!first[0])
        Py_RETURN_NONE;
    PyErr_Restore(first[0], first[1], first[2]);
    return NULL;
}

/* ---- declared writes ---- */

void binding_ranges_init(struct ranges *r)
{
    r->at = r->few;
    r->count = 0;
    r->room = FEW_RANGES;
}

void binding_ranges_free(struct ranges *r)
{
    if (r->at != r->few)
        PyMem_Free(r->at);
}

static int ranges_add(struct ranges *r, uint64_t addr, uint64_t bytes)
{
    if (!bytes)
        return 0;
    if (r->count == r->room) {
        struct pms_range *more = PyMem_Malloc(2 * r->room * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, r->at, r->count * sizeof *more);
        binding_ranges_free(r);
        r->at = more;
        r->room *= 2;
    }
    r->at[r->count++] = (struct pms_range){addr, bytes};
    return 0;
}

/* Lowest and one past the highest byte of a strided buffer. */
static int ranges_add_buffer(struct ranges *r, const Py_buffer *view)
{
    intptr_t low = 0, high = view->itemsize;
    for (int i = 0; i < view->ndim; i++) {
        if (!view->shape[i])
            return 0;
        intptr_t span = (view->shape[i] - 1) * view->strides[i];
        if (span < 0)
            low += span;
        else
            high += span;
    }
    return ranges_add(r, (uint64_t)((intptr_t)view->buf + low), (uint64_t)(high - low));
}

static int ranges_add_object(struct ranges *r, Handle *h, PyObject *object)
{
    if (PyObject_CheckBuffer(object)) {
        Py_buffer view;
        if (PyObject_GetBuffer(object, &view, PyBUF_STRIDES) == 0) {
            int status = ranges_add_buffer(r, &view);
            PyBuffer_Release(&view);
            return status;
        }
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear(); /* an array that does not export itself: ask Python below */
    }
    PyObject *list = PyObject_CallOneArg(h->ranges, object);
    if (!list)
        return -1;
    PyObject *fast = PySequence_Fast(list, "ranges");
    Py_DECREF(list);
    if (!fast)
        return -1;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PySequence_Fast_GET_SIZE(fast); i++) {
        unsigned long long addr, bytes;
        PyObject *pair = PySequence_Fast_GET_ITEM(fast, i);
        if (!PyTuple_Check(pair) || !PyArg_ParseTuple(pair, "KK", &addr, &bytes))
            status = -1;
        else
            status = ranges_add(r, addr, bytes);
    }
    Py_DECREF(fast);
    return status;
}

int binding_ranges_add_all(struct ranges *r, Handle *h, PyObject *writes)
{
    if (PyObject_CheckBuffer(writes))
        return ranges_add_object(r, h, writes);
    PyObject *fast = PySequence_Fast(writes,
                                     "writes is a sequence of arrays or tensors of this store");
    if (!fast)
        return -1;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PySequence_Fast_GET_SIZE(fast); i++) {
        /* the list may change under a Python call */
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(fast, i));
        status = ranges_add_object(r, h, item);
        Py_DECREF(item);
    }
    Py_DECREF(fast);
    return status;
}

static PyObject *handle_will_write(Handle *h, PyObject *writes)
{
    struct ranges r;
    binding_ranges_init(&r);
    PyObject *result = NULL;
    if (binding_ranges_add_all(&r, h, writes) == 0) {
        struct pms_error error = {0};
        int status;
        Py_BEGIN_ALLOW_THREADS status = binding_engine.will_write(h->pool, r.at, r.count, &error);
        Py_END_ALLOW_THREADS result = status == PMS_OK ? Py_NewRef(Py_None)
                                                       : binding_raise(h, &error);
    }
    binding_ranges_free(&r);
    return result;
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
    Py_END_ALLOW_THREADS if (status != PMS_OK) return binding_raise(h, &error);
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
    {"mirrors", T_OBJECT, offsetof(Handle, mirrors), 0,
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
    {"will_write", (PyCFunction)handle_will_write, METH_O,
     "will_write(arrays): captures them now."},
    {"transaction", (PyCFunction)(void (*)(void))binding_transaction, METH_FASTCALL,
     "transaction(writes, timeout) -> Transaction"},
    {"rollbacks", (PyCFunction)binding_rollbacks, METH_NOARGS,
     "Changes when what was found before is to be forgotten."},
    {"find", (PyCFunction)(void (*)(void))binding_find, METH_FASTCALL,
     "find(directory, path) -> Found or None: a description, which holds until the next change"},
    {"get", (PyCFunction)(void (*)(void))binding_get, METH_FASTCALL,
     "get(directory, path, describe) -> the array or tensor that lives over the object's block, or (describe: always) a Found with its memory; None"},
    {"next", (PyCFunction)(void (*)(void))binding_next, METH_FASTCALL,
     "next(directory, node) -> (name, Found) or None. node 0: the first"},
    {"item", (PyCFunction)(void (*)(void))binding_item, METH_FASTCALL,
     "item(directory, path of a list, index, describe): as get"},
    {"slot", (PyCFunction)(void (*)(void))binding_slot, METH_FASTCALL,
     "slot(directory, path of slots, enum pms_slot_which): as get"},
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
    .name = "pmstore.engine._binding.Handle",
    .basicsize = sizeof(Handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = handle_slots,
};

/* ---- module ---- */

/* bind(addresses of the functions of struct binding_engine, in its order) */
static PyObject *bind(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long f[23];
    if (PyTuple_GET_SIZE(args) != 23) {
        PyErr_SetString(PyExc_TypeError, "bind takes the addresses of 23 functions");
        return NULL;
    }
    for (int i = 0; i < 23; i++)
        f[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args, i));
    if (PyErr_Occurred())
        return NULL;
    binding_engine = (struct binding_engine){
        .open = (__typeof__(binding_engine.open))(uintptr_t)f[0],
        .close = (__typeof__(binding_engine.close))(uintptr_t)f[1],
        .release = (__typeof__(binding_engine.release))(uintptr_t)f[2],
        .enter = (__typeof__(binding_engine.enter))(uintptr_t)f[3],
        .commit_pending = (__typeof__(binding_engine.commit_pending))(uintptr_t)f[4],
        .leave = (__typeof__(binding_engine.leave))(uintptr_t)f[5],
        .wait = (__typeof__(binding_engine.wait))(uintptr_t)f[6],
        .depth = (__typeof__(binding_engine.depth))(uintptr_t)f[7],
        .set_tasks = (__typeof__(binding_engine.set_tasks))(uintptr_t)f[8],
        .will_write = (__typeof__(binding_engine.will_write))(uintptr_t)f[9],
        .get = (__typeof__(binding_engine.get))(uintptr_t)f[10],
        .unpin = (__typeof__(binding_engine.unpin))(uintptr_t)f[11],
        .rollbacks = (__typeof__(binding_engine.rollbacks))(uintptr_t)f[12],
        .find = (__typeof__(binding_engine.find))(uintptr_t)f[13],
        .next = (__typeof__(binding_engine.next))(uintptr_t)f[14],
        .item = (__typeof__(binding_engine.item))(uintptr_t)f[15],
        .put_value = (__typeof__(binding_engine.put_value))(uintptr_t)f[16],
        .flip = (__typeof__(binding_engine.flip))(uintptr_t)f[17],
        .epoch = (__typeof__(binding_engine.epoch))(uintptr_t)f[18],
        .splice = (__typeof__(binding_engine.splice))(uintptr_t)f[19],
        .put_backs = (__typeof__(binding_engine.put_backs))(uintptr_t)f[20],
        .slot = (__typeof__(binding_engine.slot))(uintptr_t)f[21],
        .commit = (__typeof__(binding_engine.commit))(uintptr_t)f[22],
    };
    binding_engine.set_tasks(binding_whose);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"bind", bind, METH_VARARGS,
     "bind(the addresses of the functions of struct binding_engine, in its order)"},
    {"exchange_with", binding_exchange_with, METH_VARARGS,
     "exchange_with(torch's DLPack capsule or None, look): how tensors are looked at"},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    if (!*type)
        *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

static int module_exec(PyObject *module)
{
    /* Python 3.12 and later are told by Py_mod_multiple_interpreters; this says it to all. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(
            PyExc_ImportError,
            "pmstore works in the main interpreter only: its types and the engine are one for the process");
        return -1;
    }
    if (!binding_process) { /* once in a process */
        binding_process = getpid();
        pthread_atfork(NULL, NULL, after_fork_in_child);
    }
    if (add_type(module, &handle_spec, &HandleType) < 0 || binding_add_memory(module) < 0 ||
        binding_add_transaction(module) < 0 || binding_add_found(module) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    /* free-threaded builds are not supported: the GIL orders Transaction.entered */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pmstore.engine._binding",
    .m_doc = "The steps between Python and the engine that no interrupt may split. See _binding.c.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__binding(void) { return PyModuleDef_Init(&module_def); }
