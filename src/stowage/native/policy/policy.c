/* The Python type of the eviction policy: reads arguments, calls the kernel, returns arrays. See kernel.h. */

#include "order.h"

/* Arguments. */

/* Grows the scratch space to so many slots; its content is lost. */
static int make_room(Kernel *k, Py_ssize_t count) {
    if (count <= k->room)
        return 0;
    if (count > PY_SSIZE_T_MAX / 32) {
        PyErr_NoMemory();
        return -1;
    }
    k->room = 2 * count;
    PyMem_Free(k->some);
    k->some = PyMem_Malloc(k->room * (2 * sizeof *k->some + sizeof *k->prints));
    if (k->some == NULL) {
        k->room = 0;
        PyErr_NoMemory();
        return -1;
    }
    k->other = k->some + k->room;
    k->prints = (uint64_t *)(k->other + k->room);
    return 0;
}

/* Gets a buffer of int64; returns 0, and the caller releases it, or -1. No Python code runs for it afterwards. */
static int view_slots(PyObject *array, Py_buffer *view, int flags) {
    if (PyObject_GetBuffer(array, view, flags | PyBUF_FORMAT) < 0)
        return -1;
    const char *format = view->format != NULL ? view->format : "B";
    if (view->ndim == 1 && view->itemsize == 8 && (strcmp(format, "l") == 0 || strcmp(format, "q") == 0))
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "slots must be an array of int64 of one dimension");
    return -1;
}

/* Copies the numbers. Returns -1, with an IndexError, if one is not in [least, slots). */
static int copy_slots(Kernel *k, const Py_buffer *view, int64_t least, int64_t *copied) {
    const char *at = view->buf;
    for (Py_ssize_t i = 0; i < view->shape[0]; i++, at += view->strides[0]) {
        memcpy(&copied[i], at, sizeof *copied);
        if (copied[i] < least || copied[i] >= k->slots) {
            PyErr_Format(PyExc_IndexError, "slot %lld of %lld", (long long)copied[i], (long long)k->slots);
            return -1;
        }
    }
    return 0;
}

/* Copies an argument's slots to `some`. Returns how many; -1: an error. */
static Py_ssize_t read_slots(Kernel *k, PyObject *array) {
    Py_buffer view;
    if (view_slots(array, &view, PyBUF_STRIDED_RO) < 0)
        return -1;
    Py_ssize_t count = view.shape[0];
    if (make_room(k, count) < 0 || copy_slots(k, &view, 0, k->some) < 0)
        count = -1;
    PyBuffer_Release(&view);
    return count;
}

static int as_many(const char *what, Py_ssize_t given, Py_ssize_t slots) {
    if (given != slots)
        PyErr_Format(PyExc_ValueError, "as many %s as slots", what);
    return given == slots;
}

static int copy_prints(Kernel *k, PyObject *keys, Py_ssize_t count) {
    Py_ssize_t given = count_keys(keys);
    if (given < 0 || !as_many("keys", given, count))
        return -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = PyList_GET_ITEM(keys, i);
        k->prints[i] = fingerprint(PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key));
    }
    return 0;
}

/* Methods. */

static PyObject *kernel_admit(Kernel *k, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer slots = {0}, parents = {0};
    int good = takes("admit", given, 3) && view_slots(arguments[0], &slots, PyBUF_STRIDED_RO) == 0 &&
               view_slots(arguments[2], &parents, PyBUF_STRIDED_RO) == 0 &&
               as_many("parents", parents.shape[0], slots.shape[0]);
    if (good) {
        Py_ssize_t count = slots.shape[0];
        good = make_room(k, count) == 0 && copy_slots(k, &slots, 0, k->some) == 0 &&
               copy_slots(k, &parents, -1, k->other) == 0 && copy_prints(k, arguments[1], count) == 0;
        if (good)
            admit_all(k, count);
    }
    PyBuffer_Release(&parents);
    PyBuffer_Release(&slots);
    return none_unless(!good);
}

static PyObject *kernel_insert(Kernel *k, PyObject *const *arguments, Py_ssize_t given) {
    if (!takes("insert", given, 2))
        return NULL;
    int used = PyObject_IsTrue(arguments[1]);
    Py_ssize_t count = used < 0 ? -1 : read_slots(k, arguments[0]);
    if (count < 0)
        return NULL;
    if (used)
        use_all(k, count);
    append(k, k->some, count);
    Py_RETURN_NONE;
}

