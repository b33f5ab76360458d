/* Watch: whether containers of a program hold the objects that they held, tensors lie where they
 * lay, and functions give what they gave. A training step asks that of thousands of objects, and
 * the answer is nearly always that nothing is another one.
 *
 * Objects are compared by identity, which says everything of those that cannot change. A Watch
 * has references to all that it has seen: no other object can come to have the same address. */
#include "_binding.h"

static PyTypeObject *WatchType;

enum found { SAME, VALUES, OTHERS };

struct table {
    PyObject *container; /* a dict or a list */
    Py_ssize_t items;    /* objects in it: of a dict keys and values */
    Py_ssize_t size;  /* of a dict some keys of which are looked at alone: how many it has; or -1 */
    uint64_t version; /* of a dict, when it was last seen to be as it was; 0: not known */
};

struct place { /* where and how a tensor has to lie */
    void *data;
    int64_t *form;  /* shape, then strides */
    PyObject *told; /* of one that torch does not tell of: what `look` says; else NULL */
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    const char *seen_at; /* an address within torch's own of the tensor: fetched, never read */
};

struct question {
    PyObject *function, *arguments, *answer;
};

typedef struct {
    PyObject_HEAD struct table *table;
    PyObject **item; /* of all tables, one after the other */
    PyObject **tensor;
    struct place *place;
    struct question *question;
    Py_ssize_t tables, items, tensors, questions;
    Py_ssize_t wrapped; /* the first of the tensors, each around the one that lies somewhere */
} Watch;

/* ---- objects in containers ---- */

/* Whether it is data that cannot change. */
static bool constant(PyObject *o)
{
    if (o == Py_None || PyFloat_CheckExact(o) || PyLong_CheckExact(o) || PyBool_Check(o) ||
        PyUnicode_CheckExact(o) || PyBytes_CheckExact(o) || PyComplex_CheckExact(o))
        return true;
    if (!PyTuple_CheckExact(o))
        return false;
    for (Py_ssize_t i = 0; i < PyTuple_Size(o); i++)
        if (!constant(PyTuple_GetItem(o, i)))
            return false;
    return true;
}

static Py_ssize_t size_of(PyObject *container)
{
    return PyDict_Check(container) ? 2 * PyDict_Size(container) : PyList_Size(container);
}

/* Python gives a dict another number, which no dict had before, whenever it is changed; 0: it gives
 * none. So all that a dict holds, which in a step fills the caches, need not be looked at. */
static uint64_t version_of(const PyObject *container)
{
#if !defined(Py_LIMITED_API) && PY_VERSION_HEX < 0x030C0000
    if (PyDict_Check(container))
        return ((const PyDictObject *)container)->ma_version_tag;
#endif
    (void)container;
    return 0;
}

/* What `was` and `is` tell of an item; *all becomes the most that was found. */
static void compare(PyObject *was, PyObject *is, enum found *all)
{
    if (was == is)
        return;
    if (*all == SAME)
        *all = VALUES;
    if (!constant(was) || !constant(is))
        *all = OTHERS;
}

/* Of a dict some keys of which are looked at: which of them have data that cannot change, and what
 * it is. Any other value may become another one of its type, and is not held (item[1] is the type,
 * which no such data is). */
static enum found look_at_chosen(const struct table *t, PyObject *const *item)
{
    enum found all = SAME;
    if (PyDict_Size(t->container) != t->size)
        return OTHERS;
    for (PyObject *const *end = item + t->items; item < end; item += 2) {
        PyObject *value = PyDict_GetItemWithError(t->container, item[0]);
        if (!value)
            return OTHERS;
        if (value == item[1])
            continue;
        if (constant(value) == !!PyType_Check(item[1]))
            return OTHERS;
        if (!PyType_Check(item[1]))
            all = VALUES;
        else if ((PyObject *)Py_TYPE(value) != item[1])
            return OTHERS;
    }
    return all;
}

