/* The type `Ledger`: what a step of a server changes in the ledger of host memory, in one call (cache/native_ledger.py).

   The arrays are numpy's, made and described by cache/ledger.py, and lent as buffers for as long as this lives. A call
   first looks whether the case is the common one. If not it changes nothing and says so: Python does the rest. */

#ifndef STOWAGE_LEDGER_TYPE_H
#define STOWAGE_LEDGER_TYPE_H

#include "slots_type.h"

enum { STATE, MASKS, COMING, KEYS, CLASSES_OF, PARENTS, PARENT_SERIALS, SERIALS, LENT };
enum { NOT_USED = 0, RESERVED = 1, FILLING = 2, READY = 3 }; /* see slot_states.py */

static const struct {
    int bytes, more; /* of an item; items more than slots */
} LENT_SHAPES[LENT] = {{1, 0}, {8, 1}, {8, 0}, {sizeof(PyObject *), 0}, {8, 0}, {8, 0}, {8, 0}, {8, 1}};

typedef struct {
    PyObject_HEAD
    Slots *table;
    Py_buffer lent[LENT];
    uint8_t *state;
    uint64_t *masks, *coming;
    PyObject **keys;
    int64_t *class_of, *parent, *parent_serial, *serial;
    int64_t slots;
    int64_t *before; /* scratch: the slots of the chunks before those of a batch */
    Py_ssize_t room;
} Ledger;

static PyObject *ledger_new(PyTypeObject *type, PyObject *positional, PyObject *named) {
    PyObject *table, *arrays;
    static char *names[] = {"table", "arrays", NULL};
    if (!PyArg_ParseTupleAndKeywords(positional, named, "O!O!:Ledger", names, &slots_type, &table, &PyTuple_Type, &arrays))
        return NULL;
    if (PyTuple_GET_SIZE(arrays) != LENT) {
        PyErr_SetString(PyExc_ValueError, "other arrays");
        return NULL;
    }
    Ledger *l = (Ledger *)type->tp_alloc(type, 0);
    if (l == NULL)
        return NULL;
    l->table = (Slots *)Py_NewRef(table);
    l->slots = l->table->slots;
    for (int i = 0; i < LENT; i++) {
        Py_ssize_t count = (Py_ssize_t)l->slots + LENT_SHAPES[i].more;
        if (view_items(PyTuple_GET_ITEM(arrays, i), &l->lent[i], &count, LENT_SHAPES[i].bytes, PyBUF_WRITABLE) < 0) {
            l->lent[i].obj = NULL;
            Py_DECREF(l);
            return NULL;
        }
    }
    l->state = l->lent[STATE].buf, l->masks = l->lent[MASKS].buf, l->coming = l->lent[COMING].buf;
    l->keys = l->lent[KEYS].buf, l->class_of = l->lent[CLASSES_OF].buf, l->parent = l->lent[PARENTS].buf;
    l->parent_serial = l->lent[PARENT_SERIALS].buf, l->serial = l->lent[SERIALS].buf;
    return (PyObject *)l;
}

static void ledger_dealloc(Ledger *l) {
    for (int i = 0; i < LENT; i++)
        if (l->lent[i].obj != NULL)
            PyBuffer_Release(&l->lent[i]);
    Py_XDECREF(l->table);
    PyMem_Free(l->before);
    Py_TYPE(l)->tp_free((PyObject *)l);
}

static int64_t slot_after(const Ledger *l, PyObject *key) {
    const char *chars = PyBytes_Check(key) ? chars_of(key) : NULL;
    return chars == NULL ? NO_ROW : find_row(&l->table->table, print_of(chars), chars);
}

/* Whether all masks hold something, and no key is in the table; the rows of its keys are on their way to the cache. */
static int all_new(const Ledger *l, PyObject *keys, const uint64_t *masks, Py_ssize_t count) {
    const char *chars[GROUP];
    uint32_t prints[GROUP];
    for (Py_ssize_t first = 0; first < count; first += GROUP) {
        int some = next_group(keys, first, chars);
        begin_group(&l->table->table, chars, prints, some);
        for (int i = 0; i < some; i++)
            if (chars[i] == NULL || masks[first + i] == 0 || find_row(&l->table->table, prints[i], chars[i]) != NO_ROW)
                return 0;
    }
    return 1;
}

/* The keys lead to the slots, each to its own: 1. Else none does: 0, or -1 where an exception is set. */
static int map_all(Ledger *l, PyObject *keys, const int64_t *slots, Py_ssize_t count) {
    int64_t before = l->table->table.count;
    int failed = set_all(l->table, keys, (const char *)slots, count) < 0;
    if (!failed && l->table->table.count == before + count)
        return 1;
    for (Py_ssize_t i = 0; i < count; i++) { /* a key is repeated */
        const char *key = chars_of(PyList_GET_ITEM(keys, i));
        drop_slot(l->table, print_of(key), key);
    }
    return -failed;
}

