/* The arguments of Python's calls. They are checked before anything is changed, except for duplicates in a list. */

#ifndef STOWAGE_TABLE_ARGUMENTS_H
#define STOWAGE_TABLE_ARGUMENTS_H

#include "table.h"

/* Gets a buffer of `count` items; the caller releases it if this returns 0. `count` of -1: any number; it is set. */
static int view_items(PyObject *array, Py_buffer *view, Py_ssize_t *count, Py_ssize_t bytes, int flags) {
    if (PyObject_GetBuffer(array, view, flags) < 0)
        return -1;
    if (*count < 0 && view->len % bytes == 0)
        *count = view->len / bytes;
    if (*count >= 0 && view->len == *count * bytes)
        return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "an array of another length: items of %zd bytes are needed", bytes);
    return -1;
}

/* A key of another length is in no table. */
static inline const char *chars_of(PyObject *key) {
    return PyBytes_GET_SIZE(key) == KEY_BYTES ? PyBytes_AS_STRING(key) : NULL;
}

/* Reads up to GROUP keys of a list from `first` on. Returns how many. */
static inline int next_group(PyObject *list, Py_ssize_t first, const char **keys) {
    Py_ssize_t left = PyList_GET_SIZE(list) - first;
    int count = left < GROUP ? (int)left : GROUP;
    for (int i = 0; i < count; i++)
        keys[i] = chars_of(PyList_GET_ITEM(list, first + i));
    return count;
}

static PyObject *none_or_wrong(const char *wrong) {
    if (wrong != NULL) {
        PyErr_SetString(PyExc_AssertionError, wrong);
        return NULL;
    }
    Py_RETURN_NONE;
}

static int good_sizes(int bits, int depth) {
    if (bits >= 1 && bits <= 16 && depth >= 0 && depth <= DEPTH_MAX)
        return 1;
    PyErr_SetString(PyExc_ValueError, "1 to 16 bits of a bucket, 0 to 20 bits of the directory");
    return 0;
}

#endif