static enum found look_at_all(const struct table *t, PyObject *const *item)
{
    enum found all = SAME;
    if (t->size >= 0)
        return look_at_chosen(t, item);
    if (size_of(t->container) != t->items)
        return OTHERS;
    if (PyList_Check(t->container)) {
        for (Py_ssize_t i = 0; i < t->items; i++)
            compare(item[i], PyList_GetItem(t->container, i), &all);
        return all;
    }
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(t->container, &at, &key, &value); item += 2) {
        if (item[0] != key)
            return OTHERS;
        compare(item[1], value, &all);
    }
    return all;
}

/* Calls no Python code, so that nothing changes on the way. */
static enum found look_at(struct table *t, PyObject *const *item)
{
    uint64_t version = version_of(t->container);
    if (version && version == t->version)
        return SAME;
    enum found all = look_at_all(t, item);
    t->version = all == SAME ? version : 0;
    return all;
}

static enum found look_at_tables(const Watch *w)
{
    enum found all = SAME;
    PyObject *const *item = w->item;
    for (struct table *t = w->table; all != OTHERS && t < w->table + w->tables; t++) {
        enum found one = look_at(t, item);
        item += t->items;
        all = one > all ? one : all;
    }
    return all;
}

/* ---- tensors in their places ---- */

static bool looks_like(PyObject *tensor, struct place *p)
{
    struct dl_tensor t;
    size_t form = (size_t)p->ndim * sizeof *t.shape;
    if (!p->told) {
        if (!binding_dl_look(tensor, &t))
            return false;
        p->seen_at = (const char *)t.shape;
        return (char *)t.data + t.byte_offset == p->data && t.ndim == p->ndim &&
               t.code == p->code && t.bits == p->bits && t.lanes == p->lanes &&
               (!form || (memcmp(t.shape, p->form, form) == 0 &&
                          memcmp(t.strides, p->form + p->ndim, form) == 0));
    }
    PyObject *told = binding_look(tensor);
    int equal = told ? PyObject_RichCompareBool(told, p->told, Py_EQ) : -1;
    Py_XDECREF(told);
    return equal > 0;
}

/* After a step what torch has of a tensor is in no near cache; where it is, the last look has
 * seen. */
#define AHEAD 6
static void fetch_ahead(PyObject *tensor, const struct place *p)
{
    __builtin_prefetch(tensor);
    __builtin_prefetch(p->seen_at - 64);
    __builtin_prefetch(p->seen_at);
    __builtin_prefetch(p->seen_at + 64);
}

/* Of a tensor: itself, or what it is around; a new reference. */
static PyObject *inner(const Watch *w, Py_ssize_t i)
{
    return i < w->wrapped ? PyObject_GetAttrString(w->tensor[i], "_local_tensor")
                          : Py_NewRef(w->tensor[i]);
}

/* False, with an exception set or not. */
static bool lie_there(const Watch *w)
{
    for (Py_ssize_t i = 0; i < w->tensors; i++) {
        if (i + AHEAD < w->tensors)
            fetch_ahead(w->tensor[i + AHEAD], &w->place[i + AHEAD]);
        PyObject *tensor = inner(w, i);
        bool there = tensor && looks_like(tensor, &w->place[i]);
        Py_XDECREF(tensor);
        if (!there)
            return false;
    }
    return true;
}

/* ---- what functions give ---- */

/* Whether the answer is the object that it was; of bytes, whether it has these. False, with an
 * exception set or not. */
static bool answered(const struct question *q)
{
    PyObject *told = PyObject_Call(q->function, q->arguments, NULL);
    bool same = told && (told == q->answer ||
                         (PyBytes_CheckExact(q->answer) && binding_same(told, q->answer) == 1));
    Py_XDECREF(told);
    return same;
}

static bool all_answered(const Watch *w)
{
    Py_ssize_t i = 0;
    while (i < w->questions && answered(&w->question[i]))
        i++;
    return i == w->questions;
}

