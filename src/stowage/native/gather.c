/* Reads values of many Python objects. These are small, and those of one list are seldom neighbours in memory, so a
   loop over them waits for each; here the next ones are prefetched while one is read. See core/gather.py. */

#include "binding.h"

#include <structmember.h>

enum { AHEAD = 16 }; /* objects: about as many loads as a processor has in flight */

static inline void fetch_first(PyObject *const *items, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count && i < AHEAD; i++)
        FETCH(items[i]);
}

/* Parses a call's list and range. Returns the items from `begin` on, `*count` of them; NULL: an exception is set. */
static PyObject **range_of(PyObject *const *arguments, Py_ssize_t *count) {
    if (!is_list("items", arguments[0]))
        return NULL;
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
        /* Reading an attribute may run any Python code, which may change the list. */
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

/* The offset of the attribute's slot in objects of a type; -1: it has none, and is read through Python. */
static Py_ssize_t offset_of(PyTypeObject *type, PyObject *name) {
    PyObject *found = type->tp_getattro == PyObject_GenericGetAttr ? PyObject_GetAttr((PyObject *)type, name) : NULL;
    Py_ssize_t offset = -1;
    if (found != NULL && Py_IS_TYPE(found, &PyMemberDescr_Type)) {
        const PyMemberDef *member = ((PyMemberDescrObject *)found)->d_member;
        offset = member->type == T_OBJECT_EX ? member->offset : -1;
    }
    PyErr_Clear();
    Py_XDECREF(found);
    return offset;
}

/* Adds each row's numbers to `found`, or its index to `missing`. All items must be of one type with a slot: then no
   Python code runs, so no list can change. Returns 1 if they are not; -1: an exception is set. */
static int read_rows(PyObject *const **rows, Py_ssize_t count, Py_ssize_t width, PyObject *name, PyObject *without,
                     PyObject *found, PyObject *missing) {
    PyTypeObject *type = NULL;
    for (Py_ssize_t i = 0; i < count && type == NULL; i++)
        if (rows[i] != NULL)
            type = Py_TYPE(rows[i][0]);
    Py_ssize_t offset = type == NULL ? 0 : offset_of(type, name);
    if (offset < 0)
        return 1;
#define FIELD(i, at) (*(PyObject **)((char *)rows[i][at] + offset))
    for (Py_ssize_t i = 0; i < count; i++)
        for (Py_ssize_t at = 0; rows[i] != NULL && at < width; at++) {
            FETCH(&rows[i][at]->ob_type);
            FETCH(&FIELD(i, at));
        }
    for (Py_ssize_t i = 0; i < count; i++)
        for (Py_ssize_t at = 0; rows[i] != NULL && at < width; at++) {
            if (!Py_IS_TYPE(rows[i][at], type) || FIELD(i, at) == NULL)
                return 1;
            FETCH(FIELD(i, at));
        }
    for (Py_ssize_t i = 0; i < count; i++) {
        int whole = rows[i] != NULL;
        for (Py_ssize_t at = 0; whole > 0 && at < width; at++) {
            if (!PyLong_CheckExact(FIELD(i, at)))
                return 1;
            int same = PyObject_RichCompareBool(FIELD(i, at), without, Py_EQ);
            whole = same < 0 ? -1 : !same;
        }
        for (Py_ssize_t at = 0; whole > 0 && at < width; at++)
            if (PyList_Append(found, FIELD(i, at)) < 0)
                whole = -1;
        if (whole == 0)
            whole = append_new(missing, PyLong_FromSsize_t(i));
        if (whole < 0)
            return -1;
    }
#undef FIELD
    return 0;
}

/* Where each row begins in its list; NULL where the list is too short for it. */
static int find_rows_of(PyObject *lists, PyObject *begins, Py_ssize_t width, PyObject *const **rows) {
    Py_ssize_t count = PyList_GET_SIZE(lists);
    for (Py_ssize_t i = 0; i < count; i++)
        FETCH(PyList_GET_ITEM(lists, i));
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *list = PyList_GET_ITEM(lists, i);
        Py_ssize_t begin = PyLong_AsSsize_t(PyList_GET_ITEM(begins, i));
        if (begin == -1 && PyErr_Occurred())
            return -1;
        if (!PyList_Check(list) || begin < 0) {
            PyErr_SetString(PyExc_TypeError, "lists, and where in each of them a row begins");
            return -1;
        }
        rows[i] = PyList_GET_SIZE(list) - width < begin ? NULL : ((PyListObject *)list)->ob_item + begin;
        FETCH(rows[i]);
    }
    return 0;
}

static PyObject *rows(PyObject *Py_UNUSED(self), PyObject *const *arguments, Py_ssize_t given) {
    if (!takes("rows", given, 5))
        return NULL;
    Py_ssize_t width = PyLong_AsSsize_t(arguments[2]);
    if (!PyList_Check(arguments[0]) || !PyList_Check(arguments[1]) || !PyLong_CheckExact(arguments[4]) || width < 1 ||
        PyList_GET_SIZE(arguments[0]) != PyList_GET_SIZE(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "as many lists as beginnings, a width from 1 on and a number are needed");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(arguments[0]);
    PyObject *const **found_rows = PyMem_Malloc((size_t)count * sizeof *found_rows + 1);
    PyObject *found = PyList_New(0), *missing = PyList_New(0);
    int failed = -1;
    if (found_rows == NULL)
        PyErr_NoMemory();
    else if (found != NULL && missing != NULL && find_rows_of(arguments[0], arguments[1], width, found_rows) == 0)
        failed = read_rows(found_rows, count, width, arguments[3], arguments[4], found, missing);
    PyMem_Free(found_rows);
    PyObject *both = failed == 0 ? PyTuple_Pack(2, found, missing) : failed > 0 ? Py_NewRef(Py_None) : NULL;
    Py_XDECREF(found);
    Py_XDECREF(missing);
    return both;
}

static PyMethodDef functions[] = {
    {"packed_u32", FAST(packed_u32), METH_FASTCALL, "The numbers of a list from one index to another, 4 bytes each."},
    {"attributes", FAST(attributes), METH_FASTCALL, "An attribute of the items of a list from one index to another."},
    {"rows", FAST(rows), METH_FASTCALL, "An attribute of so many items of each list, and which lists lack some."},
    {NULL},
};

int add_gather(PyObject *module) { return PyModule_AddFunctions(module, functions); }
