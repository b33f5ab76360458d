/* Plain names and values: what a look-up or an assignment of them needs of Python, in C. What is
 * not plain is said so, and left to names.py and values.py. */
#include "_binding.h"

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

/* ---- decoding: most of what _encode.c makes ---- */

#define DEPTH_MAX 10

static PyTypeObject *Dict, *List; /* of objects/readonly.py */

/* read_only(types in place of dict and list) */
PyObject *binding_read_only(PyObject *module, PyObject *args)
{
    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &Dict, &PyType_Type, &List))
        return NULL;
    Py_INCREF(Dict); /* for good: they are the package's */
    Py_INCREF(List);
    Py_RETURN_NONE;
}

struct in {
    const unsigned char *at;
    size_t left;
};

static const unsigned char *take(struct in *in, size_t bytes)
{
    const unsigned char *at = in->at;
    if (bytes > in->left)
        return NULL;
    in->at += bytes;
    in->left -= bytes;
    return at;
}

static bool take_number(struct in *in, size_t bytes, uint64_t *n) /* in network order */
{
    const unsigned char *at = take(in, bytes);
    *n = 0;
    for (size_t i = 0; at && i < bytes; i++)
        *n = *n << 8 | at[i];
    return at != NULL;
}

static PyObject *take_text(struct in *in, size_t bytes)
{
    const unsigned char *at = take(in, bytes);
    return at ? PyUnicode_DecodeUTF8((const char *)at, (Py_ssize_t)bytes, NULL) : NULL;
}

static PyObject *take_bytes(struct in *in, size_t bytes)
{
    const unsigned char *at = take(in, bytes);
    return at ? PyBytes_FromStringAndSize((const char *)at, (Py_ssize_t)bytes) : NULL;
}

/* A value that holds no others. */
static PyObject *take_leaf(struct in *in, unsigned char tag)
{
    uint64_t n = 0;
    double real;
    if (tag < 0x80 || tag >= 0xe0)
        return PyLong_FromLong((signed char)tag);
    if (tag >= 0xa0 && tag < 0xc0)
        return take_text(in, tag & 0x1fu);
    if (tag >= 0xcc && tag <= 0xcf)
        return take_number(in, 1u << (tag - 0xcc), &n) ? PyLong_FromUnsignedLongLong(n) : NULL;
    if (tag >= 0xd0 && tag <= 0xd3) {
        unsigned bytes = 1u << (tag - 0xd0), above = 64 - 8 * bytes;
        bool whole = take_number(in, bytes, &n);
        return whole ? PyLong_FromLongLong((int64_t)(n << above) >> above) : NULL;
    }
    switch (tag) {
    case 0xc0: return Py_NewRef(Py_None);
    case 0xc2: return Py_NewRef(Py_False);
    case 0xc3: return Py_NewRef(Py_True);
    case 0xc4: return take_number(in, 1, &n) ? take_bytes(in, n) : NULL;
    case 0xd9: return take_number(in, 1, &n) ? take_text(in, n) : NULL;
    case 0xcb:
        if (!take_number(in, 8, &n))
            return NULL;
        memcpy(&real, &n, sizeof real);
        return PyFloat_FromDouble(real);
    default: return NULL;
    }
}

static PyObject *take_item(struct in *in, int depth);

static PyObject *take_list(struct in *in, size_t count, int depth)
{
    PyObject *list = PyObject_CallNoArgs((PyObject *)List);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = take_item(in, depth);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *take_dict(struct in *in, size_t count, int depth)
{
    PyObject *dict = PyObject_CallNoArgs((PyObject *)Dict);
    for (size_t i = 0; dict && i < count; i++) {
        const unsigned char *tag = take(in, 1);
        PyObject *key = tag ? take_leaf(in, *tag) : NULL, *item = key ? take_item(in, depth) : NULL;
        if (!item || PyDict_SetItem(dict, key, item) < 0)
            Py_CLEAR(dict);
        Py_XDECREF(key);
        Py_XDECREF(item);
    }
    return dict;
}

static PyObject *take_item(struct in *in, int depth)
{
    const unsigned char *tag = take(in, 1);
    if (!tag || depth == DEPTH_MAX)
        return NULL;
    if (*tag >= 0x80 && *tag < 0x90)
        return take_dict(in, *tag & 0xfu, depth + 1);
    if (*tag >= 0x90 && *tag < 0xa0)
        return take_list(in, *tag & 0xfu, depth + 1);
    return take_leaf(in, *tag);
}

PyObject *binding_plain_value(const void *encoded, size_t bytes)
{
    if (!List)
        return NULL;
    struct in in = {encoded, bytes};
    PyObject *value = take_item(&in, 0);
    if (in.left)
        Py_CLEAR(value);
    if (!value && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        PyErr_Clear(); /* values.py says so */
    return value;
}
