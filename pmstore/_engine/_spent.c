/* Spent: which gradients an optimizer has used, and nobody has written since. They are dead to a
 * commit; all others are kept (see pmstore/torch/_state/gradients.py).
 *
 * A table by the gradient's address, with a weak reference: another object may come to have the
 * address. What the last commit did not find at a parameter is forgotten by raising `turn`. */
#include "_binding.h"

static PyTypeObject *SpentType;
static PyObject *grad_name, *params_name, *version_name, *trained_name;

struct used {
    PyObject *gradient; /* borrowed: an address. NULL: free */
    PyObject *weak;
    long long version;
    uint64_t turn; /* another than the table's: forgotten */
};

typedef struct {
    PyObject_HEAD struct used *used;
    size_t room;              /* a power of 2, or 0 */
    size_t count;             /* that are not free, forgotten ones too */
    uint64_t turn, last_turn; /* the last one that was given to an entry, or begun */
    PyObject *version;        /* version(gradient), or None: its `_version` */
} Spent;

enum state { NONE, DEAD, LIVE };

static struct used *slot_of(struct used *used, size_t room, const PyObject *gradient)
{
    size_t at = ((uintptr_t)gradient >> 4) * 0x9e3779b97f4a7c15u >> 20;
    while (used[at & (room - 1)].gradient && used[at & (room - 1)].gradient != gradient)
        at++;
    return &used[at & (room - 1)];
}

/* Room for one more; forgotten ones go. Lets go of weak references without callbacks alone: runs
 * no code. */
static int make_room(Spent *s)
{
    if (s->count * 2 < s->room)
        return 0;
    size_t alive = 0, room = 64;
    for (size_t i = 0; i < s->room; i++)
        alive += s->used[i].gradient && s->used[i].turn == s->turn;
    while (room < 4 * alive)
        room *= 2;
    struct used *more = PyMem_Calloc(room, sizeof *more), *old = s->used;
    if (!more) {
        PyErr_NoMemory();
        return -1;
    }
    size_t old_room = s->room;
    for (size_t i = 0; i < old_room; i++)
        if (old[i].gradient && old[i].turn == s->turn)
            *slot_of(more, room, old[i].gradient) = old[i];
    s->used = more;
    s->room = room;
    s->count = alive;
    for (size_t i = 0; i < old_room; i++)
        if (old[i].gradient && old[i].turn != s->turn)
            Py_DECREF(old[i].weak);
    PyMem_Free(old);
    return 0;
}

/* -1 with an exception set. A version is never negative. */
static long long version_of(const Spent *s, PyObject *gradient)
{
    PyObject *told = s->version == Py_None ? PyObject_GetAttr(gradient, version_name)
                                           : PyObject_CallOneArg(s->version, gradient);
    long long version = told ? PyLong_AsLongLong(told) : -1;
    Py_XDECREF(told);
    return version;
}

static int add(Spent *s, PyObject *gradient)
{
    long long version = version_of(s, gradient);
    PyObject *weak = version < 0 ? NULL : PyWeakref_NewRef(gradient, NULL);
    if (!weak || make_room(s) < 0) {
        Py_XDECREF(weak);
        return -1;
    }
    struct used *u = slot_of(s->used, s->room, gradient);
    PyObject *before = u->weak;
    s->count += !u->gradient;
    *u = (struct used){gradient, weak, version, s->turn};
    Py_XDECREF(before);
    return 0;
}

static bool is_of(const struct used *u, PyObject *gradient)
{
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX >= 0x030D0000
    PyObject *object;
    if (PyWeakref_GetRef(u->weak, &object) <= 0)
        return false;
    Py_DECREF(object); /* not the last one: the caller has it */
    return object == gradient;
#else
    return PyWeakref_GetObject(u->weak) == gradient;
#endif
}

/* Of a gradient that is there; -1 with an exception set. Its entry will be of the turn. */
static int state_of(Spent *s, PyObject *gradient, uint64_t turn)
{
    struct used *u = s->room ? slot_of(s->used, s->room, gradient) : NULL;
    if (!u || !u->gradient || (u->turn != s->turn && u->turn != turn) || !is_of(u, gradient))
        return LIVE;
    long long was = u->version;
    u->turn = turn;
    long long version = version_of(s, gradient); /* may run code */
    return version < 0 ? -1 : version == was ? DEAD : LIVE;
}

/* ---- the methods ---- */

static int spend_all(Spent *s, PyObject *parameters)
{
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(parameters); i++) {
        PyObject *gradient = PyObject_GetAttr(PyList_GetItem(parameters, i), grad_name);
        status = !gradient ? -1 : gradient == Py_None ? 0 : add(s, gradient);
        Py_XDECREF(gradient);
    }
    return status;
}

/* spend(groups): an optimizer has just used the gradients of their parameters. */
static PyObject *spent_spend(Spent *s, PyObject *groups)
{
    if (!PyList_Check(groups)) {
        PyErr_SetString(PyExc_TypeError, "spend takes a list of groups");
        return NULL;
    }
    int status = 0;
    for (Py_ssize_t i = 0; status == 0 && i < PyList_Size(groups); i++) {
        PyObject *held = PyObject_GetItem(PyList_GetItem(groups, i), params_name);
        PyObject *parameters = held && !PyList_Check(held) ? PySequence_List(held)
                                                           : Py_XNewRef(held);
        status = parameters ? spend_all(s, parameters) : -1;
        Py_XDECREF(parameters);
        Py_XDECREF(held);
    }
    return status == 0 ? Py_NewRef(Py_None) : NULL;
}

