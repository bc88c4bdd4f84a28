/* The type `Rows`; `rows.py` says what its methods do. */

#ifndef STOWAGE_ROWS_TYPE_H
#define STOWAGE_ROWS_TYPE_H

#include "arguments.h"
#include "rows.h"

enum { FEW = 512 }; /* rows that are inserted before another thread may take the lock */

static PyObject *rows_new(PyTypeObject *type, PyObject *positional, PyObject *named) {
    Py_ssize_t width;
    int bits = 12, depth = DEPTH_MAX;
    static char *names[] = {"width", "bucket_bits", "depth_max", NULL};
    if (!PyArg_ParseTupleAndKeywords(positional, named, "n|ii:Rows", names, &width, &bits, &depth) ||
        !good_sizes(bits, depth))
        return NULL;
    if (width < 8 || width > 4096 || width % 8) {
        PyErr_SetString(PyExc_ValueError, "the width is a multiple of 8 from 8 to 4096");
        return NULL;
    }
    Rows *r = (Rows *)type->tp_alloc(type, 0);
    if (r == NULL)
        return NULL;
    r->width = width;
    r->first_free = NO_EXTENT;
    if (make_table(&r->table, bits, depth, BLOCK_BITS, (size_t)(KEY_BYTES + width)) < 0) {
        Py_DECREF(r);
        return PyErr_NoMemory();
    }
    return (PyObject *)r;
}

static void rows_dealloc(Rows *r) {
    free_table(&r->table);
    for (int64_t block = 0; block < r->blocks; block++) {
        free(r->table.blocks[block]);
        PyMem_RawFree(r->extents[block]);
    }
    PyMem_RawFree(r->table.blocks);
    PyMem_RawFree(r->extents);
    Py_TYPE(r)->tp_free((PyObject *)r);
}

/* The number of an owner's extent; NO_EXTENT: the object is no extent of this owner. */
static int64_t read_extent(const Rows *r, PyObject *extents, Py_ssize_t at, int64_t owner) {
    int64_t number = PyLong_AsLongLong(PyList_GET_ITEM(extents, at));
    if (number == -1 && PyErr_Occurred())
        return NO_EXTENT;
    if (number >= 0 && number < r->extent_count && extent_of(r, number)->owner == owner)
        return number;
    PyErr_SetString(PyExc_ValueError, "not an extent of this owner");
    return NO_EXTENT;
}

static int read_owner(PyObject *number, int64_t *owner) {
    *owner = PyLong_AsLongLong(number);
    if (*owner == -1 && PyErr_Occurred())
        return -1;
    if (*owner >= 0)
        return 0;
    PyErr_SetString(PyExc_ValueError, "owners are numbers from 0 on");
    return -1;
}

/* Raises RuntimeError if another thread is inside a call: the caller lacks a lock. */
static int is_busy(const Rows *r) {
    if (r->busy)
        PyErr_SetString(PyExc_RuntimeError, "rows are in use by another thread");
    return r->busy;
}

/* Returns extents with room for so many more rows of the owner: its last one, and new ones, which are added to its
   list. The result is to be freed; NULL: an error. */
