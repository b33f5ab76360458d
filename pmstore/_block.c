/* pmstore._block: the parts of the Python layer in which no bytecode may run.
 *
 * A KeyboardInterrupt can arrive between any two bytecodes. Where the engine has acted and Python does not know it yet, it
 * would leave a lock held, a block pinned or a transaction open. So these steps are C functions, after which the engine's
 * state and an object's state always agree:
 *
 *   Handle       opens a pool and owns it: the last reference closes it (roll back) and releases it
 *   Memory       pins a block and exports it as a buffer: the last reference unpins it
 *   Transaction  __enter__ begins (and captures what was declared), __exit__ ends: the with statement's two halves
 *
 * _objects.c has the methods that look objects up and store values, _memory.c the Memory and what was given out over it.
 *
 * If an exception is raised between the two halves where Python does not call __exit__ (a tracing tool can do that), the
 * last reference to the Transaction rolls back.
 *
 * This module does not link with the engine: `bind` is given the addresses of the functions in pmstore._native, so that
 * there is one engine in the process. A status becomes an exception in _ffi.py alone: `fail` is its callable.
 *
 * The GIL is given up around every call of the engine that can wait, and the engine never takes it. Supported: the main
 * interpreter of a build with a GIL. A subinterpreter gets an ImportError; a free-threaded build takes its GIL back. */
#include "_block.h"

#include <structmember.h>

#include <math.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

/* Python runs its signal handlers between two of these waits. */
#define SLICE_NS 50000000ll

struct block_engine block_engine;

/* In a fork child the store is the parent's: destructors there must not touch it, not even its locks. */
static pid_t this_process;
static void after_fork_in_child(void) { this_process = getpid(); }

bool block_is_here(const Handle *h) { return h->process == this_process; }

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Seconds (None or negative: for ever = -1) to nanoseconds. Returns -2 with an exception set if it is not a time. */
static int64_t timeout_ns(PyObject *seconds)
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

/* ---- Handle ------------------------------------------------------------------------------------------- */

/* When a block asks the store's mirrors: before it commits what is pending, before it commits, after it was left without. What
 * they raise in the first two is raised instead, and nothing is begun, or the block rolled back. */
enum when { ENTERING, COMMITTING, ROLLED_BACK };

static PyTypeObject *HandleType, *TransactionType;

PyObject *block_raise(Handle *h, const struct pms_error *error)
{
    PyObject *result = PyObject_CallFunction(h->fail, "K", (unsigned long long)(uintptr_t)error);
    if (result) { /* it always raises */
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "pmstore: a failed call raised nothing");
    }
    return NULL;
}

/* Handle(path, options, lock_timeout, fail, ranges): path as bytes, options = address of a struct pms_options. */
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
    int64_t timeout = timeout_ns(seconds);
    if (timeout == -2)
        return NULL;
    if (!block_engine.open) {
        PyErr_SetString(PyExc_SystemError, "pmstore._block.bind was not called");
        return NULL;
    }
    Handle *h = (Handle *)type->tp_alloc(type, 0);
    if (!h)
        return NULL;
    h->fail = Py_NewRef(fail);
    h->ranges = Py_NewRef(ranges);
    h->process = this_process;
    h->closed = 1; /* until there is a pool */
    if (!(h->memories = PyDict_New())) {
        Py_DECREF(h);
        return NULL;
    }

    struct pms_options options = *(const struct pms_options *)(uintptr_t)options_at;
    int64_t deadline = timeout > 0 ? now_ns() + timeout : 0;
    for (;;) {
        struct pms_error error = {0};
        int64_t left = timeout < 0 ? SLICE_NS : timeout == 0 ? 0 : deadline - now_ns();
        options.lock_timeout_ns = left < 0 ? 0 : left < SLICE_NS ? left : SLICE_NS;
        struct pms_pool *pool = NULL;
        int status;
        Py_BEGIN_ALLOW_THREADS
        status = block_engine.open(path, &options, &pool, &error);
        Py_END_ALLOW_THREADS
        if (status == PMS_OK) {
            h->pool = pool;
            h->closed = 0;
            return (PyObject *)h;
        }
        bool again = (status == PMS_E_LOCKED && (timeout < 0 || left > 0)) ||
                     ((status == PMS_E_OS || status == PMS_E_STATE || status == PMS_E_LOCKED) && error.sys_errno == EINTR);
        if (!again) {
            block_raise(h, &error);
            break;
        }
        if (PyErr_CheckSignals() < 0)
            break;
    }
    Py_DECREF(h);
    return NULL;
}

