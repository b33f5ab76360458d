/* How the object that was given out over a block looks: where its bytes are, of which shape and
 * dtype. Of arrays numpy's struct tells, of tensors DLPack's C exchange, where torch has it. */
#include "_binding.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/ndarraytypes.h>

struct dl_exchange {
    uint32_t major, minor;
    void *older, *allocate, *export, *import;
    int (*look)(void *tensor, struct dl_tensor *out);
};
#define DL_CPU 1

static const struct dl_exchange *torch_exchange; /* NULL: this torch has none */
/* look(tensor) -> (address, ...), for tensors that it cannot tell of */
static PyObject *torch_look;

/* exchange_with(capsule or None, look) */
PyObject *binding_exchange_with(PyObject *module, PyObject *args)
{
    PyObject *capsule, *look;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &capsule, &look))
        return NULL;
    const struct dl_exchange *found = capsule == Py_None
                                          ? NULL
                                          : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (PyErr_Occurred())
        return NULL;
    torch_exchange = found && found->major == 1 && found->look ? found : NULL;
    Py_XSETREF(torch_look, Py_NewRef(look));
    Py_RETURN_NONE;
}

bool binding_dl_look(PyObject *tensor, struct dl_tensor *seen)
{
    if (!torch_exchange)
        return false;
    if (torch_exchange->look(tensor, seen) != 0) {
        PyErr_Clear();
        return false;
    }
    return seen->device == DL_CPU;
}

PyObject *binding_look(PyObject *tensor)
{
    if (torch_look)
        return PyObject_CallOneArg(torch_look, tensor);
    PyErr_SetString(PyExc_SystemError, "pmstore._engine._binding.exchange_with was not called");
    return NULL;
}

static int same(const int64_t *a, const int64_t *b, int count)
{
    return count == 0 || memcmp(a, b, (size_t)count * sizeof *a) == 0;
}

static enum where numpy_where(const Memory *m, PyArrayObject *array)
{
    int n = PyArray_NDIM(array);
    if (PyArray_BASE(array) != (const PyObject *)m)
        return ELSEWHERE;
    if (PyArray_DATA(array) != m->address || n != m->ndim ||
        !same((const int64_t *)PyArray_DIMS(array), m->form, n) ||
        !same((const int64_t *)PyArray_STRIDES(array), m->form + n, n) ||
        !!(PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE) == m->read_only)
        return ALTERED;
    PyObject *dtype = (PyObject *)PyArray_DESCR(array);
    if (dtype == m->dtype)
        return UNCHANGED;
    int equal = PyObject_RichCompareBool(dtype, m->dtype, Py_EQ);
    if (equal < 0)
        PyErr_Clear();
    return equal > 0 ? UNCHANGED : ALTERED;
}

static enum where slow_where(const Memory *m, PyObject *tensor)
{
    PyObject *seen = binding_look(tensor);
    int equal = seen ? PyObject_RichCompareBool(seen, m->dtype, Py_EQ) : -1, there = 0;
    if (equal == 0)
        there = PyObject_RichCompareBool(PyTuple_GET_ITEM(seen, 0), PyTuple_GET_ITEM(m->dtype, 0),
                                         Py_EQ);
    Py_XDECREF(seen);
    PyErr_Clear();
    return equal > 0 ? UNCHANGED : there > 0 ? ALTERED : ELSEWHERE;
}

static enum where tensor_where(const Memory *m, PyObject *tensor)
{
    struct dl_tensor t;
    if (m->dtype)
        return slow_where(m, tensor);
    if (!binding_dl_look(tensor, &t) || (char *)t.data + t.byte_offset != m->address)
        return ELSEWHERE;
    int n = t.ndim;
    bool equal = n == m->ndim && t.code == m->code && t.bits == m->bits && t.lanes == m->lanes &&
                 same(t.shape, m->form, n) && same(t.strides, m->form + n, n);
    return equal ? UNCHANGED : ALTERED;
}

enum where binding_where(const Memory *m, PyObject *object)
{
    return m->tensor ? tensor_where(m, object) : numpy_where(m, (PyArrayObject *)object);
}

static int note_form(Memory *m, int ndim, const int64_t *shape, const int64_t *strides)
{
    int64_t *form = PyMem_Malloc(((size_t)ndim * 2 + 1) * sizeof *form);
    if (!form) {
        PyErr_NoMemory();
        return -1;
    }
    if (ndim) {
        memcpy(form, shape, (size_t)ndim * sizeof *form);
        memcpy(form + ndim, strides, (size_t)ndim * sizeof *form);
    }
    PyMem_Free(m->form);
    m->form = form;
    m->ndim = ndim;
    return 0;
}

int binding_note_tensor(Memory *m, PyObject *tensor)
{
    struct dl_tensor t;
    if (binding_dl_look(tensor, &t)) {
        m->code = t.code;
        m->bits = t.bits;
        m->lanes = t.lanes;
        Py_CLEAR(m->dtype);
        return note_form(m, t.ndim, t.shape, t.strides);
    }
    PyObject *seen = binding_look(tensor);
    if (!seen)
        return -1;
    Py_XSETREF(m->dtype, seen);
    return 0;
}

int binding_note_array(Memory *m, PyObject *object, PyObject *dtype)
{
    PyArrayObject *array = (PyArrayObject *)object;
    Py_XSETREF(m->dtype, Py_NewRef(dtype));
    return note_form(m, PyArray_NDIM(array), (const int64_t *)PyArray_DIMS(array),
                     (const int64_t *)PyArray_STRIDES(array));
}
