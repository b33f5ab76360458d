/* Transaction: the two halves of `with store.transaction()`, each in one step that no interrupt
 * can split.
 *
 * __enter__ takes the block (for the running task, if an event loop runs in this thread),
 * commits what is pending and captures what was declared. __exit__ commits or rolls back.
 * __aenter__ and __aexit__ are block_wait.py around the same.
 *
 * If an exception is raised between the two halves where Python does not call __exit__ (a
 * tracing tool can do that; a generator or a task that is dropped in the middle), the last
 * reference to the Transaction rolls back, in whatever thread that goes. */
#include "_binding.h"

#include <structmember.h>

/* When a block calls the store's hook: before it commits what is pending, before it commits,
 * after it was left without. What it raises in the first two is raised instead, and nothing is
 * begun, or the block rolled back. */
enum when { ENTERING, COMMITTING, ROLLED_BACK };

static PyTypeObject *TransactionType;

typedef struct {
    PyObject_HEAD Handle *handle;
    PyObject *writes; /* or NULL */
    /* or NULL. It lives as long as the block is its own: the engine has its address */
    PyObject *task;
    int64_t timeout;
    int entered;              /* times, in the block of */
    struct pms_entered first; /* the first of them */
} Transaction;

/* ---- tasks ---- */

static PyObject *running_loop, *task_of; /* of asyncio, once the program has imported it */

static int find_asyncio(void)
{
    static PyObject *events_name, *tasks_name;
    if (!events_name && !(events_name = PyUnicode_InternFromString("asyncio.events")))
        return 0;
    if (!tasks_name && !(tasks_name = PyUnicode_InternFromString("asyncio.tasks")))
        return 0;
    PyObject *modules = PyImport_GetModuleDict();
    PyObject *events = PyDict_GetItemWithError(modules, events_name);
    PyObject *tasks = events ? PyDict_GetItemWithError(modules, tasks_name) : NULL;
    if (!tasks)
        return 0;
    PyObject *loop = PyObject_GetAttrString(events, "_get_running_loop"),
             *task = PyObject_GetAttrString(tasks, "current_task");
    /* another thread is importing them: it runs no loop yet, nor does this one */
    if (!loop || !task) {
        Py_XDECREF(loop);
        Py_XDECREF(task);
        PyErr_Clear();
        return 0;
    }
    running_loop = loop;
    task_of = task;
    return 1;
}

/* The task that runs, or the event loop if it runs something else; NULL if none runs in this
 * thread, or with an exception set. */
static PyObject *current_task(void)
{
    if (!task_of && !find_asyncio())
        return NULL;
    PyObject *loop = PyObject_CallNoArgs(running_loop);
    if (!loop || loop == Py_None) {
        Py_XDECREF(loop);
        return NULL;
    }
    PyObject *task = PyObject_CallOneArg(task_of, loop);
    if (task == Py_None) {
        Py_DECREF(task);
        return loop;
    }
    Py_DECREF(loop);
    return task;
}

static bool is_over(PyObject *owner)
{
    PyObject *over = PyObject_CallMethod(
        owner, PyObject_HasAttrString(owner, "done") ? "done" : "is_closed", NULL);
    bool yes = over && PyObject_IsTrue(over) == 1;
    Py_XDECREF(over);
    return yes;
}

enum pms_whose binding_whose(const _Atomic uint64_t *task)
{
    enum pms_whose whose = PMS_ANOTHERS;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *owner = (PyObject *)(uintptr_t)atomic_load(task);
    /* still: then its Transaction has it, which lets go of it with the GIL, after the block */
    if (owner) {
        Py_INCREF(owner);
        PyObject *now = current_task();
        if (now == owner)
            whose = PMS_MINE;
        else if (!PyErr_Occurred() && is_over(owner))
            whose = PMS_OVER;
        Py_XDECREF(now);
        Py_DECREF(owner);
    }
    /* comes again, where it can be raised */
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        PyErr_SetInterrupt();
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
    return whose;
}

/* ---- entering ---- */