static int ask_mirrors(Handle *h, enum when when)
{
    if (!h->mirrors)
        return 0;
    PyObject *mirrors = Py_NewRef(h->mirrors), *result = PyObject_CallFunction(mirrors, "i", (int)when);
    Py_DECREF(mirrors);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* The lock, taken, to be given to let_go; NULL if there is none, or with an exception set. Whoever holds it waits for no block. */
static PyObject *take_lock(Handle *h)
{
    if (!h->lock)
        return NULL;
    PyObject *lock = Py_NewRef(h->lock), *taken = PyObject_CallMethod(lock, "acquire", NULL);
    if (!taken)
        Py_CLEAR(lock);
    Py_XDECREF(taken);
    return lock;
}

static void let_go(PyObject *lock)
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
        block_drop_memories(h);
    if (h->pool && h->process == this_process) {
        int was_open = !h->closed;
        struct pms_error error = {0};
        int status;
        Py_BEGIN_ALLOW_THREADS
        status = was_open ? block_engine.close(h->pool, 0, &error) : PMS_OK;
        block_engine.release(h->pool);
        Py_END_ALLOW_THREADS
        if (was_open) { /* as the io module does for files */
            PyObject *type_, *value, *trace;
            PyErr_Fetch(&type_, &value, &trace);
            if (PyErr_WarnEx(PyExc_ResourceWarning,
                             status == PMS_OK ? "a pmstore.Store was never closed; what was not committed is rolled back"
                                              : "a pmstore.Store was never closed, and closing it now failed", 1) < 0)
                PyErr_WriteUnraisable(NULL);
            PyErr_Restore(type_, value, trace);
        }
    }
    handle_clear(h);
    Py_CLEAR(h->memories);
    type->tp_free(h);
    Py_DECREF(type);
}

static PyObject *handle_close(Handle *h, PyObject *commit)
{
    int yes = PyObject_IsTrue(commit), status;
    if (yes < 0)
        return NULL;
    if (h->process != this_process) /* a fork child's copy: there is nothing here to close */
        Py_RETURN_NONE;
    struct pms_error error = {0};
    Py_BEGIN_ALLOW_THREADS
    status = block_engine.close(h->pool, yes, &error);
    Py_END_ALLOW_THREADS
    h->closed = 1; /* whatever it says: a close that fails has closed, and reports what could not be made durable */
    if (status == PMS_OK || status == PMS_E_CLOSED)
        Py_RETURN_NONE;
    return block_raise(h, &error);
}

/* ---- declared writes ---------------------------------------------------------------------------------- */

#define FEW 16
struct ranges {
    struct pms_range *at;
    uint64_t count, room;
    struct pms_range few[FEW]; /* the usual case needs no memory */
};

static void ranges_init(struct ranges *r)
{
    r->at = r->few;
    r->count = 0;
    r->room = FEW;
}

static void ranges_free(struct ranges *r)
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
        ranges_free(r);
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

/* writes: a sequence of arrays and tensors; one array alone is taken as such. */
static int ranges_add_all(struct ranges *r, Handle *h, PyObject *writes)
{
    if (PyObject_CheckBuffer(writes))
        return ranges_add_object(r, h, writes);
    PyObject *fast = PySequence_Fast(writes, "writes is a sequence of arrays or tensors of this store");
    if (!fast)
        return -1;
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PySequence_Fast_GET_SIZE(fast); i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(fast, i)); /* the list may change under a Python call */
        status = ranges_add_object(r, h, item);
        Py_DECREF(item);
    }
    Py_DECREF(fast);
    return status;
}

static PyObject *handle_will_write(Handle *h, PyObject *writes)
{
    struct ranges r;
    ranges_init(&r);
    PyObject *result = NULL;
    if (ranges_add_all(&r, h, writes) == 0) {
        struct pms_error error = {0};
        int status;
        Py_BEGIN_ALLOW_THREADS
        status = block_engine.will_write(h->pool, r.at, r.count, &error);
        Py_END_ALLOW_THREADS
        result = status == PMS_OK ? Py_NewRef(Py_None) : block_raise(h, &error);
    }
    ranges_free(&r);
    return result;
}

