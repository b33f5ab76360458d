/* What every call of the engine needs: its functions, the process, times, errors, the lock. */
#include "_binding.h"

#include <math.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

struct binding_engine binding_engine;

pid_t binding_process;

static void after_fork_in_child(void) { binding_process = getpid(); }

void binding_know_process(void)
{
    if (!binding_process) { /* once in a process */
        binding_process = getpid();
        pthread_atfork(NULL, NULL, after_fork_in_child);
    }
}

bool binding_is_here(const Handle *h) { return h->process == binding_process; }

int64_t binding_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t binding_timeout_ns(PyObject *seconds)
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

PyObject *binding_raise(Handle *h, int status, const struct pms_error *error)
{
    if (error->status != status)
        return PyErr_Format(PyExc_SystemError,
                            "pmstore: a call failed with status %d, its error has %d: %s", status,
                            (int)error->status, error->what);
    PyObject *result = PyObject_CallFunction(h->fail, "K", (unsigned long long)(uintptr_t)error);
    if (result) { /* it always raises */
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "pmstore: a failed call raised nothing");
    }
    return NULL;
}

PyObject *binding_take_lock(Handle *h)
{
    if (!h->lock)
        return NULL;
    PyObject *lock = Py_NewRef(h->lock), *taken = PyObject_CallMethod(lock, "acquire", NULL);
    if (!taken)
        Py_CLEAR(lock);
    Py_XDECREF(taken);
    return lock;
}

void binding_let_go(PyObject *lock)
{
    if (!lock)
        return;
    PyObject *done = PyObject_CallMethod(lock, "release", NULL);
    if (!done)
        PyErr_WriteUnraisable(lock);
    Py_XDECREF(done);
    Py_DECREF(lock);
}
