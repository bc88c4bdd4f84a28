/* The type `Slots`; `keymap.py` says what it is for. */

#ifndef STOWAGE_SLOTS_TYPE_H
#define STOWAGE_SLOTS_TYPE_H

#include "arguments.h"
#include "slots.h"

static PyObject *slots_new(PyTypeObject *type, PyObject *positional, PyObject *named) {
    long long slots;
    int bits = 12, depth = DEPTH_MAX;
    static char *names[] = {"slots", "bucket_bits", "depth_max", NULL};
    if (!PyArg_ParseTupleAndKeywords(positional, named, "L|ii:Slots", names, &slots, &bits, &depth) ||
        !good_sizes(bits, depth))
        return NULL;
    if (slots < 0 || slots >= INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "0 to 2^31 - 2 slots");
        return NULL;
    }
    Slots *s = (Slots *)type->tp_alloc(type, 0);
    if (s == NULL)
        return NULL;
    s->slots = slots;
    s->keys = PyMem_RawCalloc((size_t)slots + 1, KEY_BYTES);
    s->taken = PyMem_RawCalloc((size_t)slots + 1, 1);
    if (s->keys == NULL || s->taken == NULL || make_table(&s->table, bits, depth, 31, KEY_BYTES) < 0) {
        Py_DECREF(s);
        return PyErr_NoMemory();
    }
    s->table.blocks = &s->keys;
    return (PyObject *)s;
}

static void slots_dealloc(Slots *s) {
    free_table(&s->table);
    PyMem_RawFree(s->keys);
    PyMem_RawFree(s->taken);
    Py_TYPE(s)->tp_free((PyObject *)s);
}

/* Numbers from 0 to slots - 1. */
static int check_slots(const Slots *s, const Py_buffer *view, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t slot;
        memcpy(&slot, (const char *)view->buf + i * sizeof slot, sizeof slot);
        if (slot < 0 || slot >= s->slots) {
            PyErr_Format(PyExc_IndexError, "slot %lld of %lld", (long long)slot, (long long)s->slots);
            return -1;
        }
    }
    return 0;
}

static int set_all(Slots *s, PyObject *list, const char *slots, Py_ssize_t count) {
    const char *keys[GROUP];
    uint32_t prints[GROUP];
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i % GROUP == 0)
            begin_group(&s->table, keys, prints, next_group(list, i, keys));
        int64_t slot;
        memcpy(&slot, slots + i * sizeof slot, sizeof slot);
        int done = set_slot(s, prints[i % GROUP], keys[i % GROUP], slot);
        if (done == FAILED) {
            PyErr_NoMemory();
            return -1;
        }
        if (done < 0) {
            PyErr_Format(PyExc_ValueError, "another key leads to slot %lld", (long long)slot);
            return -1;
        }
    }
    return 0;
}

static PyObject *slots_set(Slots *s, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer slots;
    if (!takes("set", given, 2))
        return NULL;
    Py_ssize_t count = count_keys(arguments[0]);
    if (count < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        if (chars_of(PyList_GET_ITEM(arguments[0], i)) == NULL) {
            PyErr_SetString(PyExc_ValueError, "keys have 32 bytes");
            return NULL;
        }
    if (view_items(arguments[1], &slots, &count, sizeof(int64_t), PyBUF_SIMPLE) < 0)
        return NULL;
    int failed = check_slots(s, &slots, count) < 0 || set_all(s, arguments[0], slots.buf, count) < 0;
    PyBuffer_Release(&slots);
    return none_unless(failed);
}

static PyObject *slots_find(Slots *s, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer slots;
    if (!takes("find", given, 2))
        return NULL;
    Py_ssize_t count = count_keys(arguments[0]);
    if (count < 0 || view_items(arguments[1], &slots, &count, sizeof(int64_t), PyBUF_WRITABLE) < 0)
        return NULL;
    const char *keys[GROUP];
    int64_t found[GROUP];
    Way way = BEGINNING;
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        int some = next_group(arguments[0], first, keys);
        find_slots(s, &way, keys, found, some);
        memcpy((char *)slots.buf + first * sizeof *found, found, (size_t)some * sizeof *found);
    }
    PyBuffer_Release(&slots);
    Py_RETURN_NONE;
}

static PyObject *slots_slot_of(Slots *s, PyObject *key) {
    if (!PyBytes_Check(key)) {
        PyErr_SetString(PyExc_TypeError, "a key must be bytes");
        return NULL;
    }
    const char *chars = chars_of(key);
    return PyLong_FromLongLong(chars == NULL ? NO_ROW : find_row(&s->table, print_of(chars), chars));
}

static PyObject *slots_has_none(Slots *s, PyObject *list) {
    const char *keys[GROUP];
    uint32_t prints[GROUP];
    Py_ssize_t count = count_keys(list);
    if (count < 0)
        return NULL;
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        int some = next_group(list, first, keys);
        begin_group(&s->table, keys, prints, some);
        for (int i = 0; i < some; i++)
            if (keys[i] != NULL && find_row(&s->table, prints[i], keys[i]) != NO_ROW)
                Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *slots_drop(Slots *s, PyObject *list) {
    const char *keys[GROUP];
    uint32_t prints[GROUP];
    int64_t likely[GROUP];
    Py_ssize_t count = count_keys(list);
    if (count < 0)
        return NULL;
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        int some = next_group(list, first, keys);
        begin_group_found(&s->table, s, NULL, keys, prints, likely, some);
        for (int i = 0; i < some; i++)
            if (keys[i] == NULL || !drop_slot(s, prints[i], keys[i])) {
                PyErr_SetObject(PyExc_KeyError, PyList_GET_ITEM(list, first + i));
                return NULL;
            }
    }
    Py_RETURN_NONE;
}

static PyObject *slots_items(Slots *s, PyObject *nothing) {
    PyObject *items = PyList_New(0);
    for (int64_t slot = 0; items != NULL && slot < s->slots; slot++) {
        if (!s->taken[slot])
            continue;
        const char *key = record_of(&s->table, slot);
        if (append_new(items, Py_BuildValue("y#L", key, (Py_ssize_t)KEY_BYTES, (long long)slot)) < 0)
            Py_CLEAR(items);
    }
    return items;
}

static PyObject *slots_check(Slots *s, PyObject *nothing) { return none_or_wrong(wrong_with_slots(s)); }

static Py_ssize_t slots_length(Slots *s) { return (Py_ssize_t)s->table.count; }

static PyMethodDef slots_methods[] = {
    {"set", FAST(slots_set), METH_FASTCALL, "See `slots.Slots.set`."},
    {"find", FAST(slots_find), METH_FASTCALL, "Fill the array: -1 where a key is absent."},
    {"slot_of", (PyCFunction)slots_slot_of, METH_O, "The slot of a key; -1 where it is absent."},
    {"has_none", (PyCFunction)slots_has_none, METH_O, "Whether all keys are absent."},
    {"drop", (PyCFunction)slots_drop, METH_O, "The keys become absent. KeyError at the first that was."},
    {"items", (PyCFunction)slots_items, METH_NOARGS, "Every key with its slot."},
    {"check", (PyCFunction)slots_check, METH_NOARGS, "Assert the invariants. Linear in the slots."},
    {NULL},
};

SIZED_TYPE(Slots, slots, "See `slots.h`.", NULL)

#endif