/* The slots on top of the stack, for keys that are new. Whether that is the case, and they are taken. */
static int reserve(Ledger *l, PyObject *keys, const uint64_t *masks, PyObject *after, const int64_t *top, int64_t *slots,
                   Py_ssize_t count) {
    int each = PyList_Check(after);
    for (Py_ssize_t i = 0; i < count; i++) {
        slots[i] = top[-1 - i];
        if (slots[i] < 0 || slots[i] >= l->slots) {
            PyErr_SetString(PyExc_IndexError, "a free slot that is none");
            return -1;
        }
        FETCH(&l->keys[slots[i]]);
        FETCH(&l->serial[slots[i]]);
        FETCH(&l->state[slots[i]]);
        FETCH(&l->coming[slots[i]]);
        FETCH(&l->parent[slots[i]]);
        FETCH(&l->parent_serial[slots[i]]);
    }
    for (Py_ssize_t i = 0; i < count; i++)
        l->before[i] = each || i == 0 ? slot_after(l, each ? PyList_GET_ITEM(after, i) : after) : slots[i - 1];
    int mapped = map_all(l, keys, slots, count);
    if (mapped <= 0)
        return mapped;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *old = l->keys[slots[i]];
        l->keys[slots[i]] = Py_NewRef(PyList_GET_ITEM(keys, i));
        Py_XDECREF(old); /* None: the slot was free */
        l->serial[slots[i]]++;
        l->state[slots[i]] = RESERVED;
        l->coming[slots[i]] = masks[i];
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        l->parent[slots[i]] = l->before[i];
        l->parent_serial[slots[i]] = l->serial[l->before[i] < 0 ? l->slots : l->before[i]];
    }
    return 1;
}