/* look() -> 0: all as it was; 1: but for values that cannot change, in place of others; 2: not. */
static PyObject *watch_look(Watch *w, PyObject *unused)
{
    (void)unused;
    enum found all = look_at_tables(w);
    if (all != OTHERS && !(lie_there(w) && all_answered(w)))
        all = OTHERS;
    return PyErr_Occurred() ? NULL : PyLong_FromLong(all);
}

/* others() -> the numbers of the questions whose answer is another one; all are asked. */
static PyObject *watch_others(Watch *w, PyObject *unused)
{
    (void)unused;
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found && i < w->questions; i++) {
        if (answered(&w->question[i]))
            continue;
        PyObject *number = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(i);
        if (!number || PyList_Append(found, number) < 0)
            Py_CLEAR(found);
        Py_XDECREF(number);
    }
    return found;
}

/* ---- making one ---- */

static int changed_meanwhile(void)
{
    PyErr_SetString(PyExc_RuntimeError, "changed while it was looked at");
    return -1;
}

static int note_table(Watch *w, PyObject *container, Py_ssize_t room)
{
    PyObject *key, *value;
    struct table *t = &w->table[w->tables];
    t->items = size_of(container);
    t->size = -1;
    if (t->items > room - w->items)
        return changed_meanwhile();
    t->container = Py_NewRef(container);
    w->tables++;
    if (PyList_Check(container))
        for (Py_ssize_t i = 0; i < t->items; i++)
            w->item[w->items++] = Py_NewRef(PyList_GetItem(container, i));
    else
        for (Py_ssize_t at = 0; PyDict_Next(container, &at, &key, &value);) {
            w->item[w->items++] = Py_NewRef(key);
            w->item[w->items++] = Py_NewRef(value);
        }
    return 0;
}

/* chosen: (dict, keys), checked by `room_for`. */
static int note_chosen(Watch *w, PyObject *chosen, Py_ssize_t room)
{
    PyObject *dict = PyTuple_GetItem(chosen, 0), *keys = PyTuple_GetItem(chosen, 1);
    struct table *t = &w->table[w->tables];
    Py_ssize_t count = PyList_Size(keys);
    if (2 * count > room - w->items)
        return changed_meanwhile();
    t->items = 2 * count;
    t->size = PyDict_Size(dict);
    t->container = Py_NewRef(dict);
    w->tables++;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = PyList_GetItem(keys, i);
        PyObject *value = PyUnicode_CheckExact(key) ? PyDict_GetItemWithError(dict, key) : NULL;
        if (!value)
            return changed_meanwhile();
        w->item[w->items++] = Py_NewRef(key);
        w->item[w->items++] = Py_NewRef(constant(value) ? value : (PyObject *)Py_TYPE(value));
    }
    return 0;
}

/* Objects of what is watched; -1 with an exception set: it is of another kind. */
static Py_ssize_t room_for(PyObject *one)
{
    if (PyDict_Check(one) || PyList_Check(one))
        return size_of(one);
    if (PyTuple_CheckExact(one) && PyTuple_Size(one) == 2 &&
        PyDict_Check(PyTuple_GetItem(one, 0)) && PyList_Check(PyTuple_GetItem(one, 1)))
        return 2 * PyList_Size(PyTuple_GetItem(one, 1));
    PyErr_SetString(PyExc_TypeError, "what is watched are dicts, lists, and (dict, [key, ...])");
    return -1;
}

static int note_tables(Watch *w, PyObject *tables)
{
    Py_ssize_t count = PyList_Size(tables), room = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t one = room_for(PyList_GetItem(tables, i));
        if (one < 0)
            return -1;
        room += one;
    }
    w->table = PyMem_Calloc((size_t)count + 1, sizeof *w->table);
    w->item = PyMem_Calloc((size_t)room + 1, sizeof *w->item);
    if (!w->table || !w->item) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *one = PyList_GetItem(tables, i);
        if ((PyTuple_Check(one) ? note_chosen : note_table)(w, one, room) < 0)
            return -1;
    }
    return 0;
}