/* handle.transaction(writes, timeout_seconds) */
PyObject *binding_transaction(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "transaction(writes, timeout)");
        return NULL;
    }
    int64_t timeout = binding_timeout_ns(args[1]);
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

static int call_hook(Handle *h, enum when when)
{
    if (!h->hook)
        return 0;
    PyObject *hook = Py_NewRef(h->hook), *result = PyObject_CallFunction(hook, "i", (int)when);
    Py_DECREF(hook);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* That a thread is waited for whatever the timeout: one that Python has joined may not have
 * ended for the kernel yet. */
#define LEAST_NS 20000000ll

enum patience {
    WAIT, /* as long as the timeout says */
    TRY,  /* not at all, and raise nothing: 1 is returned */
    LAST, /* not at all */
};

/* Leaves what was just entered; nothing has been written in it. An exception is set, and stays. */
static void give_back(Transaction *t, const struct pms_entered *entry)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_BEGIN_ALLOW_THREADS binding_engine.leave(t->handle->pool, entry, PMS_AS_IT_IS, NULL);
    Py_END_ALLOW_THREADS PyErr_Restore(type, value, trace);
}

/* Takes the block, in slices between which signal handlers run, and captures the ranges. 0: it is
 * done; 1: it is busy (patience: TRY); HOOK_FIRST: it is taken, and a hook comes before anything is
 * committed or captured; -1 with an exception set. */
#define HOOK_FIRST 2
static int take(Transaction *t, PyObject *task, enum patience patience, const struct ranges *r,
                struct pms_entered *entry)
{
    Handle *h = t->handle;
    int64_t timeout = patience == WAIT ? t->timeout : 0, deadline = 0, left = timeout;
    int64_t least = patience == WAIT ? LEAST_NS : 0;
    for (;;) {
        struct pms_error error = {0};
        int64_t slice = timeout < 0 || left > SLICE_NS ? SLICE_NS : left > least ? left : least;
        int status, captured = PMS_OK;
        /* in each slice: another thread may have brought one while this one waited */
        bool hooked = h->hook != NULL;
        Py_BEGIN_ALLOW_THREADS status = binding_engine.enter(h->pool, (uint64_t)(uintptr_t)task,
                                                             !hooked, slice, entry, &error);
        if (status == PMS_OK && !hooked && r->count)
            captured = binding_engine.will_write(h->pool, r->at, r->count, &error);
        Py_END_ALLOW_THREADS if (captured != PMS_OK)
        {
            binding_raise(h, captured, &error);
            give_back(t, entry);
            return -1;
        }
        if (status == PMS_OK)
            return hooked ? HOOK_FIRST : 0;
        bool interrupted = error.sys_errno == EINTR &&
                           (status == PMS_E_STATE || status == PMS_E_BUSY);
        if (timeout > 0) {
            /* the clock is read only if one has to wait; the first slice counts too */
            if (!deadline)
                deadline = binding_now_ns() +
                           (status == PMS_E_BUSY && !interrupted ? timeout - slice : timeout);
            left = deadline - binding_now_ns();
        }
        if (patience == TRY && status == PMS_E_BUSY)
            return 1;
        if (!interrupted && !(status == PMS_E_BUSY && error.holder && (timeout < 0 || left > 0))) {
            binding_raise(h, status, &error);
            return -1;
        }
        if (PyErr_CheckSignals() < 0)
            return -1;
    }
}

/* What is pending is committed, by whoever has just taken the block, with the hook; then the
 * ranges are captured. */
static int begin(Transaction *t, const struct pms_entered *entry, const struct ranges *r)
{
    Handle *h = t->handle;
    struct pms_error error = {0};
    int status = PMS_OK;
    bool hook = entry->depth == 1;
    if (hook && call_hook(h, ENTERING) < 0)
        return -1;
    if (!hook && !r->count)
        return 0;
    Py_BEGIN_ALLOW_THREADS if (hook) status = binding_engine.commit_pending(h->pool, entry, &error);
    if (status == PMS_OK && r->count)
        status = binding_engine.will_write(h->pool, r->at, r->count, &error);
    Py_END_ALLOW_THREADS if (status == PMS_OK) return 0;
    binding_raise(h, status, &error);
    return -1;
}