static int64_t *make_room(Rows *r, int64_t owner, PyObject *list, Py_ssize_t count) {
    int64_t *extents = PyMem_RawMalloc((size_t)(count / EXTENT + 2) * sizeof *extents), room = 0;
    Py_ssize_t known = PyList_GET_SIZE(list), some = 0;
    if (extents == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    if (known > 0) {
        int64_t last = read_extent(r, list, known - 1, owner);
        if (last == NO_EXTENT)
            goto failed;
        room = EXTENT - extent_of(r, last)->used;
        if (room > 0)
            extents[some++] = last;
    }
    for (; room < count; room += EXTENT) {
        int64_t taken = take_extent(r, owner);
        if (append_new(list, taken == NO_EXTENT ? PyErr_NoMemory() : PyLong_FromLongLong(taken)) < 0) {
            if (taken != NO_EXTENT)
                free_extent(r, taken);
            goto failed;
        }
        extents[some++] = taken;
    }
    return extents;
failed:
    PyMem_RawFree(extents);
    return NULL;
}

static int insert_all(Rows *r, int64_t owner, PyObject *list, const char *keys, const char *fields, Py_ssize_t count) {
    int failed;
    int64_t *extents = make_room(r, owner, list, count);
    if (extents == NULL)
        return -1;
    if (count <= FEW) {
        failed = add_rows(r, extents, keys, fields, count);
    } else {
        r->busy = 1;
        Py_BEGIN_ALLOW_THREADS
        failed = add_rows(r, extents, keys, fields, count);
        Py_END_ALLOW_THREADS
        r->busy = 0;
    }
    PyMem_RawFree(extents);
    if (failed)
        PyErr_NoMemory();
    return failed;
}

static PyObject *rows_insert(Rows *r, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer keys = {0}, fields = {0};
    int64_t owner;
    Py_ssize_t count = -1;
    int failed = is_busy(r) || !takes("insert", given, 4) || read_owner(arguments[0], &owner) < 0 ||
                 !is_list("extents", arguments[1]) ||
                 view_items(arguments[2], &keys, &count, KEY_BYTES, PyBUF_SIMPLE) < 0 ||
                 view_items(arguments[3], &fields, &count, r->width, PyBUF_SIMPLE) < 0 ||
                 insert_all(r, owner, arguments[1], keys.buf, fields.buf, count) < 0;
    PyBuffer_Release(&fields);
    PyBuffer_Release(&keys);
    return none_unless(failed);
}

static PyObject *rows_find(Rows *r, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer owners, fields;
    if (is_busy(r) || !takes("find", given, 3))
        return NULL;
    Py_ssize_t count = count_keys(arguments[0]);
    if (count < 0 || view_items(arguments[1], &owners, &count, sizeof(int64_t), PyBUF_WRITABLE) < 0)
        return NULL;
    if (view_items(arguments[2], &fields, &count, r->width, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&owners);
        return NULL;
    }
    const char *keys[GROUP];
    int64_t rows[GROUP];
    Way way = BEGINNING;
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        int some = next_group(arguments[0], first, keys);
        find_rows(r, &way, keys, rows, some);
        for (int i = 0; i < some; i++) {
            int64_t row = rows[i], owner = FREE;
            char *to = (char *)fields.buf + (first + i) * r->width;
            if (row == NO_ROW) {
                memset(to, 0, (size_t)r->width);
            } else {
                memcpy(to, record_of(&r->table, row) + KEY_BYTES, (size_t)r->width);
                owner = extent_of(r, row / EXTENT)->owner;
            }
            memcpy((char *)owners.buf + (first + i) * sizeof owner, &owner, sizeof owner);
        }
    }
    PyBuffer_Release(&fields);
    PyBuffer_Release(&owners);
    Py_RETURN_NONE;
}

static PyObject *rows_drop(Rows *r, PyObject *list) {
    const char *keys[GROUP];
    uint32_t prints[GROUP];
    int64_t likely[GROUP];
    Py_ssize_t count = is_busy(r) ? -1 : count_keys(list), dropped = 0;
    if (count < 0)
        return NULL;
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        int some = next_group(list, first, keys);
        begin_group_found(&r->table, r, fetch_extent, keys, prints, likely, some);
        for (int i = 0; i < some; i++)
            if (keys[i] != NULL)
                dropped += drop_key(r, prints[i], keys[i]);
    }
    return PyLong_FromSsize_t(dropped);
}

static PyObject *rows_mark(Rows *r, PyObject *list) {
    const char *keys[GROUP];
    int64_t rows[GROUP];
    Way way = BEGINNING;
    Py_ssize_t count = is_busy(r) ? -1 : count_keys(list);
    if (count < 0)
        return NULL;
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        int some = next_group(list, first, keys);
        find_rows(r, &way, keys, rows, some);
        for (int i = 0; i < some; i++)
            if (rows[i] != NO_ROW)
                extent_of(r, rows[i] / EXTENT)->marked |= bit_of(rows[i]);
    }
    Py_RETURN_NONE;
}