static int note_place(struct place *p, PyObject *block)
{
    struct dl_tensor t;
    if (!binding_dl_look(block, &t)) {
        p->told = binding_look(block);
        return p->told ? 0 : -1;
    }
    size_t n = (size_t)t.ndim;
    p->form = PyMem_Malloc((2 * n + 1) * sizeof *p->form);
    if (!p->form) {
        PyErr_NoMemory();
        return -1;
    }
    if (n) {
        memcpy(p->form, t.shape, n * sizeof *t.shape);
        memcpy(p->form + n, t.strides, n * sizeof *t.strides);
    }
    p->data = (char *)t.data + t.byte_offset;
    p->ndim = t.ndim;
    p->code = t.code;
    p->bits = t.bits;
    p->lanes = t.lanes;
    return 0;
}

static int note_places(Watch *w, PyObject *tensors, PyObject *blocks)
{
    Py_ssize_t count = PyList_Size(tensors);
    w->tensor = PyMem_Calloc((size_t)count + 1, sizeof *w->tensor);
    w->place = PyMem_Calloc((size_t)count + 1, sizeof *w->place);
    if (!w->tensor || !w->place) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *tensor = PyList_GetItem(tensors, i), *block = PyList_GetItem(blocks, i);
        if (!tensor || !block)
            return -1;
        w->tensor[w->tensors++] = Py_NewRef(tensor);
        if (note_place(&w->place[i], block) < 0)
            return -1;
    }
    return 0;
}

static int note_questions(Watch *w, PyObject *questions)
{
    Py_ssize_t count = questions ? PyList_Size(questions) : 0;
    w->question = PyMem_Calloc((size_t)count + 1, sizeof *w->question);
    if (!w->question) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        struct question q;
        PyObject *one = PyList_GetItem(questions, i);
        if (!one || !PyTuple_Check(one)) {
            PyErr_SetString(PyExc_TypeError, "a question is (function, arguments, answer)");
            return -1;
        }
        if (!PyArg_ParseTuple(one, "OO!O", &q.function, &PyTuple_Type, &q.arguments, &q.answer))
            return -1;
        Py_INCREF(q.function);
        Py_INCREF(q.arguments);
        Py_INCREF(q.answer);
        w->question[w->questions++] = q;
    }
    return 0;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tables, *tensors, *blocks, *questions = NULL;
    Py_ssize_t wrapped;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!O!n|O!", &PyList_Type, &tables, &PyList_Type, &tensors,
                          &PyList_Type, &blocks, &wrapped, &PyList_Type, &questions))
        return NULL;
    if (PyList_Size(tensors) != PyList_Size(blocks) || wrapped < 0 ||
        wrapped > PyList_Size(tensors)) {
        PyErr_SetString(PyExc_ValueError, "each tensor has a block");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Watch *w = (Watch *)alloc(type, 0);
    if (!w)
        return NULL;
    w->wrapped = wrapped;
    if (note_tables(w, tables) < 0 || note_places(w, tensors, blocks) < 0 ||
        note_questions(w, questions) < 0)
        Py_CLEAR(w);
    return (PyObject *)w;
}

/* A constant, if it is not the same: to let go of it runs no code. */
static void take_value(PyObject **item, PyObject *value)
{
    PyObject *was = *item;
    *item = Py_NewRef(value);
    Py_DECREF(was);
}

static void take_table(const struct table *t, PyObject **item)
{
    PyObject *key, *value;
    if (PyList_Check(t->container)) {
        for (Py_ssize_t i = 0; i < t->items; i++)
            take_value(&item[i], PyList_GetItem(t->container, i));
    } else if (t->size >= 0) {
        for (Py_ssize_t i = 0; i < t->items; i += 2)
            if (!PyType_Check(item[i + 1]))
                take_value(&item[i + 1], PyDict_GetItemWithError(t->container, item[i]));
    } else {
        for (Py_ssize_t at = 0; PyDict_Next(t->container, &at, &key, &value); item += 2)
            take_value(&item[1], value);
    }
}

/* take(): the values in the containers are those that are there now. REQUIRES: `look` has said
 * that nothing but values is another one, and nothing has changed since. */
