/* Plain names and values: what a look-up or an assignment of them needs of Python, in C. What is
 * not plain is said so, and left to names.py and values.py. */
#include "_binding.h"

#define MANY_BYTES 512 /* of a value that is decoded here */

bool binding_plain_path(PyObject *prefix, PyObject *name, struct plain_path *path)
{
    Py_ssize_t bytes = 0, before = PyBytes_CheckExact(prefix) ? PyBytes_GET_SIZE(prefix) : -1;
    const char *utf8 = PyUnicode_CheckExact(name) ? PyUnicode_AsUTF8AndSize(name, &bytes) : NULL;
    if (!utf8)
        PyErr_Clear(); /* a lone surrogate */
    if (!utf8 || bytes == 0 || before < 0 || bytes + before > (Py_ssize_t)sizeof path->at ||
        memchr(utf8, '/', (size_t)bytes) || memchr(utf8, 0, (size_t)bytes))
        return false;
    memcpy(path->at, PyBytes_AS_STRING(prefix), (size_t)before);
    memcpy(path->at + before, utf8, (size_t)bytes);
    path->bytes = (uint32_t)(before + bytes);
    return true;
}

/* ---- decoding: what _encode.c makes of a value that holds no others ---- */

static uint64_t number(const unsigned char *at, size_t bytes) /* in network order */
{
    uint64_t n = 0;
    for (size_t i = 0; i < bytes; i++)
        n = n << 8 | at[i];
    return n;
}

static PyObject *float_of(const unsigned char *at)
{
    uint64_t bits = number(at, 8);
    double value;
    memcpy(&value, &bits, sizeof value);
    return PyFloat_FromDouble(value);
}

static PyObject *signed_of(const unsigned char *at, size_t bytes)
{
    unsigned above = 64 - 8 * (unsigned)bytes;
    return PyLong_FromLongLong((int64_t)(number(at, bytes) << above) >> above);
}

/* n: bytes behind the tag, of which there is one. A length says how many follow it. */
static PyObject *leaf(const unsigned char *at, size_t n)
{
    const unsigned char tag = *at++;
    if (n == 0)
        switch (tag) {
        case 0xc0: return Py_NewRef(Py_None);
        case 0xc2: return Py_NewRef(Py_False);
        case 0xc3: return Py_NewRef(Py_True);
        case 0xa0: return PyUnicode_FromStringAndSize("", 0);
        default: return tag < 0x80 || tag >= 0xe0 ? PyLong_FromLong((signed char)tag) : NULL;
        }
    if (tag == 0xcb && n == 8)
        return float_of(at);
    if (tag >= 0xcc && tag <= 0xcf && n == 1u << (tag - 0xcc))
        return PyLong_FromUnsignedLongLong(number(at, n));
    if (tag >= 0xd0 && tag <= 0xd3 && n == 1u << (tag - 0xd0))
        return signed_of(at, n);
    if (tag >= 0xa0 && tag < 0xc0 && n == (tag & 0x1fu))
        return PyUnicode_DecodeUTF8((const char *)at, (Py_ssize_t)n, NULL);
    if (tag == 0xd9 && at[0] == n - 1)
        return PyUnicode_DecodeUTF8((const char *)at + 1, (Py_ssize_t)n - 1, NULL);
    if (tag == 0xc4 && at[0] == n - 1)
        return PyBytes_FromStringAndSize((const char *)at + 1, (Py_ssize_t)n - 1);
    return NULL;
}

PyObject *binding_plain_value(const void *encoded, size_t bytes)
{
    unsigned char own[MANY_BYTES]; /* whoever changes it meanwhile */
    if (bytes == 0 || bytes > sizeof own)
        return NULL;
    memcpy(own, encoded, bytes);
    PyObject *value = leaf(own, bytes - 1);
    if (!value && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_MemoryError))
        PyErr_Clear(); /* text that is no UTF-8: values.py says so */
    return value;
}