static PyObject *kernel_remove(Kernel *k, PyObject *slots) {
    Py_ssize_t count = read_slots(k, slots);
    if (count < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        take_out(k, (int32_t)k->some[i]);
    Py_RETURN_NONE;
}

static PyObject *kernel_victims(Kernel *k, PyObject *array) {
    Py_buffer view;
    if (view_slots(array, &view, PyBUF_WRITABLE | PyBUF_ND) < 0)
        return NULL;
    Py_ssize_t count = view.shape[0] < k->length ? view.shape[0] : (Py_ssize_t)k->length;
    int failed = make_room(k, count);
    if (!failed) {
        take_victims(k, k->some, count);
        remember(k, k->some, count);
        memcpy(view.buf, k->some, (size_t)count * sizeof *k->some);
    }
    PyBuffer_Release(&view);
    return failed ? NULL : PyLong_FromSsize_t(count);
}

static PyObject *slots_after(Kernel *k, const int32_t *next, int32_t first) {
    PyObject *slots = PyList_New(0);
    for (int32_t slot = first; slots != NULL && slot != NONE; slot = next[slot])
        if (append_new(slots, PyLong_FromLong(slot)) < 0)
            Py_CLEAR(slots);
    return slots;
}

static PyObject *kernel_runs(Kernel *k, PyObject *nothing) {
    PyObject *runs = PyList_New(0);
    for (int of_class = 0; of_class < CLASSES; of_class++)
        for (int32_t number = k->first_run[of_class]; runs != NULL && number != NONE; number = k->runs[number].after) {
            PyObject *slots = slots_after(k, k->after, k->runs[number].slots.first);
            long long time = k->runs[number].time;
            if (append_new(runs, slots == NULL ? NULL : Py_BuildValue("iLN", of_class, time, slots)) < 0)
                Py_CLEAR(runs);
        }
    return runs;
}

static PyObject *kernel_held(Kernel *k, PyObject *nothing) { return slots_after(k, k->before, k->held.last); }

static PyObject *kernel_due(Kernel *k, PyObject *nothing) { return slots_after(k, k->due_before, k->due.last); }

static Py_ssize_t kernel_length(Kernel *k) { return (Py_ssize_t)k->length; }

static PyObject *module_best_rates(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    Py_buffer hazard, rates;
    if (!takes("best_rates", given, 2) || PyObject_GetBuffer(arguments[0], &hazard, PyBUF_ND | PyBUF_FORMAT) < 0)
        return NULL;
    if (PyObject_GetBuffer(arguments[1], &rates, PyBUF_WRITABLE | PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyBuffer_Release(&hazard);
        return NULL;
    }
    int good = strcmp(hazard.format, "d") == 0 && strcmp(rates.format, "d") == 0 && hazard.len == rates.len &&
               hazard.len % (AGES * sizeof(double)) == 0;
    if (good)
        for (Py_ssize_t at = 0; at < hazard.len / (Py_ssize_t)sizeof(double); at += AGES)
            best_rates((const double *)hazard.buf + at, (double *)rates.buf + at);
    else
        PyErr_SetString(PyExc_ValueError, "hazards and rates must be float64, and alike");
    PyBuffer_Release(&rates);
    PyBuffer_Release(&hazard);
    return none_unless(!good);
}

static PyMethodDef functions[] = {
    {"best_rates", FAST(module_best_rates), METH_FASTCALL, "For arrays of float64, a row of ages per class."},
    {NULL},
};

/* Making and ending. */

static int lend(Kernel *k, PyObject *arrays, int number) {
    static const struct {
        const char *name;
        Py_ssize_t bytes;
        size_t field;
        int length;
    } shapes[] = {
#define OF(TYPE, field, name, length) {name, sizeof(TYPE), offsetof(Kernel, field), length},
        LENT(OF)
#undef OF
    };
    Py_buffer *view = &k->lent[number];
    if (PyObject_GetBuffer(PyTuple_GET_ITEM(arrays, number), view, PyBUF_CONTIG) < 0)
        return -1;
    int64_t lengths[] = {k->slots, k->slots + 1, k->rows * WAYS, CLASSES * AGES, CLASSES * EPOCHS};
    if (view->itemsize != shapes[number].bytes || view->len / view->itemsize != lengths[shapes[number].length]) {
        PyErr_Format(PyExc_ValueError, "the array `%s` is not as long, or as wide, as it must be", shapes[number].name);
        return -1;
    }
    memcpy((char *)k + shapes[number].field, &view->buf, sizeof view->buf);
    return 0;
}

static int make_order(Kernel *k) {
    size_t slots = (size_t)k->slots + 1;
    k->runs = PyMem_Malloc(slots * (sizeof *k->runs + sizeof *k->mark + 5 * sizeof *k->before));
    if (k->runs == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    k->mark = (int64_t *)(k->runs + slots);
    k->before = (int32_t *)(k->mark + slots);
    k->after = k->before + slots;
    k->run_of = k->after + slots;
    k->due_before = k->run_of + slots;
    k->due_after = k->due_before + slots;
    for (size_t i = 0; i < slots; i++) {
        k->mark[i] = 0;
        k->run_of[i] = OUT;
        k->before[i] = k->after[i] = k->due_after[i] = NONE;
        k->due_before[i] = HELD;
        k->runs[i] = (Run){0, {NONE, NONE}, NONE, i + 1 < slots ? (int32_t)(i + 1) : NONE, 0};
    }
    k->unused = 0;
    k->held = k->due = (List){NONE, NONE};
    for (int of_class = 0; of_class < CLASSES; of_class++)
        k->first_run[of_class] = k->last_run[of_class] = k->open_run[of_class] = NONE;
    return make_room(k, 64);
}

static PyObject *kernel_new(PyTypeObject *type, PyObject *positional, PyObject *named) {
    PyObject *arrays;
    long long slots, rows, width;
    static char *names[] = {"arrays", "slots", "rows", "width", NULL};
    if (!PyArg_ParseTupleAndKeywords(positional, named, "O!LLL", names, &PyTuple_Type, &arrays, &slots, &rows, &width))
        return NULL;
    if (PyTuple_GET_SIZE(arrays) != ARRAYS || slots < 0 || slots >= INT32_MAX - 1 || rows < 1 || (rows & (rows - 1)) ||
        rows > INT64_MAX / 1024 || width < 1) {
        PyErr_SetString(PyExc_ValueError, "other arrays, or numbers out of range");
        return NULL;
    }
    Kernel *k = (Kernel *)type->tp_alloc(type, 0);
    if (k == NULL)
        return NULL;
    k->slots = slots;
    k->rows = rows;
    k->width = width;
    int failed = 0;
    for (int number = 0; !failed && number < ARRAYS; number++)
        failed = lend(k, arrays, number);
    if (failed || make_order(k) < 0)
        Py_CLEAR(k);
    return (PyObject *)k;
}

static void kernel_dealloc(Kernel *k) {
    for (int number = 0; number < ARRAYS; number++)
        PyBuffer_Release(&k->lent[number]);
    PyMem_Free(k->runs);
    PyMem_Free(k->some);
    Py_TYPE(k)->tp_free(k);
}

static PyMethodDef kernel_methods[] = {
    {"admit", FAST(kernel_admit), METH_FASTCALL, "New chunks; see `Policy.admit`."},
    {"insert", FAST(kernel_insert), METH_FASTCALL, "Evictable again; see `Policy.insert`."},
    {"remove", (PyCFunction)kernel_remove, METH_O, "Not evictable any more; see `Policy.remove`."},
    {"victims", (PyCFunction)kernel_victims, METH_O, "Fill the array with slots that leave. How many there were."},
    {"runs", (PyCFunction)kernel_runs, METH_NOARGS, "Every run of every class: (class, time, slots)."},
    {"held", (PyCFunction)kernel_held, METH_NOARGS, "The slots that are held back, the last one held first."},
    {"due", (PyCFunction)kernel_due, METH_NOARGS, "Those that are held back and not needed any more, the last one first."},
    {NULL},
};

static PyMemberDef members[] = {
    {"clock", T_LONGLONG, offsetof(Kernel, clock), READONLY, "Uses so far."},
    {"epoch", T_LONGLONG, offsetof(Kernel, epoch), READONLY, "The epoch of the last use."},
    {NULL},
};

SIZED_TYPE(Kernel, kernel, "See native.py, which makes the arrays.", members)

int add_policy(PyObject *module) {
    for (int age = 0; age < AGES; age++)
        widths[age] = exp2((age + 1) / 2.0) - exp2(age / 2.0);
    return -(PyModule_AddFunctions(module, functions) < 0 || PyModule_AddType(module, &kernel_type) < 0);
}
