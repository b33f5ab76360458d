/* pmstore._engine._binding: the parts of the Python layer in which no bytecode may run.
 *
 * A KeyboardInterrupt can arrive between any two bytecodes. Where the engine has acted and
 * Python does not know it yet, it would leave a lock held, a block pinned or a transaction open.
 * So these steps are C functions, after which the engine's state and an object's state always
 * agree:
 *
 *   _calls.c        what every call of the engine needs
 *   _handle.c       Handle opens a pool and owns it: the last reference closes it (roll back) and
 *                   releases it
 *   _transaction.c  Transaction: the with statement's two halves
 *   _objects.c      the methods of Handle that look objects up and store values
 *   _memory.c       Memory pins a block and exports it as a buffer: the last reference unpins it
 *   _exports.c      arrays that are told before their memory is given out
 *   _look.c         whether what was given out over a Memory still lies there
 *
 * Others are here because a training step asks them of each of its objects:
 *
 *   _watch.c        Watch: whether containers hold what they held, and tensors lie where they lay
 *   _spent.c        Spent: gradients that an optimizer has used
 *   _encode.c       states as bytes
 *   _plain.c        plain names and values
 *   _declared.c     what a transaction block, and an optimizer's step, say beforehand that they
 * write
 *
 * This module does not link with the engine: `bind` is given the addresses of the functions in
 * pmstore._engine._native, so that there is one engine in the process. A status becomes an
 * exception in failures.py alone: `fail` is its callable.
 *
 * The GIL is given up around every call of the engine that can wait, and the engine never takes
 * it. Supported: the main interpreter of a build with a GIL. A subinterpreter gets an
 * ImportError; a free-threaded build takes its GIL back. */
#include "_binding.h"

/* bind(addresses of the functions of struct binding_engine, in its order) */
static PyObject *bind(PyObject *module, PyObject *args)
{
    (void)module;
    uintptr_t f[sizeof binding_engine / sizeof binding_engine.open];
    _Static_assert(sizeof f == sizeof binding_engine, "functions, and nothing else");
    Py_ssize_t count = sizeof f / sizeof *f;
    if (PyTuple_GET_SIZE(args) != count) {
        PyErr_Format(PyExc_TypeError, "bind takes the addresses of %zd functions", count);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        f[i] = (uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(args, i));
    if (PyErr_Occurred())
        return NULL;
    memcpy(&binding_engine, f, sizeof f);
    binding_engine.set_tasks(binding_whose);
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"bind", bind, METH_VARARGS,
     "bind(the addresses of the functions of struct binding_engine, in its order)"},
    {"exchange_with", binding_exchange_with, METH_VARARGS,
     "exchange_with(torch's DLPack capsule or None, look): how tensors are looked at"},
    {"tell_of_exports", binding_tell_of_exports, METH_O,
     "tell_of_exports(class over numpy.ndarray): x._exported() is called before a buffer of x is "
     "given out that a system call may write"},
    {"encode", binding_encode, METH_VARARGS,
     "encode(state, types of arrays) -> (bytes, arrays), as structure.split and values.encode make "
     "them; None: it holds something that only those know"},
    {"read_only", binding_read_only, METH_VARARGS,
     "read_only(types in place of dict and list): of values that are looked up"},
    {"same_bytes", binding_same_bytes, METH_VARARGS,
     "same_bytes(one, other) -> of buffers or tensors; None: one is no run of bytes. one: also a "
     "tuple of them, one behind the other"},
    {"trained", binding_trained, METH_O,
     "trained(parameters) -> of each a byte: whether it requires a gradient"},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    /* Python 3.12 and later are told by Py_mod_multiple_interpreters; this says it to all. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(
            PyExc_ImportError,
            "pmstore works in the main interpreter only: its types and the engine are one for "
            "the process");
        return -1;
    }
    binding_know_process();
    if (binding_add_handle(module) < 0 || binding_add_memory(module) < 0 ||
        binding_add_transaction(module) < 0 || binding_add_found(module) < 0 ||
        binding_add_watch(module) < 0 || binding_add_spent(module) < 0 ||
        binding_add_writes(module) < 0)
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
    .m_name = "pmstore._engine._binding",
    .m_doc = "The steps between Python and the engine that no interrupt may split. See _binding.c.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__binding(void) { return PyModuleDef_Init(&module_def); }
