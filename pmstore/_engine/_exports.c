/* Arrays that are told before memory of them is given out that may be written where no page fault
 * tells of it: a system call stores into it. */
#include "_binding.h"

static getbufferproc plain_export; /* of the base: numpy's */

static int told_export(PyObject *self, Py_buffer *view, int flags)
{
    /* Readinto and its like ask for writable bytes and no more. memoryview(x), which may be given
     * to them, does not say whether it will be written through. Cython and others, who store by the
     * CPU, ask for shapes, too. */
    if (flags == PyBUF_WRITABLE || flags == PyBUF_FULL_RO) {
        PyObject *none = PyObject_CallMethod(self, "_exported", NULL);
        if (!none) {
            view->obj = NULL;
            return -1;
        }
        Py_DECREF(none);
    }
    return plain_export(self, view, flags);
}

/* tell_of_exports(class over numpy.ndarray) */
PyObject *binding_tell_of_exports(PyObject *module, PyObject *type)
{
    (void)module;
    PyTypeObject *t = (PyTypeObject *)type, *base = PyType_Check(type) ? t->tp_base : NULL;
    if (!base || !(t->tp_flags & Py_TPFLAGS_HEAPTYPE) || !base->tp_as_buffer ||
        !base->tp_as_buffer->bf_getbuffer) {
        PyErr_SetString(PyExc_TypeError, "tell_of_exports takes a class over numpy.ndarray");
        return NULL;
    }
    plain_export = base->tp_as_buffer->bf_getbuffer;
    t->tp_as_buffer->bf_getbuffer = told_export; /* a class of Python has slots of its own */
    Py_RETURN_NONE;
}
