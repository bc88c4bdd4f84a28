/* What every source of the extension needs of Python: arguments that are checked once, in one way.

   A source has one function, `add_...`, that puts what it offers into the module; module.c calls them. */

#ifndef STOWAGE_BINDING_H
#define STOWAGE_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#define BYTES_ALONE (32 << 10) /* fewer bytes are worked on before another thread could have the interpreter's lock */

#define ALWAYS __attribute__((always_inline))
#define FETCH(address) __builtin_prefetch(address)

enum { KEY_BYTES = 32 };

#define FAST(function) ((PyCFunction)(void (*)(void))(function)) /* a method that takes its arguments as an array */

/* A type that has a length; what is its own begins with `prefix`. */
#define SIZED_TYPE(Struct, prefix, doc, members)                                                                       \
    static PySequenceMethods prefix##_sequence = {.sq_length = (lenfunc)prefix##_length};                              \
    static PyTypeObject prefix##_type = {                                                                              \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "stowage.native._native." #Struct, .tp_doc = doc,                     \
        .tp_basicsize = sizeof(Struct), .tp_flags = Py_TPFLAGS_DEFAULT, .tp_new = prefix##_new,                        \
        .tp_dealloc = (destructor)prefix##_dealloc, .tp_methods = prefix##_methods, .tp_members = members,             \
        .tp_as_sequence = &prefix##_sequence};

int add_policy(PyObject *module);
int add_tables(PyObject *module);
int add_checksums(PyObject *module);
int add_copies(PyObject *module);
int add_caches(PyObject *module);
int add_gather(PyObject *module);
int add_kernels(PyObject *module);
int add_lossless(PyObject *module);
int add_words(PyObject *module);

/* Whether a call has as many arguments as its method takes. */
static inline int takes(const char *method, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments", method, wanted);
    return 0;
}

/* Whether an argument is a list. */
static inline int is_list(const char *name, PyObject *argument) {
    if (PyList_Check(argument))
        return 1;
    PyErr_Format(PyExc_TypeError, "%s must be a list", name);
    return 0;
}

/* The number of keys; -1: not a list of bytes. */
static inline Py_ssize_t count_keys(PyObject *keys) {
    if (!is_list("keys", keys))
        return -1;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++)
        if (!PyBytes_Check(PyList_GET_ITEM(keys, i))) {
            PyErr_SetString(PyExc_TypeError, "keys must be bytes");
            return -1;
        }
    return PyList_GET_SIZE(keys);
}

/* None, or NULL where an exception has been set. */
static inline PyObject *none_unless(int failed) { return failed ? NULL : Py_NewRef(Py_None); }

/* Appends what was made for it, or could not be. */
static inline int append_new(PyObject *list, PyObject *item) {
    int failed = item == NULL || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return -failed;
}

/* An address, which Python has as a number. `read_address` is for the format O&. */
static inline void *address(int64_t number) { return (void *)(intptr_t)number; }

static inline int read_address(PyObject *number, void *to) {
    *(void **)to = PyLong_AsVoidPtr(number);
    return *(void **)to != NULL || !PyErr_Occurred();
}

/* So many of Python's numbers. */
static inline int read_numbers(PyObject *const *from, Py_ssize_t count, int64_t *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyLong_AsLongLong(from[i]);
        if (to[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

_Static_assert(sizeof(Py_ssize_t) == sizeof(int64_t), "the format n reads an int64_t");

#endif