/* As take. */
static int enter(Transaction *t, enum patience patience)
{
    struct ranges r;
    struct pms_entered entry;
    binding_ranges_init(&r);
    PyObject *task = current_task();
    int status = PyErr_Occurred() ? -1 : 0;
    if (status == 0 && t->writes)
        status = binding_ranges_add_all(&r, t->handle, t->writes);
    if (status == 0)
        status = binding_take_in(t->handle);
    if (status == 0)
        status = take(t, task, patience, &r, &entry);
    if (status == HOOK_FIRST && (status = begin(t, &entry, &r)) < 0)
        give_back(t, &entry);
    binding_ranges_free(&r);
    if (status == 0) { /* from here to the return nothing can fail, and no Python code runs */
        PyObject *before = NULL;
        if (t->entered && t->first.number != entry.number)
            t->entered = 0; /* that block was rolled back, and never left */
        if (t->entered++ == 0) {
            t->first = entry;
            before = t->task;
            t->task = Py_XNewRef(task);
        }
        Py_XDECREF(before);
    }
    Py_XDECREF(task);
    return status;
}

static PyObject *transaction_enter(Transaction *t, PyObject *unused)
{
    (void)unused;
    return enter(t, WAIT) < 0 ? NULL : Py_NewRef(t);
}

static PyObject *transaction_enter_if_free(Transaction *t, PyObject *last)
{
    int status = enter(t, last == Py_True ? LAST : TRY);
    return status < 0 ? NULL : PyBool_FromLong(status == 0);
}

/* ---- leaving ---- */

static PyObject *transaction_fault(Transaction *t, int32_t status, const char *what)
{
    struct pms_error error = {.status = status};
    snprintf(error.what, sizeof error.what, "%s", what);
    return binding_raise(t->handle, status, &error);
}

static PyObject *transaction_exit(Transaction *t, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "__exit__(type, value, traceback)");
        return NULL;
    }
    if (!t->entered)
        return transaction_fault(t, PMS_E_STATE, "this transaction object was not entered");
    Handle *h = t->handle;
    bool last = t->entered == 1, commit = args[0] == Py_None;
    struct pms_entered entry = {t->first.number, last ? t->first.depth : t->first.depth + 1};
    struct pms_error error = {0};
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    int status;
    bool hook = h->hook && entry.depth == 1 && binding_engine.depth(h->pool);
    if (commit && (binding_take_in(h) < 0 || (hook && call_hook(h, COMMITTING) < 0))) {
        PyErr_Fetch(&kind, &value, &trace);
        commit = false;
    }
    PyObject *lock = commit ? NULL : binding_take_lock(h);
    /* interrupted while it waited: the block is rolled back all the same, and then it is raised */
    if (PyErr_Occurred()) {
        Py_XDECREF(kind);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        PyErr_Fetch(&kind, &value, &trace);
    }
    PyObject *task = last ? t->task : NULL;
    if (last)
        t->task = NULL;
    /* before the GIL is given up: another thread may enter as soon as the engine lets it */
    t->entered--;
    Py_BEGIN_ALLOW_THREADS status = binding_engine.leave(h->pool, &entry,
                                                         commit ? PMS_COMMIT : PMS_UNDO, &error);
    Py_END_ALLOW_THREADS binding_let_go(lock);
    if (status == PMS_E_STATE && error.holder) { /* refused: it is open still, and has to be left */
        t->entered++;
        if (last)
            t->task = task;
        return binding_raise(h, status, &error);
    }
    Py_XDECREF(task);
    if (!commit || status != PMS_OK) {
        if (kind) {
            call_hook(h, ROLLED_BACK); /* what it raised first is what the user must see */
            PyErr_Restore(kind, value, trace);
            return NULL;
        }
        if (call_hook(h, ROLLED_BACK) < 0)
            return NULL;
    }
    /* If the block raised, its exception is what the user must see, not that the block is gone
     * (it was rolled back). */
    if (status == PMS_OK ||
        (!commit && (status == PMS_E_CLOSED || status == PMS_E_FORKED || status == PMS_E_STATE)))
        Py_RETURN_FALSE;
    return binding_raise(h, status, &error);
}

