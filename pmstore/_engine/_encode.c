/* encode: a structure of plain values and arrays as the bytes that a store keeps, and its arrays.
 * The same bytes as structure.split and values.encode make, in one pass; of what only those know it
 * says so, and is asked no further. docs/FORMAT.md has the bytes: msgpack, and marks. */
#include "_binding.h"

#define DEPTH_MAX 50 /* half of values.MAX_DEPTH: a mark is deeper than what it stands for */
#define EXT_TUPLE 3

/* of objects/structure.py: what stands for an array */
#define MARK "pmstore"

struct out {
    char *at;
    size_t bytes, room;
    PyObject *arrays;       /* list */
    PyObject *const *kinds; /* types of arrays */
    Py_ssize_t kinds_count;
};

enum done { FAILED = -1, DONE, NOT_KNOWN };

static bool put(struct out *o, const void *from, size_t bytes)
{
    if (o->bytes + bytes > o->room) {
        size_t room = 2 * (o->bytes + bytes) + 256;
        char *more = PyMem_Realloc(o->at, room);
        if (!more) {
            PyErr_NoMemory();
            return false;
        }
        o->at = more;
        o->room = room;
    }
    memcpy(o->at + o->bytes, from, bytes);
    o->bytes += bytes;
    return true;
}

/* A tag, and a number of so many bytes in network order. */
static bool put_number(struct out *o, unsigned tag, uint64_t number, int bytes)
{
    unsigned char all[9] = {(unsigned char)tag};
    for (int i = 0; i < bytes; i++)
        all[1 + i] = (unsigned char)(number >> 8 * (bytes - 1 - i));
    return put(o, all, (size_t)bytes + 1);
}

static bool put_unsigned(struct out *o, uint64_t n)
{
    if (n < 0x80)
        return put_number(o, (unsigned)n, 0, 0);
    int bytes = n <= UINT8_MAX ? 1 : n <= UINT16_MAX ? 2 : n <= UINT32_MAX ? 4 : 8;
    unsigned tag = bytes == 1 ? 0xcc : bytes == 2 ? 0xcd : bytes == 4 ? 0xce : 0xcf;
    return put_number(o, tag, n, bytes);
}

static bool put_negative(struct out *o, int64_t n)
{
    if (n >= -32)
        return put_number(o, (unsigned)(n & 0xff), 0, 0);
    int bytes = n >= INT8_MIN ? 1 : n >= INT16_MIN ? 2 : n >= INT32_MIN ? 4 : 8;
    unsigned tag = bytes == 1 ? 0xd0 : bytes == 2 ? 0xd1 : bytes == 4 ? 0xd2 : 0xd3;
    return put_number(o, tag, (uint64_t)n, bytes);
}

static enum done put_int(struct out *o, PyObject *number)
{
    int beyond = 0;
    long long n = PyLong_AsLongLongAndOverflow(number, &beyond);
    if (beyond)
        return NOT_KNOWN;
    return (n < 0 ? put_negative(o, n) : put_unsigned(o, (uint64_t)n)) ? DONE : FAILED;
}

static bool put_float(struct out *o, double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return put_number(o, 0xcb, bits, 8);
}

/* few: the tag up to `fewest - 1` items, which it holds; then tag[0..2] for 1, 2 and 4 bytes of
 * length; 0: there is none of that size. */
static bool put_length(struct out *o, size_t length, unsigned few, size_t fewest,
                       const unsigned char tag[3])
{
    if (length < fewest)
        return put_number(o, few | (unsigned)length, 0, 0);
    if (tag[0] && length <= UINT8_MAX)
        return put_number(o, tag[0], length, 1);
    if (length <= UINT16_MAX)
        return put_number(o, tag[1], length, 2);
    return put_number(o, tag[2], length, 4);
}

static bool put_array_length(struct out *o, size_t length)
{
    return put_length(o, length, 0x90, 16, (unsigned char[]){0, 0xdc, 0xdd});
}

static bool put_map_length(struct out *o, size_t length)
{
    return put_length(o, length, 0x80, 16, (unsigned char[]){0, 0xde, 0xdf});
}