/* Owner and list of extents, all of them of that owner. */
static int check_extents(const Rows *r, PyObject *const *arguments, int64_t *owner) {
    if (read_owner(arguments[0], owner) < 0 || !is_list("extents", arguments[1]))
        return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[1]); i++)
        if (read_extent(r, arguments[1], i, *owner) == NO_EXTENT)
            return -1;
    return 0;
}

static PyObject *rows_marked(Rows *r, PyObject *const *arguments, Py_ssize_t given) {
    int64_t owner;
    if (is_busy(r) || !takes("marked", given, 2) || check_extents(r, arguments, &owner) < 0)
        return NULL;
    PyObject *keys = PyList_New(0), *fields = PyByteArray_FromStringAndSize(NULL, 0);
    int good = keys != NULL && fields != NULL;
    for (Py_ssize_t i = 0; good && i < PyList_GET_SIZE(arguments[1]); i++) {
        int64_t number = read_extent(r, arguments[1], i, owner);
        uint64_t wanted = extent_of(r, number)->live & extent_of(r, number)->marked;
        for (; good && wanted != 0; wanted &= wanted - 1) {
            const char *record = record_of(&r->table, number * EXTENT + __builtin_ctzll(wanted));
            Py_ssize_t bytes = PyByteArray_GET_SIZE(fields);
            good = append_new(keys, PyBytes_FromStringAndSize(record, KEY_BYTES)) == 0 &&
                   PyByteArray_Resize(fields, bytes + r->width) == 0;
            if (good)
                memcpy(PyByteArray_AS_STRING(fields) + bytes, record + KEY_BYTES, (size_t)r->width);
        }
    }
    if (good)
        return Py_BuildValue("NN", keys, fields);
    Py_XDECREF(keys);
    Py_XDECREF(fields);
    return NULL;
}

static PyObject *rows_release(Rows *r, PyObject *const *arguments, Py_ssize_t given) {
    int64_t owner;
    Py_ssize_t dropped = 0;
    if (is_busy(r) || !takes("release", given, 2) || check_extents(r, arguments, &owner) < 0)
        return NULL;
    for (Py_ssize_t i = PyList_GET_SIZE(arguments[1]) - 1; i >= 0; i--) { /* so that the first is taken again first */
        int64_t number = read_extent(r, arguments[1], i, owner);
        if (number == NO_EXTENT) /* it is in the list twice */
            return NULL;
        dropped += drop_extent(r, number);
    }
    return PyLong_FromSsize_t(dropped);
}

static PyObject *rows_check(Rows *r, PyObject *nothing) {
    return is_busy(r) ? NULL : none_or_wrong(wrong_with_rows(r));
}

static PyObject *rows_used(Rows *r, PyObject *nothing) {
    return PyLong_FromLongLong(r->extent_count - r->free_count);
}

static Py_ssize_t rows_length(Rows *r) { return (Py_ssize_t)r->table.count; }

static PyMethodDef rows_methods[] = {
    {"insert", FAST(rows_insert), METH_FASTCALL, "See `rows.Rows.insert`."},
    {"find", FAST(rows_find), METH_FASTCALL, "See `rows.Rows.find`."},
    {"drop", (PyCFunction)rows_drop, METH_O, "See `rows.Rows.drop`."},
    {"mark", (PyCFunction)rows_mark, METH_O, "See `rows.Rows.mark`."},
    {"marked", FAST(rows_marked), METH_FASTCALL, "See `rows.Rows.marked`."},
    {"release", FAST(rows_release), METH_FASTCALL, "See `rows.Rows.release`."},
    {"extents_used", (PyCFunction)rows_used, METH_NOARGS, "How many extents have an owner."},
    {"check", (PyCFunction)rows_check, METH_NOARGS, "Assert the invariants. Linear in the rows."},
    {NULL},
};

SIZED_TYPE(Rows, rows, "See `rows.Rows`.", NULL)

#endif
