/* What every source of the extension needs of Python: arguments that are checked once, in one way.

   A source has one function, `add_...`, that puts what it offers into the module; module.c calls them. */

#ifndef STOWAGE_BINDING_H
#define STOWAGE_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#define BYTES_ALONE (32 << 10) /* fewer bytes are worked on before another thread could have the interpreter's lock */

#define FAST(function) ((PyCFunction)(void (*)(void))(function)) /* a method that takes its arguments as an array */

int add_policy(PyObject *module);
int add_tables(PyObject *module);
int add_checksums(PyObject *module);
int add_copies(PyObject *module);
int add_kernels(PyObject *module);

/* Whether a call has as many arguments as its method takes. */
static inline int takes(const char *method, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted)
        return 1;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments", method, wanted);
    return 0;
}

/* The number of keys; -1: not a list of bytes. */
static inline Py_ssize_t count_keys(PyObject *keys) {
    if (!PyList_Check(keys)) {
        PyErr_SetString(PyExc_TypeError, "keys must be a list");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++)
        if (!PyBytes_Check(PyList_GET_ITEM(keys, i))) {
            PyErr_SetString(PyExc_TypeError, "keys must be bytes");
            return -1;
        }
    return PyList_GET_SIZE(keys);
}

/* An address, which Python has as a number. */
static inline void *address(long long number) { return (void *)(intptr_t)number; }

#endif
