/* Memory: a pinned block as a buffer, and what a store knows of the array or tensor that it gave
 * out over it.
 *
 * There is at most one Memory of a block, found by the block's offset while it lives. A block is
 * not reused while it is pinned, so a Memory that is found is of what was found. Of the object
 * it has a weak reference, and how that looked when it was given out: numpy and torch let an
 * object leave its memory (`w.data = x`, `a.shape = ...`), and then it is not what is stored any
 * more.
 *
 * Only the storage of the array or tensor refers to the Memory. So if the last reference goes
 * while the object lives, the object has left; the handle keeps the Memory then, and with it the
 * pin, until the object is taken back in or dies. */
#include "_binding.h"

#include <structmember.h>

static PyTypeObject *MemoryType;

/* ---- the object ---- */

/* The object that was given out, borrowed: nobody can let go of it while the GIL is held and no
 * Python code runs. NULL: it is gone. */
static PyObject *alive(const Memory *m)
{
    if (!m->object)
        return NULL;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object;
    if (PyWeakref_GetRef(m->object, &object) > 0)
        Py_DECREF(object); /* not the last one: somebody has it */
    return object;
#else
    PyObject *object = PyWeakref_GET_OBJECT(m->object);
    return object == Py_None ? NULL : object;
#endif
}

static void enlist(Memory *m)
{
    if (m->link)
        return;
    m->next = m->handle->given;
    m->link = &m->handle->given;
    if (m->next)
        m->next->link = &m->next;
    *m->link = m;
}

static void delist(Memory *m)
{
    if (!m->link)
        return;
    *m->link = m->next;
    if (m->next)
        m->next->link = m->link;
    m->next = NULL;
    m->link = NULL;
}

/* The handle keeps it no longer. May be the last reference. */
static void let_go(Memory *m)
{
    if (!m->kept)
        return;
    m->kept = 0;
    Py_INCREF(m->handle);
    if (!m->tensor)
        delist(m);
    Py_DECREF(m);
}

PyObject *binding_object(const Memory *m, const struct pms_object *as)
{
    PyObject *object = alive(m);
    if (!object || (uint64_t)PyBytes_GET_SIZE(m->meta) != as->meta_bytes ||
        memcmp(PyBytes_AS_STRING(m->meta), as->meta, as->meta_bytes) != 0)
        return NULL;
    Py_INCREF(object);
    if (binding_where(m, object) == UNCHANGED)
        return object;
    Py_DECREF(object);
    return NULL;
}

/* give(object, meta, name, dtype): dtype of an array; None: it is a tensor. */
static PyObject *memory_give(Memory *m, PyObject *const *args, Py_ssize_t count)
{
    if (count != 4 || !PyBytes_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "give(object, meta, name, dtype)");
        return NULL;
    }
    /* may collect garbage, and so run Python code: before we look */
    PyObject *reference = PyWeakref_NewRef(args[0], NULL);
    if (!reference)
        return NULL;
    PyObject *object = alive(m);
    /* given out in between, by a signal handler */
    if (object && PyObject_RichCompareBool(m->meta, args[1], Py_EQ) > 0) {
        Py_INCREF(object);
        if (binding_where(m, object) == UNCHANGED) {
            Py_DECREF(reference);
            return object;
        }
        Py_DECREF(object);
    }
    m->tensor = args[3] == Py_None;
    int status = m->tensor ? binding_note_tensor(m, args[0])
                           : binding_note_array(m, args[0], args[3]);
    if (status < 0) {
        Py_DECREF(reference);
        return NULL;
    }
    if (m->tensor)
        enlist(m);
    Py_XSETREF(m->meta, Py_NewRef(args[1]));
    Py_XSETREF(m->name, Py_NewRef(args[2]));
    Py_XSETREF(m->object, reference);
    return Py_NewRef(args[0]);
}

/* moved(): the object, if it lives and its memory is elsewhere; else None. */
static PyObject *memory_moved(Memory *m, PyObject *unused)
{
    (void)unused;
    PyObject *object = alive(m);
    if (!object)
        Py_RETURN_NONE;
    Py_INCREF(object);
    if (binding_where(m, object) == ELSEWHERE)
        return object;
    Py_DECREF(object);
    Py_RETURN_NONE;
}

/* settle(forget): the object is back, or (forget) is the store's no longer: the handle need not
 * keep the pin. */
static PyObject *memory_settle(Memory *m, PyObject *forget)
{
    if (forget == Py_True)
        Py_CLEAR(m->object);
    Py_INCREF(m);
    let_go(m);
    Py_DECREF(m);
    Py_RETURN_NONE;
}

static int memory_getbuffer(Memory *m, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, (PyObject *)m, m->address, m->bytes, m->read_only, flags);
}

/* ---- life ---- */

/* Borrowed. */
static Memory *find(Handle *h, PyObject *key)
{
    PyObject *at = PyDict_GetItemWithError(h->memories, key);
    return at ? PyLong_AsVoidPtr(at) : NULL;
}

Memory *binding_memory(Handle *h, uint64_t data)
{
    PyObject *key = PyLong_FromUnsignedLongLong(data);
    Memory *m = key ? find(h, key) : NULL;
    Py_XDECREF(key);
    Py_XINCREF(m);
    return m;
}

static void unpin(Handle *h, uint64_t data)
{
    Py_BEGIN_ALLOW_THREADS binding_engine.unpin(h->pool, data);
    Py_END_ALLOW_THREADS
}

