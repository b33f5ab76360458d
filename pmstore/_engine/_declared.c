/* Declared writes: the addresses of arrays and tensors that are about to be written.
 *
 * A `Writes` is what an optimizer's step writes, declared in every step: of each parameter that has
 * a gradient then, its memory and that of its state. Where these lie is asked once; and what is to
 * be declared, of hundreds of small ranges a few pages, is made anew only if other parameters have
 * a gradient than before. */
#include "_binding.h"

#include "base/pages.h"

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

int binding_ranges_add(struct ranges *r, uint64_t addr, uint64_t bytes)
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
    return binding_ranges_add(r, (uint64_t)((intptr_t)view->buf + low), (uint64_t)(high - low));
}

struct write { /* as the engine captures it: begins with its address, to be sorted by it */
    uint64_t addr, end;
    Py_ssize_t of; /* which parameter */
};

typedef struct {
    PyObject_HEAD PyObject *parameters; /* list */
    PyObject *arrays;                   /* list of lists, which keep the memory */
    struct write *write;                /* of all of them, in order of their addresses */
    uint64_t count;
    char *has, *had;   /* of each parameter: whether it has a gradient; and when `now` was made */
    struct ranges now; /* to be declared */
    bool made;
} Writes;

static PyTypeObject *WritesType;
static PyObject *grad_name;

static int by_address(const void *one, const void *other)
{
    const struct write *a = one, *b = other;
    return (a->addr > b->addr) - (a->addr < b->addr);
}

static bool are_writes(PyObject *object) { return Py_TYPE(object) == WritesType; }

/* Whole pages are captured: a range within those of the one before adds nothing. Each that is
 * declared is one of an array, as the engine has it no other way. */
static int make(Writes *w)
{
    uint64_t covered = 0; /* pages up to here are declared */
    w->made = false;
    w->now.count = 0;
    for (const struct write *one = w->write; one < w->write + w->count; one++) {
        if (!w->has[one->of] || one->end <= covered)
            continue;
        if (binding_ranges_add(&w->now, one->addr, one->end - one->addr) < 0)
            return -1;
        covered = pms_page_up(one->end);
    }
    memcpy(w->had, w->has, (size_t)PyList_Size(w->parameters));
    w->made = true;
    return 0;
}

/* Of those that have a gradient now. -1 with an exception set. */
static int ranges_add_writes(struct ranges *r, PyObject *writes)
{
    Writes *w = (Writes *)writes;
    Py_ssize_t count = PyList_Size(w->parameters);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *gradient = PyObject_GetAttr(PyList_GetItem(w->parameters, i), grad_name);
        if (!gradient)
            return -1;
        w->has[i] = gradient != Py_None;
        Py_DECREF(gradient);
    }
    if ((!w->made || memcmp(w->had, w->has, (size_t)count) != 0) && make(w) < 0)
        return -1;
    for (uint64_t i = 0; i < w->now.count; i++)
        if (binding_ranges_add(r, w->now.at[i].addr, w->now.at[i].bytes) < 0)
            return -1;
    return 0;
}