/* ---- async with ---- */

static PyObject *waiting(const char *function)
{
    PyObject *module = PyImport_ImportModule("pmstore._engine.block_wait"), *found = NULL;
    if (module)
        found = PyObject_GetAttrString(module, function);
    Py_XDECREF(module);
    return found;
}

static PyObject *transaction_aenter(Transaction *t, PyObject *unused)
{
    (void)unused;
    PyObject *function = waiting("enter"), *result = NULL;
    if (function && t->timeout < 0)
        result = PyObject_CallFunction(function, "OO", t, Py_None);
    else if (function)
        result = PyObject_CallFunction(function, "Od", t, (double)t->timeout / 1e9);
    Py_XDECREF(function);
    return result;
}

static PyObject *transaction_aexit(Transaction *t, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "__aexit__(type, value, traceback)");
        return NULL;
    }
    PyObject *function = waiting("leave"), *result = NULL;
    if (function)
        result = PyObject_CallFunctionObjArgs(function, (PyObject *)t, args[0], args[1], args[2],
                                              NULL);
    Py_XDECREF(function);
    return result;
}

/* ---- the type ---- */

static int transaction_traverse(Transaction *t, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(t));
    Py_VISIT(t->handle);
    Py_VISIT(t->writes);
    Py_VISIT(t->task);
    return 0;
}

static int transaction_clear(Transaction *t)
{
    Py_CLEAR(t->writes); /* the handle and the task are still needed to roll back */
    return 0;
}

static void transaction_dealloc(Transaction *t)
{
    PyTypeObject *type = Py_TYPE(t);
    PyObject_GC_UnTrack(t);
    if (t->entered && t->handle->process == binding_process) {
        struct pms_entered entry = t->first;
        Py_BEGIN_ALLOW_THREADS do /* entered, and the with statement was left without __exit__ */
            binding_engine.leave(t->handle->pool, &entry, PMS_UNDO, NULL);
        while (--t->entered && entry.depth > 1)
            ;
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(t->writes);
    Py_CLEAR(t->task);
    Py_CLEAR(t->handle);
    type->tp_free(t);
    Py_DECREF(type);
}

static PyMethodDef transaction_methods[] = {
    {"__enter__", (PyCFunction)transaction_enter, METH_NOARGS,
     "Commits what is pending, begins and captures the declared writes."},
    {"__exit__", (PyCFunction)(void (*)(void))transaction_exit, METH_FASTCALL,
     "Commits, or rolls back if the body raised."},
    {"__aenter__", (PyCFunction)transaction_aenter, METH_NOARGS,
     "As __enter__; waits without stopping the event loop."},
    {"__aexit__", (PyCFunction)(void (*)(void))transaction_aexit, METH_FASTCALL, "As __exit__."},
    {"enter_if_free", (PyCFunction)transaction_enter_if_free, METH_O,
     "enter_if_free(last): as __enter__, but does not wait: False if another is inside, or if it is "
     "the last time the error."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot transaction_slots[] = {
    {Py_tp_dealloc, transaction_dealloc},
    {Py_tp_traverse, transaction_traverse},
    {Py_tp_clear, transaction_clear},
    {Py_tp_methods, transaction_methods},
    {Py_tp_doc,
     "What Store.transaction() returns: a context manager. It may be entered again after it was left, and nested."},
    {0, NULL},
};
static PyType_Spec transaction_spec = {
    .name = "pmstore._engine._binding.Transaction",
    .basicsize = sizeof(Transaction),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = transaction_slots,
};

int binding_add_transaction(PyObject *module)
{
    if (!TransactionType)
        TransactionType = (PyTypeObject *)PyType_FromModuleAndSpec(module, &transaction_spec, NULL);
    return TransactionType ? PyModule_AddType(module, TransactionType) : -1;
}