/* ---- Transaction -------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Handle *handle;
    PyObject *writes; /* or NULL */
    int64_t timeout;
    int entered; /* times, by `thread` */
    unsigned long thread;
} Transaction;

/* handle.transaction(writes, timeout_seconds) */
static PyObject *handle_transaction(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "transaction(writes, timeout)");
        return NULL;
    }
    int64_t timeout = timeout_ns(args[1]);
    if (timeout == -2)
        return NULL;
    Transaction *t = (Transaction *)TransactionType->tp_alloc(TransactionType, 0);
    if (!t)
        return NULL;
    t->handle = (Handle *)Py_NewRef(h);
    t->timeout = timeout;
    if (!(PyTuple_CheckExact(args[0]) && PyTuple_GET_SIZE(args[0]) == 0))
        t->writes = Py_NewRef(args[0]);
    return (PyObject *)t;
}

/* Begins, in slices between which signal handlers run, and captures the ranges. On an error nothing was begun. */
static int begin_and_capture(Transaction *t, const struct ranges *r)
{
    Handle *h = t->handle;
    int64_t timeout = t->timeout, deadline = 0, left = timeout;
    for (;;) {
        struct pms_error error = {0};
        int64_t slice = timeout < 0 || left > SLICE_NS ? SLICE_NS : left < 0 ? 0 : left;
        int status;
        Py_BEGIN_ALLOW_THREADS
        status = block_engine.begin(h->pool, slice, &error);
        if (status == PMS_OK && r->count) {
            status = block_engine.will_write(h->pool, r->at, r->count, &error);
            if (status != PMS_OK) /* leave what was just entered; nothing has been written in it */
                block_engine.end(h->pool, 0, NULL);
        }
        Py_END_ALLOW_THREADS
        if (status == PMS_OK)
            return 0;
        bool interrupted = error.sys_errno == EINTR && (status == PMS_E_STATE || status == PMS_E_BUSY);
        if (timeout > 0) {
            if (!deadline) /* the clock is read only if one has to wait; the first slice counts too */
                deadline = now_ns() + (status == PMS_E_BUSY && !interrupted ? timeout - slice : timeout);
            left = deadline - now_ns();
        }
        if (!interrupted && !(status == PMS_E_BUSY && (timeout < 0 || left > 0))) {
            block_raise(h, &error);
            return -1;
        }
        if (PyErr_CheckSignals() < 0)
            return -1;
    }
}

static PyObject *transaction_enter(Transaction *t, PyObject *unused)
{
    (void)unused;
    struct ranges r;
    ranges_init(&r);
    int status = t->writes ? ranges_add_all(&r, t->handle, t->writes) : 0;
    if (status == 0)
        status = block_take_in(t->handle);
    if (status == 0)
        status = ask_mirrors(t->handle, ENTERING);
    if (status == 0)
        status = begin_and_capture(t, &r);
    ranges_free(&r);
    if (status < 0)
        return NULL;
    /* From here to the return nothing can fail, and no Python code runs. */
    t->entered++;
    t->thread = PyThread_get_thread_ident();
    return Py_NewRef(t);
}

static PyObject *transaction_fault(Transaction *t, int32_t status, const char *what)
{
    struct pms_error error = {.status = status};
    snprintf(error.what, sizeof error.what, "%s", what);
    return block_raise(t->handle, &error);
}