Memory *binding_new_memory(Handle *h, const struct pms_object *pinned)
{
    Memory *m = binding_memory(h, pinned->data);
    uint64_t data = pinned->data;
    if (m || PyErr_Occurred()) {
        unpin(h, data);
        return m;
    }
    m = (Memory *)MemoryType->tp_alloc(MemoryType, 0);
    PyObject *key = PyLong_FromUnsignedLongLong(data), *at = m ? PyLong_FromVoidPtr(m) : NULL;
    if (!key || !at || PyDict_SetItem(h->memories, key, at) < 0) {
        Py_CLEAR(m);
        unpin(h, data);
    } else {
        m->handle = (Handle *)Py_NewRef(h);
        m->data = data;
        m->address = (char *)(uintptr_t)h->base + data;
        m->bytes = (Py_ssize_t)pinned->data_bytes;
        m->read_only = h->read_only;
    }
    Py_XDECREF(key);
    Py_XDECREF(at);
    return m;
}

/* The last reference goes. If the object lives it has left its memory: nobody else is to get
 * that, and what it shows now is to be stored. */
static void memory_finalize(PyObject *self)
{
    Memory *m = (Memory *)self;
    if (!m->handle || m->handle->closed || m->handle->read_only || !binding_is_here(m->handle) ||
        !alive(m))
        return;
    Py_INCREF(m);
    m->kept = 1;
    enlist(m);
    Py_DECREF(m->handle); /* it would keep what keeps it */
}

static void memory_dealloc(Memory *m)
{
    PyTypeObject *type = Py_TYPE(m);
    if (PyObject_CallFinalizerFromDealloc((PyObject *)m) < 0)
        return;
    delist(m);
    if (m->handle) {
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        PyObject *key = PyLong_FromUnsignedLongLong(m->data);
        if (key && find(m->handle, key) == m && PyDict_DelItem(m->handle->memories, key) < 0)
            PyErr_Clear();
        Py_XDECREF(key);
        PyErr_Restore(kind, value, trace);
        if (binding_is_here(m->handle))
            unpin(m->handle, m->data);
        Py_DECREF(m->handle);
    }
    Py_XDECREF(m->object);
    Py_XDECREF(m->meta);
    Py_XDECREF(m->name);
    Py_XDECREF(m->dtype);
    PyMem_Free(m->form);
    type->tp_free(m);
    Py_DECREF(type);
}

/* The handle goes, and with it what it kept: no other Memory of it is left. */
void binding_drop_memories(Handle *h)
{
    while (h->given) {
        Memory *m = h->given;
        delist(m);
        if (binding_is_here(h))
            unpin(h, m->data);
        m->handle = NULL;
        Py_CLEAR(m->object);
        Py_DECREF(m);
    }
}

/* ---- before a commit ---- */

/* What is to be looked at: what the handle keeps, tensors elsewhere, and those of which only
 * Python code can tell. */
static bool suspect(const Memory *m)
{
    PyObject *object = m->kept ? NULL : alive(m);
    return m->kept || (object && (m->dtype || binding_where(m, object) == ELSEWHERE));
}

/* All suspects, as a list. REQUIRES: there is one. */
static PyObject *all_suspects(Handle *h)
{
    /* may collect garbage, and so change the list: before we walk it */
    PyObject *all = PyList_New(0);
    for (Memory *m = h->given; all && m; m = m->next)
        if (suspect(m) && PyList_Append(all, (PyObject *)m) < 0)
            Py_CLEAR(all);
    return all;
}

int binding_take_in(Handle *h)
{
    if (!h->given || h->closed || h->read_only || !h->take_in || !binding_is_here(h))
        return 0;
    Memory *first = h->given;
    while (first && !suspect(first)) {
        Memory *next = first->next;
        if (!alive(first)) /* until it is given out again */
            delist(first);
        first = next;
    }
    if (!first)
        return 0;
    PyObject *all = all_suspects(h);
    if (!all)
        return -1;
    PyObject *take_in = Py_NewRef(h->take_in), *done = PyObject_CallOneArg(take_in, all);
    Py_DECREF(take_in);
    Py_DECREF(all);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

PyObject *binding_take_in_all(Handle *h, PyObject *unused)
{
    (void)unused;
    return binding_take_in(h) < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- the type ---- */

static PyMemberDef memory_members[] = {
    {"data", T_ULONGLONG, offsetof(Memory, data), READONLY, "Offset of the block."},
    {"meta", T_OBJECT, offsetof(Memory, meta), READONLY,
     "Description of the object that was given out over it, or None."},
    {"read_only", T_BOOL, offsetof(Memory, read_only), 0, "Whether it exports itself so."},
    {"name", T_OBJECT, offsetof(Memory, name), READONLY, "Under which name, for people, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef memory_methods[] = {
    {"give", (PyCFunction)(void (*)(void))memory_give, METH_FASTCALL,
     "give(object, meta, name, dtype) -> object: what is given out over it from now on, or what was "
     "in between. dtype None: a tensor."},
    {"moved", (PyCFunction)memory_moved, METH_NOARGS,
     "moved() -> the object that was given out, if its memory is elsewhere now."},
    {"settle", (PyCFunction)memory_settle, METH_O,
     "settle(forget): the object is back, or is not the store's any more."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_finalize, memory_finalize},
    {Py_tp_methods, memory_methods},
    {Py_tp_members, memory_members},
    {Py_bf_getbuffer, memory_getbuffer},
    {Py_tp_doc,
     "A pinned block of a store, as a buffer of bytes. It is what arrays and tensors of the store stand on."},
    {0, NULL},
};
static PyType_Spec memory_spec = {
    .name = "pmstore._engine._binding.Memory",
    .basicsize = sizeof(Memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = memory_slots,
};

int binding_add_memory(PyObject *module)
{
    if (!MemoryType)
        MemoryType = (PyTypeObject *)PyType_FromModuleAndSpec(module, &memory_spec, NULL);
    return MemoryType ? PyModule_AddType(module, MemoryType) : -1;
}