static PyObject *watch_take(Watch *w, PyObject *unused)
{
    (void)unused;
    if (look_at_tables(w) == OTHERS) {
        PyErr_SetString(PyExc_RuntimeError, "more than values has changed");
        return NULL;
    }
    PyObject **item = w->item;
    for (const struct table *t = w->table; t < w->table + w->tables; item += t->items, t++)
        take_table(t, item);
    Py_RETURN_NONE;
}

/* ---- life ---- */

static int watch_traverse(Watch *w, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(w));
    for (Py_ssize_t i = 0; i < w->tables; i++)
        Py_VISIT(w->table[i].container);
    for (Py_ssize_t i = 0; i < w->items; i++)
        Py_VISIT(w->item[i]);
    for (Py_ssize_t i = 0; i < w->tensors; i++)
        Py_VISIT(w->tensor[i]);
    for (Py_ssize_t i = 0; i < w->questions; i++) {
        Py_VISIT(w->question[i].function);
        Py_VISIT(w->question[i].arguments);
        Py_VISIT(w->question[i].answer);
    }
    return 0;
}

/* It watches nothing afterwards. */
static int watch_clear(Watch *w)
{
    struct table *table = w->table;
    PyObject **item = w->item, **tensor = w->tensor;
    struct place *place = w->place;
    struct question *question = w->question;
    Py_ssize_t tables = w->tables, items = w->items, tensors = w->tensors, questions = w->questions;
    w->table = NULL;
    w->item = w->tensor = NULL;
    w->place = NULL;
    w->question = NULL;
    w->tables = w->items = w->tensors = w->wrapped = w->questions = 0;
    for (Py_ssize_t i = 0; i < tables; i++)
        Py_DECREF(table[i].container);
    for (Py_ssize_t i = 0; i < items; i++)
        Py_XDECREF(item[i]);
    for (Py_ssize_t i = 0; i < tensors; i++) {
        Py_DECREF(tensor[i]);
        Py_XDECREF(place[i].told);
        PyMem_Free(place[i].form);
    }
    for (Py_ssize_t i = 0; i < questions; i++) {
        Py_DECREF(question[i].function);
        Py_DECREF(question[i].arguments);
        Py_DECREF(question[i].answer);
    }
    PyMem_Free(question);
    PyMem_Free(table);
    PyMem_Free(item);
    PyMem_Free(tensor);
    PyMem_Free(place);
    return 0;
}

static void watch_dealloc(Watch *w)
{
    PyTypeObject *type = Py_TYPE(w);
    PyObject_GC_UnTrack(w);
    watch_clear(w);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(w);
    Py_DECREF(type);
}

static PyMethodDef watch_methods[] = {
    {"look", (PyCFunction)watch_look, METH_NOARGS,
     "look() -> 0: all is as it was; 1: but for values that cannot change, which are others now; "
     "2: more is another"},
    {"others", (PyCFunction)watch_others, METH_NOARGS,
     "others() -> the numbers of the questions whose answer is another one; all are asked"},
    {"take", (PyCFunction)watch_take, METH_NOARGS,
     "take(): after 1, the values that are there now are those to be there"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_traverse, watch_traverse},
    {Py_tp_clear, watch_clear},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc,
     "Watch(tables, tensors, blocks, wrapped, questions): dicts and lists as they are now. Of (dict, keys): how "
     "many keys it has, which of these have constants, and which, and of what type the others are. Tensors "
     "have to lie where and how their blocks lie; of the first `wrapped` ones their `_local_tensor`. "
     "questions: (function, arguments, answer): the answer has to be the same object, or have the same bytes."},
    {0, NULL},
};
static PyType_Spec watch_spec = {
    .name = "pmstore._engine._binding.Watch",
    .basicsize = sizeof(Watch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = watch_slots,
};

int binding_add_watch(PyObject *module)
{
    if (!WatchType)
        WatchType = (PyTypeObject *)PyType_FromModuleAndSpec(module, &watch_spec, NULL);
    return WatchType ? PyModule_AddType(module, WatchType) : -1;
}
