/* Declared writes: the addresses of arrays and tensors that are about to be written. */
#include "_binding.h"

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

static int ranges_add_object(struct ranges *r, Handle *h, PyObject *object)
{
    if (binding_are_writes(object))
        return binding_ranges_add_writes(r, object);
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
