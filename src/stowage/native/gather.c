/* What lies scattered: Python's objects are small, and those of one list are seldom neighbours in memory. A loop over
   them waits for each; here the next ones are on their way while one is read. See core/gather.py. */

#include "binding.h"

enum { AHEAD = 16 }; /* objects: about as many as a processor has under way */

static inline void fetch_first(PyObject *const *items, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count && i < AHEAD; i++)
        FETCH(items[i]);
}

/* The list and the range of a call. The items from `begin` on, `*count` of them; NULL: an exception is set. */
static PyObject **range_of(PyObject *const *arguments, Py_ssize_t *count) {
    if (!PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "a list is needed");
        return NULL;
    }
    Py_ssize_t begin = PyLong_AsSsize_t(arguments[1]), end = PyLong_AsSsize_t(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    if (end > PyList_GET_SIZE(arguments[0]))
        end = PyList_GET_SIZE(arguments[0]);
    if (begin < 0) {
        PyErr_SetString(PyExc_ValueError, "a range begins at 0 or later");
        return NULL;
    }
    *count = end > begin ? end - begin : 0;
    return ((PyListObject *)arguments[0])->ob_item + begin;
}

static PyObject *packed_u32(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t given) {
    Py_ssize_t count;
    if (!takes("packed_u32", given, 3))
        return NULL;
    PyObject **items = range_of(arguments, &count);
    PyObject *packed = items == NULL && PyErr_Occurred() ? NULL : PyBytes_FromStringAndSize(NULL, 4 * count);
    if (packed == NULL)
        return NULL;
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(packed);
    fetch_first(items, count);
    for (Py_ssize_t i = 0; i < count; i++, to += 4) {
        if (i + AHEAD < count)
            FETCH(items[i + AHEAD]);
        long long number = PyLong_Check(items[i]) ? PyLong_AsLongLong(items[i]) : -1;
        if (number < 0 || number > UINT32_MAX) {
            PyErr_Clear();
            PyErr_SetString(PyExc_ValueError, "token ids must be integers in [0, 2^32)");
            Py_DECREF(packed);
            return NULL;
        }
        to[0] = (uint8_t)number;
        to[1] = (uint8_t)(number >> 8);
        to[2] = (uint8_t)(number >> 16);
        to[3] = (uint8_t)(number >> 24);
    }
    return packed;
}

static PyObject *attributes(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t given) {
    Py_ssize_t count;
    if (!takes("attributes", given, 4))
        return NULL;
    PyObject **items = range_of(arguments, &count);
    PyObject *found = items == NULL && PyErr_Occurred() ? NULL : PyList_New(count);
    if (found == NULL)
        return NULL;
    fetch_first(items, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        /* An attribute may be computed by anything, which may change the list. */
        items = range_of(arguments, &given);
        PyObject *value = NULL;
        if (items != NULL && given == count) {
            PyObject *item = Py_NewRef(items[i]);
            value = PyObject_GetAttr(item, arguments[3]);
            Py_DECREF(item);
        }
        if (value == NULL) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "the list was changed");
            Py_DECREF(found);
            return NULL;
        }
        PyList_SET_ITEM(found, i, value);
    }
    return found;
}

static PyMethodDef functions[] = {
    {"packed_u32", FAST(packed_u32), METH_FASTCALL, "The numbers of a list from one index to another, 4 bytes each."},
    {"attributes", FAST(attributes), METH_FASTCALL, "An attribute of the items of a list from one index to another."},
    {NULL},
};

int add_gather(PyObject *module) { return PyModule_AddFunctions(module, functions); }