static int ranges_add_object(struct ranges *r, Handle *h, PyObject *object)
{
    if (are_writes(object))
        return ranges_add_writes(r, object);
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
            status = binding_ranges_add(r, addr, bytes);
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

PyObject *binding_will_write(Handle *h, PyObject *writes)
{
    struct ranges r;
    binding_ranges_init(&r);
    PyObject *result = NULL;
    if (binding_ranges_add_all(&r, h, writes) == 0) {
        struct pms_error error = {0};
        int status;
        Py_BEGIN_ALLOW_THREADS status = binding_engine.will_write(h->pool, r.at, r.count, &error);
        Py_END_ALLOW_THREADS result = status == PMS_OK ? Py_NewRef(Py_None)
                                                       : binding_raise(h, status, &error);
    }
    binding_ranges_free(&r);
    return result;
}

PyObject *binding_written(Handle *h, PyObject *arrays)
{
    struct ranges r;
    binding_ranges_init(&r);
    PyObject *result = NULL;
    if (binding_ranges_add_all(&r, h, arrays) == 0) {
        struct pms_error error = {0};
        int32_t written = 0;
        int status;
        Py_BEGIN_ALLOW_THREADS status = binding_engine.written(h->pool, r.at, r.count, &written,
                                                               &error);
        Py_END_ALLOW_THREADS result = status == PMS_OK ? PyBool_FromLong(written)
                                                       : binding_raise(h, status, &error);
    }
    binding_ranges_free(&r);
    return result;
}

/* Room for one more in an array of this size that doubles. */
static int make_room(Writes *w)
{
    if (w->count && (w->count & (w->count - 1)))
        return 0;
    struct write *more = PyMem_Realloc(w->write, (w->count ? 2 * w->count : 1) * sizeof *more);
    if (!more) {
        PyErr_NoMemory();
        return -1;
    }
    w->write = more;
    return 0;
}

static int note_one(Writes *w, Handle *h, Py_ssize_t of)
{
    struct ranges r;
    PyObject *some = PyList_GetItem(w->arrays, of);
    binding_ranges_init(&r);
    int status = some ? binding_ranges_add_all(&r, h, some) : -1;
    for (uint64_t i = 0; status == 0 && i < r.count; i++) {
        status = make_room(w);
        if (status == 0)
            w->write[w->count++] = (struct write){r.at[i].addr, r.at[i].addr + r.at[i].bytes, of};
    }
    binding_ranges_free(&r);
    return status;
}

static int note(Writes *w, Handle *h, Py_ssize_t count)
{
    w->has = PyMem_Calloc((size_t)count + 1, 1);
    w->had = PyMem_Calloc((size_t)count + 1, 1);
    if (!w->has || !w->had) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (note_one(w, h, i) < 0)
            return -1;
    if (w->count)
        qsort(w->write, (size_t)w->count, sizeof *w->write, by_address);
    return 0;
}

/* handle.writes(parameters, arrays) -> Writes */
PyObject *binding_writes(Handle *h, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2 || !PyList_Check(args[0]) || !PyList_Check(args[1]) ||
        PyList_Size(args[0]) != PyList_Size(args[1])) {
        PyErr_SetString(PyExc_TypeError, "writes(parameters, of each a list of arrays)");
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(WritesType, Py_tp_alloc);
    Writes *w = (Writes *)alloc(WritesType, 0);
    if (!w)
        return NULL;
    binding_ranges_init(&w->now);
    w->parameters = PyList_GetSlice(args[0], 0, PyList_Size(args[0]));
    w->arrays = PyList_GetSlice(args[1], 0, PyList_Size(args[1]));
    if (!w->parameters || !w->arrays || note(w, h, PyList_Size(w->arrays)) < 0)
        Py_CLEAR(w);
    return (PyObject *)w;
}

static int writes_traverse(Writes *w, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(w));
    Py_VISIT(w->parameters);
    Py_VISIT(w->arrays);
    return 0;
}

static int writes_clear(Writes *w)
{
    Py_CLEAR(w->parameters);
    Py_CLEAR(w->arrays);
    return 0;
}

static void writes_dealloc(Writes *w)
{
    PyTypeObject *type = Py_TYPE(w);
    PyObject_GC_UnTrack(w);
    writes_clear(w);
    if (w->now.at)
        binding_ranges_free(&w->now);
    PyMem_Free(w->write);
    PyMem_Free(w->has);
    PyMem_Free(w->had);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(w);
    Py_DECREF(type);
}

static PyType_Slot writes_slots[] = {
    {Py_tp_dealloc, writes_dealloc},
    {Py_tp_traverse, writes_traverse},
    {Py_tp_clear, writes_clear},
    {Py_tp_doc,
     "What an optimizer's step writes; may be among the arrays of `will_write`. Made by Handle.writes."},
    {0, NULL},
};
static PyType_Spec writes_spec = {
    .name = "pmstore._engine._binding.Writes",
    .basicsize = sizeof(Writes),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = writes_slots,
};

int binding_add_writes(PyObject *module)
{
    if (!grad_name && !(grad_name = PyUnicode_InternFromString("grad")))
        return -1;
    if (!WritesType)
        WritesType = (PyTypeObject *)PyType_FromModuleAndSpec(module, &writes_spec, NULL);
    return WritesType ? PyModule_AddType(module, WritesType) : -1;
}