static bool put_string(struct out *o, const char *text, size_t bytes)
{
    return put_length(o, bytes, 0xa0, 32, (unsigned char[]){0xd9, 0xda, 0xdb}) &&
           put(o, text, bytes);
}

static enum done put_text(struct out *o, PyObject *text)
{
    Py_ssize_t bytes;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &bytes);
    if (!utf8) { /* a lone surrogate */
        PyErr_Clear();
        return NOT_KNOWN;
    }
    if ((uint64_t)bytes > UINT32_MAX)
        return NOT_KNOWN;
    return put_string(o, utf8, (size_t)bytes) ? DONE : FAILED;
}

static enum done put_bytes(struct out *o, PyObject *bytes)
{
    size_t length = (size_t)PyBytes_Size(bytes);
    const unsigned char tag[] = {0xc4, 0xc5, 0xc6};
    if (length > UINT32_MAX)
        return NOT_KNOWN;
    return put_length(o, length, 0, 0, tag) && put(o, PyBytes_AsString(bytes), length) ? DONE
                                                                                       : FAILED;
}

/* Also a key, if it holds nothing. */
static enum done put_leaf(struct out *o, PyObject *item)
{
    if (item == Py_None)
        return put_number(o, 0xc0, 0, 0) ? DONE : FAILED;
    if (PyBool_Check(item))
        return put_number(o, item == Py_True ? 0xc3 : 0xc2, 0, 0) ? DONE : FAILED;
    if (PyLong_CheckExact(item))
        return put_int(o, item);
    if (PyFloat_CheckExact(item))
        return put_float(o, PyFloat_AsDouble(item)) ? DONE : FAILED;
    if (PyUnicode_CheckExact(item))
        return put_text(o, item);
    return PyBytes_CheckExact(item) ? put_bytes(o, item) : NOT_KNOWN;
}

static enum done put_array(struct out *o, PyObject *item)
{
    for (Py_ssize_t i = 0; i < o->kinds_count; i++) {
        if ((PyObject *)Py_TYPE(item) != o->kinds[i])
            continue;
        if (PyList_Append(o->arrays, item) < 0)
            return FAILED;
        uint64_t index = (uint64_t)PyList_Size(o->arrays) - 1;
        bool fits = put_map_length(o, 2) && put_string(o, MARK, strlen(MARK)) &&
                    put_string(o, "array", 5) && put_string(o, "index", 5) &&
                    put_unsigned(o, index);
        return fits ? DONE : FAILED;
    }
    return NOT_KNOWN;
}

static enum done put_item(struct out *o, PyObject *item, int depth);

/* Runs no code that could change the container. */
static enum done put_sequence(struct out *o, PyObject *sequence, int depth)
{
    bool tuple = PyTuple_CheckExact(sequence);
    Py_ssize_t count = tuple ? PyTuple_Size(sequence) : PyList_Size(sequence);
    if (!put_array_length(o, (size_t)count + tuple) ||
        (tuple && !put(o, (char[]){(char)0xc7, 0, EXT_TUPLE}, 3)))
        return FAILED;
    enum done done = DONE;
    for (Py_ssize_t i = 0; done == DONE && i < count; i++)
        done = put_item(o, tuple ? PyTuple_GetItem(sequence, i) : PyList_GetItem(sequence, i),
                        depth);
    return done;
}

static bool is_mark(PyObject *key)
{
    return PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, MARK) == 0;
}

static enum done put_dict(struct out *o, PyObject *dict, int depth)
{
    PyObject *key, *value;
    enum done done = put_map_length(o, (size_t)PyDict_Size(dict)) ? DONE : FAILED;
    for (Py_ssize_t at = 0; done == DONE && PyDict_Next(dict, &at, &key, &value);) {
        done = is_mark(key) ? NOT_KNOWN : put_leaf(o, key);
        if (done == DONE)
            done = put_item(o, value, depth);
    }
    return done;
}

static enum done put_item(struct out *o, PyObject *item, int depth)
{
    enum done done = put_leaf(o, item);
    if (done != NOT_KNOWN)
        return done;
    if (depth == DEPTH_MAX)
        return NOT_KNOWN;
    if (PyDict_CheckExact(item))
        return put_dict(o, item, depth + 1);
    if (PyList_CheckExact(item) || PyTuple_CheckExact(item))
        return put_sequence(o, item, depth + 1);
    return put_array(o, item);
}