static int make_room_before(Ledger *l, Py_ssize_t count) {
    if (count <= l->room)
        return 0;
    int64_t *more = PyMem_Realloc(l->before, (size_t)count * 2 * sizeof *more);
    if (more == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    l->before = more;
    l->room = count * 2;
    return 0;
}

/* keys, masks, after, the free slots, how many of them are, and where to write those that are taken. */
static PyObject *ledger_reserve(Ledger *l, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer masks, free, slots;
    if (!takes("reserve", given, 6))
        return NULL;
    Py_ssize_t count = count_keys(arguments[0]), stacked = -1, of_free = PyLong_AsSsize_t(arguments[4]);
    int each = PyList_Check(arguments[2]);
    if (count < 0 || (of_free == -1 && PyErr_Occurred()) || (each && count_keys(arguments[2]) < 0))
        return NULL;
    if (each && PyList_GET_SIZE(arguments[2]) != count) {
        PyErr_SetString(PyExc_ValueError, "a key before each, or before the first");
        return NULL;
    }
    if (make_room_before(l, count) < 0 || view_items(arguments[1], &masks, &count, 8, PyBUF_SIMPLE) < 0)
        return NULL;
    int done = -1;
    if (view_items(arguments[3], &free, &stacked, 8, PyBUF_SIMPLE) == 0) {
        if (view_items(arguments[5], &slots, &count, 8, PyBUF_WRITABLE) == 0) {
            if (of_free > stacked)
                PyErr_SetString(PyExc_IndexError, "more free slots than there are");
            else if (of_free < count || !all_new(l, arguments[0], masks.buf, count))
                done = 0;
            else
                done = reserve(l, arguments[0], masks.buf, arguments[2], (int64_t *)free.buf + of_free, slots.buf, count);
            PyBuffer_Release(&slots);
        }
        PyBuffer_Release(&free);
    }
    PyBuffer_Release(&masks);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

/* Whether all slots are on their way, and of one class. */
static int can_commit(const Ledger *l, const int64_t *slots, Py_ssize_t count) {
    if (check_range(l->table, slots, count) < 0)
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        FETCH(&l->state[slots[i]]);
    for (Py_ssize_t i = 0; i < count; i++) {
        uint8_t state = l->state[slots[i]];
        if ((state != RESERVED && state != FILLING) || l->class_of[slots[i]] != l->class_of[slots[0]])
            return 0;
    }
    return count > 0;
}

/* They are ready; the last one comes first in `order`. The keys in that order. */
static PyObject *commit(Ledger *l, const int64_t *slots, int64_t *order, int64_t *parents, Py_ssize_t count) {
    PyObject *keys = PyList_New(count);
    for (Py_ssize_t i = 0; keys != NULL && i < count; i++) {
        int64_t slot = slots[i], parent = l->parent[slot];
        int known = parent >= 0 && parent < l->slots && l->serial[parent] == l->parent_serial[slot];
        l->masks[slot] = l->coming[slot];
        l->state[slot] = READY;
        order[count - 1 - i] = slot;
        parents[count - 1 - i] = known ? parent : NO_ROW;
        PyList_SET_ITEM(keys, count - 1 - i, Py_NewRef(l->keys[slot]));
    }
    return keys;
}

static PyObject *ledger_commit(Ledger *l, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer slots, order, parents;
    Py_ssize_t count = -1;
    if (!takes("commit", given, 3) || view_items(arguments[0], &slots, &count, 8, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *keys = NULL;
    if (view_items(arguments[1], &order, &count, 8, PyBUF_WRITABLE) == 0) {
        if (view_items(arguments[2], &parents, &count, 8, PyBUF_WRITABLE) == 0) {
            int can = can_commit(l, slots.buf, count);
            if (can >= 0)
                keys = can ? commit(l, slots.buf, order.buf, parents.buf, count) : Py_NewRef(Py_None);
            PyBuffer_Release(&parents);
        }
        PyBuffer_Release(&order);
    }
    PyBuffer_Release(&slots);
    return keys;
}

static PyObject *ledger_all_new(Ledger *l, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer masks;
    if (!takes("all_new", given, 2))
        return NULL;
    Py_ssize_t count = count_keys(arguments[0]);
    if (count < 0 || view_items(arguments[1], &masks, &count, 8, PyBUF_SIMPLE) < 0)
        return NULL;
    int are = all_new(l, arguments[0], masks.buf, count);
    PyBuffer_Release(&masks);
    return PyBool_FromLong(are);
}

/* Ready slots become free, below those that are: the first of them is taken first. How many are free; -1: an error. */
static int64_t evict(Ledger *l, const int64_t *slots, Py_ssize_t count, int64_t *free, Py_ssize_t of_free) {
    for (Py_ssize_t i = 0; i < count; i++)
        FETCH(l->keys[slots[i]]);
    memmove(free + count, free, (size_t)of_free * sizeof *free);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = l->keys[slots[i]];
        const char *chars = PyBytes_Check(key) ? chars_of(key) : NULL;
        if (chars == NULL || !drop_slot(l->table, print_of(chars), chars)) {
            PyErr_SetObject(PyExc_KeyError, key);
            return -1;
        }
        l->keys[slots[i]] = Py_NewRef(Py_None);
        Py_DECREF(key);
        l->masks[slots[i]] = 0;
        l->state[slots[i]] = NOT_USED;
        free[count - 1 - i] = slots[i];
    }
    return of_free + count;
}

static PyObject *ledger_evict(Ledger *l, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer slots, free;
    Py_ssize_t count = -1, room = -1;
    if (!takes("evict", given, 3))
        return NULL;
    Py_ssize_t of_free = PyLong_AsSsize_t(arguments[2]);
    if ((of_free == -1 && PyErr_Occurred()) || view_items(arguments[0], &slots, &count, 8, PyBUF_SIMPLE) < 0)
        return NULL;
    int64_t free_now = -1;
    if (view_items(arguments[1], &free, &room, 8, PyBUF_WRITABLE) == 0) {
        if (of_free < 0 || of_free > room - count)
            PyErr_SetString(PyExc_IndexError, "more free slots than there are");
        else if (check_range(l->table, slots.buf, count) == 0)
            free_now = evict(l, slots.buf, count, free.buf, of_free);
        PyBuffer_Release(&free);
    }
    PyBuffer_Release(&slots);
    return free_now < 0 ? NULL : PyLong_FromLongLong(free_now);
}

static PyMethodDef ledger_methods[] = {
    {"reserve", FAST(ledger_reserve), METH_FASTCALL, "Take slots for keys that are all new. Whether they were."},
    {"all_new", FAST(ledger_all_new), METH_FASTCALL, "Whether no key is there, and no mask is empty."},
    {"evict", FAST(ledger_evict), METH_FASTCALL, "Ready slots of a policy's become free. How many are."},
    {"commit", FAST(ledger_commit), METH_FASTCALL, "Slots of one class become ready. Their keys, the last one first; or None."},
    {NULL},
};

static PyTypeObject ledger_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "stowage.native._native.Ledger",
    .tp_doc = "See `cache/native_ledger.py`.",
    .tp_basicsize = sizeof(Ledger),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = ledger_new,
    .tp_dealloc = (destructor)ledger_dealloc,
    .tp_methods = ledger_methods,
};

#endif