/* is_spent(gradient) */
static PyObject *spent_is(Spent *s, PyObject *gradient)
{
    int state = state_of(s, gradient, s->turn);
    return state < 0 ? NULL : PyBool_FromLong(state == DEAD);
}

static int look_at(Spent *s, PyObject *parameter, uint64_t turn)
{
    PyObject *gradient = PyObject_GetAttr(parameter, grad_name);
    int state = !gradient ? -1 : gradient == Py_None ? NONE : state_of(s, gradient, turn);
    Py_XDECREF(gradient);
    return state;
}

/* look(parameters) -> of each a byte: 0: it has no gradient; 1: a dead one; 2: one to be kept. What
 * is no gradient of theirs is forgotten: one that goes and comes again is another one to the
 * program. */
static PyObject *spent_look(Spent *s, PyObject *parameters)
{
    if (!PyList_Check(parameters)) {
        PyErr_SetString(PyExc_TypeError, "look takes a list");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(parameters);
    char *states = PyMem_Malloc((size_t)count + 1);
    if (!states)
        return PyErr_NoMemory();
    int state = 0;
    uint64_t turn = ++s->last_turn;
    for (Py_ssize_t i = 0; state >= 0 && i < count; i++) {
        PyObject *parameter = PyList_GetItem(parameters, i);
        state = parameter ? look_at(s, parameter, turn) : -1;
        states[i] = (char)state;
    }
    PyObject *result = state < 0 ? NULL : PyBytes_FromStringAndSize(states, count);
    if (state >= 0)
        s->turn = turn;
    PyMem_Free(states);
    return result;
}

static PyObject *spent_clear_all(Spent *s, PyObject *unused)
{
    (void)unused;
    s->turn = ++s->last_turn;
    Py_RETURN_NONE;
}

/* trained(parameters) -> of each a byte: whether it requires a gradient */
PyObject *binding_trained(PyObject *module, PyObject *parameters)
{
    (void)module;
    if (!PyList_Check(parameters)) {
        PyErr_SetString(PyExc_TypeError, "trained takes a list");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(parameters);
    char *flags = PyMem_Malloc((size_t)count + 1);
    if (!flags)
        return PyErr_NoMemory();
    Py_ssize_t i = 0;
    for (; i < count; i++) {
        PyObject *parameter = PyList_GetItem(parameters, i);
        PyObject *told = parameter ? PyObject_GetAttr(parameter, trained_name) : NULL;
        if (!told)
            break;
        flags[i] = told == Py_True;
        Py_DECREF(told);
    }
    PyObject *result = i < count ? NULL : PyBytes_FromStringAndSize(flags, count);
    PyMem_Free(flags);
    return result;
}

/* ---- life ---- */

static PyObject *spent_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *version;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O", &version))
        return NULL;
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Spent *s = (Spent *)alloc(type, 0);
    if (s)
        s->version = Py_NewRef(version);
    return (PyObject *)s;
}

static int spent_traverse(Spent *s, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(s));
    Py_VISIT(s->version);
    return 0;
}

static int spent_clear(Spent *s)
{
    Py_CLEAR(s->version);
    return 0;
}

static void spent_dealloc(Spent *s)
{
    PyTypeObject *type = Py_TYPE(s);
    PyObject_GC_UnTrack(s);
    spent_clear(s);
    for (size_t i = 0; i < s->room; i++)
        Py_XDECREF(s->used[i].weak);
    PyMem_Free(s->used);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(s);
    Py_DECREF(type);
}

static PyMethodDef spent_methods[] = {
    {"spend", (PyCFunction)spent_spend, METH_O,
     "spend(groups): an optimizer has just used the gradients of their parameters"},
    {"is_spent", (PyCFunction)spent_is, METH_O,
     "is_spent(gradient) -> whether it is as an optimizer left it"},
    {"look", (PyCFunction)spent_look, METH_O,
     "look(parameters) -> of each a byte: 0: it has no gradient; 1: a spent one; 2: another. What is "
     "no gradient of theirs is forgotten"},
    {"clear", (PyCFunction)spent_clear_all, METH_NOARGS, "clear(): nothing is spent"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot spent_slots[] = {
    {Py_tp_new, spent_new},
    {Py_tp_dealloc, spent_dealloc},
    {Py_tp_traverse, spent_traverse},
    {Py_tp_clear, spent_clear},
    {Py_tp_methods, spent_methods},
    {Py_tp_doc,
     "Spent(version): gradients that an optimizer has used. version: of a gradient, or None: its _version."},
    {0, NULL},
};
static PyType_Spec spent_spec = {
    .name = "pmstore._engine._binding.Spent",
    .basicsize = sizeof(Spent),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = spent_slots,
};

int binding_add_spent(PyObject *module)
{
    if ((!grad_name && !(grad_name = PyUnicode_InternFromString("grad"))) ||
        (!params_name && !(params_name = PyUnicode_InternFromString("params"))) ||
        (!version_name && !(version_name = PyUnicode_InternFromString("_version"))) ||
        (!trained_name && !(trained_name = PyUnicode_InternFromString("requires_grad"))))
        return -1;
    if (!SpentType)
        SpentType = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spent_spec, NULL);
    return SpentType ? PyModule_AddType(module, SpentType) : -1;
}