static PyObject *transaction_exit(Transaction *t, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "__exit__(type, value, traceback)");
        return NULL;
    }
    if (!t->entered)
        return transaction_fault(t, PMS_E_STATE, "this transaction object was not entered");
    if (t->thread != PyThread_get_thread_ident())
        return transaction_fault(t, PMS_E_STATE, "a transaction is left by the thread that entered it");
    int commit = args[0] == Py_None, status;
    struct pms_error error = {0};
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    if (commit && (block_take_in(t->handle) < 0 || ask_mirrors(t->handle, COMMITTING) < 0)) {
        PyErr_Fetch(&kind, &value, &trace);
        commit = 0;
    }
    PyObject *lock = commit ? NULL : take_lock(t->handle);
    if (PyErr_Occurred()) { /* interrupted while it waited: the block is rolled back all the same, and then it is raised */
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        PyErr_Fetch(&kind, &value, &trace);
    }
    t->entered--; /* before the GIL is given up: another thread may enter as soon as the engine lets it */
    Py_BEGIN_ALLOW_THREADS
    status = block_engine.end(t->handle->pool, commit, &error);
    Py_END_ALLOW_THREADS
    let_go(lock);
    if (!commit || status != PMS_OK) {
        if (kind) {
            ask_mirrors(t->handle, ROLLED_BACK); /* what they raised first is what the user must see */
            PyErr_Restore(kind, value, trace);
            return NULL;
        }
        if (ask_mirrors(t->handle, ROLLED_BACK) < 0)
            return NULL;
    }
    /* If the block raised, its exception is what the user must see, not that the store is gone (which did roll back). */
    if (status == PMS_OK || (!commit && (status == PMS_E_CLOSED || status == PMS_E_FORKED)))
        Py_RETURN_FALSE;
    return block_raise(t->handle, &error);
}

static int transaction_traverse(Transaction *t, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(t));
    Py_VISIT(t->handle);
    Py_VISIT(t->writes);
    return 0;
}

static int transaction_clear(Transaction *t)
{
    Py_CLEAR(t->writes); /* the handle is still needed to roll back */
    return 0;
}