int binding_encode_plain(PyObject *value, char **encoded, size_t *bytes)
{
    struct out o = {0};
    enum done done = put_item(&o, value, 0);
    if (done != DONE)
        PyMem_Free(o.at);
    *encoded = o.at;
    *bytes = o.bytes;
    return done == DONE ? 1 : done == NOT_KNOWN ? 0 : -1;
}

/* encode(state, types of arrays) -> (bytes, arrays), or None */
PyObject *binding_encode(PyObject *module, PyObject *args)
{
    PyObject *state, *kinds, *kind[4];
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!", &state, &PyTuple_Type, &kinds))
        return NULL;
    struct out o = {.kinds = kind, .arrays = PyList_New(0)};
    while (o.kinds_count < PyTuple_Size(kinds) && o.kinds_count < 4) {
        kind[o.kinds_count] = PyTuple_GetItem(kinds, o.kinds_count);
        o.kinds_count++;
    }
    enum done done = o.arrays ? put_item(&o, state, 0) : FAILED;
    PyObject *result = NULL;
    if (done == NOT_KNOWN)
        result = Py_NewRef(Py_None);
    else if (done == DONE)
        result = Py_BuildValue("y#O", o.at, (Py_ssize_t)o.bytes, o.arrays);
    Py_XDECREF(o.arrays);
    PyMem_Free(o.at);
    return result;
}

/* ---- bytes ---- */

struct bytes {
    Py_buffer view;
    const void *at;
    size_t count;
    bool exported;
};

/* Of a buffer, or of a tensor on the CPU: whose bytes lie one behind the other. Raises nothing. */
static bool find_bytes(PyObject *object, struct bytes *b)
{
    struct dl_tensor t;
    b->exported = PyObject_CheckBuffer(object) &&
                  PyObject_GetBuffer(object, &b->view, PyBUF_SIMPLE) == 0;
    if (b->exported) {
        b->at = b->view.buf;
        b->count = (size_t)b->view.len;
        return true;
    }
    PyErr_Clear();
    if (PyObject_CheckBuffer(object) || !binding_dl_look(object, &t) || t.bits % 8)
        return false;
    int64_t step = 1;
    for (int i = t.ndim - 1; i >= 0; i--) {
        if (t.shape[i] != 1 && t.strides[i] != step)
            return false;
        step *= t.shape[i];
    }
    b->at = (char *)t.data + t.byte_offset;
    b->count = (size_t)step * t.bits / 8 * t.lanes;
    return true;
}

/* Whether they are the next bytes of the rest, which then begins behind them; -1: not known. */
static int takes_up(PyObject *object, struct bytes *rest)
{
    struct bytes b = {0};
    if (!find_bytes(object, &b))
        return -1;
    int same = b.count <= rest->count && (!b.count || memcmp(b.at, rest->at, b.count) == 0);
    rest->at = (const char *)rest->at + (same ? b.count : 0);
    rest->count -= same ? b.count : 0;
    if (b.exported)
        PyBuffer_Release(&b.view);
    return same;
}

int binding_same(PyObject *one, PyObject *other)
{
    struct bytes rest = {0};
    int same = find_bytes(other, &rest) ? 1 : -1;
    if (!PyTuple_CheckExact(one)) {
        if (same > 0)
            same = takes_up(one, &rest);
    } else {
        for (Py_ssize_t i = 0; same > 0 && i < PyTuple_Size(one); i++)
            same = takes_up(PyTuple_GetItem(one, i), &rest);
    }
    if (rest.exported)
        PyBuffer_Release(&rest.view);
    return same > 0 ? !rest.count : same;
}

/* same_bytes(one, other) -> whether their bytes are; None: not known. */
PyObject *binding_same_bytes(PyObject *module, PyObject *args)
{
    PyObject *one, *other;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &one, &other))
        return NULL;
    int same = binding_same(one, other);
    return same < 0 ? Py_NewRef(Py_None) : PyBool_FromLong(same);
}