static void transaction_dealloc(Transaction *t)
{
    PyTypeObject *type = Py_TYPE(t);
    PyObject_GC_UnTrack(t);
    if (t->entered && t->handle->process == this_process && t->thread == PyThread_get_thread_ident()) {
        Py_BEGIN_ALLOW_THREADS
        while (t->entered--) /* entered, and the with statement was left without __exit__ */
            block_engine.end(t->handle->pool, 0, NULL);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(t->writes);
    Py_CLEAR(t->handle);
    type->tp_free(t);
    Py_DECREF(type);
}

static PyMethodDef transaction_methods[] = {
    {"__enter__", (PyCFunction)transaction_enter, METH_NOARGS,
     "Commits what is pending, starts the block and captures the declared writes."},
    {"__exit__", (PyCFunction)(void (*)(void))transaction_exit, METH_FASTCALL,
     "Commits the block, or rolls it back if it raised."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot transaction_slots[] = {
    {Py_tp_dealloc, transaction_dealloc},
    {Py_tp_traverse, transaction_traverse},
    {Py_tp_clear, transaction_clear},
    {Py_tp_methods, transaction_methods},
    {Py_tp_doc, "What Store.transaction() returns: a context manager. It may be entered again after it was left, and nested."},
    {0, NULL},
};
static PyType_Spec transaction_spec = {
    .name = "pmstore._block.Transaction",
    .basicsize = sizeof(Transaction),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = transaction_slots,
};

/* ---- Handle, the type ----------------------------------------------------------------------------------- */

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
    {"mirrors", T_OBJECT, offsetof(Handle, mirrors), 0, "None, or called with 0, 1 and 2 before and after what a block commits."},
    {"take_in", T_OBJECT, offsetof(Handle, take_in), 0, "None, or called with the Memories whose objects may have left them."},
    {"base", T_ULONGLONG, offsetof(Handle, base), 0, "Address of the heap."},
    {"read_only", T_BOOL, offsetof(Handle, read_only), 0, "Whether the store is open for reading."},
    {"lock", T_OBJECT, offsetof(Handle, lock), 0, "None, or held while a block is rolled back."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Handle, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef handle_methods[] = {
    {"close", (PyCFunction)handle_close, METH_O, "close(commit): ends what is pending and unlocks. Idempotent."},
    {"take_in_moved", (PyCFunction)block_take_in_all, METH_NOARGS, "Before a commit: brings back what left its memory, or raises."},
    {"will_write", (PyCFunction)handle_will_write, METH_O, "will_write(arrays): captures them now."},
    {"transaction", (PyCFunction)(void (*)(void))handle_transaction, METH_FASTCALL,
     "transaction(writes, timeout) -> Transaction"},
    {"rollbacks", (PyCFunction)block_rollbacks, METH_NOARGS, "Changes when what was found before is to be forgotten."},
    {"find", (PyCFunction)(void (*)(void))block_find, METH_FASTCALL,
     "find(directory, path) -> Found or None: a description, which holds until the next change"},
    {"get", (PyCFunction)(void (*)(void))block_get, METH_FASTCALL,
     "get(directory, path, describe) -> the array or tensor that lives over the object's block, or (describe: always) a Found with its memory; None"},
    {"item", (PyCFunction)(void (*)(void))block_item, METH_FASTCALL, "item(directory, path of a list, index, describe): as get"},
    {"slot", (PyCFunction)(void (*)(void))block_slot, METH_FASTCALL, "slot(directory, path of slots, enum pms_slot_which): as get"},
    {"put_value", (PyCFunction)(void (*)(void))block_put_value, METH_FASTCALL, "put_value(directory, path, value)"},
    {"flip", (PyCFunction)(void (*)(void))block_flip, METH_FASTCALL,
     "flip(directory, path, turn) -> whether slots are there. turn: when they were flipped last; set."},
    {"flipped", (PyCFunction)block_flipped, METH_O, "flipped(turn) -> whether that flip is not committed yet"},
    {"splice", (PyCFunction)(void (*)(void))block_splice, METH_FASTCALL,
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
    .name = "pmstore._block.Handle",
    .basicsize = sizeof(Handle),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = handle_slots,
};

/* ---- module --------------------------------------------------------------------------------------------- */

/* bind(addresses of the functions of struct block_engine, in its order) */
static PyObject *bind(PyObject *module, PyObject *args)
{
    (void)module;
    unsigned long long f[17];
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKKKKKKK", &f[0], &f[1], &f[2], &f[3], &f[4], &f[5], &f[6], &f[7], &f[8], &f[9], &f[10], &f[11], &f[12],
                          &f[13], &f[14], &f[15], &f[16]))
        return NULL;
    block_engine = (struct block_engine){
        .open = (__typeof__(block_engine.open))(uintptr_t)f[0],
        .close = (__typeof__(block_engine.close))(uintptr_t)f[1],
        .release = (__typeof__(block_engine.release))(uintptr_t)f[2],
        .begin = (__typeof__(block_engine.begin))(uintptr_t)f[3],
        .end = (__typeof__(block_engine.end))(uintptr_t)f[4],
        .will_write = (__typeof__(block_engine.will_write))(uintptr_t)f[5],
        .get = (__typeof__(block_engine.get))(uintptr_t)f[6],
        .unpin = (__typeof__(block_engine.unpin))(uintptr_t)f[7],
        .rollbacks = (__typeof__(block_engine.rollbacks))(uintptr_t)f[8],
        .find = (__typeof__(block_engine.find))(uintptr_t)f[9],
        .item = (__typeof__(block_engine.item))(uintptr_t)f[10],
        .put_value = (__typeof__(block_engine.put_value))(uintptr_t)f[11],
        .flip = (__typeof__(block_engine.flip))(uintptr_t)f[12],
        .epoch = (__typeof__(block_engine.epoch))(uintptr_t)f[13],
        .splice = (__typeof__(block_engine.splice))(uintptr_t)f[14],
        .put_backs = (__typeof__(block_engine.put_backs))(uintptr_t)f[15],
        .slot = (__typeof__(block_engine.slot))(uintptr_t)f[16],
    };
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"bind", bind, METH_VARARGS, "bind(open, close, release, begin, end, will_write, get, unpin, rollbacks, find, item, put_value, flip, epoch, splice, put_backs, slot)"},
    {"exchange_with", block_exchange_with, METH_VARARGS, "exchange_with(torch's DLPack capsule or None, look): how tensors are looked at"},
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
        PyErr_SetString(PyExc_ImportError, "pmstore works in the main interpreter only: its types and the engine are one for the process");
        return -1;
    }
    if (!this_process) { /* once in a process */
        this_process = getpid();
        pthread_atfork(NULL, NULL, after_fork_in_child);
    }
    if (add_type(module, &handle_spec, &HandleType) < 0 || block_add_memory(module) < 0 ||
        add_type(module, &transaction_spec, &TransactionType) < 0 || block_add_found(module) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED}, /* free-threaded builds are not supported: the GIL orders Transaction.entered */
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pmstore._block",
    .m_doc = "The steps between Python and the engine that no interrupt may split. See _block.c.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__block(void) { return PyModuleDef_Init(&module_def); }
